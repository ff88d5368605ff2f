"""The tensors of GGUF models: their names, shapes and values, and how ranges of them are read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import quantize
from commands import raises
from export_decoders import values_of
from gguf_files import CONFIG, LAYER, all_values, converted, edit_config, llama_tensors, metadata, named, write_llama
from helpers import Array, Tensor, as_float32, bf16, f32, gaussian, write_checkpoint

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.common.dtypes import item_bytes
from pqweights.errors import ExportError
from pqweights.planning.recipe import parse_recipe

EXPERTS = 4


def read(tensor: LogicalTensor, start: int, count: int, dtype: str) -> bytes:
    out = np.empty(count * item_bytes(dtype) + 3, dtype=np.uint8)
    tensor.read(start, count, dtype, out)
    return out[: count * item_bytes(dtype)].tobytes()


def interleaved(matrix: Array, heads: int) -> Array:
    """The rows of the halves of each head in turns."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def test_tensors_of_llama(tmp_path: Path) -> None:
    """Their names are those of llama.cpp; only the rows of q and k move."""
    model = converted(write_llama(tmp_path))
    source = {name: as_float32(tensor) for name, tensor in llama_tensors().items()}
    expected = {
        "token_embd.weight": source["model.embed_tokens.weight"],
        "output_norm.weight": source["model.norm.weight"],
        "output.weight": source["lm_head.weight"],
    }
    names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(2):
        for name, origin in zip(names, LAYER, strict=True):
            value = source[f"model.layers.{layer}.{origin}.weight"]
            heads = {"attn_q": 2, "attn_k": 1}.get(name)
            expected[f"blk.{layer}.{name}.weight"] = value if heads is None else interleaved(value, heads)
    found = all_values(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert (model.architecture, model.left_out, model.notes) == ("llama", {}, ())
    for entry in model.metadata.values():  # plain numbers, texts and lists
        assert json.loads(json.dumps(entry.value)) == entry.value


def test_tensors_keep_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    """So that its files are read one after another."""
    folder = write_llama(tmp_path)
    order = [tensor.name for tensor in open_local(folder).tensors]
    sources = [tensor.sources[0].name for tensor in converted(folder).tensors]  # type: ignore[attr-defined]
    assert sources == order


def test_biases_move_with_their_rows(tmp_path: Path) -> None:
    """And tensors that follow from the configuration are left out."""
    bias, computed = f32(gaussian(16, seed=7)), "model__layers__0__self_attn__rotary_emb__inv_freq"
    changed = {f"model__layers__{layer}__self_attn__q_proj__bias": bias for layer in range(2)}
    biased = {"attention_bias": True}
    model = converted(write_llama(tmp_path, config=biased, **changed, **{computed: f32(gaussian(4))}))
    assert model.left_out == {computed.replace("__", "."): "follows from the configuration"}
    found = all_values(model)
    np.testing.assert_array_equal(found["blk.1.attn_q.bias"], interleaved(as_float32(bias), 2))


# A Llama whose q has more rows than a chunk may hold.
WIDE = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 1}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_any_range_of_a_tensor_can_be_read(dtype: str, encoded: bool, tmp_path: Path) -> None:
    bias = bf16(gaussian(256, seed=52))
    folder = write_llama(tmp_path / "source", sizes=WIDE, model__layers__0__self_attn__q_proj__bias=bias)
    if encoded:
        quantize(folder, tmp_path / "master", parse_recipe("bits: 5", "recipe"))
        folder = tmp_path / "master"
    check_ranges(folder, dtype)


def check_ranges(folder: Path, dtype: str) -> None:
    random, size = np.random.default_rng(1), item_bytes(dtype)
    for tensor in converted(folder).tensors:
        count = element_count(tensor)
        whole = read(tensor, 0, count, dtype)
        for _ in range(12):
            first, last = sorted(random.integers(0, count + 1, 2).tolist())
            assert read(tensor, first, last - first, dtype) == whole[first * size : last * size], tensor.name


# Cuts, turned halves of heads, alternating rows of transposed stacks, value heads in another order, multipliers.
REARRANGED = {
    "deepseek v3": ({"v_head_dim": 19}, "config.json"),
    "gpt-oss": ({"num_local_experts": 3}, "(3, 96, 64)"),
    "qwen3 next": ({"linear_num_value_heads": 4}, "config.json"),
    "qwen3_5": ({"linear_value_head_dim": 8, "linear_key_head_dim": 8}, "config.json"),
    "falcon h1": ({"mamba_n_heads": 4}, "config.json"),
    "qwen4 exp": ({"seed": 7}, "layer_multipliers"),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_any_range_of_a_rearranged_tensor_can_be_read(name: str, tmp_path: Path) -> None:
    """And a configuration with other sizes than the tensors have is refused."""
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES[name], tmp_path)
    check_ranges(tmp_path, "F32")
    changed, named = REARRANGED[name]
    edit_config(tmp_path, changed)
    with raises(ExportError, named):
        converted(tmp_path)


