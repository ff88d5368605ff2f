"""The multiple-choice knapsack: one choice for each group, with the least total loss for a total cost within a budget.

Costs are integers and counted exactly. If choices could be mixed, taking the steps along the groups' lower convex
envelopes that save most for a byte would be best (Sinha and Zoltners, The multiple-choice knapsack problem, 1979). That
gives an answer and a bound. Better answers are searched with lists of undominated states (Nemhauser and Ullmann, 1969),
of which the bound discards most, and MOST_STATES the rest: a thousand groups take seconds, and the loss is that of the
optimum or within about a hundred-thousandth of it. The answer is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# An answer is not improved if its loss is at most this share above the bound.
TOLERANCE = 1e-6
# Of more states than this, those with the least excess are kept.
MOST_STATES = 2_000
# How often the budget is corrected to meet a size, and halved to meet a loss.
MOST_ROUNDS, HALVINGS = 8, 12

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """One choice of a group. cost: in bytes. loss: 0 or more."""

    cost: int
    loss: float


class Solution(NamedTuple):
    """An answer. choices: the choice of each group, by its index. cost, loss: their totals."""

    choices: tuple[int, ...]
    cost: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The undominated choices of a group: their costs rise, and their losses fall.

    numbers: their indices in the group
    costs, losses: those of each choice
    """

    numbers: list[int]
    costs: Ints
    losses: Doubles


def cheapest(groups: Sequence[Sequence[Choice]]) -> int:
    """Return the least possible cost."""
    return sum(min(choice.cost for choice in group) for group in groups)


def solve(groups: Sequence[Sequence[Choice]], budget: int) -> Solution | None:
    """Return the choices of least loss that cost at most `budget`; None if even the cheapest cost more.

    Among choices of a group with equal losses the cheapest is taken, and among those with equal costs, too, the first.
    """
    if cheapest(groups) > budget:
        return None
    reduced = [_undominated_choices(group) for group in groups]
    indices, price, bound = _relaxed(reduced, budget)
    loss = _loss(reduced, indices)
    if loss - bound > TOLERANCE * loss:
        better = _searched(reduced, budget, price=price, slack=loss - bound)
        if better is not None and _loss(reduced, better) < loss:
            indices = better
    return Solution(
        choices=tuple(group.numbers[at] for group, at in zip(reduced, indices, strict=True)),
        cost=sum(int(group.costs[at]) for group, at in zip(reduced, indices, strict=True)),
        loss=_loss(reduced, indices),
    )


def best_within(groups: Sequence[Sequence[Choice]], limit: int, size: Callable[[Solution], int]) -> Solution:
    """Return the choices of least loss whose size is within a limit; those of the least cost if there are none.

    size: returns the size of a solution, of which its cost is all but a little: the headers of files depend on what
        they hold, so the budget is corrected by the size that a solution turns out to have
    """
    best = solution = solve(groups, cheapest(groups))
    assert solution is not None and best is not None
    measured, tried = size(solution), set[int]()
    while len(tried) < MOST_ROUNDS:
        budget = limit - (measured - solution.cost)
        within = None if budget in tried else solve(groups, budget)
        if within is None:
            break
        tried.add(budget)
        solution, measured = within, size(within)
        if solution.loss <= best.loss and measured <= limit:
            best = solution
    return best


