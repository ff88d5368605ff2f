"""Sources that are already quantized: FP8 and MXFP4 are decoded here, and what is not decoded is refused by name.

Formats: block FP8 of DeepSeek-V3 (`X_scale_inv`) and V4 (`M.scale` of a module `M`); FP8 of FBGEMM, ModelOpt and
compressed-tensors float-quantized (`X_scale`); MXFP8 (`X_scale` in bytes); MXFP4 of gpt-oss (`X_blocks` with
`X_scales`). Their numbers are those of the OCP 8-bit floating point specification 1.0 and the OCP microscaling formats
specification 1.0.
packed_sources.py finds what other tools packed.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.config import quantization_settings
from pqweights.checkpoint.foreign import refuse_codes, refuse_foreign, refuse_method
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.mlx_stacks import with_single_experts
from pqweights.checkpoint.packed import Aspect, DecodedTensor, read_columns, read_scales
from pqweights.checkpoint.packed_sources import packed_tensors, plain_settings, scales_of
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.storage import ByteReads
from pqweights.common.dtypes import (
    FLOAT4_VALUES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    float8_table,
    from_float32,
    item_bytes,
)
from pqweights.common.units import counted, first_names
from pqweights.errors import SourceError
from pqweights.formats import CODECS, MASTER_CODECS
from pqweights.kernels.workers import kept, scratch
from pqweights.models import has_trait
from pqweights.models.traits import Trait

# What the scales of activations, and of keys and values in a cache, are called in a module: by transformers,
# compressed-tensors, ModelOpt, FBGEMM and vLLM. In some files the name of a weight and an underscore are before it.
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_global_scale", "input_zero_point"),
    *("output_scale", "prob_output_scale", "scale_input", "qscale_act", "activation_scaling_factor"),
    *("scaled_fp8", "comfy_quant"),  # what ComfyUI says of the format
    *("q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
)
SCALES_ANYWHERE = "*"
# What scales are called, whatever they belong to.
SCALE = re.compile(r"scal|inv(?!_freq)", re.IGNORECASE)
NOT_A_WEIGHT = "a scale for activations in 8 bits, which a model with decoded weights does not have"


class ModelTensors(NamedTuple):
    """The logical tensors of a source, by name the reason why others are none, and what users are told."""

    tensors: list[LogicalTensor]
    left_out: dict[str, str]
    remarks: tuple[str, ...] = ()


def logical_tensors(storage: ByteReads, stored: dict[str, StoredTensor], config: dict[str, Any] | None) -> ModelTensors:
    """Return the logical tensors of a source checkpoint.

    Raises SourceError for a quantization that cannot be decoded, and for scales that are missing or have a wrong shape.
    """
    settings = plain_settings(quantization_settings(config))
    if not settings:
        _refuse_part_of_master(stored)
    refuse_method(settings, stored)
    if settings.get("quant_method") == "mlx" and has_trait((config or {}).get("model_type"), Trait.STACKED_BY_MLX):
        stored = with_single_experts(stored)
    tensors: list[LogicalTensor] = [*packed_tensors(storage, stored, settings)]
    taken = {part.name for tensor in tensors for part in tensor.parts}
    others = {name: tensor for name, tensor in stored.items() if name not in taken}
    refuse_foreign(others)
    tensors += _decoded(storage, others, settings)
    taken.update(part.name for tensor in tensors for part in tensor.parts)
    left_out = {}
    if (
        settings or any(len(tensor.parts) > 1 for tensor in tensors) or "scaled_fp8" in stored
    ):  # no model has a place for these scales
        of_weights = {f"{tensor.name}_{suffix}" for tensor in tensors for suffix in ACTIVATION_SCALES}
        of_activations = [n for n in stored if n.rpartition(".")[2] in ACTIVATION_SCALES or n in of_weights]
        left_out = dict.fromkeys(of_activations, NOT_A_WEIGHT)
    rest = [name for name in stored if name not in taken and name not in left_out]
    refuse_codes(stored[name] for name in rest)
    tensors += [PlainTensor.of(storage, stored[name]) for name in rest]
    _check_names([tensor.name for tensor in tensors])
    return ModelTensors(tensors, left_out, tuple(_casts(tensors)))


def _casts(tensors: Iterable[LogicalTensor]) -> Iterator[str]:
    """Yield that weights in FP8 have no scales."""
    casts = [tensor.name for tensor in tensors if isinstance(tensor, Float8Tensor) and len(tensor.parts) == 1]
    if casts:
        yield (
            f"FP8 weights without scales are read as plain casts, a scale of 1: {counted(len(casts), 'tensor')}, "
            f"{first_names(casts)}"
        )


def _decoded(
    storage: ByteReads, stored: dict[str, StoredTensor], settings: dict[str, Any]
) -> Iterator[Float8Tensor | Mxfp4Tensor]:
    """Yield the tensors that are stored in FP8 or MXFP4."""
    default_block = _weight_block(settings)
    in_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in stored:
        in_module[name.rpartition(".")[0]].append(name)
        if SCALE.search(name) and name.rpartition(".")[2] not in ACTIVATION_SCALES:
            in_module[SCALES_ANYWHERE].append(name)
    for name, tensor in stored.items():
        weight = name.removesuffix("_blocks")
        if weight != name and _is_mxfp4(tensor, stored.get(f"{weight}_scales"), settings):
            experts, rows, groups, _ = tensor.shape
            yield Mxfp4Tensor(
                storage=storage,
                name=weight,
                shape=(experts, 32 * groups, rows),
                dtype="MXFP4",
                parts=(tensor, stored[f"{weight}_scales"]),
            )
        elif tensor.dtype in FLOAT8_DTYPES and name.rpartition(".")[2] not in ACTIVATION_SCALES:
            scales = scales_of(name, stored)
            if scales is None:
                others = (*in_module[name.rpartition(".")[0]], *in_module[SCALES_ANYWHERE])
                _check_unscaled(tensor, others, settings)
            yield Float8Tensor(
                storage=storage,
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                parts=(tensor, scales) if scales else (tensor,),
                scale_block=_scale_block(tensor, scales, default_block) if scales else (),
            )


def _check_unscaled(tensor: StoredTensor, others: Iterable[str], settings: dict[str, Any]) -> None:
    """Raise SourceError if a tensor in FP8 that no known scale belongs to may have one under another name.

    others: the names of what is stored in the same module, and of everything that is called a scale
    """
    name, module = tensor.name, tensor.name.removesuffix(".weight")
    known = (name, f"{module}.bias", f"{module}_bias")
    unknown = (of for of in others if module in of and of not in known and not _is_of_activations(of, [name]))
    beside = name if module == name else f"{module}."
    found = next((of for of in unknown if of.startswith(beside) or SCALE.search(of)), None)
    if settings or found is not None:
        expected = " or ".join(repr(scale) for scale in (f"{name}_scale_inv", f"{name}_scale"))
        raise SourceError(
            f"{tensor.file}: tensor {name!r} is {tensor.dtype} without its scales; expected {expected} in some shard, "
            f"found {'neither' if found is None else f'{found!r}, which is not known as one'}"
        )


def _is_of_activations(name: str, weights: Collection[str]) -> bool:
    """Whether a stored tensor is a scale of activations, of one of some weights if it is named by that."""
    return name.rpartition(".")[2] in ACTIVATION_SCALES or any(
        name == f"{weight}_{suffix}" for suffix in ACTIVATION_SCALES for weight in weights
    )


def _check_names(names: list[str]) -> None:
    """Raise SourceError for a name that two tensors have, or that a master needs for a part of a weight."""
    distinct = set(names)
    suffixes = tuple(dict.fromkeys(suffix for codec in MASTER_CODECS.values() for suffix in codec.suffixes))
    for name in names:
        if name.endswith(suffixes):
            weight = name.removesuffix(next(suffix for suffix in suffixes if name.endswith(suffix)))
            if weight in distinct:
                raise SourceError(
                    f"tensor {name!r}: a master needs this name for a part of {weight!r}; rename the tensor"
                )
    if len(distinct) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise SourceError(f"tensor {twice!r} is there twice, once in a packed format and once plain")


def _refuse_part_of_master(stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError for a shard of a master without the config.json that says how to read it."""
    for parts in {codec.coder(codec.rates[0]).sized(1).parts for codec in CODECS.values()}:
        first = "weight" + parts[0].suffix
        for name, tensor in stored.items():
            if not name.endswith(first):
                continue
            weight = name.removesuffix(parts[0].suffix)
            beside = (stored.get(weight + part.suffix) for part in parts)
            if all(t is not None and t.dtype == part.dtype for t, part in zip(beside, parts, strict=True)):
                raise SourceError(
                    f"{tensor.file}: tensor {name!r} belongs to a pqweights master, whose config.json (with "
                    "quant_method pqweights) is not here; give the original checkpoint to quantize, or the whole "
                    "folder of the master to export"
                )


