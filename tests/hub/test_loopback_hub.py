"""The loopback Hub of other tests: what the official client and plain requests get from it, and its faults.

What pqweights itself asks of it is tested by test_hub.py and test_push.py.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import Corrupt, Cut, Drop, Fault, LoopbackHub, Run, Short, Stall, Status

hub_client = pytest.importorskip("huggingface_hub")
from huggingface_hub import CommitOperationAdd, HfApi, constants  # noqa: E402
from huggingface_hub import errors as hub_errors  # noqa: E402
from huggingface_hub.utils import close_session, disable_progress_bars  # noqa: E402

# The client's upload of LFS files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

WEIGHTS = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def plain_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Set up the client, which reads its environment when it is imported."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    disable_progress_bars()
    close_session()
    yield
    close_session()


@pytest.fixture
def api(hub: LoopbackHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


def get(hub: LoopbackHub, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Send a request without the client, and return the reply and as much of the body as came."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        try:
            return response, response.read()
        except http.client.IncompleteRead as cut:
            return response, cut.partial
    finally:
        connection.close()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# --- What the client does ---------------------------------------------------------------------------------------------


def test_listings(hub: LoopbackHub, api: HfApi, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1_000_001)
    first = hub.commit("me/x", {"config.json": b"{}", "a/w.bin": WEIGHTS, "a/b/large.txt": large})
    second = hub.commit("me/x", {"config.json": None})
    info = api.model_info("me/x", revision=first, files_metadata=True)
    assert (info.id, info.sha, info.private, info.gated) == ("me/x", first, False, False)
    files = {file.rfilename: file for file in info.siblings}
    assert list(files) == ["a/b/large.txt", "a/w.bin", "config.json"]
    assert (files["config.json"].size, files["config.json"].blob_id, files["config.json"].lfs) == (
        2,
        git_sha1(b"{}"),
        None,
    )
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(WEIGHTS)}\n".encode()
    weights = files["a/w.bin"]
    assert (weights.size, weights.blob_id) == (len(WEIGHTS), git_sha1(pointer))
    assert (weights.lfs.sha256, weights.lfs.size, weights.lfs.pointer_size) == (sha256, len(WEIGHTS), len(pointer))
    assert files["a/b/large.txt"].lfs.size == 1_000_001
    assert api.model_info("me/x").sha == second
    assert api.model_info("me/x").siblings[0].size is None

    assert {entry.path for entry in api.list_repo_tree("me/x")} == {"a"}
    assert {entry.path for entry in api.list_repo_tree("me/x", "a")} == {"a/w.bin", "a/b"}
    entries = {entry.path: entry for entry in api.list_repo_tree("me/x", recursive=True, revision=first)}
    assert set(entries) == {"a", "a/b", "a/w.bin", "a/b/large.txt", "config.json"}
    assert entries["a/w.bin"].lfs.sha256 == sha256
    assert entries["config.json"].blob_id == git_sha1(b"{}")
    assert [entry.path for entry in api.get_paths_info("me/x", ["a/w.bin", "none"])] == ["a/w.bin"]


@pytest.mark.parametrize("cdn", [False, True])
def test_downloads(tmp_path: Path, cdn: bool) -> None:
    with LoopbackHub(cdn=cdn) as hub:
        api = HfApi(endpoint=hub.url, token=hub.token)
        sha = hub.commit("me/x", {"config.json": b"{}", "a/w.safetensors": WEIGHTS})
        cached = Path(api.hf_hub_download("me/x", "a/w.safetensors"))
        assert cached.read_bytes() == WEIGHTS
        assert cached.parts[-3] == sha
        assert cached.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
        assert Path(api.hf_hub_download("me/x", "config.json")).resolve().name == git_sha1(b"{}")
        local = Path(api.hf_hub_download("me/x", "a/w.safetensors", local_dir=tmp_path / "local"))
        assert local == tmp_path / "local" / "a" / "w.safetensors"
        assert local.read_bytes() == WEIGHTS
        snapshot = Path(api.snapshot_download("me/x", local_dir=tmp_path / "snapshot"))
        assert (snapshot / "a" / "w.safetensors").read_bytes() == WEIGHTS
        assert (snapshot / "config.json").read_bytes() == b"{}"
        moved = [request for request in hub.requests if request.path.startswith("/cdn/")]
        assert bool(moved) == cdn
        assert not any(request.authorized for request in moved)


# --- The wire ---------------------------------------------------------------------------------------------------------


def test_ranges(hub: LoopbackHub) -> None:
    sha = hub.commit("me/x", {"w.bin": WEIGHTS})
    size = len(WEIGHTS)
    for asked, start, stop in (
        ("0-9", 0, 10),
        (f"{size - 5}-", size - 5, size),
        ("-7", size - 7, size),
        ("9-99999", 9, size),
    ):
        response, body = get(hub, "/me/x/resolve/main/w.bin", Range=f"bytes={asked}")
        assert (response.status, body) == (206, WEIGHTS[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    response, body = get(hub, "/me/x/resolve/main/w.bin", Range=f"bytes={size}-")
    assert (response.status, response.headers["Content-Range"]) == (416, f"bytes */{size}")
    response, body = get(hub, "/me/x/resolve/main/w.bin", method="HEAD")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    assert (response.status, body, response.headers["Content-Length"]) == (200, b"", str(size))
    assert (response.headers["X-Repo-Commit"], response.headers["X-Linked-Size"]) == (sha, str(size))
    assert response.headers["ETag"] == response.headers["X-Linked-Etag"] == f'"{sha256}"'
    assert get(hub, "/me/x/resolve/main/none")[0].headers["X-Repo-Commit"] == sha
    assert [(request.range, request.status, request.bytes_sent) for request in hub.requests[:2]] == [
        ("bytes=0-9", 206, 10),
        (f"bytes={size - 5}-", 206, 5),
    ]


def test_large_files_are_served_from_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(20_000_000_000)
        file.seek(15_000_000_000)
        file.write(b"here")
    started = time.monotonic()
    hub.commit("me/x", {"a.safetensors": sparse, "b.safetensors": sparse}, sha256={"a.safetensors": "a" * 64})
    assert time.monotonic() - started < 1
    blobs = hub.repositories["me/x"].blobs()
    assert (blobs["a.safetensors"].sha256, blobs["a.safetensors"].size) == ("a" * 64, 20_000_000_000)
    assert blobs["b.safetensors"].sha256 == hashlib.sha256(b"b.safetensors:20000000000").hexdigest()
    response, body = get(hub, "/me/x/resolve/main/b.safetensors", Range="bytes=14999999999-15000000004")
    assert body == b"\0here\0"
    assert response.headers["Content-Range"] == "bytes 14999999999-15000000004/20000000000"


def test_uploads_are_checked_against_the_announced_hash(hub: LoopbackHub, api: HfApi) -> None:
    hub.create("me/x")
    connection = http.client.HTTPConnection("127.0.0.1", hub.port)
    good = hashlib.sha256(WEIGHTS).hexdigest()
    for body, chunked, status in (
        (b"other", False, 400),
        (WEIGHTS, False, 200),
        (b"other", True, 400),
        (WEIGHTS, True, 200),
    ):
        sent: Any = iter([body[:7], body[7:]]) if chunked and len(body) > 7 else body
        connection.request("PUT", f"/uploads/{good}", body=sent, encode_chunked=chunked and len(body) > 7)
        response = connection.getresponse()
        response.read()
        assert response.status == status  # the connection stays open
    connection.close()
    operation = CommitOperationAdd("w.bin", WEIGHTS + b"1")
    api.preupload_lfs_files("me/x", additions=[operation])
    hub.objects.clear()
    with pytest.raises(hub_errors.BadRequestError, match=r"LFS pointer pointed to a file that does not exist.*w\.bin"):
        # preupload_lfs_files marked the operation as uploaded
        api.create_commit("me/x", [operation], commit_message="lost")
    assert [path.name for path in hub.folder.iterdir() if path.suffix == ".part"] == []


def test_environment_drops_proxies_and_offline_mode(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "http_proxy", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = hub.environment(tmp_path)
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "http_proxy", "HF_HUB_CACHE"} & set(
        environment
    )
    assert environment["KEPT"] == "yes"
    assert environment["HF_ENDPOINT"] == hub.url


def test_hub_closes_fast_and_silently(capfd: pytest.CaptureFixture[str]) -> None:
    with LoopbackHub() as hub:
        hub.commit("me/x", {"w.bin": b"x" * 50_000_000})
        hub.inject(Fault(Stall(60), path="config"))
        idle = http.client.HTTPConnection("127.0.0.1", hub.port)
        idle.request("GET", "/api/models/me/x")
        idle.getresponse().read()
        stalled = http.client.HTTPConnection("127.0.0.1", hub.port)
        stalled.request("GET", "/me/x/resolve/main/config.json")
        leaver = http.client.HTTPConnection("127.0.0.1", hub.port)
        leaver.request("GET", "/me/x/resolve/main/w.bin")
        leaver.getresponse().read(10)
        leaver.close()
        time.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 0.5
    for connection in (idle, stalled):
        connection.sock.settimeout(5)
        assert connection.sock.recv(1) == b""
        connection.close()
    while any("process_request" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() - started < 5
        time.sleep(0.01)
    assert capfd.readouterr() == ("", "")


# --- Faults -----------------------------------------------------------------------------------------------------------

FILE = "/me/x/resolve/main/w.bin"


def test_faults_are_used_up_in_order(hub: LoopbackHub) -> None:
    hub.commit("me/x", {"w.bin": WEIGHTS})
    busy = Fault(Status(503, {"Retry-After": "1"}), method="GET", path="resolve", times=2, after=1)
    missing = Fault(Status(404, body=b"gone"), path=r"w\.bin$", name="gone")
    hub.inject(busy, missing)
    assert [fault.name for fault in hub.faults] == ["status 503", "gone"]
    assert get(hub, "/api/models/me/x")[0].status == 200
    assert [get(hub, FILE)[0].status for _ in range(4)] == [404, 503, 503, 200]
    assert hub.faults == []
    assert [request.fault for request in hub.requests][1:] == ["gone", "status 503", "status 503", None]
    hub.inject(busy)
    hub.clear_faults()
    assert hub.faults == []


@pytest.mark.parametrize("on_disk", [False, True])
def test_faults_in_bodies(hub: LoopbackHub, tmp_path: Path, on_disk: bool) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS)
    hub.commit("me/x", {"w.bin": tmp_path / "w.bin" if on_disk else WEIGHTS})
    size = len(WEIGHTS)

    def under(action: Any, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        hub.inject(Fault(action))
        return get(hub, FILE, **headers)

    response, body = under(Cut(1000))
    assert (response.headers["Content-Length"], body) == (str(size), WEIGHTS[:1000])
    assert hub.requests[-1].bytes_sent == 1000
    with pytest.raises(ConnectionResetError):
        under(Cut(0, reset=True))
    with pytest.raises(http.client.RemoteDisconnected):
        under(Drop())
    assert hub.requests[-1].status == 0

    response, body = under(Short(10))
    assert (response.status, response.headers["Content-Length"], body) == (200, "10", WEIGHTS[:10])
    response, body = under(Short(10), Range="bytes=100-199")
    assert (response.headers["Content-Range"], body) == (f"bytes 100-109/{size}", WEIGHTS[100:110])
    response, body = under(Short(10, consistent=False), Range="bytes=100-199")
    assert (response.headers["Content-Range"], body) == (f"bytes 100-199/{size}", WEIGHTS[100:110])

    flipped = bytearray(WEIGHTS)
    flipped[150] ^= 1
    assert under(Corrupt(150), Range="bytes=100-199")[1] == flipped[100:200]
    assert under(Corrupt(150), Range="bytes=200-299")[1] == WEIGHTS[200:300]
    assert under(Corrupt(150))[1] == flipped
    for stall in (Stall(0.2), Stall(0.2, at=100)):
        started = time.monotonic()
        assert under(stall)[1] == WEIGHTS
        assert 0.2 <= time.monotonic() - started < 1


def test_commit_between_two_requests(hub: LoopbackHub, api: HfApi) -> None:
    first = hub.commit("me/x", {"a": b"1"})
    hub.inject(Fault(Run(lambda: hub.commit("me/x", {"a": b"2"})), path="resolve"))
    assert api.model_info("me/x").sha == first
    assert get(hub, "/me/x/resolve/main/a")[1] == b"2"
    with pytest.raises(hub_errors.HfHubHTTPError, match="A commit has happened since"):
        api.create_commit("me/x", [CommitOperationAdd("b", b"")], commit_message="late", parent_commit=first)
