"""The CPU kernels that encode GGUF's blocks of scales and offsets (Q4_K, Q5_K, Q2_K, Q4_1, Q5_1), in numba.

gguf_affine_blocks.py says how. ctypes calls the kernels, so their parameters are plain pointers and numbers: those of
gguf_encoding.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from pqweights.kernels.emit import LANES
from pqweights.kernels.gguf_affine_blocks import make_encode
from pqweights.kernels.gguf_affine_formats import FORMATS, MOST_BLOCK
from pqweights.kernels.gguf_affine_parts import FIELDS, MOST_PARTS
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.jit import jit
from pqweights.kernels.vector import stack

# Pointers: values, importance, settings, data, energies, errors; then blocks, blocks of a row, weighted.
ENCODE_BLOCKS = types.void(*[types.voidptr] * 6, *[types.int64] * 3)
_MOST_SETTINGS = 256
_WEIGHTS, _MOST_WORDS = MOST_BLOCK * LANES, 44
_WORK = 2 * _WEIGHTS + FIELDS * MOST_PARTS * LANES
_WEIGHTS_OF_4, _WORK_OF_4, _WORDS_OF_4, _PAIRS_OF_8 = _WEIGHTS * 4, _WORK * 4, _MOST_WORDS * LANES * 4, 2 * LANES * 8


def _encoder(name: str) -> Any:
    """The kernel of a format."""
    form, block_words = FORMATS[name], BLOCK_TYPES[name].block_bytes // 4
    size, encode_16 = form.block_size, make_encode(form)

    @jit
    def encode_some(
        values: Any, importance: Any, settings: Any, memory: Any, words: Any, sums: Any, weighted: Any
    ) -> None:
        if weighted:
            encode_16(1, values, importance, settings, memory, words, sums)
        else:
            encode_16(0, values, importance, settings, memory, words, sums)

    def encode(
        values_at: Any,  # f32 [blocks, size]
        importance_at: Any,  # f32 [row_blocks, size], above 0; unused unless weighted
        settings_at: Any,
        data_at: Any,  # out: u32 [blocks, block_words]
        energies_at: Any,  # out: f64 [blocks]
        errors_at: Any,  # out: f64 [blocks]
        blocks: Any,
        row_blocks: Any,
        weighted: Any,
    ) -> None:
        values = carray(values_at, blocks * size, np.float32)
        importance = carray(importance_at, row_blocks * size, np.float32)
        settings = carray(settings_at, _MOST_SETTINGS, np.float32)
        data = carray(data_at, blocks * block_words, np.int32)
        energies, errors = carray(energies_at, blocks, np.float64), carray(errors_at, blocks, np.float64)
        memory = carray(stack(_WORK_OF_4), _WORK, np.float32)
        rest = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
        factors = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
        words = carray(stack(_WORDS_OF_4), _MOST_WORDS * LANES, np.int32)
        sums = carray(stack(_PAIRS_OF_8), 2 * LANES, np.float64)
        for first in range(0, blocks, LANES):
            count = min(LANES, blocks - first)
            begin, end = first * size, (first + count) * size
            if weighted:
                for lane in range(LANES):
                    start = (first + lane) % row_blocks * size
                    for j in range(size):
                        factors[lane * size + j] = importance[start + j]
            if count == LANES:
                encode_some(values[begin:end], factors, settings, memory, words, sums, weighted)
            else:
                for j in range(size * LANES):
                    rest[j] = values[begin + j] if begin + j < end else np.float32(0)
                encode_some(rest, factors, settings, memory, words, sums, weighted)
            for lane in range(count):
                for word in range(block_words):
                    data[(first + lane) * block_words + word] = words[word * LANES + lane]
                energies[first + lane], errors[first + lane] = sums[lane], sums[LANES + lane]

    return encode


KERNELS = {f"encode_gguf_{name.lower()}": (_encoder(name), ENCODE_BLOCKS) for name in FORMATS}
