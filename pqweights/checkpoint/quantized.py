"""The logical tensors of a source, which may be quantized already; what is not decoded is refused by name.

The formats find their weights by the configuration and by the names of stored tensors (formats/sources.py). They take
out of the configuration what they decode, so integers that are left in the place of weights are codes of something
else, which is refused by the name that the configuration or the tensors give it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pqweights.checkpoint.config import quantization_settings
from pqweights.checkpoint.header import ByteReads, StoredTensor
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.common.dtypes import FLOAT8_DTYPES
from pqweights.common.units import counted, first_names
from pqweights.errors import SourceError
from pqweights.formats import CODECS, MASTER_CODECS
from pqweights.formats.fp8 import ACTIVATION_SCALES
from pqweights.formats.mlx import with_single_experts
from pqweights.formats.packed import QuantizedTensor, Source
from pqweights.formats.sources import OF_ANY_TOOL, TOOLS, found_by, plain_settings, tool_finders, why_not
from pqweights.kernels import VALUE_DTYPES
from pqweights.models import has_trait
from pqweights.models.traits import Trait

NOT_A_WEIGHT = "a scale for activations in 8 bits, which a model with decoded weights does not have"
GIVE_ORIGINAL = "it is already quantized with loss; give the original checkpoint"
NOT_DESCRIBED = "the quantization_config of config.json does not say how it is packed; give the folder as published"
# The names of tensors that mark a format that is not decoded, whatever the configuration says.
FOREIGN_MARKS = {
    "weight_g_idx": "compressed-tensors with an order of columns",
    "pre_quant_scale": "ModelOpt with scaled inputs",
    "weight._data": "quanto",
    "weight._scale": "quanto",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "centroids.weight": "VPTQ",
    "res_centroids.weight": "VPTQ",
    "dense_weights": "SpQR",
    "Qidxs": "QuIP#",
    "q_invperm": "EXL2",
    "q_scale_max": "EXL2",
    "suh": "EXL3",
    "lookup_table": "SqueezeLLM",
    "tables2": "HIGGS",
    "weight_scales": "EETQ",
    "dqweight": "FP-Quant",
    "wscales": "Nunchaku",
}
# And those that mark one that is decoded if the configuration says so.
DECODED_MARKS = {
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "weight_packed": "compressed-tensors",
    "_weight_qdata": "torchao",
    "weight.absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
}
# Methods of which tools leave the configuration behind when they decode all weights, as it is read of those that are
# decoded here.
LEFT_BEHIND = ("aqlm", "eetq", "higgs", "hqq", "quanto", "spqr", "vptq")
# Codes are stored in these. What else models have of them: masks, and numbers of positions, tokens and experts.
CODES = ("I8", "U8", "I16", "U16", "I32", "U32")
NO_CODES = re.compile(r"bias|\w*mask\w*|\w*_ids?|\w*ind(?:ex|ices)\w*|\w*2eid|num_\w+|\w*position\w*|\w*token\w*")


def logical_tensors(
    storage: ByteReads, stored: dict[str, StoredTensor], config: dict[str, Any] | None
) -> tuple[list[LogicalTensor], dict[str, str], list[str]]:
    """Return the logical tensors of a source checkpoint, by name the reason why others are none, and remarks for users.

    Raises SourceError for a quantization that cannot be decoded, and for scales that are missing or have a wrong shape.
    """
    settings = plain_settings(quantization_settings(config))
    if not settings:
        _refuse_part_of_master(stored)
    refuse_method(settings, stored)
    if settings.get("quant_method") == "mlx" and has_trait((config or {}).get("model_type"), Trait.STACKED_BY_MLX):
        stored = with_single_experts(stored)
    tensors: list[LogicalTensor] = []
    may_be_packed = bool(settings) or any(of.dtype not in VALUE_DTYPES for of in stored.values())
    if may_be_packed:
        tensors += found_by(tool_finders(settings), Source(storage, stored, settings))
    taken = {part.name for tensor in tensors for part in tensor.parts}
    others = {name: tensor for name, tensor in stored.items() if name not in taken}
    refuse_foreign(others)
    if may_be_packed:
        tensors += found_by(OF_ANY_TOOL, Source(storage, others, settings))
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
    return tensors, left_out, [*_casts(tensors)]


def _casts(tensors: Iterable[LogicalTensor]) -> Iterator[str]:
    """Yield that weights in FP8 have no scales. Raises SourceError if others have: theirs are missing then."""
    in_fp8 = [of for of in tensors if isinstance(of, QuantizedTensor) and of.dtype in FLOAT8_DTYPES]
    casts = [tensor.name for tensor in in_fp8 if len(tensor.parts) == 1]
    scaled = next((tensor.name for tensor in in_fp8 if len(tensor.parts) > 1), None)
    if casts and scaled is not None:
        raise SourceError(
            f"tensor {casts[0]!r} is in FP8 without scales, and others have some, such as {scaled!r}: its scales are "
            "missing; fetch the checkpoint again, or convert it with the tool that made it"
        )
    if casts:
        yield (
            f"FP8 weights without scales are read as plain casts, a scale of 1: {counted(len(casts), 'tensor')}, "
            f"{first_names(casts)}"
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
        raise SourceError(f"tensor {twice!r} is stored twice, once in a packed format and once plain")


def _refuse_part_of_master(stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError for a shard of a master without the config.json that says how to read it."""
    for codec in CODECS.values():
        suffix = codec.suffixes[0]
        for name, tensor in stored.items():
            if not name.endswith("weight" + suffix):
                continue
            weight, parts = name.removesuffix(suffix), codec.at(codec.rates[0]).sized(1).parts
            beside = (stored.get(weight + part.suffix) for part in parts)
            if all(t is not None and t.dtype == part.dtype for t, part in zip(beside, parts, strict=True)):
                raise SourceError(
                    f"{tensor.file}: tensor {name!r} belongs to a pqweights master, whose config.json (with "
                    "quant_method pqweights) is not here; give the original checkpoint to quantize, or the whole "
                    "folder of the master to export"
                )


