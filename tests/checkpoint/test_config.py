"""config.json of a result: which of its entries are configurations of parts, and get a dtype and the guard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pqweights.checkpoint.config import GUARD_KEY, PARTS, edited_config, guarded_config

# Called `_config`, but settings of the model itself, although without a model_type they look like older files' parts.
LOOKS_LIKE_PARTS = {("fastspeech2_conformer", "encoder_config"), ("fastspeech2_conformer", "decoder_config")}
CUSTOM_CODE = {"language_config", "llm_config"}


def as_master(config: dict[str, Any]) -> dict[str, Any]:
    return guarded_config(edited_config(config, "BF16", old_dtype="F32"), {"quant_method": "pqweights"})


def test_settings_by_layer_are_not_a_configuration() -> None:
    """Gemma 4: transformers takes each key of per_layer_config for the number of a layer."""
    by_layer = {"1": {"head_dim": 512}}
    config = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "per_layer_config": by_layer}}
    found = as_master({"per_layer_config": by_layer, "longrope_config": {"factor": 8}} | config)
    assert found["per_layer_config"] == found["text_config"]["per_layer_config"] == by_layer
    assert found["longrope_config"] == {"factor": 8}
    assert found["text_config"]["dtype"] == "bfloat16" and GUARD_KEY in found["text_config"]


@pytest.mark.parametrize("key", ["vision_config", "text_config", "llm_config"])
def test_parts_without_a_model_type_are_configurations(key: str) -> None:
    """As in the files of Qwen2-VL."""
    found = as_master({"model_type": "qwen2_vl", key: {"depth": 2}})[key]
    assert found == {"depth": 2, "dtype": "bfloat16", GUARD_KEY: found[GUARD_KEY]}


def test_quantization_of_the_source_is_not_a_part() -> None:
    found = edited_config({"quantization_config": {"model_type": "x"}, "text_config": {}}, "BF16", old_dtype="BF16")
    assert found == {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}


@pytest.mark.filterwarnings("ignore")
def test_rule_agrees_with_every_configuration_of_transformers() -> None:
    """Each class reads its edited default, and what the rule takes for a part is one of its sub_configs."""
    import transformers.models.auto.configuration_auto as auto

    taken: set[tuple[str, str]] = set()
    parts: set[tuple[str, str]] = set()
    for model_type in auto.CONFIG_MAPPING_NAMES:
        cls = auto.CONFIG_MAPPING[model_type]
        parts |= {(model_type, key) for key in cls.sub_configs if key.endswith("_config")}
        try:
            default = json.loads(cls().to_json_string(use_diff=False))
            cls.from_dict(dict(default))
        except Exception:  # some defaults are not valid: not the edit's doing
            parts -= {(model_type, key) for key in cls.sub_configs}
            continue
        edited = as_master(default)
        taken |= {(model_type, key) for key, value in edited.items() if isinstance(value, dict) and GUARD_KEY in value}
        parts -= {(model_type, key) for key in cls.sub_configs if not isinstance(default.get(key), dict)}
        cls.from_dict(edited)
    assert taken - LOOKS_LIKE_PARTS == parts and len(parts) > 200
    named = {key for model_type in auto.CONFIG_MAPPING_NAMES for key in auto.CONFIG_MAPPING[model_type].sub_configs}
    assert {key for key in named if key.endswith("_config")} | CUSTOM_CODE == PARTS
