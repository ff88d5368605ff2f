"""What nodes answer when they are called, in this process: other versions, missing packages, folders and files."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pqweights import __version__
from pqweights.errors import ClusterError, SourceError
from pqweights.rewrite.distributed import worker
from pqweights.rewrite.distributed.calls import greeting, remote_call
from pqweights.rewrite.distributed.worker import NodeNeeds, TaskFailure, problem_here

NODE = "the node"


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: NODE)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(worker, "APPEAR_SECONDS", 0.2)


def called(asked: NodeNeeds | None = None, **changes: Any) -> str | None:
    """Call the node for nothing but what it asks of itself."""
    python, version, same_bytes_since, needs = greeting(asked or NodeNeeds(files=()))
    said = {"python": python, "version": version, "same": same_bytes_since} | changes
    node, problem = remote_call()((*said.values(), needs), None, b"", b"", 0, None)
    assert node == NODE
    return problem


def test_a_node_like_the_driver_has_no_problem() -> None:
    assert called() is None


def test_other_versions_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    assert called(python="3.9") == f"has Python {here}, the driver has 3.9; use the same on all nodes"
    remedy = "run pip install 'pqweights==0.0' there"
    assert called(version="0.0") == f"has pqweights {__version__}, the driver has 0.0; {remedy}"
    assert str(called(same="another")).startswith(f"has pqweights {__version__}, the driver has {__version__}; run pip")
    asked = greeting(NodeNeeds(files=()))
    monkeypatch.setitem(sys.modules, "pqweights", None)
    _, problem = remote_call()(asked, None, b"", b"", 0, None)
    assert problem.startswith("has no pqweights (")
    assert problem.endswith(f"; run pip install 'pqweights=={__version__}' there")


def test_what_is_sent_before_versions_are_compared_needs_no_package() -> None:
    """What is pickled by reference to a package cannot be read where the package is not."""
    assert all(type(each) in (str, bytes) for each in greeting(NodeNeeds(files=())))
    assert remote_call().__closure__ is None


def test_folders_and_files_that_a_node_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "out" / ".pqweights" / "run-1"
    path.parent.mkdir(parents=True)
    assert str(called(NodeNeeds(files=(), shared=path))).startswith(
        f"does not see what the driver writes into {tmp_path / 'out'}; choose"
    )
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"12345")
    for size in (4, 6):
        assert str(called(NodeNeeds(files=((source, size),)))).startswith(f"does not see {source} as the driver")
    assert called(NodeNeeds(files=((source, 5),), scratch=tmp_path, room=1)) is None
    problem = str(called(NodeNeeds(files=(), scratch=tmp_path, room=1 << 60)))
    assert f"bytes free in {tmp_path}, but its parts may need {1 << 60}; free some space, set" in problem


def test_a_file_that_appears_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run-2"
    monkeypatch.setattr(worker, "APPEAR_SECONDS", 60.0)
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: path.touch())
    assert problem_here(pickle.dumps(NodeNeeds(files=(), shared=path))) is None


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SourceError("tensor 'a': contains NaN"), SourceError("tensor 'a': contains NaN")),
        (OSError(116, "Stale file handle", "/shared/model"), ClusterError("/shared/model: Stale file handle")),
        (ModuleNotFoundError("No module named 'gguf'"), ClusterError("lacks a Python module that the run needs")),
    ],
)
def test_errors_of_workers_are_those_of_the_driver(
    error: Exception, shown: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(worker, "_made", fail)
    failure: Any = worker.run_shard(pickle.dumps(None), None, None)  # type: ignore[arg-type]
    assert isinstance(failure, TaskFailure)
    assert type(failure.error) is type(shown)
    assert str(failure.error).startswith(str(shown))
