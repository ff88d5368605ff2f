"""Folds of FP8, MXFP4, F16, F32 and F64 weights, of stacked and fused experts, and of fused layers with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import F32_FEW, each_near
from folding_models import (
    CONFIG,
    HEAD,
    KEY_HEADS,
    STORE,
    Floats,
    folded_values,
    llama_tensors,
    measured,
    spread,
    values_of,
)
from helpers import Array, Tensor, as_float32, bf16, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.rewrite.folding import fold as folds
from pqweights.rewrite.folding.search import find_links


@pytest.fixture(autouse=True)
def _everything_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "SMALLEST_GAIN", -1.0)


def before_and_after(folder: Path) -> list[dict[str, Array]]:
    """All tensors of a checkpoint in float64, as they are and folded."""
    original = {tensor.name: values_of(tensor) for tensor in open_local(folder).tensors}
    found = folded_values(measured(folder, folder.with_name("work")))
    changed = {name for name, values in found.items() if (values != original[name]).any()}
    assert changed
    return [{name: values.astype(np.float64) for name, values in each.items()} for each in (original, found)]


def outer(columns: Array, rows: Array) -> Array:
    """What each channel between two weights adds to their product: [channels, outputs, inputs]."""
    return columns.T[:, :, None] * rows[:, None, :]


def check_mlp(before: dict[str, Array], after: dict[str, Array], prefix: str, norm: str) -> None:
    """Check the products of the norm's gain with what reads it, and of up and down, channel by channel."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
    assert each_near(after[gate] * after[norm], before[gate] * before[norm], F32_FEW)
    products = [outer(each[down], each[up] * each[norm]) for each in (after, before)]
    assert each_near(*products, F32_FEW)


def check_attention(before: dict[str, Array], after: dict[str, Array], prefix: str, norm: str) -> None:
    """The same for attention, with every query head."""
    for name in ("q_proj", "k_proj"):
        weight = f"{prefix}.{name}.weight"
        assert each_near(after[weight] * after[norm], before[weight] * before[norm], F32_FEW)
    values, outputs = f"{prefix}.v_proj.weight", f"{prefix}.o_proj.weight"
    heads = before[outputs].shape[1] // HEAD
    for head in range(heads):
        of_values = slice(head * KEY_HEADS // heads * HEAD, (head * KEY_HEADS // heads + 1) * HEAD)
        of_outputs = slice(head * HEAD, (head + 1) * HEAD)
        products = [
            outer(each[outputs][:, of_outputs], (each[values] * each[norm])[of_values]) for each in (after, before)
        ]
        assert each_near(*products, F32_FEW)


def fp8_llama(folder: Path) -> Path:
    """The Llama with the linear layers in FP8 with a scale for each block of 128 x 128."""
    import torch

    tensors: dict[str, Tensor] = {}
    for name, tensor in llama_tensors("BF16").items():
        values = as_float32(tensor)
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in values.shape)
        scales = np.random.default_rng(len(tensors)).lognormal(-3, 1, (rows, columns)).astype(np.float32)
        scaled = torch.from_numpy(values / 0.05).clamp(-400, 400).to(torch.float8_e4m3fn)
        tensors[name] = ("F8_E4M3", scaled.view(torch.uint8).numpy())
        tensors[f"{name}_scale_inv"] = ("F32", scales)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return write_checkpoint(folder, tensors, config=CONFIG | {"quantization_config": fp8})


@pytest.mark.parametrize("dtype", ["F64", "F16", "F8_E4M3"])
def test_weights_of_every_dtype_keep_the_function(dtype: str, tmp_path: Path) -> None:
    """test_folded_architectures.py has models in F32 and BF16."""
    if dtype == "F8_E4M3":
        source = fp8_llama(tmp_path / "src")
    elif dtype == "F64":
        doubles = {name: ("F64", as_float32(each).astype(np.float64)) for name, each in llama_tensors("F32").items()}
        source = write_checkpoint(tmp_path / "src", doubles, config=CONFIG)
    else:
        source = write_checkpoint(tmp_path / "src", llama_tensors(dtype), config=CONFIG)
    before, after = before_and_after(source)
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        check_mlp(before, after, f"{prefix}.mlp", f"{prefix}.post_attention_layernorm.weight")
        check_attention(before, after, f"{prefix}.self_attn", f"{prefix}.input_layernorm.weight")


# --- Experts ----------------------------------------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts"


