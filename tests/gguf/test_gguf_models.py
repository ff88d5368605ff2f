"""The metadata and the tensors of GGUF models, and the models that are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from calls import quantize
from export_decoders import values_of
from gguf_files import CONFIG, LAYER, converted, llama_tensors, metadata, write_llama
from helpers import Array, Tensor, as_float32, bf16, f32, gaussian, read_all, write_checkpoint

from pqweights.checkpoint.gguf.model import GgufModel, MetadataEntry
from pqweights.checkpoint.gguf.settings import OTHER_NAMES
from pqweights.checkpoint.models.llama_cpp import SETTINGS, Architecture
from pqweights.checkpoint.models.table import MODELS
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.common.dtypes import item_bytes
from pqweights.errors import ExportError
from pqweights.planning.recipe import parse_recipe

UINT32, FLOAT32, STRING, ARRAY = (
    int(gguf.GGUFValueType[name]) for name in ("UINT32", "FLOAT32", "STRING", "ARRAY")
)  # fmt: skip
EXPERTS = 4


def named(model: GgufModel) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in model.tensors}


def all_values(model: GgufModel) -> dict[str, Array]:
    return {tensor.name: values_of(tensor) for tensor in model.tensors}


def read(tensor: LogicalTensor, start: int, count: int, dtype: str) -> bytes:
    out = np.empty(count * item_bytes(dtype) + 3, dtype=np.uint8)
    tensor.read(start, count, dtype, out)
    return out[: count * item_bytes(dtype)].tobytes()


def interleaved(matrix: Array, heads: int) -> Array:
    """The rows of the halves of each head in turns."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def test_metadata_of_llama(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\npipeline_tag: text-generation\n---\n")
    assert converted(tmp_path).metadata == (
        MetadataEntry("general.architecture", "llama", STRING, None),
        MetadataEntry("general.type", "model", STRING, None),
        MetadataEntry("general.name", "tiny", STRING, None),
        MetadataEntry("general.size_label", "6.0K", STRING, None),
        MetadataEntry("general.license", "mit", STRING, None),
        MetadataEntry("general.tags", ["text-generation"], ARRAY, STRING),
        MetadataEntry("general.languages", ["en"], ARRAY, STRING),
        MetadataEntry("llama.context_length", 128, UINT32, None),
        MetadataEntry("llama.embedding_length", 16, UINT32, None),
        MetadataEntry("llama.block_count", 2, UINT32, None),
        MetadataEntry("llama.feed_forward_length", 24, UINT32, None),
        MetadataEntry("llama.attention.head_count", 2, UINT32, None),
        MetadataEntry("llama.attention.head_count_kv", 1, UINT32, None),
        MetadataEntry("llama.attention.key_length", 8, UINT32, None),
        MetadataEntry("llama.attention.value_length", 8, UINT32, None),
        MetadataEntry("llama.attention.layer_norm_rms_epsilon", 1e-5, FLOAT32, None),
        MetadataEntry("llama.vocab_size", 64, UINT32, None),
        MetadataEntry("llama.rope.dimension_count", 8, UINT32, None),
        MetadataEntry("llama.rope.freq_base", 10000.0, FLOAT32, None),
        MetadataEntry("tokenizer.ggml.model", "no_vocab", STRING, None),
    )


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
    for entry in model.metadata:  # plain numbers, texts and lists, whatever classes the package has for them
        assert type(entry.value_type) is int and json.loads(json.dumps(entry.value)) == entry.value


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
    model = converted(write_llama(tmp_path, **changed, **{computed: f32(gaussian(4))}))
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
    "deepseek v3": ({"v_head_dim": 19}, "config.json asks for|as config.json has it"),
    "gpt-oss": ({"num_local_experts": 3}, r"expected shape \(3, 96, 64\)"),
    "qwen3 next": ({"linear_num_value_heads": 4}, "as config.json has it"),
    "qwen3_5": ({"linear_value_head_dim": 8, "linear_key_head_dim": 8}, "config.json"),
    "falcon h1": ({"mamba_n_heads": 4}, "config.json"),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_any_range_of_a_rearranged_tensor_can_be_read(name: str, tmp_path: Path) -> None:
    """And a configuration with other sizes than the tensors have is refused."""
    pytest.importorskip("transformers")
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES[name], tmp_path)
    check_ranges(tmp_path, "F32")
    changed, message = REARRANGED[name]
    edit_config(tmp_path, changed)
    with pytest.raises(ExportError, match=message):
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
    with pytest.raises(ExportError, match="expected the same matrix of 4 experts, found 3"):
        converted(write_checkpoint(tmp_path / "single", tensors, config=moe_config()))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = moe_tensors(fused=True) | {name: bf16(gaussian(EXPERTS, 16, 48))}
    with pytest.raises(ExportError, match=rf"{name}.*expected shape \(4, 48, 16\), found \(4, 16, 48\)"):
        converted(write_checkpoint(tmp_path / "fused", tensors, config=moe_config()))


