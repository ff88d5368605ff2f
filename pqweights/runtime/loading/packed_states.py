"""Packed weights as torch.save writes them: plain values and tensors, which are checked when torch.load reads them.

torch.load calls `packed.rebuild` for files that nobody trusts, and products with codes check nothing later. So all that
a master's reader checks is checked here: codec, rate, state, shapes, sizes, norms and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
from msgspec import Meta
from torch import Tensor

from pqweights.checkpoint.header import StoredTensor, byte_count
from pqweights.checkpoint.master import LOGICAL_DTYPES, column_specs
from pqweights.checkpoint.readers import SMALLEST_SCALE
from pqweights.common.documents import ClosedDocument, Count, Number, Size, as_document
from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.errors import MasterError, RecipeError
from pqweights.formats import CODECS
from pqweights.formats.columns import MOST_STORED_COLUMNS, ColumnCut, TrellisColumns, bits_of
from pqweights.formats.master import DamagedBlock, MasterFormat
from pqweights.formats.weight import block_count
from pqweights.runtime.loading.packed_rows import Factor, MappedColumns, Matrix, PackedColumns, PackedRows, Rows

_Text = Annotated[str, Meta(max_length=5000)]
Format = TypeVar("Format", bound=MasterFormat)
_Settings = dict[_Text, _Text | int | float | bool]  # MasterFormat.stated


class _Blocks(ClosedDocument, frozen=True, kw_only=True, tag="blocks"):
    """The state of a PackedRows in blocks, whose fields it has."""

    place: _Text
    weights: Size
    rows: Size
    columns: Size
    codec: _Text
    bits: Number
    state: _Settings
    parts: tuple[Tensor, ...]
    offset: Count
    first_block: Count | None
    awq: Tensor | None
    factor: Number


class _ColumnWeight(ClosedDocument, frozen=True, kw_only=True):
    """A weight of columns. parts: its stored tensors, flat bytes"""

    file: _Text
    name: _Text
    dtype: _Text
    shape: tuple[Size, ...]
    state: _Settings
    parts: tuple[Tensor, ...]


class _ColumnState(ClosedDocument, frozen=True, kw_only=True, tag="columns"):
    """The state of a PackedColumns. weight: the number among the column weights; on: an empty tensor on the device"""

    weight: Count
    matrix: Count
    on: Tensor
    factor: Number


class _Packed(ClosedDocument, frozen=True, kw_only=True):
    """All rows of all matrices, and the weights of columns that they are of."""

    matrices: tuple[tuple[_Blocks | _ColumnState, ...], ...]
    column_weights: tuple[_ColumnWeight, ...]


def state_of(matrices: Sequence[Matrix]) -> dict[str, Any]:
    """Return matrices as values that torch.load takes by default; tensors share their memory."""
    pieces = [piece for matrix in matrices for piece in matrix]
    weights = {id(piece.tensor): piece.tensor for piece in pieces if isinstance(piece, PackedColumns)}
    numbers = {known: number for number, known in enumerate(weights)}
    return {
        "matrices": [[_state_of_rows(piece, numbers) for piece in matrix] for matrix in matrices],
        "column_weights": [
            {
                "file": weight.encoded[0].file,
                "name": weight.name,
                "dtype": weight.dtype,
                "shape": list(weight.shape),
                "state": weight.format.stated(),
                "parts": [weight.mapped[stored.name] for stored in weight.encoded],
            }
            for weight in weights.values()
        ],
    }


def _state_of_rows(rows: Rows, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Return rows as such values. numbers: those of the weights of columns, by id"""
    if isinstance(rows, PackedColumns):
        number, on = numbers[id(rows.tensor)], torch.empty(0, device=rows.device)
        return {"type": "columns", "weight": number, "matrix": rows.matrix, "on": on, "factor": rows.factor.value}
    return {
        "type": "blocks",
        "place": rows.place,
        "weights": rows.weights,
        "rows": rows.rows,
        "columns": rows.columns,
        "codec": rows.format.codec,
        "bits": rows.format.bits,
        "state": rows.format.stated(),
        "parts": list(rows.parts),
        "offset": rows.offset,
        "first_block": rows.first_block,
        "awq": rows.awq,
        "factor": rows.factor.value,
    }


def matrices_of(state: Any) -> tuple[Matrix, ...]:
    """Return what `state_of` was given. Raises MasterError for anything that it never returns."""
    stated = as_document(state, _Packed, _damaged)
    weights = [_column_weight(weight) for weight in stated.column_weights]
    matrices = tuple(
        tuple(_blocks(rows) if isinstance(rows, _Blocks) else _columns(rows, weights) for rows in matrix)
        for matrix in stated.matrices
    )
    if not matrices or not all(matrices):
        raise _damaged("expected a matrix with rows, found none")
    heights = {sum(rows.rows for rows in matrix) for matrix in matrices}
    widths = {(rows.columns, rows.device) for matrix in matrices for rows in matrix}
    if len(heights) > 1 or len(widths) > 1:
        raise _damaged("expected matrices of one shape on one device, found others")
    return matrices


