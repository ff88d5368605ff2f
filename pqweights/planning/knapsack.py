"""The multiple-choice knapsack: one choice for each group, with the least total loss for a total cost within a budget.

Costs are integers and counted exactly. First, choices are discarded by the Lagrangian bound (Sinha and Zoltners, The
multiple-choice knapsack problem, 1979), which leaves few near the margin. Then a dynamic program over lists of
undominated states (Nemhauser and Ullmann, 1969), bounded in the same way, solves what is left. The answer is the
optimum up to TOLERANCE, and the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# A state is dropped unless its bound is better than the best answer by this share.
TOLERANCE = 1e-6
MOST_TOLERANCE = 1e-3
# If more states than this are alive, the tolerance grows tenfold.
MOST_STATES = 200_000

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """One choice of a group. cost: in bytes. loss: 0 or more."""

    cost: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An answer.

    choices: the choice of each group, by its index
    cost, loss: their totals
    bound: no choices within the budget lose less
    """

    choices: tuple[int, ...]
    cost: int
    loss: float
    bound: float

    @property
    def gap(self) -> float:
        """The share by which the loss is at most above the optimum."""
        return (self.loss - self.bound) / self.loss if self.loss > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The undominated choices of a group: their costs rise, and their losses fall.

    numbers: their indices in the group
    costs, losses: those of each choice
    hull: the choices on the lower convex envelope, by their index here
    """

    numbers: Ints
    costs: Ints
    losses: Doubles
    hull: tuple[int, ...]


def cheapest(groups: Sequence[Sequence[Choice]]) -> int:
    """Return the least possible cost."""
    return sum(min(choice.cost for choice in group) for group in groups)


def solve(groups: Sequence[Sequence[Choice]], budget: int) -> Solution | None:
    """Return the choices of least loss that cost at most `budget`; None if even the cheapest cost more.

    Among choices of a group with equal losses the cheapest is taken, and among those with equal costs, too, the first.
    """
    if cheapest(groups) > budget:
        return None
    reduced = [_reduce(group) for group in groups]
    envelope = _Envelope(reduced)
    slope, bound = envelope.at(budget)
    best = _improved(reduced, envelope.below(budget), budget)
    best_loss = _loss(reduced, best)
    tolerance = TOLERANCE
    while True:
        limit = best_loss * (1 - tolerance)
        kept = [_near(group, slope, limit - bound) for group in reduced]
        searched = _search(reduced, kept, budget=budget, limit=limit)
        if searched is not None:
            break
        tolerance *= 10
        if tolerance > MOST_TOLERANCE:  # never observed; the bound of the relaxed problem then tells the gap
            searched, tolerance = [], 1.0
            break
    # What the search finds is the optimum; if it finds nothing, nothing is better by more than the tolerance.
    bound = max(bound, best_loss * (1 - tolerance))
    if searched:
        best, bound = searched, _loss(reduced, searched)
    loss = _loss(reduced, best)
    return Solution(
        choices=tuple(int(group.numbers[at]) for group, at in zip(reduced, best, strict=True)),
        cost=sum(int(group.costs[at]) for group, at in zip(reduced, best, strict=True)),
        loss=loss,
        bound=min(bound, loss),
    )


def curve(groups: Sequence[Sequence[Choice]], budgets: Sequence[int]) -> list[float | None]:
    """Return a lower bound of the loss at each budget, on the convex envelope; None below the least cost."""
    envelope = _Envelope([_reduce(group) for group in groups])
    return [None if budget < envelope.costs[0] else envelope.at(budget)[1] for budget in budgets]


def _reduce(group: Sequence[Choice]) -> _Group:
    """Drop the choices that neither cost less nor lose less than another."""
    order = sorted(range(len(group)), key=lambda n: (group[n].cost, group[n].loss, n))
    numbers: list[int] = []
    for n in order:
        if not numbers or group[n].loss < group[numbers[-1]].loss:
            numbers.append(n)
    hull: list[int] = []
    for at, n in enumerate(numbers):
        while len(hull) > 1:
            before, last = group[numbers[hull[-2]]], group[numbers[hull[-1]]]
            if _rate(before, last) > _rate(last, group[n]):
                break
            hull.pop()
        hull.append(at)
        assert n == numbers[at]
    costs = np.array([group[n].cost for n in numbers], dtype=np.int64)
    losses = np.array([group[n].loss for n in numbers])
    return _Group(numbers=np.array(numbers), costs=costs, losses=losses, hull=tuple(hull))


def _rate(before: Choice, after: Choice) -> float:
    """Return the loss that each byte saves from one choice to a more expensive one."""
    return (before.loss - after.loss) / (after.cost - before.cost)


class _Envelope:
    """The relaxed problem, in which choices may be mixed: the least loss at every cost. Its corners are answers."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        steps = [
            (-(group.losses[a] - group.losses[b]) / int(group.costs[b] - group.costs[a]), place, b)
            for place, group in enumerate(groups)
            for a, b in zip(group.hull, group.hull[1:], strict=False)
        ]
        steps.sort()
        self._groups, self._steps = groups, steps
        costs, losses = [sum(int(g.costs[0]) for g in groups)], [math.fsum(g.losses[0] for g in groups)]
        at = [0] * len(groups)
        for _, place, to in steps:
            group = groups[place]
            costs.append(costs[-1] + int(group.costs[to] - group.costs[at[place]]))
            losses.append(losses[-1] - (group.losses[at[place]] - group.losses[to]))
            at[place] = to
        self.costs, self.losses = costs, losses

    def at(self, budget: int) -> tuple[float, float]:
        """Return what one byte more would save at this cost, and the loss."""
        last = self._before(budget)
        if last == len(self._steps):
            return 0.0, self.losses[-1]
        rate = -self._steps[last][0]
        return rate, self.losses[last] - rate * (budget - self.costs[last])

    def below(self, budget: int) -> list[int]:
        """Return the choices at the last corner that costs at most `budget`."""
        at = [0] * len(self._groups)
        for _, place, to in self._steps[: self._before(budget)]:
            at[place] = to
        return at

    def _before(self, budget: int) -> int:
        return int(np.searchsorted(np.array(self.costs), budget, side="right")) - 1

    def bounds(self, budgets: Ints) -> Doubles:
        """Return the loss at many costs."""
        bounds: Doubles = np.interp(budgets, np.array(self.costs, dtype=np.float64), np.array(self.losses))
        return bounds