def _weight_block(settings: dict[str, Any]) -> tuple[int, int]:
    """Return how many rows and columns share a scale by the configuration, 128 by default."""
    block = settings.get("weight_block_size") or (128, 128)
    if isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return (block[0], block[1])
    raise SourceError(f"config.json: weight_block_size: expected two positive integers, found {block!r}")


def _scale_block(tensor: StoredTensor, scales: StoredTensor, default: tuple[int, int]) -> tuple[int, ...]:
    """Return how many elements of each dimension share a scale, from the two shapes and the configured block."""
    if scales.dtype not in (*FLOAT_DTYPES, "F8_E8M0", "U8"):
        raise SourceError(f"{scales.file}: scales {scales.name!r}: expected a floating dtype, found {scales.dtype}")
    shape = tensor.shape
    if all(n == 1 for n in scales.shape):
        return tuple(max(n, 1) for n in shape)
    # One scale per row, with or without a last dimension of 1.
    counts = scales.shape
    if len(counts) == len(shape) - 1:
        counts = (*counts, 1)
    block = []
    configured = (1,) * (len(shape) - 2) + ((1, 32) if scales.dtype == "U8" else default)  # OCP's MXFP8
    if len(counts) == len(shape):
        for size, count, step in zip(shape, counts, configured, strict=True):
            if count == 1:
                block.append(max(size, 1))
            elif count == size:
                block.append(1)
            elif count == -(-size // step):
                block.append(step)
    if len(block) != len(shape):
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected one per tensor, per row or per {default[0]} x "
            f"{default[1]} block of {list(shape)}, found shape {list(scales.shape)}"
        )
    return tuple(block)


