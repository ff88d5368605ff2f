"""What s3fs leaves to its caller: the version of what is read, and parts of large objects that are sent again alone.

It sends an upload or a copy from the start when one of its parts fails, and holds ten parts of 50 MB at once.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pqweights.storage.remote.attempts import Stop, TransferStopped
from pqweights.storage.remote.failures import expected_errors

# A part of an upload, of which few wait in memory, and of a copy on the server.
PART_BYTES = 16_000_000
COPY_PART_BYTES = 256_000_000
MOST_PARTS = 10_000
PARTS_AT_ONCE = 4
# The metadata of an object by which the upload that made it is recognized.
MARK = "pqweights-upload"
# Larger objects go in parts.
SINGLE_BYTES = 32_000_000

Result = TypeVar("Result")
Again = Callable[[Callable[[], Result]], Result]  # sends a request, again if that may help
Send = Callable[[dict[str, Any], int, int, int], dict[str, Any]]  # the upload; number, start and end of a part
Ranges = Iterator[tuple[int, int, int]]  # number, start and end of each part


def upload_bytes_held() -> int:
    """Return how many bytes an upload holds in memory at most."""
    return max(SINGLE_BYTES, (PARTS_AT_ONCE + 1) * PART_BYTES)


class S3Objects:
    """Requests for the objects of a file system of s3fs, each sent once.

    file_system: an s3fs.S3FileSystem
    """

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system

    def read(self, path: str, start: int, end: int) -> tuple[bytes, str]:
        """Return the bytes [start, end) of an object, and the ETag of the version that they are of."""
        from fsspec.asyn import sync

        reply = self._call("get_object", path, Range=f"bytes={start}-{end - 1}")
        try:
            return bytes(sync(self._file_system.loop, reply["Body"].read)), str(reply.get("ETag", ""))
        finally:
            reply["Body"].close()

    def upload(self, source: Path, path: str, *, again: Again[Any], stop: Stop) -> None:
        """Write a local file to an object, which is there once it is complete.

        again: sends each part
        stop: asked before each part

        Raises TransferStopped.
        """
        size = source.stat().st_size
        if size <= SINGLE_BYTES:
            content = source.read_bytes()
            again(lambda: self._call("put_object", path, Body=content))
            return

        def send(upload: dict[str, Any], number: int, start: int, end: int) -> dict[str, Any]:
            with open(source, "rb") as part:
                part.seek(start)
                body = part.read(end - start)
            sent = again(lambda: self._call("upload_part", path, **upload, PartNumber=number, Body=body))
            return {"PartNumber": number, "ETag": sent["ETag"]}

        self._in_parts(path, size, PART_BYTES, send, again=again, stop=stop)

    def copy(self, source: str, target: str, size: int, *, again: Again[Any], stop: Stop) -> None:
        """Copy an object on the server; the copy is there once it is complete. Raises TransferStopped."""
        bucket, key, _ = self._file_system.split_path(source)
        place = {"Bucket": bucket, "Key": key}
        if size <= COPY_PART_BYTES:
            again(lambda: self._call("copy_object", target, CopySource=place))
            return

        def send(upload: dict[str, Any], number: int, start: int, end: int) -> dict[str, Any]:
            where = {"CopySource": place, "CopySourceRange": f"bytes={start}-{end - 1}"}
            sent = again(lambda: self._call("upload_part_copy", target, **upload, PartNumber=number, **where))
            return {"PartNumber": number, "ETag": sent["CopyPartResult"]["ETag"]}

        self._in_parts(target, size, COPY_PART_BYTES, send, again=again, stop=stop)

    def _in_parts(
        self,
        path: str,
        size: int,
        part_bytes: int,
        send: Send,
        *,
        again: Again[Any],
        stop: Stop,
    ) -> None:
        """Make an object of parts, a few at a time; what was sent is given up if one of them fails."""
        mark = {MARK: secrets.token_hex(16)}
        created = again(lambda: self._call("create_multipart_upload", path, Metadata=mark))
        upload = {"UploadId": created["UploadId"]}

        def one(number: int, start: int, end: int) -> dict[str, Any]:
            if stop():
                raise TransferStopped
            return send(upload, number, start, end)

        complete = False
        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, "pqweights-parts") as pool:
                waiting = [pool.submit(one, *part) for part in _parts(size, part_bytes)]
                try:
                    parts = [part.result() for part in waiting]
                finally:
                    _cancel(waiting)
            again(lambda: self._complete(path, upload, parts, mark))
            complete = True
        finally:
            if not complete:
                self._give_up(path, upload)

    def _complete(self, path: str, upload: dict[str, Any], parts: list[dict[str, Any]], mark: dict[str, str]) -> None:
        """Make the object of its parts; no problem if an earlier request did, whose reply was lost."""
        try:
            self._call("complete_multipart_upload", path, **upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # there is no such upload any more
            if self._call("head_object", path).get("Metadata") != mark:
                raise

    def _give_up(self, path: str, upload: dict[str, Any]) -> None:
        """Have the server delete the parts of an upload; what it keeps all the same is for its owner to expire."""
        with contextlib.suppress(*expected_errors()):
            self._call("abort_multipart_upload", path, **upload)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        bucket, key, _ = self._file_system.split_path(path)
        return self._file_system.call_s3(method, Bucket=bucket, Key=key, **arguments)


def _parts(size: int, part_bytes: int) -> Ranges:
    """Yield the parts of an object, numbered from 1; as many as a storage takes at most."""
    length = max(part_bytes, -(-size // MOST_PARTS))
    for number, start in enumerate(range(0, size, length), 1):
        yield number, start, min(start + length, size)


def _cancel(waiting: list[Future[dict[str, Any]]]) -> None:
    for part in waiting:
        part.cancel()
