"""The tensors of a GGUF file: their names, and how each is read from the checkpoint, in ranges.

Names are those of the gguf package. Experts are stacked, as llama.cpp holds them, from either layout: a matrix for each
expert, or all in one tensor, with the rows of gate and up one after the other. Others differ from those of the
checkpoint, too: rows are reordered, gains have an offset, and some are constants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.settings import Factors, Settings
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.models.conventions import LAYER, OF_EXPERT, STACKED_EXPERTS, TEXT_PREFIXES
from pqweights.checkpoint.models.traits import Trait
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment
from pqweights.common.dtypes import convert, item_bytes
from pqweights.errors import ExportError
from pqweights.kernels.workers import scratch

SUFFIXES = (".weight", ".bias")
# Tensors that old checkpoints hold, and that follow from the configuration.
COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attn.bias", ".masked_bias")
HEAD = "lm_head.weight"


class _Named(NamedTuple):
    """A tensor with the name that the gguf package knows it by. reads: the tensor, still under its own name."""

    name: str
    reads: LogicalTensor


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
        gguf_package().MODEL_ARCH[settings.architecture.name], settings.number("num_hidden_layers")
    )
    held: dict[str, LogicalTensor] = {
        name: ConstantTensor(name=name, shape=values.shape, values=values) for name, values in factors.items()
    }
    for tensor in _with_experts_stacked(kept, settings):
        tensor_type, name = names.get_type_and_name(tensor.name, try_suffixes=SUFFIXES) or (None, "")
        if tensor_type is None or (name.endswith(".bias") and tensor_type.name not in settings.architecture.biases):
            raise ExportError(
                f"tensor {tensor.reads.name!r}: llama.cpp's {settings.architecture.name.lower()} models have no such "
                "tensor"
            )
        held[name] = _view(tensor.reads, tensor_type.name, name, settings)
    if settings.architecture.own_head and "token_embd.weight" in held and "output.weight" not in held:
        held["output.weight"] = RenamedTensor.of("output.weight", held["token_embd.weight"])
    _check_complete(held, settings)
    return tuple(held.values()), left_out


def _of_text_model(tensors: Sequence[LogicalTensor], settings: Settings) -> tuple[list[_Named], dict[str, str]]:
    """Return the tensors of the text model, and the reasons why others are left out."""
    wrapped = isinstance(settings.values.get("text_config"), dict)
    tied = settings.get("tie_word_embeddings") is True
    kept, left_out = [], {}
    for tensor in tensors:
        prefix = next((prefix for prefix in TEXT_PREFIXES if tensor.name.startswith(prefix)), "")
        name = TEXT_PREFIXES.get(prefix, "") + tensor.name.removeprefix(prefix)
        if name.endswith(COMPUTED):
            left_out[tensor.name] = "follows from the configuration"
        elif name == HEAD and tied:
            left_out[tensor.name] = "the same as the embeddings"
        elif name.startswith(("mtp.", "model.mtp.")):
            left_out[tensor.name] = "predicts further tokens, which the model does without"
        elif wrapped and not prefix and name != HEAD:
            left_out[tensor.name] = "not part of the text model"
        else:
            kept.append(_Named(_known_name(name, settings.architecture.modules), tensor))
    return kept, left_out


def _known_name(name: str, modules: Mapping[str, str]) -> str:
    """Return a name that the gguf package knows. modules: see Architecture"""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    module, dot, last = match[3].rpartition(".")
    matches = ((re.fullmatch(expression, module), known) for expression, known in modules.items())
    known = next((found.expand(known) for found, known in matches if found is not None), module)
    return f"{match[1]}{match[2]}.{known}{dot}{last}"


def _with_experts_stacked(tensors: Sequence[_Named], settings: Settings) -> Iterator[_Named]:
    """Yield the tensors, with one for all experts in the place of the first expert's."""
    cache = MatrixCache()
    experts: dict[str, dict[int, LogicalTensor]] = {}
    for tensor in tensors:
        if match := OF_EXPERT.fullmatch(tensor.name):
            experts.setdefault(f"{match['layer']}.{match['matrix']}", {})[int(match["expert"])] = tensor.reads
    for tensor in tensors:
        if match := OF_EXPERT.fullmatch(tensor.name):
            name = f"{match['layer']}.{match['matrix']}"
            if name in experts:
                yield _Named(name, _stacked(name, experts.pop(name), settings, cache))
        elif match := STACKED_EXPERTS.fullmatch(tensor.name):
            yield from _parts_of_fused(tensor, match["layer"], match["matrix"], settings=settings, cache=cache)
        else:
            yield tensor


