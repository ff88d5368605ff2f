"""What is known of the weights of a layer from a sample of tokens: moments of inputs, and gradients at outputs.

Of a weight W [N, K] in a product y = W x: H = E[x x'], [K, K], the second moments of its inputs; and
g = E[(dL/dy)**2], [N], the mean squares of the gradients at its outputs. The loss L is that of tokens that are drawn
from the model's own predictions, so the mean products of such gradients are the Fisher information, and g_i H is about
its block that belongs to row i of W, as in K-FAC (Martens and Grosse, arXiv:1503.05671). In a pass with gradients
it is also known how much each input counts for the loss: the squares of the gradients at all outputs that it makes.

Products are recorded where torch computes them, so no architecture needs a rule of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pqweights.calibrate.collecting import ProductSums, VectorInputs
from pqweights.calibrate.layered import ModelMatrix, StoredMatrices
from pqweights.formats.column_encoding import DAMPING, best_damping, moment_blocks
from pqweights.planning.inputs import WeightInputs

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Of every third batch the last so many inputs, a window, show which damping suits an H of the others.
HELD_BACK, HELD_EVERY = 256, 3
# Of fewer inputs than channels, H counts as if so many more had been read, of the same sizes and without correlations:
# few of many channels show correlations that are not there (Ledoit and Wolf, J. of Multivariate Analysis 88, 2004).
UNCORRELATED = 64


class InputMoments:
    """The moments of inputs x of K channels, of many channels in blocks on its diagonal.

    Rows of zeros are left out: some models compute with them for the tokens that an expert does not get.

    parts: the channels of each block
    """

    def __init__(self, parts: Sequence[slice]) -> None:
        self.count = 0
        self._sums = ProductSums(parts)
        self._batches = 0
        self._held: list[Tensor] = []

    @property
    def parts(self) -> Sequence[slice]:
        """The channels of each block."""
        return self._sums.parts

    def add(self, rows: Tensor, counts: Tensor) -> None:
        """Add inputs, [rows, K], all of which count alike: with `counts`, masters of 3 bits diverge 1.3 times more."""
        del counts
        used = are_used(rows)
        rows = rows if used.all() else rows[used]
        self._sums.add(rows)
        self._batches += 1
        if self._batches % HELD_EVERY == 0:
            self._held.append(rows[-HELD_BACK:])
        self.count += len(rows)

    def include(self, other: InputMoments) -> None:
        """Add the inputs that others have, of which none are left out to find a damping."""
        self.count += other.count
        self._sums.include(other._sums.blocks)

    def damping(self) -> float:
        """Return the damping of H that suits inputs that are left out of it; the usual one if there are none."""
        held = torch.cat(self._held) if self._held else torch.empty(0, 0)
        if not len(held):
            return DAMPING
        others = ProductSums(self.parts)
        others.add(held)
        seen = [
            (total - own).div_(self.count - len(held))
            for total, own in zip(self._sums.blocks, others.blocks, strict=True)
        ]
        return best_damping([block.numpy() for block in seen], [held[:, part].numpy() for part in self.parts])

    def mean(self) -> list[Tensor]:
        """Return the blocks of H, off their diagonals shrunk for few inputs; what was added is forgotten."""
        result, self._sums = self._sums.blocks, ProductSums(self.parts)
        added = UNCORRELATED if self.count < self.parts[-1].stop else 0
        for block in result:
            squares = block.diagonal() / self.count
            block.div_(self.count + added)
            block.diagonal().copy_(squares)
        return result


OfInputs = TypeVar("OfInputs", bound=InputMoments | VectorInputs)  # what is collected of a vector of inputs


@dataclass(eq=False)
class ProductStatistics:
    """What is known of one matrix.

    vector: the number of what is collected; matrices that multiply the same inputs share it
    along_rows: whether the model stores the matrix as [N, K], not as [K, N]
    makes_logits: whether its outputs are the model's predictions
    squares: the sums of squares of the gradients over all rows of outputs, [N]
    input_squares: the sums of squares of its inputs, each times those of the gradients at its outputs, [K]
    counted: the sum of the latter
    """

    vector: int
    along_rows: bool
    makes_logits: bool = False
    squares: Tensor | None = None
    input_squares: Doubles | None = None
    counted: float = 0.0

    def add(self, inputs: Tensor, counts: Tensor) -> None:
        """Add the squares of inputs [rows, K]. counts: of the gradients at its outputs, [rows]"""
        squares = (counts @ inputs.square()).double().numpy()
        self.input_squares = squares if self.input_squares is None else self.input_squares + squares
        self.counted += float(counts.sum(dtype=torch.float64))


@dataclass(eq=False)
class InputsRead:
    """Inputs that some matrices have read in this batch.

    values: kept, so that no other tensor has their place
    vector: the number of what is collected of them
    by: the first of the matrices
    counts: how much each row counts, [rows]: the squares of the gradients at its outputs; None without gradients
    """

    values: Tensor
    vector: int
    by: ModelMatrix
    counts: Tensor | None = None


def are_used(rows: Tensor) -> Tensor:
    """Return which rows are not zero, [rows]; faster than `any`."""
    return rows.abs().amax(1) != 0


def moments_of_inputs(size: int) -> InputMoments:
    """Return the moments of inputs of so many channels, of which nothing is known yet."""
    return InputMoments(moment_blocks(size))


# Functions that multiply: the names of their arguments up to the two that are multiplied, and the axis of the second
# one that is summed over.
_PRODUCTS: dict[Any, tuple[tuple[str, ...], int]] = {
    torch.nn.functional.linear: (("input", "weight"), -1),
    torch.matmul: (("input", "other"), -2),
    torch.Tensor.matmul: (("self", "other"), -2),
    torch.Tensor.__matmul__: (("self", "other"), -2),
    torch.mm: (("input", "mat2"), -2),
    torch.Tensor.mm: (("self", "mat2"), -2),
    torch.bmm: (("input", "mat2"), -2),
    torch.Tensor.bmm: (("self", "mat2"), -2),
    torch.addmm: (("input", "mat1", "mat2"), -2),
}
_LOOK_UPS: dict[Any, tuple[tuple[str, ...], int]] = {torch.nn.functional.embedding: (("input", "weight"), -1)}


@dataclass(eq=False)
class LayerStatistics(TorchFunctionMode, Generic[OfInputs]):
    """Records the products with some parameters, which are in memory, while layers compute; a context.

    parameters: which, by name: matrices, or stacks of them [experts, ...]
    new: makes what collects the inputs of a vector with so many channels
    head: the parameter whose products are the model's predictions
    looks_up: whether look-ups are recorded instead, with the gradients at their rows as inputs that count alike: an
        error of a row costs the square of its product with them
    known_counts: how much inputs count, as `counts` of a pass with gradients; None: by the gradients of this one
    counts: how much the inputs counted that a matrix was the first to read in a batch
    collected: of each vector of inputs, by number
    mixed: the vectors that matrices read which read the same in one batch, and not in another; these are not known
    products: what is known of each matrix that was multiplied by
    """

    parameters: Mapping[str, torch.nn.Parameter]
    new: Callable[[int], OfInputs]
    head: str | None = None
    looks_up: bool = False
    known_counts: Mapping[str, Tensor] | None = None
    counts: dict[str, Tensor] = field(default_factory=dict)
    collected: dict[int, OfInputs] = field(default_factory=dict)
    mixed: set[int] = field(default_factory=set)
    products: dict[ModelMatrix, ProductStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._matrices: dict[int, ModelMatrix] = {}  # by their address
        for name, parameter in self.parameters.items():
            stack = parameter if parameter.ndim == 3 else parameter[None]
            self._matrices |= {matrix.data_ptr(): ModelMatrix(name, number) for number, matrix in enumerate(stack)}
        self._inputs: list[InputsRead] = []
        self._batches = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call of any function of torch, and pass it on."""
        result = func(*args, **(kwargs or {}))
        if func in (_LOOK_UPS if self.looks_up else _PRODUCTS):
            names, axis = (_LOOK_UPS | _PRODUCTS)[func]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            values, weight = (given.get(name) for name in names[-2:])
            if not isinstance(values, Tensor) or not isinstance(weight, Tensor):
                return result
            if self.looks_up:
                for matrix, _ in self._matrices_of(weight, values):
                    result.requires_grad_().register_hook(functools.partial(self._add_looked_up, matrix))
            else:
                # The strides tell, because transposed views have the address of their parameter.
                along_rows = weight.ndim > 1 and (axis == -1) == (weight.stride(-1) == 1)
                for matrix, of_stack in self._matrices_of(weight, values):
                    inputs = values if of_stack is None else values[of_stack]
                    product, read = self._record(matrix, inputs, along_rows)
                    if result.requires_grad:
                        used = are_used(inputs.detach().reshape(-1, inputs.shape[-1]))
                        result.register_hook(functools.partial(self._add_gradient, product, read, of_stack, used))
        return result

    def next_batch(self) -> None:
        """Collect the inputs of a batch, of which all gradients are there."""
        times = Counter[ModelMatrix]()
        for read in self._inputs:
            rows = read.values.detach().reshape(-1, read.values.shape[-1])
            counts = torch.ones(len(rows)) if read.counts is None else read.counts
            key = f"{self._batches}:{times[read.by]}:{read.by.expert}:{read.by.parameter}"
            times[read.by] += 1
            if self.known_counts is not None:
                counts = self.known_counts.get(key, counts[:0])
                if len(counts) != len(rows):  # a token went to another expert, which rounding may cause
                    counts = counts.mean().nan_to_num().expand(len(rows))
            self.counts[key] = counts
            self.collected[read.vector].add(rows, counts)
        self._inputs.clear()
        self._batches += 1

    def mean_squares(self, matrix: ModelMatrix, tokens: int) -> Doubles | None:
        """Return g of a matrix for each token of the sample, [N]; None if no gradient reached its outputs.

        tokens: of the sample. An expert has outputs for some of them, and counts for nothing in the others.
        """
        squares = self.products[matrix].squares if matrix in self.products else None
        return None if squares is None or not squares.any() else (squares / tokens).double().numpy()

    def along_rows(self, parameter: str) -> bool:
        """Whether the model stores a parameter by which it multiplied as [..., N, K], not as [..., K, N]."""
        return next(product.along_rows for matrix, product in self.products.items() if matrix.parameter == parameter)

    def collected_of(self, matrix: ModelMatrix) -> OfInputs | None:
        """Return what is collected of the inputs of a matrix; None if nothing is known."""
        product = self.products.get(matrix)
        return None if product is None or product.vector in self.mixed else self.collected.get(product.vector)

    def inputs(self) -> Iterator[tuple[list[ModelMatrix], OfInputs]]:
        """Yield the matrices that multiply the same inputs, and what was collected of these, once."""
        for vector in sorted(self.collected.keys() - self.mixed):
            collected = self.collected.pop(vector)
            matrices = [matrix for matrix, product in self.products.items() if product.vector == vector]
            yield matrices, collected

    def _add_looked_up(self, matrix: ModelMatrix, gradient: Tensor) -> None:
        gradients = gradient.detach().reshape(-1, gradient.shape[-1])
        product, read = self._record(matrix, gradients, along_rows=True)
        read.counts = torch.ones(len(gradients))
        product.add(gradients, read.counts)

    def _matrices_of(self, weight: Tensor, values: Tensor) -> list[tuple[ModelMatrix, int | None]]:
        """Return which matrices a weight is; of a whole stack each with the number of its inputs and outputs."""
        first = self._matrices.get(weight.data_ptr())
        if first is None:
            return []
        parameter = self.parameters[first.parameter]
        if weight.ndim == 2 and weight.numel() == parameter.shape[-2] * parameter.shape[-1]:
            return [(first, None)]
        if weight.ndim == values.ndim == 3 and weight.numel() == parameter.numel() and len(values) == len(weight):
            return [(ModelMatrix(first.parameter, number), number) for number in range(len(weight))]
        return []

    def _record(self, matrix: ModelMatrix, values: Tensor, along_rows: bool) -> tuple[ProductStatistics, InputsRead]:
        product = self.products.get(matrix)
        known = next((read for read in self._inputs if _same_place(read.values, values)), None)
        if product is None:
            vector = len(self.collected) if known is None else known.vector
            product = self.products[matrix] = ProductStatistics(vector, along_rows, matrix.parameter == self.head)
        if known is None or known.vector != product.vector:
            if any(read.vector == product.vector and read.by != matrix for read in self._inputs):
                self.mixed.add(product.vector)
            if product.vector not in self.collected:
                self.collected[product.vector] = self.new(values.shape[-1])
            known = InputsRead(values, product.vector, matrix)
            self._inputs.append(known)
        return product, known

    @staticmethod
    def _add_gradient(
        product: ProductStatistics, read: InputsRead, of_stack: int | None, used: Tensor, gradient: Tensor
    ) -> None:
        """Add the gradients at outputs. used: which inputs are not zero, so that an error of the weight shows there"""
        own = gradient.detach() if of_stack is None else gradient.detach()[of_stack]
        rows = own.reshape(-1, own.shape[-1])
        counts = counts_of(rows)
        read.counts = counts if read.counts is None else read.counts + counts
        product.add(read.values.detach().reshape(-1, read.values.shape[-1]), counts)
        rows = rows if used.all() else rows[used]
        squares = expected_squares(rows) if product.makes_logits else rows.square().sum(0)
        product.squares = squares if product.squares is None else product.squares + squares