def stack(*shape: int, seed: int) -> Floats:
    return np.stack([spread(*shape[1:], seed=seed + number) for number in range(shape[0])])


@pytest.mark.parametrize("experts", [1, 3])
def test_stacked_experts_have_factors_of_their_own(experts: int, tmp_path: Path) -> None:
    """Qwen3.5-MoE as it is on the Hub: [E, 2I, K], of which the second half is the up projection."""
    wide, width = 96, 128
    tensors = {
        f"{EXPERTS}.gate_up_proj": bf16(stack(experts, 2 * wide, width, seed=1)),
        f"{EXPERTS}.down_proj": bf16(stack(experts, width, wide, seed=20)),
        "model.layers.0.mlp.gate.weight": bf16(spread(experts, width, seed=30)),
        "model.layers.0.post_attention_layernorm.weight": bf16(spread(1, width, seed=31)[0]),
    }
    config = {"model_type": "qwen3_5_moe_text", "hidden_size": width, "tie_word_embeddings": False}
    before, after = before_and_after(write_checkpoint(tmp_path / "src", tensors, config=config))
    fused, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    assert (after[fused][:, :wide] == before[fused][:, :wide]).all()
    factors = after[down][:, 0] / before[down][:, 0]
    assert len(np.unique(factors)) > wide // 4
    if experts > 1:
        assert (factors[0] != factors[1]).any()
    for expert in range(experts):
        products = [outer(each[down][expert], each[fused][expert, wide:]) for each in (after, before)]
        assert each_near(*products, F32_FEW)


