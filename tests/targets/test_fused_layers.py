"""Weights that runtimes compute with in one layer have one form: if the master keeps one, all stay plain."""

from __future__ import annotations

import json
import math
from pathlib import Path

import families
import pytest
from commands import done
from helpers import Tensor, bf16, gaussian, read_all, run_command, write_checkpoint
from integer_exports import LAYER, integer_names, linear_master, quantization

from pqweights.convert.manifest import read_manifest
from pqweights.targets.linear import FUSED_WITH_KEPT

ATTENTION, MLP, LINEAR = f"{LAYER}.self_attn", f"{LAYER}.mlp", f"{LAYER}.linear_attn"
# The layers that vLLM 0.32 makes of others, `packed_modules_mapping` of its models: one part, and the rest.
FUSED = {
    "qkv_proj": (f"{ATTENTION}.k_proj", (f"{ATTENTION}.q_proj", f"{ATTENTION}.v_proj")),
    "gate_up_proj": (f"{MLP}.gate_proj", (f"{MLP}.up_proj",)),
    "w13": (f"{MLP}.w1", (f"{MLP}.w3",)),
    "gate_up_proj of EXAONE": (f"{MLP}.c_fc_0", (f"{MLP}.c_fc_1",)),
    "qkv_proj of BERT": (f"{ATTENTION}.self.key", (f"{ATTENTION}.self.query", f"{ATTENTION}.self.value")),
    "in_proj_qkvz": (f"{LINEAR}.in_proj_z", (f"{LINEAR}.in_proj_qkv",)),
    "in_proj_qkvg": (f"{LINEAR}.g_proj", (f"{LINEAR}.q_proj", f"{LINEAR}.k_proj", f"{LINEAR}.v_proj")),
    "fused_qkv_a_proj": (f"{ATTENTION}.q_a_proj", (f"{ATTENTION}.kv_a_proj_with_mqa",)),
    "experts": (
        f"{MLP}.experts.1.down_proj",
        tuple(f"{MLP}.experts.{e}.{n}_proj" for e in (0, 1) for n in ("gate", "up", "down"))[:5],
    ),
}
OTHERS = (f"{ATTENTION}.o_proj", "model.layers.1.mlp.experts.0.up_proj", "model.layers.1.self_attn.q_proj")


def exported(folder: Path, modules: tuple[str, ...], kept: str, *options: object) -> list[str]:
    """Export layers of these modules, one of which the master keeps; return the warnings."""
    tensors: dict[str, Tensor] = {f"{m}.weight": bf16(gaussian(64, 128, seed=i)) for i, m in enumerate(modules)}
    write_checkpoint(folder / "src", tensors, config={"model_type": "llama", "dtype": "bfloat16"})
    done("quantize", folder / "src", folder / "master", "--keep", f"{kept}.weight")
    found: list[str] = json.loads(done("export", folder / "master", folder / "out", *options, "--json").stdout)[
        "warnings"
    ]
    return found


@pytest.mark.parametrize("layer", FUSED)
def test_fused_layer_stays_plain_if_the_master_keeps_a_part(layer: str, tmp_path: Path) -> None:
    kept, rest = FUSED[layer]
    warnings = exported(tmp_path, (*rest, kept, *OTHERS), kept, "-t", "vllm")
    assert {name.removesuffix(".weight") for name in integer_names(tmp_path / "out")} == set(OTHERS)
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in read_manifest(tmp_path / "out").tensors}
    assert {tensors[module].reason for module in rest} == {FUSED_WITH_KEPT}
    assert {tensors[module].stored[0].dtype for module in rest} == {"BF16"}
    (said,) = [text for text in warnings if text.startswith("plain because runtimes fuse them")]
    assert f"({kept}.weight)" in said
    assert f"{len(rest)} weight" in said and f"{len(rest) * 64 * 128 * 2 / 1000:.2f} kB in BF16" in said
    shown = done("export", tmp_path / "master", tmp_path / "out", "-t", "vllm")
    assert f"WARNING: {said}\n" in shown.stderr and f", {FUSED_WITH_KEPT}: {rest[0]}" in shown.stdout


