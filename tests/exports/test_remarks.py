"""What an export says of weights that stay plain: experts by their bytes, and a result that is near BF16."""

from __future__ import annotations

import json
import math
from pathlib import Path

import families
import pytest
from commands import done, refused
from helpers import bf16, gaussian, read_all, run_command, write_checkpoint
from integer_exports import LAYER

from pqweights.rewrite.manifest import read_manifest
from pqweights.units import size_text


def warned(master: Path, out: Path, *options: object) -> list[str]:
    found: list[str] = json.loads(done("export", master, out, *options, "--json").stdout)["warnings"]
    return found


@pytest.mark.parametrize(
    ("family", "target", "reason"),
    [
        ("gpt_oss", "vllm", "the format stores single linear layers"),
        ("gpt_oss", "torchao-int4", "the format stores single linear layers"),
        ("qwen3_moe", "torchao-int4", "transformers stacks experts as it loads them"),
    ],
)
def test_experts_that_stay_plain_are_named_with_their_bytes(
    family: str, target: str, reason: str, base: Path, tmp_path: Path
) -> None:
    master = families.master(base, family)
    packing = (
        ("--packing", "plain") if target == "torchao-int4" else ()
    )  # tiles of so narrow layers are as large as BF16
    found = warned(master, tmp_path / "out", "-t", target, *packing)
    (said,) = [text for text in found if text.startswith("experts stay in BF16: ")]
    plain = [t for t in read_manifest(tmp_path / "out").tensors if t.role == "expert" and t.action == "decode"]
    weights = sum(math.prod(tensor.shape) for tensor in plain)
    held = sum(tensor.bytes for tensor in read_manifest(master).tensors if tensor.name in {t.name for t in plain})
    assert plain and all(tensor.stored[0].dtype == "BF16" for tensor in plain)
    assert f": {len(plain)} tensors of {weights} weights, {size_text(2 * weights)} in place of" in said
    assert f" in place of {size_text(held)} in the master: {reason}" in said and "gguf and mlx" in said
    (near,) = [text for text in found if "bits per parameter, nearer to the 16 of BF16" in text]
    assert "the master that it is made from is smaller (" in near


def test_experts_that_are_rounded_are_not_named(base: Path, tmp_path: Path) -> None:
    assert warned(families.master(base, "qwen3_moe"), tmp_path / "out", "-t", "vllm") == []


@pytest.mark.parametrize(("kept_rows", "is_near"), [(90, False), (110, True)])
def test_result_that_saves_less_than_half_of_what_it_could_is_remarked(
    kept_rows: int, is_near: bool, tmp_path: Path
) -> None:
    """Integers take 4.125 bits; of as many weights in BF16 as integers, the result has half way between, 10.1."""
    tensors = {f"{LAYER}.mlp.down_proj.weight": bf16(gaussian(100, 1024))}
    tensors |= {"model.embed_tokens.weight": bf16(gaussian(kept_rows, 1024, seed=1))}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "dtype": "bfloat16"})
    run_command({"quantize": str(source)}, tmp_path / "master")
    found = warned(tmp_path / "master", tmp_path / "out", "-t", "vllm")
    assert len(found) == is_near
    bits = 8 * sum(values.nbytes for _, values in read_all(tmp_path / "out").values()) / (100 + kept_rows) / 1024
    for text in found:
        assert text.startswith(f"{bits:.3g} bits per parameter, nearer to the 16 of BF16 than to the 4.13 of its")
        assert f"{size_text(kept_rows * 1024 * 2)} are weights that stay plain" in text


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("num_attention_heads", [4], "num_attention_heads: expected int, found [4]"),
        ("hidden_size", None, "hidden_size: expected int, found null"),
        ("layer_types", 3, "layer_types: expected"),
        ("vocab_size", ..., "it needs settings that config.json does not have: 'vocab_size'"),
    ],
)
def test_mlx_refusal_names_the_setting_that_mlx_lm_does_not_take(
    setting: str, value: object, said: str, base: Path, tmp_path: Path
) -> None:
    """Without an error of Python such as "object of type 'int' has no len()"."""
    pytest.importorskip("mlx_lm")
    source = tmp_path / "src"
    write_checkpoint(source, read_all(families.model(base, "llama")))
    config = json.loads((families.model(base, "llama") / "config.json").read_bytes()) | {setting: value}
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    run_command({"quantize": str(source)}, tmp_path / "master")
    line = refused("export", tmp_path / "master", tmp_path / "out", "-t", "mlx")
    assert f"mlx-lm does not support this model ('llama'): {'it' if value is ... else 'it does not'}" in line
    assert said in line and "Error" not in line and "len()" not in line and "__init__" not in line


def test_plan_says_that_fused_experts_stay_plain_in_exports_of_linear_layers(base: Path) -> None:
    source = families.model(base, "gpt_oss")
    stacks = [v for n, (_, v) in read_all(source).items() if ".experts." in n and v.ndim == 3 and "bias" not in n]
    weights = sum(values.size for values in stacks)
    shown = done("plan", source).stdout
    said = f"fused experts: {len(stacks)} tensors of {weights} weights: vllm and torchao-int4 store them in BF16"
    assert f"{said} ({size_text(2 * weights)}); gguf and mlx round them\n" in shown
    assert "fused experts" not in done("plan", families.model(base, "qwen3_moe")).stdout
