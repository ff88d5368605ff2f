"""Where the files of a checkpoint lie: names, sizes and positioned reads, of a local folder or a repository on the Hub.

Files are read into the caller's buffer, because mapped pages would count as resident memory. Only the weights of a
model that computes with them as they are stored are mapped: they stay in memory anyhow.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.companions import PARSED, leads_outside
from pqweights.checkpoint.file_reader import FileReader, FileState, state_at
from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.checkpoint.writer import DiskNeed
from pqweights.common.threads import ProcessLock
from pqweights.errors import MasterError, SourceError


class Origin(NamedTuple):
    """The repository on the Hub that files come from, and its commit."""

    id: str
    revision: str


class Links(NamedTuple):
    """Links in a folder.

    broken: those to files that are not there, which are not listed
    outside: those out of the folder (companions.py); those that may be weights are listed, and all others are not
    """

    broken: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


class WorkFolder(NamedTuple):
    """The work folder of a run that is not finished: whether it has a journal, and the first line of that."""

    has_journal: bool
    first_line: bytes = b""


class ByteReads(Protocol):
    """What tensors are read through."""

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """See Storage."""
        ...


class Storage(Protocol):
    """Read access to a folder of files. Its text names it in messages. What has a default is that of a local folder."""

    bytes_read: int  # so far, by all threads

    @property
    def origin(self) -> Origin | None:
        """The repository and its commit; None for a local folder."""
        return None

    def local_folder(self) -> Path | None:
        """Return the folder, if it is on this machine."""
        return None

    @property
    def address(self) -> Any:
        """The Address in object storage; None elsewhere."""
        return None

    @property
    def frees(self) -> int:
        """How many fetched files are held at once, because `release` deletes them; 0 if they stay."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """How many bytes it may hold in memory, beside what its readers hold."""
        return 0

    def files(self) -> dict[str, FileState]:
        """Return the state of every regular file by its relative POSIX path, in sorted order."""
        ...

    @property
    def links(self) -> Links:
        """The links that are not simply files or folders of it."""
        return Links()

    def work_folder(self) -> WorkFolder | None:
        """Look for what an unfinished run into this folder left, which `files` leaves out."""
        return None

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on.

        Raises SourceChangedError if the file is no longer the one that was listed, SourceError if it ends early,
        HubError or StorageError if it cannot be fetched.
        """
        ...

    def mapped(self, file: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, which are read when they are used; changes of them do not reach the file.

        Raises SourceError if it is not on this machine.
        """
        raise SourceError(f"{file}: it is not on this machine; only local files are computed with as they are stored")

    def check_read(self) -> None:
        """Raise SourceChangedError if a file that was read since the last call is not what it was when it was listed.

        It sends no request: of files whose every reply is checked, or that are elsewhere, `check_unchanged` tells.
        """
        ...

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """Raise SourceChangedError if any file that was ever read is not what it was when it was listed.

        files: further files to be checked
        """
        ...

    def disk_need(self, files: Sequence[str]) -> DiskNeed | None:
        """Return what fetching these files takes on a disk outside of the folder of `fetching`; None if nothing."""
        return None

    def expect(self, files: Sequence[str]) -> None:
        """Prepare to read the headers of these files, which is what the caller does next."""
        return

    def fetching(self, folder: Path, files: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
        """Fetch files ahead while the context is open and the caller reads them in the given order.

        folder: where fetched files lie, unless they lie elsewhere already
        files: for each file, how many files are needed together when it is first read
        """
        return contextlib.nullcontext()

    def release(self, file: str) -> None:
        """Note that a file is no longer needed."""
        return

    def keep(self, files: Sequence[str], progress: Callable[[int, int, str], None]) -> None:
        """Have files at hand that are going to be read more than once, if that takes no more than there is room for.

        progress: called with the bytes that came, those in all, and the name of a file
        """
        return


def read_bytes(storage: Storage, file: str, offset: int, count: int) -> bytes:
    """Read `count` bytes of a file from `offset` on."""
    buffer = np.empty(count, dtype=np.uint8)
    storage.read_into(file, offset, buffer)
    return buffer.tobytes()


def local_work_folder(folder: Path) -> WorkFolder | None:
    """Look for what an unfinished run into a folder left."""
    if not (folder / WORK_FOLDER).exists():
        return None
    try:
        with open(folder / WORK_FOLDER / JOURNAL_FILE, "rb") as journal:
            return WorkFolder(has_journal=True, first_line=journal.readline())
    except OSError:
        return WorkFolder(has_journal=(folder / WORK_FOLDER / JOURNAL_FILE).exists())


def read_file(storage: Storage, file: str, limit: int = 256_000_000) -> bytes:
    """Read a whole small file.

    Raises SourceError for a file of more than `limit` bytes: no configuration or index is that large.
    """
    size = storage.files()[file].byte_count
    if size > limit:
        raise SourceError(f"{file}: expected at most {limit} bytes, found {size}")
    return read_bytes(storage, file, 0, size)


class LocalStorage(Storage):
    """A folder on this machine, without its hidden files and folders."""

    def __init__(self, root: Path, only: Sequence[str] | None = None, origin: Origin | None = None) -> None:
        """List the files of a folder.

        only: the names of the files to list; by default all
        origin: where the folder was fetched from
        """
        self.root = root
        self._origin = origin
        self.bytes_read = 0
        self._reader = FileReader()
        self._lock = ProcessLock()
        self._mapped: dict[str, npt.NDArray[np.uint8]] = {}
        self._read: set[str] = set()
        self._unchecked: set[str] = set()  # those that were read since `check_read`
        self._links = Links()
        names = sorted(self._walk()) if only is None else only
        self._files = {name: FileState.of(os.stat(root / name)) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        # Another machine may number the files otherwise.
        files = {name: replace(state, inode=0) for name, state in self._files.items()}
        return vars(self) | {"_files": files, "_mapped": {}}

    def _walk(self) -> list[str]:
        """Return the names of all files, following links, but never into a folder that was already visited."""
        inside: list[str] = []
        broken: list[str] = []
        outside: list[str] = []
        seen = set()
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            visible = sorted(name for name in subfolders if not name.startswith("."))
            linked = [name for name in visible if self._leads_outside(Path(folder) / name)]
            outside += [self._relative(Path(folder) / name) for name in linked]
            subfolders[:] = [name for name in visible if name not in linked]
            for path in (Path(folder) / name for name in names if not name.startswith(".")):
                if path.is_symlink() and not path.exists():
                    broken.append(self._relative(path))
                elif path.is_file():
                    is_outside = self._leads_outside(path)
                    outside += [self._relative(path)] * is_outside
                    inside += [self._relative(path)] * (not is_outside or path.name.endswith(PARSED))
        self._links = Links(tuple(broken), tuple(outside))
        return inside

    def _leads_outside(self, path: Path) -> bool:
        return path.is_symlink() and leads_outside(self.root, path)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def __str__(self) -> str:
        return str(self.root)

    @property
    def origin(self) -> Origin | None:
        """The repository that the folder was fetched from, if it was."""
        return self._origin

    def local_folder(self) -> Path:
        """See Storage."""
        return self.root

    @property
    def links(self) -> Links:
        """See Storage. As they were when the folder was listed."""
        return self._links

    def work_folder(self) -> WorkFolder | None:
        """Look for the work folder."""
        return local_work_folder(self.root)

    def files(self) -> dict[str, FileState]:
        """Return the files that were listed."""
        return self._files

    def mapped(self, file: str) -> npt.NDArray[np.uint8]:
        """See Storage."""
        with self._lock:
            if file not in self._mapped:
                with open(self.root / file, "rb") as opened:
                    self._files[file].check(file, FileState.of(os.fstat(opened.fileno())))
                    pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                with contextlib.suppress(AttributeError, OSError):  # a hint, which not every system takes
                    pages.madvise(mmap.MADV_WILLNEED)
                self._mapped[file] = np.frombuffer(pages, dtype=np.uint8)
            return self._mapped[file]

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on."""
        self._reader.read_into(self.root / file, file, offset, buffer, expected=self._files[file])
        with self._lock:
            self.bytes_read += buffer.nbytes
            self._read.add(file)
            self._unchecked.add(file)

    def check_read(self) -> None:
        """See Storage."""
        with self._lock:
            files = set(self._unchecked)
        for file in sorted(files):
            self._files[file].check(file, state_at(self.root / file))
        with self._lock:  # files that were found changed stay unchecked
            self._unchecked -= files

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """See Storage."""
        with self._lock:
            named = {*self._read, *files}
        for file in sorted(named):
            self._files[file].check(file, state_at(self.root / file, surely=True))


class StorageWithMade(LocalStorage):
    """A folder on this machine, and files that are not there but follow from one that is."""

    def __init__(self, root: Path, only: Sequence[str] | None, made: Mapping[str, bytes]) -> None:
        """List the files. made: the content of those that are not there"""
        super().__init__(root, only)
        self._made = {name: content for name, content in made.items() if name not in self._files}
        self._described: Path | None = None
        states = {name: FileState(len(content), zlib.crc32(content)) for name, content in self._made.items()}
        self._files = dict(sorted({**self._files, **states}.items()))

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """See Storage."""
        if file not in self._made:
            super().read_into(file, offset, buffer)
            return
        buffer[:] = np.frombuffer(self._made[file], dtype=np.uint8, count=len(buffer), offset=offset)

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """See Storage."""
        super().check_unchanged(file for file in files if file not in self._made)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_described": None}

    def described(self, files: Iterable[str]) -> Path:
        """Return a folder with these files, for libraries that read folders; it goes when this object does."""
        if self._described is None:
            self._described = Path(tempfile.mkdtemp(prefix="pqweights-"))
            weakref.finalize(self, shutil.rmtree, self._described, ignore_errors=True)
            for name in (file for file in files if "/" not in file):
                (self._described / name).write_bytes(read_file(self, name))
        return self._described


# The commands that make each kind of result (RunIdentity.kind).
COMMANDS = {"master": "pqweights quantize", "export": "pqweights export"}


def is_interrupted(folder: Path) -> bool:
    """Whether a run into a folder on this machine began and did not reach its end, and it holds no earlier result."""
    return not (folder / MANIFEST_FILE).exists() and (folder / WORK_FOLDER / JOURNAL_FILE).exists()


def describe_interrupted(work: WorkFolder | None) -> str:
    """Say that a run was interrupted in a folder, by its work folder, which command it was, and how to continue it."""
    command = "" if work is None else _command_in(work.first_line)
    of = f" of {command}" if command else ""
    return f"holds an unfinished run{of}: run the same command again to continue where it stopped"


def check_not_interrupted(storage: Storage) -> None:
    """Raise MasterError if a run into a folder was interrupted, and it holds no earlier result."""
    if MANIFEST_FILE not in storage.files():
        work = storage.work_folder()
        if work is not None and work.has_journal:
            raise MasterError(f"{storage}: {describe_interrupted(work)}")


def _command_in(first_line: bytes) -> str:
    """Return the command to which a journal belongs, as far as its first line tells."""
    try:
        first = json.loads(first_line)
    except (ValueError, RecursionError):
        return ""
    return command_of(first) if isinstance(first, dict) else ""


def command_of(first: Mapping[str, Any]) -> str:
    """Return the command that the first line of a journal names; an empty text if it names none."""
    target = first.get("target")
    target = f" --target {target}" if isinstance(target, str) and target.isprintable() else ""
    command = COMMANDS.get(str(first.get("kind")))
    return f"{command}{target}" if command else ""
