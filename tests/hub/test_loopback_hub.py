"""The loopback Hub of other tests, tested with the official client."""

from __future__ import annotations

import hashlib
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from loopback_hub import Corrupt, Cut, Drop, Fault, LoopbackHub, Run, Short, Stall, Status

hub_client = pytest.importorskip("huggingface_hub")
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants  # noqa: E402
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
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def api(hub: LoopbackHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


@pytest.fixture
def stranger(hub: LoopbackHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


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


def status_of(error: pytest.ExceptionInfo[Any]) -> int:
    return int(error.value.response.status_code)


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# --- What the client does ---------------------------------------------------------------------------------------------


def test_whoami(hub: LoopbackHub, api: HfApi) -> None:
    assert api.whoami()["name"] == "me"
    with pytest.raises(hub_errors.HfHubHTTPError, match="Invalid user token") as error:
        HfApi(endpoint=hub.url, token="hf_wrong").whoami()
    assert status_of(error) == 401
    assert [request.authorized for request in hub.requests] == [True, False]


def test_create_repo(hub: LoopbackHub, api: HfApi, stranger: HfApi) -> None:
    assert api.create_repo("me/x", private=True).repo_id == "me/x"
    assert hub.repositories["me/x"].private
    assert list(hub.repositories["me/x"].files()) == [".gitattributes"]
    assert api.create_repo("x", exist_ok=True).repo_id == "me/x"
    with pytest.raises(hub_errors.HfHubHTTPError, match="already created") as error:
        api.create_repo("me/x")
    assert status_of(error) == 409
    with pytest.raises(hub_errors.HfHubHTTPError, match="don't have the rights") as error:
        api.create_repo("you/x")
    assert status_of(error) == 403
    with pytest.raises(hub_errors.HfHubHTTPError) as error:
        stranger.create_repo("me/y")
    assert status_of(error) == 401


def test_second_upload_of_a_folder_sends_only_changes(hub: LoopbackHub, api: HfApi, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    files = {
        "README.md": b"---\nlicense: mit\n---\n",
        "config.json": b"{}",
        "deep/w.safetensors": WEIGHTS,
        "empty.bin": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    api.create_repo("me/x")
    commit = api.upload_folder(repo_id="me/x", folder_path=folder)
    repository = hub.repositories["me/x"]
    assert commit.oid == repository.branches["main"]
    assert {name: repository.read(name) for name in files} == files
    assert isinstance(repository.files()["deep/w.safetensors"], Path)
    assert sum(request.method == "PUT" for request in hub.requests) == 1

    # The client makes no commit if nothing has changed, and does not send the same content again.
    hub.requests.clear()
    assert api.upload_folder(repo_id="me/x", folder_path=folder).oid == commit.oid
    (folder / "more.safetensors").write_bytes(WEIGHTS)
    assert api.upload_folder(repo_id="me/x", folder_path=folder).oid != commit.oid
    assert repository.read("more.safetensors") == WEIGHTS
    assert not any(request.method == "PUT" for request in hub.requests)


def test_commits_of_uploaded_shards(hub: LoopbackHub, api: HfApi, tmp_path: Path) -> None:
    api.create_repo("me/x")
    operations = []
    for number in range(3):
        shard = tmp_path / f"{number}.safetensors"
        shard.write_bytes(WEIGHTS + bytes([number]))
        operation = CommitOperationAdd(shard.name, shard)
        api.preupload_lfs_files("me/x", additions=[operation])
        shard.unlink()
        operations.append(operation)
    before = hub.repositories["me/x"].branches["main"]
    api.create_commit("me/x", operations, commit_message="shards", parent_commit=before)
    repository = hub.repositories["me/x"]
    assert repository.read("2.safetensors") == WEIGHTS + b"\2"
    assert repository.commits[repository.sha()].title == "shards"
    assert repository.commits[repository.sha()].parent == before

    with pytest.raises(hub_errors.HfHubHTTPError, match="A commit has happened since") as error:
        api.create_commit(
            "me/x", [CommitOperationDelete("0.safetensors")], commit_message="stale", parent_commit=before
        )
    assert status_of(error) == 412
    api.create_commit(
        "me/x",
        [
            CommitOperationDelete("0.safetensors"),
            CommitOperationAdd("a/b.txt", b"b"),
            CommitOperationAdd("a/c.txt", b"c"),
        ],
        commit_message="delete",
        parent_commit=repository.sha(),
    )
    assert set(repository.files()) == {".gitattributes", "1.safetensors", "2.safetensors", "a/b.txt", "a/c.txt"}
    api.create_commit("me/x", [CommitOperationDelete("a/")], commit_message="delete a folder")
    assert set(repository.files()) == {".gitattributes", "1.safetensors", "2.safetensors"}
    with pytest.raises(hub_errors.RemoteEntryNotFoundError, match="A file with this name doesn't exist"):
        api.create_commit("me/x", [CommitOperationDelete("nothing")], commit_message="delete")


def test_branches_and_pull_requests(hub: LoopbackHub, api: HfApi) -> None:
    api.create_repo("me/x")
    repository = hub.repositories["me/x"]
    main = repository.sha()
    api.create_branch("me/x", branch="next/1")
    with pytest.raises(hub_errors.HfHubHTTPError) as error:
        api.create_branch("me/x", branch="next/1")
    assert status_of(error) == 409
    api.create_branch("me/x", branch="next/1", exist_ok=True)
    api.upload_file(repo_id="me/x", path_or_fileobj=b"1", path_in_repo="a", revision="next/1")
    opened = api.upload_file(repo_id="me/x", path_or_fileobj=WEIGHTS, path_in_repo="w.bin", create_pr=True)
    assert (opened.pr_num, opened.pr_revision) == (1, "refs/pr/1")
    api.upload_file(repo_id="me/x", path_or_fileobj=b"2", path_in_repo="b", revision="refs/pr/1")
    assert repository.sha("main") == main
    assert api.list_repo_files("me/x", revision="next/1") == [".gitattributes", "a"]
    assert api.list_repo_files("me/x", revision="refs/pr/1") == [".gitattributes", "b", "w.bin"]
    assert api.list_repo_files("me/x", revision=opened.oid) == [".gitattributes", "w.bin"]
    refs = api.list_repo_refs("me/x", include_pull_requests=True)
    assert {ref.name: ref.target_commit for ref in [*refs.branches, *refs.pull_requests]} == repository.branches
    with pytest.raises(hub_errors.RevisionNotFoundError):
        api.upload_file(repo_id="me/x", path_or_fileobj=b"1", path_in_repo="a", revision="nowhere")
    hub.commit("you/y", {"a": b""})
    with pytest.raises(hub_errors.HfHubHTTPError) as error:
        api.upload_file(repo_id="you/y", path_or_fileobj=b"1", path_in_repo="b")
    assert status_of(error) == 403
    assert api.upload_file(repo_id="you/y", path_or_fileobj=b"1", path_in_repo="b", create_pr=True).pr_num == 1
    api.delete_branch("me/x", branch="next/1")
    assert set(repository.branches) == {"main", "refs/pr/1"}


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


def test_hub_file_system_reads_ranges(hub: LoopbackHub) -> None:
    hub.commit("me/x", {"w.bin": WEIGHTS})
    system = hub_client.HfFileSystem(endpoint=hub.url, token=hub.token, skip_instance_cache=True)
    with system.open("me/x/w.bin", "rb", block_size=512, cache_type="none") as file:
        file.seek(1000)
        assert file.read(24) == WEIGHTS[1000:1024]
    assert hub.requests[-1].range is not None
    assert hub.requests[-1].bytes_sent < len(WEIGHTS)


def test_errors_for_private_gated_and_missing_repositories(
    hub: LoopbackHub, api: HfApi, stranger: HfApi, tmp_path: Path
) -> None:
    hub.commit("me/x", {"config.json": b"{}"})
    repository = hub.repositories["me/x"]
    with pytest.raises(hub_errors.RemoteEntryNotFoundError):
        api.hf_hub_download("me/x", "none")
    with pytest.raises(hub_errors.RevisionNotFoundError):
        api.hf_hub_download("me/x", "config.json", revision="none")
    with pytest.raises(hub_errors.RevisionNotFoundError):
        api.model_info("me/x", revision="none")
    with pytest.raises(hub_errors.HfHubHTTPError, match="Invalid credentials") as error:
        HfApi(endpoint=hub.url, token="hf_wrong").model_info("me/x")
    assert status_of(error) == 401
    for client, status in ((api, 404), (stranger, 401)):
        with pytest.raises(hub_errors.RepositoryNotFoundError) as error:
            client.model_info("me/none")
        assert status_of(error) == status

    repository.private = True
    assert api.model_info("me/x").private
    for call in (stranger.model_info, lambda id: stranger.hf_hub_download(id, "config.json")):
        with pytest.raises(hub_errors.RepositoryNotFoundError) as error:
            call("me/x")
        assert not isinstance(error.value, hub_errors.GatedRepoError)
        assert status_of(error) == 401

    repository.private, repository.gated = False, "auto"
    assert stranger.model_info("me/x").gated == "auto"
    assert api.hf_hub_download("me/x", "config.json", local_dir=tmp_path / "allowed")
    with pytest.raises(hub_errors.GatedRepoError) as error:
        stranger.hf_hub_download("me/x", "config.json", local_dir=tmp_path / "refused")
    assert status_of(error) == 401
    repository.access = False
    with pytest.raises(hub_errors.GatedRepoError) as error:
        api.hf_hub_download("me/x", "config.json", local_dir=tmp_path / "refused")
    assert status_of(error) == 403


def test_transformers_loads_a_model(hub: LoopbackHub, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = """
import sys, torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
model.save_pretrained(sys.argv[1])
HfApi().create_repo("me/x", private=True)
HfApi().upload_folder(repo_id="me/x", folder_path=sys.argv[1])
loaded = AutoModelForCausalLM.from_pretrained("me/x").eval()
ids = torch.arange(8)[None]
assert torch.equal(model(ids).logits, loaded(ids).logits)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    result = subprocess.run(
        command, env=hub.environment(tmp_path / "home"), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert hub.repositories["me/x"].read("model.safetensors") == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "home" / "hub" / "models--me--x").is_dir()


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


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../b", "a\\b", "a b%2Fc?d#e", "zwölf.json", ".", "a\nb"])
def test_hostile_names(hub: LoopbackHub, api: HfApi, name: str) -> None:
    hub.commit("me/x", {name: b"hostile"})
    assert [file.rfilename for file in api.model_info("me/x").siblings] == [name]
    assert name in {entry.path for entry in api.list_repo_tree("me/x", recursive=True)}
    assert get(hub, f"/me/x/resolve/main/{quote(name)}")[1] == b"hostile"
    assert hub.requests[-1].path == f"/me/x/resolve/main/{name}"


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


def test_faults_in_uploads(hub: LoopbackHub, api: HfApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client sleeps between attempts
    hub.create("me/x")
    hub.inject(Fault(Cut(1000), method="PUT", times=2))
    large = os.urandom(8_000_000)
    api.upload_file(repo_id="me/x", path_or_fileobj=large, path_in_repo="w.bin")
    assert [(request.status, request.fault) for request in hub.requests if request.method == "PUT"] == [
        (0, "cut after 1000 bytes"),
        (0, "cut after 1000 bytes"),
        (200, None),
    ]
    assert hub.repositories["me/x"].read("w.bin") == large

    # The reply is lost, but the commit was made.
    hub.inject(Fault(Drop(applied=True), method="POST", path="/commit/"))
    with pytest.raises(Exception, match="disconnected"):
        api.upload_file(repo_id="me/x", path_or_fileobj=b"1", path_in_repo="a")
    assert hub.repositories["me/x"].read("a") == b"1"
