"""Folders in object storage: what each operation does, which failures heal, and the line for those that do not."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from remote_server import BUCKET, SECRETS, ObjectServer, address_of

from pqweights.checkpoint.ahead import TransferStopped
from pqweights.errors import MissingDependencyError, OptionError, SourceChangedError, StorageError
from pqweights.storage import bucket as remote_folder
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.requests import ATTEMPTS

ADDRESS = f"s3://{BUCKET}/a folder/of mine"


def folder(address: str = ADDRESS) -> RemoteFolder:
    return RemoteFolder(address_of(address))


@pytest.fixture(params=["s3", "memory"])
def place(request: pytest.FixtureRequest, server: ObjectServer, tmp_path: Path) -> RemoteFolder:
    return folder(ADDRESS if request.param == "s3" else f"memory://{tmp_path.name}/folder")


def failing(times: int, fault: tuple[int, str] | int, method: str = "") -> Callable[[dict[str, Any]], Any]:
    left = [times]

    def decide(environ: dict[str, Any]) -> tuple[int, str] | int | None:
        # A reply to HEAD has no code that tells a time-out of the server from other errors.
        if left[0] <= 0 or environ["REQUEST_METHOD"] == "HEAD" or method not in ("", environ["REQUEST_METHOD"]):
            return None
        left[0] -= 1
        return fault

    return decide


def line_of(action: Callable[[], object], error: type[Exception] = StorageError) -> str:
    """The one line of an error, without secrets."""
    with pytest.raises(error) as raised:
        action()
    line = str(raised.value)
    assert "\n" not in line and not any(secret in line for secret in SECRETS)
    return line


def test_files_are_listed_without_hidden_ones(place: RemoteFolder) -> None:
    assert place.files() == {}
    for name in ("x.json", "sub/ü +%.bin", ".hidden", "sub/.hidden/y", ".pqweights/a/b", ".pqweights/.c"):
        place.write(name, name.encode())
    assert [*place.files()] == ["sub/ü +%.bin", "x.json"]
    assert [*place.files(".pqweights")] == [".pqweights/a/b"] and [*place.files(recursive=False)] == ["x.json"]
    listed, state = place.files()["x.json"], place.state("x.json")
    assert state is not None and (listed.stamp, listed.byte_count, state.byte_count) == (state.stamp, 6, 6)
    assert abs(state.modified / 1e9 - time.time()) < 60 and abs(listed.modified - state.modified) < 2e9
    assert place.read_whole("sub/ü +%.bin") == "sub/ü +%.bin".encode()
    assert place.state("sub") is None and place.read_whole("y") is None


def test_ranges_are_read_and_ends_are_noticed(place: RemoteFolder) -> None:
    place.write("x", bytes(range(100)))
    assert place.read("x", 10, 13) == b"\x0a\x0b\x0c" and place.read("x", 5, 5) == b""
    assert place.read("x", 0, 100) == bytes(range(100))
    assert "expected 20 bytes at offset 90, found 10" in line_of(lambda: place.read("x", 90, 110))
    assert "there is no such file" in line_of(lambda: place.read("y", 0, 1))


def test_a_replaced_file_is_noticed(place: RemoteFolder) -> None:
    """By its stamp, and in S3 also while it is read."""
    place.write("x", b"one")
    before = place.files()["x"]
    assert place.read("x", 0, 2, expected=before) == b"on"
    time.sleep(0.01)
    place.write("x", b"two")
    assert place.files()["x"].stamp != before.stamp
    if place.address.scheme == "s3":
        line = line_of(lambda: place.read("x", 0, 2, expected=before), SourceChangedError)
        assert f"{ADDRESS}/x" in line


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three of the smallest parts that S3 takes, in which uploads and copies then go."""
    for name in ("PART_BYTES", "COPY_PART_BYTES", "SINGLE_COPY_BYTES"):
        monkeypatch.setattr(remote_folder, name, 5 << 20)
    monkeypatch.setattr("s3fs.core.MANAGED_COPY_THRESHOLD", 5 << 20)
    (tmp_path / "shard").write_bytes(os.urandom(12_000_000))
    return tmp_path / "shard"


def test_uploads_and_moves_keep_every_byte(place: RemoteFolder, shard: Path) -> None:
    place.upload(".pqweights/shard", shard)
    place.upload(".pqweights/empty", Path("/dev/null"))
    for _ in range(2):  # the second time after a kill
        place.move(".pqweights/shard", "shard.safetensors")
        place.move(".pqweights/empty", "empty")
    assert place.read_whole("shard.safetensors") == shard.read_bytes() and place.read_whole("empty") == b""
    assert place.files(".pqweights") == {}
    assert "expected this file, to rename it, found none" in line_of(lambda: place.move("a", "b"))
    place.remove(["shard.safetensors", "nothing", "empty"])
    assert place.files() == {}


