"""The tensors of a GGUF file: their names, and how each is read from the checkpoint, in ranges.

Names are those of the gguf package. Experts are stacked, as llama.cpp holds them, from any layout: a matrix for each
expert, or all in one tensor, transposed or not, with gate and up one after the other or alternating. Others differ from
those of the checkpoint, too: they are cut, rows are reordered, gains have an offset, and some are constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.settings import Factors, Settings, layer_kinds
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.models.conventions import LAYER, MTP, OF_EXPERT, STACKED_EXPERTS, TEXT_PREFIXES
from pqweights.checkpoint.models.llama_cpp import SHAPES, Architecture, Cut, Shape, Tiled
from pqweights.checkpoint.models.names import tower_of
from pqweights.checkpoint.models.traits import Trait
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment, View, sources_of
from pqweights.common.dtypes import convert, item_bytes
from pqweights.errors import ExportError
from pqweights.kernels.workers import scratch

SUFFIXES = (".weight", ".bias", ".scale")
# Tensors that are called a bias, and that are always there.
NAMED_BIASES = frozenset({"FFN_EXP_PROBS_B", "SSM_DT"})
# Norms that multiply by their weight alone, also where Trait.ZERO_CENTRED_NORMS holds.
NEVER_CENTRED = frozenset({"SSM_NORM"})
# Tensors that old checkpoints hold, and that follow from the configuration.
COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attn.bias", ".masked_bias")
HEAD = "lm_head.weight"
T = TypeVar("T")


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
    for tensor in _cut(_with_experts_stacked(kept, settings), settings):
        aliases = dict.fromkeys((tensor.name, re.sub(r"^backbone\.", "model.", tensor.name)))
        found = (names.get_type_and_name(alias, try_suffixes=SUFFIXES) for alias in aliases)
        tensor_type, name = next(filter(None, found), (None, ""))
        biases = settings.architecture.biases | NAMED_BIASES
        if tensor_type is None or (name.endswith(".bias") and tensor_type.name not in biases):
            raise ExportError(
                f"tensor {tensor.reads.name!r}: llama.cpp's {settings.architecture.name.lower()} models have no such "
                "tensor"
            )
        held[name] = _view(tensor, tensor_type.name, name, settings)
    if settings.architecture.own_head and "token_embd.weight" in held and "output.weight" not in held:
        held["output.weight"] = RenamedTensor.of("output.weight", held["token_embd.weight"])
    _check_complete(held, settings)
    return tuple(held.values()), left_out


def _of_text_model(tensors: Sequence[LogicalTensor], settings: Settings) -> tuple[list[_Named], dict[str, str]]:
    """Return the tensors of the text model, and the reasons why others are left out."""
    wrapped = any(tensor.name.startswith(tuple(TEXT_PREFIXES)) for tensor in tensors)
    tied = settings.get("tie_word_embeddings") is True
    kept, left_out = [], {}
    for tensor in tensors:
        prefix = next((prefix for prefix in TEXT_PREFIXES if tensor.name.startswith(prefix)), "")
        name = TEXT_PREFIXES.get(prefix, "") + tensor.name.removeprefix(prefix)
        if name.endswith(COMPUTED):
            left_out[tensor.name] = "follows from the configuration"
        elif name == HEAD and tied:
            left_out[tensor.name] = "the same as the embeddings"
        elif _predicts_further(name, settings):
            left_out[tensor.name] = "predicts further tokens, which the model does without"
        elif (wrapped and not prefix and name != HEAD) or tower_of(tensor.name):
            left_out[tensor.name] = "not part of the text model"
        else:
            kept.append(_Named(_known_name(name, settings.architecture.modules), tensor))
    return kept, left_out


def _predicts_further(name: str, settings: Settings) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, which may be numbered as one behind the last."""
    layer = LAYER.fullmatch(name)
    behind = layer is not None and int(layer[2]) >= settings.number("num_hidden_layers")
    return behind or any(MTP.fullmatch(component) for component in name.split("."))


