"""What an export warns of: more bits than the master has, and padding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import done, refused
from helpers import bf16, gaussian, run_command, write_checkpoint
from integer_exports import LAYER, integer_names, quantization

from pqweights.codecs import CODECS
from pqweights.codecs.hadamard_lloyd_max import HadamardLloydMax
from pqweights.rewrite.manifest import read_manifest

ATTENTION, MLP = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"


def master(folder: Path, columns: Mapping[str, int], recipe: str = "q5", rows: int = 64) -> Path:
    tensors = {name: bf16(gaussian(rows, width, seed=width)) for name, width in columns.items()}
    write_checkpoint(folder / "src", tensors, config={"model_type": "llama", "dtype": "bfloat16"})
    run_command({"quantize": str(folder / "src"), "recipe": recipe}, folder / "master")
    return folder / "master"


def warned(master: Path, out: Path, *options: object) -> list[str]:
    """The warnings of an export, which are the same on stderr and in the JSON."""
    result = done("export", master, out, *options, "--json")
    found: list[str] = json.loads(result.stdout)["warnings"]
    assert result.stderr == "".join(f"WARNING: {text}\n" for text in found)
    return found


class Inflating(HadamardLloydMax):
    """A codec whose errors do not add up with those of rounding, as far as exports know."""

    name = "test-inflating"
    orthogonal_error = False


@pytest.fixture
def inflating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Inflating.name, Inflating())


def unknown_errors(folder: Path, recipe: str) -> str:
    """Write a recipe of that codec."""
    (folder / "recipe.yaml").write_text(f"codec: {Inflating.name}\n{recipe}\n")
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize(
    ("bits", "options", "expected"),
    [
        (5, ("-t", "vllm", "--bits", "8"), "integers of 8 bits cannot be more accurate than the 5-bit master"),
        (3, ("-t", "torchao-int4"), "integers of 4 bits cannot be more accurate than the 3-bit master"),
        (4, ("-t", "vllm"), None),
        (8, ("-t", "vllm", "--bits", "8"), None),
    ],
)
@pytest.mark.usefixtures("inflating")
def test_more_bits_than_the_master_holds_are_remarked_where_its_error_is_unknown(
    bits: int, options: tuple[str, ...], expected: str | None, tmp_path: Path
) -> None:
    folder = master(tmp_path, {ATTENTION: 1024}, unknown_errors(tmp_path, f"bits: {bits}"))
    found = warned(folder, tmp_path / "out", *options)
    assert [text.partition(", and take ")[0] for text in found] == ([expected] if expected else [])
    assert all("--source ORIGINAL" in text for text in found)
    assert warned(folder, tmp_path / "measured", *options, "--source", tmp_path / "src") == []


@pytest.mark.usefixtures("inflating")
def test_less_than_half_a_bit_more_is_not_remarked(tmp_path: Path) -> None:
    """The master has 3.75 bits a weight."""
    recipe = unknown_errors(tmp_path, 'bits: 4\nrules: [{name: "*.mlp.*", bits: 3}]')
    folder = master(tmp_path, {ATTENTION: 3 * 128, MLP: 128}, recipe)
    assert {tensor.bits for tensor in read_manifest(folder).tensors} == {3, 4}
    assert warned(folder, tmp_path / "out", "-t", "vllm") == []


@pytest.mark.parametrize(
    ("recipe", "options", "dominates"),
    [
        ("q5", ("-t", "vllm"), False),
        ("q5", ("-t", "vllm", "--bits", "8"), True),
        ("q8", ("-t", "vllm"), False),
        ("q3", ("-t", "torchao-int4"), True),
        ("q5", ("-t", "torchao-int4"), False),
    ],
)
def test_a_master_of_most_of_the_error_is_remarked(
    recipe: str, options: tuple[str, ...], dominates: bool, tmp_path: Path
) -> None:
    """The share that is stated is that of the error that the manifest of the master has."""
    folder = master(tmp_path, {ATTENTION: 1024}, recipe)
    found = warned(folder, tmp_path / "out", *options)
    ((_, of_master),), ((_, of_export),) = (read_manifest(place).pairs for place in (folder, tmp_path / "out"))
    assert of_master.relative_mse and of_export.total_mse
    share = of_master.relative_mse / of_export.total_mse
    assert (share > 0.5) == dominates == bool(found)
    assert [text.partition(" of the error against")[0] for text in found] == (
        [f"the error of the master is {share:.0%}"] if dominates else []
    )
    assert warned(folder, tmp_path / "measured", *options, "--source", tmp_path / "src") == []


def test_mlx_export_of_more_bits_than_the_master_is_remarked(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    import families

    (found,) = warned(families.master(base, "llama"), tmp_path / "out", "-t", "mlx", "--bits", "8")
    assert found.startswith("the error of the master is 96% of the error against the original")
    assert warned(families.master(base, "llama"), tmp_path / "four", "-t", "mlx") == []


def test_layer_stays_plain_where_tiles_would_take_as_much_as_bf16(tmp_path: Path) -> None:
    """Rows of 256 weights are padded to four times their length; those of 384 to less than three times."""
    folder = master(tmp_path, {ATTENTION: 256, MLP: 384})
    shown = done("export", folder, tmp_path / "out", "-t", "torchao-int4")
    assert integer_names(tmp_path / "out") == [MLP]
    reason = "rows of 256 weights, padded to 1024, would take 17 bits a weight; --packing plain pads nothing"
    assert f"plain: 1 tensor (16384 weights), {reason}: {ATTENTION}\n" in shown.stdout
    (kept,) = (tensor for tensor in read_manifest(tmp_path / "out").tensors if tensor.name == ATTENTION)
    assert kept.reason == reason and kept.stored[0].dtype == "BF16"
    done("export", folder, tmp_path / "unpadded", "-t", "torchao-int4", "--packing", "plain")
    assert set(integer_names(tmp_path / "unpadded")) == {ATTENTION, MLP}


def test_model_whose_every_layer_is_too_narrow_for_tiles_is_refused(tmp_path: Path) -> None:
    line = refused("export", master(tmp_path, {ATTENTION: 256}), tmp_path / "out", "-t", "torchao-int4")
    assert "no weight of this model can become integers" in line and "--packing plain" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("columns", "share"), [(1024, None), (2048 + 256, "25%"), (640, "38%")])
def test_padding_that_costs_a_good_share_of_the_file_is_remarked(
    columns: int, share: str | None, tmp_path: Path
) -> None:
    folder = master(tmp_path, {MLP: columns}, rows=1024)
    found = warned(folder, tmp_path / "out", "-t", "torchao-int4")
    if share is None:
        assert found == []
    else:
        (text,) = found
        assert "--packing plain" in text and "mslk" in text and text.endswith(f"make the result {share} smaller")
        assert warned(folder, tmp_path / "unpadded", "-t", "torchao-int4", "--packing", "plain") == []
        before, after = (done("inspect", tmp_path / name, "--json").stdout for name in ("out", "unpadded"))
        saved = 1 - json.loads(after)["totals"]["output_bytes"] / json.loads(before)["totals"]["output_bytes"]
        assert saved == pytest.approx(int(share.rstrip("%")) / 100, abs=0.02)  # with headers


def ignored(folder: Path) -> Any:
    from compressed_tensors.utils.match import match_name

    expressions = quantization(folder)["ignore"]
    return lambda module: any(match_name(module, expression) for expression in expressions)


def test_vllm_ignores_modules_that_the_file_does_not_name(tmp_path: Path) -> None:
    """Tied and new heads lie outside of the numbered layers, and have a name of their own in each architecture."""
    pytest.importorskip("compressed_tensors")
    done("export", master(tmp_path, {ATTENTION: 128, "pooler.dense.weight": 128}), tmp_path / "out", "-t", "vllm")
    is_ignored = ignored(tmp_path / "out")
    for head in ("lm_head", "cls.predictions.decoder", "proj_out", "classifier", "score", "model.decoder"):
        assert is_ignored(head), head
    for module in (LAYER + ".self_attn.o_proj", "layers.7.self_attn.o_proj", "pooler.dense", "bert.pooler.dense"):
        assert not is_ignored(module), module
    assert is_ignored("another_pooler.dense")
