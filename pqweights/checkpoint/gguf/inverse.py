"""The tensors of a model from those of its GGUF file: the inverse of regrouped.py and of the views of views.py.

The target is run on a model without values first. Each tensor of the file then is a view on tensors of the model, and
says which of their rows it holds: from the rows of all of them a tensor of the model is put together.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.regrouped import of_layer, rows_of_parts
from pqweights.checkpoint.gguf.tensors import NUMBERS, known_name, name_behind, tensor_in_file
from pqweights.checkpoint.gguf.views import (
    IN_FLOAT32,
    ComputedTensor,
    ConstantTensor,
    InterleavedTensor,
    NumbersTensor,
    PaddedTensor,
    RenamedTensor,
    ReorderedTensor,
)
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MovedTensor, transposed_matrices
from pqweights.errors import SourceError
from pqweights.models.conventions import LAYER, OF_TABLE, STACKED_EXPERTS
from pqweights.models.llama_cpp import Cut, first_class
from pqweights.models.settings import Settings, unused_positions
from pqweights.models.traits import Trait


@dataclass(frozen=True, kw_only=True)
class AbsentTensor:
    """A tensor of a model whose names and shapes alone are known."""

    name: str
    shape: tuple[int, ...]

    parts: tuple[StoredTensor, ...] = ()

    @property
    def dtype(self) -> str:
        """That of weights, or of whole numbers."""
        return "I64" if self.name.upper().endswith(NUMBERS) else "BF16"

    plain_dtype = dtype

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Never called: the tensor stands for one whose values are only found by the views on it."""
        raise NotImplementedError


def absent_tensors(
    shapes: Mapping[str, tuple[int, ...]], settings: Settings, names: Any, drafts: int
) -> Iterator[AbsentTensor]:
    """Yield the tensors of a model, by the names that its type has, that a file holds.

    shapes: those of the tensors of the file
    names: the TensorNameMap of the architecture
    drafts: how many layers of the file predict further tokens
    """
    called, layers = settings.model.names, settings.number("num_hidden_layers")
    assert called is not None
    every = [*called.outside_layers(), *called.in_layers(range(layers))]
    every += called.of_drafts(range(layers, layers + drafts)) if drafts else []
    if first_class(settings.values).endswith("Model"):  # which has no other model around it
        every = [re.sub(f"^{settings.architecture.prefix or 'model[.]'}", "", name) for name in every]
    # T5 calls the same matrix otherwise if it has gates.
    other = ".wi." if any(".ffn_gate." in name for name in shapes) else ".wi_1."
    for name in (name for name in every if other not in name):
        table = OF_TABLE.fullmatch(name)
        if table and f"blk.{table['layer']}.ple_key.weight" not in shapes:  # that of another layer
            continue
        behind = name_behind(name, layers, settings.architecture.drafts or {}) or name
        if "{}" not in name:
            if (shape := _shape_of(behind, shapes, settings, names)) and 0 not in shape:
                yield AbsentTensor(name=name, shape=shape)
            continue
        first = known_name(behind.replace("{}", "0"), settings.architecture.modules)
        known = first.replace(".experts.0.", ".experts.").replace("_projections.0.", "_projections.")
        shape = shapes.get(tensor_in_file(known, settings, names)[1], ())
        if len(shape) == 3 and 0 not in shape:
            yield from (AbsentTensor(name=name.format(number), shape=shape[1:]) for number in range(shape[0]))