def _stacked(name: str, experts: dict[int, LogicalTensor], settings: Settings, cache: MatrixCache) -> MovedTensor:
    """The matrices of all experts as one tensor [experts, rows, columns]."""
    count = settings.number("num_experts")
    first = next(iter(experts.values()))
    if sorted(experts) != list(range(count)) or any(tensor.shape != first.shape for tensor in experts.values()):
        raise ExportError(
            f"tensor {first.name!r}: expected the same matrix of {count} experts, found {len(experts)} or of other "
            "shapes"
        )
    rows, columns = first.shape
    segments = tuple(Segment(tensor=experts[number], first=0, step=1, count=rows) for number in range(count))
    return _moved(name, (count, rows, columns), segments, cache)


def _parts_of_fused(
    tensor: _Named, layer: str, matrix: str, *, settings: Settings, cache: MatrixCache
) -> Iterator[_Named]:
    """Yield what llama.cpp holds of a tensor of all experts: [experts, rows, columns], with gate before up."""
    count, inner = settings.number("num_experts"), settings.number("hidden_size")
    width = settings.get("moe_intermediate_size") or settings.number("intermediate_size")
    expected = (count, 2 * width, inner) if matrix == "gate_up_proj" else (count, inner, width)
    if tensor.reads.shape != expected:
        raise ExportError(f"tensor {tensor.reads.name!r}: expected shape {expected}, found {tensor.reads.shape}")
    if matrix == "down_proj":
        yield _Named(f"{layer}.down_proj.weight", tensor.reads)
        return
    for part, name in enumerate(("gate_proj", "up_proj")):
        segments = tuple(
            Segment(tensor=tensor.reads, first=(2 * expert + part) * width, step=1, count=width)
            for expert in range(count)
        )
        name = f"{layer}.{name}.weight"
        yield _Named(name, _moved(name, (count, width, inner), segments, cache))


def _moved(name: str, shape: tuple[int, ...], segments: tuple[Segment, ...], cache: MatrixCache) -> MovedTensor:
    return MovedTensor(
        name=name,
        shape=shape,
        dtype=segments[0].tensor.plain_dtype,
        segments=segments,
        columns=range(shape[-1]),
        transposed=False,
        cache=cache,
    )


def _view(tensor: LogicalTensor, tensor_type: str, name: str, settings: Settings) -> LogicalTensor:
    """The tensor as the file holds it. tensor_type: its name in gguf.MODEL_TENSOR."""
    architecture = settings.architecture
    _check_shape(tensor, tensor_type, settings)
    if architecture.interleaved and tensor_type in ("ATTN_Q", "ATTN_K"):
        return InterleavedTensor.of(name, tensor, head_rows=settings.number("head_dim"))
    if Trait.ZERO_CENTRED_NORMS in settings.model.traits and tensor_type.endswith("_NORM"):
        # llama.cpp adds nothing to the weights. In float32, as exact as the model's own sum.
        return OffsetTensor.of(name, tensor, offset=1.0, dtype="F32", plain_dtype="F32")
    if tensor_type == "FFN_GATE_INP_SHEXP" and tensor.shape[:-1] == (1,):
        return RenamedTensor.of(name, tensor, shape=tensor.shape[-1:])  # a vector
    if isinstance(tensor, MovedTensor):
        return replace(tensor, name=name)
    return RenamedTensor.of(name, tensor)


def _check_complete(held: dict[str, Any], settings: Settings) -> None:
    """Raise ExportError unless all blocks have the same tensors, and the model has its embeddings and its head."""
    blocks: dict[int, set[str]] = {layer: set() for layer in range(settings.number("num_hidden_layers"))}
    for name in held:
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            blocks[int(layer)].add(rest)
    every = set().union(*blocks.values())
    needed = {f"blk.{layer}.{rest}" for layer in blocks for rest in every} | {"token_embd.weight", "output_norm.weight"}
    if settings.get("tie_word_embeddings") is False:  # a key that is absent leaves it open
        needed.add("output.weight")
    missing = sorted(needed - held.keys())
    if missing or not every:
        raise ExportError(
            f"the checkpoint lacks tensors that llama.cpp needs: {', '.join(missing[:3]) or 'those of all layers'} "
            "(named as in GGUF)"
        )


def _check_shape(tensor: LogicalTensor, tensor_type: str, settings: Settings) -> None:
    """Raise ExportError if a tensor has other rows or columns than the configuration says; llama.cpp does not load it.

    Experts are checked where they are stacked.
    """
    rows, columns = _expected_shape(tensor_type, settings)
    stored = (tensor.shape[0], tensor.shape[-1] if len(tensor.shape) > 1 else columns)
    if (rows or stored[0], columns or stored[1]) != stored:
        asked = " and ".join(f"{size} {name}" for size, name in ((rows, "rows"), (columns, "columns")) if size)
        raise ExportError(
            f"tensor {tensor.name!r}: config.json asks for {asked}, as does llama.cpp; found shape {tensor.shape}"
        )