def test_experts_of_gpt_oss_read_the_norm_along_their_rows(tmp_path: Path) -> None:
    """In the model they are [E, K, 2I], in MXFP4 on the Hub [E, 2I, K / 32, 16]; here 2I is K.

    test_folded_architectures.py has them in BF16.
    """
    experts, wide, width = 2, 64, 128
    random = np.random.default_rng(3)
    config: dict[str, Any] = {"model_type": "gpt_oss", "hidden_size": width, "tie_word_embeddings": False}
    tensors: dict[str, Tensor] = {
        "model.layers.0.mlp.router.weight": bf16(spread(experts, width, seed=30)),
        "model.layers.0.mlp.router.bias": bf16(spread(1, experts, seed=33)[0]),
        "model.layers.0.post_attention_layernorm.weight": bf16(spread(1, width, seed=31)[0]),
        f"{EXPERTS}.gate_up_proj_bias": bf16(spread(experts, 2 * wide, seed=34)),
        f"{EXPERTS}.down_proj_bias": bf16(spread(experts, width, seed=35)),
    }
    for name, rows, columns in (("gate_up_proj", 2 * wide, width), ("down_proj", width, wide)):
        blocks = random.integers(0, 256, (experts, rows, columns // 32, 16))
        scales = random.integers(110, 125, (experts, rows, columns // 32))
        tensors[f"{EXPERTS}.{name}_blocks"] = ("U8", blocks.astype(np.uint8))
        tensors[f"{EXPERTS}.{name}_scales"] = ("U8", scales.astype(np.uint8))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    before, after = before_and_after(write_checkpoint(tmp_path / "src", tensors, config=config))
    norm = "model.layers.0.post_attention_layernorm.weight"
    fused, router = f"{EXPERTS}.gate_up_proj", "model.layers.0.mlp.router.weight"
    assert np.array_equal(after[fused] * after[norm][:, None], before[fused] * before[norm][:, None])
    assert np.array_equal(after[router] * after[norm], before[router] * before[norm])
    for name in before.keys() - {norm, fused, router}:
        assert np.array_equal(after[name], before[name]), name


# --- Fused layers, biases, heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_biases_of_fused_layers_are_scaled_with_their_rows_by_powers_of_two(dtype: str, tmp_path: Path) -> None:
    """Phi-3 with biases: those of values and of the up half follow, those of queries, keys and gates stay."""
    width, wide = 128, 192
    sizes = {"self_attn.qkv_proj": (256, width), "self_attn.o_proj": (width, width)}
    sizes |= {"mlp.gate_up_proj": (2 * wide, width), "mlp.down_proj": (width, wide)}
    tensors: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(sizes.items()):
        tensors[f"model.layers.0.{name}.weight"] = STORE[dtype](spread(*shape, seed=number))
        tensors[f"model.layers.0.{name}.bias"] = STORE[dtype](spread(1, shape[0], seed=number + 10)[0])
    for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
        tensors[f"model.layers.0.{name}.weight"] = STORE[dtype](1 + spread(1, width, seed=number + 20)[0])
    config = CONFIG | {"model_type": "phi3"}
    before, after = before_and_after(write_checkpoint(tmp_path / "src", tensors, config=config))
    for writer, reader, norm, first, repeats in (
        ("self_attn.qkv_proj", "self_attn.o_proj", "input_layernorm", 192, 2),
        ("mlp.gate_up_proj", "mlp.down_proj", "post_attention_layernorm", wide, 1),
    ):
        bias, weight, columns, gain = (
            f"model.layers.0.{name}"
            for name in (f"{writer}.bias", f"{writer}.weight", f"{reader}.weight", f"{norm}.weight")
        )
        ratios = after[bias] / before[bias]
        assert (ratios[:first] == 1).all() and len(np.unique(ratios[first:])) > 3
        assert (np.frexp(ratios)[0] == 0.5).all()
        inverse = 1 / ratios[first:]
        places = inverse if repeats == 1 else np.tile(inverse.reshape(KEY_HEADS, 1, HEAD), (1, repeats, 1)).reshape(-1)
        assert np.array_equal(after[columns], before[columns] * places)
        assert each_near(after[weight] * after[gain], before[weight] * before[gain] * ratios[:, None], F32_FEW)
        assert np.array_equal(after[f"model.layers.0.{reader}.bias"], before[f"model.layers.0.{reader}.bias"])


def test_other_towers_and_layers_of_prediction_are_left(tmp_path: Path) -> None:
    tensors = llama_tensors()
    extra = {
        f"{prefix}{name.removeprefix('model.')}": values
        for prefix in ("mtp.", "vision_tower.model.", "draft.", "model.audio.")
        for name, values in tensors.items()
        if ".layers.0." in name
    }
    source = write_checkpoint(tmp_path / "src", tensors | extra, config=CONFIG)
    fold = measured(source, tmp_path / "work")
    found = folded_values(fold)
    for name, values in extra.items():
        assert np.array_equal(found[name], as_float32(values)), name
    assert np.array_equal(found["model.norm.weight"], as_float32(tensors["model.norm.weight"]))
    assert any("may read the last norm" in reason for reason in fold.structure.left)


def test_layer_with_a_module_that_is_not_known_is_left_alone(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["model.layers.1.self_attn.indexer.weight"] = bf16(spread(16, 128, seed=1))
    fold = measured(write_checkpoint(tmp_path / "src", tensors, config=CONFIG), tmp_path / "work")
    changed = {name for name in fold.structure.notes if ".1." in name}
    assert not changed
    assert fold.structure.left == {"a module that is not known there: self_attn.indexer": ("model.layers.1",)}


@pytest.mark.parametrize(
    ("heads", "reason"),
    [
        ({"num_key_value_heads": 1}, "the shapes of a module and its reader do not fit"),
        ({"num_key_value_heads": 4}, "the shapes of a module and its reader do not fit"),
        ({"num_attention_heads": None}, "config.json does not say how large or how many the heads are"),
    ],
)
def test_values_of_heads_that_the_configuration_does_not_say_are_left(
    heads: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Another tower, or layers with heads of their own: which query head reads which value is not known."""
    config = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, **heads}
    model = open_local(write_checkpoint(tmp_path / "src", llama_tensors(), config=config))
    links = find_links(model.config, model.tensors, plain=())
    names = [f"model.layers.{layer}.self_attn.v_proj" for layer in range(3)]
    assert links.left[reason] == tuple(names)
    assert not {link.name for link in links.links} & set(names)


def test_any_range_of_a_folded_tensor_is_that_of_the_whole(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", llama_tensors("BF16"), config=CONFIG)
    fold = measured(source, tmp_path / "work")
    random = np.random.default_rng(4)
    for tensor in fold.folded.tensors:
        whole = values_of(tensor).reshape(-1)
        for _ in range(6):
            start = int(random.integers(0, len(whole)))
            count = int(random.integers(1, min(5000, len(whole) - start) + 1))
            raw = np.full(count * 4 + 8, 255, dtype=np.uint8)
            tensor.read(start, count, "F32", raw)
            assert np.array_equal(raw[: count * 4].view(np.float32), whole[start : start + count]), tensor.name
            tensor.read(start, count, "BF16", raw)
            assert raw[: count * 2].tobytes() == bf16(whole[start : start + count])[1].tobytes(), tensor.name
