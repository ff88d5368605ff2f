"""Tensors that llama.cpp holds in other pieces than the checkpoint: stacks of experts, parts of matrices, tiled heads.

Experts are stacked from any layout: a matrix for each expert, or all in one tensor, transposed or not, with gate and up
one after the other or alternating.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from pqweights.checkpoint.gguf.views import ReorderedTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MovedTensor
from pqweights.errors import ExportError
from pqweights.models.conventions import LAYER, OF_ALTUP, OF_EXPERT, OF_SHARD, STACKED_EXPERTS
from pqweights.models.llama_cpp import ALTERNATING, JOINED, Architecture, Cut, Tiled
from pqweights.models.settings import Settings
from pqweights.models.traits import Trait

T = TypeVar("T")
# A tensor, still under its own name, behind the name that the gguf package knows it by.
NamedTensor = tuple[str, LogicalTensor]


def of_layer(name: str, known: Mapping[str, T]) -> T | None:
    """Return what is known of a module or a parameter, by the first expression that matches its name in the layer."""
    match = LAYER.fullmatch(name)
    module = (match[3] if match else name).removesuffix(".weight")
    return next((value for expression, value in known.items() if re.fullmatch(expression, module)), None)


def in_words_of(table: Mapping[str, str], name: str) -> str | None:
    """Return what the first expression of a table that matches a name makes of it; None if none does."""
    matches = ((re.fullmatch(expression, name), known) for expression, known in table.items())
    return next((match.expand(known) for match, known in matches if match), None)


def cut(tensors: Iterator[NamedTensor], settings: Settings) -> Iterator[NamedTensor]:
    """Yield the tensors, with several in the place of each one that llama.cpp holds in parts."""
    for known, tensor in tensors:
        match, cut = LAYER.fullmatch(known), of_layer(known, settings.architecture.cuts)
        if match is None or cut is None:
            yield known, tensor
            continue
        for part in cut.parts:
            name = f"{match[1]}{match[2]}.{part}.weight"
            yield name, replace(_part(tensor, cut, part, settings), name=name)


def _part(source: LogicalTensor, cut: Cut, part: str, settings: Settings) -> MovedTensor:
    """The rows of a part as one tensor. See Cut"""
    blocks, transposed = cut.parts[part], part in cut.transposed
    sizes = [settings.number(size) for size in cut.blocks]
    times, inner = settings.number(cut.times), source.shape[-1]
    if math.prod(source.shape[:-1]) != times * sum(sizes):
        raise ExportError(
            f"tensor {source.name!r}: expected {times * sum(sizes)} rows, as config.json has it, found {source.shape}"
        )
    segments = tuple(
        (source, range(first, first + sizes[block]))
        for block in blocks
        for first in range(sum(sizes[:block]), times * sum(sizes), sum(sizes))
    )
    rows = sum(sizes[block] for block in blocks)
    matrix = (inner, rows) if transposed else (rows, inner)
    shape = (times, *matrix) if cut.stacked else (times * rows, inner)
    return MovedTensor.of(part, shape, segments, columns=range(inner), transposed=transposed)


def with_shards_joined(tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors, with one for all shards of a table in the place of the first."""
    matches = ((OF_SHARD.fullmatch(known), tensor) for known, tensor in tensors)
    shards = {int(match["shard"]): tensor for match, tensor in matches if match}
    for known, tensor in tensors:
        if (match := OF_SHARD.fullmatch(known)) is None:
            yield known, tensor
        elif shards:
            name, ordered = f"{match['table']}.weight", [shards[number] for number in sorted(shards)]
            if len(tensor.shape) != 2 or len({shard.shape[1:] for shard in ordered}) > 1:
                raise ExportError(f"tensor {tensor.name!r}: expected matrices of the same width as shards")
            rows = sum(shard.shape[0] for shard in ordered)
            segments = [(shard, range(shard.shape[0])) for shard in ordered]
            yield name, MovedTensor.of(name, (rows, tensor.shape[1]), segments)
            shards.clear()


def with_experts_stacked(tensors: Sequence[NamedTensor], settings: Settings) -> Iterator[NamedTensor]:
    """Yield the tensors, with one for all experts in the place of the first expert's."""
    experts: dict[str, dict[int, LogicalTensor]] = {}
    for known, tensor in tensors:
        if match := OF_EXPERT.fullmatch(known) or OF_ALTUP.fullmatch(known):
            experts.setdefault(f"{match['layer']}.{match['matrix']}", {})[int(match["expert"])] = tensor
    has_stacks = bool(experts) or any(STACKED_EXPERTS.fullmatch(known) for known, _ in tensors)
    if not has_stacks:
        yield from tensors
        return
    for known, tensor in tensors:
        if match := OF_EXPERT.fullmatch(known) or OF_ALTUP.fullmatch(known):
            name = f"{match['layer']}.{match['matrix']}"
            if name in experts:
                yield name, _stacked(name, experts.pop(name), settings)
        elif match := STACKED_EXPERTS.fullmatch(known):
            yield from _parts_of_stack(tensor, match, settings)
        else:
            yield known, tensor


