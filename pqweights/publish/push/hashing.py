"""The SHA-256 of the files of a verified folder: the Hub names large files by it, and the manifest has others.

Files are hashed side by side, each by one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.options import Progress
from pqweights.publish.options import PushOptions
from pqweights.publish.push.folder import FinishedFolder
from pqweights.rewrite.task import usable_cores
from pqweights.storage.hub.repository import RemoteFile, Repository, pieces_of

# The Hub keeps smaller files in git. Should a .gitattributes say otherwise, the official client hashes them itself.
SMALL_BYTES = 1_000_000
PROGRESS_SECONDS = 0.1


def hash_files(folder: FinishedFolder, remote: Repository, options: PushOptions) -> dict[str, str]:
    """Return the SHA-256, in hex, of the files of a folder that the Hub has, or will have, as large files.

    folder: verified since it was read
    remote: what it is compared with; in a dry run, only what this comparison needs is hashed

    Raises MasterError if a file was changed after it was verified.
    """
    hashes = {name: record.sha256 for name, record in folder.manifest.files.items()}
    missing = {
        name: byte_count
        for name, byte_count in _without_hash(folder).items()
        if _is_needed(name, byte_count, remote.files.get(name), options)
    }
    hashes |= _side_by_side(folder.path, missing, threads=options.threads or usable_cores(), progress=options.hashing)
    for name in hashes.keys() & folder.stamps.keys():
        folder.check_unchanged(name)
    return hashes


def _without_hash(folder: FinishedFolder) -> dict[str, int]:
    """The files whose SHA-256 the manifest does not state, with their sizes in bytes; the card is not there yet."""
    files = {shard.file: shard.file_bytes for shard in folder.shards} | {MANIFEST_FILE: folder.sizes[MANIFEST_FILE]}
    if (folder.path / EVALUATION_FILE).is_file():
        files[EVALUATION_FILE] = (folder.path / EVALUATION_FILE).stat().st_size
    return files


def _is_needed(name: str, byte_count: int, there: RemoteFile | None, options: PushOptions) -> bool:
    """Whether a file is compared with a large file of the Hub, or may be sent as one."""
    if there is not None and there.byte_count == byte_count:
        return there.sha256 is not None
    may_be_large = name not in (MANIFEST_FILE, EVALUATION_FILE) or byte_count >= SMALL_BYTES
    return may_be_large and not options.dry_run


def _side_by_side(
    folder: Path, sizes: Mapping[str, int], *, threads: int, progress: Progress
) -> Iterator[tuple[str, str]]:
    """Yield files with their SHA-256 as they are hashed, the largest first, so that the threads end together."""
    read, stopped = dict.fromkeys(sizes, 0), Event()

    def hashed(name: str) -> str:
        digest = hashlib.sha256()
        for piece in pieces_of(folder / name):
            if stopped.is_set():
                break
            digest.update(piece)
            read[name] += len(piece)
        return digest.hexdigest()

    pool = ThreadPoolExecutor(threads)
    try:
        waiting: dict[Future[str], str] = {
            pool.submit(hashed, name): name for name in sorted(sizes, key=lambda name: (-sizes[name], name))
        }
        while waiting:
            ended, _ = wait(waiting, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
            progress(sum(read.values()), sum(sizes.values()), next(iter(waiting.values())))
            for future in ended:
                yield waiting.pop(future), future.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
