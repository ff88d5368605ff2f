"""What nodes answer, and what the driver makes of it: other versions, missing files, lost workers, little memory."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import raises
from helpers import bf16, gaussian, write_checkpoint
from tasks_here import RayError, RayHere, use_tasks_here

import pqweights
from pqweights import __version__
from pqweights.convert.distributed import engine, worker
from pqweights.convert.distributed.worker import LOOK, MAKE, VERSIONS, ShardWork, remote_call
from pqweights.errors import ClusterError, SourceError

NAME = "node host (1.2.3.4, abcdefgh): "


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayHere:
    monkeypatch.setattr(worker, "APPEAR_SECONDS", 0.2)
    return use_tasks_here(monkeypatch)


@pytest.fixture
def run(ray: RayHere, tmp_path: Path) -> Callable[[], object]:
    """A run in tasks."""
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": bf16(gaussian(64, 128))})
    return lambda: pqweights.quantize(source, tmp_path / "out", ray="here")


def work(**needs: Any) -> bytes:
    run = SimpleNamespace(store=SimpleNamespace(work=Path("/out/.pqweights")))
    defaults = {"out": "/out", "plan": None, "run": run, "groups": (), "threads": 1, "files": ()}
    defaults |= {"shared": None, "room": 0}
    return pickle.dumps(ShardWork(**(defaults | needs)))


def problem(pickled: bytes, tasks_at_once: int = 1) -> Any:
    return worker.answer(LOOK, pickled, tasks_at_once)


def test_other_versions_name_the_remedy(ray: RayHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent before versions are compared needs no package: a reference to one could not be read without it."""
    assert all(type(version) is str for version in VERSIONS) and remote_call().__closure__ is None
    assert remote_call()(VERSIONS, LOOK, work(), 1)[1] is None
    remedy = "run pip install 'pqweights==0.0' there"
    for versions in (("0.0", VERSIONS[1]), ("0.0", "another")):
        assert remote_call()(versions, LOOK, b"", 1)[1] == f"has pqweights {__version__}, the driver has 0.0; {remedy}"
    assert "pip install" in str(remote_call()((VERSIONS[0], "another"), LOOK, b"", 1)[1])
    monkeypatch.setitem(sys.modules, "pqweights", None)
    said, remedy = str(remote_call()(VERSIONS, LOOK, b"", 1)[1]), f"; run pip install 'pqweights=={__version__}' there"
    assert said.startswith("has no pqweights (") and said.endswith(remedy)


def test_folders_and_files_that_a_node_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "APPEAR_SECONDS", 0.2)
    assert problem(work(shared=tmp_path / "out/.pqweights/seen-1"))
    source = tmp_path / "model.safetensors"
    for data in (None, b"1234"):
        if data is not None:
            source.write_bytes(data)
        assert problem(work(files=((source, 5),))).startswith(f"does not see {source} ")
    scratch = SimpleNamespace(store=SimpleNamespace(work=tmp_path / "result"))
    assert problem(work(files=((source, 4),), run=scratch, room=1)) is None
    said = problem(work(run=scratch, room=1 << 59), 2)
    assert str(tmp_path) in said and str(1 << 60) in said
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: (tmp_path / "late").touch())
    assert problem(work(shared=tmp_path / "late")) is None


def test_relative_paths_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "APPEAR_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    Path("seen").touch()
    pickled, gone = (work(shared=Path("seen"), folder=folder) for folder in (tmp_path, tmp_path / "gone"))
    monkeypatch.chdir("/")
    assert "does not see what the driver writes" in problem(gone)
    assert problem(pickled) is None


@pytest.mark.parametrize(
    ("error", "refused", "named"),
    [
        (SourceError("tensor 'a': contains NaN"), SourceError, "tensor 'a': contains NaN"),
        (OSError(116, "Stale file handle", "/shared/model"), ClusterError, f"{NAME}/shared/model"),
        (ModuleNotFoundError("No module named 'gguf'"), ClusterError, "gguf"),
        (ClusterError("has no room"), ClusterError, f"{NAME}has no room"),
    ],
)
def test_errors_of_nodes_are_those_of_the_command(
    error: Exception, refused: type[Exception], named: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(worker.ShardWork, "make", fail)
    with raises(refused, named) as caught:
        run()
    assert str(caught.value).startswith(NAME if refused is ClusterError else named)


@pytest.mark.parametrize("asked", [LOOK, MAKE])
def test_problems_of_a_node_name_it(asked: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins when the others were asked is asked by its first task."""
    answer = worker.answer
    monkeypatch.setattr(worker, "answer", lambda *given: "lacks this" if given[0] == asked else answer(*given))
    with raises(ClusterError, NAME, "lacks this"):
        run()


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (RayError("the\n  worker died \n\n"), "(worker died)"),
        (RayError(), "(RayError)"),
        (RayHere.exceptions.OutOfMemoryError("..."), "memory"),
    ],
)
def test_a_task_whose_workers_are_all_lost_ends_the_run(
    lost: RayError, named: str, ray: RayHere, run: Any, tmp_path: Path
) -> None:
    ray.lost = lost
    with raises(ClusterError, 5, named):
        run()
    ray.lost = None
    run()
    assert (tmp_path / "out/pqweights.json").exists()


@pytest.mark.parametrize("resources", [{"CPU": 2, "memory": 1000}, {"CPU": 1.0}])
def test_nodes_without_memory_take_no_task(
    resources: dict[str, float], ray: RayHere, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.resources = resources
    with raises(ClusterError, "1 cores"):
        run()
    assert "node host (1.2.3.4, abcdefgh): is not used" in capsys.readouterr().out


def test_nodes_that_answer_late_or_are_lost(ray: RayHere, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray, "wait", lambda calls, **options: ([], calls))
        with raises(ClusterError, NAME, "60 s"):
            run()
    get = ray.get
    for error, refused in ((RayError("crashed"), True), (ray.exceptions.NodeDiedError(), False)):

        def fail_once(call: Any, error: Exception = error) -> Any:
            monkeypatch.setattr(ray, "get", get)
            raise error

        monkeypatch.setattr(ray, "get", fail_once)
        if refused:
            with raises(ClusterError, NAME, "crashed"):
                run()
        else:
            run()


def test_a_run_that_no_node_is_left_for_ends(ray: RayHere, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = ray.wait

    def wait_in_vain(calls: list[Any], *, num_returns: int, timeout: float) -> Any:
        if timeout != engine.POLL_SECONDS:
            return wait(calls, num_returns=num_returns, timeout=timeout)
        patch.setattr(ray, "nodes", list)
        return [], calls

    with monkeypatch.context() as patch:
        patch.setattr(engine, "NODELESS_SECONDS", 0.01)
        patch.setattr(ray, "wait", wait_in_vain)
        with raises(ClusterError, "1 threads"):
            run()
    run()
