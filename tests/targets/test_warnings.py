"""What an export to integers says: warnings of bits, padding, experts and sizes; which weights stay plain, and why."""

from __future__ import annotations

import json
import math
from pathlib import Path

import families
import pytest
from closeness import approx
from commands import done, refused
from helpers import bf16, gaussian, read_all, run_command, write_checkpoint
from integer_exports import LAYER, ROUNDED, integer_names, linear_master, quantization

from pqweights.common.units import size_text
from pqweights.convert.manifest import read_manifest

ATTENTION, MLP = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"


def warned(master: Path, out: Path, *options: object) -> list[str]:
    """The warnings of an export, which are the same on stderr and in the JSON."""
    result = done("export", master, out, *options, "--json")
    found: list[str] = json.loads(result.stdout)["warnings"]
    assert result.stderr == "".join(f"WARNING: {text}\n" for text in found)
    return found


@pytest.mark.parametrize(
    ("recipe", "options", "dominates"),
    [
        ("q5", ("-t", "vllm"), False),
        ("q5", ("-t", "vllm", "--bits", "8"), True),
        ("q8", ("-t", "vllm"), False),
        ("t3", ("-t", "torchao"), True),
        ("q5", ("-t", "torchao"), False),
    ],
)
def test_a_master_of_most_of_the_error_is_remarked(
    recipe: str, options: tuple[str, ...], dominates: bool, tmp_path: Path
) -> None:
    """The share that is stated is that of the error that the manifest of the master has."""
    folder = linear_master(tmp_path, {ATTENTION: 1024}, recipe=recipe)
    found = warned(folder, tmp_path / "out", *options)
    ((_, of_master),), ((_, of_export),) = (read_manifest(place).pairs for place in (folder, tmp_path / "out"))
    assert of_master.relative_mse and of_export.total_mse
    share = of_master.relative_mse / of_export.total_mse
    assert (share > 0.5) == dominates == bool(found)
    assert [text.partition(" of the error against")[0] for text in found] == (
        [f"the error of the master is {share:.0%}"] if dominates else []
    )
    assert warned(tmp_path / "src", tmp_path / "measured", *options) == []


def test_layer_stays_plain_where_tiles_would_take_as_much_as_bf16(tmp_path: Path) -> None:
    """Rows of 256 weights are padded to four times their length; those of 384 to less than three times."""
    folder = linear_master(tmp_path, {ATTENTION: 256, MLP: 384})
    shown = done("export", folder, tmp_path / "out", "-t", "torchao")
    assert integer_names(tmp_path / "out") == [MLP]
    reason = "rows of 256 weights, padded to 1024, would take 17 bits a weight; --packing plain pads nothing"
    assert f"plain: 1 tensor (16384 weights), {reason}: {ATTENTION}\n" in shown.stdout
    (kept,) = (tensor for tensor in read_manifest(tmp_path / "out").tensors if tensor.name == ATTENTION)
    assert kept.reason == reason and kept.stored[0].dtype == "BF16"
    done("export", folder, tmp_path / "unpadded", "-t", "torchao", "--packing", "plain")
    assert set(integer_names(tmp_path / "unpadded")) == {ATTENTION, MLP}


def test_model_whose_every_layer_is_too_narrow_for_tiles_is_refused(tmp_path: Path) -> None:
    line = refused("export", linear_master(tmp_path, {ATTENTION: 256}), tmp_path / "out", "-t", "torchao")
    assert "--packing plain" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("columns", "share"), [(1024, None), (2048 + 256, "25%"), (640, "38%")])
def test_padding_that_costs_a_good_share_of_the_integers_is_remarked(
    columns: int, share: str | None, tmp_path: Path
) -> None:
    folder = linear_master(tmp_path, {MLP: columns}, rows=1024)
    found = warned(folder, tmp_path / "out", "-t", "torchao")
    if share is None:
        assert found == []
    else:
        (text,) = found
        assert "--packing plain" in text and "mslk" in text and text.endswith(f"make the integers {share} smaller")
        assert warned(folder, tmp_path / "unpadded", "-t", "torchao", "--packing", "plain") == []
        before, after = (sum(v.nbytes for _, v in read_all(tmp_path / name).values()) for name in ("out", "unpadded"))
        assert f"{1 - after / before:.0%}" == share


def test_vllm_ignores_modules_that_the_file_does_not_name(tmp_path: Path) -> None:
    """Tied and new heads lie outside of the numbered layers, and have a name of their own in each architecture."""
    from compressed_tensors.utils.match import match_name

    folder = linear_master(tmp_path, {ATTENTION: 128, "pooler.dense.weight": 128})
    done("export", folder, tmp_path / "out", "-t", "vllm")

    def is_ignored(module: str) -> bool:
        return any(match_name(module, expression) for expression in quantization(tmp_path / "out")["ignore"])

    for head in ("lm_head", "cls.predictions.decoder", "proj_out", "classifier", "score", "model.decoder"):
        assert is_ignored(head), head
    for module in (LAYER + ".self_attn.o_proj", "layers.7.self_attn.o_proj", "pooler.dense", "bert.pooler.dense"):
        assert not is_ignored(module), module
    assert is_ignored("another_pooler.dense")


