"""Results written to a server of S3 that fails now and then, refuses, or goes away."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import folder_bytes, run_command, small_checkpoint
from remote_server import BUCKET, CUT, LOST, SECRETS, ObjectServer

from pqweights.errors import OutputError, StorageError
from pqweights.storage.remote import folder, opening

OUT = f"s3://{BUCKET}/out"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("source") / "model")


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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads and copies go in parts of a few thousand bytes."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(folder, "PART_BYTES", 6000)
    monkeypatch.setattr(folder, "COPY_PART_BYTES", 5 << 20)  # s3fs refuses smaller ones
    monkeypatch.setattr(folder, "SINGLE_COPY_BYTES", 6000)
    monkeypatch.setattr("s3fs.core.MANAGED_COPY_THRESHOLD", 6000)


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
    monkeypatch.setattr(opening, "READ_SECONDS", 0.2)
    slow = []

    def wait(request: dict[str, Any]) -> None:
        if len(server.log) % 8 == 4:
            slow.append(request["REQUEST_METHOD"])
            time.sleep(0.4)

    server.fault = wait
    run_command(command(source), OUT)
    assert {"PUT", "HEAD"} <= set(slow)
    assert server.contents("out") == files


def test_a_lost_reply_to_the_last_request_of_an_upload_in_parts(
    server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path, small_parts: None
) -> None:
    lost: Counter[str] = Counter()

    def lose(request: dict[str, Any]) -> str | None:
        if request["REQUEST_METHOD"] != "POST" or "uploadId" not in request["QUERY_STRING"]:
            return None
        lost[request["PATH_INFO"]] += 1
        return LOST if lost[request["PATH_INFO"]] == 1 else None

    server.fault = lose
    run_command(command(source), OUT)
    assert lost
    assert server.contents("out") == files


def test_shards_go_in_parts(
    server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path, small_parts: None
) -> None:
    run_command(command(source), OUT)
    assert server.contents("out") == files
    assert sum(line.startswith("POST") for line in server.log) >= 8  # of uploads, and of copies
    assert not server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_missing_permission_is_found_before_the_work(
    method: str, server: ObjectServer, source: Path, scratch: Path
) -> None:
    server.fault = lambda request: (403, "AccessDenied") if request["REQUEST_METHOD"] == method else None
    with pytest.raises(StorageError, match="access denied") as raised:
        run_command(command(source), OUT)
    assert not any(secret in str(raised.value) for secret in SECRETS)
    assert not any("model-" in line for line in server.log)
    assert folder_bytes(scratch) == {}


def test_missing_bucket_is_found_before_the_work(server: ObjectServer, source: Path, scratch: Path) -> None:
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/out.*: there is no bucket s3://no-such-bucket"):
        run_command(command(source), "s3://no-such-bucket/out")
    assert folder_bytes(scratch) == {}


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
    with pytest.raises(StorageError, match=r"refused|denied"):
        run_command(command(source), OUT)
    server.fault = None
    found = {name: data for name, data in server.contents("out").items() if not name.startswith(".pqweights/")}
    assert found.items() <= files.items()
    run_command(command(source), OUT)
    assert server.contents("out") == files
    assert folder_bytes(scratch) == {}


def test_other_result_is_refused(server: ObjectServer, source: Path, files: dict[str, bytes], scratch: Path) -> None:
    run_command(command(source, recipe="q4"), OUT)
    before = server.contents("out")
    with pytest.raises(OutputError, match=rf"^{OUT}: holds another result: .*; pass `overwrite`"):
        run_command(command(source), OUT)
    assert server.contents("out") == before
    run_command(command(source, overwrite=True), OUT)
    assert server.contents("out") == files
