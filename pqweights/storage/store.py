"""A folder in object storage as a store. What is sent there is made in a scratch folder on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER, is_inside
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import OutputError, StorageError
from pqweights.storage.addresses import Address
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.local import LOCK_FILE, clear, locked, make_private
from pqweights.storage.protocol import CheckLock, FileRecord, Stop

SCRATCH_VARIABLE = "PQWEIGHTS_SCRATCH"
# In the work folder there: a random text of the process that writes to the store.
OWNER_FILE = f"{WORK_FOLDER}/{LOCK_FILE}"
PROBE_FILE = f"{WORK_FOLDER}/probe"


@dataclass(frozen=True)
class BucketStore:
    """A folder in object storage. See Store.

    folder: where the result is written
    scratch_base: the local folder in which files are made; by default that of the environment
    """

    folder: RemoteFolder
    scratch_base: Path | None = None

    def __str__(self) -> str:
        return str(self.folder.address)

    @property
    def work(self) -> Path:
        """The scratch folder: runs that follow one another use the same, runs elsewhere another.

        Raises OutputError if there is none.
        """
        base = default_scratch() if self.scratch_base is None else self.scratch_base
        return base / hashlib.sha256(self.folder.address.url.encode()).hexdigest()[:16]

    @property
    def is_elsewhere(self) -> bool:
        """It is."""
        return True

    def check_apart(self, source: Path | Address) -> None:
        """See Store."""
        if isinstance(source, Address) and self.folder.address.overlaps(source):
            raise OutputError(
                f"{self}: the output folder and the source must not contain each other (the source is {source}); "
                "choose another folder"
            )

    def check_names(self, names: Collection[str]) -> None:
        """See Store. The storage may refuse to write files, or to delete them."""
        self.folder.write(PROBE_FILE, b"")
        self.folder.remove([PROBE_FILE])

    def names(self) -> set[str]:
        """See Store."""
        return {name.partition("/")[0] for name in self.folder.files()}

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """See Store."""
        return {name: state.byte_count for name, state in self.folder.files(below=below).items()}

    def modified(self, name: str) -> int:
        """See Store."""
        state = self.folder.state(name)
        if state is None:
            raise StorageError(f"{self.folder.address / name}: there is no such file")
        return state.modified or sys.maxsize

    def read(self, name: str) -> bytes | None:
        """See Store."""
        return self.folder.read_whole(name)

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """See Store."""
        make_scratch(self.work)
        with tempfile.TemporaryDirectory(prefix="sent-", dir=self.work) as temporary:
            path = Path(temporary) / "file"
            digest = write_whole(path.parent, path, pieces)
            self.folder.upload(name, path)
            return FileRecord(path.stat().st_size, digest)

    def put(self, name: str, path: Path, stop: Stop) -> None:
        """See Store."""
        self.folder.upload(name, path, stop=stop)
        path.unlink()

    def move(self, source: str, target: str) -> None:
        """See Store."""
        self.folder.move(source, target)

    def remove(self, names: Iterable[str]) -> None:
        """See Store."""
        self.folder.remove(name for name in names if is_inside(name))

    @contextlib.contextmanager
    def lock(self, may_take: Callable[[], None]) -> Iterator[CheckLock]:
        """See Store."""
        make_scratch(self.work)
        with locked(self.work, self):
            may_take()
            owner = secrets.token_hex(8).encode()
            self.folder.write(OWNER_FILE, owner)

            def check() -> None:
                if self.folder.read_whole(OWNER_FILE) != owner:
                    raise OutputError(f"{self}: another run is writing there; wait for it, or choose another folder")

            yield check

    def clear_work(self, keep: Collection[str] = ()) -> None:
        """See Store."""
        kept = {*keep, LOCK_FILE} if keep else set()
        try:
            below = [name for name in self.folder.files(below=WORK_FOLDER) if name.split("/")[1] not in kept]
            # Marks first: one without its shard would say that the shard has its final name.
            self.folder.remove(sorted(below, key=lambda name: not name.endswith(".json")))
        finally:
            clear(self.work, keep)

    def tidy(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """See Store."""
        if not is_needed():
            journal = f"{WORK_FOLDER}/{JOURNAL_FILE}"  # if there is one by now, a run has begun
            self.folder.remove(name for name in self.folder.files(below=WORK_FOLDER) if name != journal)
        with contextlib.suppress(OutputError, OSError):
            if self.work.exists():
                with locked(self.work, self):
                    clear(self.work, ())


def default_scratch() -> Path:
    """Return the folder in which files are made that are sent elsewhere.

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
    """Make a scratch folder, or check that it is the user's own. Raises OutputError if it is not, or cannot be made."""
    try:
        make_private(scratch)
    except OSError as error:
        raise OutputError(
            f"{scratch}: cannot be made ({error.strerror}), and shards are made there: set {SCRATCH_VARIABLE} to "
            "another folder"
        ) from None


def users_cache() -> Path | None:
    """Return the folder: PQWEIGHTS_CACHE if set, else one below XDG_CACHE_HOME or ~/.cache; None without a home."""
    chosen = os.environ.get("PQWEIGHTS_CACHE")
    if chosen:
        return Path(chosen)
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(users) / "pqweights" if os.path.isabs(users) else None  # without a home, ~ stays ~
