"""A small Hugging Face Hub on the loopback: repositories, LFS uploads, ranged downloads, and faults on demand.

It does what huggingface_hub 2.4 expects of the Hub (loopback_endpoints.py), but knows only models, ids of the form
namespace/name, one user ("me") and basic LFS transfers. It does not know xet: clients must run with
HF_HUB_DISABLE_XET=1, which `LoopbackHub.environment` sets. Only the standard library is needed.

    with LoopbackHub() as hub:
        hub.commit("me/x", {"config.json": b"{}", "model.safetensors": Path("model.safetensors")})
        hub.inject(Fault(Cut(1000), method="GET", path=r"resolve/.*safetensors", times=2))
        subprocess.run([...], env=hub.environment(home))
        hub.requests  # what was asked, and what was answered
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from loopback_faults import Corrupt, Cut, Drop, Fault, FaultQueue, Run, Short, Stall, Status
from loopback_repositories import Blob, Content, Repository
from loopback_server import Request, Server

__all__ = ["Content", "Corrupt", "Cut", "Drop", "Fault", "LoopbackHub", "Request", "Run", "Short", "Stall", "Status"]


class LoopbackHub:
    """A Hub that serves inside `with`.

    folder: where uploads go; by default a temporary folder
    cdn: whether downloads of LFS files are redirected, as the Hub does it, to a signed address on another host (here
        "localhost"), which takes no token
    """

    def __init__(self, folder: Path | None = None, cdn: bool = False) -> None:
        self.token = "hf_" + "LoopbackHubToken".ljust(34, "x")
        self.cdn = cdn
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.objects: dict[str, tuple[Content, int]] = {}  # sha256 -> content, bytes
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self.pending = FaultQueue()
        self._given_folder = folder
        self._uploads = 0

    def __enter__(self) -> LoopbackHub:
        if self._given_folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="loopback-hub-"))
        else:
            self.folder = self._given_folder
            self.folder.mkdir(parents=True, exist_ok=True)
        self.stopping.clear()
        self._server = Server(self)
        # With the default interval of polling, each stop would take half a second.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.close_connections()
        if self._given_folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return os.environ for a subprocess that uses this Hub as the user "me", with its caches in `home`."""
        ours = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE")
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ours) and not name.lower().endswith("_proxy")
        }
        return environment | {
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
        title: str = "commit",
    ) -> str:
        """Commit files, and return the commit.

        files: bytes, files on disk, which are served from there, or None to delete
        branch: created from main if it is missing, as is the repository
        sha256: the hashes of LFS files, as far as they are known
        """
        blobs = {
            name: None if content is None else Blob.of(name, content, (sha256 or {}).get(name))
            for name, content in files.items()
        }
        with self.lock:
            repository = self.repositories.get(id) or self.create(id)
            repository.branches.setdefault(branch, repository.branches["main"])
            self.objects.update(
                (blob.sha256, (blob.content, blob.size)) for blob in blobs.values() if blob is not None and blob.lfs
            )
            return repository.advance(branch, blobs, title=title)

    @property
    def faults(self) -> list[Fault]:
        """The faults that are not used up."""
        return self.pending.waiting

    def inject(self, *faults: Fault) -> None:
        """Add faults. If several match a request, only the first one that is due acts."""
        self.pending.add(*faults)

    def clear_faults(self) -> None:
        self.pending.clear()

    def upload_path(self) -> Path:
        """Return where the next upload is written."""
        with self.lock:
            self._uploads += 1
            return self.folder / f"upload-{self._uploads}.part"
