"""The quantizers of llama.cpp's ggml library."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from external_runtimes import need

from pqweights.kernels.gguf_types import BLOCK_TYPES

Floats = npt.NDArray[np.float32]


def ggml_blocks(kind: str, values: Floats, importance: Floats | None) -> npt.NDArray[np.uint8]:
    """What ggml_quantize_chunk makes of weights [rows, width], [rows, bytes of a row]; importance: [width]"""
    need("llama.cpp")
    package = importlib.util.find_spec("llama_cpp")  # not imported: that leaves files open
    assert package is not None and package.origin is not None
    library = ctypes.CDLL(str(next((Path(package.origin).parent / "lib").glob("*ggml-base.*"))))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = np.empty((len(values), BLOCK_TYPES[kind].row_bytes(values.shape[1])), dtype=np.uint8)
    matrix = None if importance is None else importance.ctypes.data
    quantize(int(gguf.GGMLQuantizationType[kind]), values.ctypes.data, out.ctypes.data, 0, *values.shape, matrix)
    return out
