"""Columns that are searched one after the other, each with the errors of those before it, against the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import trellis_decoder
from closeness import F32_MATRIX, F32_SOLVED, F32_SUM, each_near
from independent_reader import hadamard

from pqweights.formats.trellis_tables import encode_model
from pqweights.kernels import columns

STRIPS, COLUMNS, STEP = 3, 37, 1.25
SUPERBLOCKS = (range(20), range(20, COLUMNS))
STATE_BITS = {8: 3, 64: 6, 256: 8}
Doubles = npt.NDArray[np.float64]


def rotated(weights: npt.NDArray[np.floating]) -> Doubles:
    """Coordinates [columns, strips, 128] of weights [rows, columns], not normalised."""
    blocks = np.ascontiguousarray(weights.T).reshape(-1, 128)
    return hadamard(blocks).astype(np.float64).reshape(weights.shape[1], -1, 128)


def cheapest(targets: Doubles, starts: list[int], state_bits: int) -> Doubles:
    """The least sum of squared distances of [strips, 128] from numbers of paths that begin in some states."""
    if_odd, if_k_odd = trellis_decoder.TRELLISES[state_bits]
    costs = np.full((len(targets), 1 << state_bits), np.inf)
    costs[np.arange(len(targets)), starts] = 0
    states = np.arange(1 << state_bits)
    for t in range(128):
        after = np.full_like(costs, np.inf)
        for bit in range(2):
            residues = (states & 1) + 2 * bit
            numbers = residues + 4 * np.rint((targets[:, t, None] - residues) / 4)
            to = states >> 1 ^ (states & 1) * if_odd ^ bit * if_k_odd  # a different one for each state
            after[:, to] = np.minimum(after[:, to], costs + (targets[:, t, None] - numbers) ** 2)
        costs = after
    return costs.min(1)


def end_of(numbers: npt.NDArray[np.int64], start: int, state_bits: int) -> int:
    """The state in which a path of numbers ends. Asserts that it is one."""
    if_odd, if_k_odd = trellis_decoder.TRELLISES[state_bits]
    state = start
    for n in numbers.tolist():
        assert n & 1 == state & 1
        state = state >> 1 ^ (if_odd if n & 1 else 0) ^ (if_k_odd if n >> 1 & 1 else 0)
    return state


@pytest.mark.parametrize("states", STATE_BITS)
def test_each_column_has_the_cheapest_path_for_its_weights_and_the_errors_before_it(states: int) -> None:
    rng = np.random.default_rng(states)
    weights = (rng.standard_normal((128 * STRIPS - 40, COLUMNS)) * 4).astype(np.float32)
    feedback = columns.feedback_room(COLUMNS)
    feedback[:COLUMNS] = np.tril(rng.uniform(-0.3, 0.3, (COLUMNS, COLUMNS)), -1)
    ones = np.ones(len(weights), dtype=np.float32)
    group = columns.load(weights, ones, ones[:COLUMNS])
    padded = np.zeros((128 * STRIPS, COLUMNS), dtype=np.float32)
    padded[: len(weights)] = weights
    wanted, errors = rotated(padded), np.zeros((COLUMNS, STRIPS, 128))
    squares, model = np.zeros((2, STRIPS, 128)), encode_model()
    for own in SUPERBLOCKS:
        of_columns = np.ones((len(own), 2), dtype=np.float32)
        (found,) = columns.search(group, own, feedback, weights=of_columns, model=model, states=states, step=STEP)
        ends = dict.fromkeys(range(16), [0] * STRIPS)
        for place, column in enumerate(own):
            targets = wanted[column] + np.einsum("j,jst->st", feedback[column].astype(np.float64), errors)
            classes = found.classes[place, :STRIPS].astype(np.int64)
            numbers = found.numbers[place, :, :STRIPS].T.astype(np.int64)
            searched = targets / 128**0.5 / STEP * model.down[classes][:, None]
            starts = ends[place % 16]
            ends[place % 16] = [end_of(*of_strip, STATE_BITS[states]) for of_strip in zip(numbers, starts, strict=True)]
            best = cheapest(searched, starts, STATE_BITS[states])
            assert each_near(((searched - numbers) ** 2).sum(1), best, F32_MATRIX)
            decoded = numbers * (STEP * model.up[classes] * 128**0.5)[:, None]
            errors[column] = wanted[column] - decoded
            squares += np.square([rotate_back(errors[column]), rotate_back(targets - decoded)])
    got = group.reshape(32, COLUMNS, 4, 16).transpose(1, 3, 0, 2).reshape(COLUMNS, 16, 128)
    assert each_near(got[:, :STRIPS], errors, F32_SUM, F32_SOLVED)
    assert not got[:, STRIPS:].any()


def rotate_back(coordinates: Doubles) -> Doubles:
    return hadamard(coordinates.astype(np.float32)).astype(np.float64)


def test_blocks_get_the_class_of_their_mean_square() -> None:
    """The classes are those of standard deviations in steps of 1.5 dB, as without feedback."""
    deviations = np.exp2(np.arange(4, 28) / 4 + 0.05)
    weights = np.random.default_rng(1).standard_normal((128, len(deviations)))
    weights *= deviations / np.sqrt(np.square(weights).mean(0))
    ones, size = np.ones(128, dtype=np.float32), len(deviations)
    group = columns.load(weights.astype(np.float32), ones, ones[:size])
    feedback = columns.feedback_room(size)
    feedback[:] = 0
    (found,) = columns.search(
        group, range(size), feedback, weights=np.ones((size, 2), np.float32), model=encode_model(), states=8, step=1.0
    )
    assert np.array_equal(found.classes[:, 0], np.arange(4, 28) + 7)
    assert not found.classes[:, 1:].any()
