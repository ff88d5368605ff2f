"""Two codecs that only the tests have go through all commands, to show that nothing else assumes a certain codec.

They share a master with the trellis codec and the scalar one. One has superblocks whose weights and bytes depend on the
size of the weight, and any rate; the other has no norms, its own stored tensors, and blocks of 96. Both are added by an
entry in CODECS (tests/support/added_codecs.py).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from added_codecs import ADDED
from calls import make_card, plan_quantize, quantize
from commands import answer, done, invoke, refused
from helpers import (
    Array,
    as_float32,
    bf16,
    folder_bytes,
    gaussian,
    killed_runs,
    master_weights,
    read_all,
    run_command,
    safetensors_bytes,
    write_checkpoint,
)
from restated import restate_hashes
from superblock_codec import SuperblockCodec, SuperblockCoder

import pqweights
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment
from pqweights.codecs import CODECS
from pqweights.codecs.hadamard_trellis import superblocks
from pqweights.codecs.protocol import has_rate
from pqweights.codecs.weight import encode_weight
from pqweights.errors import MasterError
from pqweights.integrations.packed import PackedTensor, pack
from pqweights.options import RecipeOptions
from pqweights.planning.choice import choose_recipe
from pqweights.planning.fit import Fit
from pqweights.planning.plan import Plan
from pqweights.planning.recipe import parse_recipe
from pqweights.quality.measure.scale_search import Inputs, Matrix, search
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.verify import verify

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

RECIPE = """
name: mixed
codec: test-superblocks
bits: 2.5
rules:
  - {name: "*layers.0.mlp.down_proj*", codec: hadamard-trellis, bits: 4.38}
  - {name: "*layers.1.mlp.down_proj*", codec: test-polar, bits: 12}
  - {role: attention, codec: test-polar, bits: 8}
  - {role: lm_head, bits: 4.5}
  - {role: embedding, codec: hadamard-lloyd-max, bits: 6}
"""
# Stored bits per weight, for weights that are a whole number of blocks.
STORED_BITS = {
    ("test-superblocks", 2.5): Fraction(336 * 8, 1024),
    ("test-superblocks", 4.5): Fraction(592 * 8, 1024),
    ("hadamard-lloyd-max", 6): Fraction(98 * 8, 128),
}


def expected_coding(name: str) -> tuple[str, float]:
    """Return the codec and the rate that RECIPE gives a weight."""
    if "mlp.down_proj" in name:
        return ("test-polar", 12) if "layers.1" in name else ("hadamard-trellis", 4.38)
    if "self_attn" in name:
        return "test-polar", 8
    if "lm_head" in name:
        return "test-superblocks", 4.5
    return ("hadamard-lloyd-max", 6) if "embed_tokens" in name else ("test-superblocks", 2.5)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, codec in ADDED.items():
        monkeypatch.setitem(CODECS, name, codec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `recipe.yaml` and `master`."""
    folder = tmp_path_factory.mktemp("seam")
    families.build(families.FAMILIES["llama"], folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        for name, codec in ADDED.items():
            patch.setitem(CODECS, name, codec)
        done("quantize", folder / "model", folder / "master", "--recipe", folder / "recipe.yaml")
    return folder


def in_memory(values: Array, name: str) -> Array:
    """Encode a weight in memory and return what it decodes to."""
    codec, bits = expected_coding(name)
    weight, _ = encode_weight(
        np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint8),
        dtype="F32",
        shape=values.shape,
        coder=ADDED.get(codec, CODECS[codec]).coder(bits),
    )
    return weight.decode().view(np.float32).reshape(values.shape)


