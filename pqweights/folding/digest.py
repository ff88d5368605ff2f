"""The digest of a fold: what the manifest says of its factors, so that a fold found again can be compared with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import numpy as np

from pqweights.folding.folded import TensorFactors


def digest_of(tensors: Iterable[tuple[str, TensorFactors]]) -> str:
    """Return the sha256 over the names of tensors and what each is multiplied by, sorted by names.

    For each of `rows`, `columns` and `values` that is not all ones, it is over the line `[name, part, shape]`, in JSON,
    and the numbers, float32 and little-endian; then over `[name, "turn", columns, [size, first, count]]`, if there is
    one. docs/format.md, section "pqweights.json", states it.
    """
    digest = hashlib.sha256()
    for name, factors in sorted(tensors, key=lambda pair: pair[0]):
        for part, numbers in (("rows", factors.rows), ("columns", factors.columns), ("values", factors.values)):
            if numbers is None or (part != "values" and (numbers == 1).all()):
                continue
            digest.update(_line(name, part, list(numbers.shape)))
            digest.update(np.ascontiguousarray(numbers, dtype="<f4").data)
        turn = factors.turn
        if turn is not None:
            rows = None if turn.rows is None else [turn.rows.size, turn.rows.first, turn.rows.count]
            digest.update(_line(name, "turn", turn.columns, rows))
    return digest.hexdigest()


def _line(*fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"