def _expected_shape(tensor_type: str, settings: Settings) -> tuple[int | None, int | None]:
    """The rows and the columns of a tensor_type of tensor; None where nothing is expected."""
    size, hidden = settings.number("head_dim"), settings.number("hidden_size")
    queries = settings.number("num_attention_heads") * size
    keys = settings.number("num_key_value_heads") * size
    inner = settings.number("intermediate_size")
    shapes: dict[str, tuple[int | None, int | None]] = {
        "ATTN_Q": (queries, hidden),
        "ATTN_K": (keys, hidden),
        "ATTN_V": (keys, hidden),
        "ATTN_QKV": (queries + 2 * keys, hidden),
        "ATTN_OUT": (hidden, queries),
        "FFN_GATE": (inner, hidden),
        "FFN_UP": (inner * (2 if settings.architecture.joined_mlp else 1), hidden),
        "FFN_DOWN": (hidden, inner),
        "ATTN_NORM": (hidden, None),
        "FFN_NORM": (hidden, None),
        "OUTPUT_NORM": (hidden, None),
        "TOKEN_EMBD": (None, hidden),
        "OUTPUT": (None, hidden),
    }
    return shapes.get(tensor_type, (None, None))


@dataclass(frozen=True, eq=False, kw_only=True)
class RenamedTensor:
    """A tensor of the checkpoint under another name; its fields are those of LogicalTensor and View."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    plain_dtype: str
    source: LogicalTensor

    transposed = False

    @classmethod
    def of(cls, name: str, source: LogicalTensor, **fields: Any) -> Self:
        """Return a tensor under another name. fields: those that are not the source's"""
        same = {"shape": source.shape, "dtype": source.dtype, "plain_dtype": source.plain_dtype}
        return cls(name=name, source=source, **same | fields)

    @property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """The source alone."""
        return (self.source,)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the source."""
        return self.source.parts

    def runs_of_matrix(self, number: int) -> list[Segment] | None:
        """Return the rows of the source that one of its matrices is made of, in whatever order; see View."""
        height = self.shape[-2]
        return [Segment(tensor=self.source, first=number * height, step=1, count=height)]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source."""
        self.source.read(start, count, dtype, out)


@dataclass(frozen=True, eq=False, kw_only=True)
class InterleavedTensor(RenamedTensor):
    """A matrix or a bias whose rows are those of heads, with the rows of the two halves of each head alternating.

    transformers rotates channel i of a head with channel i + size / 2; llama.cpp, for some models, 2 i with 2 i + 1.
    Rows of both halves are read together, so that each block of an encoded weight is decoded about once.

    head_rows: the rows of a head
    """

    head_rows: int

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows that hold the elements."""
        width = self.shape[1] if len(self.shape) > 1 else 1
        size = item_bytes(dtype)
        # Rows are written in pairs, one of each half.
        pair = 2 * width
        first, last = start // pair, -(-(start + count) // pair)
        skip = start - first * pair
        whole = skip == 0 and count == (last - first) * pair
        raw = out[: count * size] if whole else np.empty((last - first) * pair * size, dtype=np.uint8)
        rows = raw.reshape(last - first, 2, width * size)
        done = 0
        while done < last - first:
            done += self._read_pairs(first + done, dtype, rows[done:])
        if not whole:
            out[: count * size] = raw[skip * size : (skip + count) * size]

    def _read_pairs(self, pair: int, dtype: str, into: npt.NDArray[np.uint8]) -> int:
        """Read whole heads, or a part of one, from a pair on, into [pairs, 2, bytes]; return how many pairs."""
        half = self.head_rows // 2
        head, within = divmod(pair, half)
        heads = 0 if within else len(into) // half
        width = into.shape[-1] // item_bytes(dtype)
        if heads:
            raw = scratch("heads", heads * self.head_rows * into.shape[-1])
            self.source.read(head * self.head_rows * width, heads * self.head_rows * width, dtype, raw)
            moved = raw.reshape(heads, 2, half, -1).swapaxes(1, 2)
            into[: heads * half].reshape(heads, half, 2, -1)[:] = moved
            return heads * half
        pairs = min(half - within, len(into))
        raw = scratch("heads", pairs * into.shape[-1])
        for side in range(2):
            row = head * self.head_rows + side * half + within
            self.source.read(row * width, pairs * width, dtype, raw)
            into[:pairs, side] = raw.reshape(pairs, -1)
        return pairs


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetTensor(RenamedTensor):
    """A tensor with a number added to all its values, in float32."""

    offset: float

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source, and add the number."""
        raw = np.empty(count * 4, dtype=np.uint8)
        self.source.read(start, count, "F32", raw)
        values = raw.view(np.float32)
        values += np.float32(self.offset)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConstantTensor:
    """A small tensor that is computed from the configuration: no part of it is stored in the checkpoint.

    values: [...] f32
    """

    name: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.float32]

    dtype = plain_dtype = "F32"
    sources: tuple[LogicalTensor, ...] = ()
    parts: tuple[StoredTensor, ...] = ()
    transposed = False

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: no weight is a part of it."""
        return

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Copy elements."""
        raw = self.values.reshape(-1)[start : start + count].copy().view(np.uint8)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)
