"""The quantizers and the decoders of llama.cpp's ggml library."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.kernels.gguf_encoding import BLOCK_TYPES

Floats = npt.NDArray[np.float32]


def ggml() -> ctypes.CDLL:
    """The library."""
    package = importlib.util.find_spec("llama_cpp")  # not imported: that leaves files open
    assert package is not None and package.origin is not None
    return ctypes.CDLL(str(next((Path(package.origin).parent / "lib").glob("*ggml-base.*"))))


def ggml_blocks(kind: str, values: Floats, importance: Floats | None) -> npt.NDArray[np.uint8]:
    """What ggml_quantize_chunk makes of weights [rows, width], [rows, bytes of a row].

    importance: [width]; without, and for types that it makes with importances only, all are 1
    """
    library, number = ggml(), BLOCK_TYPES[kind].number
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    if importance is None and library.ggml_quantize_requires_imatrix(number):
        importance = np.ones(values.shape[1], dtype=np.float32)
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = np.empty((len(values), BLOCK_TYPES[kind].row_bytes(values.shape[1])), dtype=np.uint8)
    matrix = None if importance is None else importance.ctypes.data
    quantize(number, values.ctypes.data, out.ctypes.data, 0, *values.shape, matrix)
    return out


def ggml_decoded(kind: str, data: npt.NDArray[np.uint8]) -> Floats:
    """What ggml makes of blocks [blocks, block bytes]: [blocks, weights of a block]."""
    decode = getattr(ggml(), "dequantize_row_" + kind.lower().replace("_k", "_K"))
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    out = np.empty((len(data), BLOCK_TYPES[kind].group_size), dtype=np.float32)
    decode(data.ctypes.data, out.ctypes.data, out.size)
    return out