def test_weights_are_stored_as_the_recipe_says(folder: Path) -> None:
    found = {tensor["name"]: tensor for tensor in answer("inspect", folder / "master")["tensors"]}
    quantized = {name: tensor for name, tensor in found.items() if tensor["action"] == "quantize"}
    assert {(t["codec"], t["bits"]) for t in quantized.values()} == {
        ("test-superblocks", 2.5),
        ("test-superblocks", 4.5),
        ("test-polar", 8),
        ("test-polar", 12),
        ("hadamard-lloyd-max", 6),
        ("hadamard-trellis", 4.38),
    }
    for name, tensor in quantized.items():
        coding = expected_coding(name)
        assert (tensor["codec"], tensor["bits"]) == coding, name
        stored = STORED_BITS.get(coding)
        weights = math.prod(tensor["shape"])
        if coding[0] == "hadamard-trellis":
            cut = superblocks(weights, coding[1])
            stored = Fraction(cut.number * cut.stride * 8, weights)
        elif stored is None:
            stored = Fraction(-(-weights // 96) * 48 * (2 if coding[1] == 8 else 3) * 8, weights)
        assert tensor["bytes"] * 8 == stored * weights, name


def test_master_decodes_to_the_weights_encoded_in_memory(folder: Path) -> None:
    weights = read_all(folder / "model")
    decoded = master_weights(folder / "master")
    assert len(decoded) == 16
    for name, values in decoded.items():
        assert np.array_equal(values, in_memory(as_float32(weights[name]), name)), name


def test_plan_and_inspect_print_fractional_rates(folder: Path) -> None:
    shown = done("plan", folder / "model", "--recipe", folder / "recipe.yaml").stdout
    planned = answer("plan", folder / "model", "--recipe", folder / "recipe.yaml")
    assert planned["totals"]["output_bytes"] == sum(f.stat().st_size for f in (folder / "master").glob("*.safetensors"))
    assert "2.5" in shown and "4.5" in shown
    listed = done("inspect", folder / "master").stdout
    assert "2.5" in listed and "clip 1.0" in listed and "octave -" in listed


def test_inspect_shows_the_codec_of_each_weight_if_codecs_are_mixed(folder: Path) -> None:
    heading, *lines = done("inspect", folder / "master").stdout.split("\n\n")[0].splitlines()
    start, end = heading.index("codec"), heading.index("codec") + max(map(len, CODECS))
    shown = {line.split()[0]: line[start:end].strip() for line in lines}
    assert shown == {tensor.name: tensor.codec or "" for tensor in read_manifest(folder / "master").tensors}
    assert set(shown.values()) == {"", "hadamard-lloyd-max", "hadamard-trellis", "test-polar", "test-superblocks"}


def test_inspect_has_no_codec_column_for_a_single_codec(folder: Path, tmp_path: Path) -> None:
    done("quantize", folder / "model", tmp_path / "out")
    heading = done("inspect", tmp_path / "out").stdout.splitlines()[0]
    assert "bits" in heading and "codec" not in heading


def test_bits_option_takes_fractional_rates(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "plain.yaml"
    recipe.write_text("codec: test-superblocks\nbits: 2.5\n")
    done("quantize", folder / "model", tmp_path / "out", "--recipe", recipe, "--bits", "3.5")
    assert {t.bits for t in read_manifest(tmp_path / "out").tensors if t.codec} == {3.5}
    line = refused("quantize", folder / "model", tmp_path / "no", "--recipe", recipe, "--bits", "5", code=2)
    assert line == (
        "error: --bits: expected any number of bits from 2.5 to 4.5 for test-superblocks, found 5; hadamard-lloyd-max "
        "has a whole number of bits from 2 to 8\n"
    )


def test_killed_run_continues_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    work = {"quantize": str(folder / "model"), "recipe": str(folder / "recipe.yaml")}
    (counts,) = killed_runs(work | {"added_codecs": True}, [{"out": str(tmp_path / "whole")}])
    undisturbed = folder_bytes(folder / "master")
    assert folder_bytes(tmp_path / "whole") == undisturbed
    points = [
        {"out": str(tmp_path / f"{function}-{number}-{when}"), "function": function, "number": number, "when": when}
        for function in ("pwrite", "replace")
        for number in sorted({1, counts[function] // 3 or 1, counts[function] // 2 or 1, counts[function]})
        for when in ("before", "after")
    ]
    killed_runs(work | {"added_codecs": True}, points)
    for point in points:
        run_command(work, Path(point["out"]))
        assert folder_bytes(Path(point["out"])) == undisturbed, point


def test_output_is_identical_across_chunk_sizes_and_thread_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.rewrite.jobs.CHUNK_WEIGHTS", 1 << 11)
    run_command({"quantize": str(folder / "model"), "recipe": str(folder / "recipe.yaml")}, tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == folder_bytes(folder / "master")


@pytest.mark.parametrize(
    ("options", "packages"),
    [
        (("--target", "bf16"), ()),
        (("--target", "torchao-int4"), ("torchao",)),
        (("--target", "vllm"), ("compressed_tensors",)),
        (("--target", "mlx"), ("mlx_lm",)),
        (("--target", "mlx", "--source"), ("mlx_lm",)),
    ],
    ids=" ".join,
)
def test_exports_hold_the_decoded_weights(
    options: tuple[str, ...], packages: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package)
    with_source = options[-1] == "--source"
    arguments = (*options, folder / "model") if with_source else options
    done("export", folder / "master", tmp_path / "out", *arguments)
    records = {t.name: r for t, r in read_manifest(tmp_path / "out").pairs if t.action == "integer"}
    for record in records.values():
        # Where errors are not orthogonal to the weights, the total cannot be computed from the master.
        known = with_source or expected_coding(record.name)[0].startswith("hadamard-")
        assert (record.total_mse is not None) == known, record.name
    if options[1] == "bf16":
        plain, weights = read_all(tmp_path / "out"), read_all(folder / "model")
        for name, values in master_weights(folder / "master").items():
            assert np.array_equal(plain[name][1], bf16(values)[1]), name
        assert plain.keys() == weights.keys()


@pytest.mark.parametrize("packed", [False, True])
def test_loaded_model_has_the_logits_of_the_bf16_export(packed: bool, folder: Path, tmp_path: Path) -> None:
    done("export", folder / "master", tmp_path / "plain", "--target", "bf16")
    expected = families.logits(families.load(tmp_path / "plain", families.FAMILIES["llama"]))
    loaded = pqweights.load_model(folder / "master", dtype="bfloat16", attn_implementation="eager", packed=packed)
    kinds = {name: type(parameter) for name, parameter in loaded.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] is PackedTensor or packed is False, kinds
    found = families.logits(loaded.float() if not packed else loaded)
    tolerance = 2.0**-5 if packed else 1e-6
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_packed_weight_on_another_device_decodes_with_its_codec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of other devices, run on the CPU."""
    from pqweights.integrations.packed_rows import PackedRows as rows

    loaded = pqweights.load_model(folder / "master", packed=True, dtype="float32")
    monkeypatch.setattr(
        rows, "_decode_numpy", lambda self, row, *args, **keywords: rows._decode_torch(self, *args, **keywords)
    )
    exact = master_weights(folder / "master")
    seen = 0
    for name, parameter in loaded.named_parameters():
        if isinstance(parameter, PackedTensor):
            assert np.array_equal(parameter.decode().numpy(), exact[name]), name
            seen += 1
    assert seen == len(exact)


COARSE, FINE = (2.5, 3.5, 4.5), tuple(eighths / 8 for eighths in range(20, 37))


@pytest.mark.parametrize(("share", "rates"), [(0.02, COARSE), (0.3, FINE), (0.61, COARSE), (0.9, FINE)])
def test_fit_of_a_codec_of_any_rate_leaves_less_than_a_thousandth(
    share: float, rates: tuple[float, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the smallest size and that of the highest rate, whatever the target is given in."""
    monkeypatch.setattr(SuperblockCodec, "rates", rates)

    def fitted(**target: Any) -> tuple[Fit, Plan]:
        recipe = choose_recipe("q5", RecipeOptions(codec="test-superblocks", **target))
        _, transform, plan = plan_quantize(folder / "model", recipe)
        assert transform.fit is not None and transform.fit.output_bytes == plan.output_bytes
        return transform.fit, plan

    bits = 2.625 + share * 2
    fit, _ = fitted(target_bpw=bits)
    assert 0.999 * bits <= fit.bits_per_weight <= bits
    assert all(has_rate(ADDED["test-superblocks"], rate) for rate in fit.rates.values() if rate is not None)
    size = fit.output_bytes - 77
    assert 0.999 <= fitted(target_size=size)[1].output_bytes / size <= 1


def test_fit_with_finer_rates_is_the_plan_of_the_master(folder: Path, tmp_path: Path) -> None:
    options = ("--codec", "test-superblocks", "--target-bpw", "4.3")
    planned = answer("plan", folder / "model", *options)
    made = answer("quantize", folder / "model", tmp_path / "out", *options)
    assert made["totals"]["output_bytes"] == planned["totals"]["output_bytes"]
    assert 4.2957 <= planned["fit"]["bits_per_weight"] <= 4.3
    assert [t["bits"] for t in made["tensors"]] == [t["bits"] for t in planned["tensors"]]
    assert verify(tmp_path / "out", threads=2).ok
    assert answer("quantize", folder / "model", tmp_path / "out", *options)["already_done"]


def test_card_names_the_codec_and_the_rate(folder: Path) -> None:
    text = make_card(folder / "master", "someone/mixed").text
    assert "test-superblocks" in text and "2.5" in text


def test_configuration_states_what_decoding_needs(folder: Path) -> None:
    settings = json.loads((folder / "master" / "config.json").read_bytes())["quantization_config"]
    assert settings["format_version"] == 3
    # The most common settings are the defaults; each weight counts once.
    assert (settings["codec"], settings["bits"], settings["clip"]) == ("test-polar", 8, 1.0)
    assert settings["levels"].keys() == {"hadamard-lloyd-max", "test-superblocks"}
    assert settings["levels"]["test-superblocks"].keys() == {"2.5", "4.5"}
    assert settings["block_size"] == 96
    own = settings["overrides"]
    # Rows of 256 weights hold no whole superblock.
    coded = {"codec": "test-superblocks", "bits": 2.5, "shape": [512, 256]}
    assert own["model.layers.0.mlp.up_proj.weight"] == coded
    assert own["model.layers.0.self_attn.q_proj.weight"].keys() == {"octave", "shape"}
    assert own["model.embed_tokens.weight"] == {"codec": "hadamard-lloyd-max", "bits": 6}


def test_version_without_the_codec_refuses_the_master(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {name: codec for name, codec in CODECS.items() if codec.format_version == 1}
    monkeypatch.setattr("pqweights.checkpoint.master.CODECS", first)
    with pytest.raises(MasterError, match="format_version: expected 1, found 3; a newer pqweights"):
        open_local(folder / "master")


DAMAGES: dict[str, tuple[Any, str]] = {
    "a state of the wrong type": (
        lambda q: q["overrides"].values().__iter__().__next__().update(octave="high"),
        "octave",
    ),
    "an invalid default state": (lambda q: q.update(clip=0.3), "clip: expected 1 or 0.75"),
    "tables of another rate": (lambda q: q["levels"]["test-superblocks"].update({"2.5": {"even": []}}), "levels"),
    "a rate that the codec does not have": (
        lambda q: q["overrides"]["lm_head.weight"].update(bits=5),
        "expected any number of bits from 2.5 to 4.5",
    ),
    "a weight whose blocks depend on its size, without its shape": (
        lambda q: q["overrides"]["lm_head.weight"].pop("shape"),
        "shape: expected that of the weight, as for all weights of test-superblocks",
    ),
    "another shape": (
        lambda q: q["overrides"]["lm_head.weight"].update(shape=[10**9, 10**9]),
        "'lm_head.weight_super_codes': expected U8",
    ),
    "the state of another codec": (lambda q: q["overrides"]["lm_head.weight"].update(octave=1), "unknown key 'octave'"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_configuration_is_refused_in_one_line(change: Any, message: str, folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder / "master", tmp_path / "master"))
    config = json.loads((damaged / "config.json").read_bytes())
    change(config["quantization_config"])
    (damaged / "config.json").write_text(json.dumps(config))
    assert message in refused("export", damaged, tmp_path / "out", "--target", "bf16")


@pytest.mark.parametrize("suffix", ["_super_codes", "_radii", "_angles"])
def test_missing_part_is_named(suffix: str, folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder / "master", tmp_path / "master"))
    (file,) = damaged.glob("*.safetensors")
    stored = read_all(damaged)
    name = next(name for name in stored if name.endswith(suffix) and "down_proj" not in name)
    stored.pop(name)
    file.write_bytes(safetensors_bytes(stored))
    assert invoke("verify", damaged).exit_code == 1
    (damaged / "pqweights.json").unlink()  # it says already that the file has another size
    with pytest.raises(MasterError, match=name.removesuffix(suffix)):
        pqweights.load_model(damaged)


def test_weights_of_any_shape(tmp_path: Path) -> None:
    """Fewer weights than a block, rows that are not a multiple of the block size, stacks of experts, one dimension."""
    shapes = {"a": (3, 5), "b": (7, 130), "experts": (4, 64, 96), "c": (96,), "d": (2, 1024), "e": (1, 1)}
    tensors = {f"{name}.mlp.weight": bf16(gaussian(*shape, seed=7)) for name, shape in shapes.items()}
    source = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"})
    for codec, bits in (("test-superblocks", 4.5), ("test-polar", 8)):
        recipe = parse_recipe(f"{{codec: {codec}, bits: {bits}, rules: [{{name: '*', bits: {bits}}}]}}", "every.yaml")
        out = tmp_path / codec
        quantize(source, out, recipe, threads=2)
        decoded = master_weights(out)
        for name, (_, values) in tensors.items():
            if name not in decoded:  # codes would take more bytes than the weight
                continue
            exact = as_float32(("BF16", values)).astype(np.float64)
            error = ((decoded[name] - exact) ** 2).sum() / (exact**2).sum()
            assert error < 1.5 * CODECS[codec].coder(bits).distortion, name
            assert math.prod(decoded[name].shape) == values.size
        assert len(decoded) >= 2, codec
        assert verify(out, threads=2).ok


def test_awq_scales_are_searched_and_applied_for_any_codec(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(" ".join(f"w{number % 499}" for number in range(0, 21000, 7)))
    recipe, scales = folder / "recipe.yaml", tmp_path / "scales.safetensors"
    text = ("--text", tmp_path / "text", "--window", 64, "--max-tokens", 2048)
    done("calibrate", folder / "model", scales, "--recipe", recipe, *text)
    done("quantize", folder / "model", tmp_path / "out", "--recipe", recipe, "--awq", scales)
    assert verify(tmp_path / "out", threads=2).ok
    scaled = [tensor for tensor in read_manifest(tmp_path / "out").tensors if tensor.is_scaled]
    assert {tensor.codec for tensor in scaled} >= {"test-superblocks", "test-polar"}


# --- rates, efforts and codecs that options give ---

REFUSED_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "a fraction for a scalar codec": (
        ("--bits", "4.38"),
        "--bits: expected a whole number of bits from 2 to 8 for hadamard-lloyd-max, found 4.38; hadamard-trellis has "
        "any number of bits from 1.5 to 8",
    ),
    "nearly a whole number": (
        ("--bits", "4.0001"),
        "--bits: expected a whole number of bits from 2 to 8 for hadamard-lloyd-max, found 4.0001; hadamard-trellis "
        "has any number of bits from 1.5 to 8",
    ),
    "too few for all": (
        ("--bits", "1"),
        "--bits: expected a whole number of bits from 2 to 8 for hadamard-lloyd-max, found 1",
    ),
    "not a number": (
        ("--codec", "test-superblocks", "--bits", "nan"),
        "--bits: expected any number of bits from 2.5 to 4.5 for test-superblocks, found nan",
    ),
    "a fraction for one pattern": (
        ("--set", "*down_proj*=3.3"),
        "--set *down_proj*=3.3: expected a whole number of bits from 2 to 8 for hadamard-lloyd-max, found 3.3; "
        "hadamard-trellis has any number of bits from 1.5 to 8",
    ),
    "an effort that the codec does not have": (
        ("--codec", "test-superblocks", "--effort", "3"),
        "--effort: expected an effort of 1 or 2 for test-superblocks, found 3",
    ),
    "an effort for a codec without": (
        ("--effort", "2"),
        "--effort: hadamard-lloyd-max has no effort setting, found 2; hadamard-trellis has 8, 64 or 256",
    ),
    "an unknown codec": (
        ("--codec", "test-superblock"),
        "--codec: no codec is called 'test-superblock'; the nearest is 'test-superblocks'; expected "
        f"{', '.join(dict.fromkeys([*CODECS, *ADDED]))}",
    ),
}


@pytest.mark.parametrize(("arguments", "line"), REFUSED_OPTIONS.values(), ids=REFUSED_OPTIONS.keys())
@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_refused_options_name_what_is_possible(
    command: str, arguments: tuple[str, ...], line: str, folder: Path, tmp_path: Path
) -> None:
    places = (folder / "model",) if command == "plan" else (folder / "model", tmp_path / "out")
    assert refused(command, *places, *arguments, code=2) == f"error: {line}\n"
    assert not (tmp_path / "out").exists()


def test_effort_of_a_recipe_needs_one_codec_that_has_it() -> None:
    mixed = "{effort: 2, rules: [{role: mlp, codec: test-superblocks}]}"
    assert parse_recipe(mixed, "mine.yaml").to_json()["effort"] == 2
    assert "effort" not in parse_recipe("{codec: test-superblocks}", "mine.yaml").to_json()


def test_codec_and_any_rate_by_options(folder: Path, tmp_path: Path) -> None:
    options = ("--codec", "test-superblocks", "--bits", "4.38")
    done("quantize", folder / "model", tmp_path / "out", *options)
    manifest = read_manifest(tmp_path / "out")
    assert {(t.codec, t.bits) for t in manifest.tensors if t.codec} == {("test-superblocks", 4.38)}
    assert verify(tmp_path / "out", threads=2).ok
    assert master_weights(tmp_path / "out")
    assert answer("quantize", folder / "model", tmp_path / "out", *options)["already_done"]
    settings = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    assert settings["block_size"] == 128
    assert settings["bits"] == 4.38
    card = make_card(tmp_path / "out", "someone/any").text
    assert "with `test-superblocks` in place of its own codec and 4.38 bits in place of its own bit width" in card


def test_codec_by_option_takes_the_nearest_of_its_rates(folder: Path) -> None:
    planned = answer("plan", folder / "model", "--codec", "test-superblocks")["tensors"]
    assert {(t["codec"], t["bits"]) for t in planned if t["codec"]} == {("test-superblocks", 4.5)}


def test_effort_lowers_errors_in_the_same_bytes_and_is_part_of_the_result(folder: Path, tmp_path: Path) -> None:
    plain = ("quantize", folder / "model", tmp_path / "out", "--codec", "test-superblocks", "--bits", "2.5")
    quick = answer(*plain)
    assert "effort" not in read_manifest(tmp_path / "out").made_by["recipe"]
    assert "already holds this result" in done(*plain).stderr
    assert "made with the default effort" in refused(*plain, "--effort", "2")
    slow = answer(*plain, "--effort", "2", "--overwrite")
    assert read_manifest(tmp_path / "out").made_by["recipe"]["effort"] == 2
    assert slow["totals"]["output_bytes"] == quick["totals"]["output_bytes"]
    assert slow["totals"]["relative_mse"] < 0.95 * quick["totals"]["relative_mse"]
    assert "made with --effort 2" in refused(*plain)
    assert verify(tmp_path / "out", threads=2).ok


# --- damaged blocks ---

DAMAGED, DAMAGED_BLOCK = "model.layers.0.mlp.up_proj.weight", 5
DAMAGE = f"tensor '{DAMAGED}': block {DAMAGED_BLOCK}: expected zeros after 329 bytes; the master is damaged: pqweights"


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """The master with a byte in block 5 of a weight that no coder writes there, whose hash nobody has checked."""
    found = Path(shutil.copytree(folder / "master", tmp_path / "damaged"))
    (tensor,) = (t for t in open_local(found).tensors if t.name == DAMAGED)
    (part,) = tensor.parts
    with open(found / part.file, "r+b") as stream:
        stream.seek(part.offset + (DAMAGED_BLOCK + 1) * part.shape[1] - 1)
        stream.write(b"\x01")
    return found


def test_block_that_cannot_be_decoded_is_named(damaged: Path, tmp_path: Path) -> None:
    assert any(DAMAGED in problem for problem in verify(damaged, threads=2).problems)
    restate_hashes(damaged)
    line = refused("export", damaged, tmp_path / "out", "--target", "bf16")
    assert DAMAGE in line and ".safetensors: tensor" in line
    with pytest.raises(MasterError, match=re.escape(DAMAGE)):
        pqweights.load_model(damaged)


def test_packed_weight_that_cannot_be_decoded_is_named(damaged: Path) -> None:
    loaded = pqweights.load_model(restate_hashes(damaged), packed=True, dtype="float32")
    weight = dict(loaded.named_parameters())[DAMAGED]
    with torch.inference_mode(), pytest.raises(MasterError, match=re.escape(DAMAGE)):
        torch.nn.functional.linear(torch.zeros(1, weight.shape[1]), weight)
    rows = torch.nn.functional.embedding(torch.tensor([0, 1, 500]), weight)
    assert rows.shape == (3, weight.shape[1])


def test_weight_in_memory_that_cannot_be_decoded_is_named() -> None:
    values = gaussian(16, 1024)
    coder = ADDED["test-superblocks"].coder(2.5)
    weight, _ = encode_weight(values.reshape(-1).view(np.uint8), dtype="F32", shape=values.shape, coder=coder)
    weight.parts[0][7, -1] = 1
    assert len(weight.decode_blocks(0, 7, "F32"))
    with pytest.raises(MasterError, match="block 7: expected zeros"):
        weight.decode_blocks(4, 9, "F32")


# --- packed weights ---


def test_stack_whose_matrices_share_superblocks_stays_packed(tmp_path: Path) -> None:
    shapes = {"model.experts.up": (5, 13, 130), "model.embed_tokens.weight": (301, 70)}
    tensors = {name: bf16(gaussian(*shape, seed=7)) for name, shape in shapes.items()}
    source = write_checkpoint(tmp_path / "model", tensors)
    recipe = parse_recipe("{codec: test-superblocks, bits: 4.5, rules: [{name: '*', bits: 3.3}]}", "every.yaml")
    quantize(source, tmp_path / "master", recipe, threads=2)
    exact = {name: torch.from_numpy(np.array(values)) for name, values in master_weights(tmp_path / "master").items()}
    packed = {t.name: pack(t, torch.float32) for t in open_local(tmp_path / "master").tensors}  # type: ignore[arg-type]
    up, embeddings = packed["model.experts.up"], packed["model.embed_tokens.weight"]
    assert up is not None and embeddings is not None
    assert torch.equal(up.decode(), exact["model.experts.up"])
    assert torch.equal(up[3].decode(), exact["model.experts.up"][3])
    ids = torch.tensor([[300, 0, 7, 8], [7, 150, 299, 0]])
    assert torch.equal(torch.nn.functional.embedding(ids, embeddings), exact["model.embed_tokens.weight"][ids])


def test_every_second_row_is_decoded_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports take gate and up apart, whose rows alternate in some models; blocks hold many rows."""
    source = write_checkpoint(tmp_path / "model", {"model.experts.up": bf16(gaussian(5, 200, 60, seed=7))})
    recipe = parse_recipe("{codec: test-superblocks, rules: [{name: '*', bits: 3.3}]}", "every.yaml")
    quantize(source, tmp_path / "master", recipe, threads=2)
    (tensor,) = open_local(tmp_path / "master").tensors
    calls = []
    decode = SuperblockCoder.decode
    monkeypatch.setattr(SuperblockCoder, "decode", lambda *args, **kw: (calls.append(1), decode(*args, **kw))[1])
    exact = master_weights(tmp_path / "master")["model.experts.up"].reshape(1000, 60)
    calls.clear()
    moved = MovedTensor(
        name="up",
        shape=(400, 7),
        dtype="F32",
        segments=(Segment(tensor=tensor, first=3, step=2, count=400),),
        columns=range(50, 57),
        transposed=False,
        cache=MatrixCache(),
    )
    out = np.empty(400 * 7 * 4, dtype=np.uint8)
    moved.read(0, 400 * 7, "F32", out)
    assert np.array_equal(out.view(np.float32).reshape(400, 7), exact[3:803:2, 50:57])
    assert len(calls) == 1


# --- the search of scales ---


def test_search_by_the_model_finds_about_what_encoding_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    channels = np.exp(0.5 * rng.standard_normal(512)).astype(np.float32)
    source = write_checkpoint(tmp_path / "model", {"up": bf16(gaussian(256, 512, seed=3))})
    (tensor,) = open_local(source).tensors
    rows = gaussian(2048, 512, seed=4) * channels
    inputs = Inputs(
        tokens=1536,
        rms=np.sqrt(np.square(rows[:1536]).mean(axis=0)),
        rows=rows[:1536],
        held_back=rows[1536:],
        windows=np.repeat(np.arange(8), 64),
    )
    weight = Matrix(tensor=tensor, number=0, rows=256, columns=512, block_size=SuperblockCodec.block_size)
    encoded = []
    monkeypatch.setattr(
        "pqweights.quality.measure.scale_search.encode_weight",
        lambda *a, **kw: (encoded.append(1), encode_weight(*a, **kw))[1],
    )
    coder = ADDED["test-superblocks"].coder(4.5)
    modelled, scales = search(coder, weight, inputs)
    assert modelled.scaled and scales is not None and modelled.gain is not None
    assert len(encoded) == 2  # the check, with and without the scales
    monkeypatch.setattr(SuperblockCoder, "modelled_errors", lambda self, blocks: None)
    measured, _ = search(coder, weight, inputs)
    assert len(encoded) > 20
    assert modelled.gain == pytest.approx(measured.gain, abs=0.03)
    assert modelled.held_back_gain == pytest.approx(measured.held_back_gain, abs=0.03)