def counts_of(gradients: Tensor) -> Tensor:
    """Return how much inputs count by the gradients at the outputs of a matrix, [rows, N]: [rows]."""
    lengths: Tensor = torch.linalg.vector_norm(gradients, dim=1)
    return lengths.square()


def expected_squares(gradients: Tensor) -> Tensor:
    """Return the sums over rows of the mean squares of gradients at logits over all labels, [vocabulary].

    gradients: [rows, vocabulary], of cross entropies with drawn labels. They are p for a token, and p - 1 for the
    label, so their squares are p (1 - p) in the mean, which is |g| (1 - |g|) for both: nearly all tokens are no label
    of a sample, and still known by their p. Of a model that scales its logits, the mean square of all together stays
    that of the gradients.
    """
    sizes = gradients.abs()
    expected = sizes.addcmul_(sizes, sizes, value=-1).clamp_(min=0).sum(0)
    squares = float(torch.linalg.vector_norm(gradients, dim=-1).double().square().sum())
    total = float(expected.sum(dtype=torch.float64))
    return expected.mul_(squares / total if total else 0.0)


def weight_inputs(
    stored: StoredMatrices, number_of: Mapping[ModelMatrix, int], products: Mapping[ModelMatrix, ProductStatistics]
) -> WeightInputs | None:
    """Return which vectors a weight of the checkpoint reads; None if no product with it was seen.

    number_of: the number of the vector that a matrix of the model reads
    """
    known = [matrix for matrix in stored.matrices if matrix in number_of]
    if not known:
        return None
    transposed = products[known[0]].along_rows == stored.transposed
    return WeightInputs(vectors=tuple(map(number_of.get, stored.matrices)), transposed=transposed)


def _same_place(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
