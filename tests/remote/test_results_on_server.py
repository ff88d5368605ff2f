"""Results written to a server of S3 that fails now and then, refuses, or goes away."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from helpers import folder_bytes, run_command
from remote_server import BUCKET, CUT, LOST, SECRETS, ObjectServer

from pqweights.errors import StorageError
from pqweights.storage import bucket

OUT = f"s3://{BUCKET}/out"


@pytest.fixture(scope="module")
def files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The local result."""
    out = tmp_path_factory.mktemp("local") / "out"
    run_command(command(source), out)
    return {name: data for name, data in folder_bytes(out).items() if not name.endswith("/")}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def command(source: Path, **options: Any) -> dict[str, Any]:
    return {"quantize": str(source), "max_shard_bytes": 20_000, **options}


@pytest.mark.parametrize("fault", [(503, "SlowDown"), CUT, LOST], ids=str)
def test_objects_are_the_files_of_the_local_result_despite_faults(
    fault: Any, server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path
) -> None:
    """The first request of each kind fails, or is cut, before the server carries it out or afterwards."""
    seen: Counter[str] = Counter()

    def fail(request: dict[str, Any]) -> Any:
        key = f"{request['REQUEST_METHOD']} {request['PATH_INFO']}"
        seen[key] += 1
        return fault if seen[key] == 1 else None

    server.fault = fail
    run_command(command(source), OUT)
    assert min(seen.values()) > 1
    assert server.contents("out") == files
    assert run_command(command(source), OUT).already_done
    assert folder_bytes(scratch) == {}


def test_requests_that_get_no_reply_in_time_are_sent_again(
    server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eighth request waits for longer than a client does, and is then carried out all the same."""
    monkeypatch.setattr(bucket, "READ_SECONDS", 0.2)
    slow = []

    def wait(request: dict[str, Any]) -> None:
        if len(server.log) % 8 == 4:
            slow.append(request["REQUEST_METHOD"])
            time.sleep(0.4)

    server.fault = wait
    run_command(command(source), OUT)
    assert {"PUT", "HEAD"} <= set(slow)
    assert server.contents("out") == files


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_missing_permission_is_found_before_the_work(
    method: str, server: ObjectServer, source: Path, scratch: Path
) -> None:
    server.fault = lambda request: (403, "AccessDenied") if request["REQUEST_METHOD"] == method else None
    with raises(StorageError, "AccessDenied") as raised:
        run_command(command(source), OUT)
    assert not any(secret in str(raised.value) for secret in SECRETS)
    assert not any("model-" in line for line in server.log) and folder_bytes(scratch) == {}


@pytest.mark.parametrize("number", [2, 12, 27])
def test_run_that_loses_the_storage_is_continued(
    number: int, server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path
) -> None:
    """From some change on, every request is refused."""
    changes = []

    def lose(request: dict[str, Any]) -> tuple[int, str] | None:
        if request["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            changes.append(request["PATH_INFO"])
        return (403, "ExpiredToken") if len(changes) >= number else None

    server.fault = lose
    with raises(StorageError):
        run_command(command(source), OUT)
    server.fault = None
    found = {name: data for name, data in server.contents("out").items() if not name.startswith(".pqweights/")}
    assert found.items() <= files.items()
    run_command(command(source), OUT)
    assert server.contents("out") == files
    assert folder_bytes(scratch) == {}
