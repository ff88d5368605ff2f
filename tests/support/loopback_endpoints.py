"""The endpoints of the loopback Hub: the routes, status codes and error messages that huggingface_hub 2.4 relies on."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopback_repositories import LFS_SUFFIXES, Blob, Commit, Content, Repository, is_lfs, lfs_pointer

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub
    from loopback_server import Body

USER = "me"
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A status, headers, and the bytes [start, stop) of a content."""

    status: int
    headers: dict[str, str]
    content: Content = b""
    start: int = 0
    stop: int = 0


def json_reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    body = json.dumps(value).encode()
    named = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
    return Reply(status=status, headers=named, content=body, stop=len(body))


class Refused(Exception):
    """An error reply. code: the X-Error-Code, from which huggingface_hub chooses the exception."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if code is not None:
            named["X-Error-Code"] = code
        self.reply = json_reply({"error": message}, status, {"X-Error-Message": message, **named})


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as the functions below take it.

    names: the groups of its route, percent-decoded
    query: its query, decoded
    range: its header Range
    user: who sends it; None without a token
    body: what the client sends
    """

    hub: LoopbackHub
    method: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    range: str | None
    user: str | None
    body: Body

    def repository(self) -> Repository:
        """Return the repository that is named, if the user may see it."""
        repository = self.hub.repositories.get(self.names["id"])
        if repository is not None and (not repository.private or (self.user and repository.access)):
            return repository
        if self.user is None:  # the Hub does not tell strangers what exists
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        raise Refused(404, "Repository not found", "RepoNotFound")

    def writable(self) -> Repository:
        """Return the repository that is named, if the user may write to it."""
        if self.user is None:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        repository = self.repository()
        if repository.id.split("/")[0] != self.user:
            raise Refused(403, "Forbidden: you must use a token with write access to this repository")
        return repository

    def commit(self, repository: Repository) -> Commit:
        revision = self.names.get("revision") or "main"
        try:
            return repository.commits[repository.sha(revision)]
        except KeyError:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true")

    def json(self) -> Any:
        return json.loads(self.body.read() or b"{}")


def _whoami(call: Call) -> Reply:
    if call.user is None:
        raise Refused(401, "Invalid username or password.")
    access_token = {"displayName": "loopback", "role": "write"}
    return json_reply(
        {
            "type": "user",
            "id": "0" * 24,
            "name": USER,
            "fullname": "Me",
            "email": "me@example.org",
            "orgs": [],
            "isPro": False,
            "auth": {"type": "access_token", "accessToken": access_token},
        }
    )