def refuse_method(settings: dict[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Raise SourceError if the configuration states a quantization that is not decoded."""
    method = str(settings.get("quant_method", "")).lower()
    described = _unsupported_method(method, settings) if settings else None
    is_plain = method in LEFT_BEHIND and not any(map(_is_code, stored.values()))
    if described and (not is_plain or any(name.endswith(tuple(FOREIGN_MARKS)) for name in stored)):
        raise SourceError(f"config.json: the source is {described}: {GIVE_ORIGINAL}")


def refuse_foreign(stored: Mapping[str, StoredTensor]) -> None:
    """Raise SourceError if a tensor shows a quantization that is not decoded, or that no configuration describes."""
    marks = FOREIGN_MARKS | DECODED_MARKS
    # gpt-oss calls the scales of its MXFP4 blocks as EETQ calls those of its integers.
    marked = [
        name for name in stored if name.endswith(tuple(marks)) and name.removesuffix("scales") + "blocks" not in stored
    ]
    for mark, format_name in marks.items():
        for name in marked:
            if name == mark or name.endswith("." + mark):
                fix = NOT_DESCRIBED if mark in DECODED_MARKS else GIVE_ORIGINAL
                raise SourceError(f"{stored[name].file}: tensor {name!r} marks {format_name}: {fix}")
    for name, tensor in stored.items():
        if tensor.dtype == "U32" and name.endswith("weight"):
            scales = name.removesuffix("weight") + "scales"
            if scales in stored:
                raise SourceError(f"{tensor.file}: tensor {name!r} with {scales!r} marks MLX: {NOT_DESCRIBED}")
        if tensor.dtype in ("I8", "I32") and name + "_scale" in stored:
            raise SourceError(
                f"{tensor.file}: tensor {name!r} with {name + '_scale'!r} marks integer compressed-tensors: "
                f"{NOT_DESCRIBED}"
            )


def refuse_codes(stored: Iterable[StoredTensor]) -> None:
    """Raise SourceError for integers in the place of a weight. stored: what no format has taken"""
    for tensor in filter(_is_code, stored):
        raise SourceError(
            f"{tensor.file}: tensor {tensor.name!r}: expected a weight in floating point, found {tensor.dtype} "
            f"{list(tensor.shape)}: codes in a format that is not known; give the original checkpoint"
        )


def _is_code(tensor: StoredTensor) -> bool:
    """Whether a stored tensor holds integers, and neither a mask nor numbers of something."""
    is_integer = tensor.dtype in CODES and len(tensor.shape) > 1
    return is_integer and not NO_CODES.fullmatch(tensor.name.rpartition(".")[2])


def _unsupported_method(method: str, settings: dict[str, Any]) -> str | None:
    """Return the name of a quantization that is not decoded; None for one that is."""
    if method in ("fbgemm_fp8", "mxfp4", "mxfp8"):
        return None
    if method in TOOLS:
        return why_not(settings)
    return f"quantized by {method!r}" if method else "quantized by an unnamed method"
