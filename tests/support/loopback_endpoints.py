"""The endpoints of the loopback Hub: the routes, status codes and error messages that huggingface_hub 2.4 relies on."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import flask
from flask import Response, request

if TYPE_CHECKING:
    from loopback_hub import Blob, Commit, LoopbackHub, Repository

USER = "me"
PIECE_BYTES = 1 << 20
_MODEL = "/api/models/<org>/<name>"


class Refused(Exception):
    """An error reply. code: the X-Error-Code, from which huggingface_hub chooses the exception."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.headers = named | {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.status = status


def application(hub: LoopbackHub) -> flask.Flask:
    """Return the application that serves a Hub."""
    app = flask.Flask("loopback")
    app.url_map.merge_slashes = False
    endpoints = Endpoints(hub)
    for method, rules, function in (
        ("GET", ["/api/whoami-v2"], endpoints.whoami),
        ("POST", ["/api/repos/create"], endpoints.create),
        ("POST", ["/api/validate-yaml"], lambda: {"errors": [], "warnings": []}),
        ("GET", [_MODEL, f"{_MODEL}/revision/<path:revision>"], endpoints.info),
        ("GET", [f"{_MODEL}/tree/<revision>", f"{_MODEL}/tree/<revision>/<path:folder>"], endpoints.tree),
        ("GET", [f"{_MODEL}/refs"], endpoints.refs),
        ("POST", [f"{_MODEL}/preupload/<path:revision>"], endpoints.preupload),
        ("POST", [f"{_MODEL}/commit/<path:branch>"], endpoints.commit),
        ("POST", [f"{_MODEL}/branch/<path:branch>"], endpoints.create_branch),
        ("POST", ["/<org>/<name>.git/info/lfs/objects/batch"], endpoints.lfs_batch),
        ("PUT", ["/uploads/<sha256>"], endpoints.upload),
        ("GET", ["/cdn/<sha256>"], endpoints.cdn),
        ("GET", ["/<org>/<name>/resolve/<revision>/<path:file>"], endpoints.resolve),
    ):
        for rule in rules:
            app.add_url_rule(rule, f"{method} {rule}", function, methods=[method])

    @app.after_request
    def drain(response: Response) -> Response:
        request.stream.read()
        return response

    @app.errorhandler(Refused)
    def refuse(error: Refused) -> Response:
        headers = {name: quote(value, safe=" !\"#$%&'()*+,/:;<=>?@[]{}|") for name, value in error.headers.items()}
        return Response(json.dumps({"error": str(error)}), error.status, headers, content_type="application/json")

    return app


