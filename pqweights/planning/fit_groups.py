"""The groups of weights that a fit gives bit widths to, and what every bit width of each costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import NamedTuple

from pqweights.checkpoint.header import entry_bytes
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.planning.decisions import RatePlanner
from pqweights.planning.knapsack import Choice
from pqweights.planning.plan import QUANTIZE, coder_of
from pqweights.planning.sensitivity_file import Sensitivity, alphas_for, groups_of


class RateOption(NamedTuple):
    """One bit width of one group.

    bits: None if the whole group is kept
    bytes: size of the group's data
    header_bytes: size of its entries in headers
    error: mean relative error of the group
    """

    bits: float | None
    bytes: int
    header_bytes: int
    error: float


class _Alike(NamedTuple):
    """Weights of a group whose plans differ in their names alone.

    kind: the number that RatePlanner has for them
    tensors: how many there are
    name_bytes: the length of all their names in a header
    """

    kind: int
    tensors: int
    name_bytes: int


@dataclass(frozen=True, kw_only=True)
class FreeGroup:
    """Weights that get one bit width together, with all bit widths that they may get.

    name, weights: its name, and those of its weights
    parameters: number of elements
    alpha: sensitivity, in nats per token for a relative squared error of 1
    members: its weights
    any_rate: whether a codec of its weights has all rates between those that are listed
    options: its bit widths, ascending, then that it is kept
    """

    name: str
    weights: tuple[str, ...]
    parameters: int
    alpha: float
    members: tuple[_Alike, ...]
    any_rate: bool
    options: tuple[RateOption, ...]

    def choices(self, *, with_headers: bool) -> list[Choice]:
        """Return the options as those of a knapsack. with_headers: whether entries in headers cost something."""
        return [Choice(o.bytes + with_headers * o.header_bytes, self.alpha * o.error) for o in self.options]

    def with_finer_rates(self, chosen: int, step: float, planner: RatePlanner) -> FreeGroup:
        """Return the group with multiples of `step` between a chosen option and the next, and with no others.

        A group without such rates has the chosen option alone.
        """
        here, above = self.options[chosen], self.options[chosen + 1 : chosen + 2]
        low, high = here.bits, above[0].bits if above else None
        if not self.any_rate or low is None or high is None:
            return replace(self, options=(here,))
        numbers = range(math.floor(low / step), math.ceil(high / step) + 1)
        finer = [bits for number in numbers if low < (bits := round(number * step, 3)) < high]
        between = [_rate_option(bits, self.members, planner) for bits in finer]
        return replace(self, options=(here, *between, *above) if between else (here,))


def free_groups(
    checkpoint: Checkpoint, *, sensitivity: Sensitivity | None, planner: RatePlanner
) -> tuple[list[FreeGroup], list[str]]:
    """Return every group with its options, and the names of the groups that the sensitivity file does not have."""
    # Weights whose bit width a rule fixes are included: they contribute to the loss, and belong to groups.
    by_name = {t.name: t for t in planner.planned({}) if t.name in planner.free or t.action == QUANTIZE}
    roles = {t.name: t.role for t in by_name.values()}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas, unknown = alphas_for(groups, roles=roles, known=sensitivity)
    codec_of = {name: get_codec(by_name[name].codec or "") for name in planner.free}
    rates = sorted({bits for codec in codec_of.values() for bits in codec.rates})
    result = []
    for name, names in groups.items():
        members = _alike(names, planner)
        group = FreeGroup(
            name=name,
            weights=tuple(names),
            parameters=sum(by_name[weight].weights for weight in names),
            alpha=alphas[name],
            members=members,
            any_rate=any(codec_of[weight].any_rate for weight in names if weight in codec_of),
            options=tuple(_rate_option(bits, members, planner) for bits in [*rates, None]),
        )
        result.append(group)
    return result, unknown


def _alike(names: Sequence[str], planner: RatePlanner) -> tuple[_Alike, ...]:
    by_kind: dict[int, list[str]] = {}
    for name in names:
        by_kind.setdefault(planner.kind_of[name], []).append(name)
    return tuple(
        _Alike(kind, len(alike), sum(len(encode_basestring(name).encode()) for name in alike))
        for kind, alike in by_kind.items()
    )


def _rate_option(asked: float | None, members: Sequence[_Alike], planner: RatePlanner) -> RateOption:
    """Return what the weights of a group come to when the free ones are planned with this rate, or kept if None."""
    byte_count = header_bytes = weights = 0
    errors, free_bits, fixed_bits = [], set[float | None](), set[float | None]()
    for kind, tensors, name_bytes in members:
        plan = planner.of_kind(kind, (asked,))
        (free_bits if planner.is_free(kind) else fixed_bits).add(plan.bits)
        byte_count += tensors * plan.bytes
        # A file's header has an entry for every stored tensor.
        header_bytes += tensors * sum(entry_bytes(spec.dtype, spec.shape) + len(spec.name) for spec in plan.stored)
        header_bytes += len(plan.stored) * name_bytes
        weights += tensors * plan.weights
        errors.append(0.0 if plan.codec is None else tensors * plan.weights * coder_of(plan).distortion)
    # Codecs that lack a rate take their nearest.
    given = (free_bits or fixed_bits) - {None}
    bits = given.pop() if len(given) == 1 else asked if given else None
    return RateOption(bits, byte_count, header_bytes, math.fsum(errors) / weights)