def _create(call: Call) -> Reply:
    wanted = call.json()
    if call.user is None:
        raise Refused(401, "Invalid username or password.")
    namespace = wanted.get("organization") or USER
    id = f"{namespace}/{wanted['name']}"
    url = f"{call.hub.url}/{id}"
    if namespace != USER:
        raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
    with call.hub.lock:
        if id in call.hub.repositories:
            return json_reply({"error": "You already created this model repo", "url": url}, 409)
        repository = Repository(id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        repository.advance("main", {".gitattributes": Blob.regular(attributes.encode())}, title="initial commit")
        call.hub.repositories[id] = repository
    return json_reply({"url": url, "name": id, "id": "0" * 24})


def _validate_yaml(call: Call) -> Reply:
    return json_reply({"errors": [], "warnings": []})


def _info(call: Call) -> Reply:
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
    return json_reply(
        {
            "_id": "0" * 24,
            "id": repository.id,
            "modelId": repository.id,
            "author": repository.id.split("/")[0],
            "sha": commit.sha,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repository.private,
            "gated": repository.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
            "usedStorage": sum(blob.size for blob in commit.files.values()),
        }
    )


def _lfs_sizes(blob: Blob) -> dict[str, int]:
    return {"size": blob.size, "pointerSize": len(lfs_pointer(blob.sha256, blob.size))}


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": blob.size, "path": name}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, **_lfs_sizes(blob)}
    return entry


def _tree(call: Call) -> Reply:
    """The files in a folder or below it, in which transformers looks for templates."""
    files, folder = call.commit(call.repository()).files, call.names.get("rest") or ""
    inside = {name: blob for name, blob in sorted(files.items()) if not folder or name.startswith(folder + "/")}
    if folder and not inside:
        raise Refused(404, f"{folder} does not exist on this revision", "EntryNotFound")
    return json_reply([_entry(name, blob) for name, blob in inside.items()])


def _refs(call: Call) -> Reply:
    repository = call.repository()

    def refs(of_pull_requests: bool) -> list[dict[str, str]]:
        return [
            {"name": name, "ref": name if of_pull_requests else f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in repository.branches.items()
            if name.startswith("refs/pr/") == of_pull_requests
        ]

    return json_reply({"branches": refs(False), "converts": [], "tags": [], "pullRequests": refs(True)})


def _create_branch(call: Call) -> Reply:
    repository, name = call.writable(), call.names["rest"]
    start = call.json().get("startingPoint") or "main"
    with call.hub.lock:
        if name in repository.branches:
            raise Refused(409, f"Reference already exists: refs/heads/{name}")
        try:
            repository.branches[name] = repository.sha(start)
        except KeyError:
            raise Refused(404, f"Invalid rev id: {start}", "RevisionNotFound") from None
    return json_reply({})


def _preupload(call: Call) -> Reply:
    stored = call.commit(call.writable()).files
    return json_reply(
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


def _lfs_batch(call: Call) -> Reply:
    call.writable()
    objects = []
    for wanted in call.json()["objects"]:
        answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in call.hub.objects:
            href = f"{call.hub.url}/uploads/{wanted['oid']}"
            answer["actions"] = {"upload": {"href": href, "header": {}, "expires_in": 3600}}
        objects.append(answer)
    return json_reply({"transfer": "basic", "objects": objects})


def _upload(call: Call) -> Reply:
    """Store an LFS file, as S3 does: the address is enough, a token is not needed."""
    hub, oid = call.hub, call.names["oid"]
    part, digest, size = hub.upload_path(), hashlib.sha256(), 0
    try:
        with part.open("wb") as file:
            for piece in call.body.pieces():
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        if digest.hexdigest() != oid:
            raise Refused(400, "The provided x-amz-content-sha256 header does not match what was computed.")
        part.replace(hub.folder / oid)
    finally:
        part.unlink(missing_ok=True)
    with hub.lock:
        hub.objects[oid] = (hub.folder / oid, size)
    return json_reply({})


def _commit(call: Call) -> Reply:
    hub, repository = call.hub, call.writable()
    lines = [json.loads(line) for line in call.body.read().splitlines() if line]
    header = lines[0]["value"]
    with hub.lock:
        branch = call.names["revision"]
        parent = _parent(repository, branch, header.get("parentCommit"))
        changes = _changes(hub, repository.commits[parent].files, lines[1:])
        sha = repository.advance(branch, changes, title=header["summary"])
    url = f"{hub.url}/{repository.id}/commit/{sha}"
    return json_reply({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


def _parent(repository: Repository, branch: str, wanted: str | None) -> str:
    """Return the commit that a commit builds on: the tip of its branch."""
    if branch not in repository.branches:
        raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
    tip = repository.branches[branch]
    if wanted is not None and not tip.startswith(wanted):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    return tip


def _changes(hub: LoopbackHub, files: Mapping[str, Blob], lines: list[dict[str, Any]]) -> dict[str, Blob | None]:
    """Return what the lines of a commit change; None deletes a file."""
    changes: dict[str, Blob | None] = {}
    for line in lines:
        key, value = line["key"], line["value"]
        name = value["path"]
        if key == "file":
            changes[name] = Blob.regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] not in hub.objects:
                raise Refused(
                    400,
                    "Your push was rejected because an LFS pointer pointed to a file that does not exist. For "
                    "instance, this can happen if you used git push --no-verify to push your changes. "
                    f"Offending file: - {name}",
                )
            changes[name] = Blob.large(*hub.objects[value["oid"]], value["oid"])
        elif key in ("deletedFile", "deletedFolder"):
            folder = name.rstrip("/") + "/"
            gone = [n for n in files if (n == name if key == "deletedFile" else n.startswith(folder))]
            if not gone:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            changes |= dict.fromkeys(gone)
        else:
            raise Refused(400, f"unknown operation {key}")
    return changes


def _resolve(call: Call) -> Reply:
    repository = call.repository()
    if repository.gated and not (call.user and repository.access):
        restricted = f"Access to model {repository.id} is restricted"
        if call.user is None:
            raise Refused(401, f"{restricted}. You must have access to it and be authenticated.", "GatedRepo")
        raise Refused(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
    commit = call.commit(repository)
    blob = commit.files.get(call.names["name"])
    if blob is None:
        raise Refused(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.sha)
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
    if blob.lfs:
        headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size)}
        if call.hub.cdn:
            location = f"http://localhost:{call.hub.port}/cdn/{blob.sha256}?Expires=1&Signature=loopback"
            return Reply(status=302, headers={**headers, "Location": location})
    return _ranged(call.range, headers, (blob.content, blob.size))


def _cdn(call: Call) -> Reply:
    stored = call.hub.objects.get(call.names["oid"])
    if stored is None or "Signature" not in call.query:
        raise Refused(403, "Access denied")
    return _ranged(call.range, {"ETag": f'"{call.names["oid"]}"', "Accept-Ranges": "bytes"}, stored)


def _ranged(wanted: str | None, headers: dict[str, str], stored: tuple[Content, int]) -> Reply:
    """Return a whole file, or what the header Range asks for. stored: its content and size."""
    content, size = stored
    headers = {"Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None or match[0] == "bytes=-":
        return Reply(status=200, headers=headers, content=content, stop=size)
    if match[1]:
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= stop:
        raise Refused(416, "Requested range not satisfiable", Content_Range=f"bytes */{size}")
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Reply(status=206, headers=headers, content=content, start=start, stop=stop)


_ID = r"(?P<id>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_MODEL = rf"/api/models/{_ID}"
ROUTES: list[tuple[str, str, Callable[[Call], Reply]]] = [
    ("GET", r"/api/whoami-v2", _whoami),
    ("POST", r"/api/repos/create", _create),
    ("POST", r"/api/validate-yaml", _validate_yaml),
    ("GET", _MODEL, _info),
    ("GET", rf"{_MODEL}/revision/{_REVISION}", _info),
    ("GET", rf"{_MODEL}/tree/{_REVISION}(?:/(?P<rest>.*))?", _tree),
    ("GET", rf"{_MODEL}/refs", _refs),
    ("POST", rf"{_MODEL}/preupload/{_REVISION}", _preupload),
    ("POST", rf"{_MODEL}/commit/{_REVISION}", _commit),
    ("POST", rf"{_MODEL}/branch/(?P<rest>.+)", _create_branch),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _lfs_batch),
    ("PUT", r"/uploads/(?P<oid>[0-9a-f]{64})", _upload),
    ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", _cdn),
    ("GET", rf"/{_ID}/resolve/{_REVISION}/(?P<name>.+)", _resolve),
]
