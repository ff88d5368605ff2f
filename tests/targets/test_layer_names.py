"""The expressions with which a vllm-int4 export names layers: compressed-tensors finds those that are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils import is_match
from helpers import bf16, gaussian, read_all, run_command, write_checkpoint

from pqweights.targets.linear import patterns


def test_expression_of_fused_experts_matches_only_them() -> None:
    fused = ["mtp.layers.0.mlp.experts.gate_up_proj"]
    (expression,) = patterns(fused, ["model.layers.0.mlp.experts.0.down_proj.weight"])
    assert is_match("mtp.layers.0.mlp.experts", torch.nn.Module(), expression)
    assert not is_match("model.layers.0.mlp.experts.0.down_proj", torch.nn.Linear(1, 1), expression)


def test_experts_of_some_layers_get_one_expression_per_layer() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(4) for e in range(64)]
    found = patterns(names[:128], names[128:])
    assert found == [rf"re:(.*\.)?layers\.{layer}\.mlp\.experts\.\d+\.up_proj$" for layer in range(2)]


def matched(expressions: list[str], modules: list[str]) -> list[str]:
    """The modules that compressed-tensors' match_name finds."""
    from compressed_tensors.utils.match import match_name

    return [module for module in modules if any(match_name(module, expression) for expression in expressions)]


def weights(*modules: str) -> list[str]:
    return [f"{module}.weight" for module in modules]


def both(*modules: str) -> list[str]:
    """Modules under the prefixes of text and image-text models, and without a prefix."""
    return [
        prefix + module
        for module in modules
        for prefix in ("model.", "model.language_model.", "language_model.model.", "")
    ]


LAYERS = [
    f"layers.{n}.{layer}" for n in (0, 1, 10) for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]


def test_patterns_match_under_any_prefix() -> None:
    chosen = [n for n in LAYERS if n.endswith("q_proj")]
    others = [n for n in LAYERS if not n.endswith("q_proj")]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert len(found) == 1
    assert matched(found, both(*LAYERS)) == both(*(n for n in LAYERS if n in chosen))


def test_pattern_of_one_layer_matches_no_other_layer() -> None:
    """A pattern leaves the number of the layer open only if it then matches no other layer."""
    chosen = ["layers.1.self_attn.q_proj"]
    others = [n for n in LAYERS if n not in chosen]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert matched(found, both(*LAYERS)) == both(*chosen)
    assert matched(found, ["model.layers.11.self_attn.q_proj", "model.layers.1.self_attn.q_proj_2"]) == []


def test_patterns_tell_text_from_vision_layers_of_the_same_name() -> None:
    text = [f"model.language_model.{n}" for n in LAYERS]
    seeing = [f"model.vision_tower.encoder.{n}" for n in LAYERS]
    for chosen, others in ((text, seeing), (seeing, text)):
        found = patterns(weights(*chosen), weights(*others))
        assert matched(found, text + seeing) == chosen
        assert patterns(weights(*chosen), []) != []
    assert matched(patterns(weights(*seeing), weights(*text)), [f"model.{n}" for n in LAYERS]) == []


def test_dots_of_names_match_only_dots() -> None:
    found = patterns(weights("h.0.c_fc"), weights("h.0.c_proj"))
    assert matched(found, ["h.0.c_fc", "transformer.h.3.c_fc", "h.0.cxfc", "hx0.c_fc", "h.0xc_fc", "xh.0.c_fc"]) == [
        "h.0.c_fc",
        "transformer.h.3.c_fc",
    ]


# The modules of draft layers as vLLM's loaders find them (vllm/model_executor/models/*_mtp.py), and the keys by which
# its speculative configuration counts them.
DRAFTS = {
    "qwen3_next": ("num_nextn_predict_layers", ["mtp.fc", "mtp.layers.0.mlp.experts.0.up_proj"]),
    "qwen3_5": ("mtp_num_hidden_layers", ["mtp.fc", "mtp.layers.0.self_attn.q_proj"]),
    "glm4_moe": ("num_nextn_predict_layers", ["model.layers.2.eh_proj", "model.layers.2.shared_head.head"]),
    "deepseek_v3": ("num_nextn_predict_layers", ["model.layers.2.eh_proj", "model.layers.2.self_attn.o_proj"]),
    "mimo": ("num_nextn_predict_layers", ["model.mtp_layers.0.input_proj", "model.mtp_layers.0.self_attn.q_proj"]),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_layers_are_kept_named_and_declared(name: str, tmp_path: Path) -> None:
    key, drafts = DRAFTS[name]
    kept = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    tensors = {tensor: bf16(gaussian(128, 256)) for tensor in weights(*kept, *drafts)}
    config = {"model_type": name, "num_hidden_layers": 2, "hidden_size": 128, key: 1}
    source = write_checkpoint(tmp_path / "model", tensors, config=config)
    run_command({"quantize": str(source)}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "vllm"}, tmp_path / "out")
    stored, config = read_all(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config[key] == 1
    for tensor in weights(*drafts):
        assert stored[tensor][1].tobytes() == tensors[tensor][1].tobytes()
    assert matched(config["quantization_config"]["ignore"], [*kept, *drafts]) == drafts
