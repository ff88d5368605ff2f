"""The tensors of a GGUF file: their names, which are those of the gguf package, and what each is made of.

Some are held in other pieces (regrouped.py), or with other values or in another order (views.py). Layers that predict
further tokens, from which a runtime drafts, are blocks behind the last one. DeepSeek and GLM number them so, too. Qwen
and EXAONE have them below `mtp`, with other names for what they have beside a layer of the model; Nemotron-H has two
layers there that llama.cpp takes for one. https://github.com/ggml-org/llama.cpp, conversion/qwen.py (_QwenMtpMixin),
conversion/glm.py and conversion/nemotron.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.mixes import INTEGERS
from pqweights.checkpoint.gguf.regrouped import (
    NamedTensor,
    cut,
    in_words_of,
    of_layer,
    rows_from,
    with_experts_stacked,
    with_shards_joined,
    with_tiled_heads,
)
from pqweights.checkpoint.gguf.rope import Factors
from pqweights.checkpoint.gguf.views import (
    ConstantTensor,
    InterleavedTensor,
    NumbersTensor,
    PaddedTensor,
    RenamedTensor,
    decay_rates,
    one_added,
    rows_scaled,
)
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.structure import counts_drafts
from pqweights.checkpoint.views import MovedTensor
from pqweights.common.dtypes import FLOAT_DTYPES
from pqweights.errors import ExportError
from pqweights.models.conventions import BELOW_MTP, LAYER, TEXT_PREFIXES
from pqweights.models.llama_cpp import SHAPES, SLIDING
from pqweights.models.names import is_leftover, predicts_further, tower_of
from pqweights.models.optional_parts import unused_parts
from pqweights.models.settings import Settings, layer_kinds, unused_positions
from pqweights.models.traits import Trait

SUFFIXES = (".weight", ".bias", ".scale")
# Tensors that are called a bias, and that are always there.
NAMED_BIASES = frozenset({"FFN_EXP_PROBS_B", "SSM_DT"})
# Tensors that old checkpoints hold, and that follow from the configuration.
COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attn.bias", ".masked_bias")
HEAD = "lm_head.weight"
# The type of tables of whole numbers ends so.
NUMBERS = "TID2EID"
# What LayerNorm.weight and LayerNorm.bias were called at first.
OLD_NORMS = {".gamma": ".weight", ".beta": ".bias"}
# Names of tensors in layers, which encoders and decoders may have a stack of each.
BLOCK = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d+)\.(.+)")
# What such a layer has beside a layer of the model, and the tensor of gguf.MODEL_TENSOR that it is.
NEXTN = {
    "eh_proj": "NEXTN_EH_PROJ",
    "enorm": "NEXTN_ENORM",
    "hnorm": "NEXTN_HNORM",
    "embed_tokens": "NEXTN_EMBED_TOKENS",
    "shared_head.norm": "NEXTN_SHARED_HEAD_NORM",
    "shared_head.head": "NEXTN_SHARED_HEAD_HEAD",
}
# The norm before the experts of a layer that was two.
FOLDED_NORM = "second_norm"
_OTHER_NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}


def gguf_tensors(
    tensors: Sequence[LogicalTensor], settings: Settings, factors: Factors
) -> tuple[tuple[LogicalTensor, ...], dict[str, str]]:
    """Return the tensors of the file, and those of the checkpoint that it leaves out, with reasons.

    factors: tensors that follow from the configuration, by their names in the file; they come first
    tensors: those of the checkpoint, whose order is kept, so that its files are read one after another

    Raises ExportError for a tensor that llama.cpp does not know, or one that is not there.
    """
    kept, left_out = _of_text_model(tensors, settings)
    names = gguf_package().get_tensor_name_map(
        gguf_package().MODEL_ARCH[settings.architecture.name], settings.number("block_count")
    )
    held: dict[str, LogicalTensor] = {
        name: ConstantTensor(name=name, shape=values.shape, values=values)
        for name, values in (factors | constants(settings)).items()
    }
    for known, tensor in cut(with_experts_stacked([*with_shards_joined(kept)], settings), settings):
        tensor_type, name, own = tensor_in_file(known, settings, names)
        biases = settings.architecture.biases | NAMED_BIASES
        if not tensor_type or (not own and name.endswith(".bias") and tensor_type not in biases):
            raise ExportError(
                f"tensor {tensor.name!r}: llama.cpp's {settings.architecture.name.lower()} models have no such "
                "tensor; if the model does not use it, leave it out (`leave_out`)"
            )
        held[name] = _view(known, tensor, tensor_type, name, settings)
    inputs, rows = held.get("per_layer_token_embd.weight"), settings.get("vocab_size")
    if inputs is not None and isinstance(rows, int) and inputs.shape[0] < rows:  # those of images and sound have none
        held[inputs.name] = PaddedTensor.of(inputs.name, inputs, shape=(rows, *inputs.shape[1:]))
    if settings.architecture.own_head and "token_embd.weight" in held and "output.weight" not in held:
        held["output.weight"] = RenamedTensor.of("output.weight", held["token_embd.weight"])
    _check_complete(held, settings)
    return tuple(held.values()), left_out


def constants(settings: Settings) -> Factors:
    """Return the values of the tensors that the model has no weights for, by their names in the file."""
    layers, stated = range(settings.number("block_count")), settings.architecture.constants
    return {
        f"blk.{layer}.{name}": np.full(settings.number("head_dim"), settings.factor(by), dtype=np.float32)
        for layer, (name, by) in itertools.product(layers, stated.items())
    }


def _of_text_model(tensors: Sequence[LogicalTensor], settings: Settings) -> tuple[list[NamedTensor], dict[str, str]]:
    """Return the tensors of the text model, and the reasons why others are left out."""
    wrapped = any(tensor.name.startswith(tuple(TEXT_PREFIXES)) for tensor in tensors)
    tied = settings.get("tie_word_embeddings") is True
    kept, left_out = [], {}
    layers, folded = settings.number("num_hidden_layers"), settings.architecture.drafts or {}
    named = [_text_name(tensor.name, settings.architecture.prefix) for tensor in tensors]
    are_drafts = [predicts_further(name, layers) for name, _ in named]
    names_behind = [tensor.name for tensor, drafts in zip(tensors, are_drafts, strict=True) if drafts]
    further = f"after the {layers} layers that config.json states"
    if counts_drafts(names_behind, settings.values):
        further = "predicts further tokens, which is not needed to run the model"
    unused = unused_parts([tensor.name for tensor in tensors], settings.values)
    for tensor, (name, inner), drafts in zip(tensors, named, are_drafts, strict=True):
        behind = name_behind(name, layers, folded) if drafts and settings.draft_layers else None
        key = next((key for of, key in settings.architecture.follows.items() if re.fullmatch(of, name)), "")
        if key:
            _check_numbers(tensor, settings.get(key) or ())
        if key or name.endswith(COMPUTED):
            left_out[tensor.name] = "follows from the configuration"
        elif is_leftover(tensor.name, tensor.dtype, tensor.shape):
            left_out[tensor.name] = "from training or another runtime; the model does not use it"
        elif reason := next((why for of, why in settings.architecture.unused.items() if re.fullmatch(of, name)), ""):
            left_out[tensor.name] = reason
        elif name == HEAD and tied:
            left_out[tensor.name] = "the same as the embeddings"
        elif tensor.name in unused:
            left_out[tensor.name] = f"transformers does not use it, because of {unused[tensor.name]} in config.json"
        elif drafts and behind is None:
            left_out[tensor.name] = further
        elif not drafts and ((wrapped and not inner and name != HEAD) or tower_of(tensor.name)):
            left_out[tensor.name] = "not part of the text model"
        else:
            kept.append((known_name(behind or name, settings.architecture.modules), tensor))
    return kept, left_out


def _check_numbers(tensor: LogicalTensor, expected: Sequence[int]) -> None:
    """Raise ExportError unless a tensor has the whole numbers that follow from the configuration."""
    raw = np.empty(8 * len(expected), dtype=np.uint8)
    fitting = tensor.dtype == "I64" and tensor.shape == (len(expected),)
    if fitting:
        tensor.read(0, len(expected), "I64", raw)
    if not fitting or raw.view(np.int64).tolist() != [*expected]:
        raise ExportError(f"tensor {tensor.name!r} differs from what config.json implies")


def _text_name(name: str, own_prefix: str = "") -> tuple[str, bool]:
    """Return the name that a tensor has in the text model alone, and whether it lies in one inside another model.

    own_prefix: an expression for what comes off, too
    """
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    name = TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
    name = re.sub(f"^{own_prefix}", "", name) if own_prefix else name
    old = next((old for old in OLD_NORMS if name.endswith(old)), None)
    return name if old is None else name.removesuffix(old) + OLD_NORMS[old], bool(prefix)


def with_draft_layers(settings: Settings, tensors: Sequence[LogicalTensor]) -> Settings:
    """Return the settings of a model with its layers that predict further tokens, if llama.cpp has room for them."""
    layers = settings.number("num_hidden_layers")
    names = (_text_name(tensor.name)[0] for tensor in tensors)
    room, listed = settings.architecture.drafts, settings.get("draft_layer_types")
    drafts = 0 if room is None else whole_draft_layers(names, layers, room)
    if listed is not None and listed != [SLIDING] * drafts:  # llama.cpp has no others
        drafts = 0
    return replace(settings, draft_layers=drafts, values={**settings.values, "block_count": layers + drafts})


def known_name(name: str, modules: Mapping[str, str]) -> str:
    """Return a name that the gguf package knows. modules: see Architecture"""
    match = LAYER.fullmatch(name)
    begin, inner = (f"{match[1]}{match[2]}.", match[3]) if match else ("", name)
    module, dot, last = inner.rpartition(".")
    whole, _, end = name.rpartition(".")
    for before, of, rest in ((begin, inner, ""), (begin, module, dot + last), ("", whole, f".{end}")):
        if (known := in_words_of(modules, of)) is not None:
            return f"{before}{known}{rest}"
    return name


def tensor_in_file(name: str, settings: Settings, names: Any) -> tuple[str, str, bool]:
    """Return a tensor's type and its name in the file, "" if there is none, and whether the gguf package lacks it.

    name: one that `known_name` has returned
    names: the TensorNameMap of the architecture
    """
    aliases = dict.fromkeys((name, re.sub(r"^backbone\.", "model.", name)))
    others = filter(None, (names.get_type_and_name(alias, try_suffixes=SUFFIXES) for alias in aliases))
    own = nextn_tensor(name) or _own_tensor(name, settings.architecture.tensors)
    tensor_type, named = own or next(((of.name, named) for of, named in others), ("", ""))
    return tensor_type, named, own is not None


def _own_tensor(name: str, tensors: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a type and the name in the file of a tensor that the gguf package lacks. tensors: see Architecture"""
    match = LAYER.fullmatch(name)
    inner, block = (match[3], f"blk.{match[2]}.") if match else (name, "")
    own = in_words_of(tensors, inner)
    return (re.sub(r"\.(weight|bias)$", "", own).upper(), block + own) if own else None