def _is_mxfp4(blocks: StoredTensor, scales: StoredTensor | None, settings: dict[str, Any]) -> bool:
    """Whether a tensor called X_blocks is MXFP4 with its scales.

    Raises SourceError if it should be but is not: in a model whose configuration says mxfp4, or with scales in bytes.
    """
    if settings.get("quant_method") != "mxfp4" and (scales is None or not blocks.dtype == scales.dtype == "U8"):
        return False
    expected = blocks.shape[:-1]
    if scales is None:
        raise SourceError(
            f"{blocks.file}: tensor {blocks.name!r} is MXFP4 without its scales; expected "
            f"{blocks.name.removesuffix('_blocks') + '_scales'!r} in some shard, found none"
        )
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise SourceError(
            f"{blocks.file}: tensor {blocks.name!r}: expected MXFP4 blocks U8 [experts, rows, groups, 16], found "
            f"{blocks.dtype} {list(blocks.shape)}"
        )
    if scales.dtype != "U8" or scales.shape != expected:
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected U8 {list(expected)}, found {scales.dtype} "
            f"{list(scales.shape)}"
        )
    return True


# --- the decoded tensors ---


@dataclass(frozen=True, kw_only=True)
class Float8Tensor(DecodedTensor):
    """FP8 values times scales: one for all, one per row, or one per block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    parts: without scales, they are 1
    scale_block: how many elements of each dimension share a scale
    """

    scale_block: tuple[int, ...]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the float32 products of value and scale, rounded once."""
        raw, stored = scratch("raw", count), self.parts[0]
        self.storage.read_into(stored.file, stored.offset + start, raw)
        if self.aspect == Aspect.CODES:
            values = raw.astype(np.float32)
        else:
            values = float8_table(self.dtype)[raw] if self.aspect == Aspect.VALUES else np.ones(count, np.float32)
            if len(self.parts) > 1:
                self._multiply(values, start)
        converted = from_float32(values, dtype)
        out[: len(converted)] = converted

    def _multiply(self, values: npt.NDArray[np.float32], start: int) -> None:
        """Multiply values, the first of which is element `start`, by their scales in place."""
        columns = self.shape[-1] if self.shape else 1
        done, index, scales = 0, -1, np.empty(0, dtype=np.float32)
        while done < len(values):
            row, column = divmod(start + done, columns)
            width = min(columns - column, len(values) - done)
            if self._scale_row(row) != index:
                index = self._scale_row(row)
                scales = self._expanded_scales(index)
            values[done : done + width] *= scales[column : column + width]
            done += width

    def _scale_row(self, row: int) -> int:
        """Return which row of scales belongs to a row of values; rows are numbered through all leading dimensions."""
        index, stride = 0, 1
        for size, step in zip(reversed(self.shape[:-1]), reversed(self.scale_block[:-1]), strict=True):
            row, position = divmod(row, size)
            index += position // step * stride
            stride *= -(-size // step)
        return index

    def _expanded_scales(self, index: int) -> npt.NDArray[np.float32]:
        """Return one row of scales, each repeated for the elements that share it: [columns] f32."""
        if not self.shape:
            return read_scales(self.storage, self.parts[1], 0, 1)
        columns, block = self.shape[-1], self.scale_block[-1]
        scale_columns = -(-columns // block)
        return np.repeat(read_scales(self.storage, self.parts[1], index * scale_columns, scale_columns), block)[
            :columns
        ]


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(DecodedTensor):
    """The experts of gpt-oss in MXFP4.

    shape: [E, 32 * G, N], as in the model: the contraction runs over the stored last dimensions
    parts: the blocks, [E, N, G, 16] u8, two E2M1 codes a byte, the low nibble first; the scales, [E, N, G] u8,
        exponents with a bias of 127
    """

    # Elements decoded at once: a band of columns of one expert's stored matrix.
    BAND_ELEMENTS = 1 << 20
    # Each thread keeps an expert of at most this many stored bytes, so that it is not read again for every band.
    KEPT_BYTES = 1 << 25

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Gather elements across the stored rows, and decode them a band of groups at a time."""
        _, depth, rows = self.shape
        size = item_bytes(dtype)
        band_groups = max(1, self.BAND_ELEMENTS // (32 * rows))
        done = 0
        while done < count:
            expert, within = divmod(start + done, depth * rows)
            first_group = within // rows // 32
            band = self._decode_band(expert, first_group, min(band_groups, depth // 32 - first_group))
            offset = within - first_group * 32 * rows
            part = band.reshape(-1)[offset : offset + count - done]
            out[done * size : (done + len(part)) * size] = from_float32(part, dtype)
            done += len(part)

    def _decode_band(self, expert: int, group: int, groups: int) -> npt.NDArray[np.float32]:
        """Decode groups [group, group + groups) of one expert: [32 * groups, N] f32."""
        blocks, scales = self.parts
        _, rows, all_groups, _ = blocks.shape
        is_small = rows * all_groups * 17 <= self.KEPT_BYTES

        def read(what: str, stored: StoredTensor, columns: slice) -> npt.NDArray[np.uint8]:
            if not is_small:
                return self._read_columns(stored, expert, columns)
            make = functools.partial(self._read_columns, stored, expert, slice(None))
            return kept(f"expert {what}", (self.storage, stored, expert), make)[:, columns]

        codes = read("blocks", blocks, slice(group * 16, (group + groups) * 16))
        exponents = read("scales", scales, slice(group, group + groups))
        values = np.empty((rows, groups, 16, 2), dtype=np.float32)
        by_group = codes.reshape(rows, groups, 16)
        table = np.arange(16, dtype=np.float32) if self.aspect == Aspect.CODES else FLOAT4_VALUES
        values[..., 0], values[..., 1] = table[by_group & 15], table[by_group >> 4]
        if self.aspect == Aspect.SCALES:
            values[...] = 1
        if self.aspect != Aspect.CODES:
            values *= float8_table("F8_E8M0")[exponents][:, :, None, None]
        return np.ascontiguousarray(values.reshape(rows, groups * 32).T)

    def _read_columns(self, stored: StoredTensor, expert: int, columns: slice) -> npt.NDArray[np.uint8]:
        """Read columns of one expert's byte matrix: [rows, columns]."""
        rows, row_bytes = stored.shape[1], math.prod(stored.shape[2:])
        return read_columns(self.storage, stored, columns, rows=rows, row_bytes=row_bytes, first_row=expert * rows)