def _stacked(name: str, experts: dict[int, LogicalTensor], settings: Settings) -> MovedTensor:
    """The matrices of all experts as one tensor [experts, rows, columns]."""
    count = settings.number("altup_num_inputs") - 1 if ".altup_" in name else settings.number("num_experts")
    first = next(iter(experts.values()))
    whole = len(experts) == count == max(experts) + 1  # a file may claim 2^31 of them
    if not whole or any(tensor.shape != first.shape for tensor in experts.values()):
        raise ExportError(
            f"tensor {first.name!r}: expected the same matrix of {count} experts, found {len(experts)}, or "
            "different shapes"
        )
    rows, columns = first.shape
    segments = tuple((experts[number], range(rows)) for number in range(count))
    return MovedTensor.of(name, (count, rows, columns), segments)


def _parts_of_stack(tensor: LogicalTensor, match: re.Match[str], settings: Settings) -> Iterator[NamedTensor]:
    """Yield what llama.cpp holds of a tensor of all experts: [experts, rows, columns], or biases [experts, rows]."""
    count, hidden = settings.number("num_experts"), settings.number("hidden_size")
    width = settings.number("moe_intermediate_size" if settings.get("moe_intermediate_size") else "intermediate_size")
    down, is_bias = match["matrix"] == "down_proj", match["bias"] is not None
    outputs, inner = (hidden, width) if down else (2 * width, hidden)
    traits, layouts = settings.model.traits, [(count, outputs, inner), (count, inner, outputs)]
    either_way = Trait.EXPERTS_EITHER_WAY in traits
    transposed = tensor.shape == layouts[1] if either_way else Trait.TRANSPOSED_EXPERTS in traits and not is_bias
    expected = (count, outputs) if is_bias else layouts[transposed]
    if either_way and inner == outputs:
        raise ExportError(
            f"tensor {tensor.name!r}: the shape {tensor.shape} does not show whether it is [experts, out, in] or "
            "[experts, in, out], and models of this type are stored either way"
        )
    if tensor.shape != expected:
        raise ExportError(f"tensor {tensor.name!r}: expected shape {expected}, found {tensor.shape}")
    for part, rows in rows_of_parts(down, outputs, settings.architecture):
        name = f"{match['layer']}.{part}.{'bias' if is_bias else 'weight'}"
        shape = (count, len(rows)) if is_bias else (count, len(rows), inner)
        starts = range(0, count * outputs, outputs)
        segments = [(tensor, range(s + rows.start, s + rows.stop, rows.step)) for s in starts]
        columns = range(inner)
        if is_bias or transposed:  # outputs lie side by side
            segments, columns = [(tensor, range(math.prod(expected[:-1])))], rows
        yield name, MovedTensor.of(name, shape, segments, columns=columns, transposed=transposed)


def rows_of_parts(down: bool, outputs: int, architecture: Architecture) -> list[tuple[str, range]]:
    """Return the matrices in one of a stack, each with its rows."""
    if down:
        return [("down_proj", range(outputs))]
    if architecture.gate_and_up == JOINED:
        return [("gate_up_proj", range(outputs))]
    if architecture.gate_and_up == ALTERNATING:
        return [("gate_proj", range(0, outputs, 2)), ("up_proj", range(1, outputs, 2))]
    return [("gate_proj", range(outputs // 2)), ("up_proj", range(outputs // 2, outputs))]


def rows_from(first: int, matrix: LogicalTensor) -> MovedTensor:
    """The rows of a matrix from one on."""
    rows, columns = matrix.shape
    return MovedTensor.of(matrix.name, (rows - first, columns), [(matrix, range(first, rows))])


def with_tiled_heads(name: str, tensor: LogicalTensor, tiled: Tiled, settings: Settings) -> LogicalTensor:
    """The tensor with the first value head of each group before the second ones."""
    groups, heads = settings.number("linear_num_key_heads"), settings.number("linear_num_value_heads")
    size, before = settings.number(tiled.size), settings.number(tiled.before)
    along = tensor.shape[-1] if tiled.columns or len(tensor.shape) == 1 else tensor.shape[0]
    if heads % groups or along != before + heads * size:
        raise ExportError(
            f"tensor {tensor.name!r}: expected {before + heads * size} channels, as config.json has it, found "
            f"{tensor.shape}"
        )
    places = before + np.arange(heads * size).reshape(groups, heads // groups, size).swapaxes(0, 1).reshape(-1, size)
    if tiled.columns or len(tensor.shape) == 1:
        order = np.concatenate([np.arange(before), places.reshape(-1)])
        return ReorderedTensor.of(name, tensor, order=order)
    segments = [(tensor, range(before))] if before else []
    segments += [(tensor, range(int(head[0]), int(head[0]) + size)) for head in places]
    return MovedTensor.of(name, tensor.shape, segments)