def _view(known: str, reads: LogicalTensor, tensor_type: str, name: str, settings: Settings) -> LogicalTensor:
    """Return a tensor as the file holds it.

    known: the name that the gguf package knows it by
    tensor_type: its name in gguf.MODEL_TENSOR
    name: its name in the file
    """
    architecture = settings.architecture
    if architecture.first_position and tensor_type == "POS_EMBD":
        reads = rows_from(unused_positions(settings), reads)
    if reads.dtype == "I64" and tensor_type.endswith(NUMBERS):
        return NumbersTensor.of(name, reads, dtype=INTEGERS, plain_dtype=INTEGERS)
    if reads.plain_dtype not in FLOAT_DTYPES:
        raise ExportError(
            f"tensor {reads.name!r}: expected floats, which llama.cpp computes with here, found {reads.plain_dtype}; "
            "give the original checkpoint"
        )
    _check_shape(reads, tensor_type, settings)
    if (shape := _shape_in_file(reads, tensor_type, name, settings)) != reads.shape:
        reads = RenamedTensor.of(name, reads, shape=shape)
    if (tiled := of_layer(known, architecture.tiled)) is not None:
        reads = with_tiled_heads(name, reads, tiled, settings)
    if (scaled := of_layer(known, architecture.scaled)) is not None:
        sizes = [settings.number(size) for size in scaled.blocks] or [math.prod(reads.shape[:-1])]
        factors = np.repeat(np.array([settings.factor(by) for by in scaled.by], dtype=np.float32), sizes)
        if len(factors) != math.prod(reads.shape[:-1]):
            raise ExportError(f"tensor {reads.name!r}: expected {len(factors)} rows, as config.json has it")
        return rows_scaled(name, reads, factors)
    if tensor_type == "SSM_A":
        return decay_rates(name, reads)
    if architecture.interleaved and tensor_type in ("ATTN_Q", "ATTN_K"):
        return InterleavedTensor.of(name, reads, head_rows=settings.number("head_dim"))
    is_norm = "NORM" in tensor_type and tensor_type not in architecture.plain_norms
    if Trait.ZERO_CENTRED_NORMS in settings.model.traits and is_norm:
        # llama.cpp adds nothing to the weights. In float32, as exact as the model's own sum.
        return one_added(name, reads)
    if isinstance(reads, MovedTensor | RenamedTensor):
        return replace(reads, name=name)
    return RenamedTensor.of(name, reads)