def _known_name(name: str, modules: Mapping[str, str]) -> str:
    """Return a name that the gguf package knows. modules: see Architecture"""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    module, dot, last = match[3].rpartition(".")
    for of, rest in ((match[3], ""), (module, dot + last)):
        matches = ((re.fullmatch(expression, of), known) for expression, known in modules.items())
        for found, known in matches:
            if found is not None:
                return f"{match[1]}{match[2]}.{found.expand(known)}{rest}"
    return name


def _of_layer(name: str, known: Mapping[str, T]) -> T | None:
    """Return what is known of a module or a parameter, by the first expression that matches its name in the layer."""
    match = LAYER.fullmatch(name)
    module = (match[3] if match else name).removesuffix(".weight")
    return next((value for expression, value in known.items() if re.fullmatch(expression, module)), None)


def _cut(tensors: Iterator[_Named], settings: Settings) -> Iterator[_Named]:
    """Yield the tensors, with several in the place of each one that llama.cpp holds in parts."""
    cache = MatrixCache()
    for tensor in tensors:
        match, cut = LAYER.fullmatch(tensor.name), _of_layer(tensor.name, settings.architecture.cuts)
        if match is None or cut is None:
            yield tensor
            continue
        for part in cut.parts:
            name = f"{match[1]}{match[2]}.{part}.weight"
            yield _Named(name, replace(_part(tensor.reads, cut, part, settings, cache), name=name))


def _part(source: LogicalTensor, cut: Cut, part: str, settings: Settings, cache: MatrixCache) -> MovedTensor:
    """The rows of a part as one tensor. See Cut"""
    blocks, turned = cut.parts[part], part in cut.turned
    sizes = [settings.number(size) for size in cut.blocks]
    times, inner = settings.number(cut.times), source.shape[-1]
    if math.prod(source.shape[:-1]) != times * sum(sizes):
        raise ExportError(
            f"tensor {source.name!r}: expected {times * sum(sizes)} rows, as config.json has it, found {source.shape}"
        )
    segments = tuple(
        Segment(tensor=source, first=number * sum(sizes) + sum(sizes[:block]), step=1, count=sizes[block])
        for block in blocks
        for number in range(times)
    )
    rows = sum(sizes[block] for block in blocks)
    matrix = (inner, rows) if turned else (rows, inner)
    shape = (times, *matrix) if cut.stacked else (times * rows, inner)
    return _moved(part, shape, segments, cache, columns=range(inner), transposed=turned)


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
            yield from _parts_of_stack(tensor.reads, match, settings, cache)
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


def _parts_of_stack(
    tensor: LogicalTensor, match: re.Match[str], settings: Settings, cache: MatrixCache
) -> Iterator[_Named]:
    """Yield what llama.cpp holds of a tensor of all experts: [experts, rows, columns], or biases [experts, rows]."""
    count, hidden = settings.number("num_experts"), settings.number("hidden_size")
    width = settings.number("moe_intermediate_size" if settings.get("moe_intermediate_size") else "intermediate_size")
    down, is_bias = match["matrix"] == "down_proj", match["bias"] is not None
    outputs, inner = (hidden, width) if down else (2 * width, hidden)
    turned = Trait.TURNED_EXPERTS in settings.model.traits and not is_bias
    expected = (count, outputs) if is_bias else (count, inner, outputs) if turned else (count, outputs, inner)
    if tensor.shape != expected:
        raise ExportError(f"tensor {tensor.name!r}: expected shape {expected}, found {tensor.shape}")
    for part, rows in _rows_of_parts(down, outputs, settings.architecture):
        name = f"{match['layer']}.{part}.{'bias' if is_bias else 'weight'}"
        shape = (count, len(rows)) if is_bias else (count, len(rows), inner)
        starts = range(0, count * outputs, outputs)
        segments = [Segment(tensor=tensor, first=s + rows.start, step=rows.step, count=len(rows)) for s in starts]
        columns = range(inner)
        if is_bias or turned:  # outputs lie side by side
            segments, columns = [Segment(tensor=tensor, first=0, step=1, count=math.prod(expected[:-1]))], rows
        yield _Named(name, _moved(name, shape, segments, cache, columns=columns, transposed=turned))