@pytest.mark.parametrize(
    ("family", "target", "reason"),
    [
        ("gpt_oss", "vllm", "the format stores single linear layers"),
        ("gpt_oss", "torchao", "the format stores single linear layers"),
        ("qwen3_moe", "torchao", "transformers stacks experts as it loads them"),
    ],
)
def test_experts_that_stay_plain_are_named_with_their_bytes(
    family: str, target: str, reason: str, base: Path, tmp_path: Path
) -> None:
    master = families.master(base, family)
    packing = ("--packing", "plain") if target == "torchao" else ()  # tiles of so narrow layers are as large as BF16
    found = warned(master, tmp_path / "out", "-t", target, *packing)
    (said,) = [text for text in found if text.startswith("experts stay in BF16: ")]
    plain = [t for t in read_manifest(tmp_path / "out").tensors if t.role == "expert" and t.action == "decode"]
    weights = sum(math.prod(tensor.shape) for tensor in plain)
    held = sum(tensor.bytes for tensor in read_manifest(master).tensors if tensor.name in {t.name for t in plain})
    assert plain and all(tensor.stored[0].dtype == "BF16" for tensor in plain)
    assert f": {len(plain)} tensors of {weights} weights, {size_text(2 * weights)} in place of" in said
    assert f" in place of {size_text(held)} in the master: {reason}" in said and "gguf and mlx" in said
    (near,) = [text for text in found if "bits per parameter, more than half of the 16 of BF16" in text]
    assert "the master that it is made from is smaller (" in near


def test_experts_of_a_type_that_was_asked_for_are_not_remarked(tmp_path: Path) -> None:
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES["qwen3 moe"], tmp_path / "src")
    done("quantize", tmp_path / "src", tmp_path / "master", "--bits", 8)
    found = warned(tmp_path / "master", tmp_path / "out", "-t", "gguf", "--type", "f16", "--without-tokenizer")
    assert not [text for text in found if text.startswith("experts stay")]


@pytest.mark.parametrize(("kept_rows", "is_near"), [(40, False), (60, True)])
def test_result_of_more_than_half_the_bits_is_remarked(kept_rows: int, is_near: bool, tmp_path: Path) -> None:
    """Integers take 4.125 bits; of half as many weights in BF16 as integers, the result has 8.1."""
    tensors = {f"{LAYER}.mlp.down_proj.weight": bf16(gaussian(100, 1024))}
    tensors |= {"model.embed_tokens.weight": bf16(gaussian(kept_rows, 1024, seed=1))}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "dtype": "bfloat16"})
    run_command({"quantize": str(source)}, tmp_path / "master")
    found = warned(tmp_path / "master", tmp_path / "out", "-t", "vllm")
    assert len(found) == is_near
    bits = 8 * sum(values.nbytes for _, values in read_all(tmp_path / "out").values()) / (100 + kept_rows) / 1024
    for text in found:
        assert text.startswith(
            f"{bits:.3g} bits per parameter, more than half of the 16 of BF16, although integers take 4.13"
        )
        assert f"{size_text(kept_rows * 1024 * 2)} are weights that stay plain" in text


def test_plan_says_that_fused_experts_stay_plain_in_exports_of_linear_layers(base: Path) -> None:
    source = families.model(base, "gpt_oss")
    stacks = [v for n, (_, v) in read_all(source).items() if ".experts." in n and v.ndim == 3 and "bias" not in n]
    weights = sum(values.size for values in stacks)
    shown = done("plan", source).stdout
    said = f"fused experts: {len(stacks)} tensors of {weights} weights: torchao stores them in BF16"
    assert f"{said} ({size_text(2 * weights)}), and so does vllm unless" in shown
    assert "fused experts" not in done("plan", families.model(base, "qwen3_moe")).stdout


# The summary.


@pytest.mark.usefixtures("narrow_layers_packed")
@pytest.mark.parametrize("target", ["torchao", "vllm"])
def test_summary_says_which_tensors_stay_plain_and_why(target: str, driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", target)
    lines = result.stdout.splitlines()
    assert lines[0].endswith("tensors in 1 file")
    (plain,) = [line for line in lines if "fc1" in line]
    assert plain.startswith(
        "plain: 1 tensor (5200 weights), groups of 128 or 64 or 32 do not divide its rows of 130 weights "
        "(--group-size that would: none)"
    )
    assert any(line.startswith("plain: 1 tensor (12288 weights), embedding") for line in lines)
    assert any(line.strip().startswith("4 bits, ") and line.endswith(": 6 tensors") for line in lines)
    assert any("computed from the error of the master" in line for line in lines)
    reasons = {t.name: t.reason for t in read_manifest(tmp_path / "out").tensors}
    assert reasons[f"{LAYER}.mlp.fc1.weight"].startswith("groups of 128 or 64 or 32 do not divide its rows of 130")


@pytest.mark.usefixtures("narrow_layers_packed")
@pytest.mark.parametrize("target", ["bf16", "vllm"])
def test_summary_has_the_bits_of_inspect_and_no_records_of_pqweights(target: str, driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", target)
    (bits,) = [line for line in result.stdout.splitlines() if line.startswith("bits, all overhead counted: ")]
    assert bits in done("inspect", tmp_path / "out").stdout.splitlines() and bits.endswith(" per parameter")
    assert ("coverage: " in result.stdout) == (target != "bf16")
    assert "pqweights.json" not in result.stdout
    found = json.loads(done("export", driven / "master", tmp_path / "out", "-t", target, "--json").stdout)
    assert "pqweights.json" in found["left_out_files"]


@pytest.mark.usefixtures("narrow_layers_packed")
def test_bits_per_weight_count_scales_and_padding(driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", "torchao", "--json")
    totals = json.loads(result.stdout)["totals"]
    stored = read_all(tmp_path / "out")
    of_integers = sum(values.nbytes for name, (_, values) in stored.items() if "._weight_" in name)
    shapes = {name: values.shape for name, (_, values) in read_all(driven / "src").items()}
    count = sum(math.prod(shapes[name]) for name in ROUNDED)
    assert totals["bits_per_weight"] == approx(8 * of_integers / count)
    assert totals["quantized_weights"] == count
