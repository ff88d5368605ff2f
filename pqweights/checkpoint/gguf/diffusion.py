"""A transformer or UNet of an image or video model as a GGUF file holds it, for ComfyUI-GGUF and for diffusers.

Names stay as they are in the source, but for a prefix. Both programs read tensors of more dimensions than llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.model import GgufModel, add_general
from pqweights.checkpoint.gguf.views import RenamedTensor
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES
from pqweights.errors import ExportError
from pqweights.models.diffusion import CLASS, COMFYUI, DIFFUSERS, FAMILIES, PREFIXES, Found, find_family

# The rows of weights that ComfyUI-GGUF gives their own shape back (tools/convert.py), and its key with that shape.
COLUMNS = 256
FEWEST_WEIGHTS = 512
SHAPE_KEY = "comfy.gguf.orig_shape."
NOT_COMFYUI = (
    f"only {DIFFUSERS} loads the file, because its tensors have the names of {DIFFUSERS}: for ComfyUI, give the single "
    "file of the model in its original layout as the source"
)
NOT_DIFFUSERS = (
    f"only {COMFYUI} loads the file, because its weights are in rows of {COLUMNS}: for {DIFFUSERS}, give the model's "
    f"folder in the layout of {DIFFUSERS} as the source"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReshapedTensor(RenamedTensor):
    """A tensor with the same elements in rows of another length."""

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: its rows are not those of the source."""
        return


def diffusion_family(checkpoint: Checkpoint) -> Found | None:
    """Return the family of an image or video model; None for a model of another kind.

    Raises ExportError for an image or video model of which no program loads GGUF files.
    """
    config, names = checkpoint.config or {}, [tensor.name for tensor in checkpoint.tensors]
    found = find_family(config, names)
    if found is None and isinstance(config.get(CLASS), str):
        classes = sorted({name for family in FAMILIES.values() for name in family.classes})
        raise ExportError(
            f"{CLASS}: neither {COMFYUI} nor {DIFFUSERS} loads GGUF files of {config[CLASS][:80]}; these can be "
            f"written: {', '.join(classes)}",
            file=CONFIG_FILE,
            remedy="use another target",
        )
    if found is None and any(name.startswith(PREFIXES[0]) for name in names):
        raise ExportError(
            f"tensors {PREFIXES[0]}*: an image or video model of an unknown family; known are {', '.join(FAMILIES)}"
        )
    return found


def diffusion_model(checkpoint: Checkpoint, found: Found, *, name: str | None) -> GgufModel:
    """Return the GGUF model of a checkpoint. name: what the file calls the model"""
    writer = gguf_package().GGUFWriter(None, found.family.architecture)
    tensors, left_out = own_tensors(checkpoint, found)
    for number, tensor in enumerate(tensors):
        if _is_reshaped(found, tensor.name, tensor.shape):
            writer.add_array(SHAPE_KEY + tensor.name, list(tensor.shape))
            shape = (math.prod(tensor.shape) // COLUMNS, COLUMNS)
            tensors[number] = ReshapedTensor.of(tensor.name, tensor, shape=shape)
    add_general(checkpoint, tuple(tensors), writer, name=name)
    return GgufModel(
        architecture=found.family.architecture,
        metadata=writer.kv_data[0],
        tensors=tuple(tensors),
        left_out=left_out,
        notes=tuple(_notes(found)),
        diffusion=found,
    )


def own_tensors(checkpoint: Checkpoint, found: Found) -> tuple[list[LogicalTensor], dict[str, str]]:
    """Return the weights of the model itself, by their own names, and why each other tensor is left out, by name."""
    tensors, left_out = list[LogicalTensor](), dict[str, str]()
    for tensor in checkpoint.tensors:
        own_name = tensor.name.removeprefix(found.prefix)
        if not tensor.name.startswith(found.prefix):
            left_out[tensor.name] = "belongs to another model of the pipeline, which has a file of its own"
        elif tensor.dtype not in FLOAT_DTYPES or (found.family.unused and re.search(found.family.unused, own_name)):
            left_out[tensor.name] = "not a weight of the model"
        else:
            tensors.append(RenamedTensor.of(own_name, tensor) if found.prefix else tensor)
    return tensors, left_out


def _is_reshaped(found: Found, name: str, shape: tuple[int, ...]) -> bool:
    if not (found.original and found.family.reshaped and found.in_blocks(name)):
        return False
    count = math.prod(shape)
    is_whole = count >= FEWEST_WEIGHTS and count % COLUMNS == 0
    return len(shape) > 1 and name.endswith(".weight") and is_whole and shape[-1] % COLUMNS != 0


def _notes(found: Found) -> Iterator[str]:
    """Yield which of the two programs does not load the file, and why."""
    if not found.original and found.family.comfyui:
        yield NOT_COMFYUI
    if DIFFUSERS not in found.programs:
        yield NOT_DIFFUSERS


def plain_type(found: Found, tensor: LogicalTensor) -> str | None:
    """Return the type of a tensor that is not quantized; None for one that may be.

    Matrices have 16 bits if they have no more in the source. All else is what programs do not decode: parameters, and
    weights of convolutions, which in blocks are many.
    """
    if found.is_matrix(tensor.name, tensor.shape):
        if found.in_blocks(tensor.name):
            return None
        in_source = "BF16" if tensor.plain_dtype in FLOAT8_DTYPES else tensor.plain_dtype
        return in_source if in_source in ("BF16", "F16") else "F32"
    return (
        "F16" if len(tensor.shape) > 2 and found.in_blocks(tensor.name) and tensor.name.endswith(".weight") else "F32"
    )
