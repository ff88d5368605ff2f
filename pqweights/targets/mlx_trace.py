"""What mlx-lm's own `sanitize` does to a checkpoint, found out from names, shapes and dtypes alone.

mlx-lm renames, stacks, splits and transposes weights as it loads them, each model in its own way. `trace` runs it on
placeholders that are never allocated, and reads mlx's graph of the run (mlx.core.export_function with a callback). An
output that only moves values can be read in parts; any other output has to be computed by mlx.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import EvaluatedTensor, MovedTensor, Rows, Values

MLX_DTYPES = {
    "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "F64": mx.float32, "BOOL": mx.bool_, "U8": mx.uint8,
    "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32, "I32": mx.int32, "U64": mx.uint64,
    "I64": mx.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in MLX_DTYPES.items() if name != "F64"}

Weights = dict[str, mx.array]
Sanitize = Callable[[Weights], Weights]
Output = MovedTensor | EvaluatedTensor
Compute = Callable[[], dict[str, npt.NDArray[np.uint8]]]


def placeholder(tensor: LogicalTensor, dtype: str) -> mx.array:
    """Return zeros in the shape of a tensor; mlx is lazy, and zeros that are never looked at take no memory."""
    return mx.zeros(tensor.shape, MLX_DTYPES[dtype])


def trace(
    sanitize: Sanitize, tensors: Mapping[str, LogicalTensor], dtypes: Mapping[str, str], compute: Compute
) -> dict[str, Output]:
    """Run sanitize on placeholders, and return each of its outputs by name, in the order in which it returned them.

    tensors: those of the checkpoint, by name
    dtypes: keys of MLX_DTYPES, by name
    compute: returns the bytes of outputs that are computed, by name

    Raises whatever sanitize raises, and mlx's ValueError or RuntimeError if sanitize looks at values.
    """
    names: list[str] = []
    events: list[dict[str, Any]] = []

    def function(*arrays: mx.array) -> list[mx.array]:
        result = sanitize(dict(zip(tensors, arrays, strict=True)))
        names.extend(result)
        return list(result.values())

    with _contiguous_is_no_operation():
        mx.export_function(events.append, function, *(placeholder(t, dtypes[n]) for n, t in tensors.items()))
    graph = _Graph(list(tensors.values()), events, compute)
    return {name: graph.output(name, *output) for name, output in zip(names, graph.outputs, strict=True)}


@contextlib.contextmanager
def _contiguous_is_no_operation() -> Iterator[None]:
    """Make mx.contiguous, which changes no value, do nothing: mlx 0.32 cannot export it."""
    original = mx.contiguous
    mx.contiguous = lambda array, *args, **keywords: array
    try:
        yield
    finally:
        mx.contiguous = original


@dataclass(frozen=True)
class _Rows:
    """Where the values of a node come from.

    rows: the source row behind each position, in the shape of the node without the axis of columns; the rows of all
        sources are numbered consecutively
    columns: the columns of those rows that the node holds
    axis: the axis of the node along which the columns lie
    """

    rows: npt.NDArray[np.int64]
    columns: range
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the node."""
        return (*self.rows.shape[: self.axis], len(self.columns), *self.rows.shape[self.axis :])

    def cut(self, slices: list[slice]) -> _Rows:
        """Return the node with one slice for each axis."""
        rest = (*slices[: self.axis], *slices[self.axis + 1 :])
        return _Rows(self.rows[rest], self.columns[slices[self.axis]], self.axis)


