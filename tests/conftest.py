"""The environment of every run: a cache of its own, and one torch thread a process, or more that sleep as they wait."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import typer.testing
from helpers import narrow_layers_packed, run_command, small_checkpoint
from httpx2._transports import default as transports
from pqweights_cli import output
from shared import skip_flushes
from slow import is_slow

TESTS = Path(__file__).parent
FAST = "not slow"  # as make test-fast asks
pytest_plugins = ["ray_cluster", "remote_server"]
BYTES_PER_WORKER = 2 << 30  # torch, transformers and their models; most workers need less

# Workers, and the processes that tests start, share the cores; on tiny products, more threads only wait for each other.
# A calibration takes one for each core, and those of torch spin as they wait: it took five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what the library remembers in one folder, for all workers and the processes that they start."""
    os.environ.setdefault("PQWEIGHTS_CACHE", str(config.cache.mkdir("pqweights")))
    if config.option.markexpr == FAST:  # `make test-fast` does not install it
        sys.modules["llama_cpp"] = None  # type: ignore[assignment]
    skip_flushes()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules of which `-m "not slow"` would leave out every test: they import the largest packages."""
    slow = collection_path.is_relative_to(TESTS) and is_slow(collection_path.relative_to(TESTS).as_posix())
    return True if slow and config.option.markexpr == FAST else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that slow.py lists, one by one or as a module."""
    for item in items:
        if is_slow(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Search for garbage less often, and not in what imported modules hold: a third of a second, again and again."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of workers for `-n auto`: one for each core that this process may use, as far as the memory goes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_WORKER))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in two shards."""
    return small_checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def master(source: Path) -> Path:
    """Its master."""
    run_command({"quantize": str(source)}, source.with_name("master"))
    return source.with_name("master")


@pytest.fixture(scope="module", name="narrow_layers_packed")
def _narrow_layers_packed() -> Iterator[None]:
    """Layers that are narrower than packing pays for stay packed."""
    with narrow_layers_packed():
        yield


@pytest.fixture(scope="session", autouse=True)
def made_once_in_a_process() -> Iterator[None]:
    """Build what libraries build for every call once: it takes longer than most tests.

    Typer's runner builds the tree of commands; an HTTP client reads all root certificates, also for http. On a busy
    machine any step is a slow one, and a line about it would come before the one that a test expects.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "STATUS_SECONDS", 3600.0)
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command), raising=False)
        patch.setattr(transports, "create_ssl_context", functools.cache(transports.create_ssl_context), raising=False)
        yield
