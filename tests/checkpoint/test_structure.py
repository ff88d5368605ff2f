"""Layers and shapes that config.json promises: what is not so is said, of every kind, and nothing of whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from commands import done
from gguf_files import without_tokenizer
from helpers import bf16, gaussian, read_all, write_checkpoint

from pqweights.checkpoint.config import declare_drafts
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.structure import differences

Shapes = dict[str, tuple[int, ...]]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
IN_LAYER = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
    "input_layernorm": (128,),
    "post_attention_layernorm": (128,),
}
OUTSIDE = {"model.embed_tokens.weight": (64, 128), "model.norm.weight": (128,), "lm_head.weight": (64, 128)}


def layer(number: int) -> Shapes:
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in IN_LAYER.items()}


WHOLE: Shapes = OUTSIDE | layer(0) | layer(1) | layer(2)
BIAS = {f"model.layers.{number}.self_attn.q_proj.bias": (128,) for number in range(3)}


def without(*parts: str) -> Callable[[Shapes], Shapes]:
    return lambda shapes: {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


# By name: the tensors that are stored, what the configuration says otherwise, and a part of what is said.
DIFFERENT: dict[str, tuple[Callable[[Shapes], Shapes], dict[str, Any], str]] = {
    "a layer too few": (without("layers.2."), {}, "layer 2 is not stored"),
    "a layer missing in the middle": (without("layers.1."), {}, "layer 1 is not stored"),
    "a layer too many": (lambda shapes: shapes | layer(3), {}, "1 layer more than the 3"),
    "fewer layers counted": (lambda shapes: shapes, {"num_hidden_layers": 1}, "2 layers more than the 1"),
    "part of a layer": (without("layers.1.mlp.down"), {}, "mlp.down_proj.weight"),
    "part of the last layer": (without("layers.2.self_attn.k_proj"), {}, "self_attn.k_proj.weight"),
    "layer types": (lambda shapes: shapes, {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "drafts that are not there": (lambda shapes: shapes, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    "no window": (lambda shapes: shapes, {"model_type": "mistral", "sliding_window": 0}, "sliding_window 0"),
    "a negative window": (lambda shapes: shapes, {"model_type": "mistral", "sliding_window": -1}, "sliding_window -1"),
    "vocabulary": (lambda shapes: shapes, {"vocab_size": 60}, "vocab_size 60"),
    "width": (lambda shapes: shapes, {"hidden_size": 256, "head_dim": 32}, "hidden_size 256"),
    "heads of keys": (lambda shapes: shapes, {"num_key_value_heads": 4}, "4 heads of 32"),
    "width of layers": (lambda shapes: shapes, {"intermediate_size": 512}, "intermediate_size 512"),
    "width of heads": (lambda shapes: shapes, {"head_dim": 64}, "2 heads of 64"),
    "no width of heads": (lambda shapes: shapes, {"head_dim": 0}, "2 heads of 0"),
    "a matrix of another shape": (
        lambda shapes: shapes | {"model.layers.1.mlp.up_proj.weight": (192, 128)},
        {},
        "model.layers.1.mlp.up_proj.weight is of 192 x 128",
    ),
    "no embeddings": (without("embed_tokens"), {}, "embeddings"),
    "no last norm": (without("model.norm"), {}, "behind the last layer"),
    "a norm of no layer": (without("post_attention_layernorm"), {}, "post_attention_layernorm"),
    "norms of heads of no layer": (
        lambda shapes: shapes,
        {"model_type": "qwen3"},
        "self_attn.q_norm, self_attn.k_norm",
    ),
    "no head": (without("lm_head"), {}, "head"),
    "biases promised": (lambda shapes: shapes, {"attention_bias": True}, "attention_bias"),
    "biases not promised": (lambda shapes: shapes | BIAS, {"attention_bias": False}, "attention_bias false"),
    "a tower": (
        lambda shapes: shapes,
        {"vision_config": {"depth": 2}, "architectures": ["LlavaForConditionalGeneration"]},
        "vision_config",
    ),
    "experts": (
        lambda shapes: (
            shapes
            | {f"model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight": (8, 8) for n in range(3) for e in range(4)}
        ),
        {"num_local_experts": 8},
        "8 experts",
    ),
}


@pytest.mark.parametrize(("change", "config", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_from_the_configuration_is_said(
    change: Callable[[Shapes], Shapes], config: dict[str, Any], said: str
) -> None:
    (found,) = differences(change(WHOLE), CONFIG | config)
    assert said in found


@pytest.mark.parametrize(
    "config", [{}, {"attention_bias": False}, {"layer_types": ["full_attention"] * 3}, {"sliding_window": 0}], ids=str
)
def test_nothing_is_said_of_a_whole_model(config: dict[str, Any]) -> None:
    assert [*differences(WHOLE, CONFIG | config)] == []


def test_layers_that_predict_further_tokens_are_not_too_many() -> None:
    more = layer(3) | {"model.layers.3.eh_proj.weight": (128, 256)}
    assert [*differences(WHOLE | more, CONFIG | {"num_nextn_predict_layers": 1})] == []


@pytest.mark.parametrize("huge", [2**31, 2**63, True, "3", None, -1])
def test_odd_numbers_of_layers_take_no_time(huge: Any) -> None:
    assert len([*differences(WHOLE, CONFIG | {"num_hidden_layers": huge})]) <= 1


@pytest.mark.parametrize("name", families.FAMILIES)
def test_nothing_is_said_of_what_transformers_saves(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert open_local(families.model(tmp_path_factory.getbasetemp(), name)).remarks == ()


def stored(folder: Path, shapes: Shapes, **config: Any) -> Path:
    tensors = {name: bf16(gaussian(*shape, seed=len(name))) for name, shape in shapes.items()}
    return write_checkpoint(folder, tensors, config=CONFIG | config)


def test_a_difference_is_said_by_plan_quantize_and_export(tmp_path: Path) -> None:
    source = stored(tmp_path / "src", WHOLE | layer(3))
    assert "1 layer more" in done("plan", source).stderr
    assert "1 layer more" in done("quantize", source, tmp_path / "m").stderr
    exported = done("export", tmp_path / "m", tmp_path / "out", "-t", "bf16")
    assert "1 layer more" in exported.stderr
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "out" / "config.json").read_bytes())


def test_gguf_says_why_it_leaves_out_layers_and_biases(tmp_path: Path) -> None:
    others = {"model.layers.1.self_attn.o_proj.bias": (128,), "model.layers.1.mlp.up_proj.bias": (256,)}
    source = open_local(stored(tmp_path / "src", WHOLE | layer(3) | BIAS | others, attention_bias=False))
    left_out = without_tokenizer(source).left_out
    assert left_out.keys() == layer(3).keys() | BIAS.keys() | others.keys()
    assert all("3 layers" in left_out[name] for name in layer(3)) and "attention_bias" in left_out[next(iter(BIAS))]
    assert "mlp_bias" in left_out["model.layers.1.mlp.up_proj.bias"]


def test_mlx_does_without_what_transformers_ignores(tmp_path: Path) -> None:
    ignored = layer(3) | BIAS | {"model.layers.1.mlp.up_proj.bias": (256,)}
    source = stored(tmp_path / "src", WHOLE | ignored, attention_bias=False)
    done("export", source, tmp_path / "out", "-t", "mlx")
    assert read_all(tmp_path / "out").keys().isdisjoint(ignored)
    manifest = json.loads((tmp_path / "out" / "pqweights.json").read_bytes())
    assert manifest["left_out"].keys() == ignored.keys()


def test_layers_too_many_are_not_declared_as_predicting_further_tokens() -> None:
    config = dict(CONFIG)
    declare_drafts(config, [*WHOLE, *layer(3)])
    assert config == CONFIG
    declare_drafts(config, [*WHOLE, *layer(3), "model.layers.3.eh_proj.weight"])
    assert config["num_nextn_predict_layers"] == 1
