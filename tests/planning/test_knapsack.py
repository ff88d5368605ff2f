"""The knapsack against exhaustive search, and its guarantees for problems that are too large for that."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from closeness import F32_FEW, F64_SUM, approx
from hypothesis import given, settings
from hypothesis import strategies as st

from pqweights.planning.knapsack import Choice, Solution, cheapest, least_cost, solve

Groups = list[list[Choice]]

COSTS = st.integers(0, 60)
LOSSES = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False))
GROUPS = st.lists(st.lists(st.builds(Choice, COSTS, LOSSES), min_size=1, max_size=5), min_size=1, max_size=5)


def combinations(groups: Groups, budget: int) -> list[tuple[float, int]]:
    """Loss and cost of every combination within the budget."""
    return [
        (math.fsum(choice.loss for choice in chosen), sum(choice.cost for choice in chosen))
        for chosen in itertools.product(*groups)
        if sum(choice.cost for choice in chosen) <= budget
    ]


def checked(groups: Groups, solution: Solution | None, budget: int) -> Solution:
    """Check that a solution states its own cost and loss, and return it."""
    assert solution is not None
    chosen = [group[number] for group, number in zip(groups, solution.choices, strict=True)]
    assert solution.cost == sum(choice.cost for choice in chosen) <= budget
    assert solution.loss == approx(math.fsum(choice.loss for choice in chosen), 0, F64_SUM)
    return solution


def layers(count: int, sizes: Sequence[int], seed: int, decay: float = 4.0) -> Groups:
    """Groups like those of a model: seven bit widths, errors that fall by `decay` with each bit, and none if kept."""
    rng = random.Random(seed)
    groups = []
    for number in range(count):
        blocks, alpha = sizes[number % len(sizes)], math.exp(rng.gauss(0, 1.5))
        of_group = [Choice(blocks * (16 * bits + 2), alpha * decay**-bits) for bits in range(2, 9)]
        groups.append([*of_group, Choice(blocks * 256, 0.0)])
    return groups


# --- exhaustive search ---


@settings(max_examples=300, deadline=None)
@given(GROUPS, st.integers(0, 320))
def test_solution_is_the_best_of_all_combinations(groups: Groups, budget: int) -> None:
    allowed = combinations(groups, budget)
    solution = solve(groups, budget)
    if not allowed:
        assert solution is None
        return
    best = min(loss for loss, _ in allowed)
    checked(groups, solution, budget)
    assert solution is not None
    assert solution.loss <= best * (1 + F32_FEW) + F64_SUM


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.floats(0, 40, allow_subnormal=False))
def test_least_cost_is_that_of_all_combinations_with_so_little_loss(groups: Groups, limit: float) -> None:
    costs = [cost for loss, cost in combinations(groups, 10**6) if loss <= limit]
    solution = least_cost(groups, limit)
    if not costs:
        assert solution is None
        return
    best = min(costs)
    assert checked(groups, solution, 10**6).loss <= limit
    assert solution is not None and solution.cost == best


def test_cheapest_is_chosen_without_losses() -> None:
    groups = [[Choice(8, 0.0), Choice(3, 0.0), Choice(3, 0.0)] for _ in range(20)]
    assert solve(groups, 60) == Solution(choices=(1,) * 20, cost=60, loss=0.0)
    assert solve(groups, 10**6) == Solution(choices=(1,) * 20, cost=60, loss=0.0)
    assert solve(groups, 59) is None


# --- order ---


def test_loss_does_not_depend_on_the_order_of_choices_and_groups() -> None:
    groups = layers(40, [3, 8, 8, 1], 5)
    budget = cheapest(groups) * 2
    first = checked(groups, solve(groups, budget), budget)
    rng = random.Random(0)
    for _ in range(4):
        shuffled = [rng.sample(group, len(group)) for group in groups]
        again = checked(shuffled, solve(shuffled, budget), budget)
        assert again.loss == approx(first.loss, F32_FEW)
    backwards = checked(groups[::-1], solve(groups[::-1], budget), budget)
    assert backwards.loss == approx(first.loss, F32_FEW)


# --- many groups ---


KINDS = {
    "like a model": layers(1000, [128 * 128, 96 * 1024, 3 * 128 * 1024, 128 * 1024], 1),
    "of sizes that share no divisor": layers(1000, [1009, 7919, 104729, 611953], 2),
    "with losses of many orders": layers(1000, [64, 640, 6400], 5, decay=40.0),
}


def bound(groups: Groups, budget: int) -> float:
    """A loss that no choices within the budget are below, by the price of a byte that gives the largest (Lagrange)."""
    costs, losses = (np.array([[float(c[part]) for c in group] for group in groups]) for part in (0, 1))

    def at(logarithm: float) -> float:
        price = 10**logarithm
        return float((losses + price * costs).min(axis=1).sum()) - price * budget

    low, high = -25.0, 3.0
    for _ in range(50):  # the bound is concave in the price
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if at(left) >= at(right) else (left, high)
    return max(0.0, at(low))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.6])
def test_a_thousand_groups_are_solved_to_within_a_thousandth(kind: str, share: float) -> None:
    groups = KINDS[kind]
    least, most = cheapest(groups), sum(max(choice.cost for choice in group) for group in groups)
    budget = least + int((most - least) * share)
    solution = checked(groups, solve(groups, budget), budget)
    assert solution.loss <= bound(groups, budget) * 1.001 + F64_SUM


def test_bound_of_this_test_is_one() -> None:
    groups = layers(5, [1, 2, 3, 7], 11)
    for budget in range(cheapest(groups), 3 * cheapest(groups), 50):
        best = min(loss for loss, _ in combinations(groups, budget))
        assert bound(groups, budget) <= best + F64_SUM
