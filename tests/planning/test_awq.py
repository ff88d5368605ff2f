"""Activation-aware scales of input channels: the file, the master that holds them, and the search for them."""

from __future__ import annotations

import functools
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from calls import learned_scales, plan_quantize
from closeness import F32_MATRIX, F32_SUM, ROUNDED_ONCE_MORE, SAMPLE, SMALL_SAMPLE, approx
from commands import raises
from export_decoders import export_weight, master_weight
from helpers import (
    Tensor,
    as_float32,
    bf16,
    f16,
    f32,
    gaussian,
    read_all,
    run_command,
    safetensors_bytes,
    write_checkpoint,
)
from independent_reader import read_master

from pqweights.calibrate import scale_search
from pqweights.calibrate.scale_search import Inputs, Matrix, divergences, output_errors, search
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.convert.scales import write_scales
from pqweights.errors import MasterError, SourceError
from pqweights.formats import get_codec
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.planning.recipe import Goal, load_recipe
from pqweights.results.inspect import inspect
from pqweights.results.verify import verify
from pqweights.runtime.loading.packed import pack

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

Floats = npt.NDArray[np.float32]
MATRIX, STACK, ODD, SINGLE, KEPT = (
    "a.q_proj.weight",
    "b.experts.up_proj",
    "c.k_proj.weight",
    "d.o_proj.weight",
    "n.weight",
)
TENSORS: dict[str, Tensor] = {
    MATRIX: bf16(gaussian(64, 256, seed=1)),
    STACK: f32(gaussian(3, 8, 128, seed=2)),
    ODD: f16(gaussian(30, 130, seed=3)),  # blocks run over the ends of rows
    SINGLE: bf16(gaussian(32, 128, seed=4)),  # keeps scale 1
    KEPT: bf16(1 + gaussian(128, seed=5)),
}


def some_scales(*shape: int, seed: int) -> Floats:
    wide = np.exp(np.random.default_rng(seed).standard_normal(shape))
    return wide.astype(np.float16).astype(np.float32)


SCALES = {MATRIX: some_scales(256, seed=1), STACK: some_scales(3, 128, seed=2), ODD: some_scales(130, seed=3)}


MATRIX_FOUND = {"scaled": True, "tokens": 8, "input_exponent": 0.5, "weight_exponent": 0.5, "gain": 0.2}


def write_found(path: Path, scales: dict[str, Floats]) -> Path:
    """What a search leaves that found these scales."""
    found = {name: {"matrices": [MATRIX_FOUND | {"held_back_gain": 0.1}]} for name in scales}
    write_scales(path, found, scales)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq") / "src"
    return write_checkpoint(folder, TENSORS, config={"model_type": "llama", "torch_dtype": "bfloat16"})


@pytest.fixture(scope="module")
def awq(source: Path) -> Path:
    return write_found(source.with_name("scales.safetensors"), SCALES)


@pytest.fixture(scope="module")
def master(source: Path, awq: Path) -> Path:
    run_command({"quantize": str(source), "scales": str(awq)}, source.with_name("master"))
    return source.with_name("master")


def per_element(name: str) -> Floats:
    """The scale of each element of a weight."""
    shape = TENSORS[name][1].shape
    return np.broadcast_to(SCALES[name][..., None, :], shape)


def read(tensor: Any, start: int, count: int, dtype: str = "F32") -> npt.NDArray[np.uint8]:
    out = np.empty(count * {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}[dtype], dtype=np.uint8)
    tensor.read(start, count, dtype, out)
    return out


# --- the master ---


