"""Where the files of a checkpoint lie: names, sizes and positioned reads, on this machine, on the Hub, in a bucket.

Files are read into the caller's buffer, because mapped pages would count as resident memory. Only the weights of a
model that computes with them as they are stored are mapped: they stay in memory anyhow.

Of files elsewhere, ranges come by requests of their own (ahead.py). Inside `fetching`, the files of the Hub are fetched
whole, ahead of their readers, because the Hub lists a hash of each, which must be right before a byte is used: into the
shared cache; or, with low_disk, into a folder of the caller, two at a time, and `release` deletes them. Files in object
storage are never stored on this machine.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.ahead import FileFetcher, RangeCache, Stop
from pqweights.checkpoint.companions import PARSED, leads_outside
from pqweights.checkpoint.file_reader import FileState, OpenFile, state_at
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.unfinished import describe_interrupted, journal_line
from pqweights.checkpoint.writer import DiskNeed, free_bytes
from pqweights.common.strict_json import parse_json
from pqweights.errors import MasterError, SourceError

LOW_DISK_FILES = 2
DOWNLOADS_AT_ONCE = 2
# A checkpoint may have more files than a process may hold open.
MOST_OPEN_FILES = 8
# What a Storage holds open, which is not pickled with it.
OPENED = {
    *("_lock", "_open_files", "_mapped", "_read", "_unchecked", "_ranges", "_fetcher", "_folder", "_fetched"),
    "_described",
}


class Origin(NamedTuple):
    """The repository on the Hub that files come from, and its commit."""

    id: str
    revision: str


class Remote:
    """A folder on another machine, as a Storage reads it. It may be pickled, and its text names it in messages.

    origin: the repository and its commit, of which whole files are fetched; None in object storage
    cache: for a repository, the folder of this machine in which fetched files are kept; it may not exist yet
    """

    origin: Origin | None = None
    cache = Path()

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what its files are now, by name, in sorted order; without hidden ones.

        only: the names of the files to look at; by default all
        recursive: whether those in folders inside of it are listed, too
        """
        raise NotImplementedError

    def journal_line(self) -> bytes | None:
        """Return what an unfinished run into it left, see unfinished.journal_line."""
        return None

    def read(self, file: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        """Return bytes of a file, by one request. Raises SourceChangedError if it is known not to be as expected."""
        raise NotImplementedError

    def path(self, file: str) -> Path | None:
        """Return where a file lies in the cache; None if it does not."""
        return None

    def refuse_offline(self, files: Iterable[str]) -> None:
        """Raise HubError for the first of some files that cannot be had, because the Hub is switched off."""

    def fetch(self, file: str, target: Path | None, *, stop: Stop, show: Callable[[int], None]) -> Path:
        """Fetch a file, check its content, and return where it lies: at `target`, or in the cache."""
        raise NotImplementedError


class Storage:
    """Read access to a folder of files. Its text names it in messages.

    Threads may share it, and other processes get it pickled, without what is open here.

    bytes_read: how many bytes all threads have read so far
    frees: how many files of the Hub are held at once, because `release` deletes them; 0 if they stay
    broken_links: of a local folder, links to files that are not there, which are not listed
    outside_links: those out of the folder (companions.py); those that may be weights are listed, and all others are not
    """

    def __init__(
        self,
        source: Path | Remote,
        only: Sequence[str] | None = None,
        *,
        low_disk: bool = False,
        recursive: bool = True,
    ) -> None:
        """List the files of a folder.

        source: a folder on this machine, or what reads the files of one elsewhere
        only: the names of the files to list; by default all
        low_disk: whether files of the Hub are deleted when they are no longer needed
        recursive: whether the files in folders inside of one elsewhere are listed, too
        """
        self._source, self._only, self._recursive = source, only, recursive
        self._remote = None if isinstance(source, Path) else source
        self.root = source if isinstance(source, Path) else Path()
        self.origin = None if self._remote is None else self._remote.origin
        self.frees, self.bytes_read = LOW_DISK_FILES if low_disk else 0, 0
        self.broken_links, self.outside_links = tuple[str, ...](), tuple[str, ...]()
        if self._remote is not None:
            self._files = self._remote.states(only, recursive=recursive)
        else:
            if only is None:
                only, self.broken_links, self.outside_links = _walk(self.root)
            self._files = {name: FileState.of(os.stat(self.root / name)) for name in only}
        self._made: dict[str, bytes] = {}
        # The digests of ranges of the Hub's files that came by themselves, and were not checked.
        self._unproven: dict[str, dict[tuple[int, int], str]] = {}
        self._open()

    def with_made(self, made: Mapping[str, bytes], without: Container[str] = ()) -> Storage:
        """Return this with files that are not there, but follow from one that is.

        made: their content, unless there are such files
        without: the names of files that are left out
        """
        other = copy.copy(self)
        kept = {name: state for name, state in self._files.items() if name not in without}
        new = {name: content for name, content in made.items() if name not in kept}
        other._made = {**{name: content for name, content in self._made.items() if name in kept}, **new}
        states = {name: FileState(len(content), str(zlib.crc32(content))) for name, content in new.items()}
        other._files = dict(sorted({**kept, **states}.items()))
        return other

    def _open(self) -> None:
        """Begin with nothing open, held or read."""
        self._lock = threading.Lock()
        self._open_files: OrderedDict[Path, OpenFile] = OrderedDict()  # the least recently used first
        self._mapped: dict[str, npt.NDArray[np.uint8]] = {}
        self._read: set[str] = set()
        self._unchecked: set[str] = set()  # those that were read since `check_read`
        self._ranges = None if self._remote is None else RangeCache(self._request, self._size_of)
        self._fetcher: FileFetcher | None = None
        self._folder = Path()  # where files are fetched to
        self._fetched: dict[str, tuple[Path, FileState]] = {}  # where files lie, and what they were when checked
        self._described: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Another machine may number the files otherwise.
        files = {name: replace(state, inode=0) for name, state in self._files.items()}
        return {name: value for name, value in vars(self).items() if name not in OPENED} | {"_files": files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __str__(self) -> str:
        return str(self._source)

    @property
    def _on_hub(self) -> Remote | None:
        """The repository whose files are read where they are."""
        return self._remote if self.origin is not None else None

    @property
    def memory_bytes(self) -> int:
        """How many bytes it may hold in memory, beside what its readers hold."""
        return 0 if self._remote is None or self._on_hub else RangeCache.memory_bytes()

    def local_folder(self) -> Path | None:
        """Return the folder, if it is on this machine."""
        return self.root if self._remote is None else None

    def files(self) -> dict[str, FileState]:
        """Return the state of every file by its relative POSIX path, in sorted order; without hidden files."""
        return self._files

    def journal_line(self) -> bytes | None:
        """Return what an unfinished run into this folder left, which `files` leaves out; see unfinished.py."""
        return journal_line(self.root) if self._remote is None else self._remote.journal_line()

    def refuse_offline(self, files: Iterable[str]) -> None:
        """Raise HubError for the first of some files that cannot be had, because the Hub is switched off."""
        if self._remote is not None:
            self._remote.refuse_offline(files)

    def expect(self, files: Sequence[str]) -> None:
        """Prepare to read the headers of these files: once one is read, the first bytes of more are requested."""
        if self._ranges is not None:
            self._ranges.expect(files)

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on.

        Raises SourceChangedError if the file is no longer the one that was listed, SourceError if it ends early,
        HubError or StorageError if it cannot be fetched.
        """
        here, left = self._here(file), max(0, self._size_of(file) - offset)
        if here is not None:
            self._opened(file, *here).read_into(file, offset, buffer)
        elif buffer.nbytes > left:
            raise SourceError(
                f"{file}: expected {buffer.nbytes} bytes at offset {offset}, found {left}: the file is too short"
            )
        elif file in self._made:
            buffer[:] = np.frombuffer(self._made[file][offset : offset + buffer.nbytes], dtype=np.uint8)
            return
        else:
            assert self._ranges is not None
            self._ranges.read_into(file, offset, buffer)
        with self._lock:
            self.bytes_read += buffer.nbytes
            self._read.add(file)
            self._unchecked.add(file)

    def _opened(self, file: str, path: Path, expected: FileState) -> OpenFile:
        """Return a file that stays open for a while. Raises SourceChangedError if it is not what it was."""
        with self._lock:
            opened = self._open_files.pop(path, None)
            try:
                opened = self._open_files[path] = opened or OpenFile(path)
            except FileNotFoundError:
                expected.check(file, None)
                raise
            if len(self._open_files) > MOST_OPEN_FILES:
                self._open_files.popitem(last=False)
        expected.check(file, opened.state)
        return opened

    def _here(self, file: str) -> tuple[Path, FileState] | None:
        """Return where a file lies on this machine as a whole, and what it was when it was listed or fetched."""
        if file in self._made:
            return None
        if self._remote is None:
            return self.root / file, self._files[file]
        if self._fetcher is None:
            return None
        self._fetcher.path(file)
        return self._fetched[file]

    def _request(self, file: str, start: int, end: int) -> bytes:
        """Return bytes of a file elsewhere, by one request."""
        assert self._remote is not None
        data = self._remote.read(file, start, end, expected=self._files[file])
        if self._on_hub is not None:
            digest = hashlib.sha256(data).hexdigest()
            with self._lock:
                self._unproven.setdefault(file, {}).setdefault((start, end), digest)
        return data

    def _size_of(self, file: str) -> int:
        return self._files[file].byte_count

    def mapped(self, file: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, which are read when they are used; changes of them do not reach the file.

        Raises SourceError if it is not on this machine.
        """
        if self._remote is not None:
            raise SourceError(
                f"{file}: it is not on this machine; only local files are computed with as they are stored"
            )
        with self._lock:
            if file not in self._mapped:
                with open(self.root / file, "rb") as opened:
                    self._files[file].check(file, FileState.of(os.fstat(opened.fileno())))
                    pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                with contextlib.suppress(AttributeError, OSError):  # a hint, which not every system takes
                    pages.madvise(mmap.MADV_WILLNEED)
                self._mapped[file] = np.frombuffer(pages, dtype=np.uint8)
            return self._mapped[file]

    def check_read(self) -> None:
        """Raise SourceChangedError if a file that was read since the last call is not what it was when it was listed.

        It sends no request: of files whose every reply is checked, or that are elsewhere, `check_unchanged` tells.
        """
        with self._lock:  # no file is released meanwhile; files that were found changed stay unchecked
            for file in sorted(self._unchecked):
                here = (self.root / file, self._files[file]) if self._remote is None else self._fetched.get(file)
                if here is not None:
                    here[1].check(file, state_at(here[0]))
            self._unchecked.clear()

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """Raise SourceChangedError if any file that was ever read is not what it was when it was listed.

        A folder in object storage is listed once more. Of a repository, the commit does not change: what was fetched of
        it is checked, if it was not released.

        files: further files to be checked
        """
        named = sorted({*self._read, *files} - self._made.keys())
        if self._remote is not None and self._on_hub is None:
            there = self._remote.states(self._only, recursive=self._recursive)
            for file in named:
                self._files[file].check(f"{self._remote}/{file}", there.get(file))
            return
        with self._lock:
            here = dict(self._fetched)
            if self._remote is None:
                here = {file: (self.root / file, self._files[file]) for file in named}
            for file, (path, state) in sorted(here.items()):
                state.check(file, state_at(path, surely=True))

    def disk_need(self, files: Sequence[str]) -> DiskNeed | None:
        """Return what fetching these files takes on a disk outside of the folder of `fetching`; None if nothing."""
        if (hub := self._on_hub) is None or self.frees:
            return None
        needed = sum(self._size_of(file) for file in files if hub.path(file) is None)
        return DiskNeed(
            folder=hub.cache,
            byte_count=needed,
            what=f"{self}: its weights need {needed} bytes in the Hub's cache",
            remedy="pass `low_disk`, or set HF_HOME to a folder on another disk",
        )

    def keep(self, files: Sequence[str], progress: Callable[[int, int, str], None]) -> None:
        """Have files at hand that are going to be read more than once, if that takes no more than there is room for.

        progress: called with the bytes that came, those in all, and the name of a file
        """
        need, hub = self.disk_need(files), self._on_hub
        if hub is not None and need is not None and need.missing <= free_bytes(need.folder):
            self.fetch([file for file in files if hub.path(file) is None], progress)

    def fetch(self, files: Sequence[str], progress: Callable[[int, int, str], None]) -> Path:
        """Fetch files of the Hub into its cache, and return the folder in which they lie."""
        assert self._on_hub is not None
        total, done, folder = sum(map(self._size_of, files)), 0, Path()
        for file in files:

            def show(count: int, file: str = file) -> None:
                nonlocal done
                done += count
                progress(min(done, total), total, file)

            path = self._on_hub.fetch(file, None, stop=lambda: False, show=show)
            folder = path.parents[file.count("/")]
        return folder

    @contextlib.contextmanager
    def fetching(self, folder: Path, files: Mapping[str, int]) -> Iterator[None]:
        """Fetch files ahead while the context is open and the caller reads them in the given order.

        folder: where fetched files lie, unless they lie elsewhere already
        files: for each file, how many files are needed together when it is first read
        """
        if self._ranges is not None:
            self._ranges.stopped = False
        if self._on_hub is not None:
            limit, threads = (self.frees, 1) if self.frees else (len(self._files), DOWNLOADS_AT_ONCE)
            self._folder = folder
            self._ranges = RangeCache(self._request, self._size_of)  # what the plan was made of is let go
            # The attribute stays: threads that still read get what is there, or TransferStopped.
            files = {file: count for file, count in files.items() if file not in self._made}
            self._fetcher = FileFetcher(self._fetch_ahead, files, limit=limit, threads=threads)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if self._ranges is not None:
                self._ranges.stopped = not is_done  # readers that still wait give up
            if self._fetcher is not None:
                self._fetcher.close()

    def _fetch_ahead(self, file: str, stop: Stop) -> Path:
        """Fetch a whole file and return its path."""
        assert self._on_hub is not None
        own = self._own_path(file) if self.frees and self._on_hub.path(file) is None else None
        path = own if own is not None and own.exists() else None
        path = path or self._on_hub.fetch(file, own, stop=stop, show=lambda count: None)
        self._check_ranges(file, path)
        with self._lock:
            self._open_files.pop(path, None)  # of a damaged file that was there before
            self._fetched[file] = path, FileState.of(path.stat())
        return path

    def _own_path(self, file: str) -> Path:
        """Where a file lies until `release`. The name is not chosen by the repository, and unique."""
        return self._folder / f"{self._files[file].stamp[:15]}-{hashlib.sha256(file.encode()).hexdigest()[:8]}"

    def _check_ranges(self, file: str, path: Path) -> None:
        """Check the ranges that the plan was made from, which came before the whole file could be checked.

        Raises SourceError if one was damaged; no result of such a plan may stay.
        """
        with open(path, "rb") as stream:
            for (start, end), digest in self._unproven.get(file, {}).items():
                stream.seek(start)
                if hashlib.sha256(stream.read(end - start)).hexdigest() != digest:
                    raise SourceError(
                        f"{self}: {file}: its header was damaged when it was fetched for the plan: run the same "
                        "command again"
                    )

    def release(self, file: str) -> None:
        """Note that a file is no longer needed."""
        if self._fetcher is not None and self.frees:
            path = self._own_path(file)
            with self._lock:
                self._fetched.pop(file, None)
                self._open_files.pop(path, None)
            path.unlink(missing_ok=True)  # even if an earlier run fetched it
            self._fetcher.release(file)

    def described(self, files: Iterable[str]) -> Path | None:
        """Return a folder with these files if some are made, for libraries that read folders. It goes with this."""
        if not self._made:
            return None
        if self._described is None:
            self._described = Path(tempfile.mkdtemp(prefix="pqweights-"))
            weakref.finalize(self, shutil.rmtree, self._described, ignore_errors=True)
            for name in (file for file in files if "/" not in file):
                (self._described / name).write_bytes(read_file(self, name))
        return self._described


def _walk(root: Path) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Return the names of all files but hidden ones, and those of broken links and of links out of the folder.

    Links are followed, but never into a folder that was visited.
    """
    inside: list[str] = []
    broken: list[str] = []
    outside: list[str] = []
    seen = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        paths = [Path(folder, name) for name in sorted(subfolders) if not name.startswith(".")]
        linked = [path for path in paths if _leads_out(root, path)]
        outside += [path.relative_to(root).as_posix() for path in linked]
        subfolders[:] = [path.name for path in paths if path not in linked]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            name = path.relative_to(root).as_posix()
            if path.is_symlink() and not path.exists():
                broken.append(name)
            elif path.is_file():
                is_outside = _leads_out(root, path)
                outside += [name] * is_outside
                inside += [name] * (not is_outside or path.name.endswith(PARSED))
    return sorted(inside), tuple(broken), tuple(outside)


def _leads_out(root: Path, path: Path) -> bool:
    return path.is_symlink() and leads_outside(root, path)


def read_bytes(storage: Storage, file: str, offset: int, count: int) -> bytes:
    """Read `count` bytes of a file from `offset` on."""
    buffer = np.empty(count, dtype=np.uint8)
    storage.read_into(file, offset, buffer)
    return buffer.tobytes()


def read_file(storage: Storage, file: str, limit: int = 256_000_000) -> bytes:
    """Read a whole small file.

    Raises SourceError for a file of more than `limit` bytes: no configuration or index is that large.
    """
    size = storage.files()[file].byte_count
    if size > limit:
        raise SourceError(f"{file}: expected at most {limit} bytes, found {size}")
    return read_bytes(storage, file, 0, size)


def read_json_object(storage: Storage, name: str) -> dict[str, Any]:
    """Read a file that holds a JSON object; raises SourceError if it does not."""
    try:
        value = parse_json(read_file(storage, name))
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def check_not_interrupted(storage: Storage) -> None:
    """Raise MasterError if a run into a folder was interrupted, and it holds no earlier result."""
    if MANIFEST_FILE not in storage.files() and (journal := storage.journal_line()):
        raise MasterError(f"{storage}: {describe_interrupted(journal)}")
