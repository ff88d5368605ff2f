"""All codecs in one master go through all commands: nothing outside of formats/ assumes a certain one.

Superblocks of the trellis depend on the size of a weight and hold any rate, and at low ones errors are not orthogonal.
"""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from calls import make_card, plan_quantize, quantize
from closeness import F32_SOLVED, ORTHOGONAL, approx, assert_near
from commands import answer, done, raises, refused
from export_decoders import export_weight
from helpers import as_float32, bf16, folder_bytes, gaussian, master_weights, read_all, run_command, write_checkpoint
from restated import restate_hashes

import pqweights
from pqweights.checkpoint import views
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.views import MovedTensor
from pqweights.common.options import Options
from pqweights.convert.manifest import read_manifest
from pqweights.errors import MasterError
from pqweights.formats import CODECS
from pqweights.formats.master import has_rate
from pqweights.formats.trellis import superblocks
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.planning.choice import choose_recipe
from pqweights.planning.recipe import parse_recipe
from pqweights.results.verify import verify
from pqweights.runtime.loading.packed import PackedTensor, pack

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

SCALAR, TRELLIS = "hadamard-lloyd-max", "hadamard-trellis"
RECIPE = f"""
name: mixed
codec: {TRELLIS}
bits: 2.5
rules:
  - {{name: "*.down_proj.weight", bits: 4.38}}
  - {{role: attention, bits: 3.5}}
  - {{role: embedding, codec: {SCALAR}, bits: 6}}
"""
UP, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def coding_of(name: str) -> tuple[str, float]:
    """The codec and the rate that RECIPE gives a weight."""
    if "self_attn" in name:
        return TRELLIS, 3.5
    return (SCALAR, 6) if name == EMBEDDING else (TRELLIS, 4.38 if "down_proj" in name else 2.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `recipe.yaml` and `master`."""
    folder = tmp_path_factory.mktemp("codecs")
    families.build(families.FAMILIES["llama"], folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    done("quantize", folder / "model", folder / "master", "--recipe", folder / "recipe.yaml")
    return folder


# --- masters ---


def test_weights_are_stored_as_the_recipe_says_and_decode_to_those_encoded_in_memory(folder: Path) -> None:
    shown = {tensor["name"]: tensor for tensor in answer("inspect", folder / "master")["tensors"]}
    weights, decoded = read_all(folder / "model"), master_weights(folder / "master")
    assert {coding_of(name)[0] for name in decoded} == {SCALAR, TRELLIS}
    for name, values in decoded.items():
        codec, bits = coding_of(name)
        assert (shown[name]["codec"], shown[name]["bits"]) == (codec, bits)
        exact = as_float32(weights[name])
        cut = superblocks(exact.size, bits)
        stored = {SCALAR: Fraction(exact.size * 98, 128), TRELLIS: cut.number * cut.stride}
        assert shown[name]["bytes"] == stored[codec], name
        raw = np.ascontiguousarray(exact).reshape(-1).view(np.uint8)
        parts, last = encode_weight(raw, dtype="F32", shape=exact.shape, format=CODECS[codec].at(bits))
        expected = decode_weight(last.format, parts, exact.size, "F32").view(np.float32)
        assert np.array_equal(values, expected.reshape(exact.shape)), name
        error = np.square(values - exact, dtype=np.float64).sum() / np.square(exact, dtype=np.float64).sum()
        assert shown[name]["relative_mse"] == approx(error, F32_SOLVED), name


def test_plan_and_inspect_print_fractional_rates_and_codecs_if_they_are_mixed(folder: Path, tmp_path: Path) -> None:
    shown = done("plan", folder / "model", "--recipe", folder / "recipe.yaml").stdout
    planned = answer("plan", folder / "model", "--recipe", folder / "recipe.yaml")
    assert planned["totals"]["output_bytes"] == sum(f.stat().st_size for f in (folder / "master").glob("*.safetensors"))
    assert "2.5" in shown and "4.38" in shown
    heading, *lines = done("inspect", folder / "master").stdout.split("\n\n")[0].splitlines()
    start, end = heading.index("codec"), heading.index("codec") + max(map(len, CODECS))
    named = {line.split()[0]: line[start:end].strip() for line in lines}
    assert named == {tensor.name: tensor.codec or "" for tensor in read_manifest(folder / "master").tensors}
    done("quantize", folder / "model", tmp_path / "out")
    heading = done("inspect", tmp_path / "out").stdout.splitlines()[0]
    assert "bits" in heading and "codec" not in heading


def test_output_is_identical_across_chunk_sizes_and_thread_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.convert.jobs.CHUNK_WEIGHTS", 1 << 11)
    run_command({"quantize": str(folder / "model"), "recipe": str(folder / "recipe.yaml")}, tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == folder_bytes(folder / "master")


@pytest.mark.parametrize(("codec", "bits"), [(TRELLIS, 1.5), (TRELLIS, 4.0001)])
def test_plan_knows_every_byte_of_weights_of_any_shape(codec: str, bits: float, tmp_path: Path) -> None:
    """Stacks whose matrices share superblocks, tiny and one-dimensional weights, constants and zeros."""
    shapes = {"a": (3, 5), "b": (7, 130), "experts": (5, 77, 300), "c": (96,), "d": (2, 1024), "e": (1, 1)}
    tensors = {f"{name}.mlp.weight": bf16(gaussian(*shape, seed=7)) for name, shape in shapes.items()}
    tensors["constant.mlp.weight"] = bf16(np.full((64, 256), 0.0125, np.float32))
    tensors["zero.mlp.weight"] = bf16(np.zeros((64, 256), np.float32))
    source = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"})
    (tmp_path / "r.yaml").write_text(f"{{codec: {codec}, bits: {bits}, rules: [{{name: '*', bits: {bits}}}]}}")
    planned = answer("plan", source, "--recipe", tmp_path / "r.yaml")
    made = answer("quantize", source, tmp_path / "out", "--recipe", tmp_path / "r.yaml")
    files = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert planned["totals"]["output_bytes"] == made["totals"]["output_bytes"] == files
    assert [t["bytes"] for t in planned["tensors"]] == [t["bytes"] for t in made["tensors"]]
    assert verify(tmp_path / "out", threads=2).ok and not made["exceeding"]
    decoded = master_weights(tmp_path / "out")
    assert {"experts.mlp.weight", "constant.mlp.weight", "zero.mlp.weight"} <= decoded.keys()
    assert not decoded["zero.mlp.weight"].any()


def test_card_says_codec_rate_and_effort(folder: Path, tmp_path: Path) -> None:
    text = make_card(folder / "master", "someone/mixed").text
    assert "Default: `hadamard-trellis`, 2.5 bits." in text
    assert "Marcellin and Fischer" in text and "Vicentino" in text
    done("quantize", folder / "model", tmp_path / "t2", "--recipe", "t2", "--effort", "64")
    text = make_card(tmp_path / "t2").text
    assert "Default: `hadamard-trellis`, 2 bits, effort 64." in text
    assert "Marcellin and Fischer" in text and "Vicentino" not in text


# --- exports, loading ---


@pytest.mark.parametrize(("codec", "bits"), [(SCALAR, 2), (SCALAR, 8), (TRELLIS, 1.5), (TRELLIS, 5), (TRELLIS, 8)])
def test_zeros_stay_exact_zeros_through_masters_and_exports(codec: str, bits: float, tmp_path: Path) -> None:
    """A weight of nothing else, and rows and a block of them among other numbers."""
    weights = {name: gaussian(64, 256, seed=1) for name in (UP, "model.layers.0.self_attn.q_proj.weight")}
    for values, where in zip(weights.values(), (np.s_[:], np.s_[8:24]), strict=True):
        values[where] = values[40, 128:] = 0
    tensors = {name: bf16(values) for name, values in weights.items()}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "dtype": "bfloat16"})
    (tmp_path / "r.yaml").write_text(f"{{codec: {codec}, bits: {bits}}}")
    report = run_command({"quantize": str(source), "recipe": str(tmp_path / "r.yaml")}, tmp_path / "master")
    assert [(r.name, r.relative_mse) for r in report.records if not r.energy] == [(UP, 0.0)]
    for target in ("bf16", "torchao", "vllm"):
        run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / target)
        decoded = {name: export_weight(tmp_path / target)(name) for name in weights}
        assert not any(decoded[name][values == 0].any() for name, values in weights.items()), target
        assert all(decoded[name].any() == values.any() for name, values in weights.items()), target


@pytest.mark.parametrize("target", ["torchao", "vllm", "mlx"])
def test_computed_errors_of_exports_are_those_measured(target: str, folder: Path, tmp_path: Path) -> None:
    """Where errors are not orthogonal to the weights, the total cannot be computed from the master."""
    done("export", folder / "master", tmp_path / "out", "--target", target)
    pairs = read_manifest(tmp_path / "out").pairs
    computed = {record.name: record for tensor, record in pairs if tensor.action == "integer"}
    assert {coding_of(name)[0] for name in computed} >= {TRELLIS}
    weights, decoded = read_all(folder / "model"), export_weight(tmp_path / "out")
    for name, record in computed.items():
        exact = as_float32(weights[name]).astype(np.float64)
        measured = np.square(decoded(name) - exact).sum() / np.square(exact).sum()
        codec, bits = coding_of(name)
        if not CODECS[codec].at(bits).orthogonal_error:
            assert record.total_mse is None, name
        else:
            assert record.total_mse == approx(measured, ORTHOGONAL), name


@pytest.mark.parametrize("packed", [False, True])
def test_loaded_model_has_the_logits_of_the_bf16_export(packed: bool, folder: Path, tmp_path: Path) -> None:
    done("export", folder / "master", tmp_path / "plain", "--target", "bf16")
    exact = master_weights(folder / "master")
    exported = read_all(tmp_path / "plain")
    assert all(np.array_equal(exported[name][1], bf16(values)[1]) for name, values in exact.items())
    assert exported.keys() == read_all(folder / "model").keys()
    expected = families.logits(families.load(tmp_path / "plain", families.FAMILIES["llama"]))
    loaded = pqweights.load_model(folder / "master", dtype="bfloat16", attn_implementation="eager", packed=packed)
    assert isinstance(dict(loaded.named_parameters())[UP], PackedTensor) == packed
    logits = families.logits(loaded.float() if not packed else loaded)
    assert_near(logits, expected, "torch, BF16" if packed else "torch")


def test_stack_whose_matrices_share_superblocks_stays_packed(tmp_path: Path) -> None:
    shapes = {"model.experts.up": (5, 13, 130), EMBEDDING: (301, 70)}
    tensors = {name: bf16(gaussian(*shape, seed=7)) for name, shape in shapes.items()}
    source = write_checkpoint(tmp_path / "model", tensors)
    recipe = parse_recipe(f"{{codec: {TRELLIS}, bits: 4.5, rules: [{{name: '*', bits: 3.3}}]}}", "every.yaml")
    quantize(source, tmp_path / "master", recipe, threads=2)
    exact = {name: torch.from_numpy(np.array(values)) for name, values in master_weights(tmp_path / "master").items()}
    tensors_of_master = {tensor.name: tensor for tensor in open_local(tmp_path / "master").tensors}
    packed = {name: pack(tensor, torch.float32) for name, tensor in tensors_of_master.items()}  # type: ignore[arg-type]
    up, embeddings = packed["model.experts.up"], packed[EMBEDDING]
    assert up is not None and embeddings is not None
    assert torch.equal(up.decode(), exact["model.experts.up"])
    assert torch.equal(up[3].decode(), exact["model.experts.up"][3])
    ids = torch.tensor([[300, 0, 7, 8], [7, 150, 299, 0]])
    assert torch.equal(torch.nn.functional.embedding(ids, embeddings), exact[EMBEDDING][ids])
    # Exports take gate and up apart, whose rows alternate in some models.
    segments = ((tensors_of_master["model.experts.up"], range(3, 63, 2)),)
    layout = {"shape": (30, 7), "dtype": "F32", "columns": range(50, 57), "transposed": False}
    out = np.empty(30 * 7 * 4, dtype=np.uint8)
    MovedTensor(name="up", segments=segments, **layout).read(0, 30 * 7, "F32", out)
    expected = exact["model.experts.up"].reshape(-1, 130)[3:63:2, 50:57]
    assert np.array_equal(out.view(np.float32).reshape(30, 7), expected.numpy())
    # Or columns become rows; the matrix is kept for the next chunk of the same tensor, and for no longer.
    turned = MovedTensor(name="up", segments=segments, **layout | {"shape": (7, 30), "transposed": True})
    for _ in range(2):
        turned.read(0, 30 * 7, "F32", out)
        assert np.array_equal(out.view(np.float32).reshape(7, 30), expected.numpy().T)
        assert sum(key[0]() is turned for key, _ in views._kept) == 1
    del turned
    assert all(key[0]() is not None for key, _ in views._kept)


# --- rates and efforts ---


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_fit_of_a_codec_of_any_rate_leaves_less_than_a_thousandth(share: float, folder: Path) -> None:
    """Between the smallest size and that of the highest rate, whatever the target is given in."""

    def fitted(**target: Any) -> tuple[Any, Any]:
        made = plan_quantize(folder / "model", choose_recipe("q5", Options(codec=TRELLIS, **target)))
        assert made.fit is not None and made.fit.output_bytes == made.output_bytes
        return made.fit, made

    bits = 1.6 + share * 6
    fit, _ = fitted(target_bpw=bits)
    assert 0.999 * bits <= fit.bits_per_weight <= bits
    assert all(has_rate(CODECS[TRELLIS], rate) for rate in fit.rates.values() if rate is not None)
    size = fit.output_bytes - 77
    assert 0.999 <= fitted(target_size=size)[1].output_bytes / size <= 1


def test_codec_by_option_takes_the_nearest_of_its_rates(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"{{codec: {TRELLIS}, bits: 2.6}}")
    planned = answer("plan", folder / "model", "--recipe", tmp_path / "r.yaml", "--codec", SCALAR)["tensors"]
    assert {(t["codec"], t["bits"]) for t in planned if t["codec"]} == {(SCALAR, 3)}


def test_effort_lowers_errors_in_the_same_bytes_and_is_part_of_the_result(folder: Path, tmp_path: Path) -> None:
    plain = ("quantize", folder / "model", tmp_path / "out", "--recipe", "t2")
    quick = answer(*plain)
    assert "effort" not in read_manifest(tmp_path / "out").made_by["recipe"]
    assert f"{tmp_path / 'out'}: " in done(*plain, "--effort", "8").stderr
    assert "effort" in refused(*plain, "--effort", "64")
    assert "(t2, 2 bits)" in refused(*plain, "--bits", "2.01")
    slow = answer(*plain, "--effort", "64", "--overwrite")
    assert read_manifest(tmp_path / "out").made_by["recipe"]["effort"] == 64
    assert slow["totals"]["output_bytes"] == quick["totals"]["output_bytes"]
    assert slow["totals"]["relative_mse"] < 0.98 * quick["totals"]["relative_mse"]
    assert "--effort 64" in refused(*plain)
    mixed = f"{{effort: 64, rules: [{{role: mlp, codec: {TRELLIS}}}]}}"
    assert parse_recipe(mixed, "mine.yaml").to_json()["effort"] == 64
    assert parse_recipe(f"{{codec: {TRELLIS}, bits: 4, effort: 8}}", "mine.yaml").effort is None


# --- damage ---


def test_superblock_that_cannot_be_decoded_is_named(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder / "master", tmp_path / "damaged"))
    (tensor,) = (t for t in open_local(damaged).tensors if t.name == UP)
    (part,) = tensor.parts
    with open(damaged / part.file, "r+b") as stream:
        stream.seek(part.offset + part.byte_count - part.shape[1] // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 64]))
    assert any(UP in problem for problem in verify(damaged, threads=2).problems)
    line = refused("export", damaged, tmp_path / "out", "--target", "bf16")
    assert f"tensor '{part.name}': " in line
    restate_hashes(damaged)
    place = f"tensor '{UP}': block {part.shape[0] - 1}: "
    assert place in refused("export", damaged, tmp_path / "out", "--target", "bf16")
    assert not (tmp_path / "out").exists()
    with raises(MasterError, place):
        pqweights.load_model(damaged)
    loaded = pqweights.load_model(damaged, packed=True, dtype="float32")
    weight = dict(loaded.named_parameters())[UP]
    with torch.inference_mode(), raises(MasterError, place):
        torch.nn.functional.linear(torch.zeros(1, weight.shape[1]), weight)
    assert torch.nn.functional.embedding(torch.tensor([0, 1]), weight).shape == (2, weight.shape[1])


def test_flipped_bits_of_a_trellis_are_found_by_verify_and_nearly_all_by_the_decoder_alone(tmp_path: Path) -> None:
    """Without hashes, decoding shows all but those of a step, the four bytes with which a superblock begins."""
    source = write_checkpoint(tmp_path / "model", {UP: bf16(gaussian(512, 256))})
    quantize(source, tmp_path / "master", parse_recipe(f"{{codec: {TRELLIS}, bits: 3}}", "r.yaml"))
    (tensor,) = open_local(tmp_path / "master").tensors
    (part,) = tensor.parts
    shard, manifest = tmp_path / "master" / part.file, tmp_path / "master/pqweights.json"
    data, stated, noticed = shard.read_bytes(), manifest.read_bytes(), 0
    for at, bit in np.random.default_rng(3).integers(0, (part.byte_count, 8), (50, 2)).tolist():
        wrong = bytearray(data)
        wrong[part.offset + at] ^= 1 << bit
        shard.write_bytes(wrong)
        assert any(UP in problem for problem in verify(tmp_path / "master", threads=1).problems), (at, bit)
        try:
            master_weights(restate_hashes(tmp_path / "master"))
        except MasterError as error:
            noticed += "the master is damaged" in str(error)
        manifest.write_bytes(stated)
    assert noticed == 50


# --- scales of input channels ---


def test_awq_scales_are_searched_and_applied_for_any_codec(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(" ".join(f"w{number % 499}" for number in range(0, 63000, 7)))
    asked = ("--recipe", folder / "recipe.yaml", "--awq", tmp_path / "text", "--calibration-tokens", 4096)
    done("quantize", folder / "model", tmp_path / "out", *asked)
    assert verify(tmp_path / "out", threads=2).ok
    assert {tensor.codec for tensor in read_manifest(tmp_path / "out").tensors if tensor.is_scaled} - {SCALAR, None}
