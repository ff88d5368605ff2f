"""The matrices that a calibration encodes, whole tensors or those of a stack, and what is kept of each until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pqweights.calibrate.layered import MatrixPlace
from pqweights.convert.ready import CodeMeasures
from pqweights.formats.column_encoding import (
    ColumnMeasures,
    InputFactors,
    expected_bits,
    output_energies,
    scaled_energies,
    spread_of,
)
from pqweights.formats.columns import ColumnCodes

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
# A stored scale of a row or a column.
SCALE_BITS = 8


@dataclass(frozen=True, kw_only=True)
class CalibratedWeight:
    """A matrix that is to be calibrated.

    name: of the tensor in the checkpoint
    place: where the model has it
    number: in a stack; None if it is the whole tensor
    transposed: whether the checkpoint has it the other way round than the model
    """

    name: str
    place: MatrixPlace
    number: int | None = None
    transposed: bool = False

    @property
    def label(self) -> str:
        """What it is called in files."""
        return self.name if self.number is None else f"{self.name}[{self.number}]"

    def values(self, parameters: Mapping[str, torch.nn.Parameter], *, along_rows: bool = True) -> Floats:
        """Return it as [N, K]. along_rows: whether the model has it so"""
        values = self.place.of(parameters[self.place.matrix.parameter])
        return np.asarray((values if along_rows else values.T).contiguous().numpy())


# The codes of a matrix, what was measured of them, and the sum of g_i w_i H w_i over its rows.
EncodedMatrix = tuple[ColumnCodes, ColumnMeasures, float]


def together(
    matrices: Sequence[EncodedMatrix], *, is_stack: bool, transposed: bool
) -> tuple[ColumnCodes, CodeMeasures]:
    """Return the codes of a tensor, and what was measured of all its matrices."""
    codes = [of.T if transposed else of for of, _, _ in matrices]
    energy, of_all = sum(measured.energy for _, measured, _ in matrices), sum(weighed for _, _, weighed in matrices)
    measures = CodeMeasures(
        relative_mse=sum(measured.error for _, measured, _ in matrices) / energy if energy else 0.0,
        energy=energy,
        weighed_mse=sum(measured.weighed_error for _, measured, _ in matrices) / of_all if of_all else 0.0,
    )
    return ColumnCodes.stacked(codes) if is_stack else codes[0], measures


def stored_moments(label: str, blocks: Sequence[Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return the blocks of H as they are kept of a weight."""
    return {f"{label}:moments-{number:03}": block.numpy() for number, block in enumerate(blocks)}


def moments_of(label: str, known: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
    """Return the blocks of H that are kept of a weight; none if nothing is known."""
    return [torch.from_numpy(known[key]) for key in sorted(known) if key.startswith(f"{label}:moments-")]


def described(
    label: str, values: Floats, inputs: InputFactors, gradients: Doubles, *, along_rows: bool = True
) -> dict[str, npt.NDArray[Any]]:
    """Return what is kept of a weight [N, K] until it is encoded.

    along_rows: whether the model has it so
    energies, spread: see scaled_energies and spread_of
    energy: the sum of g_i w_i H w_i over the rows
    """
    return {
        f"{label}:gradients": gradients,
        f"{label}:energy": np.array(float(gradients @ output_energies(values, inputs))),
        f"{label}:energies": scaled_energies(values, inputs, gradients=gradients),
        f"{label}:spread": spread_of(inputs),
        f"{label}:shape": np.array(values.shape),
        f"{label}:along_rows": np.array(along_rows),
    }


def bits_at(energies: Floats, spread: Floats, shape: list[int], step: float) -> float:
    """Return the bits that a weight is expected to take at a step, scales included; see `described`."""
    rows, columns = shape
    return expected_bits(energies, spread, step, (rows, columns)) + SCALE_BITS * (rows + columns)


def factors_of(moments: list[Tensor], damping: float) -> InputFactors:
    """Factorize the blocks of H, which are taken out of the list."""
    return InputFactors.of([moments.pop(0).numpy() for _ in range(len(moments))], damping)
