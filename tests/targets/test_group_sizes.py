"""Each layer gets the largest group size up to the default that divides its rows; configurations say which."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import families
import pytest
from commands import done, refused
from helpers import read_all, run_command
from integer_exports import LAYER, integer_names, linear_master, quantization

from pqweights.convert.manifest import read_manifest


def llama_master(folder: Path, hidden: int, intermediate: int, model_type: str = "llama") -> Path:
    """A master with the linear layers of a Llama that has rows of these lengths."""
    columns = {f"{LAYER}.self_attn.{n}_proj.weight": hidden for n in "qkvo"}
    columns |= {f"{LAYER}.mlp.{n}_proj.weight": hidden for n in ("gate", "up")}
    columns |= {f"{LAYER}.mlp.down_proj.weight": intermediate}
    return linear_master(folder, columns, model_type=model_type)


def codecs(folder: Path) -> Counter[str | None]:
    return Counter(tensor.codec for tensor in read_manifest(folder).tensors)


def groups(folder: Path) -> dict[int, list[str]]:
    found = quantization(folder)["config_groups"].values()
    return {group["weights"]["group_size"]: group["targets"] for group in found}


@pytest.mark.parametrize(
    ("hidden", "intermediate", "expected"),
    [
        (576, 1536, {"symmetric-g64": 6, "symmetric-g128": 1}),  # SmolLM2-135M
        (320, 864, {"symmetric-g64": 6, "symmetric-g32": 1}),
        (192, 192, {"symmetric-g64": 7}),
    ],
)
def test_every_layer_is_rounded_in_vllm_int4(
    hidden: int, intermediate: int, expected: dict[str, int], tmp_path: Path
) -> None:
    import torch
    from compressed_tensors.utils.match import match_targets

    out = tmp_path / "out"
    shown = done("export", llama_master(tmp_path, hidden, intermediate), out, "-t", "vllm")
    assert codecs(out) == expected
    for codec, count in expected.items():
        assert f"  4 bits, {codec}, best rule: {count} tensor" in shown.stdout
    tensors, found = read_all(out), groups(out)
    for name in integer_names(out):
        scales = tensors[f"{name}_scale"][1]
        columns = int(tensors[f"{name}_shape"][1][1])
        targets = [target for of_size in found.values() for target in of_size]
        (first, *_) = match_targets(name.removesuffix(".weight"), torch.nn.Linear(1, 1), targets)
        (size,) = (size for size, of_size in found.items() if first in of_size)
        assert scales.shape[1] * size == columns


def test_torchao_reads_the_sizes_of_the_configuration(tmp_path: Path) -> None:
    import torchao.quantization as torchao
    from torchao.core.config import config_from_dict

    done("export", llama_master(tmp_path, 320, 864), tmp_path / "out", "-t", "torchao", "--packing", "plain")
    assert codecs(tmp_path / "out") == {"affine-g64": 6, "affine-g32": 1}
    config = config_from_dict(quantization(tmp_path / "out")["quant_type"]["default"])
    assert isinstance(config, torchao.FqnToConfig)
    sizes = {name: about.group_size for name, about in config.fqn_to_config.items()}
    assert set(sizes.values()) == {64, 32}
    for name in integer_names(tmp_path / "out"):
        module = name.removesuffix(".weight")
        (matched,) = (e for e in sizes if torchao.fqn_matches_fqn_config(module, torchao.FqnToConfig({e: None})))
        assert sizes[matched] == (32 if "down_proj" in module else 64)


def test_size_that_is_asked_for_is_exact(tmp_path: Path) -> None:
    folder = llama_master(tmp_path, 320, 864)
    for target in ("vllm", "torchao"):
        line = refused("export", folder, tmp_path / "out", "-t", target, "--group-size", "64")
        assert "down_proj" in line and "864" in line and "32" in line and not (tmp_path / "out").exists()
    done("export", folder, tmp_path / "out", "-t", "vllm", "--group-size", "32")
    assert codecs(tmp_path / "out") == {"symmetric-g32": 7}


def test_model_that_uses_weights_early_has_the_size_of_most_weights(tmp_path: Path) -> None:
    """transformers decodes its layers with dequantize, for which it has one size."""
    done("export", llama_master(tmp_path, 192, 128, "t5"), tmp_path / "out", "-t", "vllm")
    assert quantization(tmp_path / "out")["dequantize"] is True
    assert codecs(tmp_path / "out") == {"symmetric-g64": 7}


def test_sizes_of_experts_come_first_in_the_configuration(tmp_path: Path) -> None:
    """transformers takes the first size whose expressions name experts, which those of a shared expert do, too."""
    from compressed_tensors.quantization import QuantizationConfig as config_class
    from transformers.integrations.compressed_tensors import get_experts_scheme as scheme

    columns = {f"{LAYER}.mlp.experts.{e}.{n}_proj.weight": 128 for e in range(2) for n in ("gate", "up", "down")}
    columns |= {f"{LAYER}.mlp.shared_experts.{n}_proj.weight": 192 for n in ("gate", "up", "down")}
    done("export", linear_master(tmp_path, columns, model_type="deepseek_v3"), tmp_path / "out", "-t", "vllm")
    assert codecs(tmp_path / "out") == {"symmetric-g128": 6, "symmetric-g64": 3}
    about: Any = {key: quantization(tmp_path / "out")[key] for key in ("config_groups", "format", "ignore")}
    assert scheme(config_class(**about)).weights.group_size == 128


def test_mlx_rounds_rows_that_its_size_does_not_divide(tmp_path: Path) -> None:
    import mlx_lm

    settings = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32}
    families.build(families.causal("Llama", **settings), tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model"), "recipe": "q6"}, tmp_path / "master")
    out = tmp_path / "out"
    done("export", tmp_path / "master", out, "-t", "mlx")
    named = json.loads((out / "config.json").read_bytes())["quantization"]
    down = f"{LAYER}.mlp.down_proj"
    assert named["group_size"] == 64
    assert named[down] == {"group_size": 32, "bits": 4, "mode": "affine"}
    found = {t.name: t.codec for t in read_manifest(out).tensors}
    assert found[f"{down}.weight"] == "affine-g32" and found[f"{LAYER}.mlp.up_proj.weight"] == "affine-g64"
    model, _ = mlx_lm.load(str(out))
    layer = model.layers[0].mlp.down_proj
    assert (layer.group_size, layer.bits) == (32, 4)


def test_experts_that_no_size_divides_leave_those_of_other_layers_their_size(tmp_path: Path) -> None:
    columns = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": width
        for layer, width in enumerate((64, 80))
        for expert in range(2)
        for name in ("gate", "up")
    }
    done("export", linear_master(tmp_path, columns, model_type="qwen3_moe"), tmp_path / "out", "-t", "vllm")
    assert set(integer_names(tmp_path / "out")) == {name for name in columns if name.startswith("model.layers.0")}
    assert codecs(tmp_path / "out")["symmetric-g64"] == 4


def test_layers_that_a_runtime_holds_plain_stay_plain(tmp_path: Path) -> None:
    names = [f"{LAYER}.self_attn.indexer.{name}.weight" for name in ("wk", "weights_proj", "wq_b")]
    master = linear_master(tmp_path, dict.fromkeys(names, 128), model_type="deepseek_v32")
    done("export", master, tmp_path / "out", "-t", "vllm")
    assert set(integer_names(tmp_path / "out")) == {names[2]}