def _shape_in_file(tensor: LogicalTensor, tensor_type: str, name: str, settings: Settings) -> tuple[int, ...]:
    """The dimensions of a tensor in the file, which has no others of size 1 than llama.cpp computes with."""
    shape = settings.architecture.reshaped.get(tensor_type)
    if shape is not None and not name.endswith(".bias"):
        return tuple(settings.number(size) for size in shape)
    if "CONV" in tensor_type and len(tensor.shape) == 3:  # [channels, 1, kernel]
        return tensor.shape[0], tensor.shape[-1]
    if tensor_type == "FFN_GATE_INP_SHEXP" and tensor.shape[:-1] == (1,):
        return tensor.shape[-1:]  # a vector
    return tensor.shape


def _check_complete(held: dict[str, Any], settings: Settings) -> None:
    """Raise ExportError unless blocks of a kind have the same tensors, and the model has embeddings and a head."""
    kinds = layer_kinds(settings)
    blocks = [match for match in map(BLOCK.fullmatch, held) if match]
    tensors = {(match[1], kinds[int(match[2])], match[3]) for match in blocks}
    needed = {"token_embd.weight", *settings.architecture.needed}
    for stack, of, rest in tensors:
        if not re.fullmatch(settings.architecture.uneven, rest):
            needed |= {f"{stack}.{layer}.{rest}" for layer, kind in enumerate(kinds) if kind == of}
    if settings.get("tie_word_embeddings") is False and not settings.embeds:  # a key that is absent leaves it open
        needed.add("output.weight")
    missing = sorted(needed - held.keys())
    if missing or not blocks:
        raise ExportError(
            f"the checkpoint lacks tensors that llama.cpp needs: {', '.join(missing[:3]) or 'those of all layers'} "
            "(named as in GGUF)"
        )


