"""A folder in object storage as the place of a result. See ResultPlace, and remote_workspace.py for what lies there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.disk_room import DiskNeed
from pqweights.checkpoint.names import MANIFEST_FILE, WORK_FOLDER
from pqweights.errors import OutputError, PqweightsError
from pqweights.planning.plan import Plan
from pqweights.remote.addresses import Address
from pqweights.remote.folder import RemoteFolder
from pqweights.rewrite.disk_room import bytes_of_shard, fetched_bytes_in
from pqweights.rewrite.journal import RunInputs, may_continue
from pqweights.rewrite.listed_files import files_of_result
from pqweights.rewrite.manifest import parse_manifest
from pqweights.rewrite.needs import room_for_shards
from pqweights.rewrite.parts import PartInputs
from pqweights.rewrite.remote_workspace import RemoteRun, RemoteWorkspace, open_remote_part, read_remote_journal
from pqweights.rewrite.staging import REMOTE_JOURNAL, Staging, remove_staged
from pqweights.rewrite.workspace import (
    Workspace,
    occupied,
    open_workspace,
    refuse_foreign,
    refuse_other_names,
    remove_work,
)
from pqweights.user_cache import users_cache

SCRATCH_VARIABLE = "PQWEIGHTS_SCRATCH"


@dataclass(frozen=True)
class RemotePlace:
    """A folder in object storage. It may be pickled.

    folder: where the result is written
    scratch_base: the local folder in which shards are made; by default that of the environment
    """

    folder: RemoteFolder
    scratch_base: Path | None = None

    def __str__(self) -> str:
        return str(self.folder.address)

    @property
    def scratch(self) -> Path:
        """The local folder for this place: runs that follow one another use the same, runs elsewhere another.

        Raises OutputError if there is none.
        """
        base = default_scratch() if self.scratch_base is None else self.scratch_base
        return base / hashlib.sha256(self.folder.address.url.encode()).hexdigest()[:16]

    def check_apart(self, source: Path | Address) -> None:
        """See ResultPlace."""
        if isinstance(source, Address) and self.folder.address.overlaps(source):
            raise OutputError(
                f"{self}: the output folder and the source must not contain each other (the source is {source}); "
                "choose another folder"
            )

    def check_output(self, overwrite: bool, difference: Callable[[], str] = lambda: "holds a result by now") -> None:
        """See ResultPlace."""
        files = self.folder.files()
        if not files or self.is_under_way():
            return
        if MANIFEST_FILE in files:
            if not overwrite:
                raise occupied(self, difference())
        else:
            refuse_other_names(self, (name.partition("/")[0] for name in files))

    def is_under_way(self) -> bool:
        """See ResultPlace."""
        return self.folder.state(REMOTE_JOURNAL) is not None

    def read(self, name: str) -> bytes | None:
        """See ResultPlace."""
        return self.folder.read_whole(name)

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """See ResultPlace."""
        files = self.folder.files()
        return {name: files[name].byte_count for name in names if name in files}

    def manifest_time(self) -> int:
        """See ResultPlace."""
        # Of a storage that tells no times, only the fingerprint of the source is compared.
        return self.folder.modified(MANIFEST_FILE) or sys.maxsize

    def shard_room(self, plan: Plan) -> int:
        """See ResultPlace."""
        return room_for_shards(plan)

    def disk_need(self, plan: Plan, inputs: RunInputs, fetched_bytes: int) -> DiskNeed:
        """See ResultPlace. What needs room is the scratch folder."""
        work = self.scratch / WORK_FOLDER
        needed = self.shard_room(plan) + fetched_bytes
        present = fetched_bytes_in(work) + sum(bytes_of_shard(work, shard.file) for shard in plan.shards)
        return DiskNeed(
            folder=self.scratch,
            byte_count=needed,
            present=present,
            what=f"{self.scratch}: the shards of the result need {needed} bytes of disk space while they are made",
            remedy=f"set {SCRATCH_VARIABLE} to a folder on another disk",
        )

    @contextlib.contextmanager
    def open_workspace(self, inputs: RunInputs, overwrite: bool) -> Iterator[RemoteWorkspace]:
        """See ResultPlace. Another machine that continues the run takes it over, and this process ends."""
        self._continues(inputs, overwrite)  # before what an interrupted run left in the scratch folder is replaced
        make_scratch(self.scratch)
        with open_workspace(self.scratch, inputs, overwrite=True, shown=self) as local:
            try:
                workspace = self._open(local, inputs, overwrite)
            except PqweightsError:
                if not local.records:
                    local.discard()
                raise
            try:
                yield workspace
            finally:
                workspace.close()

    def _open(self, local: Workspace, inputs: RunInputs, overwrite: bool) -> RemoteWorkspace:
        """Take the place from whatever process had it."""
        staging = Staging(self.folder, inputs.key)
        replaces = self._files_to_replace()
        refuse_foreign(self, self.sizes(inputs.outputs), replaces)
        if not self._continues(inputs, overwrite):
            remove_staged(self.folder)
        run = RemoteRun.begin(self.folder, inputs, replaces)
        return RemoteWorkspace(local, staging, inputs.shards, token=run.token, run=run)

    def _continues(self, inputs: RunInputs, overwrite: bool) -> bool:
        """Whether a run continues the one that is under way.

        Raises OutputError or SourceChangedError if the place cannot be taken.
        """
        self.check_output(overwrite)
        first = read_remote_journal(self.folder)
        return first is not None and may_continue(first or None, inputs, out=self, overwrite=overwrite)

    def _files_to_replace(self) -> list[str]:
        """The files that an abandoned run or an earlier result left, as journal and manifest list them.

        Raises MasterError if the manifest is damaged.
        """
        first = read_remote_journal(self.folder)
        names = [*first["outputs"], *first["replaces"]] if first else []
        manifest = self.read(MANIFEST_FILE)
        if manifest is not None:
            names += files_of_result(parse_manifest(manifest))
        return list(dict.fromkeys(names))

    def open_part(self, inputs: PartInputs) -> contextlib.AbstractContextManager[RemoteWorkspace]:
        """See ResultPlace. A part has a scratch folder of its own, beside that of the run."""
        scratch = self.scratch.with_name(f"{self.scratch.name}-{inputs.key}-{next(iter(inputs.shards))}")
        make_scratch(scratch)
        return open_remote_part(Staging(self.folder, inputs.key), scratch, inputs)

    @property
    def shared_folder(self) -> None:
        """There is none: all processes reach the address."""
        return

    @property
    def scratch_folder(self) -> Path:
        """The folder in which the scratch folders lie."""
        return self.scratch.parent

    def tidy(self) -> None:
        """See ResultPlace."""
        if not self.is_under_way():
            remove_staged(self.folder)
        self._remove_scratch(self.scratch)

    def tidy_scratch(self) -> None:
        """See ResultPlace."""
        for path in self.scratch.parent.glob(self.scratch.name + "-*"):
            self._remove_scratch(path)

    def _remove_scratch(self, scratch: Path) -> None:
        """Remove a scratch folder, unless there is none, or a run is using it."""
        with contextlib.suppress(OutputError, OSError):
            if scratch.exists():
                remove_work(scratch, shown=self)
                scratch.rmdir()


def default_scratch() -> Path:
    """Return the folder in which shards are made that are sent elsewhere.

    Raises OutputError without one, as in a process without a home.
    """
    chosen = os.environ.get(SCRATCH_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    cache = users_cache()
    if cache is None:
        raise OutputError(f"no home folder, in which shards could be made: set {SCRATCH_VARIABLE} to a folder for them")
    return cache / "scratch"


def make_scratch(scratch: Path) -> None:
    """Make a scratch folder. Raises OutputError if that cannot be done."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{scratch}: cannot be made ({error.strerror}), and shards are made there: set {SCRATCH_VARIABLE} to "
            "another folder"
        ) from None
