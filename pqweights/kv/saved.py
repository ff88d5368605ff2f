"""The tensors of a saved cache, checked before anything computes with them: files may be damaged.

Which parts a quantizer makes, and of which shapes and dtypes, is asked of the quantizer itself, with states of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pqweights.errors import RecipeError, SourceError
from pqweights.kv.quantizer import Parts, StateQuantizer
from pqweights.kv.states import Chunk, tensor_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 200


def shown(value: object) -> str:
    """Return a value, or a message, as a part of a line."""
    return " ".join((value if isinstance(value, str) else repr(value)).split())[:LONGEST]


@dataclass(frozen=True)
class SavedParts:
    """The tensors of a file by name. dtype: of states that are not packed; None to leave it as it is"""

    file: Path
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None

    def damaged(self, said: str) -> SourceError:
        """Return an error that says what of the file is wrong."""
        return SourceError(f"{self.file}: the cache is damaged: {said}")

    def states(self, name: str) -> Tensor:
        """Return states that are not packed, [batch, heads, tokens, size]."""
        found = self._tensor(name)
        shape = found.shape
        if found.dtype not in DTYPES or len(shape) != 4 or not all((shape[0], shape[1], shape[3])):
            raise self.damaged(f"{name}: expected states, found {list(shape)} of {found.dtype}")
        # A window may have no tokens, and then any shape; but a vector takes a bit for each coordinate somewhere.
        if shape[0] * shape[1] * shape[3] > 8 * sum(tensor_bytes(each) for each in self.tensors.values()):
            raise self.damaged(f"{name}: the file has no states of {list(shape)}")
        return found if self.dtype not in DTYPES else found.to(self.dtype)

    def chunks(self, name: str, quantizer: StateQuantizer | None, window: Tensor, tokens: list[Any]) -> list[Chunk]:
        """Return the chunks of keys or values. tokens: how many each chunk has, as the file says"""
        result: list[Chunk] = []
        if not tokens:
            return result
        if quantizer is None or not all(type(count) is int and count > 0 for count in tokens):
            raise self.damaged(f"{name}: {shown(tokens)} tokens in chunks")
        batch, heads, _, size = window.shape
        zeros = torch.zeros(batch, heads, quantizer.first, size, device="cpu")
        expected = quantizer.fit(zeros, None, 0)
        start = 0
        for place, count in enumerate(tokens):
            prefix = f"{name}.{place}"
            shared = self._parts(f"{prefix}.shared", expected, None)
            first = self._first_row(prefix, quantizer, zeros[:, :, : quantizer.step], shared)
            rows = self._parts(f"{prefix}.rows", first, -(-count // quantizer.step))
            result.append(Chunk(rows=rows, shared=shared, start=start, tokens=count))
            start += count
        return result

    def _first_row(self, prefix: str, quantizer: StateQuantizer, zeros: Tensor, shared: Parts) -> Parts:
        """Return a row that is encoded with the shared parts of the file, which shows whether they hold numbers."""
        try:
            return quantizer.encode(zeros, shared, 0)
        except (RuntimeError, IndexError, ValueError, RecipeError) as error:
            raise self.damaged(f"{prefix}: {shown(str(error))}") from None

    def _parts(self, prefix: str, expected: Parts, rows: int | None) -> dict[str, Tensor]:
        """Return the tensors that are like the expected ones, but have `rows` rows if that is given."""
        found = {}
        for name, like in expected.items():
            part = self._tensor(f"{prefix}.{name}")
            shape = list(like.shape) if rows is None else [*like.shape[:2], rows, *like.shape[3:]]
            if list(part.shape) != shape or part.dtype != like.dtype:
                raise self.damaged(
                    f"{prefix}.{name}: expected {shape} of {like.dtype}, found {list(part.shape)} of {part.dtype}"
                )
            if part.is_floating_point() and not part.isfinite().all():
                raise self.damaged(f"{prefix}.{name}: expected finite numbers, found NaN or an infinity")
            found[name] = part
        return found

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.damaged(f"it has no tensor {name}")
        return self.tensors[name]
