"""A reference that several models are compared with: each window is computed once, and its logits are read again."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from pqweights.checkpoint.writer import free_bytes
from pqweights.runtime.models import Floats, Model
from pqweights.runtime.texts import Ids

# So much of the disk stays free: what no longer fits is computed again.
ROOM_LEFT_BYTES = 2_000_000_000


@contextmanager
def remembered(model: Model) -> Iterator[Model]:
    """Yield a model that keeps its logits in a temporary file, [tokens, vocabulary] f32, as long as there is room."""
    # By window and how many of its last tokens are asked for: where the logits lie, and their shape.
    places: dict[tuple[bytes, int], tuple[int, tuple[int, ...]]] = {}
    with tempfile.TemporaryFile() as file:

        def logits(ids: Ids, last: int) -> Floats:
            key = ids.tobytes(), last
            if key in places:
                offset, shape = places[key]
                file.seek(offset)
                return np.fromfile(file, dtype=np.float32, count=math.prod(shape)).reshape(shape)
            result = np.ascontiguousarray(model.logits(ids, last))
            if free_bytes(Path(tempfile.gettempdir())) - result.nbytes > ROOM_LEFT_BYTES:
                places[key] = file.seek(0, os.SEEK_END), result.shape
                result.tofile(file)
            return result

        yield replace(model, logits=logits)