def test_gains_of_gemma_get_their_offset_in_float32(tmp_path: Path) -> None:
    config = {"model_type": "gemma", "architectures": None, "hidden_act": "gelu", "tie_word_embeddings": None}
    config |= {"head_dim": 8}
    folder = write_llama(tmp_path, config=config)
    model = converted(folder)
    gain = named(model)["blk.0.attn_norm.weight"]
    source = as_float32(llama_tensors()["model.layers.0.input_layernorm.weight"])
    assert (gain.dtype, gain.plain_dtype) == ("F32", "F32")
    np.testing.assert_array_equal(values_of(gain), source + np.float32(1))
    assert read(gain, 3, 5, "BF16") == bf16((source + np.float32(1))[3:8])[1].tobytes()
    assert model.left_out == {"lm_head.weight": "the same as the embeddings"}


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


OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
NEW = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize("config", [OLD, NEW, OLD | {"rope_scaling": {"rope_type": "linear", "factor": 4}}])
def test_rope_parameters_are_read_by_old_and_new_keys(config: dict[str, Any], tmp_path: Path) -> None:
    found = metadata(converted(write_llama(tmp_path, config=config)))
    assert {key: value for key, value in found.items() if ".rope." in key} == {
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 5e5,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
    }


GEMMA3 = {
    "model_type": "gemma3_text", "architectures": None, "hidden_act": None, "head_dim": 8, "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True, "sliding_window": 32,
}  # fmt: skip
BY_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


def write_gemma(folder: Path, model_type: str, **config: Any) -> Path:
    """A Gemma 2 or 3 with tensors as small as those of the Llama."""
    names = ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    names += ["self_attn__q_norm", "self_attn__k_norm"] if model_type == "gemma3_text" else []
    changed = {
        f"model__layers__{layer}__{name}__weight": bf16(gaussian(8 if "attn" in name else 16))
        for layer in range(2)
        for name in names
    }
    return write_llama(folder, config=GEMMA3 | {"model_type": model_type} | config, **changed)


