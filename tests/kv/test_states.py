"""The store of a layer's keys or values: the window, growth, and what it becomes by cropping and choosing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches import gaussian, relative_error, store
from closeness import F32_SUM, each_near
from torch import Tensor

from pqweights.runtime.kv.states import PackedStates, used_rows

# What these decode a token to does not depend on the tokens beside it.
TOKEN_WISE = ("polar", "hadamard:3,centred=0", "polar-rope:residual=0")
# What of the first tokens is measured, all later ones are encoded with: the mean, variances.
MEASURED = ("hadamard:3", "klt:3", "klt:2.25")
ALL = (*TOKEN_WISE, *MEASURED, "polar-rope:m4n2,residual=0", "polar:residual=40", "none")
SIZE = 32


def kinds(spec: str) -> str:
    return "values" if spec.startswith("polar-rope:residual") else "keys"


def filled(spec: str, states: Tensor, *lengths: int) -> PackedStates:
    """A store to which states are appended in pieces; the rest one by one."""
    held = store(spec, SIZE, kinds(spec))
    start = 0
    for length in (*lengths, *[1] * (states.shape[2] - sum(lengths))):
        held.append(states[:, :, start : start + length])
        start += length
    return held


def same_codes(first: PackedStates, second: PackedStates) -> bool:
    for one, other in zip(first.chunks, second.chunks, strict=True):
        assert first.quantizer is not None and one.tokens == other.tokens
        parts = [used_rows(chunk, first.quantizer.step) for chunk in (one, other)]
        if not all(torch.equal(part, parts[1][name]) for name, part in parts[0].items()):
            return False
    return True


def found(held: PackedStates) -> Tensor:
    states = held.decoded()
    assert states is not None
    return states


def first(held: PackedStates, tokens: int) -> Tensor:
    """The states of the first tokens, of products with as many rows; processors may sum in other orders for more."""
    chunks = [
        replace(each, tokens=min(each.tokens, tokens - each.start)) for each in held.chunks if each.start < tokens
    ]
    assert held.window is not None
    window = held.window[:, :, : max(0, tokens - held.packed_tokens)]
    return torch.cat([*map(held.decoded_chunk, chunks), window], dim=2)


@pytest.mark.parametrize("lengths", [(), (1, 30, 50), (90,)])
@pytest.mark.parametrize("spec", TOKEN_WISE)
def test_tokens_in_any_pieces_have_the_same_codes(spec, lengths):
    states = gaussian(2, 2, 100, SIZE)
    whole, pieces = filled(spec, states, 100), filled(spec, states, *lengths)
    assert same_codes(whole, pieces)
    assert torch.equal(found(whole), found(pieces))


@pytest.mark.parametrize(
    ("spec", "residual", "step"),
    [
        ("polar:residual=40", 40, 1),
        ("hadamard:4,residual=7", 7, 1),
        ("polar-rope:residual=64", 64, 32),
        ("polar-rope", 128, 32),
    ],
)
def test_window_of_recent_tokens_is_exact_and_of_the_promised_length(spec, residual, step):
    states = gaussian(1, 2, 260, SIZE)
    held = store(spec, SIZE)
    for token in range(260):
        held.append(states[:, :, token : token + 1])
        kept = held.window.shape[2]
        assert torch.equal(held.window, states[:, :, token + 1 - kept : token + 1])
        assert kept >= min(residual, token + 1)
        if held.chunks:
            assert kept < residual + step
    assert held.chunks


# In the window, in the first chunk, in a row of 32 tokens, at its ends, and from the start.
KEPT = ((0, 31, 50, 95, 140), (1, 32, 64, 139, 141))


@pytest.mark.parametrize(("spec", "kept"), [(spec, kept) for n, spec in enumerate(ALL) for kept in KEPT[n % 2]])
def test_cropped_stores_go_on(spec, kept):
    states, later = gaussian(2, 2, 140, SIZE), gaussian(2, 2, 170, SIZE, seed=2)
    held = filled(spec, states, 70, 40)
    before, packed = found(held), min(kept, held.packed_tokens)
    expected, expected_packed = first(held, kept), first(held, packed)
    held.crop(kept)
    kept = min(kept, 140)
    assert held.tokens == kept
    assert torch.equal(found(held), expected)
    assert each_near(expected, before[:, :, :kept], 0, F32_SUM if spec.startswith("klt") else 0)
    held.append(later[:, :, :100])
    for token in range(100, 170):
        held.append(later[:, :, token : token + 1])
    assert held.tokens == kept + 170
    assert torch.equal(first(held, packed), expected_packed)
    assert relative_error(found(held)[:, :, packed:], torch.cat([before[:, :, packed:kept], later], dim=2)) < 0.3
    assert held.quantizer is None or held.packed_tokens > 100


# --- memory ---


def test_quantizers_without_kernels_say_so():
    quantizer = store("polar", SIZE).quantizer
    assert quantizer is not None and not quantizer.can_score() and not quantizer.can_weigh()
    for call in (quantizer.scores, quantizer.weighted):
        with pytest.raises(NotImplementedError):
            call(gaussian(1, 1, 1, SIZE), {}, {})


def test_cropping_an_empty_store_does_nothing():
    held = store("polar", SIZE)
    held.crop(3)
    assert held.decoded() is None and held.tokens == 0
