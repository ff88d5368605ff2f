"""The factors against an independent reference, and channels that are dead, huge, or not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import F32_FEW, F32_MATRIX, F32_SOLVED, F32_SUM, F64_SUM, SMALLEST, approx, each_near, rounding
from folding_models import CONFIG, HEAD, KEY_HEADS, LAYERS, Floats, columns_of, folded_values, llama_tensors, measured
from helpers import Tensor, as_float32, folder_bytes, run_command, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from pqweights.checkpoint.source import open_local
from pqweights.errors import PqweightsError, SourceError
from pqweights.rewrite.folding import fold as folds
from pqweights.rewrite.folding import sizes
from pqweights.rewrite.folding.sizes import LARGEST_FACTOR, factors_of, folded_gain, keeping_bits, rounded_to_8_bits

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return write_checkpoint(folder, tensors, config=CONFIG)


def changed(name: str, change: Any) -> dict[str, Tensor]:
    """The tensors of the Llama in float32, with one changed in place."""
    tensors = llama_tensors("F32")
    values = tensors[name][1].copy()
    change(values)
    return tensors | {name: ("F32", values)}


# --- Against a reference ----------------------------------------------------------------------------------------------


def reference(x: Doubles, w: Doubles) -> Doubles:
    """The factors c = sqrt(x / w) around 1, before they are rounded."""
    logarithms = 0.5 * (np.log(x) - np.log(w))
    return np.exp(logarithms - logarithms.mean())


def by_hand(values: dict[str, Doubles]) -> dict[str, Doubles]:
    """The factors of each link of the Llama, one matrix at a time, in float64."""
    result = {}
    for layer in range(LAYERS):
        of = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): matrix
            for name, matrix in values.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for norm, names in (
            ("input_layernorm", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            columns = np.sqrt((np.concatenate([of[name] for name in names]) ** 2).mean(axis=0))
            result[f"model.layers.{layer}.{norm}"] = reference(np.abs(of[norm]), columns)
        rows = np.linalg.norm(of["mlp.up_proj"] * of["post_attention_layernorm"], axis=1)
        columns = np.sqrt((of["mlp.down_proj"] ** 2).mean(axis=0))
        result[f"model.layers.{layer}.mlp.up_proj"] = reference(rows, columns)
        rows = np.linalg.norm(of["self_attn.v_proj"] * of["input_layernorm"], axis=1)
        by_head = of["self_attn.o_proj"].reshape(-1, KEY_HEADS, 2, HEAD)
        columns = np.sqrt((by_head**2).mean(axis=(0, 2))).reshape(-1)
        result[f"model.layers.{layer}.self_attn.v_proj"] = reference(rows, columns)
    head = np.sqrt((values["lm_head.weight"] ** 2).mean(axis=0))
    result["model.norm"] = reference(np.abs(values["model.norm.weight"]), head)
    return result


@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_factors_are_those_of_the_reference(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_WEIGHTS", chunk)
    tensors = llama_tensors("BF16")
    values = {name: as_float32(tensor).astype(np.float64) for name, tensor in tensors.items()}
    expected = by_hand(values)
    fold = measured(checkpoint(tmp_path / "source", tensors), tmp_path / "work")
    assert columns_of(fold).keys() == expected.keys()
    for number, link in enumerate(fold.structure.links):
        found = fold._known[number]
        assert found is not None
        assert each_near(found[0], expected[link.name], rounding("BF16", 1))
        assert np.array_equal(found, rounded_to_8_bits(found))


sizes_of_channels = st.lists(st.floats(0, 1e30), min_size=1, max_size=40)


@given(sizes_of_channels, st.integers(0, 2**32 - 1), st.booleans())
def test_property_factors_are_bounded_and_finite(x: list[float], seed: int, powers_of_two: bool) -> None:
    w = np.random.default_rng(seed).lognormal(0, 3, len(x)) * (np.arange(len(x)) % 3 > 0)
    columns, gain = factors_of(np.array([x]), w[None], powers_of_two=powers_of_two)
    assert np.isfinite(columns).all() and np.isfinite(gain)
    assert 1 / LARGEST_FACTOR <= columns.min() <= columns.max() <= LARGEST_FACTOR
    assert -F64_SUM <= gain <= 1
    if powers_of_two:
        assert (np.frexp(columns)[0] == 0.5).all()


def test_property_factors_minimize_the_expected_error() -> None:
    random = np.random.default_rng(1)
    x, w = random.lognormal(0, 1, (1, 64)), random.lognormal(0, 1, (1, 64))
    rounded, gain = factors_of(x, w, powers_of_two=False)
    columns = rounded.astype(np.float64)

    def error(c: Doubles) -> float:
        return float(((x / c) ** 2).mean() * ((w * c) ** 2).mean())

    assert error(columns) == approx((1 - gain) * error(np.ones(64)), F32_SOLVED)
    for _ in range(50):
        assert error(columns) <= error(columns * random.lognormal(0, 0.1, (1, 64))) * (1 + F32_MATRIX)


@pytest.mark.parametrize(("dtype", "largest", "width", "spread"), [("BF16", 8, 32, 2), ("F16", 60000, 16, 5)])
@settings(deadline=None)
@given(data=st.data(), zero_centred=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_property_a_folded_gain_keeps_the_product(
    dtype: str, largest: int, width: Any, spread: int, data: st.DataObject, zero_centred: bool, seed: int
) -> None:
    weight = data.draw(st.lists(st.floats(-largest, largest, width=width), min_size=1, max_size=40))
    values = np.array(weight, dtype=np.float32)
    columns = rounded_to_8_bits(np.random.default_rng(seed).lognormal(0, spread, len(values)).astype(np.float32))
    found = folded_gain(values, columns, zero_centred=zero_centred, exact=False, dtype=dtype)
    assert dtype != "F16" or np.array_equal(found.stored.astype(np.float16), found.stored)
    # A model multiplies by 1 + weight in float32.
    computed = (found.stored + np.float32(zero_centred)).astype(np.float64)
    assert each_near(computed * found.columns, values.astype(np.float64) + zero_centred, rounding("F32", 4), SMALLEST)


# --- Plain tensors in float16 ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_property_powers_of_two_keep_the_bits_of_float16(values: list[float], seed: int) -> None:
    vector = np.array(values, dtype=np.float32)
    columns = np.exp2(np.random.default_rng(seed).integers(-12, 13, len(vector))).astype(np.float32)
    kept = keeping_bits(columns, [(vector, "F16")])
    with np.errstate(over="ignore"):
        alone = (vector / columns).astype(np.float16).astype(np.float32) * columns == vector
    assert np.array_equal(kept, np.where(alone, columns, 1))


def test_weight_that_stays_plain_in_float16_leaves_its_vector_alone(tmp_path: Path) -> None:
    source = open_local(checkpoint(tmp_path / "source", llama_tensors("F16")))
    fold = folds.Fold(source, plain=[GATE, "model.layers.0.self_attn.v_proj.weight"])
    (reason,) = fold.structure.left
    assert "float16" in reason
    assert fold.structure.left[reason] == (
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.post_attention_layernorm",
    )


# --- Channels that are dead, huge, or not finite ----------------------------------------------------------------------

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        (DOWN, [(slice(None, None, 7), 0)]),
        (UP, [(slice(None, None, 7), 0)]),
        (UP, [(slice(None), 0)]),
        (DOWN, [(slice(None), 0)]),
        (NORM, [(slice(None, None, 5), 0), (slice(1, None, 5), -1)]),
        (NORM, [(slice(None), 0)]),
        (NORM, [(0, 1e12), (1, 1e-12)]),
        (DOWN, [(0, 1e12), (1, 1e-12)]),
    ],
)
def test_odd_channels_keep_the_function(
    name: str, factors: list[tuple[Any, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """factors: by what channels are multiplied"""
    monkeypatch.setattr(folds, "SMALLEST_GAIN", -1.0)

    def multiply(values: Floats) -> None:
        for channels, factor in factors:
            values[..., channels] *= factor

    tensors = changed(name, multiply)
    before = {key: as_float32(value).astype(np.float64) for key, value in tensors.items()}
    found = folded_values(measured(checkpoint(tmp_path / "source", tensors), tmp_path / "work"))
    assert all(np.isfinite(values).all() for values in found.values())
    after = {key: values.astype(np.float64) for key, values in found.items()}
    for weight in (UP, GATE):
        rows = after[weight] * after[NORM], before[weight] * before[NORM]
        if weight == GATE:
            assert each_near(*rows, F32_FEW)
    products = [(each[DOWN] @ (each[UP] * each[NORM])) for each in (after, before)]
    assert each_near(*products, F32_SUM, F32_FEW * np.abs(products[1]).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [UP, DOWN, "model.layers.1.self_attn.k_proj.weight"])
def test_weight_that_is_not_finite_is_named(name: str, value: float, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", changed(name, lambda values: values.__setitem__((3, 5), value)))
    with pytest.raises(PqweightsError, match=f"{name}"):
        run_command({"quantize": str(source), "fold": "equalize"}, tmp_path / "out")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_gain_that_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", changed(NORM, lambda values: values.__setitem__(3, value)))
    with pytest.raises(SourceError, match=f"model.safetensors: .*{NORM}.*finite gains"):
        run_command({"quantize": str(source), "fold": "equalize"}, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not folder_bytes(tmp_path / "out")


def test_weights_too_large_for_float32_squares_are_folded_or_left(tmp_path: Path) -> None:
    def enlarge(values: Floats) -> None:
        values *= 1e22

    source = checkpoint(tmp_path / "source", changed(UP, enlarge))
    found = folded_values(measured(source, tmp_path / "work"))
    assert all(np.isfinite(values).all() for values in found.values())
