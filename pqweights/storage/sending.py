"""Where a run sends its files, one by one, in place of keeping them: a branch of a repository on the Hub."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.file_reader import FileState
from pqweights.storage.repository import Repository, open_repository


class Sending:
    """A branch that gets each file in a commit of its own, which replaces a file of that name alone.

    files: what the branch holds, as far as is known
    """

    def __init__(self, remote: Repository, branch: str) -> None:
        self._remote, self._branch = remote, branch
        self.files: dict[str, FileState] = remote.files

    def send(self, name: str, path: Path, stop: Stop = lambda: False) -> None:
        """Bring a file to the branch. stop: see Store.put. Raises HubError."""
        remote, branch = self._remote, self._branch
        operation = remote.upload(name, path, branch)

        def commit() -> object:
            return remote.hub.api.create_commit(
                remote.id, [operation], commit_message=f"pqweights export: {name}", revision=branch
            )

        remote.hub.call(remote.id, commit, about=f": {name}", stop=stop)
        self.files = open_repository(remote.hub, remote.id, branch).files
