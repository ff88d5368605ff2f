"""Configurations: every value that is read has a type and a range, and whatever transformers writes is taken."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.config_schema import FEW_LAYERS, checked_config
from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "architectures": ["LlamaForCausalLM"],
    "vision_config": {"depth": 2}, "text_config": {"rope_scaling": {"full_attention": {"factor": 2.0}}},
    "quantization_config": {"bits": 4, "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}},
    "linear_attn_config": {"num_heads": 2}, "per_layer_config": {"1": {"head_dim": 8}},
}  # fmt: skip

LISTS = """
layer_types mlp_layer_types indexer_types layers_block_type block_types architectures moe_layers mlp_only_layers
no_rope_layers full_attn_layers deepstack_visual_indexes ssm_multipliers activation_sparsity_pattern compress_ratios
hybrid_layer_pattern partial_rotary_factors swiglu_limits
"""
WRONG = [
    (("num_hidden_layers",), 2**31),
    (("num_hidden_layers",), "2"),
    (("head_dim",), [4, 2**80]),
    (("num_attention_heads",), 4.0),
    (("model_type",), ["llama"]),
    (("architectures",), "LlamaForCausalLM"),
    (("layer_types",), [["full_attention"]]),
    *(((key,), value) for key in LISTS.split() for value in ("full", {"0": 1}, 7)),
    (("moe_layer_freq",), "1,1,0"),
    (("moe_layers_enum",), [1, 2]),
    (("tie_word_embeddings",), 1),
    (("rms_norm_eps",), "small"),
    (("rope_theta",), float("nan")),
    (("partial_rotary_factor",), 1e308),
    (("rope_parameters",), []),
    (("rope_parameters", "rope_type"), {}),
    (("text_config", "rope_scaling", "full_attention", "factor"), 1e308),
    (("vision_config", "depth"), 2**31),
    (("vision_config",), "vision"),
    (("per_layer_config", "1", "head_dim"), 2**80),
    (("quantization_config", "group_size"), 2**80),
    (("quantization_config", "config_groups", "group_0", "weights", "group_size"), 2**80),
    (("quantization_config", "config_groups"), [1]),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: str(value)[:60])
def test_values_of_other_types_and_sizes_are_refused_by_the_name_of_their_key(
    path: tuple[str, ...], value: Any
) -> None:
    config = copy.deepcopy(LLAMA)
    checked_config(config, "config.json")
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with raises(SourceError, "config.json", path[-1]) as refused:
        checked_config(config, "config.json")
    assert len(str(refused.value)) < 400


def test_null_and_unknown_keys_hold_anything() -> None:
    checked_config(dict.fromkeys(LLAMA), "config.json")
    checked_config({"own": [[2**80]], "task_specific_params": {"vocab_size": "x"}}, "config.json")


def test_a_configuration_is_checked_when_a_checkpoint_is_opened(tmp_path: Path) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(4, 128))}
    write_checkpoint(tmp_path, weights)
    for layers, fits in ((FEW_LAYERS, True), (FEW_LAYERS + 1, False)):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": layers}}))
        if fits:
            open_local(tmp_path)
            continue
        with raises(SourceError, "num_hidden_layers"):
            open_local(tmp_path)


def test_the_configurations_of_all_classes_of_transformers_pass() -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    checked = 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]()
        except (
            TypeError,
            ValueError,
            AttributeError,
            ImportError,
            StrictDataclassError,
        ):  # it needs arguments, or more
            continue
        for use_diff in (False, True):
            checked_config(json.loads(config.to_json_string(use_diff=use_diff)), name)
        checked += 1
    assert checked > 300