def test_scaled_weight_is_encoded_and_decoding_divides(master: Path) -> None:
    tensors = {tensor.name: tensor for tensor in open_local(master).tensors}
    stored = read_all(master)
    for name, values in SCALES.items():
        weight = as_float32(TENSORS[name])
        scaled = np.ascontiguousarray(weight * per_element(name))
        codec = get_codec("hadamard-lloyd-max")
        raw = scaled.view(np.uint8).reshape(-1)
        parts, last = encode_weight(raw, dtype="F32", shape=scaled.shape, format=codec.at(5))
        for suffix, part in zip(("_codes", "_norms"), parts, strict=True):
            assert stored[name + suffix][1].tobytes() == part.tobytes()
        dtype, kept = stored[name + "_awq_scale"]
        assert dtype == "F16"
        assert np.array_equal(kept.astype(np.float32), values)
        expected = decode_weight(last.format, parts, weight.size, "F32").view(np.float32)
        expected = expected.reshape(weight.shape) / per_element(name)
        assert read(tensors[name], 0, weight.size).tobytes() == expected.tobytes()
        # in any range and any dtype
        assert read(tensors[name], 77, 500).tobytes() == expected.reshape(-1)[77:577].tobytes()
        assert read(tensors[name], 77, 500, "F64").view(np.float64).astype(np.float32).tobytes() == (
            expected.reshape(-1)[77:577].tobytes()
        )
        rounded = np.array(as_float32(bf16(expected.reshape(-1)[:300])))
        assert np.array_equal(as_float32(("BF16", read(tensors[name], 0, 300, "BF16").view(np.uint16))), rounded)
    assert SINGLE + "_awq_scale" not in stored


def test_independent_reader_decodes_the_same_weights(master: Path, tmp_path: Path) -> None:
    run_command({"export": str(master), "target": "bf16", "dtype": "source"}, tmp_path / "plain")
    plain = read_all(tmp_path / "plain")
    found = {tensor.name: tensor for tensor in read_master(master)}
    assert found.keys() == plain.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert tensor.data == plain[name][1].tobytes(), name


