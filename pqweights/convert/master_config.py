"""The config.json of a master, from the plans of its tensors and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.blocks import grid_of_stored, grid_spec
from pqweights.checkpoint.config import edited_config, guarded_config, model_dtype, quantization_settings
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.master import NativeSource, quantization_config
from pqweights.checkpoint.source import Checkpoint
from pqweights.convert.records import TensorRecord
from pqweights.formats.native import CODED, Native
from pqweights.planning.layout import KEEP, QUANTIZE, TensorPlan, format_of


def master_config(
    checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
) -> dict[str, Any]:
    """Return the config.json of a master, with a quantization_config of ours."""
    dtype = model_dtype(checkpoint.config, checkpoint.tensors)
    kept = [tensor.name for tensor in tensors if tensor.action == KEEP]
    weights = [
        (tensor, format_of(planned, record.state or {}))
        for tensor, planned, record in zip(checkpoint.tensors, tensors, records, strict=True)
        if planned.action == QUANTIZE
    ]
    quantization = quantization_config(weights, kept, native_source(checkpoint, tensors))
    return guarded_config(edited_config(checkpoint.config, dtype, old_dtype=dtype), quantization)


def native_source(checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> NativeSource | None:
    """Return what the configuration of a finished master says of its source; None if no weight is native."""
    native = {tensor.name: tensor for tensor in tensors if tensor.codec == Native.codec}
    if not native:
        return None
    held = {spec.name for tensor in native.values() for spec in tensor.stored}
    parts = (part for tensor in checkpoint.tensors if tensor.name in native for part in tensor.parts)
    coded = {part.name: TensorSpec(*part[:3]) for part in parts if part.name not in held}
    for name, tensor in native.items():
        blocks = tensor.stored[0].name.removesuffix(CODED)
        if blocks not in held and (of_grid := grid_of_stored(blocks)) is not None and of_grid[0] == name:
            coded[blocks] = grid_spec(name, tensor.shape, of_grid[1])
    own = {tensor.name: (tensor.dtype, tensor.shape) for tensor in native.values()}
    return NativeSource(
        settings=quantization_settings(checkpoint.config),
        coded={name: spec for name, spec in coded.items() if own.get(name) != (spec.dtype, spec.shape)},
    )
