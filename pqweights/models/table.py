"""The types of models, by the `model_type` of transformers: a row for each, from the files of their families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pqweights.models import (
    deepseek,
    encoders,
    gemma,
    granite,
    hybrids,
    kimi_linear,
    llama,
    mimo,
    minimax,
    mixtures,
    qwen,
    qwen4,
    step,
    t5,
)
from pqweights.models.description import OWN_HEAD, UNKNOWN, UNPREFIXED, UNWRAPPED, MlxDifferences
from pqweights.models.description import ModelDescription as Row
from pqweights.models.traits import TYPES_WITH


def _minicpm3_differs(config: Mapping[str, Any]) -> str:
    if config.get("tie_word_embeddings") is not True:
        return ""
    return "mlx-lm does not scale the logits of a minicpm3 whose head is its embedding (tie_word_embeddings)"


# Types of which little more is known than their traits in TYPES_WITH.
_OTHERS: dict[str, Row] = {
    "apertus": Row(mlx=MlxDifferences(constants={"mlp_bias": False, "post_norm": False, "qk_norm": True})),
    "axk2": Row(in_memory={r"W_down": "mlp.fc1", r"W_up": "mlp.fc2", r"\.q_b_proj\.": ".q_gate_proj."}),
    "gpt2": Row(mlx=MlxDifferences(layout=UNPREFIXED)),
    "gpt_neox": Row(
        mlx=MlxDifferences(rope_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"})
    ),
    # vLLM 0.32 builds all of its attention plain.
    **dict.fromkeys(("glm5_next", "glm5_next_text"), Row(plain_in_vllm=r"\.self_attn\.")),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), Row(defaults=OWN_HEAD)),
    **dict.fromkeys(
        ("inkling2", "inkling2_text"),
        Row(defaults=OWN_HEAD, in_memory={r"\.attn\.([kv]_sconv\.weight_proj)$": r".self_attn.\1.weight"}),
    ),
    "muse_glimmer": Row(mlx=MlxDifferences(module="muse_glimmer", layout=UNWRAPPED)),
    "minicpm3": Row(mlx=MlxDifferences(differs=_minicpm3_differs)),
    "laguna": Row(in_memory={r"\.shared_expert\.": ".shared_experts."}),
    "solar_open": Row(
        mlx=MlxDifferences(
            constants={"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
            computed=lambda config: {
                "intermediate_size": config.get("intermediate_size", config["moe_intermediate_size"])
            },
        )
    ),
    **dict.fromkeys(
        ("idefics3", "internvl", "lfm2_vl", "llava_onevision", "smolvlm"), Row(mlx=MlxDifferences(layout=UNWRAPPED))
    ),
}


def _completed() -> dict[str, Row]:
    models = {**_OTHERS}
    # Files of GGUF alone are tried as the types of their architecture in this order.
    for family in (llama, mixtures, gemma, qwen, qwen4, deepseek, granite, hybrids, kimi_linear, mimo, minimax, step):
        models |= family.ROWS
    models |= encoders.ROWS | t5.ROWS
    for trait, types in TYPES_WITH.items():
        for model_type in types.split():
            model = models.get(model_type, UNKNOWN)
            models[model_type] = replace(model, traits=model.traits | {trait})
    return models


MODELS = _completed()
