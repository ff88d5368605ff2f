"""Settings that mlx-lm reads, out of what transformers makes of published configurations: they are those published.

Published files: moonshotai/Kimi-Linear-48B-A3B-Instruct, LGAI-EXAONE/K-EXAONE-236B-A23B, MiniMaxAI/MiniMax-M2,
stepfun-ai/Step-3.5-Flash, XiaomiMiMo/MiMo-V2-Flash and google/gemma-4-31B, with fewer layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from commands import raises

from pqweights.errors import ExportError
from pqweights.models import described
from pqweights.targets.architectures import check_computed

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearConfig", {
        "num_hidden_layers": 5, "first_k_dense_replace": 1, "linear_attn_config": {
            "full_attn_layers": [4], "head_dim": 128, "kda_layers": [1, 2, 3, 5], "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }),
    "gemma4_text": ("Gemma4TextConfig", {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True,
        "global_head_dim": 512, "num_global_key_value_heads": 2,
    }),
    "exaone_moe": ("ExaoneMoeConfig", {"num_hidden_layers": 3, "is_moe_layer": [False, True, True]}),
    "minimax_m2": ("MiniMaxM2Config", {"num_hidden_layers": 2, "head_dim": 128, "rotary_dim": 64}),
    "step3p5": ("Step3p7TextConfig", {
        "num_hidden_layers": 4, "num_attention_groups": 8, "moe_num_experts": 288, "moe_top_k": 8,
        "moe_layers_enum": "2,3", "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
        "rope_theta": [5e6, 1e4, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
    }),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {
        "num_hidden_layers": 7, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5,
        "head_dim": 192, "v_head_dim": 128, "num_attention_heads": 64, "num_key_value_heads": 4, "swa_head_dim": 192,
        "swa_v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "n_shared_experts": None,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }),
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_settings_of_mlx_lm_are_those_of_published_files(model_type: str) -> None:
    name, published = PUBLISHED[model_type]
    config, mlx = getattr(transformers, name), described(model_type).mlx
    keys = config().to_dict().keys()  # transformers also writes what it does not know
    written = {key: value for key, value in config(**published).to_dict().items() if key in keys}
    found = written | mlx.constants | mlx.computed(written)
    assert {key: found.get(key) for key in published} == published


def test_what_mlx_lm_would_compute_otherwise_is_refused() -> None:
    check_computed({"model_type": "minicpm3", "tie_word_embeddings": False})
    with raises(ExportError, "minicpm3"):
        check_computed({"model_type": "minicpm3", "tie_word_embeddings": True})
    check_computed({"model_type": "jamba", "num_experts": 1, "num_experts_per_tok": 1})
    check_computed({"model_type": "jamba", "num_experts": 2, "num_experts_per_tok": 2})
    for experts in ({}, {"num_experts": 4}):
        with raises(ExportError, "jamba"):
            check_computed({"model_type": "jamba"} | experts)
    with raises(ExportError, "use_bidirectional_attention"):
        check_computed({"model_type": "gemma3_text", "use_bidirectional_attention": True})