def _blocks(stated: _Blocks) -> PackedRows:
    """Return rows that were encoded in blocks."""
    where, codec = stated.place, CODECS.get(stated.codec)
    if codec is None:
        raise _damaged(f"{where}: codec: expected one of {', '.join(CODECS)}, found {stated.codec!a}")
    try:
        format = codec.at(stated.bits).sized(stated.weights)
    except RecipeError as error:
        raise _damaged(f"{where}: bits: {error}") from None
    format, count = _with_settings(where, format, stated.state), stated.rows * stated.columns
    if not count or stated.offset >= format.block_size or not _is_power_of_two(stated.factor):
        raise _damaged(
            f"{where}: expected rows, columns, an offset below {format.block_size} and a power of two, found "
            f"{stated.rows}, {stated.columns}, {stated.offset} and {stated.factor}"
        )
    blocks = block_count(stated.offset + count, format.block_size)
    shapes = [(blocks, part.bytes_per_block) for part in format.parts]
    parts = _checked(where, stated.parts, shapes)
    awq = None if stated.awq is None else _scales(where, stated.awq, stated.columns)
    if len({tensor.device for tensor in (*parts, *(() if awq is None else (awq,)))}) > 1:
        raise _damaged(f"{where}: expected tensors on one device")
    try:
        format.check([part.cpu().numpy() for part in parts])
    except DamagedBlock as damage:
        raise _damaged(f"{where}: block {(stated.first_block or 0) + damage.block}: {damage.reason}") from None
    return PackedRows(
        place=where,
        weights=stated.weights,
        rows=stated.rows,
        columns=stated.columns,
        format=format,
        parts=parts,
        offset=stated.offset,
        first_block=stated.first_block,
        awq=awq,
        factor=Factor(stated.factor),
    )


def _column_weight(stated: _ColumnWeight) -> MappedColumns:
    """Return a weight of columns, whose codes stay in the memory of the CPU."""
    where, shape = f"{stated.file}: tensor {stated.name!r}", stated.shape
    elements = math.prod(shape)
    if len(shape) not in (2, 3) or not 0 < elements <= MAX_ELEMENTS or shape[-1] > MOST_STORED_COLUMNS:
        raise _damaged(f"{where}: shape: expected rows, and 1 to {MOST_STORED_COLUMNS} columns, found {list(shape)}")
    if stated.dtype not in LOGICAL_DTYPES:
        raise _damaged(f"{where}: dtype: expected one of {', '.join(LOGICAL_DTYPES)}, found {stated.dtype!a}")
    format = _with_settings(where, TrellisColumns(bits=1), stated.state)
    cut, total = ColumnCut.of(shape, transposed=format.transposed), stated.parts[0].numel() if stated.parts else 0
    specs = column_specs(stated.name, cut, total)
    encoded = tuple(StoredTensor(*spec, stated.file, 0, byte_count(spec.dtype, spec.shape)) for spec in specs)
    parts = [part.cpu() for part in _checked(where, stated.parts, [(stored.byte_count,) for stored in encoded])]
    problem = cut.length_problem(parts[1].numpy().view("<i4").reshape(cut.lengths), total)
    if problem is not None:
        raise _damaged(f"{where}: {problem}")
    return MappedColumns(
        name=stated.name,
        shape=shape,
        dtype=stated.dtype,
        format=replace(format, bits=bits_of(cut, total)),
        encoded=encoded,
        mapped={stored.name: part for stored, part in zip(encoded, parts, strict=True)},
    )


def _columns(stated: _ColumnState, weights: Sequence[MappedColumns]) -> PackedColumns:
    """Return all rows of a matrix."""
    weight = weights[stated.weight] if stated.weight < len(weights) else None
    if weight is None or stated.matrix >= math.prod(weight.cut.stack) or not _is_power_of_two(stated.factor):
        raise _damaged(f"expected a matrix and a power of two, found matrix {stated.matrix} and {stated.factor}")
    return PackedColumns(tensor=weight, matrix=stated.matrix, device=stated.on.device, factor=Factor(stated.factor))


def _with_settings(where: str, format: Format, settings: dict[str, Any]) -> Format:
    """Return a format with settings."""
    if not settings.keys() <= format.settings.keys():
        expected = ", ".join(format.settings)
        raise _damaged(f"{where}: state: expected {expected}, found {', '.join(map(ascii, settings))}")
    try:
        return format.with_settings(settings)
    except ValueError as error:
        raise _damaged(f"{where}: {error}") from None


def _scales(where: str, scales: Tensor, columns: int) -> Tensor:
    """Return the scales of columns, if they are such."""
    (awq,) = _checked(where, [scales], [(columns,)], torch.float32)
    if not SMALLEST_SCALE <= float(awq.min()) <= float(awq.max()) < math.inf:
        raise _damaged(f"{where}: expected finite scales from {SMALLEST_SCALE} on")
    return awq


def _checked(
    where: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.uint8
) -> tuple[Tensor, ...]:
    """Return views of plain tensors of these shapes: what a file says of the tensors later changes no view."""
    if len(tensors) != len(shapes):
        raise _damaged(f"{where}: expected {len(shapes)} tensors, found {len(tensors)}")
    for tensor, shape in zip(tensors, shapes, strict=True):
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain or tensor.is_meta or tensor.dtype != dtype or tensor.shape != shape:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise _damaged(f"{where}: expected a plain tensor, {dtype} {list(shape)}, found {found}")
        if not tensor.is_contiguous():
            raise _damaged(f"{where}: expected a tensor without gaps")
    # Products read float16 norms as such.
    return tuple(view.clone() if view.data_ptr() % 2 else view for view in (tensor.detach() for tensor in tensors))


def _is_power_of_two(value: float) -> bool:
    return value > 0 and math.frexp(value)[0] == 0.5


def _damaged(problem: str) -> MasterError:
    return MasterError(
        f"a saved packed weight: {problem}; the file is damaged, or another version of pqweights wrote it: load the "
        "master and save it again"
    )
