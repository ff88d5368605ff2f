"""Models as the Hub has them: text models inside others, layers for further tokens, stacks of experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf_files import CONFIG, all_values, converted, llama_tensors, metadata, named, write_llama
from helpers import Array, Tensor, bf16, f32, gaussian, read_all, write_checkpoint


def test_a_model_of_images_and_text_gives_its_text_model(tmp_path: Path) -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {"model_type": "llama"}
    gemma = text | {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32}
    gemma |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    tensors = llama_tensors()
    del tensors["lm_head.weight"]
    for layer in range(2):
        for name, width in (("q_norm", 8), ("k_norm", 8)):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = bf16(gaussian(width))
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = bf16(gaussian(16))
    alone = converted(write_checkpoint(tmp_path / "text", tensors, config=gemma))
    for prefix in ("model.language_model.", "language_model.model."):
        seen = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
        seen["model.vision_tower.patch.weight"] = bf16(gaussian(4, 4))
        folder = tmp_path / prefix
        wrapped = converted(write_checkpoint(folder, seen, config={"model_type": "gemma3", "text_config": gemma}))
        assert wrapped.metadata == alone.metadata
        assert all_values(wrapped).keys() == all_values(alone).keys()
        assert wrapped.left_out == {"model.vision_tower.patch.weight": "not part of the text model"}


@pytest.mark.parametrize(
    "name", ["layers.2.mlp.up_proj", "layers.3.eh_proj", "mtp.fc", "model.mtp_block.0.mlp.up_proj"]
)
def test_layers_behind_the_last_and_those_that_predict_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    """As published files have them: numbered behind the last (DeepSeek, GLM), or under names of their own (Qwen)."""
    whole = f"{'model.' if name.startswith('layers') else ''}{name}.weight"
    model = converted(write_llama(tmp_path, **{whole.replace(".", "__"): bf16(gaussian(4, 4))}))
    assert model.left_out.keys() == {whole}
    assert named(model).keys() == named(converted(write_llama(tmp_path / "without"))).keys()


def test_published_names_of_qwen3_5_moe_give_the_same_file(tmp_path: Path) -> None:
    """Stacks [experts, gate and up, in], the text model below `language_model`, a tower and a layer for further tokens.

    As llama.cpp's conversion/qwen.py expects them (Qwen2MoeModel, Qwen3_5MoeTextModel); transformers writes single
    experts.
    """
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES["qwen3_5 moe"], tmp_path / "single")
    text = json.loads((tmp_path / "single" / "config.json").read_text())
    published: dict[str, Tensor] = {}
    experts: dict[str, list[Array]] = {}
    for name, (dtype, values) in sorted(read_all(tmp_path / "single").items()):
        whole = name.replace("model.", "model.language_model.", 1)
        if match := re.fullmatch(r"(.*\.experts)\.\d\.(\w+)\.weight", whole):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(values)
        else:
            published[whole] = (dtype, values)
    for layer in range(4):
        path = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (np.stack(experts[f"{path}.{part}_proj"]) for part in ("gate", "up", "down"))
        published |= {f"{path}.gate_up_proj": f32(np.concatenate([gate, up], axis=1)), f"{path}.down_proj": f32(down)}
    extra = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
    published |= {name: bf16(gaussian(4, 4)) for name in extra}
    config = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    model, single = (
        converted(write_checkpoint(tmp_path / "hub", published, config=config)),
        converted(tmp_path / "single"),
    )
    assert model.metadata == single.metadata and model.left_out.keys() == {*extra}
    found, expected = all_values(model), all_values(single)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


# What published configurations state instead of keys of transformers: as llama.cpp's conversion/*.py reads them.
# Kimi Linear lists its layers from 1, in a part of their own; MiMo V2 and MiniMax M3 list them as 0 and 1; MiMo counts
# the tokens of its window without the one that attends; Step 3.5 lists those that predict further tokens, too.
INSTEAD: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "kimi linear": (
        ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types"),
        {"first_k_dense_replace": 1, "linear_attn_config": {
            "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
        }},
    ),
    "mimo v2": (
        ("layer_types", "mlp_layer_types", "sliding_window", "rms_norm_eps", "n_shared_experts"),
        {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window": 32,
         "sliding_window_size": 32, "rope_theta": 500000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.5,
         "layernorm_epsilon": 1e-5, "swa_num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_head_dim": 32,
         "swa_v_head_dim": 24, "routed_scaling_factor": None, "topk_method": "noaux_tc"},
    ),
    "step3p5": (
        ("mlp_layer_types", "layer_types", "rope_parameters", "num_sliding_attention_heads", "query_pre_attn_scalar",
         "per_layer_config", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok"),
        {"num_attention_groups": 2, "moe_num_experts": 8, "moe_top_k": 2, "moe_layers_enum": "1,2,3",
         "moe_router_activation": "sigmoid", "norm_expert_weight": True, "use_head_wise_attn_gate": True,
         "num_nextn_predict_layers": 1, "layer_types": ["full_attention", *["sliding_attention"] * 4],
         "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32},
         "rope_theta": [5e5, 1e4, 1e4, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
                          "low_freq_factor": 1.0, "high_freq_factor": 4.0},
         "swiglu_limits": [None, 0.05, 0.0, 0.1, 0.0], "swiglu_limits_shared": [0.2, None, 0.1, 0.3, 0.0]},
    ),
    "minimax m3": (
        ("mlp_layer_types", "layer_types", "index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks",
         "index_local_blocks"),
        {"moe_layer_freq": [0, 1, 1], "hidden_act": "swigluoai", "n_shared_experts": 1, "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 128, "sparse_topk_blocks": 16,
            "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
        }},
    ),
    "hy v4": (
        ("mlp_layer_types", "rope_parameters"),
        {"first_k_dense_replace": 1, "layer_types": ["deepseek_sparse_attention"] * 4, "num_key_value_heads": 2,
         "indexer_types": ["full", "shared", "full", "shared", "full"], "rope_theta": 1e4},
    ),
    "hy v3": (("mlp_layer_types",), {"first_k_dense_replace": 1, "route_norm": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTEAD)
def test_published_configurations_mean_what_transformers_writes(name: str, tmp_path: Path) -> None:
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES[name], tmp_path)
    expected = converted(tmp_path).metadata
    stated = json.loads((tmp_path / "config.json").read_text())
    dropped, published = INSTEAD[name]
    text = stated.get("text_config", stated)
    kept = {key: value for key, value in text.items() if key not in dropped} | published
    (tmp_path / "config.json").write_text(json.dumps(stated | {"text_config": kept} if text is not stated else kept))
    assert converted(tmp_path).metadata == expected


def test_experts_of_qwen3_vl_moe_are_read_either_way(tmp_path: Path) -> None:
    """The Hub has [experts, in, out], as conversion/qwen3vl.py turns them; transformers 5 saves [experts, out, in]."""
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES["qwen3 vl moe"], tmp_path)
    expected, tensors = all_values(converted(tmp_path)), read_all(tmp_path)
    stacks = [name for name in tensors if ".experts." in name]
    assert len(stacks) == 4
    turned = {name: f32(np.ascontiguousarray(tensors[name][1].swapaxes(1, 2))) for name in stacks}
    write_checkpoint(tmp_path, tensors | turned)
    published = all_values(converted(tmp_path))
    assert published.keys() == expected.keys()
    assert all(np.array_equal(published[name], expected[name]) for name in expected)


def test_adapters_of_phi_4_multimodal_are_left_out(tmp_path: Path) -> None:
    """Its own code (modeling_phi4mm.py) has them beside each matrix, which is then a base_layer; so is its file."""
    sizes = {"head_dim": 8, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 128}
    config = CONFIG | sizes | {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"]}
    tensors = llama_tensors()
    for layer in range(2):
        path = f"model.layers.{layer}"
        for whole, parts in (
            ("self_attn.qkv_proj", "self_attn.[qkv]_proj"),
            ("mlp.gate_up_proj", "mlp.(gate|up)_proj"),
        ):
            rows = [tensors.pop(name)[1] for name in list(tensors) if re.fullmatch(f"{path}.{parts}.weight", name)]
            tensors[f"{path}.{whole}.weight"] = bf16(np.concatenate(rows))
    plain = converted(write_checkpoint(tmp_path / "plain", tensors, config=config))
    published = {re.sub(r"(_proj)\.weight", r"\1.base_layer.weight", name): value for name, value in tensors.items()}
    adapters = [f"model.layers.1.mlp.down_proj.lora_{part}.speech.weight" for part in "AB"]
    published |= {name: bf16(gaussian(4, 4)) for name in adapters}
    model = converted(write_checkpoint(tmp_path / "hub", published, config=config))
    assert model.metadata == plain.metadata and named(model).keys() == named(plain).keys()
    assert model.left_out.keys() == {*adapters} and "adapter for images or sound" in model.left_out[adapters[0]]


def test_names_of_hunyuan_v4_as_transformers_saves_them_give_the_same_file(tmp_path: Path) -> None:
    import gguf_cases

    model, case = tmp_path / "saved", gguf_cases.CASES["hy v4"]
    gguf_cases.build(case).save_pretrained(model)
    gguf_cases.saved(case, tmp_path / "hub")
    tensors = read_all(tmp_path / "hub") | {"model.mtp_layers.0.eh_proj.weight": bf16(gaussian(4, 4))}
    write_checkpoint(tmp_path / "hub", tensors)
    saved, published = converted(model), converted(tmp_path / "hub")
    assert read_all(model).keys().isdisjoint(name for name in tensors if ".hc_" in name)
    assert [*published.left_out] == ["model.mtp_layers.0.eh_proj.weight"] and published.metadata == saved.metadata
    found, expected = all_values(saved), all_values(published)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_published_names_of_deepseek_v4_give_the_same_file(tmp_path: Path) -> None:
    """Without a prefix, as llama.cpp's conversion/deepseek.py expects them; transformers saves a mixture of both."""
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES["deepseek v4 yarn"], tmp_path)
    saved, tensors = converted(tmp_path), read_all(tmp_path)
    values = all_values(saved)
    stated = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor", "compress_rates"):
        del stated[key]
    stated |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16}
    stated["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
    published = {
        name.removeprefix("model.").replace("hc_head.hc", "hc_head").replace("embed_tokens", "embed"): value
        for name, value in tensors.items()
    }
    published = {name.replace("attn.norm", "attn.kv_norm"): value for name, value in published.items()}
    published |= {name: bf16(gaussian(4, 4)) for name in ("mtp.0.e_proj.weight", "mtp.0.attn.wkv.weight")}
    model = converted(write_checkpoint(tmp_path / "hub", published, config=stated))
    assert model.metadata == saved.metadata and all(name.startswith("mtp.") for name in model.left_out)
    found = all_values(model)
    assert found.keys() == values.keys() and all(np.array_equal(found[name], values[name]) for name in values)


def test_a_model_that_wraps_another_gives_what_its_text_config_says(tmp_path: Path) -> None:
    """Mistral 3 of images and text, with the prefixes of its published files."""
    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {"model_type": "ministral3"}
    text["head_dim"] = 8
    text |= {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}
    tensors = {f"language_model.{name}": value for name, value in llama_tensors().items()}
    tensors["vision_tower.patch_conv.weight"] = bf16(gaussian(4, 4))
    config = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    model = converted(write_checkpoint(tmp_path, tensors, config=config))
    assert model.architecture == "mistral3"
    assert metadata(model)["mistral3.attention.temperature_scale"] == 0.1
    assert model.left_out == {"vision_tower.patch_conv.weight": "not part of the text model"}
    assert named(model).keys() == named(converted(write_llama(tmp_path / "llama"))).keys()