def test_torchao_keeps_a_fused_layer_plain(tmp_path: Path) -> None:
    modules = tuple(f"{ATTENTION}.{n}_proj" for n in "qkvo")
    warnings = exported(tmp_path, modules, f"{ATTENTION}.k_proj", "-t", "torchao", "--packing", "plain")
    assert integer_names(tmp_path / "out") == [f"{ATTENTION}.o_proj.weight"]
    assert any(ATTENTION in text for text in warnings)


def test_vllm_finds_one_scheme_for_all_parts_of_a_layer(tmp_path: Path) -> None:
    """As its should_ignore_layer does: of the parts of a layer, `ignore` matches all or none."""
    from compressed_tensors.utils.match import match_name

    modules = tuple(f"{ATTENTION}.{n}_proj" for n in "qkvo") + tuple(f"{MLP}.{n}_proj" for n in ("gate", "up", "down"))
    exported(tmp_path, modules, f"{ATTENTION}.k_proj", "-t", "vllm")
    ignore = quantization(tmp_path / "out")["ignore"]
    ignored = {module for module in modules if any(match_name(module, expression) for expression in ignore)}
    assert ignored == {f"{ATTENTION}.{n}_proj" for n in "qkv"}


def kept_expert(base: Path, folder: Path) -> Path:
    """A master of a mixture of experts that keeps one of the matrices of one expert of one layer."""
    keep = "model.layers.1.mlp.experts.2.down_proj.weight"
    (folder / "recipe.yaml").write_text(f"bits: 6\nrules: [{{name: {keep}, keep: true}}]\n")
    work = {"quantize": str(families.model(base, "qwen3_moe")), "recipe": str(folder / "recipe.yaml")}
    run_command(work, folder / "master")
    return folder / "master"


def test_experts_that_stay_plain_are_left_to_vllm(base: Path, tmp_path: Path) -> None:
    """transformers 5.23 drops plain experts beside packed weights, and then fails."""
    shown = done("export", kept_expert(base, tmp_path), tmp_path / "out", "-t", "vllm")
    rounded = [name for name in integer_names(tmp_path / "out") if ".experts." in name]
    assert rounded and all(name.startswith("model.layers.0.") for name in rounded)
    assert "(model.layers.1.mlp.experts." in shown.stderr and "transformers" in shown.stderr


def test_mlx_keeps_a_stack_of_experts_plain_if_the_master_keeps_one(base: Path, tmp_path: Path) -> None:
    shown = done("export", kept_expert(base, tmp_path), tmp_path / "out", "-t", "mlx")
    stack = "model.layers.1.mlp.switch_mlp.down_proj.weight"
    (tensor,) = [tensor for tensor in read_manifest(tmp_path / "out").tensors if tensor.name == stack]
    assert (tensor.bits, tensor.reason) == (None, FUSED_WITH_KEPT)
    found = read_all(tmp_path / "out")[stack]
    assert found[0] == "BF16" and math.prod(found[1].shape) == math.prod(tensor.shape)
    assert "(model.layers.1.mlp.experts.2." in shown.stderr


def test_parts_of_a_layer_share_one_group_size(tmp_path: Path) -> None:
    """Their rows are as long everywhere but here."""
    columns = {"q": 128, "k": 96, "v": 96, "o": 128}
    master = linear_master(tmp_path, {f"{ATTENTION}.{name}_proj.weight": width for name, width in columns.items()})
    run_command({"export": str(master), "target": "vllm"}, tmp_path / "out")
    codecs = {tensor.name.split(".")[-2]: tensor.codec for tensor in read_manifest(tmp_path / "out").tensors}
    assert codecs == {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "symmetric-g32"), "o_proj": "symmetric-g128"}
