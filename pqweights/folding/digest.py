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
    and the numbers, float32 and little-endian. docs/format.md, section "pqweights.json", states it.
    """
    digest = hashlib.sha256()
    for name, factors in sorted(tensors, key=lambda pair: pair[0]):
        for part, numbers in (("rows", factors.rows), ("columns", factors.columns), ("values", factors.values)):
            if numbers is None or (part != "values" and (numbers == 1).all()):
                continue
            digest.update(json.dumps([name, part, list(numbers.shape)]).encode() + b"\n")
            digest.update(np.ascontiguousarray(numbers, dtype="<f4").data)
    return digest.hexdigest()