def moe_config(**changed: Any) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **changed,
    }


def moe_tensors(*, fused: bool) -> dict[str, Tensor]:
    """A mixture of experts in either layout."""
    tensors = {name: value for name, value in llama_tensors().items() if ".mlp." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}"
        for name in ("q_norm", "k_norm"):
            tensors[f"{block}.self_attn.{name}.weight"] = bf16(gaussian(8, seed=layer))
        tensors[f"{block}.mlp.gate.weight"] = bf16(gaussian(EXPERTS, 16, seed=30 + layer))
        gate, up = (gaussian(EXPERTS, 24, 16, seed=40 + 10 * layer + part) for part in range(2))
        down = gaussian(EXPERTS, 16, 24, seed=42 + 10 * layer)
        if fused:
            tensors[f"{block}.mlp.experts.gate_up_proj"] = bf16(np.concatenate([gate, up], axis=1))
            tensors[f"{block}.mlp.experts.down_proj"] = bf16(down)
            continue
        for expert in range(EXPERTS):
            for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                tensors[f"{block}.mlp.experts.{expert}.{name}.weight"] = bf16(matrices[expert])
    return tensors


def test_experts_are_stacked_from_either_layout(tmp_path: Path) -> None:
    models = [
        converted(write_checkpoint(tmp_path / str(fused), moe_tensors(fused=fused), config=moe_config()))
        for fused in (False, True)
    ]
    split, fused = (all_values(model) for model in models)
    assert split["blk.1.ffn_gate_exps.weight"].shape == (EXPERTS, 24, 16)
    assert split["blk.1.ffn_down_exps.weight"].shape == (EXPERTS, 16, 24)
    assert split.keys() == fused.keys()
    for name, value in split.items():
        np.testing.assert_array_equal(fused[name], value, err_msg=name)
    source = moe_tensors(fused=False)
    np.testing.assert_array_equal(
        split["blk.0.ffn_up_exps.weight"][2], as_float32(source["model.layers.0.mlp.experts.2.up_proj.weight"])
    )
    found = metadata(models[0])
    assert (found["qwen3moe.expert_count"], found["qwen3moe.expert_used_count"]) == (4, 2)
    assert found["qwen3moe.expert_feed_forward_length"] == 24
    assert found["general.size_label"].startswith("4x")


def test_missing_and_misshapen_experts_are_refused(tmp_path: Path) -> None:
    tensors = moe_tensors(fused=False)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with raises(ExportError, "4 experts", "3"):
        converted(write_checkpoint(tmp_path / "single", tensors, config=moe_config()))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = moe_tensors(fused=True) | {name: bf16(gaussian(EXPERTS, 16, 48))}
    with raises(ExportError, name, "(4, 48, 16)", "(4, 16, 48)"):
        converted(write_checkpoint(tmp_path / "fused", tensors, config=moe_config()))


def test_gains_of_gemma_get_their_offset_in_float32(tmp_path: Path) -> None:
    config = {"model_type": "gemma", "architectures": None, "hidden_act": "gelu", "tie_word_embeddings": None}
    config |= {"head_dim": 8}
    folder = write_llama(tmp_path, config=config, lm_head__weight=llama_tensors()["model.embed_tokens.weight"])
    model = converted(folder)
    gain = named(model)["blk.0.attn_norm.weight"]
    source = as_float32(llama_tensors()["model.layers.0.input_layernorm.weight"])
    assert (gain.dtype, gain.plain_dtype) == ("F32", "F32")
    np.testing.assert_array_equal(values_of(gain), source + np.float32(1))
    assert read(gain, 3, 5, "BF16") == bf16((source + np.float32(1))[3:8])[1].tobytes()
    assert model.left_out == {"lm_head.weight": "the same as the embeddings"}


def test_embeddings_that_tokens_of_images_lack_are_zeros(tmp_path: Path) -> None:
    """Gemma 3n has fewer embeddings for each layer than tokens; llama.cpp wants as many."""
    import gguf_cases

    case = gguf_cases.CASES["gemma3n"]
    settings = case.settings | {"vocab_size_per_layer_input": 100}
    gguf_cases.saved(dataclasses.replace(case, settings=settings), tmp_path)
    padded = named(converted(tmp_path))["per_layer_token_embd.weight"]
    values = values_of(padded)
    assert padded.shape[0] == gguf_cases.VOCABULARY and values[1:100].all() and not values[100:].any()
    for start, count in ((3, 10), (99 * padded.shape[1], 2 * padded.shape[1]), (110 * padded.shape[1], 7)):
        assert read(padded, start, count, "F32") == values.reshape(-1)[start : start + count].tobytes()
