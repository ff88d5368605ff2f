"""A small Hugging Face Hub on the loopback: repositories, LFS uploads, ranged downloads, and faults on demand.

It does what huggingface_hub 2.4 expects of the Hub, but knows only models, ids of the form namespace/name, one user
("me") and basic LFS transfers. It does not know xet: clients must run with HF_HUB_DISABLE_XET=1, which
`LoopbackHub.environment` sets.

    with LoopbackHub() as hub:
        hub.commit("me/x", {"config.json": b"{}", "model.safetensors": Path("model.safetensors")})
        hub.inject(Fault(Cut(1000), method="GET", path=r"resolve/.*safetensors", times=2))
        subprocess.run([...], env=hub.environment(home))
        hub.requests  # what was asked, and what was answered
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import loopback_endpoints
from loopback_faults import Fault, FaultyApplication
from werkzeug.serving import make_server

Content = bytes | Path
# Some of the suffixes in .gitattributes of a new repository; files above MAX_REGULAR_BYTES are stored with LFS too.
LFS_SUFFIXES = (".arrow", ".bin", ".gguf", ".gz", ".h5", ".model", ".onnx", ".parquet", ".pt", ".safetensors", ".zip")
MAX_REGULAR_BYTES = 1_000_000


def is_lfs(name: str, size: int) -> bool:
    """Return whether a file is stored with LFS. Empty files never are."""
    return size > MAX_REGULAR_BYTES or (size > 0 and name.endswith(LFS_SUFFIXES))


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A file: its content, its size in bytes, and its SHA-256 if it is stored with LFS, else None."""

    content: Content
    size: int
    sha256: str | None

    @staticmethod
    def of(name: str, content: Content, sha256: str | None = None) -> Blob:
        """Return a file as the Hub would store it. sha256: the hash of a large file, if it is known."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if is_lfs(name, size):
            return Blob(content=content, size=size, sha256=sha256 or hashlib.sha256(_bytes(content)).hexdigest())
        return Blob(content=_bytes(content), size=size, sha256=None)

    @property
    def oid(self) -> str:
        """The hash that git gives a file, or an LFS pointer."""
        data = self.sha256.encode() if self.sha256 else _bytes(self.content)
        return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A state of a repository."""

    title: str
    files: Mapping[str, Blob]


class Repository:
    """Branches and pull requests (refs/pr/N), which point to commits.

    access: whether the user "me" is let in if the repository is private or gated
    """

    def __init__(self, id: str, private: bool = False, gated: bool | str = False) -> None:
        self.id, self.private, self.gated = id, private, gated
        self.access = True
        self.branches: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}

    def sha(self, revision: str = "main") -> str:
        """Return the commit of a branch, of refs/pr/N, or of its own hash. Raises KeyError if there is none."""
        if revision in self.commits:
            return revision
        return self.branches[revision]

    def blobs(self, revision: str = "main") -> Mapping[str, Blob]:
        return self.commits[self.sha(revision)].files

    def files(self, revision: str = "main") -> dict[str, Content]:
        return {name: blob.content for name, blob in self.blobs(revision).items()}

    def read(self, name: str, revision: str = "main") -> bytes:
        return _bytes(self.blobs(revision)[name].content)

    def advance(self, branch: str, changes: Mapping[str, Blob | None], *, title: str = "commit") -> str:
        """Commit to a branch, which is created if there is none. None deletes a file."""
        parent = self.branches.get(branch)
        files = {**(self.commits[parent].files if parent else {}), **changes}
        state = [self.id, len(self.commits), parent, title, sorted(files)]
        sha = hashlib.sha1(json.dumps(state).encode()).hexdigest()
        kept = {name: blob for name, blob in files.items() if blob is not None}
        self.commits[sha] = Commit(title=title, files=kept)
        self.branches[branch] = sha
        return sha


def _bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


class LoopbackHub:
    """A Hub that serves inside `with`.

    folder: where uploads go; by default a temporary folder
    cdn: whether downloads of LFS files are redirected, as the Hub does it, to a signed address on another host (here
        "localhost"), which takes no token
    requests: what was asked so far, in order
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.cdn = False
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, Blob] = {}  # LFS files by their SHA-256
        self.lock = threading.RLock()
        self._given_folder = folder
        self._served = FaultyApplication(
            loopback_endpoints.application(self), "hf_" + "LoopbackHubToken".ljust(34, "x")
        )
        self.requests = self._served.requests

    def __enter__(self) -> LoopbackHub:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # it reports what faults leave behind
        self.folder = self._given_folder or Path(tempfile.mkdtemp(prefix="loopback-hub-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server = make_server("127.0.0.1", 0, self._served, threaded=True)
        self._server.daemon_threads = True
        # With the default interval of polling, each stop would take half a second.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.port = int(self._server.server_port)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error: object) -> None:
        self._served.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self._given_folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def token(self) -> str:
        return self._served.token

    @token.setter
    def token(self, token: str) -> None:
        self._served.token = token

    def inject(self, *faults: Fault) -> None:
        """Add faults. If several match a request, only the first one that is due acts."""
        self._served.faults += [(fault, []) for fault in faults]

    def clear_faults(self) -> None:
        self._served.faults.clear()

    def environment(self, home: Path) -> dict[str, str]:
        """Return os.environ for a subprocess that uses this Hub as the user "me", with its caches in `home`."""
        others = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE")
        kept = (name for name in os.environ if not name.startswith(others) and not name.lower().endswith("_proxy"))
        return {name: os.environ[name] for name in kept} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def create(self, id: str, private: bool = False, gated: bool | str = False) -> Repository:
        """Create a repository with one empty commit."""
        with self.lock:
            assert id not in self.repositories, f"{id} exists"
            repository = self.repositories[id] = Repository(id, private, gated)
            repository.advance("main", {}, title="initial commit")
            return repository

    def commit(
        self,
        id: str,
        files: Mapping[str, Content | None],
        *,
        branch: str = "main",
        sha256: Mapping[str, str] | None = None,
    ) -> str:
        """Commit files, and return the commit.

        files: bytes, files on disk, which are served from there, or None to delete
        branch: created from main if it is missing, as is the repository
        sha256: the hashes of LFS files, as far as they are known
        """
        hashes = sha256 or {}
        blobs = {
            name: None if content is None else Blob.of(name, content, hashes.get(name))
            for name, content in files.items()
        }
        with self.lock:
            repository = self.repositories.get(id) or self.create(id)
            repository.branches.setdefault(branch, repository.branches["main"])
            self.objects.update((blob.sha256, blob) for blob in blobs.values() if blob and blob.sha256)
            return repository.advance(branch, blobs)
