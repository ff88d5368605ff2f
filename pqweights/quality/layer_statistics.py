"""What is known of the weights of a layer from a sample of tokens: moments of inputs, and gradients at outputs.

Of a weight W [N, K] in a product y = W x: H = E[x x'], [K, K], the second moments of its inputs; and
g = E[(dL/dy)**2], [N], the mean squares of the gradients at its outputs. The loss L is that of tokens that are drawn
from the model's own predictions, so the mean products of such gradients are the Fisher information, and g_i H is about
its block that belongs to row i of W, as in K-FAC (Martens and Grosse, arXiv:1503.05671).

Products are recorded where torch computes them, so no architecture needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Doubles = npt.NDArray[np.float64]


@dataclass(eq=False)
class ProductStatistics:
    """What is known of one weight.

    vector: the number of the moments; weights that read the same share them
    squares: the sums of squares of the gradients over all rows of outputs, [N]
    rows: how many rows of outputs had gradients
    """

    vector: int
    squares: Tensor | None = None
    rows: int = 0


@dataclass(eq=False)
class LayerStatistics(TorchFunctionMode):
    """Records the products with some parameters while layers compute; a context.

    parameters: which, by name
    moments: the sums of x x' of each vector of inputs, [K, K], by number
    rows: the rows of inputs in each sum
    mixed: the vectors that weights read which read the same in one batch, and not in another; these are not known
    products: what is known of each parameter that was multiplied by, by name
    """

    parameters: Mapping[str, torch.nn.Parameter]
    moments: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    mixed: set[int] = field(default_factory=set)
    products: dict[str, ProductStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        # What was added in this batch, to which vector, by which weight; kept, so that no other tensor has its place.
        self._inputs: list[tuple[Tensor, int, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call of any function of torch, and pass it on."""
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            name = self._names.get(id(given["weight"]))
            if name is not None:
                self._record(name, given["input"].detach(), result)
        return result

    def next_batch(self) -> None:
        """Forget which inputs were the same tensors."""
        self._inputs.clear()

    def mean_moments(self, name: str) -> Tensor:
        """Return H of a weight, [K, K]."""
        vector = self.products[name].vector
        return self.moments[vector] / self.rows[vector]

    def mean_squares(self, name: str) -> Doubles | None:
        """Return g of a weight, [N]; None if no gradient reached its outputs."""
        product = self.products[name]
        return None if product.squares is None else (product.squares / product.rows).double().numpy()

    def is_known(self, name: str) -> bool:
        """Whether moments and gradients of a weight are known, and not all zero."""
        product = self.products.get(name)
        if product is None or product.vector in self.mixed or product.squares is None:
            return False
        return bool(product.squares.any()) and bool(self.moments[product.vector].diagonal().any())

    def _record(self, name: str, values: Tensor, result: Tensor) -> None:
        rows = values.reshape(-1, values.shape[-1])
        product = self.products.get(name)
        known = next((vector for other, vector, _ in self._inputs if _same_place(other, values)), None)
        if product is None:
            product = self.products[name] = ProductStatistics(len(self.moments) if known is None else known)
        if known != product.vector:
            if any(vector == product.vector and by != name for _, vector, by in self._inputs):
                self.mixed.add(product.vector)
            if product.vector not in self.moments:
                self.moments[product.vector] = torch.zeros(rows.shape[1], rows.shape[1])
                self.rows[product.vector] = 0
            self.moments[product.vector].addmm_(rows.T, rows)
            self.rows[product.vector] += len(rows)
            self._inputs.append((values, product.vector, name))
        if result.requires_grad:
            result.register_hook(lambda gradient: self._add_gradient(product, gradient))

    @staticmethod
    def _add_gradient(product: ProductStatistics, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1])
        squares = rows.square().sum(0)
        product.squares = squares if product.squares is None else product.squares + squares
        product.rows += len(rows)


def _same_place(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