def least_cost(groups: Sequence[Sequence[Choice]], limit: float) -> Solution | None:
    """Return the choices of least cost whose loss is at most `limit`; None if even the least loss is above it.

    The cost is that of the optimum or, as of `solve`, about a hundred-thousandth above it.
    """
    low, high = (
        cheapest(groups),
        sum(min(group, key=lambda choice: (choice.loss, choice.cost)).cost for group in groups),
    )
    best = solve(groups, low)
    assert best is not None
    if best.loss <= limit:
        return best
    best = solve(groups, high)
    if best is None or best.loss > limit:
        return None
    for _ in range(HALVINGS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        found = solve(groups, middle)
        if found is None or found.loss > limit:
            low = middle
        else:
            best, high = found, found.cost
    return best


def _undominated_choices(group: Sequence[Choice]) -> _Group:
    """Drop the choices that neither cost less nor lose less than another."""
    numbers: list[int] = []
    for n in sorted(range(len(group)), key=lambda n: (group[n].cost, group[n].loss, n)):
        if not numbers or group[n].loss < group[numbers[-1]].loss:
            numbers.append(n)
    return _Group(
        numbers=numbers,
        costs=np.array([group[n].cost for n in numbers], dtype=np.int64),
        losses=np.array([group[n].loss for n in numbers]),
    )


def _loss(groups: Sequence[_Group], indices: Sequence[int]) -> float:
    return math.fsum(float(group.losses[at]) for group, at in zip(groups, indices, strict=True))


def _relaxed(groups: Sequence[_Group], budget: int) -> tuple[list[int], float, float]:
    """Solve the problem in which choices may be mixed.

    Return the choices at the last corner of its envelope that costs at most `budget`, what a byte more would save
    there, and the least loss.
    """
    steps = sorted((-saved, number, at) for number, group in enumerate(groups) for saved, at in _steps(group))
    indices, left = [0] * len(groups), budget - sum(int(group.costs[0]) for group in groups)
    for negative, number, at in steps:
        cost = int(groups[number].costs[at] - groups[number].costs[indices[number]])
        if cost > left:
            return indices, -negative, _loss(groups, indices) + negative * left
        indices[number], left = at, left - cost
    return indices, 0.0, _loss(groups, indices)


def _steps(group: _Group) -> list[tuple[float, int]]:
    """Return the steps along the lower convex envelope: what each saves for a byte, and the choice it leads to."""
    hull: list[tuple[float, int]] = [(math.inf, 0)]
    for at in range(1, len(group.costs)):
        while True:
            before = hull[-1][1]
            saved = float(group.losses[before] - group.losses[at]) / int(group.costs[at] - group.costs[before])
            if saved < hull[-1][0]:
                break
            hull.pop()
        hull.append((saved, at))
    return hull[1:]


def _searched(groups: Sequence[_Group], budget: int, *, price: float, slack: float) -> list[int] | None:
    """Return the best choices within the budget among those that are kept; None if there are none.

    price: what a byte costs, in loss
    slack: the excess of better choices is less than this; the excess of a choice is by how much its loss and the price
        of its bytes are above the least of its group
    """
    priced = [group.losses + price * group.costs for group in groups]
    excesses = [values - values.min() for values in priced]
    limit = slack * (1 + 1e-9) + 1e-12  # as sums are rounded
    near = [np.flatnonzero(excess <= limit) for excess in excesses]
    # The largest groups first: small ones then fill what is left.
    order = sorted(range(len(groups)), key=lambda n: -int(groups[n].costs[near[n][-1]] - groups[n].costs[near[n][0]]))
    least_rest = sum(int(group.costs[choices[0]]) for group, choices in zip(groups, near, strict=True))
    costs, losses, excess = np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1)
    history: list[tuple[Ints, Ints]] = []  # of each state, the state that it came from, and the choice
    for number in order:
        group, choices = groups[number], near[number]
        least_rest -= int(group.costs[choices[0]])
        costs = (costs[:, None] + group.costs[choices]).reshape(-1)
        losses = (losses[:, None] + group.losses[choices]).reshape(-1)
        excess = (excess[:, None] + excesses[number][choices]).reshape(-1)
        alive = np.flatnonzero((costs + least_rest <= budget) & (excess <= limit))
        alive = _undominated_states(alive, costs, losses)
        if len(alive) > MOST_STATES:
            alive = np.sort(alive[np.argsort(excess[alive], kind="stable")[:MOST_STATES]])
        history.append((alive // len(choices), choices[alive % len(choices)]))
        costs, losses, excess = costs[alive], losses[alive], excess[alive]
    if not len(losses):
        return None
    indices, state = [0] * len(groups), int(np.argmin(losses))
    for number, (parents, chosen) in zip(reversed(order), reversed(history), strict=True):
        indices[number], state = int(chosen[state]), int(parents[state])
    return indices


def _undominated_states(states: Ints, costs: Ints, losses: Doubles) -> Ints:
    """Return the states that lose less than every cheaper one, by rising cost."""
    states = states[np.lexsort((states, losses[states], costs[states]))]
    better = np.ones(len(states), dtype=np.bool_)
    better[1:] = losses[states][1:] < np.minimum.accumulate(losses[states])[:-1]
    return states[better]
