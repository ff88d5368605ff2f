"""What the command prints about an export to integers: plain tensors, bits per weight, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import families
import pytest
from commands import done, refused
from helpers import bf16, gaussian, read_all, run_command, write_checkpoint
from integer_exports import LAYER, ROUNDED, integer_names

from pqweights.rewrite.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


@pytest.mark.parametrize("target", ["torchao-int4", "vllm"])
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
    assert any("computed from the error of the master; --source measures it" in line for line in lines)
    reasons = {t.name: t.reason for t in read_manifest(tmp_path / "out").tensors}
    assert reasons[f"{LAYER}.mlp.fc1.weight"].startswith("groups of 128 or 64 or 32 do not divide its rows of 130")


@pytest.mark.parametrize("target", ["bf16", "vllm"])
def test_summary_has_the_bits_of_inspect_and_no_records_of_pqweights(target: str, driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", target)
    (bits,) = [line for line in result.stdout.splitlines() if line.startswith("bits, all overhead counted: ")]
    assert bits in done("inspect", tmp_path / "out").stdout.splitlines() and bits.endswith(" per parameter")
    assert ("coverage: " in result.stdout) == (target != "bf16")
    assert "pqweights.json" not in result.stdout
    found = json.loads(done("export", driven / "master", tmp_path / "out", "-t", target, "--json").stdout)
    assert "pqweights.json" in found["left_out_files"]


@pytest.mark.parametrize("option", ["--summary", "--no-summary"])
def test_inspect_calls_plain_what_the_summary_calls_plain(option: str, driven: Path, tmp_path: Path) -> None:
    done("export", driven / "master", tmp_path / "out", "-t", "vllm")
    words = done("inspect", tmp_path / "out", option).stdout.partition("\n\n")[0].split()
    assert "plain" in words and "decode" not in words
    found = json.loads(done("inspect", tmp_path / "out", "--json").stdout)
    assert "decode" in {tensor["action"] for tensor in found["tensors"]}


def test_bits_per_weight_count_scales_and_padding(driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", "torchao-int4", "--json")
    totals = json.loads(result.stdout)["totals"]
    stored = read_all(tmp_path / "out")
    of_integers = sum(values.nbytes for name, (_, values) in stored.items() if "._weight_" in name)
    shapes = {name: values.shape for name, (_, values) in read_all(driven / "src").items()}
    count = sum(math.prod(shapes[name]) for name in ROUNDED)
    assert totals["bits_per_weight"] == pytest.approx(8 * of_integers / count)
    assert totals["quantized_weights"] == count


def test_group_size_error_names_the_sizes_that_fit(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "src",
        {
            f"{LAYER}.mlp.down_proj.weight": bf16(gaussian(64, 192)),
            f"{LAYER}.mlp.up_proj.weight": bf16(gaussian(64, 256)),
        },
        config={"model_type": "llama"},
    )
    run_command({"quantize": str(source)}, tmp_path / "master")
    for target in ("torchao-int4", "vllm"):
        line = refused("export", tmp_path / "master", tmp_path / "out", "-t", target, "--group-size", "128")
        assert (
            "down_proj" in line
            and "rows of 192" in line
            and "would: 32, 64; without --group-size each layer gets one" in line
        )
        assert not (tmp_path / "out").exists()
        out = tmp_path / target
        done("export", tmp_path / "master", out, "-t", target, "--group-size", "64")
        assert len(integer_names(out)) == 2


@pytest.mark.parametrize("target", ["torchao-int4", "vllm"])
def test_gpt2_is_refused_because_its_weights_are_transposed(target: str, base: Path, tmp_path: Path) -> None:
    line = refused("export", families.master(base, "gpt2"), tmp_path / "out", "-t", target)
    assert target in line and "gpt2: it stores its linear weights transposed" in line
    assert line.endswith("use --target mlx or bf16\n")
    assert not (tmp_path / "out").exists()