def _shape_of(
    name: str, shapes: Mapping[str, tuple[int, ...]], settings: Settings, names: Any
) -> tuple[int, ...] | None:
    """Return the shape of a tensor of the model by those in the file; None if it is not there."""
    architecture = settings.architecture
    known = known_name(re.sub(f"^{architecture.prefix}", "", name), architecture.modules)

    def in_file(other: str) -> tuple[int, ...]:
        return shapes.get(tensor_in_file(other, settings, names)[1], ())

    if match := STACKED_EXPERTS.fullmatch(known):
        down, end = match["matrix"] == "down_proj", "bias" if match["bias"] else "weight"
        parts = [part for part, _ in rows_of_parts(down, 2, architecture)]
        shape = in_file(f"{match['layer']}.{parts[0]}.{end}")
        if len(shape) != (2 if match["bias"] else 3):
            return None
        rows = (shape[0], shape[1] * len(parts), *shape[2:])
        published = {Trait.TRANSPOSED_EXPERTS, Trait.EXPERTS_EITHER_WAY}
        transposed = not match["bias"] and bool(published & settings.model.traits)
        return (rows[0], rows[2], rows[1]) if transposed else rows
    if (cut := of_layer(known, architecture.cuts)) is not None and (match := LAYER.fullmatch(known)):
        return _cut_shape(cut, in_file(f"{match[1]}{match[2]}.{next(iter(cut.parts))}.weight"), settings)
    tensor_type, named, _ = tensor_in_file(known, settings, names)
    shape = shapes.get(named, ())
    if architecture.first_position and tensor_type == "POS_EMBD" and shape:
        return (shape[0] + unused_positions(settings), *shape[1:])
    if tensor_type in architecture.reshaped and not named.endswith(".bias"):
        return (shape[-3], 1, shape[-1]) if len(shape) > 2 else (math.prod(shape),) if shape else None
    if name.endswith(("conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if len(shape) == 1 and tensor_type == "FFN_GATE_INP_SHEXP" else shape or None


def _cut_shape(cut: Cut, part: tuple[int, ...], settings: Settings) -> tuple[int, ...] | None:
    """Return the shape of a module by that of its first part in the file."""
    if len(part) < 2:
        return None
    times, rows = settings.number(cut.times), sum(settings.number(size) for size in cut.blocks)
    inner = part[-2] if next(iter(cut.parts)) in cut.transposed else part[-1]
    return (times, rows, inner) if cut.stacked and not cut.transposed else (times * rows, inner)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a tensor of the model.

    of: the tensor
    first, step, count: which of its rows
    transposed: whether they are rows of its transposed matrices
    held: what has them, [rows, width]
    start: where they begin there
    """

    of: LogicalTensor
    first: int
    step: int
    count: int
    transposed: bool = False
    held: LogicalTensor
    start: int


def pieces_of(view: LogicalTensor, held: LogicalTensor) -> Iterator[Piece]:
    """Yield the rows of tensors of the model that a view is made of, given what the view would hold."""
    if isinstance(view, AbsentTensor):
        rows = view.shape[0] if len(view.shape) == 1 else math.prod(view.shape[:-1])
        yield Piece(of=view, first=0, step=1, count=rows, held=_matrix(held, rows), start=0)
    elif isinstance(view, MovedTensor):
        yield from _moved_pieces(view, held)
    elif isinstance(view, RenamedTensor):
        yield from pieces_of(view.source, _unchanged(view, held))
    elif not isinstance(view, ConstantTensor):
        raise SourceError(f"tensor {view.name!r}: it cannot be converted back to the tensor of the original model")


def _unchanged(view: RenamedTensor, held: LogicalTensor) -> LogicalTensor:
    """Return the source of a view, given what the view would hold."""
    source = view.source
    if isinstance(view, InterleavedTensor):
        half, heads = view.head_rows // 2, view.shape[0] // view.head_rows
        runs = [(head * 2 * half + side, 2, half) for head in range(heads) for side in range(2)]
        return _rows(source.name, source.shape, held, runs)
    if isinstance(view, ComputedTensor):
        fields = IN_FLOAT32 if view.dtype == "F32" else {}
        undone = {"compute": view.undo, "undo": view.compute}
        return ComputedTensor.of(source.name, held, shape=source.shape, **fields, **undone)
    if isinstance(view, ReorderedTensor):
        rows = _matrix(held, math.prod(source.shape[:-1]))
        return ReorderedTensor.of(source.name, rows, order=np.argsort(view.order), shape=source.shape)
    if isinstance(view, NumbersTensor):
        return NumbersTensor.of(source.name, held, dtype=source.dtype, plain_dtype=source.dtype)
    if isinstance(view, PaddedTensor):
        return _rows(source.name, source.shape, held, [(0, 1, source.shape[0])])
    if type(view) is not RenamedTensor:
        raise SourceError(f"tensor {view.name!r}: it cannot be converted back to the tensor of the original model")
    return RenamedTensor.of(source.name, held, shape=source.shape)


def _moved_pieces(view: MovedTensor, held: LogicalTensor) -> Iterator[Piece]:
    """Yield the rows that a view has moved: whole ones, or columns of all rows of one tensor, see `_parts_of_stack`."""
    tensor, columns = view.segments[0][0], view.columns
    source, outputs = _origin(tensor), tensor.shape[-1]
    if len(tensor.shape) > 1 and columns != range(outputs):
        transposed = view.transposed
        groups = tensor.shape[0] if transposed else math.prod(tensor.shape[:-1])
        by_rows = _matrix(held, groups * len(columns))
        for number in range(groups):
            yield Piece(
                of=source,
                first=number * outputs + columns.start,
                step=columns.step,
                count=len(columns),
                transposed=transposed,
                held=by_rows,
                start=number * len(columns),
            )
        return
    if view.transposed:
        held = transposed_matrices(view.name, held)
    by_rows, start = _matrix(held, sum(len(rows) for _, rows in view.segments)), 0
    for of, rows in view.segments:
        yield Piece(of=_origin(of), first=rows[0], step=rows.step, count=len(rows), held=by_rows, start=start)
        start += len(rows)


def _origin(tensor: LogicalTensor) -> LogicalTensor:
    """Return a tensor of the model that has been renamed; its rows stay what they are."""
    while type(tensor) is RenamedTensor:
        tensor = tensor.source
    return tensor


def assembled(pieces: Sequence[Piece]) -> LogicalTensor:
    """Return the tensor of the model that pieces make up. Raises SourceError unless they are all of it."""
    of, held = pieces[0].of, pieces[0].held
    width = held.shape[-1]
    rows = math.prod(of.shape) // width
    if len(pieces) == 1 and not pieces[0].transposed and pieces[0].count == rows == held.shape[0]:
        return RenamedTensor.of(of.name, held, shape=of.shape)
    ordered = sorted(pieces, key=lambda piece: piece.first)
    step = ordered[0].step
    starts = [0, *itertools.accumulate(piece.count for piece in ordered)]
    expected = [start if step == 1 else ordered[n - n % 2].first + n % 2 for n, start in enumerate(starts[:-1])]
    if starts[-1] != rows or [piece.first for piece in ordered] != expected or {p.step for p in ordered} != {step}:
        raise SourceError(f"tensor {of.name!r}: the file does not hold all rows of it")
    segments = [(piece.held, range(piece.start, piece.start + piece.count)) for piece in ordered]
    moved = MovedTensor.of(of.name, (rows, width), segments)
    same = len({piece.held.plain_dtype for piece in pieces}) == 1
    whole: LogicalTensor = moved if same else replace(moved, dtype="F32")
    if step == 2:
        whole = InterleavedTensor.of(of.name, whole, head_rows=2 * ordered[0].count)
    if pieces[0].transposed:
        whole = transposed_matrices(
            of.name, RenamedTensor.of(of.name, whole, shape=(*of.shape[:-2], of.shape[-1], width))
        )
    dtypes = {piece.held.dtype for piece in pieces}
    dtype = dtypes.pop() if len(dtypes) == 1 else whole.plain_dtype
    return RenamedTensor.of(of.name, whole, shape=of.shape, dtype=dtype)


def _matrix(held: LogicalTensor, rows: int) -> LogicalTensor:
    shape = (rows, math.prod(held.shape) // max(rows, 1))
    return held if held.shape == shape else RenamedTensor.of(held.name, held, shape=shape)


def _rows(
    name: str, shape: tuple[int, ...], held: LogicalTensor, runs: Sequence[tuple[int, int, int]]
) -> LogicalTensor:
    """Return rows of a tensor as another. runs: first row, step and count"""
    width = shape[-1] if len(shape) > 1 else 1
    by_rows = _matrix(held, math.prod(held.shape) // width)
    segments = [(by_rows, range(first, first + step * count, step)) for first, step, count in runs]
    moved = MovedTensor.of(name, (math.prod(shape) // width, width), segments)
    return RenamedTensor.of(name, moved, shape=shape, dtype=held.dtype)