class _Graph:
    """The graph that mx.export_function reported: which node each node is made from."""

    def __init__(self, tensors: list[LogicalTensor], events: list[dict[str, Any]], compute: Compute) -> None:
        by_type = {event["type"]: event for event in events}
        self._tensors, self._compute = tensors, compute
        self._inputs = {node[0]: index for index, node in enumerate(by_type["inputs"]["inputs"])}
        self.outputs: list[tuple[str, tuple[int, ...], mx.Dtype]] = by_type["outputs"]["outputs"]
        self._producers = {
            output[0]: (event, index)
            for event in events
            if event["type"] == "primitive"
            for index, output in enumerate(event["outputs"])
        }
        counts = [math.prod(tensor.shape[:-1]) for tensor in tensors]
        self._first_rows = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def output(self, name: str, node: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Output:
        """Return an output: a tensor that moves values of others, or is computed."""
        moved = self._rows_of(node)
        known: dict[str, Any] = {"name": name, "shape": tuple(shape), "dtype": DTYPE_NAMES[dtype]}
        if moved is None or moved.axis not in (len(shape) - 1, len(shape) - 2):
            reached = tuple(self._tensors[index] for index in sorted(self._reached(node)))
            return EvaluatedTensor(**known, made_of=reached, values=self._values)
        return MovedTensor(
            **known,
            segments=self._segments(moved.rows.reshape(-1)),
            columns=moved.columns,
            transposed=moved.axis == len(shape) - 2,
        )

    @functools.cached_property
    def _values(self) -> Values:
        return Values(self._compute)

    def _rows_of(self, node: str) -> _Rows | None:
        """Return where the values of a node come from; None if they are computed."""
        if node in self._inputs:
            index = self._inputs[node]
            shape = self._tensors[index].shape
            if not shape:
                return None
            rows = np.arange(self._first_rows[index], self._first_rows[index + 1])
            return _Rows(rows.reshape(shape[:-1]), range(shape[-1]), len(shape) - 1)
        event, index = self._producers.get(node, ({"name": "a constant"}, 0))
        move = _MOVES.get(event["name"])
        if move is None:
            return None
        parts = [self._rows_of(source[0]) for source in event["inputs"]]
        known = [part for part in parts if part is not None]
        shape = tuple(event["outputs"][index][1])
        return move(known, event["arguments"], shape, index) if len(known) == len(parts) else None

    def _reached(self, node: str) -> set[int]:
        """Return the numbers of the sources from which a node is computed."""
        pending, seen = [node], set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += (
                    [source[0] for source in self._producers[name][0]["inputs"]] if name in self._producers else []
                )
        return {self._inputs[name] for name in seen & self._inputs.keys()}

    def _segments(self, rows: npt.NDArray[np.int64]) -> tuple[Rows, ...]:
        """Divide rows into runs of a constant step within one source, greedily from the first row on."""
        sources = np.searchsorted(self._first_rows, rows, side="right") - 1
        within = rows - self._first_rows[sources]
        segments = []
        # A run ends where the source changes, or where the step differs from that of the run's first two rows.
        steps = np.where(np.diff(sources) == 0, np.diff(within), 0)
        changes = (np.flatnonzero(np.diff(steps)) + 1).tolist() if len(steps) else []
        start = 0
        while start < len(rows):
            step = int(steps[start]) if start < len(steps) else 0
            end = start + 1
            if step > 0:
                index = bisect.bisect_left(changes, end)
                end = (changes[index] if index < len(changes) else len(steps)) + 1
            first, step = int(within[start]), max(step, 1)
            segments.append((self._tensors[sources[start]], range(first, first + (end - start) * step, step)))
            start = end
        return tuple(segments)


def _reshape(parts: list[_Rows], arguments: list[Any], shape: tuple[int, ...], index: int) -> _Rows | None:
    part = parts[0]
    before, width = math.prod(part.shape[: part.axis]), len(part.columns)
    for axis in reversed(range(len(shape))):
        if shape[axis] == width and math.prod(shape[:axis]) == before:
            return _Rows(part.rows.reshape(*shape[:axis], *shape[axis + 1 :]), part.columns, axis)
    return None


def _transpose(parts: list[_Rows], arguments: list[Any], shape: tuple[int, ...], index: int) -> _Rows:
    part, order = parts[0], list(arguments[0])
    rest = [axis - (axis > part.axis) for axis in order if axis != part.axis]
    return _Rows(part.rows.transpose(rest), part.columns, order.index(part.axis))


def _slice(parts: list[_Rows], arguments: list[Any], shape: tuple[int, ...], index: int) -> _Rows | None:
    starts, stops, steps = arguments
    if any(step < 1 for step in steps):
        return None
    return parts[0].cut([slice(*bounds) for bounds in zip(starts, stops, steps, strict=True)])


def _split(parts: list[_Rows], arguments: list[Any], shape: tuple[int, ...], index: int) -> _Rows:
    part, (indices, axis) = parts[0], arguments
    first, last = list(itertools.pairwise([0, *indices, part.shape[axis]]))[index]
    slices = [slice(None)] * len(part.shape)
    slices[axis] = slice(first, last)
    return part.cut(slices)


def _concatenate(parts: list[_Rows], arguments: list[Any], shape: tuple[int, ...], index: int) -> _Rows | None:
    first, axis = parts[0], arguments[0]
    if axis == first.axis or any((p.columns, p.axis) != (first.columns, first.axis) for p in parts):
        return None
    rows = np.concatenate([part.rows for part in parts], axis=axis - (axis > first.axis))
    return _Rows(rows, first.columns, first.axis)


# mlx's primitives that move values, as numpy operations on rows. They are called with the rows of the inputs, the
# primitive's arguments, the shape of the output, and its index among the outputs.
_MOVES: dict[str, Callable[[list[_Rows], list[Any], tuple[int, ...], int], _Rows | None]] = {
    **dict.fromkeys(("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"), _reshape),
    "Transpose": _transpose,
    "Slice": _slice,
    "Split": _split,
    "Concatenate": _concatenate,
}