def _check_shape(tensor: LogicalTensor, tensor_type: str, settings: Settings) -> None:
    """Raise ExportError if a tensor has other rows or columns than the configuration says; llama.cpp does not load it.

    Experts are checked where they are stacked.
    """
    rows, columns = _expected_shape(tensor_type, settings)
    first, *others = tensor.shape or (1,)
    stored = (first, others[-1] if others else columns)
    if (rows or stored[0], columns or stored[1]) != stored:
        wanted = " and ".join(f"{size} {name}" for size, name in ((rows, "rows"), (columns, "columns")) if size)
        raise ExportError(
            f"tensor {tensor.name!r}: config.json asks for {wanted}, as does llama.cpp; found shape {tensor.shape}"
        )


def _expected_shape(tensor_type: str, settings: Settings) -> tuple[int | None, int | None]:
    """The rows and the columns of a tensor_type of tensor; None where nothing is expected."""
    shapes = {**SHAPES, **settings.architecture.shapes}
    rows, columns = shapes.get(re.sub(r"(ENC|DEC)_(CROSS_)?", "", tensor_type), (None, None))
    return settings.number(rows) if rows else None, settings.number(columns) if columns else None


_OTHER_NAMES |= {"norm": "shared_head.norm"}


def name_behind(name: str, layers: int, folded: Mapping[str, str]) -> str | None:
    """Return the name of such a tensor in a layer behind the last one; None if that is not known.

    folded: see Architecture
    """
    if LAYER.fullmatch(name):
        return name
    match = BELOW_MTP.fullmatch(name)
    if match is None:
        return None
    if folded:
        rest = in_words_of(folded, name)
        return rest and f"backbone.layers.{layers}.{rest}"
    if match[1]:
        return f"model.layers.{layers + int(match[1])}.{match[2]}"
    known = _OTHER_NAMES.get(match[3].removesuffix(".weight"))
    return known and f"model.layers.{layers}.{known}.weight"


def whole_draft_layers(names: Iterable[str], layers: int, folded: Mapping[str, str]) -> int:
    """Return how many whole layers there are behind the last one. names: those of the text model; folded: as above"""
    needed = {"eh_proj.weight", "enorm.weight", "hnorm.weight"}
    of_layer: dict[int, set[str]] = {}
    for name in names:
        if predicts_further(name, layers) and (match := LAYER.fullmatch(name_behind(name, layers, folded) or "")):
            of_layer.setdefault(int(match[2]), set()).add(match[3])
    count = len(of_layer)
    whole = all(needed <= of_layer.get(layers + index, set()) for index in range(count))
    return count if whole else 0


def nextn_tensor(name: str) -> tuple[str, str] | None:
    """Return what gguf.MODEL_TENSOR calls a tensor that only such layers have, and its name in the file."""
    match = LAYER.fullmatch(name)
    module = match[3].removesuffix(".weight") if match else ""
    if match and module == FOLDED_NORM:
        return "ATTN_POST_NORM", f"blk.{match[2]}.post_attention_norm.weight"
    known = NEXTN.get(module)
    return (known, f"blk.{match[2]}.nextn.{known.removeprefix('NEXTN_').lower()}.weight") if match and known else None