def _rows_of_parts(down: bool, outputs: int, architecture: Architecture) -> list[tuple[str, range]]:
    """Return the matrices in one of a stack, each with its rows."""
    if down:
        return [("down_proj", range(outputs))]
    if architecture.joined_experts:
        return [("gate_up_proj", range(outputs))]
    if architecture.alternating:
        return [("gate_proj", range(0, outputs, 2)), ("up_proj", range(1, outputs, 2))]
    return [("gate_proj", range(outputs // 2)), ("up_proj", range(outputs // 2, outputs))]


def _moved(
    name: str,
    shape: tuple[int, ...],
    segments: Sequence[Segment],
    cache: MatrixCache,
    *,
    columns: range | None = None,
    transposed: bool = False,
) -> MovedTensor:
    return MovedTensor(
        name=name,
        shape=shape,
        dtype=segments[0].tensor.plain_dtype,
        segments=tuple(segments),
        columns=range(shape[-1]) if columns is None else columns,
        transposed=transposed,
        cache=cache,
    )


def _view(tensor: _Named, tensor_type: str, name: str, settings: Settings) -> LogicalTensor:
    """The tensor as the file holds it. tensor_type: its name in gguf.MODEL_TENSOR."""
    architecture, reads = settings.architecture, tensor.reads
    _check_shape(reads, tensor_type, settings)
    if (shape := _shape_in_file(reads, tensor_type, name, settings)) != reads.shape:
        reads = RenamedTensor.of(name, reads, shape=shape)
    if (tiled := _of_layer(tensor.name, architecture.tiled)) is not None:
        reads = _tiled(name, reads, tiled, settings)
    if (scaled := _of_layer(tensor.name, architecture.scaled)) is not None:
        sizes = [settings.number(size) for size in scaled.blocks] or [math.prod(reads.shape[:-1])]
        factors = np.repeat(np.array([settings.product(by) for by in scaled.by], dtype=np.float32), sizes)
        if len(factors) != math.prod(reads.shape[:-1]):
            raise ExportError(f"tensor {reads.name!r}: expected {len(factors)} rows, as config.json has it")
        return ScaledTensor.of(name, reads, factors=factors)
    if tensor_type == "SSM_A":
        return DecayTensor.of(name, reads, dtype="F32", plain_dtype="F32")
    if architecture.interleaved and tensor_type in ("ATTN_Q", "ATTN_K"):
        return InterleavedTensor.of(name, reads, head_rows=settings.number("head_dim"))
    is_norm = tensor_type.endswith("_NORM") and tensor_type not in NEVER_CENTRED
    if Trait.ZERO_CENTRED_NORMS in settings.model.traits and is_norm:
        # llama.cpp adds nothing to the weights. In float32, as exact as the model's own sum.
        return OffsetTensor.of(name, reads, offset=1.0, dtype="F32", plain_dtype="F32")
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


def _tiled(name: str, tensor: LogicalTensor, tiled: Tiled, settings: Settings) -> LogicalTensor:
    """The tensor with the first value head of each group before the second ones."""
    groups, heads = settings.number("linear_num_key_heads"), settings.number("linear_num_value_heads")
    size = settings.number(tiled.size)
    before = settings.number(tiled.before) if tiled.before != "0" else 0
    places = before + np.arange(heads * size).reshape(groups, heads // groups, size).swapaxes(0, 1).reshape(-1, size)
    along = tensor.shape[-1] if tiled.columns or len(tensor.shape) == 1 else tensor.shape[0]
    if heads % groups or along != before + heads * size:
        raise ExportError(
            f"tensor {tensor.name!r}: expected {before + heads * size} channels, as config.json has it, found "
            f"{tensor.shape}"
        )
    if tiled.columns or len(tensor.shape) == 1:
        order = np.concatenate([np.arange(before), places.reshape(-1)])
        return ReorderedTensor.of(name, tensor, order=order)
    segments = [Segment(tensor=tensor, first=0, step=1, count=before)] if before else []
    segments += [Segment(tensor=tensor, first=int(head[0]), step=1, count=size) for head in places]
    return _moved(name, tensor.shape, segments, MatrixCache())


def _check_complete(held: dict[str, Any], settings: Settings) -> None:
    """Raise ExportError unless blocks of a kind have the same tensors, and the model has embeddings and a head."""
    kinds = layer_kinds(settings)
    blocks: dict[int, set[str]] = {layer: set() for layer in range(len(kinds))}
    for name in held:
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            blocks[int(layer)].add(rest)
    needed = {"token_embd.weight", settings.architecture.final_norm}
    for kind in set(kinds):
        alike = [layer for layer, other in enumerate(kinds) if other == kind]
        needed |= {f"blk.{layer}.{rest}" for layer in alike for rest in set().union(*(blocks[like] for like in alike))}
    if settings.get("tie_word_embeddings") is False:  # a key that is absent leaves it open
        needed.add("output.weight")
    missing = sorted(needed - held.keys())
    if missing or not any(blocks.values()):
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
        asked = " and ".join(f"{size} {name}" for size, name in ((rows, "rows"), (columns, "columns")) if size)
        raise ExportError(
            f"tensor {tensor.name!r}: config.json asks for {asked}, as does llama.cpp; found shape {tensor.shape}"
        )


def _expected_shape(tensor_type: str, settings: Settings) -> tuple[int | None, int | None]:
    """The rows and the columns of a tensor_type of tensor; None where nothing is expected."""
    shapes: Mapping[str, Shape] = {**SHAPES, **settings.architecture.shapes}
    rows, columns = shapes.get(tensor_type, (None, None))
    return settings.number(rows) if rows else None, settings.number(columns) if columns else None


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
        """The source alone, or what it is made of."""
        return sources_of(self.source) or (self.source,)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the source."""
        return self.source.parts

    def runs_of_matrix(self, number: int) -> list[Segment] | None:
        """Return the rows of the source that one of its matrices is made of, in whatever order; see View."""
        if isinstance(self.source, View):
            return self.source.runs_of_matrix(number)
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
class ScaledTensor(RenamedTensor):
    """A matrix with each row multiplied by a number, in float32. factors: [rows] f32"""

    factors: npt.NDArray[np.float32]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source, and multiply them."""
        raw = np.empty(count * 4, dtype=np.uint8)
        self.source.read(start, count, "F32", raw)
        values = raw.view(np.float32)
        values *= self.factors[np.arange(start, start + count) // self.shape[-1]]
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class DecayTensor(RenamedTensor):
    """The rates of decay of a state space model, -exp(A), of which the checkpoint holds A, in float32."""

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source, and compute the rates."""
        raw = np.empty(count * 4, dtype=np.uint8)
        self.source.read(start, count, "F32", raw)
        raw = (-np.exp(raw.view(np.float32))).view(np.uint8)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedTensor(RenamedTensor):
    """A tensor with its columns in another order. order: which column of the source each one is"""

    order: npt.NDArray[np.int64]

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: it has no whole rows of the source."""
        return

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows that hold the elements."""
        size, width = item_bytes(dtype), len(self.order)
        first, last = start // width, -(-(start + count) // width)
        raw = np.empty((last - first, width, size), dtype=np.uint8)
        self.source.read(first * width, raw.size // size, dtype, raw.reshape(-1))
        skip = start - first * width
        out[: count * size] = raw[:, self.order].reshape(-1)[skip * size : (skip + count) * size]


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