class Endpoints:
    """The functions behind the routes. Names are decoded; what else they need is in flask's request."""

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub

    @property
    def user(self) -> str | None:
        """Who sends the request; None without a token."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != self.hub.token:
            raise Refused(401, "Invalid credentials in Authorization header")
        return USER if token else None

    def repository(self, org: str, name: str) -> Repository:
        """Return the repository that is named, if the user may see it."""
        user, repository = self.user, self.hub.repositories.get(f"{org}/{name}")
        if repository is not None and (not repository.private or (user and repository.access)):
            return repository
        if user is None:  # the Hub does not tell strangers what exists
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        raise Refused(404, "Repository not found", "RepoNotFound")

    def writable(self, org: str, name: str) -> Repository:
        """Return the repository that is named, if the user may write to it."""
        if self.user is None:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        repository = self.repository(org, name)
        if org != self.user:
            raise Refused(403, "Forbidden: you must use a token with write access to this repository")
        return repository

    def whoami(self) -> dict[str, Any]:
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        return {"type": "user", "name": USER, "auth": {"type": "access_token", "accessToken": {"role": "write"}}}

    def create(self) -> Any:
        from loopback_hub import LFS_SUFFIXES, Blob, Repository

        wanted = request.get_json()
        namespace = wanted.get("organization") or USER
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        if namespace != USER:
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
        id = f"{namespace}/{wanted['name']}"
        reply = {"url": f"{self.hub.url}/{id}", "name": id}
        with self.hub.lock:
            if id in self.hub.repositories:
                return {"error": "You already created this model repo", **reply}, 409
            repository = Repository(id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
            attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
            files = {".gitattributes": Blob.of(".gitattributes", attributes.encode())}
            repository.advance("main", files, title="initial commit")
            self.hub.repositories[id] = repository
        return reply

    def info(self, org: str, name: str, revision: str = "main") -> dict[str, Any]:
        repository = self.repository(org, name)
        siblings = []
        for path, blob in sorted(_commit(repository, revision).files.items()):
            lfs = {"sha256": blob.sha256, "size": blob.size, "pointerSize": 0}
            siblings.append({"rfilename": path, "size": blob.size, "blobId": blob.oid, "lfs": blob.sha256 and lfs})
        about = {"id": repository.id, "private": repository.private, "gated": repository.gated, "tags": []}
        return {**about, "sha": repository.sha(revision), "siblings": siblings}

    def tree(self, org: str, name: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
        """The files in a folder or below it, in which transformers looks for templates."""
        files = _commit(self.repository(org, name), revision).files
        inside = {path: blob for path, blob in files.items() if not folder or path.startswith(folder + "/")}
        if folder and not inside:
            raise Refused(404, f"{folder} does not exist on this revision", "EntryNotFound")
        return [{"type": "file", "oid": blob.oid, "size": blob.size, "path": path} for path, blob in inside.items()]

    def refs(self, org: str, name: str) -> dict[str, Any]:
        branches, requests = [], []
        for branch, sha in self.repository(org, name).branches.items():
            of_request = branch.startswith("refs/pr/")
            ref = branch if of_request else f"refs/heads/{branch}"
            (requests if of_request else branches).append({"name": branch, "ref": ref, "targetCommit": sha})
        return {"branches": branches, "converts": [], "tags": [], "pullRequests": requests}

    def create_branch(self, org: str, name: str, branch: str) -> dict[str, Any]:
        repository = self.writable(org, name)
        with self.hub.lock:
            if branch in repository.branches:
                raise Refused(409, f"Reference already exists: refs/heads/{branch}")
            repository.branches[branch] = repository.sha()
        return {}

    def preupload(self, org: str, name: str, revision: str) -> dict[str, Any]:
        from loopback_hub import is_lfs

        _commit(self.writable(org, name), revision)
        modes = {file["path"]: is_lfs(file["path"], file["size"]) for file in request.get_json()["files"]}
        return {
            "files": [
                {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                for path, large in modes.items()
            ]
        }

    def lfs_batch(self, org: str, name: str) -> dict[str, Any]:
        self.writable(org, name)
        objects = []
        for wanted in request.get_json(force=True)["objects"]:
            href = {"href": f"{self.hub.url}/uploads/{wanted['oid']}", "header": {}}
            actions = {} if wanted["oid"] in self.hub.objects else {"actions": {"upload": href}}
            objects.append({"oid": wanted["oid"], "size": wanted["size"], **actions})
        return {"transfer": "basic", "objects": objects}

    def upload(self, sha256: str) -> dict[str, Any]:
        """Store an LFS file, as S3 does: the address is enough, a token is not needed."""
        from loopback_hub import Blob

        part, digest = self.hub.folder / f"{sha256}.part", hashlib.sha256()
        with part.open("wb") as file:
            while piece := request.stream.read(PIECE_BYTES):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != sha256:
            part.unlink()
            raise Refused(400, "The provided x-amz-content-sha256 header does not match what was computed.")
        path = part.rename(self.hub.folder / sha256)
        self.hub.objects[sha256] = Blob(content=path, size=path.stat().st_size, sha256=sha256)
        return {}

    def commit(self, org: str, name: str, branch: str) -> dict[str, Any]:
        repository = self.writable(org, name)
        header, *lines = [json.loads(line) for line in request.get_data().splitlines() if line]
        with self.hub.lock:
            if branch not in repository.branches:
                raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            tip = repository.branches[branch]
            if header["value"].get("parentCommit") not in (None, tip):
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            changes = self._changes(repository.commits[tip].files, lines)
            sha = repository.advance(branch, changes, title=header["value"]["summary"])
        url = f"{self.hub.url}/{repository.id}/commit/{sha}"
        return {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""}

    def _changes(self, files: Mapping[str, Blob], lines: list[dict[str, Any]]) -> dict[str, Blob | None]:
        """Return what the lines of a commit change; None deletes a file."""
        from loopback_hub import Blob

        changes: dict[str, Blob | None] = {}
        for line in lines:
            key, value = line["key"], line["value"]
            path = value["path"]
            if key == "file":
                content = base64.b64decode(value["content"])
                changes[path] = Blob(content=content, size=len(content), sha256=None)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refused(
                        400, f"Your push was rejected: an LFS pointer points to no file. Offending file: {path}"
                    )
                changes[path] = self.hub.objects[value["oid"]]
            else:
                assert key == "deletedFile", key
                if path not in files:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                changes[path] = None
        return changes

    def resolve(self, org: str, name: str, revision: str, file: str) -> Response:
        repository = self.repository(org, name)
        if repository.gated and not (self.user and repository.access):
            restricted = f"Access to model {repository.id} is restricted"
            if self.user is None:
                raise Refused(401, f"{restricted}. You must have access to it and be authenticated.", "GatedRepo")
            raise Refused(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
        blob, sha = _commit(repository, revision).files.get(file), repository.sha(revision)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound", X_Repo_Commit=sha)
        headers = {"X-Repo-Commit": sha}
        if blob.sha256:
            headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size)}
            if self.hub.cdn:
                location = f"http://localhost:{self.hub.port}/cdn/{blob.sha256}?Expires=1&Signature=loopback"
                return Response(status=302, headers=headers | {"ETag": f'"{blob.etag}"', "Location": location})
        return _ranged(blob, headers)

    def cdn(self, sha256: str) -> Response:
        if sha256 not in self.hub.objects or "Signature" not in request.args:
            raise Refused(403, "Access denied")
        return _ranged(self.hub.objects[sha256], {})


def _commit(repository: Repository, revision: str) -> Commit:
    try:
        return repository.commits[repository.sha(revision)]
    except KeyError:
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def _ranged(blob: Blob, headers: dict[str, str]) -> Response:
    """Return a whole file, or what the header Range asks for."""
    start, stop, status = 0, blob.size, 200
    if request.range is not None:
        found = request.range.range_for_length(blob.size)
        if found is None:
            raise Refused(416, "Requested range not satisfiable", Content_Range=f"bytes */{blob.size}")
        (start, stop), status = found, 206
        headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{blob.size}"}
    sent = {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    return Response(_pieces(blob, start, stop), status, headers | sent, content_type="application/octet-stream")


def _pieces(blob: Blob, start: int, stop: int) -> Iterator[bytes]:
    if isinstance(blob.content, bytes):
        yield blob.content[start:stop]
        return
    with blob.content.open("rb") as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(PIECE_BYTES, stop - start))):
            yield piece
            start += len(piece)