def test_scales_count_in_bits_per_weight_and_are_verified(source: Path, awq: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run_command({"quantize": str(source), "scales": str(awq)}, out)
    assert verify(out, threads=1).problems == ()
    manifest = read_manifest(out)
    assert [t.name for t in manifest.tensors if t.is_scaled] == [t.name for t in manifest.tensors if t.name in SCALES]
    assert manifest.made_by["awq"]["weights"].keys() == SCALES.keys()
    plain = run_command({"quantize": str(source)}, tmp_path / "plain")
    quantized = sum(values.size for name, (_, values) in TENSORS.items() if name != KEPT)
    added = 16 * sum(values.size for values in SCALES.values()) / quantized
    bits = [found.plan.totals.bits_per_weight for found in (plain, report)]
    assert bits[1] - bits[0] == approx(added)
    assert inspect(out).totals.bits_per_weight == approx(bits[1])
    # the error is that of the scaled weight
    for tensor, record in zip(report.plan.tensors, report.records, strict=True):
        assert tensor.name == KEPT or (record.relative_mse or 1) < 0.004


def test_damaged_scales_of_a_master_are_found(master: Path, tmp_path: Path) -> None:
    """Other shapes and dtypes when it is opened, numbers that no run writes when weights are read, any by verify."""
    out = Path(shutil.copytree(master, tmp_path / "out"))
    file = out / "model-00001-of-00001.safetensors"
    whole, tensors, name = file.read_bytes(), read_all(out), MATRIX + "_awq_scale"
    for wrong in (f16(np.ones(255)), f32(np.ones(256)), f16(np.ones((1, 256)))):
        file.write_bytes(safetensors_bytes(tensors | {name: wrong}))
        with raises(MasterError, "q_proj.weight_awq_scale"):
            open_local(out)
    for number in (np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0**-24):
        values = SCALES[MATRIX].copy()
        values[200] = number
        file.write_bytes(safetensors_bytes(tensors | {name: f16(values)}))
        (weight,) = (tensor for tensor in open_local(out).tensors if tensor.name == MATRIX)
        assert isinstance(weight, EncodedTensor)
        for act in (
            *(functools.partial(read, weight, 0, math.prod(weight.shape), dtype) for dtype in ("F32", "F16", "BF16")),
            functools.partial(pack, weight, torch.float32),
        ):
            with raises(MasterError, "q_proj.weight_awq_scale"):
                act()
    old, new = (values.astype("<f2").tobytes() for values in (SCALES[MATRIX], SCALES[MATRIX] * 2))
    assert whole.count(old) == 1
    file.write_bytes(whole.replace(old, new))
    assert any("q_proj" in problem for problem in verify(out, threads=1).problems)


@pytest.mark.parametrize("target", ["bf16", "torchao", "vllm"])
def test_exports_decode_scaled_weights(target: str, master: Path, tmp_path: Path) -> None:
    run_command({"export": str(master), "target": target}, tmp_path / "out")
    weight = master_weight(master)(MATRIX)
    found = export_weight(tmp_path / "out")(MATRIX)
    error = ((found - weight) ** 2).sum() / (weight**2).sum()
    assert error < (F32_SUM if target == "bf16" else 0.02), error
    # the master's error is that of the scaled weight, so what the export adds to it is not known
    assert all(r.total_mse is None for r in read_manifest(tmp_path / "out").records if r.name == MATRIX)


def test_decoded_weights_beyond_a_dtype_are_clamped(tmp_path: Path) -> None:
    """Small scales make decoded weights large; beyond the dtype they become its largest value, as the format says."""
    name = "a.q_proj.weight"
    source = write_checkpoint(tmp_path / "src", {name: f32(gaussian(8, 128, seed=1, scale=20000))}, config={})
    path, tiny = tmp_path / "s.safetensors", np.full(128, 2.0**-14, dtype=np.float32)
    tiny[:64] = 2.0**14  # these dominate the norm of the block, so that the others get large errors
    write_found(path, {name: tiny})
    run_command({"quantize": str(source), "scales": str(path)}, tmp_path / "out")
    (tensor,) = open_local(tmp_path / "out").tensors
    wide = read(tensor, 0, 1024).view(np.float32)
    assert np.abs(wide).max() > 65504
    half = read(tensor, 0, 1024, "F16").view(np.float16)
    assert np.isfinite(half).all()
    assert np.abs(half).max() == 65504
    assert np.array_equal(half, np.clip(wide, -65504, 65504).astype(np.float16))


def test_scaled_weight_beyond_float32_is_refused(tmp_path: Path) -> None:
    name = "a.q_proj.weight"
    source = write_checkpoint(tmp_path / "src", {name: f32(gaussian(8, 128, seed=1, scale=1e35))}, config={})
    path = tmp_path / "s.safetensors"
    wide = np.full(128, 2.0**15, dtype=np.float32)
    write_found(path, {name: wide})
    with raises(SourceError, name, "float32"):
        run_command({"quantize": str(source), "scales": str(path)}, tmp_path / "out")


# --- what the recipe says ---


def test_weight_that_the_recipe_keeps_is_not_scaled(source: Path, awq: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "keep.yaml"
    recipe.write_text(f"codec: hadamard-lloyd-max\nbits: 5\nrules:\n  - name: {MATRIX}\n    keep: true\n")
    run_command({"quantize": str(source), "scales": str(awq), "recipe": str(recipe)}, tmp_path / "out")
    assert MATRIX + "_awq_scale" not in read_all(tmp_path / "out") and ODD + "_awq_scale" in read_all(tmp_path / "out")


def test_search_without_result_changes_nothing(source: Path, tmp_path: Path) -> None:
    path = write_found(tmp_path / "none.safetensors", {})
    run_command({"quantize": str(source), "scales": str(path)}, tmp_path / "out")
    run_command({"quantize": str(source)}, tmp_path / "plain")
    assert not any(name.endswith("_awq_scale") for name in read_all(tmp_path / "out"))
    (shard,) = (path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (tmp_path / "out" / shard).read_bytes() == (tmp_path / "plain" / shard).read_bytes()


def test_plan_counts_scales_for_all_matrices(source: Path, awq: Path) -> None:
    """Which ones get any is found by the search; a size holds whatever it finds."""
    plans = [plan_quantize(source, load_recipe("q5"), **given) for given in ({"awq": "text.txt"}, {})]
    assert {t.name for t in plans[0].tensors if t.is_scaled} == TENSORS.keys() - {KEPT}
    assert not any(t.is_scaled for t in plans[1].tensors)
    target = replace(load_recipe("q5"), goal=Goal(output_bytes=plans[0].output_bytes))
    most = plan_quantize(source, target, awq="text.txt")
    found = plan_quantize(source, target, awq="text.txt", learned=learned_scales(awq))
    assert [t.bits for t in most.tensors] == [t.bits for t in found.tensors]
    assert found.output_bytes < most.output_bytes <= plans[0].output_bytes


# --- scales of any range ---


# --- the search ---


def a_layer(tmp_path: Path, weight: Floats) -> Any:
    folder = write_checkpoint(tmp_path / "layer", {"w": f32(weight)}, config={"model_type": "llama"})
    (tensor,) = open_local(folder).tensors
    shape = weight.shape
    return Matrix(tensor=tensor, number=0, rows=shape[0], columns=shape[1], block_size=128)


def inputs(rows: Floats, held_back: Floats, windows: int = 8) -> Inputs:
    rms = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=0)).astype(np.float32)
    return Inputs(
        tokens=len(rows), rms=rms, rows=rows, held_back=held_back, windows=np.arange(len(held_back)) % windows
    )


CODEC = get_codec("hadamard-lloyd-max")


def test_output_error_is_the_mean_over_rows() -> None:
    weight, rows, factors = gaussian(40, 256, seed=1), gaussian(16, 256, seed=2, scale=1), some_scales(256, seed=3)
    raw = (weight * factors).view(np.uint8).reshape(-1)
    parts, last = encode_weight(raw, dtype="F32", shape=weight.shape, format=CODEC.at(4))
    values = decode_weight(last.format, parts, weight.size, "F32").view(np.float32)
    decoded = values.reshape(weight.shape).astype(np.float64) / factors
    expected = ((rows.astype(np.float64) @ (decoded - weight).T) ** 2).sum() / 16
    assert output_errors(CODEC.at(4), weight, factors, rows).sum() / 16 == approx(expected, F32_MATRIX)


def test_errors_of_a_head_are_the_divergence_of_its_predictions(tmp_path: Path) -> None:
    weight, rows = gaussian(300, 128, seed=3), gaussian(64, 128, seed=4)
    weight[::7] *= 2  # so that predictions are not all alike
    format, scales = CODEC.at(7), np.exp(gaussian(128, seed=5) / 4).astype(np.float16).astype(np.float32)
    scaled = np.ascontiguousarray(weight * scales)
    parts, last = encode_weight(scaled.view(np.uint8).reshape(-1), dtype="F32", shape=weight.shape, format=format)
    decoded = decode_weight(last.format, parts, weight.size, "F32").view(np.float32).reshape(weight.shape) / scales
    exact, found = (torch.log_softmax(torch.from_numpy(rows @ of.T).double() / 4, -1) for of in (weight, decoded))
    expected = (exact.exp() * (exact - found)).sum(-1).numpy()
    assert divergences(format, a_layer(tmp_path, weight), scales, rows / 4).mean() == approx(expected.mean(), SAMPLE)


def test_gain_for_outlier_channels_matches_theory(tmp_path: Path) -> None:
    """The channels of inputs differ by s, and those of weights by 1 / s, as after training with outliers."""
    random = np.random.default_rng(5)
    sizes = np.exp(1.2 * random.standard_normal(512)).astype(np.float32)
    weight = gaussian(256, 512, seed=6) / sizes
    rows, held_back = (gaussian(400, 512, seed=seed, scale=1) * sizes for seed in (7, 8))
    found, best = search(CODEC.at(5), a_layer(tmp_path, weight), inputs(rows, held_back))
    assert found.scaled
    assert best is not None
    # the sizes of inputs and weights are inverse to each other: only the sum of the exponents is determined
    assert found.input_exponent + found.weight_exponent == approx(1, 0, 1.5 * SMALL_SAMPLE)
    # Within a block, scaling turns mean(w^2) mean(x^2) into mean(w x)^2, because all w x are alike here.
    blocks = sizes.reshape(-1, 128).astype(np.float64)
    theory = 1 - 128 * len(blocks) / ((blocks**2).mean(axis=1) * (blocks**-2).sum(axis=1)).sum()
    assert found.held_back_gain == approx(theory, 0, ROUNDED_ONCE_MORE)
    # and the error of the whole matrix falls by that much on inputs that the search has not seen
    fresh = gaussian(300, 512, seed=9, scale=1) * sizes
    plain, scaled = (
        output_errors(CODEC.at(5), weight, factors, fresh).sum() for factors in (np.ones(512, np.float32), best)
    )
    assert scaled / plain == approx(1 - theory, 1.5 * SMALL_SAMPLE)


def test_scales_without_gain_on_the_held_back_text_are_dropped(tmp_path: Path) -> None:
    sizes = np.exp(1.2 * np.random.default_rng(5).standard_normal(256)).astype(np.float32)
    weight = gaussian(128, 256, seed=6)
    rows, held_back = gaussian(400, 256, seed=1, scale=1) * sizes, gaussian(200, 256, seed=2, scale=1) / sizes
    found, best = search(CODEC.at(5), a_layer(tmp_path, weight), inputs(rows, held_back))
    assert best is None and (found.gain or 0) > 0.05 and (found.held_back_gain or 0) < 0
    assert "held back" in found.reason
    alike = inputs(gaussian(400, 256, seed=1, scale=1), gaussian(200, 256, seed=2, scale=1))
    found, best = search(CODEC.at(5), a_layer(tmp_path / "alike", weight), alike)
    assert best is None and not found.scaled and "1%" in found.reason


@pytest.mark.parametrize(
    ("rows", "held_back", "windows"), [(255, 200, 8), (300, 127, 8), (300, 200, 3), (300, 0, 8), (0, 0, 8)]
)
def test_too_few_tokens_leave_the_scale_at_1(rows: int, held_back: int, windows: int, tmp_path: Path) -> None:
    sizes = np.exp(1.2 * np.random.default_rng(5).standard_normal(128)).astype(np.float32)
    seen = inputs(gaussian(max(rows, 1), 128, seed=1) * sizes, gaussian(held_back, 128, seed=2) * sizes, windows)
    if not rows:
        seen = replace(seen, tokens=0, rows=seen.rows[:0])
    found, best = search(CODEC.at(5), a_layer(tmp_path, gaussian(64, 128, seed=3)), seen)
    assert best is None
    assert "256 tokens, and 128 held back from 4 windows" in found.reason
    assert f"; found {rows}, and {held_back} from {min(windows, held_back)}" in found.reason


def test_gain_from_a_single_window_is_not_significant() -> None:
    windows = np.arange(400) % 8
    steady = np.random.default_rng(1).standard_normal(400) + 1
    assert scale_search.is_clear(steady, windows)
    assert not scale_search.is_clear(-steady, windows)
    one = np.where(windows == 3, 100.0, -1.0)
    assert one.sum() > 0
    assert not scale_search.is_clear(one, windows)
    assert not scale_search.is_clear(steady, np.zeros(400, dtype=np.int64))


def test_matrix_that_shares_blocks_keeps_scale_1(tmp_path: Path) -> None:
    """Experts of 5 x 100 weights share blocks; scales of one would change the codes of the next."""
    weight = gaussian(3, 5, 100, seed=1)
    folder = write_checkpoint(tmp_path / "stack", {"w": f32(weight)}, config={})
    (tensor,) = open_local(folder).tensors
    sizes = np.exp(1.2 * np.random.default_rng(5).standard_normal(100)).astype(np.float32)
    seen = inputs(gaussian(300, 100, seed=1) * sizes, gaussian(200, 100, seed=2) * sizes)
    found, best = search(CODEC.at(5), Matrix(tensor=tensor, number=0, rows=5, columns=100, block_size=128), seen)
    assert best is None
    assert "shares blocks" in found.reason


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_non_finite_activations_and_weights_are_named(value: float, tmp_path: Path) -> None:
    seen = inputs(gaussian(300, 128, seed=1), gaussian(200, 128, seed=2))
    for broken in (replace(seen, rms=seen.rms * np.float32(value)), replace(seen, held_back=seen.held_back + value)):
        found, best = search(CODEC.at(5), a_layer(tmp_path, gaussian(64, 128, seed=3)), broken)
        assert best is None
        assert "not finite" in found.reason
    weight = gaussian(64, 128, seed=3)
    weight[40, 3] = value
    with raises(SourceError, "'w'", "finite"):
        search(CODEC.at(5), a_layer(tmp_path / "weights", weight), seen)


def test_channels_of_zeros_get_a_finite_scale(tmp_path: Path) -> None:
    rows, held_back = gaussian(400, 256, seed=1, scale=1), gaussian(200, 256, seed=2, scale=1)
    rows[:, ::2] = held_back[:, ::2] = 0
    weight = gaussian(128, 256, seed=3)
    weight[:, 1::8] = 0
    found, best = search(CODEC.at(5), a_layer(tmp_path, weight), inputs(rows, held_back))
    assert found.scaled
    assert best is not None
    assert np.isfinite(best).all()
    assert (best >= 2.0**-14).all()
