"""Reading forward through the header of a GGUF file, in pieces, and never beyond its end.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little endian and nothing is aligned,
so that the place of a field is known only once all fields before it were read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from pqweights.errors import SourceError

# A header is read in pieces of this size. A model with a large vocabulary has about 20 MB of it.
PIECE_BYTES = 1 << 20
# A tokenizer.json that is stored as one text has up to 40 MB.
MAX_STRING_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A place in a file.

    file: what messages call the file
    file_bytes: its size
    read: read(offset, count) returns bytes of the file
    """

    def __init__(self, file: str, file_bytes: int, read: Callable[[int, int], bytes]) -> None:
        self.file, self._file_bytes, self._read = file, file_bytes, read
        # The piece that was read last, the offset of its first byte in the file, and the place in it.
        self._piece, self._start, self._place = b"", 0, 0

    @property
    def offset(self) -> int:
        """The offset of the next byte in the file."""
        return self._start + self._place

    @property
    def left(self) -> int:
        """How many bytes of the file follow."""
        return self._file_bytes - self.offset

    def damaged(self, what: str) -> SourceError:
        """Return the error for a file that is not as the format says."""
        return SourceError(f"{self.file}: {what}; the file is damaged, or not a GGUF file: fetch it again")

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Read numbers. form: their types, as struct writes them; what: their name, for messages"""
        packed = struct.Struct(f"<{form}")
        self._need(packed.size, what)
        found = packed.unpack_from(self._piece, self._place)
        self._place += packed.size
        return found

    def string(self, what: str) -> bytes:
        """Read a string: its length in 8 bytes, and so many bytes."""
        (length,) = self.numbers("Q", f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"{what}: expected at most {MAX_STRING_BYTES} bytes, found {length}")
        self._need(length, what)
        found = self._piece[self._place : self._place + length]
        self._place += length
        return found

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes."""
        self._check(count, what)
        self._place += count
        if self._place > len(self._piece):
            self._start, self._piece, self._place = self.offset, b"", 0

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over strings; a vocabulary has hundreds of thousands, so those of a piece are passed in one loop."""
        while count:
            piece, place, last = self._piece, self._place, len(self._piece) - _LENGTH.size
            while count and place <= last:
                end = place + _LENGTH.size + _LENGTH.unpack_from(piece, place)[0]
                if end > len(piece):
                    break
                place, count = end, count - 1
            self._place = place
            if count:
                self.string(what)
                count -= 1

    def _need(self, count: int, what: str) -> None:
        """Have the next bytes in the piece."""
        self._check(count, what)
        if self._place + count > len(self._piece):
            start = self.offset
            self._piece = self._read(start, min(max(count, PIECE_BYTES), self._file_bytes - start))
            self._start, self._place = start, 0

    def _check(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.damaged(f"{what}: expected {count} bytes at offset {self.offset}, found {max(self.left, 0)}")
