"""Plans for given bit widths: tensors that differ in name alone are planned once, whatever the bit width."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.planning.decisions import Decision
from pqweights.planning.plan import TensorPlan

Rates = Mapping[str, float | None]  # bit width by weight; None: the weight is kept
# The rate that is chosen in place of the one of the decision, if any.
Chosen = tuple[float | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RatePlanner:
    """What becomes of the tensors of a checkpoint with any bit widths.

    tensors: the tensors
    decisions: what the recipe decides about each
    scaled: the weights whose input channels are scaled
    nameless: returns the plan of a tensor with an empty name: by its decision, a chosen rate, and whether it is scaled
    """

    tensors: Sequence[LogicalTensor]
    decisions: Sequence[Decision]
    scaled: Collection[str]
    nameless: Callable[[LogicalTensor, Decision, Chosen, bool], TensorPlan]
    _made: dict[tuple[int, Chosen], TensorPlan] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[int]:
        """The number of each tensor's kind: all that its plan depends on but name and bit width."""
        numbers: dict[tuple[object, ...], int] = {}
        return [
            numbers.setdefault(
                (decision, tensor.shape, tensor.dtype, tensor.plain_dtype, tensor.name in self.scaled), len(numbers)
            )
            for tensor, decision in zip(self.tensors, self.decisions, strict=True)
        ]

    @cached_property
    def kind_of(self) -> dict[str, int]:
        """The number of the kind by the name of the tensor."""
        return {tensor.name: kind for tensor, kind in zip(self.tensors, self.kinds, strict=True)}

    @cached_property
    def free(self) -> frozenset[str]:
        """The weights whose bit width the recipe leaves free."""
        pairs = zip(self.tensors, self.decisions, strict=True)
        return frozenset(tensor.name for tensor, decision in pairs if decision.free and decision.codec is not None)

    def is_free(self, kind: int) -> bool:
        """Whether the bit width of a kind is free."""
        decision = self.decisions[self._first[kind]]
        return decision.free and decision.codec is not None

    @cached_property
    def _first(self) -> dict[int, int]:
        """The place of the first tensor of each kind."""
        places: dict[int, int] = {}
        for place, kind in enumerate(self.kinds):
            places.setdefault(kind, place)
        return places

    def of_kind(self, kind: int, chosen: Chosen) -> TensorPlan:
        """Return the plan of a kind of tensors, with an empty name; a chosen rate counts only if it is free."""
        place = self._first[kind]
        decision = self.decisions[place]
        chosen = chosen if decision.free else ()
        made = self._made.get((kind, chosen))
        if made is None:
            tensor = self.tensors[place]
            made = self.nameless(tensor, decision, chosen, tensor.name in self.scaled)
            self._made[kind, chosen] = made
        return made

    def planned(self, rates: Rates) -> list[TensorPlan]:
        """Plan all tensors by the recipe's decisions, with the given bit widths for those that it leaves free."""
        return [
            self.of_kind(kind, (rates[tensor.name],) if tensor.name in rates else ()).named(tensor.name)
            for tensor, kind in zip(self.tensors, self.kinds, strict=True)
        ]
