"""What formats/protocol.py requires of a codec, checked for each codec; and norms that no encoder writes are found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import helpers
import numpy as np
import numpy.typing as npt
import pytest
from closeness import ALIKE, F32_FEW, F32_SOLVED, SMALL_SAMPLE, approx, rounding

from pqweights.common.dtypes import DTYPE_BITS, item_bytes, to_float32
from pqweights.errors import RecipeError, SourceError
from pqweights.formats import CODECS
from pqweights.formats.hadamard_trellis import STEP_POWERS, TrellisCoder
from pqweights.formats.protocol import (
    VALUE_DTYPES,
    Bytes,
    Codec,
    Coder,
    DamagedBlock,
    Measures,
    PassResult,
    State,
    has_rate,
)
from pqweights.formats.weight import EncodedWeight, encode_weight

# The sizes of weights for which coders are made: below a superblock and above, and no whole number of blocks.
SIZES = (1200, 150_001)
# The rates to check of a codec that has many.
MOST_RATES = 4


def some_rates(codec: Codec) -> list[float]:
    """Return the rates of a codec, or a few of them from the first to the last."""
    rates = list(codec.rates)
    if len(rates) <= 8:
        return rates
    return [rates[place * (len(rates) - 1) // (MOST_RATES - 1)] for place in range(MOST_RATES)]


def sized_coders() -> Iterator[Any]:
    for name, codec in CODECS.items():
        for bits in some_rates(codec):
            coder = codec.coder(bits)
            for weights in SIZES if coder.depends_on_size else SIZES[:1]:
                yield pytest.param(coder.sized(weights), id=f"{name}-{bits}-{weights}")


EACH = list(sized_coders())
each = pytest.mark.parametrize("coder", EACH)
each_dtype = pytest.mark.parametrize("dtype", VALUE_DTYPES)


def gaussian_blocks(coder: Coder, blocks: int, *, dtype: str = "F32", seed: int = 0) -> Bytes:
    return helpers.raw_bytes(helpers.gaussian(blocks, coder.block_size, seed=seed), dtype)


def encoded(coder: Coder, values: Bytes, *, dtype: str = "F32", state: State) -> tuple[list[Bytes], Measures]:
    """Encode whole blocks in one call."""
    blocks = len(values) // (coder.block_size * item_bytes(dtype))
    parts = [np.full((blocks, part.bytes_per_block), 0xAB, dtype=np.uint8) for part in coder.parts]
    return parts, coder.encode(values, parts, dtype=dtype, state=state)


def whole(weights: npt.NDArray[np.float32], coder: Coder) -> tuple[EncodedWeight, PassResult]:
    """Encode a weight with all passes."""
    raw = np.ascontiguousarray(weights).view(np.uint8).reshape(-1)
    return encode_weight(raw, dtype="F32", shape=weights.shape, coder=coder)


def decoded(coder: Coder, parts: Sequence[Bytes], *, state: State, dtype: str = "F32") -> Bytes:
    values = np.full(len(parts[0]) * coder.block_size * item_bytes(dtype), 0xAB, dtype=np.uint8)
    coder.decode(parts, values, dtype=dtype, state=state)
    return values


@pytest.mark.parametrize("name", CODECS)
def test_coders_of_all_rates_match_the_description_of_their_codec(name: str) -> None:
    codec = CODECS[name]
    assert codec.name == name
    assert list(codec.rates) == sorted(set(codec.rates))
    assert all(re.fullmatch(r"_[a-z0-9_]+", suffix) for suffix in codec.suffixes)
    assert json.loads(json.dumps(codec.state_defaults)) == codec.state_defaults
    distortions = [codec.coder(bits).distortion for bits in codec.rates]
    assert distortions == sorted(distortions, reverse=True)
    for bits in codec.rates:
        coder = codec.coder(bits)
        assert (coder.codec, coder.bits) == (name, bits)
        assert tuple(part.suffix for part in coder.sized(1).parts) == codec.suffixes
        assert all(DTYPE_BITS[part.dtype] % 8 == 0 for part in coder.sized(1).parts)
        assert coder.first_state().to_json().keys() == codec.state_defaults.keys()
        assert {**codec.state_defaults, **coder.parse_state({}).to_json()} == codec.state_defaults


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bits", [-1, 0, 0.5, 1.49, 1.99, 5.25, 8.001, 99])
def test_unknown_rate_is_refused(name: str, bits: float) -> None:
    if has_rate(CODECS[name], bits):
        assert CODECS[name].any_rate
        return
    with pytest.raises(RecipeError, match=rf"expected .*{re.escape(name)}.*found {re.escape(str(bits))}"):
        CODECS[name].coder(bits)


@pytest.mark.parametrize("name", CODECS)
def test_effort_changes_neither_sizes_nor_decoding(name: str) -> None:
    codec, weights = CODECS[name], helpers.gaussian(64, 1024, seed=4)
    assert list(codec.efforts) == sorted(set(codec.efforts))
    plain = codec.coder(codec.rates[0])
    for wrong in (0, -1, 7, 10**30):
        with pytest.raises(RecipeError, match=rf"{re.escape(name)}.*found {wrong}"):
            codec.coder(codec.rates[0], wrong)
    errors = []
    for effort in codec.efforts:
        coder = codec.coder(codec.rates[0], effort)
        assert (coder.bits, coder.distortion, coder.tables()) == (plain.bits, plain.distortion, plain.tables())
        assert coder.sized(weights.size).parts == plain.sized(weights.size).parts
        weight, measured = whole(weights, coder)
        errors.append(measured.relative_mse)
        again = decoded(plain.sized(weights.size), list(weight.parts), state=weight.state)
        assert np.array_equal(again, weight.decode_blocks(0, len(weight.parts[0]), "F32"))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", CODECS)
def test_sized_coders_depend_on_the_size_alone(name: str) -> None:
    codec = CODECS[name]
    coder = codec.coder(codec.rates[-1])
    layouts = set()
    for weights in (0, 1, 127, 128, 129, 1000, 65_536, 65_537, 10**6, 10**12, 10**30):
        sized = coder.sized(weights)
        assert sized.sized(1).sized(weights).parts == sized.parts
        assert (sized.bits, sized.tables(), sized.first_state()) == (
            coder.bits,
            coder.tables(),
            coder.first_state(),
        )
        assert sized.block_size % codec.block_size == 0
        assert all(part.items_per_block > 0 for part in sized.parts)
        layouts.add((sized.block_size, sized.parts))
    assert (len(layouts) > 1) == coder.depends_on_size
    if not coder.depends_on_size:
        assert (coder.block_size, coder.parts) in layouts and coder.block_size == codec.block_size


@each
def test_arbitrary_bytes_are_decoded_or_found_damaged(coder: Coder) -> None:
    """Whatever the bytes, decoding writes its own blocks alone, and the only error is DamagedBlock."""
    rng, state, size = np.random.default_rng(3), coder.first_state(), coder.block_size * 4
    parts, _ = encoded(coder, gaussian_blocks(coder, 3), state=state)
    for number in range(20):
        damaged = [part.copy() for part in parts]
        for part in damaged:
            if number % 2:
                part[1, int(rng.integers(part.shape[1]))] ^= 1 << int(rng.integers(8))
            else:
                part[1] = rng.integers(0, 256, part.shape[1])
        values, place = np.full(3 * size + 8, 0xAB, dtype=np.uint8), 1
        try:
            with np.errstate(all="ignore"):
                coder.decode(damaged, values[:-8], dtype="F32", state=state)
        except DamagedBlock as found:
            place = found.block if found.reason else -1
        assert place == 1
        assert (values[-8:] == 0xAB).all()


@pytest.mark.parametrize("step_power", STEP_POWERS)
def test_modelled_errors_are_those_of_encoding_up_to_a_factor(step_power: float) -> None:
    """The factor is the same for weights whose blocks are alike and for those whose blocks differ."""
    codec, rng = CODECS["hadamard-trellis"], np.random.default_rng(8)
    for bits in some_rates(codec):
        coder, ratios = TrellisCoder(rate=bits, states=8, step_power=step_power), []
        for spread in (0.0, 0.3, 0.8):
            blocks = helpers.gaussian(2048, codec.block_size, seed=6)
            blocks *= np.exp(spread * rng.standard_normal((2048, 1))).astype(np.float32)
            modelled = coder.modelled_errors(blocks)
            assert modelled is not None and modelled.shape == (2048,)
            _, measured = whole(blocks, coder)
            ratios.append(modelled.sum() * codec.block_size / measured.error)
        assert ratios == approx([ratios[0]] * 3, SMALL_SAMPLE)


@each
def test_tables_survive_json_and_give_the_same_coder(coder: Coder) -> None:
    tables = json.loads(json.dumps(coder.tables()))
    again = CODECS[coder.codec].coder_from_tables(coder.bits, tables).sized(SIZES[0])
    coder = coder.sized(SIZES[0])
    values = gaussian_blocks(coder, 3)
    first, second = (encoded(c, values, state=c.first_state())[0] for c in (coder, again))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(ValueError, match="expected"):
        CODECS[coder.codec].coder_from_tables(coder.bits, {"nonsense": 1})


@each
def test_gaussian_weights_have_the_promised_distortion(coder: Coder) -> None:
    weights = helpers.gaussian(1024, 1024, seed=4)
    _, measured = whole(weights, coder)
    assert measured.state == coder.first_state() or not measured.state.rescued
    assert 0.93 <= measured.relative_mse / coder.distortion <= 1.03


@each
@each_dtype
def test_measures_match_the_decoded_weights(coder: Coder, dtype: str) -> None:
    values = gaussian_blocks(coder, 40, dtype=dtype, seed=1)
    exact = to_float32(values, dtype).reshape(40, -1).astype(np.float64)
    state = coder.first_state()
    parts, measures = encoded(coder, values, dtype=dtype, state=state)
    found = decoded(coder, parts, state=state).view(np.float32).reshape(40, -1).astype(np.float64)
    assert measures.energies == approx((exact**2).sum(axis=1), F32_FEW)
    assert measures.errors == approx(((found - exact) ** 2).sum(axis=1), 2 * F32_SOLVED)
    assert measures.first_bad_block == -1


@each
def test_decoded_dtypes_are_the_rounded_float32(coder: Coder) -> None:
    state = coder.first_state()
    parts, _ = encoded(coder, gaussian_blocks(coder, 5), state=state)
    exact = decoded(coder, parts, state=state).view(np.float32)
    for dtype in VALUE_DTYPES:
        assert np.array_equal(decoded(coder, parts, state=state, dtype=dtype), helpers.raw_bytes(exact, dtype)), dtype


@each
@each_dtype
def test_blocks_are_encoded_and_decoded_independently(coder: Coder, dtype: str) -> None:
    """The bytes do not depend on how blocks are split into calls."""
    values, state = gaussian_blocks(coder, 7, dtype=dtype, seed=2), coder.first_state()
    whole, measures = encoded(coder, values, dtype=dtype, state=state)
    block_bytes = len(values) // 7
    cuts = [(0, 1), (1, 4), (4, 7)]
    pieces = [
        encoded(coder, values[first * block_bytes : last * block_bytes], dtype=dtype, state=state)
        for first, last in cuts
    ]
    for place, part in enumerate(whole):
        assert np.array_equal(part, np.concatenate([parts[place] for parts, _ in pieces]))
    assert np.array_equal(measures.energies, np.concatenate([m.energies for _, m in pieces]))
    assert np.array_equal(measures.errors, np.concatenate([m.errors for _, m in pieces]))
    merged = pieces[0][1].norms
    for _, other in pieces[1:]:
        merged = merged.merged(other.norms)
    assert merged == measures.norms
    everything = decoded(coder, whole, state=state, dtype=dtype)
    for first, last in cuts:
        some = decoded(coder, [part[first:last] for part in whole], state=state, dtype=dtype)
        assert np.array_equal(some, everything[first * block_bytes : last * block_bytes])


@each
def test_encoding_does_not_write_to_its_input(coder: Coder) -> None:
    """Also not to a single block, which is its own transpose, so that a view could be written to by mistake."""
    for blocks in (1, 3):
        values = gaussian_blocks(coder, blocks)
        values.flags.writeable = False
        first, _ = encoded(coder, values, state=coder.first_state())
        second, _ = encoded(coder, values, state=coder.first_state())
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_block_that_is_not_finite_is_named(coder: Coder, bad: float) -> None:
    weights = helpers.gaussian(6, coder.block_size)
    weights[2, 5] = weights[4, 0] = bad
    raw = weights.view(np.uint8).reshape(-1)
    assert encoded(coder, raw, state=coder.first_state())[1].first_bad_block == 2
    block = (2 * coder.block_size + 5) // coder.sized(weights.size).block_size
    with pytest.raises(SourceError, match=f"block {block} "):
        whole(weights, coder)


@each
def test_invalid_state_is_refused(coder: Coder) -> None:
    for key in CODECS[coder.codec].state_defaults:
        for value in ("givens", 10**6, 0.3, [1], {"a": 1}, None):
            with pytest.raises(ValueError, match=key):
                coder.parse_state({key: value})


@each
def test_coder_states_whether_its_errors_are_orthogonal(coder: Coder) -> None:
    """With orthogonal errors, the energy of the weight is that of the decoded weight plus that of the error."""
    blocks = 2**19 // coder.block_size + 4
    values, state = gaussian_blocks(coder, blocks, seed=5), coder.first_state()
    parts, measures = encoded(coder, values, state=state)
    found = decoded(coder, parts, state=state).view(np.float32).astype(np.float64)
    energy, error = measures.energies.sum(), measures.errors.sum()
    gap = abs((found**2).sum() + error - energy)
    if coder.orthogonal_error:
        # A stored norm is off by at most 2**-12 of it, in either direction.
        assert gap < 0.01 * error + rounding("F16", 2) / np.sqrt(blocks) * energy
    elif coder.bits == CODECS[coder.codec].rates[0]:
        assert gap > 0.02 * error  # the errors really are not orthogonal


LOW = [(name, bits) for name, codec in CODECS.items() for bits in codec.rates if bits <= 3]


@pytest.mark.parametrize(("name", "bits"), LOW)
def test_enlarged_weights_have_the_product_of_the_weights(name: str, bits: float) -> None:
    """Least squares loses the error from the product; both coders promise their errors, and choose the same codes."""
    coder, values = CODECS[name].coder(bits), helpers.gaussian(1024, 256, seed=9)
    plain = coder.least_squares()
    for made in (coder, plain):
        weight, measured = whole(values, made)
        found = weight.decode().view(np.float32).astype(np.float64)
        product = (found * values.reshape(-1)).sum() / np.square(values, dtype=np.float64).sum()
        expected = 1 - measured.relative_mse if made.orthogonal_error else 1.0
        assert product == approx(expected, 0, ALIKE / 2)
        assert 0.93 <= measured.relative_mse / made.distortion <= 1.03
    assert plain.orthogonal_error
    assert coder.distortion == approx(plain.distortion / (1 if coder == plain else 1 - plain.distortion))


@each
def test_decoding_to_a_torch_device_gives_the_same_values(coder: Coder) -> None:
    import torch

    state = coder.first_state()
    parts, _ = encoded(coder, gaussian_blocks(coder, 4), state=state)
    found = coder.decode_torch([torch.from_numpy(part) for part in parts], state)
    assert found.shape == (4, coder.block_size) and found.dtype == torch.float32
    assert np.array_equal(found.numpy().reshape(-1), decoded(coder, parts, state=state).view(np.float32))


# --- norms ---

# float16: infinities, NaN of both kinds, negative numbers and zero, and what flash memory holds after it was erased.
NO_NORMS = (0x7C00, 0x7E00, 0x7C01, 0xFC00, 0xFE00, 0xBC00, 0x8001, 0x8000, 0xFFFF)
BLOCKS = 37


@each
def test_norm_that_no_encoder_writes_is_found(coder: Coder) -> None:
    """In every dtype, and by torch."""
    import torch

    state = coder.first_state()
    parts, _ = encoded(coder, gaussian_blocks(coder, BLOCKS), state=state)
    for place in (place for place, part in enumerate(coder.parts) if part.dtype == "F16"):
        for number, pattern in enumerate(NO_NORMS):
            block = (0, 20, BLOCKS - 1)[number % 3]
            damaged = [part.copy() for part in parts]
            damaged[place].view(np.uint16)[block, number % (damaged[place].shape[1] // 2)] = pattern
            for dtype in VALUE_DTYPES:
                with pytest.raises(DamagedBlock, match="not finite") as found:
                    decoded(coder, damaged, dtype=dtype, state=state)
                assert found.value.block == block
            with pytest.raises(DamagedBlock, match="not finite"):
                coder.decode_torch([torch.from_numpy(part) for part in damaged], state)


def weights_of_all_kinds() -> dict[str, npt.NDArray[np.float32]]:
    """Return weights that are the hardest for norms. One of them ends in the middle of a block."""
    limit = float(np.finfo(np.float32).max)
    zeros = np.zeros(300, dtype=np.float32)
    signs = np.where(np.random.default_rng(1).integers(0, 2, 384) > 0, 1.0, -1.0).astype(np.float32)
    kinds = {f"{scale:g}": helpers.gaussian(3, 100, scale=scale) for scale in (1e-44, 1e-30, 1e-6, 1.0, 1e6, 1e30)}
    return kinds | {
        "largest numbers": signs[:300] * np.float32(limit),
        "equal largest numbers": np.full(300, limit, dtype=np.float32),
        "smallest numbers": signs[:300] * np.float32(2.0**-149),
        "zeros of both signs": zeros * signs[:300],
        "one number": np.eye(1, 300, 7, dtype=np.float32) * -3,
        "one huge and one tiny block": np.repeat(np.float32([limit / 2, 1e-40]), (128, 130)),
        **helpers.block_families(),
    }


@each
def test_what_encoders_write_is_never_refused(coder: Coder) -> None:
    """Not in the end, nor between two passes, when the exponent does not fit yet; nor is the state in a file."""
    for values in weights_of_all_kinds().values():
        weight, measured = whole(values, coder)
        assert weight.state == measured.state == coder.parse_state(json.loads(json.dumps(weight.state.to_json())))
        assert np.isfinite(weight.decode().view(np.float32)).all()
        for dtype in VALUE_DTYPES:
            weight.decode_blocks(0, len(weight.parts[0]), dtype)
        for place in (place for place, part in enumerate(weight.coder.parts) if part.dtype == "F16"):
            assert (weight.parts[place].view(np.uint16) < 0x7C00).all()
