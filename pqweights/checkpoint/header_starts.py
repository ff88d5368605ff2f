"""The first bytes of files that are read over a network: many are requested at once, before headers are needed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

# What the first request for a header asks for; later ones ask for what the longest header so far needed.
HEADER_BYTES = 1 << 16
MOST_HEADER_BYTES = 1 << 20
REQUESTS_AT_ONCE = 8
FILES_AT_ONCE = 4 * REQUESTS_AT_ONCE  # few, so that little waits in memory


class HeaderStarts:
    """The starts of safetensors files whose headers will be read, each until it was.

    digests: SHA-256 of each header that was read, with its length in front, by file
    """

    def __init__(self, request: Callable[[str, int, int], bytes], size_of: Callable[[str], int]) -> None:
        """Take what makes requests.

        request: called with a file, an offset and a count; returns the bytes
        size_of: returns the size of a file in bytes
        """
        self._request, self._size_of = request, size_of
        self._expected: deque[str] = deque()
        self._starts: dict[str, bytes] = {}
        self._header_bytes = HEADER_BYTES
        self.digests: dict[str, str] = {}

    def expect(self, files: Sequence[str]) -> None:
        """Note whose headers are read next, in this order."""
        self._expected = deque(files)

    def read(self, file: str, offset: int, count: int) -> bytes | None:
        """Return bytes of a file whose header was expected and was not read yet, fewer at its end; None of another."""
        while file in self._expected:
            self._request_starts()
        if file not in self._starts:
            return None
        start = self._starts[file]
        data = start[offset : offset + count]
        if len(data) < count:
            data = self._request(file, offset, count)
        if offset == 8:  # the header follows 8 bytes of length
            self.digests[file] = hashlib.sha256(start[:8] + data).hexdigest()
            self._header_bytes = min(max(self._header_bytes, (8 + count) * 9 // 8), MOST_HEADER_BYTES)
            del self._starts[file]
        return data

    def _request_starts(self) -> None:
        """Request the starts of the next files. The first file comes alone; it shows how long headers are here."""
        count = FILES_AT_ONCE if self.digests else 1
        batch = [self._expected.popleft() for _ in range(min(count, len(self._expected)))]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-headers") as pool:
            for file, start in zip(batch, pool.map(self._start, batch), strict=True):
                self._starts[file] = start

    def _start(self, file: str) -> bytes:
        return self._request(file, 0, min(self._header_bytes, self._size_of(file)))
