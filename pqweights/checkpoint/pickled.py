"""Pickled PyTorch weights, on request only: torch's weights_only unpickler gives the layout, we read the bytes.

The unpickler runs with fake tensors, so nothing is loaded; torch notes for each storage where in the zip file it lies.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import LocalStorage, Storage, read_file
from pqweights.errors import SourceError

PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# What a broken or hostile file provokes in torch's loader.
REFUSALS = (
    pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, OSError,
)  # fmt: skip


def is_pickle(file: str) -> bool:
    """Whether a weight file is a pickle, by its name."""
    return file.endswith(SUFFIXES)


def weight_files(storage: Storage, pickles: list[str]) -> tuple[str, ...]:
    """The pickled files of a checkpoint: those of the index, or the only one there is."""
    if PICKLE_INDEX_FILE in storage.files():
        index: Any = json.loads(read_file(storage, PICKLE_INDEX_FILE))
        named = sorted({str(name) for name in index["weight_map"].values()})
        missing = [name for name in named if name not in pickles]
        if missing:
            raise SourceError(f"{missing[0]}: missing, although {PICKLE_INDEX_FILE} names it: fetch it")
        return tuple(named)
    if len(pickles) > 1:
        raise SourceError(f"expected one pickled file or {PICKLE_INDEX_FILE}, found {', '.join(pickles[:4])}")
    return (pickles[0],)


def stored_tensors(storage: Storage, file: str) -> list[StoredTensor]:
    """The tensors of a pickled file, as places in that file.

    Raises SourceError where torch refuses the pickle or a tensor is not contiguous.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not isinstance(storage, LocalStorage):
        raise SourceError(f"{file}: pickled weights can only be read from a local folder")
    names = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    try:
        with FakeTensorMode():
            state = torch.load(storage.root / file, weights_only=True, map_location="cpu")
    except REFUSALS as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(f"{file}: torch's weights_only loader refuses it: {first_line[:160]}") from None
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise SourceError(f"{file}: expected a dictionary of tensors, found {type(state).__name__}")
    tensors = []
    for name, tensor in state.items():
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if start is None or not tensor.is_contiguous() or tensor.dtype not in names:
            raise SourceError(
                f"{file}: tensor {name!r} is not a contiguous tensor of a known dtype: convert to safetensors"
            )
        offset = start + tensor.storage_offset() * tensor.element_size()
        count = tensor.numel() * tensor.element_size()
        tensors.append(StoredTensor(str(name), names[tensor.dtype], tuple(tensor.shape), file, offset, count))
    return tensors