def edit_config(folder: Path, changed: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": BY_LAYERS, "layer_types": ["full_attention", "sliding_attention"]},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_layers_with_a_window_have_their_own_base(config: dict[str, Any], tmp_path: Path) -> None:
    found = metadata(converted(write_gemma(tmp_path, "gemma3_text", **config)))
    assert {key: value for key, value in found.items() if ".rope." in key or "sliding" in key} == {
        "gemma3.attention.sliding_window": 32,
        "gemma3.attention.sliding_window_pattern": [False, True],
        "gemma3.rope.dimension_count": 8,
        "gemma3.rope.freq_base": 5e5,
        "gemma3.rope.freq_base_swa": 2e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }


def test_a_window_that_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    model = converted(write_llama(tmp_path, config=mistral | {"sliding_window": 100}))
    assert metadata(model)["llama.context_length"] == 128
    (note,) = model.notes
    assert note.startswith("llama.cpp attends to the whole context, where the model attends to the last 100 tokens")
    for index, window in enumerate((None, 4096)):
        model = converted(write_llama(tmp_path / str(index), config=mistral | {"sliding_window": window}))
        assert (metadata(model)["llama.context_length"], model.notes) == (128, ())


@pytest.mark.parametrize(
    "name", ["layers.2.mlp.up_proj", "layers.3.eh_proj", "mtp.fc", "model.mtp_block.0.mlp.up_proj"]
)
def test_layers_that_predict_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    """As published files have them: numbered behind the last (DeepSeek, GLM), or under names of their own (Qwen)."""
    whole = f"{'model.' if name.startswith('layers') else ''}{name}.weight"
    model = converted(write_llama(tmp_path, **{whole.replace(".", "__"): bf16(gaussian(4, 4))}))
    assert model.left_out == {whole: "predicts further tokens, which the model does without"}
    assert named(model).keys() == named(converted(write_llama(tmp_path / "without"))).keys()


def test_published_names_of_qwen3_5_moe_give_the_same_file(tmp_path: Path) -> None:
    """Stacks [experts, gate and up, in], the text model below `language_model`, a tower and a layer for further tokens.

    As llama.cpp's conversion/qwen.py expects them (Qwen2MoeModel, Qwen3_5MoeTextModel); transformers writes single
    experts.
    """
    pytest.importorskip("transformers")
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


def test_a_published_configuration_of_kimi_linear_means_what_transformers_writes(tmp_path: Path) -> None:
    """Its layers are listed from 1, in a part of their own, as llama.cpp's conversion/kimi_linear.py expects it."""
    pytest.importorskip("transformers")
    import gguf_cases

    gguf_cases.saved(gguf_cases.CASES["kimi linear"], tmp_path)
    expected = converted(tmp_path).metadata
    stated = json.loads((tmp_path / "config.json").read_text())
    keys = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types")
    own = {key: stated.pop(key) for key in keys}
    stated["linear_attn_config"] = {
        "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": own["linear_head_dim"],
        "num_heads": own["linear_num_heads"], "short_conv_kernel_size": own["linear_conv_kernel_dim"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(stated | {"first_k_dense_replace": 1}))
    assert converted(tmp_path).metadata == expected


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


MLA = {"model_type": "deepseek_v3", "q_lora_rank": 4, "first_k_dense_replace": 1}
DELTA_NET = {"model_type": "qwen3_5_text", "linear_value_head_dim": 8, "linear_key_head_dim": 8}
GEMMA2 = GEMMA3 | {"model_type": "gemma2"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "hold a model of type mamba; these can be written: arcee, .*, qwen3_moe"),
        ({"model_type": None}, "GGUF cannot hold a model of type None"),
        ({"hidden_act": "gelu"}, "llama.cpp computes it with hidden_act 'silu' or 'swish' only, found 'gelu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification does not predict text"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "with rope_type default, .* only, found 'dynamic'"),
        ({"rope_parameters": {"rope_type": "new"}}, "with rope_type default, .* only, found 'new'"),
        (
            {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": 3}},
            "expected a list of numbers as mrope_section, found 3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "expected a positive number as factor of its rope parameters"),
        ({"partial_rotary_factor": 0.5}, "llama.cpp rotates whole heads, and partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding windows for it"),
        ({"rms_norm_eps": "x"}, "expected a positive number as rms_norm_eps, found 'x'"),
        ({"rms_norm_eps": float("nan")}, "expected a positive number as rms_norm_eps, found nan"),
        ({"num_hidden_layers": "2"}, "expected a positive number as num_hidden_layers, found '2'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}}, "YaRN with beta_fast 32 only, found 16"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "rounds the bounds of YaRN"),
        ({"num_hidden_layers": 10**7}, "expected at most 512 as num_hidden_layers, found 10000000"),
        ({"max_position_embeddings": 2**40}, "at most 2147483647 as max_position_embeddings, found 1099511627776"),
        ({"rope_theta": "x"}, "expected a positive number as rope_theta, found 'x'"),
        ({"partial_rotary_factor": "x"}, "expected a positive number as partial_rotary_factor, found 'x'"),
        ({"sliding_window": "x"}, "expected a positive number as sliding_window, found 'x'"),
        ({"tie_word_embeddings": "yes"}, "expected true or false as tie_word_embeddings, found 'yes'"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of names as architectures, found 'LlamaForCausalLM'"),
        ({"layer_types": 3}, "for each of 2 layers as layer_types, found 3"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers as layer_types, found"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 .* not above low_"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": "x"}}, "as attention_factor of its rope"),
        ({"model_type": "smollm3", "no_rope_layers": 3}, "expected a list as no_rope_layers, found 3"),
        ({"model_type": "qwen2", "hidden_size": 17}, "hidden_size 17 is not a multiple of the 2 heads"),
        (GEMMA2 | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0}, "sliding_window is 0"),
        (
            {"model_type": "cohere2", "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
            "with a sliding window in some layers only, found none",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1.0], "short_factor": [1.0]}},
            "expected 4 numbers as long_factor",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "with use_sliding_window False or None only, found True"),
        ({"model_type": "qwen2", "head_dim": 4}, "with head_dim 8 only, found 4"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "with norm_topk_prob True only, found False"),
        (
            {"model_type": "gemma3_text", "hidden_act": None, "head_dim": 8},
            "with query_pre_attn_scalar 8 only, found 256",
        ),
        (MLA | {"num_hidden_layers": 27}, "q_lora_rank of all models but those of 26 or 27 layers, found 4 with 27"),
        (MLA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
         "YaRN with equal mscale and mscale_all_dim only, found 1.0 and 0.5"),
        (MLA | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types is .'sparse', 'dense'."),
        (DELTA_NET | {"linear_key_head_dim": 4}, "equal linear_value_head_dim and linear_key_head_dim only, found 8"),
        (DELTA_NET | {"layer_types": ["full_attention", "linear_attention"]}, "full attention in every 1th layer"),
        (DELTA_NET | {"layer_types": ["full_attention", "conv"]}, "full_attention or linear_attention for"),
        ({"model_type": "exaone4", "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "windows for 64"),
        ({"model_type": "llama4_text", "moe_layers": [1]}, "in every interleave_moe_layer_step-th layer"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "computes every 4th layer without rotary embeddings"),
        (
            {"model_type": "olmo3", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
            | {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}, "full_attention": {"rope_theta": 2.0}}},
            "all its layers with the rope_theta 2.0, and sliding_attention has 1.0",
        ),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path, config=config | ({"architectures": None} if "model_type" in config else {}))
    with pytest.raises(ExportError, match=rf"^config\.json: .*{message}.*use --target bf16"):
        converted(folder)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_gemma_2_without_its_caps_is_refused(key: str, tmp_path: Path) -> None:
    """llama.cpp would take 50 and 30."""
    folder = write_gemma(tmp_path, "gemma2")
    edit_config(folder, {key: None})
    with pytest.raises(ExportError, match=f"expected a positive number as {key}, found None"):
        converted(folder)


def test_gemma_2_without_windows_gets_one_as_long_as_its_context(tmp_path: Path) -> None:
    """llama.cpp would take 4096."""
    folder = write_gemma(tmp_path, "gemma2", layer_types=["full_attention"] * 2)
    assert metadata(converted(folder))["gemma2.attention.sliding_window"] == 128


def test_the_choice_of_factors_of_longrope_is_said(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "factor": 2.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    (note,) = converted(write_llama(tmp_path, config={"rope_parameters": rope})).notes
    assert "transformers by the length of the text" in note


# The keys of which the meaning of their absence matters.
ARCHITECTURES = {name: model.llama_cpp for name, model in MODELS.items() if model.llama_cpp is not None}


def keys_in(expression: str) -> set[str]:
    """The keys of an expression as in Setting.key."""
    return {key for key in re.split(r" [+*/] ", expression.partition(" = ")[0]) if key and not key.isdigit()}


# What wraps a text model with a configuration of its own, and a type that transformers does not have.
OTHERS = {"kimi_k2", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
KEYS = {key for setting in SETTINGS for key in keys_in(setting.key)} | {
    "max_position_embeddings",
    "block_auto_adjust_ff_dim",
    "block_multiple_of",
    "block_ffn_dim_multiplier",
    "no_rope_layer_interval",
    "original_max_position_embeddings",
    "query_pre_attn_scalar",
    "tie_word_embeddings",
}


def keys_of(architecture: Architecture) -> set[str]:
    """The keys that an architecture reads."""
    expressions = [setting.key for setting in (architecture.norm, *architecture.settings)]
    expressions += [size for cut in architecture.cuts.values() for size in (*cut.blocks, cut.times)]
    expressions += [
        size for shape in (*architecture.shapes.values(), *architecture.reshaped.values()) for size in shape if size
    ]
    expressions += [size for scaled in architecture.scaled.values() for size in scaled.blocks]
    expressions += [architecture.rotated, architecture.period_key]
    keys = {key for expression in expressions for key in keys_in(expression)} | architecture.values.keys()
    factors = [by for scaled in architecture.scaled.values() for by in scaled.by]
    keys |= {key.partition(".")[0] for by in factors for key in keys_in(by)}
    keys |= set() if architecture.dense is None else keys_of(architecture.dense)
    return keys | (set() if architecture.windows is None else {"sliding_window"})


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() - OTHERS))
def test_absent_keys_mean_what_transformers_takes(model_type: str) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    values = {
        field.name: field.default for field in dataclasses.fields(known) if field.default is not dataclasses.MISSING
    }
    architecture = ARCHITECTURES[model_type]
    expected = {
        key: next((values[name] for name in (key, *OTHER_NAMES.get(key, ())) if values.get(name) is not None), None)
        for key in KEYS | keys_of(architecture)
    }
    if model_type == "cohere2":
        del expected["head_dim"]  # which the class computes anyway
    base = known.default_theta
    expected["rope_theta"] = base["global"] if isinstance(base, dict) else base
    expected["rope_local_base_freq"] = base["local"] if isinstance(base, dict) else None
    partial = (getattr(known(), "rope_parameters", None) or {}).get("partial_rotary_factor")  # set after the fields are
    expected |= {} if partial in (None, 1.0) else {"partial_rotary_factor": partial}
    found = {"rope_theta": 1e4} | MODELS[model_type].defaults
    assert found == {key: value for key, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [("llama", "extra.weight", (2, 2)), ("qwen2", "o_proj.bias", (16,))],  # a bias that llama.cpp does not add
)
def test_tensors_that_llama_cpp_lacks_are_refused(
    model_type: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = f"model.layers.0.self_attn.{name}"
    write_llama(
        tmp_path,
        config={"model_type": model_type, "architectures": None},
        **{tensor.replace(".", "__"): bf16(gaussian(*shape))},
    )
    with pytest.raises(ExportError, match=rf"tensor '{re.escape(tensor)}': llama\.cpp's {model_type}"):
        converted(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_tensors_are_refused(name: str, tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors[name]
    with pytest.raises(ExportError, match=r"the checkpoint lacks tensors that llama\.cpp needs: [a-z0-9_.]+ "):
        converted(write_checkpoint(tmp_path, tensors, config=CONFIG))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 2}, r"k_proj\.weight': config.json asks for 16 rows and 16 columns, .* \(8, 16\)"),
        ({"intermediate_size": 32}, r"gate_proj\.weight': config.json asks for 32 rows and 16 columns, .* \(24, 16\)"),
        ({"hidden_size": 32}, r"config.json asks for .*32 "),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    changed: dict[str, Any], message: str, model_type: str, tmp_path: Path
) -> None:
    """llama.cpp would not load the file."""
    config = {"model_type": model_type, "architectures": None}
    with pytest.raises(ExportError, match=message):
        converted(write_llama(tmp_path, config=config | changed))


def test_a_single_number_is_no_matrix(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = llama_tensors() | {name: ("F32", np.ones((), dtype=np.float32))}
    with pytest.raises(ExportError, match=r"config.json asks for .*; found shape \(\)"):
        converted(write_checkpoint(tmp_path, tensors, config=CONFIG))


def test_every_architecture_is_one_of_the_package() -> None:
    for architecture in ARCHITECTURES.values():
        assert architecture.name in gguf.MODEL_ARCH.__members__
        for setting in (architecture.norm, *architecture.settings):
            assert hasattr(gguf.GGUFWriter, f"add_{setting.parameter}")
        for name in architecture.biases:
            assert name in gguf.MODEL_TENSOR.__members__
