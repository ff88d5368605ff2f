"""A small Hugging Face Hub on the loopback: repositories, LFS uploads, ranged downloads, and faults on demand.

It owns what a client sees of the Hub: the endpoints, headers, status codes and error messages that huggingface_hub 2.4
relies on. It knows models only, ids of the form namespace/name, one user ("me"), basic LFS transfers, and no xet: clients
must run with HF_HUB_DISABLE_XET=1 (`LoopbackHub.environment` sets it). Only the standard library is needed.

    with LoopbackHub() as hub:
        hub.commit("me/x", {"config.json": b"{}", "model.safetensors": Path("model.safetensors")})
        hub.inject(Fault(Cut(1000), method="GET", path=r"resolve/.*safetensors", times=2))
        subprocess.run([...], env=hub.environment(home))
        hub.requests  # what was asked, and what was answered
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, unquote_plus

USER = "me"
Content = bytes | Path

# As .gitattributes of a new repository names them; anything larger than this is LFS, too.
LFS_SUFFIXES = (
    ".7z", ".arrow", ".bin", ".bz2", ".ckpt", ".ftz", ".gguf", ".gz", ".h5", ".joblib", ".mlmodel", ".model", ".msgpack",
    ".npy", ".npz", ".onnx", ".ot", ".parquet", ".pb", ".pickle", ".pkl", ".pt", ".pth", ".rar", ".safetensors", ".tar",
    ".tflite", ".tgz", ".wasm", ".xz", ".zip", ".zst",
)  # fmt: skip
MAX_REGULAR_BYTES = 1_000_000
MAX_HASHED_BYTES = 1_000_000_000  # above it, the sha256 of a file on disk is made up unless it is given
PIECE_BYTES = 1 << 20
DATE = "2026-01-01T00:00:00.000Z"


# --- Faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """Answer with this status; nothing is done."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "injected"}'


