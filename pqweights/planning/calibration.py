"""What a calibration would do with a plan, before any of it: which weights it encodes, and the disk space it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.header import TensorSpec, entry_bytes
from pqweights.checkpoint.master import column_specs
from pqweights.checkpoint.readers import scale_shape
from pqweights.common.options import Options
from pqweights.errors import OptionError, RecipeError
from pqweights.formats.columns import MOST_STORED_COLUMNS, ColumnCut
from pqweights.formats.trellis import Trellis
from pqweights.planning.context_memory import layers_and_width
from pqweights.planning.layout import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe

# A weight of fewer rows does not fill a strip, and would grow.
FEWEST_ROWS = 128
# What a calibration finds.
CODES, SCALES, SENSITIVITIES = "codes", "scales", "sensitivities"


def check_calibration(options: Options) -> None:
    """Raise OptionError for what a calibration cannot be combined with."""
    if options.low_disk:
        other = "calibrate" if options.awq is None else "awq"
        why = "a calibration reads the whole checkpoint several times"
        raise OptionError(f"`low_disk`: {why}; leave out `low_disk` or `{other}`")


def measures(recipe: Recipe, options: Options) -> bool:
    """Whether sensitivities are measured: for a size, of weights whose codes no calibration finds."""
    return options.calibrate is not None and recipe.goal is not None and Trellis.codec not in recipe.codecs


def wanted_bits(recipe: Recipe, tensors: Sequence[TensorPlan]) -> dict[str, float]:
    """Return how many bits the weights that are calibrated are to take, by name, if none gave of its bits to others.

    A target size counts headers, in which these weights take more than without a calibration.

    Raises RecipeError if there is no such weight.
    """
    wanted: dict[str, float] = {}
    for tensor in tensors:
        if tensor.codec == Trellis.codec and _fills_strips(tensor.shape):
            columns = column_specs(tensor.name, ColumnCut.of(tensor.shape), tensor.bytes)
            counts_headers = recipe.goal is not None and recipe.goal.output_bytes is not None
            more = _header_bytes(columns) - _header_bytes(tensor.stored) if counts_headers else 0
            wanted[tensor.name] = 8.0 * (tensor.bytes - more)
    if not wanted:
        raise RecipeError(
            f"recipe {recipe.name!r}: `calibrate` fits matrices with the codec {Trellis.codec}, and this recipe gives "
            "it to none here; choose a recipe such as t4, or give a target size or rate"
        )
    return wanted


def _fills_strips(shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix, or a stack of them, of enough rows; those of a stack may be its last dimension."""
    rows = shape[:1] if len(shape) == 2 else shape[1:]
    return len(shape) in (2, 3) and min(rows) >= FEWEST_ROWS and shape[-1] <= MOST_STORED_COLUMNS


def _header_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(len(spec.name) + entry_bytes(spec.dtype, spec.shape) for spec in specs)


@dataclass(frozen=True, kw_only=True)
class PlannedCalibration:
    """What a plan says of a calibration.

    finds: what it learns: codes, scales or sensitivities
    weights: of how many weights, if the sample reaches them
    weight_bytes: about how many bytes those take together of which it finds the codes, or the scales at most; 0 if as
        many as a divergence takes
    disk_bytes: what it takes beside its result, while it runs
    """

    finds: str
    weights: int
    weight_bytes: int
    disk_bytes: int


def planned_calibration(
    recipe: Recipe, tensors: Sequence[TensorPlan], config: Mapping[str, Any] | None, options: Options
) -> PlannedCalibration:
    """Return what follows from the plan of a model. Raises RecipeError if nothing would be calibrated."""
    tokens = options.calibration_tokens
    if options.awq is not None:
        scaled = [tensor for tensor in tensors if tensor.is_scaled]
        taken = sum(2 * math.prod(scale_shape(tensor.shape)) for tensor in scaled)
        disk = states_bytes(config, tokens) + taken
        return PlannedCalibration(finds=SCALES, weights=len(scaled), weight_bytes=taken, disk_bytes=disk)
    if measures(recipe, options):
        count, disk = sum(tensor.action == QUANTIZE for tensor in tensors), states_bytes(config, tokens, more=2)
        return PlannedCalibration(finds=SENSITIVITIES, weights=count, weight_bytes=0, disk_bytes=disk)
    wanted = wanted_bits(recipe, tensors)
    for_divergence = recipe.goal is not None and recipe.goal.divergence is not None
    return PlannedCalibration(
        finds=CODES,
        weights=len(wanted),
        weight_bytes=0 if for_divergence else round(sum(wanted.values()) / 8),
        disk_bytes=work_bytes(config, tokens, wanted),
    )


def work_bytes(config: Mapping[str, Any] | None, tokens: int, wanted: Mapping[str, float]) -> int:
    """Return the disk space that a calibration of a master takes beside its result, in bytes, while it runs.

    That is for states, for the gradients at two layers, and for the codes.

    tokens: of the sample
    wanted: see wanted_bits
    """
    return states_bytes(config, tokens, more=2) + int(sum(wanted.values()) / 8)


def states_bytes(config: Mapping[str, Any] | None, tokens: int, more: int = 0) -> int:
    """Return the disk space of the states of a sample before each layer and after the last, and of some more."""
    layers, width = layers_and_width(config)
    return 2 * tokens * width * (layers + 1 + more)
