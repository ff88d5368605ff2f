"""What formats/master.py requires of a codec, checked for each codec; and norms that no encoder writes are found."""

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
from commands import raises

from pqweights.common.dtypes import DTYPE_BITS, item_bytes, to_float32
from pqweights.errors import RecipeError, SourceError
from pqweights.formats import CODECS
from pqweights.formats.master import VALUE_DTYPES, BlockFormat, Bytes, DamagedBlock, Pass, has_rate
from pqweights.formats.trellis import STEP_POWERS, Trellis
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.kernels import Measures

# The sizes of weights for which coders are made: below a superblock and above, and no whole number of blocks.
SIZES = (1200, 150_001)
# The rates to check of a codec that has many.
MOST_RATES = 4


def some_rates(codec: type[BlockFormat]) -> list[float]:
    """Return the rates of a codec, or a few of them from the first to the last."""
    rates = list(codec.rates)
    if len(rates) <= 8:
        return rates
    return [rates[place * (len(rates) - 1) // (MOST_RATES - 1)] for place in range(MOST_RATES)]


def sized_coders() -> Iterator[Any]:
    for name, codec in CODECS.items():
        for bits in some_rates(codec):
            coder = codec.at(bits)
            for weights in SIZES if coder.depends_on_size else SIZES[:1]:
                yield pytest.param(coder.sized(weights), id=f"{name}-{bits}-{weights}")


EACH = list(sized_coders())
each = pytest.mark.parametrize("coder", EACH)
each_dtype = pytest.mark.parametrize("dtype", VALUE_DTYPES)


def gaussian_blocks(coder: BlockFormat, blocks: int, *, dtype: str = "F32", seed: int = 0) -> Bytes:
    return helpers.raw_bytes(helpers.gaussian(blocks, coder.block_size, seed=seed), dtype)


def encoded(coder: BlockFormat, values: Bytes, *, dtype: str = "F32") -> tuple[list[Bytes], Measures]:
    """Encode whole blocks in one call."""
    blocks = len(values) // (coder.block_size * item_bytes(dtype))
    parts = [np.full((blocks, part.bytes_per_block), 0xAB, dtype=np.uint8) for part in coder.parts]
    return parts, coder.encode(values, parts, dtype=dtype)


def whole(weights: npt.NDArray[np.float32], coder: BlockFormat) -> tuple[list[Bytes], Pass]:
    """Encode a weight with all passes."""
    raw = np.ascontiguousarray(weights).view(np.uint8).reshape(-1)
    parts, last = encode_weight(raw, dtype="F32", shape=weights.shape, format=coder)
    return list(parts), last


def decoded(coder: BlockFormat, parts: Sequence[Bytes], *, dtype: str = "F32") -> Bytes:
    values = np.full(len(parts[0]) * coder.block_size * item_bytes(dtype), 0xAB, dtype=np.uint8)
    coder.decode(parts, values, dtype=dtype)
    return values


@pytest.mark.parametrize("name", CODECS)
def test_coders_of_all_rates_match_the_description_of_their_codec(name: str) -> None:
    codec = CODECS[name]
    assert codec.codec == name
    assert list(codec.rates) == sorted(set(codec.rates))
    assert all(re.fullmatch(r"_[a-z0-9_]+", suffix) for suffix in codec.suffixes)
    assert json.loads(json.dumps(codec.settings)) == codec.settings
    distortions = [codec.at(bits).distortion for bits in codec.rates]
    assert distortions == sorted(distortions, reverse=True)
    for bits in codec.rates:
        coder = codec.at(bits)
        assert (coder.codec, coder.bits) == (name, bits)
        assert tuple(part.suffix for part in coder.sized(1).parts) == codec.suffixes
        assert all(DTYPE_BITS[part.dtype] % 8 == 0 for part in coder.sized(1).parts)
        assert {**codec.settings, **coder.stated()}.keys() == codec.settings.keys()
        assert {**codec.settings, **coder.with_settings({}).stated()} == codec.settings


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bits", [-1, 0, 0.5, 1.49, 1.99, 5.25, 8.001, 99])
def test_unknown_rate_is_refused(name: str, bits: float) -> None:
    if has_rate(CODECS[name], bits):
        assert CODECS[name].any_rate
        return
    with raises(RecipeError, name, bits):
        CODECS[name].at(bits)


@pytest.mark.parametrize("name", CODECS)
def test_effort_changes_neither_sizes_nor_decoding(name: str) -> None:
    codec, weights = CODECS[name], helpers.gaussian(64, 1024, seed=4)
    assert list(codec.efforts) == sorted(set(codec.efforts))
    plain = codec.at(codec.rates[0])
    for wrong in (0, -1, 7, 10**30):
        with raises(RecipeError, name, wrong):
            codec.at(codec.rates[0], wrong)
    errors = []
    for effort in codec.efforts:
        coder = codec.at(codec.rates[0], effort)
        assert (coder.bits, coder.distortion, coder.tables()) == (plain.bits, plain.distortion, plain.tables())
        assert coder.sized(weights.size).parts == plain.sized(weights.size).parts
        parts, last = whole(weights, coder)
        errors.append(last.relative_mse)
        again = decoded(plain.sized(weights.size).with_settings(last.format.stated()), parts)
        assert np.array_equal(again, decoded(last.format, parts))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", CODECS)
def test_sized_coders_depend_on_the_size_alone(name: str) -> None:
    codec = CODECS[name]
    coder = codec.at(codec.rates[-1])
    layouts = set()
    for weights in (0, 1, 127, 128, 129, 1000, 65_536, 65_537, 10**6, 10**12, 10**30):
        sized = coder.sized(weights)
        assert sized.sized(1).sized(weights).parts == sized.parts
        assert (sized.bits, sized.tables(), sized.stated()) == (coder.bits, coder.tables(), coder.stated())
        assert sized.block_size % codec.stated_block_size == 0
        assert all(part.items_per_block > 0 for part in sized.parts)
        layouts.add((sized.block_size, sized.parts))
    assert (len(layouts) > 1) == coder.depends_on_size
    if not coder.depends_on_size:
        assert (coder.block_size, coder.parts) in layouts and coder.block_size == codec.stated_block_size


@each
def test_arbitrary_bytes_are_decoded_or_found_damaged(coder: BlockFormat) -> None:
    """Whatever the bytes, decoding writes its own blocks alone, and the only error is DamagedBlock."""
    rng, size = np.random.default_rng(3), coder.block_size * 4
    parts, _ = encoded(coder, gaussian_blocks(coder, 3))
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
                coder.decode(damaged, values[:-8], dtype="F32")
        except DamagedBlock as found:
            place = found.block if found.reason else -1
        assert place == 1
        assert (values[-8:] == 0xAB).all()


@pytest.mark.parametrize("step_power", STEP_POWERS)
def test_modelled_errors_are_those_of_encoding_up_to_a_factor(step_power: float) -> None:
    """The factor is the same for weights whose blocks are alike and for those whose blocks differ."""
    codec, rng = CODECS["hadamard-trellis"], np.random.default_rng(8)
    for bits in some_rates(codec):
        coder, ratios = Trellis(bits=bits, step_power=step_power), []
        for spread in (0.0, 0.3, 0.8):
            blocks = helpers.gaussian(2048, codec.stated_block_size, seed=6)
            blocks *= np.exp(spread * rng.standard_normal((2048, 1))).astype(np.float32)
            modelled = coder.modelled_errors(blocks)
            assert modelled is not None and modelled.shape == (2048,)
            _, measured = whole(blocks, coder)
            ratios.append(modelled.sum() * codec.stated_block_size / measured.error)
        assert ratios == approx([ratios[0]] * 3, SMALL_SAMPLE)


@each
def test_tables_survive_json_and_others_are_refused(coder: BlockFormat) -> None:
    coder.check_tables(json.loads(json.dumps(coder.tables())))
    with pytest.raises(ValueError, match="expected"):
        coder.check_tables({"nonsense": 1})


@each
def test_gaussian_weights_have_the_promised_distortion(coder: BlockFormat) -> None:
    weights = helpers.gaussian(1024, 1024, seed=4)
    _, measured = whole(weights, coder)
    assert not measured.format.rescued
    assert 0.93 <= measured.relative_mse / coder.distortion <= 1.03


@each
@each_dtype
def test_measures_match_the_decoded_weights(coder: BlockFormat, dtype: str) -> None:
    values = gaussian_blocks(coder, 40, dtype=dtype, seed=1)
    exact = to_float32(values, dtype).reshape(40, -1).astype(np.float64)
    parts, measures = encoded(coder, values, dtype=dtype)
    found = decoded(coder, parts).view(np.float32).reshape(40, -1).astype(np.float64)
    assert measures.energies == approx((exact**2).sum(axis=1), F32_FEW)
    assert measures.errors == approx(((found - exact) ** 2).sum(axis=1), 2 * F32_SOLVED)
    assert measures.first_bad_block == -1


@each
def test_decoded_dtypes_are_the_rounded_float32(coder: BlockFormat) -> None:
    parts, _ = encoded(coder, gaussian_blocks(coder, 5))
    exact = decoded(coder, parts).view(np.float32)
    for dtype in VALUE_DTYPES:
        assert np.array_equal(decoded(coder, parts, dtype=dtype), helpers.raw_bytes(exact, dtype)), dtype


@each
@each_dtype
def test_blocks_are_encoded_and_decoded_independently(coder: BlockFormat, dtype: str) -> None:
    """The bytes do not depend on how blocks are split into calls."""
    values = gaussian_blocks(coder, 7, dtype=dtype, seed=2)
    whole, measures = encoded(coder, values, dtype=dtype)
    block_bytes = len(values) // 7
    cuts = [(0, 1), (1, 4), (4, 7)]
    pieces = [encoded(coder, values[first * block_bytes : last * block_bytes], dtype=dtype) for first, last in cuts]
    for place, part in enumerate(whole):
        assert np.array_equal(part, np.concatenate([parts[place] for parts, _ in pieces]))
    assert np.array_equal(measures.energies, np.concatenate([m.energies for _, m in pieces]))
    assert np.array_equal(measures.errors, np.concatenate([m.errors for _, m in pieces]))
    assert min(m.smallest_norm for _, m in pieces) == measures.smallest_norm
    assert max(m.largest_norm for _, m in pieces) == measures.largest_norm
    everything = decoded(coder, whole, dtype=dtype)
    for first, last in cuts:
        some = decoded(coder, [part[first:last] for part in whole], dtype=dtype)
        assert np.array_equal(some, everything[first * block_bytes : last * block_bytes])


@each
def test_encoding_does_not_write_to_its_input(coder: BlockFormat) -> None:
    """Also not to a single block, which is its own transpose, so that a view could be written to by mistake."""
    for blocks in (1, 3):
        values = gaussian_blocks(coder, blocks)
        values.flags.writeable = False
        first, _ = encoded(coder, values)
        second, _ = encoded(coder, values)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_block_that_is_not_finite_is_named(coder: BlockFormat, bad: float) -> None:
    weights = helpers.gaussian(6, coder.block_size)
    weights[2, 5] = weights[4, 0] = bad
    raw = weights.view(np.uint8).reshape(-1)
    assert encoded(coder, raw)[1].first_bad_block == 2
    block = (2 * coder.block_size + 5) // coder.sized(weights.size).block_size
    with raises(SourceError, f"block {block} "):
        whole(weights, coder)


@each
def test_invalid_state_is_refused(coder: BlockFormat) -> None:
    for key in CODECS[coder.codec].settings:
        for value in ("givens", 10**6, 0.3, [1], {"a": 1}, None):
            with pytest.raises(ValueError, match=key):
                coder.with_settings({key: value})


@each
def test_coder_states_whether_its_errors_are_orthogonal(coder: BlockFormat) -> None:
    """With orthogonal errors, the energy of the weight is that of the decoded weight plus that of the error."""
    blocks = 2**19 // coder.block_size + 4
    values = gaussian_blocks(coder, blocks, seed=5)
    parts, measures = encoded(coder, values)
    found = decoded(coder, parts).view(np.float32).astype(np.float64)
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
    coder, values = CODECS[name].at(bits), helpers.gaussian(1024, 256, seed=9)
    plain = coder.least_squares()
    for made in (coder, plain):
        parts, measured = whole(values, made)
        found = decode_weight(measured.format, parts, values.size, "F32").view(np.float32).astype(np.float64)
        product = (found * values.reshape(-1)).sum() / np.square(values, dtype=np.float64).sum()
        expected = 1 - measured.relative_mse if made.orthogonal_error else 1.0
        assert product == approx(expected, 0, ALIKE / 2)
        assert 0.93 <= measured.relative_mse / made.distortion <= 1.03
    assert plain.orthogonal_error
    assert coder.distortion == approx(plain.distortion / (1 if coder == plain else 1 - plain.distortion))


@each
def test_decoding_to_a_torch_device_gives_the_same_values(coder: BlockFormat) -> None:
    import torch

    parts, _ = encoded(coder, gaussian_blocks(coder, 4))
    found = coder.decode_torch([torch.from_numpy(part) for part in parts])
    assert found.shape == (4, coder.block_size) and found.dtype == torch.float32
    assert np.array_equal(found.numpy().reshape(-1), decoded(coder, parts).view(np.float32))


# --- norms ---

# float16: infinities, NaN of both kinds, negative numbers and zero, and what flash memory holds after it was erased.
NO_NORMS = (0x7C00, 0x7E00, 0x7C01, 0xFC00, 0xFE00, 0xBC00, 0x8001, 0x8000, 0xFFFF)
BLOCKS = 37


@each
def test_norm_that_no_encoder_writes_is_found(coder: BlockFormat) -> None:
    """In every dtype, and by torch."""
    import torch

    parts, _ = encoded(coder, gaussian_blocks(coder, BLOCKS))
    for place in (place for place, part in enumerate(coder.parts) if part.dtype == "F16"):
        for number, pattern in enumerate(NO_NORMS):
            block = (0, 20, BLOCKS - 1)[number % 3]
            damaged = [part.copy() for part in parts]
            damaged[place].view(np.uint16)[block, number % (damaged[place].shape[1] // 2)] = pattern
            for dtype in VALUE_DTYPES:
                with pytest.raises(DamagedBlock) as found:
                    decoded(coder, damaged, dtype=dtype)
                assert found.value.block == block
            with pytest.raises(DamagedBlock):
                coder.decode_torch([torch.from_numpy(part) for part in damaged])


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
def test_what_encoders_write_is_never_refused(coder: BlockFormat) -> None:
    """Not in the end, nor between two passes, when the exponent does not fit yet; nor is the state in a file."""
    for values in weights_of_all_kinds().values():
        parts, last = whole(values, coder)
        assert coder.sized(values.size).with_settings(json.loads(json.dumps(last.format.stated()))) == last.format
        assert np.isfinite(decode_weight(last.format, parts, values.size, "F32").view(np.float32)).all()
        for dtype in VALUE_DTYPES:
            decoded(last.format, parts, dtype=dtype)
        for place in (place for place, part in enumerate(last.format.parts) if part.dtype == "F16"):
            assert (parts[place].view(np.uint16) < 0x7C00).all()