@dataclass(frozen=True)
class Cut:
    """Send the right headers and so many bytes of the body, then close the connection.

    A PUT is cut while its body is read, and stores nothing. reset: close with RST, which may also destroy what is still
    under way, instead of FIN.
    """

    bytes: int
    reset: bool = False


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer. applied: after having done what was asked (a lost reply)."""

    applied: bool = False
    reset: bool = False


@dataclass(frozen=True)
class Short:
    """Announce and send at most so many bytes. consistent: Content-Range tells the truth, too."""

    bytes: int
    consistent: bool = True


@dataclass(frozen=True)
class Corrupt:
    """Flip the lowest bit of the byte at this position of the file (of the body, where it is no file's)."""

    position: int


@dataclass(frozen=True)
class Stall:
    """Wait before the answer or, with `at`, after so many bytes of its body."""

    seconds: float
    at: int | None = None


@dataclass(frozen=True)
class Run:
    """Call a function before the answer, in the server's thread."""

    call: Callable[[], object]


Action = Status | Cut | Drop | Short | Corrupt | Stall | Run


@dataclass(frozen=True)
class Fault:
    """What happens to which requests.

    method: None for any. path: a regular expression, searched in the decoded path without the query. times: how many
    matching requests are hit. after: how many pass before that. name: for tables; made from the action by default.
    """

    action: Action
    method: str | None = None
    path: str = ""
    times: int = 1
    after: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", _describe(self.action))

    def matches(self, method: str, path: str) -> bool:
        return self.method in (None, method) and re.search(self.path, path, re.DOTALL) is not None


def _describe(action: Action) -> str:
    match action:
        case Status(code):
            return f"status {code}"
        case Cut(count, reset):
            return f"cut after {count} bytes" + (" (RST)" if reset else "")
        case Drop(applied, reset):
            return ("reply lost" if applied else "dropped") + (" (RST)" if reset else "")
        case Short(count, consistent):
            return f"short: {count} bytes" + ("" if consistent else ", wrong Content-Range")
        case Corrupt(position):
            return f"bit flipped at {position}"
        case Stall(seconds, at):
            return f"stall of {seconds:g} s" + ("" if at is None else f" at byte {at}")
        case Run():
            return "run"


@dataclass
class _Pending:
    """A fault and how often it matched."""

    fault: Fault
    passed: int = 0
    hits: int = 0


# --- Repositories -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blob:
    """A file's content, and what listings say of it. oid: git's, of the content or of its LFS pointer."""

    content: Content
    size: int
    sha256: str
    oid: str
    lfs: bool

    @classmethod
    def of(cls, name: str, content: Content, sha256: str | None = None) -> Blob:
        """As the Hub would store it."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if not is_lfs(name, size):
            return cls.regular(content if isinstance(content, bytes) else content.read_bytes())
        if sha256 is None:
            invent = isinstance(content, Path) and size > MAX_HASHED_BYTES
            sha256 = hashlib.sha256(f"{name}:{size}".encode()).hexdigest() if invent else _sha256(content, size)
        return cls.large(content, size, sha256)

    @classmethod
    def regular(cls, content: bytes) -> Blob:
        return cls(content, len(content), hashlib.sha256(content).hexdigest(), _git_sha1(content), False)

    @classmethod
    def large(cls, content: Content, size: int, sha256: str) -> Blob:
        return cls(content, size, sha256, _git_sha1(_pointer(sha256, size)), True)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    def read(self) -> bytes:
        return b"".join(bytes(piece) for piece in _pieces(self.content, 0, self.size))


def is_lfs(name: str, size: int) -> bool:
    """Whether a file is stored with LFS. Empty ones never are."""
    return size > MAX_REGULAR_BYTES or (size > 0 and name.endswith(LFS_SUFFIXES))


@dataclass(frozen=True)
class Commit:
    """A state of a repository, and where it came from."""

    sha: str
    parent: str | None
    title: str
    description: str
    files: Mapping[str, Blob]


class Repository:
    """Branches (and refs/pr/N) that point to commits.

    access: whether the user "me" is let in where the repository is private or gated.
    """

    def __init__(self, id: str, private: bool = False, gated: bool | str = False) -> None:
        self.id = id
        self.private = private
        self.gated = gated
        self.access = True
        self.branches: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}
        self.pull_requests = 0

    def sha(self, revision: str = "main") -> str:
        """Of a branch, of refs/pr/N, or of a commit named by 7 digits or more. KeyError where there is none."""
        if revision in self.branches:
            return self.branches[revision]
        found = [sha for sha in self.commits if len(revision) >= 7 and sha.startswith(revision)]
        if len(found) != 1:
            raise KeyError(revision)
        return found[0]

    def blobs(self, revision: str = "main") -> Mapping[str, Blob]:
        return self.commits[self.sha(revision)].files

    def files(self, revision: str = "main") -> dict[str, Content]:
        return {name: blob.content for name, blob in self.blobs(revision).items()}

    def read(self, name: str, revision: str = "main") -> bytes:
        return self.blobs(revision)[name].read()

    def advance(
        self, branch: str, changes: Mapping[str, Blob | None], title: str = "commit", description: str = ""
    ) -> str:
        """Commit to a branch, which is made where there is none. None deletes."""
        parent = self.branches.get(branch)
        files = dict(self.commits[parent].files) if parent else {}
        for name, blob in changes.items():
            if blob is None:
                files.pop(name, None)
            else:
                files[name] = blob
        state = [self.id, len(self.commits), parent, title, [[name, blob.oid] for name, blob in sorted(files.items())]]
        sha = hashlib.sha1(json.dumps(state).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, description, files)
        self.branches[branch] = sha
        return sha


# --- The hub ----------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """What was served. path: decoded, without the query. status: 0 where the connection was closed without a reply."""

    method: str
    path: str
    query: str
    range: str | None
    authorized: bool
    status: int = 0
    bytes_sent: int = 0
    fault: str | None = None


class LoopbackHub:
    """The Hub; serves from `with` on. folder: where uploads go; a temporary one by default.

    cdn: answer downloads of LFS files as the Hub does, with a redirect to a signed address on another host (here
    "localhost"), which takes no token.
    """

    def __init__(self, folder: Path | None = None, cdn: bool = False) -> None:
        self.token = "hf_" + "LoopbackHubToken".ljust(34, "x")
        self.cdn = cdn
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.objects: dict[str, tuple[Content, int]] = {}  # sha256 -> content, bytes
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self._pending: list[_Pending] = []
        self._given_folder = folder
        self._uploads = 0

    def __enter__(self) -> LoopbackHub:
        if self._given_folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="loopback-hub-"))
        else:
            self.folder = self._given_folder
            self.folder.mkdir(parents=True, exist_ok=True)
        self.stopping.clear()
        self._server = _Server(self)
        # The default interval of polling would make every stop half a second long.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """os.environ for a subprocess that shall see this Hub, as the user "me", with its caches in `home`."""
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
        """A repository with one empty commit."""
        with self.lock:
            assert id not in self.repositories, f"{id} exists"
            repository = self.repositories[id] = Repository(id, private, gated)
            repository.advance("main", {}, "initial commit")
            return repository

    def commit(
        self,
        id: str,
        files: Mapping[str, Content | None],
        branch: str = "main",
        sha256: Mapping[str, str] | None = None,
        title: str = "commit",
    ) -> str:
        """Commit bytes, files on disk (which are served from there) or deletions (None); returns the commit's sha.

        The repository is made where it is missing, the branch from main. sha256: of LFS files, where it is known.
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
            return repository.advance(branch, blobs, title)

    @property
    def faults(self) -> list[Fault]:
        """Those that are not used up."""
        with self.lock:
            return [pending.fault for pending in self._pending]

    def inject(self, *faults: Fault) -> None:
        """Add faults. Where several match a request, the one that was injected first and is due acts, alone."""
        with self.lock:
            self._pending += [_Pending(fault) for fault in faults if fault.times > 0]

    def clear_faults(self) -> None:
        with self.lock:
            self._pending.clear()

    def _due(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for pending in self._pending:
                if not pending.fault.matches(method, path):
                    continue
                if pending.passed < pending.fault.after:
                    pending.passed += 1
                    continue
                pending.hits += 1
                if pending.hits == pending.fault.times:
                    self._pending.remove(pending)
                return pending.fault
        return None

    def _upload_path(self) -> Path:
        with self.lock:
            self._uploads += 1
            return self.folder / f"upload-{self._uploads}.part"


# --- What is answered -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reply:
    """A status, headers, and the bytes [start, stop) of a content."""

    status: int
    headers: dict[str, str]
    content: Content
    start: int
    stop: int


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> _Reply:
    body = json.dumps(value).encode()
    return _Reply(status, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, body, 0, len(body))


class _Refused(Exception):
    """An error reply. code: the X-Error-Code, by which huggingface_hub chooses the exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if code is not None:
            named["X-Error-Code"] = code
        self.reply = _json({"error": message}, status, {"X-Error-Message": message, **named})


@dataclass(frozen=True)
class _Call:
    """A request, as the functions below take it. names: the groups of its route, percent-decoded."""

    hub: LoopbackHub
    method: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    range: str | None
    user: str | None
    body: _Body

    def repository(self) -> Repository:
        """The one that is named, if it may be seen."""
        repository = self.hub.repositories.get(self.names["id"])
        if repository is not None and (not repository.private or (self.user and repository.access)):
            return repository
        if self.user is None:  # The Hub does not tell strangers what exists.
            raise _Refused(401, "Invalid username or password.", "RepoNotFound")
        raise _Refused(404, "Repository not found", "RepoNotFound")

    def writable(self, anyone: bool = False) -> Repository:
        """The one that is named, if it may be written. anyone: whether other users' will do, as for a pull request."""
        if self.user is None:
            raise _Refused(401, "Invalid username or password.", "RepoNotFound")
        repository = self.repository()
        if not anyone and repository.id.split("/")[0] != self.user:
            raise _Refused(403, "Forbidden: you must use a token with write access to this repository")
        return repository

    def commit(self, repository: Repository) -> Commit:
        revision = self.names.get("revision") or "main"
        try:
            return repository.commits[repository.sha(revision)]
        except KeyError:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true")

    def json(self) -> Any:
        return json.loads(self.body.read() or b"{}")


def _whoami(call: _Call) -> _Reply:
    if call.user is None:
        raise _Refused(401, "Invalid username or password.")
    return _json(
        {
            "type": "user", "id": "0" * 24, "name": USER, "fullname": "Me", "email": "me@example.org", "orgs": [],
            "isPro": False, "auth": {"type": "access_token", "accessToken": {"displayName": "loopback", "role": "write"}},
        }
    )  # fmt: skip


def _create(call: _Call) -> _Reply:
    wanted = call.json()
    if call.user is None:
        raise _Refused(401, "Invalid username or password.")
    namespace = wanted.get("organization") or USER
    id = f"{namespace}/{wanted['name']}"
    url = f"{call.hub.url}/{id}"
    if namespace != USER:
        raise _Refused(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
    with call.hub.lock:
        if id in call.hub.repositories:
            return _json({"error": "You already created this model repo", "url": url}, 409)
        repository = Repository(id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        repository.advance("main", {".gitattributes": Blob.regular(attributes.encode())}, "initial commit")
        call.hub.repositories[id] = repository
    return _json({"url": url, "name": id, "id": "0" * 24})


def _validate_yaml(call: _Call) -> _Reply:
    return _json({"errors": [], "warnings": []})


def _info(call: _Call) -> _Reply:
    repository = call.repository()
    commit = call.commit(repository)
    siblings: list[dict[str, Any]] = []
    for name, blob in sorted(commit.files.items()):
        sibling: dict[str, Any] = {"rfilename": name}
        if call.flag("blobs"):
            sibling |= {"size": blob.size, "blobId": blob.oid}
            if blob.lfs:
                sibling["lfs"] = {"sha256": blob.sha256, **_lfs_sizes(blob)}
        siblings.append(sibling)
    return _json(
        {
            "_id": "0" * 24, "id": repository.id, "modelId": repository.id, "author": repository.id.split("/")[0],
            "sha": commit.sha, "lastModified": DATE, "createdAt": DATE, "private": repository.private,
            "gated": repository.gated, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
            "usedStorage": sum(blob.size for blob in commit.files.values()),
        }
    )  # fmt: skip


def _lfs_sizes(blob: Blob) -> dict[str, int]:
    return {"size": blob.size, "pointerSize": len(_pointer(blob.sha256, blob.size))}


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": blob.size, "path": name}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, **_lfs_sizes(blob)}
    return entry


def _folders(files: Mapping[str, Blob]) -> dict[str, dict[str, Any]]:
    names = {name[: at.start()] for name in files for at in re.finditer("/", name)} - {""}
    return {
        name: {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
        for name in sorted(names)
    }


def _tree(call: _Call) -> _Reply:
    files = call.commit(call.repository()).files
    entries = _folders(files) | {name: _entry(name, blob) for name, blob in sorted(files.items())}
    folder = call.names.get("rest") or ""
    inside = {name: entry for name, entry in entries.items() if not folder or name.startswith(folder + "/")}
    if folder and not inside:
        raise _Refused(404, f"{folder} does not exist on this revision", "EntryNotFound")
    if not call.flag("recursive"):
        start = len(folder) + 1 if folder else 0
        inside = {name: entry for name, entry in inside.items() if "/" not in name[start:]}
    return _json(list(inside.values()))


def _paths_info(call: _Call) -> _Reply:
    files = call.commit(call.repository()).files
    text = call.body.read().decode()
    try:
        paths = json.loads(text)["paths"]
    except ValueError:
        paths = parse_qs(text).get("paths", [])
    entries = _folders(files) | {name: _entry(name, blob) for name, blob in files.items()}
    return _json([entries[path] for path in paths if path in entries])


def _refs(call: _Call) -> _Reply:
    repository = call.repository()

    def refs(of_pull_requests: bool) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": name if of_pull_requests else f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in repository.branches.items()
            if name.startswith("refs/pr/") == of_pull_requests
        ]

    return _json({"branches": refs(False), "converts": [], "tags": [], "pullRequests": refs(True)})


def _create_branch(call: _Call) -> _Reply:
    repository, name = call.writable(), call.names["rest"]
    start = call.json().get("startingPoint") or "main"
    with call.hub.lock:
        if name in repository.branches:
            raise _Refused(409, f"Reference already exists: refs/heads/{name}")
        try:
            repository.branches[name] = repository.sha(start)
        except KeyError:
            raise _Refused(404, f"Invalid rev id: {start}", "RevisionNotFound") from None
    return _json({})


def _delete_branch(call: _Call) -> _Reply:
    if call.writable().branches.pop(call.names["rest"], None) is None:
        raise _Refused(404, f"Invalid rev id: {call.names['rest']}", "RevisionNotFound")
    return _json({})


def _preupload(call: _Call) -> _Reply:
    stored = call.commit(call.writable(anyone=call.flag("create_pr"))).files
    return _json(
        {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_lfs(file["path"], file["size"]) else "regular",
                    "shouldIgnore": False,
                    "oid": stored[file["path"]].etag if file["path"] in stored else None,
                }
                for file in call.json()["files"]
            ]
        }
    )


def _lfs_batch(call: _Call) -> _Reply:
    call.writable(anyone=True)
    objects = []
    for wanted in call.json()["objects"]:
        answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in call.hub.objects:
            href = f"{call.hub.url}/uploads/{wanted['oid']}"
            answer["actions"] = {"upload": {"href": href, "header": {}, "expires_in": 3600}}
        objects.append(answer)
    return _json({"transfer": "basic", "objects": objects})


def _upload(call: _Call) -> _Reply:
    """What S3 does: it knows no tokens, but the address."""
    hub, oid = call.hub, call.names["oid"]
    part, digest, size = hub._upload_path(), hashlib.sha256(), 0
    try:
        with part.open("wb") as file:
            for piece in call.body.pieces():
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        if digest.hexdigest() != oid:
            raise _Refused(400, "The provided x-amz-content-sha256 header does not match what was computed.")
        part.replace(hub.folder / oid)
    finally:
        part.unlink(missing_ok=True)
    with hub.lock:
        hub.objects[oid] = (hub.folder / oid, size)
    return _json({})


def _commit(call: _Call) -> _Reply:
    hub, as_pull_request = call.hub, call.flag("create_pr")
    repository = call.writable(anyone=as_pull_request)
    lines = [json.loads(line) for line in call.body.read().splitlines() if line]
    header = lines[0]["value"]
    with hub.lock:
        branch, parent = call.names["revision"], header.get("parentCommit")
        if branch not in repository.branches:
            raise _Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        tip = repository.branches[branch]
        if parent is not None and not tip.startswith(parent):
            if not as_pull_request:
                raise _Refused(412, "A commit has happened since. Please refresh and try again.")
            try:
                tip = repository.sha(parent)
            except KeyError:
                raise _Refused(404, f"Invalid rev id: {parent}", "RevisionNotFound") from None
        changes = _changes(hub, repository.commits[tip].files, lines[1:])
        pull_request: dict[str, Any] = {}
        if as_pull_request:
            repository.pull_requests += 1
            number = repository.pull_requests
            branch = f"refs/pr/{number}"
            repository.branches[branch] = tip
            url = f"{hub.url}/{repository.id}/discussions/{number}"
            pull_request = {"pullRequestUrl": url, "pullRequestNum": number}
        sha = repository.advance(branch, changes, header["summary"], header.get("description", ""))
    url = f"{hub.url}/{repository.id}/commit/{sha}"
    return _json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": "", **pull_request})


def _changes(hub: LoopbackHub, files: Mapping[str, Blob], lines: list[dict[str, Any]]) -> dict[str, Blob | None]:
    """Of a commit's lines."""
    changes: dict[str, Blob | None] = {}
    for line in lines:
        key, value = line["key"], line["value"]
        name = value["path"]
        if key == "file":
            changes[name] = Blob.regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in hub.objects:
                raise _Refused(
                    400,
                    "Your push was rejected because an LFS pointer pointed to a file that does not exist. For instance, "
                    f"this can happen if you used git push --no-verify to push your changes. Offending file: - {name}",
                )
            changes[name] = Blob.large(*hub.objects[value["oid"]], value["oid"])
        elif key in ("deletedFile", "deletedFolder"):
            folder = name.rstrip("/") + "/"
            gone = [n for n in files if (n == name if key == "deletedFile" else n.startswith(folder))]
            if not gone:
                raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            changes |= dict.fromkeys(gone)
        else:
            raise _Refused(400, f"unknown operation {key}")
    return changes


def _resolve(call: _Call) -> _Reply:
    repository = call.repository()
    if repository.gated and not (call.user and repository.access):
        restricted = f"Access to model {repository.id} is restricted"
        if call.user is None:
            raise _Refused(401, f"{restricted}. You must have access to it and be authenticated.", "GatedRepo")
        raise _Refused(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
    commit = call.commit(repository)
    blob = commit.files.get(call.names["name"])
    if blob is None:
        raise _Refused(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.sha)
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
    if blob.lfs:
        headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size)}
        if call.hub.cdn:
            location = f"http://localhost:{call.hub.port}/cdn/{blob.sha256}?Expires=1&Signature=loopback"
            return _Reply(302, {**headers, "Location": location}, b"", 0, 0)
    return _ranged(call.range, headers, blob.content, blob.size)


def _cdn(call: _Call) -> _Reply:
    stored = call.hub.objects.get(call.names["oid"])
    if stored is None or "Signature" not in call.query:
        raise _Refused(403, "Access denied")
    return _ranged(call.range, {"ETag": f'"{call.names["oid"]}"', "Accept-Ranges": "bytes"}, *stored)


def _ranged(wanted: str | None, headers: dict[str, str], content: Content, size: int) -> _Reply:
    """The whole, or what the header Range asks for."""
    headers = {"Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None or match[0] == "bytes=-":
        return _Reply(200, headers, content, 0, size)
    if match[1]:
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= stop:
        raise _Refused(416, "Requested range not satisfiable", Content_Range=f"bytes */{size}")
    return _Reply(206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, content, start, stop)


_ID = r"(?P<id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_MODEL = rf"/api/models/{_ID}"
_ROUTES: list[tuple[str, str, Callable[[_Call], _Reply]]] = [
    ("GET", r"/api/whoami-v2", _whoami),
    ("POST", r"/api/repos/create", _create),
    ("POST", r"/api/validate-yaml", _validate_yaml),
    ("GET", _MODEL, _info),
    ("GET", rf"{_MODEL}/revision/{_REVISION}", _info),
    ("GET", rf"{_MODEL}/tree/{_REVISION}(?:/(?P<rest>.*))?", _tree),
    ("GET", rf"{_MODEL}/refs", _refs),
    ("POST", rf"{_MODEL}/paths-info/{_REVISION}", _paths_info),
    ("POST", rf"{_MODEL}/preupload/{_REVISION}", _preupload),
    ("POST", rf"{_MODEL}/commit/{_REVISION}", _commit),
    ("POST", rf"{_MODEL}/branch/(?P<rest>.+)", _create_branch),
    ("DELETE", rf"{_MODEL}/branch/(?P<rest>.+)", _delete_branch),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _lfs_batch),
    ("PUT", r"/uploads/(?P<oid>[0-9a-f]{64})", _upload),
    ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", _cdn),
    ("GET", rf"/{_ID}/resolve/{_REVISION}/(?P<name>.+)", _resolve),
]


# --- The wire ---------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    """A thread for each connection; connections are closed with the Hub."""

    request_queue_size = 128
    block_on_close = False

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def close_connections(self) -> None:
        with self.hub.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):  # gone already
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients may leave at any time
            super().handle_error(request, client_address)