def _loss(groups: Sequence[_Group], at: Sequence[int]) -> float:
    return math.fsum(float(group.losses[n]) for group, n in zip(groups, at, strict=True))


def _improved(groups: Sequence[_Group], at: list[int], budget: int) -> list[int]:
    """Spend the rest of the budget on the upgrades that save most, until none fits."""
    at = list(at)
    left = budget - sum(int(group.costs[n]) for group, n in zip(groups, at, strict=True))
    while True:
        saved = [
            (float(group.losses[n] - group.losses[to]), -place, to)
            for place, (group, n) in enumerate(zip(groups, at, strict=True))
            for to in range(n + 1, len(group.costs))
            if int(group.costs[to] - group.costs[n]) <= left
        ]
        if not saved:
            return at
        _, place, to = max(saved)
        left -= int(groups[-place].costs[to] - groups[-place].costs[at[-place]])
        at[-place] = to


def _near(group: _Group, rate: float, slack: float) -> Ints:
    """Return the choices that an answer better than the best one may have: their reduced loss is within the slack."""
    reduced = group.losses + rate * group.costs
    return np.flatnonzero(reduced - reduced.min() <= max(slack, 0.0) + 1e-12 * abs(reduced.min()))


def _search(groups: Sequence[_Group], kept: Sequence[Ints], *, budget: int, limit: float) -> list[int] | None:
    """Return the best answer with a loss below `limit`, empty if there is none; None if there are too many states.

    kept: for each group, the choices to search
    """
    parts = [_part(group, numbers) for group, numbers in zip(groups, kept, strict=True)]
    answer = [int(numbers[0]) for numbers in kept]
    # The largest groups first: the rest is then fine-grained, and its bound is tight.
    open_groups = [place for place, part in enumerate(parts) if len(part.costs) > 1]
    open_groups.sort(key=lambda place: -int(parts[place].costs[-1] - parts[place].costs[0]))
    settled = [part for part in parts if len(part.costs) == 1]
    costs = np.array([sum(int(part.costs[0]) for part in settled)], dtype=np.int64)
    losses = np.array([math.fsum(float(part.losses[0]) for part in settled)])
    history: list[tuple[Ints, Ints]] = []
    for number, place in enumerate(open_groups):
        part, rest = parts[place], _Envelope([parts[other] for other in open_groups[number + 1 :]])
        new_costs = (costs[:, None] + part.costs[None]).reshape(-1)
        new_losses = (losses[:, None] + part.losses[None]).reshape(-1)
        alive = np.flatnonzero(new_costs + rest.costs[0] <= budget)
        alive = alive[new_losses[alive] + rest.bounds(budget - new_costs[alive]) < limit]
        alive = _undominated(alive, new_costs, new_losses)
        if not len(alive):
            return []
        if len(alive) > MOST_STATES:
            return None
        history.append((alive // len(part.costs), alive % len(part.costs)))
        costs, losses = new_costs[alive], new_losses[alive]
    if losses.min() >= limit or costs[0] > budget:
        return []
    state = int(np.argmin(losses))
    for place, (parents, chosen) in zip(reversed(open_groups), reversed(history), strict=True):
        answer[place] = int(kept[place][chosen[state]])
        state = int(parents[state])
    return answer


def _undominated(states: Ints, costs: Ints, losses: Doubles) -> Ints:
    """Return the states that lose less than every cheaper one, by rising cost."""
    states = states[np.lexsort((states, losses[states], costs[states]))]
    better = np.ones(len(states), dtype=np.bool_)
    better[1:] = losses[states][1:] < np.minimum.accumulate(losses[states])[:-1]
    return states[better]


def _part(group: _Group, kept: Ints) -> _Group:
    """Return a group with some of its choices."""
    return _reduce([Choice(int(group.costs[n]), float(group.losses[n])) for n in kept])