def test_an_upload_that_fails_in_a_part_leaves_nothing(server: ObjectServer, shard: Path) -> None:
    place = folder()
    place.write("x", b"earlier")
    server.fault = lambda environ: (500, "InternalError") if "partNumber=2" in environ["QUERY_STRING"] else None
    assert "(InternalError)" in line_of(lambda: place.upload("x", shard))
    server.fault = None
    with pytest.raises(TransferStopped):
        place.upload("x", shard, stop=lambda: True)
    assert place.read_whole("x") == b"earlier"
    assert not server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_an_upload_whose_last_reply_is_lost_is_complete(server: ObjectServer, shard: Path) -> None:
    place, lost = folder(), list[str]()

    def lose_one(environ: dict[str, Any]) -> int | None:
        if environ["REQUEST_METHOD"] == "POST" and "uploadId" in environ["QUERY_STRING"] and not lost:
            lost.append(environ["QUERY_STRING"])
            return 0  # done, but the reply is cut
        return None

    server.fault = lose_one
    place.upload("x", shard)
    assert lost and place.read_whole("x") == shard.read_bytes()


FAULTS = [
    *((500, "InternalError"), (502, "BadGateway"), (503, "SlowDown")),
    *((429, "TooManyRequests"), (400, "RequestTimeout")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_failures_that_pass_heal(server: ObjectServer, fault: tuple[int, str], shard: Path) -> None:
    place = folder()
    for action in (
        lambda: place.write("x", b"text"),
        lambda: [*place.files()] == ["x"],
        lambda: place.read("x", 1, 3) == b"ex",
        lambda: place.upload("y", shard),
        lambda: place.move("y", "z"),
        lambda: place.remove(["x"]),
    ):
        server.fault = failing(2, fault)
        assert action() in (None, True)
    assert server.contents("a folder/of mine") == {"z": shard.read_bytes()}


@pytest.mark.parametrize("cut", [0, 1, 70_000])
def test_bodies_that_are_cut_are_requested_again(server: ObjectServer, cut: int) -> None:
    place, content = folder(), os.urandom(100_000)
    place.write("x", content)
    server.fault = failing(2, cut, "GET")
    assert place.read("x", 0, 100_000) == content


def test_permanent_failures_are_one_line_after_a_bounded_number_of_attempts(server: ObjectServer) -> None:
    place = folder()
    place.write("x", b"text")
    failing_storage = f"{ADDRESS}/x: the storage at {server.url} is failing (InternalError)"
    cut = "the reply ended with a ClientPayloadError: the file was cut, or the connection fails"
    faults: list[tuple[Any, str]] = [((500, "InternalError"), failing_storage), (1, cut)]
    for fault, says in faults:
        server.log.clear()
        server.fault = failing(1000, fault)
        assert says in line_of(lambda: place.read("x", 0, 4))
        assert len(server.log) == ATTEMPTS


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "AccessDenied", "(AccessDenied): expected credentials with s3:GetObject"),
        (403, "SignatureDoesNotMatch", "(SignatureDoesNotMatch): set AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "the credentials were refused (ExpiredToken)"),
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
        (400, "AuthorizationHeaderMalformed", "region (AuthorizationHeaderMalformed): set AWS_DEFAULT_REGION"),
        (400, "Strange", "refuses the request (Strange)"),
    ],
)
def test_refusals_are_not_sent_again(server: ObjectServer, status: int, code: str, says: str) -> None:
    place = folder()
    place.write("x", b"text")
    server.log.clear()
    server.fault = lambda environ: (status, code)
    assert says in line_of(lambda: place.read("x", 0, 4))
    assert len(server.log) <= 2  # one of them may ask for the region of the bucket


def test_what_is_not_there_is_named(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    no_bucket = f"there is no bucket s3://nothing-here at {server.url}"
    assert no_bucket in line_of(lambda: folder("s3://nothing-here/x").files())
    assert no_bucket in line_of(lambda: folder("s3://nothing-here/x").write("a", b""))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:MARKERSECRETKEY@127.0.0.1:1")
    assert "at http://127.0.0.1:1 cannot be reached" in line_of(lambda: folder().files())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "MARKERSECRETKEY")
    assert "check AWS_ENDPOINT_URL" in line_of(lambda: folder().files())
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert "(NoCredentialsError)" in line_of(lambda: folder().files())


def test_unknown_schemes_and_missing_packages_are_named() -> None:
    for address in ("strange://b/x", "https://host/x", "zip://b/x"):
        line = line_of(lambda address=address: folder(address).files(), OptionError)  # type: ignore[misc]
        assert "pip install 's3fs" in line and "pip install 'gcsfs" in line
    with raises(MissingDependencyError, "gs://b/x", "pip install 'gcsfs>=2025.3'"):
        folder("gs://b/x").files()


def test_folders_are_pickled_without_connections_and_credentials(server: ObjectServer) -> None:
    place = folder()
    place.write("x", b"text")
    data = pickle.dumps(place)
    assert len(data) < 500 and not any(secret.encode() in data for secret in SECRETS)
    assert pickle.loads(data).read_whole("x") == b"text"