class _Body:
    """What a client sends with a request: so many bytes, or chunks."""

    def __init__(self, file: BufferedIOBase, length: int, chunked: bool) -> None:
        self._file = file
        self._left = length
        self._chunked = chunked

    def pieces(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """The rest, or so much of it."""
        while max_bytes is None or max_bytes > 0:
            if self._left == 0 and self._chunked:
                self._left = int(self._file.readline().split(b";")[0], 16)
                if self._left == 0:
                    self._chunked = False
                    self._file.readline()
                else:
                    self._left += 2  # the line break behind it
            if self._left == 0:
                return
            framing = 2 if self._chunked else 0
            want = min(self._left - framing, PIECE_BYTES)
            if max_bytes is not None:
                want = min(want, max_bytes)
            piece = self._file.read(want)
            if len(piece) < want:
                raise ConnectionAbortedError("the client left in the middle of a request")
            self._left -= want
            if framing and self._left == framing:
                self._file.readline()
                self._left = 0
            if max_bytes is not None:
                max_bytes -= want
            yield piece

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def drain(self) -> None:
        for _ in self.pieces():
            pass


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, finds who answers, and sends the answers, faults included."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.hub
        with self.hub.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.hub.lock:
            self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        raw, _, query = self.path.partition("?")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path, wanted = unquote(raw), self.headers.get("Range")
        record = Request(self.command, path, query, wanted, authorized=token == self.hub.token)
        body = _Body(
            self.rfile,
            int(self.headers.get("Content-Length", 0)),
            "chunked" in self.headers.get("Transfer-Encoding", ""),
        )
        fault = self.hub._due(self.command, path)
        action = None if fault is None else fault.action
        record.fault = None if fault is None else fault.name
        with self.hub.lock:
            self.hub.requests.append(record)
        match action:
            case Drop(applied=False):
                return self._close(action.reset)
            case Cut() if self.command == "PUT":
                for _ in body.pieces(action.bytes):
                    pass
                return self._close(action.reset)
            case Stall(seconds, None):
                if self.hub.stopping.wait(seconds):
                    return self._close(reset=False)
            case Run(call):
                call()
        if isinstance(action, Status):
            reply = _Reply(action.code, dict(action.headers), action.body, 0, len(action.body))
        else:
            reply = self._answer(raw, query, token, body)
        body.drain()
        if isinstance(action, Drop):
            return self._close(action.reset)
        return self._send(reply, action, record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, raw: str, query: str, token: str, body: _Body) -> _Reply:
        method = "GET" if self.command == "HEAD" else self.command
        signed = raw.startswith(("/uploads/", "/cdn/"))
        try:
            if token and token != self.hub.token and not signed:
                raise _Refused(401, "Invalid credentials in Authorization header")
            for verb, pattern, function in _ROUTES:
                match = re.fullmatch(pattern, raw) if verb == method else None
                if match is not None:
                    names = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    pairs = (pair.partition("=") for pair in query.split("&") if pair)
                    asked = {unquote_plus(key): unquote_plus(value) for key, _, value in pairs}
                    user = USER if token else None
                    return function(_Call(self.hub, method, names, asked, self.headers.get("Range"), user, body))
            raise _Refused(404, "Sorry, we can't find the page you are looking for.")
        except _Refused as refused:
            return refused.reply
        except OSError:
            raise
        except Exception:  # a bug of this file, or a request that makes no sense: tests must see it
            traceback.print_exc()
            return _json({"error": traceback.format_exc()}, 500)

    def _send(self, reply: _Reply, action: Action | None, record: Request) -> None:
        start, stop = reply.start, reply.stop
        headers = dict(reply.headers)
        if isinstance(action, Short):
            stop = min(stop, start + action.bytes)
            if action.consistent and "Content-Range" in headers:
                headers["Content-Range"] = re.sub(r"-\d+", f"-{stop - 1}", headers["Content-Range"])
        record.status = reply.status
        self.send_response(reply.status)
        for name, value in headers.items():
            # Names of files may be anything; headers are Latin-1, and of one line.
            self.send_header(name, quote(value, safe=" !\"#$%&'()*+,/:;<=>?@[]{}|"))
        self.send_header("X-Request-Id", f"Root=1-{id(record):x}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = min(stop, start + action.bytes) if isinstance(action, Cut) else stop
        if isinstance(action, Stall) and action.at is not None:
            pause = min(start + action.at, end)
            self._send_pieces(reply.content, start, pause, action, record)
            if self.hub.stopping.wait(action.seconds):
                self._close(reset=False)
                return
            start = pause
        self._send_pieces(reply.content, start, end, action, record)
        if isinstance(action, Cut):
            self._close(action.reset)

    def _send_pieces(self, content: Content, start: int, stop: int, action: Action | None, record: Request) -> None:
        for piece in _pieces(content, start, stop):
            if isinstance(action, Corrupt) and start <= action.position < start + len(piece):
                piece = bytearray(piece)
                piece[action.position - start] ^= 1
            # Counted before, as the client may look at the record as soon as it has the last byte.
            record.bytes_sent += len(piece)
            try:
                self.connection.sendall(piece)
            except OSError:
                record.bytes_sent -= len(piece)
                raise
            start += len(piece)
        if start < stop:
            self._close(reset=False)  # the file on disk has become shorter

    def _close(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # Closed under the feet of the base class, which would send FIN first.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with self.hub.lock:
                self.server.connections.discard(self.connection)
            os.close(self.connection.detach())


# --- Bytes ------------------------------------------------------------------------------------------------------------


def _pieces(content: Content, start: int, stop: int) -> Iterator[memoryview | bytes | bytearray]:
    """The bytes [start, stop); fewer, where a file on disk has become shorter."""
    if isinstance(content, bytes):
        view = memoryview(content)[:stop]
        for position in range(start, stop, PIECE_BYTES):
            yield view[position : position + PIECE_BYTES]
        return
    descriptor = os.open(content, os.O_RDONLY)
    try:
        while start < stop and (piece := os.pread(descriptor, min(PIECE_BYTES, stop - start), start)):
            yield piece
            start += len(piece)
    finally:
        os.close(descriptor)


def _sha256(content: Content, size: int) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(content, 0, size):
        digest.update(piece)
    return digest.hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _pointer(sha256: str, size: int) -> bytes:
    """The text that git keeps in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
