"""What is known of the weights of a layer from a sample of tokens: moments of inputs, and gradients at outputs.

Of a weight W [N, K] in a product y = W x: H = E[x x'], [K, K], the second moments of its inputs; and
g = E[(dL/dy)**2], [N], the mean squares of the gradients at its outputs. The loss L is that of tokens that are drawn
from the model's own predictions, so the mean products of such gradients are the Fisher information, and g_i H is about
its block that belongs to row i of W, as in K-FAC (Martens and Grosse, arXiv:1503.05671).

Products are recorded where torch computes them, so no architecture needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pqweights.codecs.column_encoding import DAMPING, best_damping, moment_blocks
from pqweights.quality.layered import ModelMatrix

Doubles = npt.NDArray[np.float64]

# Of every third batch the last so many inputs, a window, show which damping suits an H of the others.
HELD_BACK, HELD_EVERY = 256, 3
# Of fewer inputs than channels, H counts as if so many more had been read, of the same sizes and without correlations:
# few of many channels show correlations that are not there (Ledoit and Wolf, J. of Multivariate Analysis 88, 2004).
UNCORRELATED = 64


@dataclass(eq=False)
class InputMoments:
    """The sum of x x' over inputs x of K channels, of many channels in blocks on its diagonal.

    Rows are kept until they would take more memory than the sum does: an expert sees few of a sample's tokens.

    parts: the channels of each block
    """

    parts: Sequence[slice]
    count: int = 0
    _rows: list[Tensor] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=list)
    _batches: int = 0
    _held: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor) -> None:
        """Add inputs, [rows, K]."""
        rows = rows.clone()
        self._rows.append(rows)
        self._batches += 1
        if self._batches % HELD_EVERY == 0:
            self._held.append(rows[-HELD_BACK:])
        self.count += len(rows)
        if sum(map(len, self._rows)) >= self.parts[0].stop:
            self._add_up()

    def damping(self) -> float:
        """Return the damping of H that suits inputs that are left out of it; the usual one if there are none."""
        self._add_up()
        held = torch.cat(self._held) if self._held else torch.empty(0, 0)
        if not len(held):
            return DAMPING
        others = [held[:, part] for part in self.parts]
        seen = [
            (total - own.T @ own).div_(self.count - len(held)) for total, own in zip(self._sums, others, strict=True)
        ]
        return best_damping([block.numpy() for block in seen], [own.numpy() for own in others])

    def mean(self) -> list[Tensor]:
        """Return the blocks of H, off their diagonals shrunk for few inputs; what was added is forgotten."""
        self._add_up()
        result, self._sums = self._sums, []
        added = UNCORRELATED if self.count < self.parts[-1].stop else 0
        for block in result:
            squares = block.diagonal() / self.count
            block.div_(self.count + added)
            block.diagonal().copy_(squares)
        return result

    def _add_up(self) -> None:
        if not self._rows:
            return
        rows = torch.cat(self._rows)
        self._rows.clear()
        for number, part in enumerate(self.parts):
            own = rows[:, part]
            if number < len(self._sums):
                self._sums[number].addmm_(own.T, own)
            else:
                self._sums.append(own.T @ own)


@dataclass(eq=False)
class ProductStatistics:
    """What is known of one matrix.

    vector: the number of the moments; matrices that multiply the same inputs share them
    squares: the sums of squares of the gradients over all rows of outputs, [N]
    """

    vector: int
    squares: Tensor | None = None


@dataclass(eq=False)
class LayerStatistics(TorchFunctionMode):
    """Records the products with some parameters, which are in memory, while layers compute; a context.

    parameters: which, by name: matrices, or stacks of them [experts, outputs, inputs]
    moments: of each vector of inputs, by number
    mixed: the vectors that matrices read which read the same in one batch, and not in another; these are not known
    products: what is known of each matrix that was multiplied by
    """

    parameters: Mapping[str, torch.nn.Parameter]
    moments: dict[int, InputMoments] = field(default_factory=dict)
    mixed: set[int] = field(default_factory=set)
    products: dict[ModelMatrix, ProductStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._matrices: dict[int, ModelMatrix] = {}  # by their address
        for name, parameter in self.parameters.items():
            stack = parameter if parameter.ndim == 3 else parameter[None]
            self._matrices |= {matrix.data_ptr(): ModelMatrix(name, number) for number, matrix in enumerate(stack)}
        # What was added in this batch, to which vector, by which matrix; kept, so that no other tensor has its place.
        self._inputs: list[tuple[Tensor, int, ModelMatrix]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call of any function of torch, and pass it on."""
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            matrix = self._matrix_at(given["weight"])
            if matrix is not None:
                self._record(matrix, given["input"].detach(), result)
        return result

    def next_batch(self) -> None:
        """Forget which inputs were the same tensors."""
        self._inputs.clear()

    def mean_squares(self, matrix: ModelMatrix, tokens: int) -> Doubles | None:
        """Return g of a matrix for each token of the sample, [N]; None if no gradient reached its outputs.

        tokens: of the sample. An expert has outputs for some of them, and counts for nothing in the others.
        """
        squares = self.products[matrix].squares
        return None if squares is None or not squares.any() else (squares / tokens).double().numpy()

    def inputs(self) -> Iterator[tuple[list[ModelMatrix], InputMoments]]:
        """Yield the matrices that multiply the same inputs, and what is known of these, once."""
        for vector in sorted(self.moments.keys() - self.mixed):
            moments = self.moments.pop(vector)
            matrices = [matrix for matrix, product in self.products.items() if product.vector == vector]
            yield matrices, moments

    def _matrix_at(self, weight: Tensor) -> ModelMatrix | None:
        """Return the matrix whose memory a tensor has."""
        matrix = self._matrices.get(weight.data_ptr())
        if matrix is None or not weight.is_contiguous():
            return None
        return matrix if weight.shape == self.parameters[matrix.parameter].shape[-2:] else None

    def _record(self, matrix: ModelMatrix, values: Tensor, result: Tensor) -> None:
        rows = values.reshape(-1, values.shape[-1])
        product = self.products.get(matrix)
        known = next((vector for other, vector, _ in self._inputs if _same_place(other, values)), None)
        if product is None:
            product = self.products[matrix] = ProductStatistics(len(self.moments) if known is None else known)
        if known != product.vector:
            if any(vector == product.vector and by != matrix for _, vector, by in self._inputs):
                self.mixed.add(product.vector)
            if product.vector not in self.moments:
                self.moments[product.vector] = InputMoments(moment_blocks(rows.shape[1]))
            self.moments[product.vector].add(rows)
            self._inputs.append((values, product.vector, matrix))
        if result.requires_grad:
            result.register_hook(lambda gradient: self._add_gradient(product, gradient))

    @staticmethod
    def _add_gradient(product: ProductStatistics, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1])
        squares = rows.square().sum(0)
        product.squares = squares if product.squares is None else product.squares + squares


def _same_place(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
