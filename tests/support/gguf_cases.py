"""Tiny models of the architectures that llama.cpp runs, with random weights from a seed, saved by transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WIDE_HEADS = {"head_dim": 32}
WINDOWED = WIDE_HEADS | {"sliding_window": 32, "query_pre_attn_scalar": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 80}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LONG = {"rope_type": "longrope", "long_factor": [1.0 + 2 * n for n in range(8)], **ORIGINAL}
LONG |= {"short_factor": [1.0 + n / 8 for n in range(8)]}
LAYERED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model.

    name: of its family, in the names of classes
    settings: beside SETTINGS
    rope: its rope_parameters, but for a theta of 10000
    tokens: how many are compared
    text: whether its config is that of the text model of a family that also sees
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    tokens: int = 80
    text: bool = False


CASES = {
    "llama": Case(name="Llama", settings=WIDE_HEADS),
    "llama with biases, tied": Case(
        name="Llama", settings={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama linear": Case(name="Llama", rope={"rope_type": "linear", "factor": 4.0}, tokens=200),
    "llama llama3": Case(name="Llama", rope=LLAMA3, tokens=200),
    "llama yarn": Case(name="Llama", rope=YARN, tokens=200),
    "llama yarn factor": Case(name="Llama", rope=YARN | {"attention_factor": 1.3}, tokens=200),
    "llama yarn mscale": Case(name="Llama", rope=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, tokens=200),
    "mistral": Case(name="Mistral", settings=WIDE_HEADS | {"sliding_window": 80}),
    "mixtral": Case(name="Mixtral", settings={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Case(name="Qwen2", rope=YARN, tokens=200),
    "qwen2 moe": Case(name="Qwen2Moe", settings=SHARED_EXPERT),
    "qwen2 moe tied": Case(name="Qwen2Moe", settings=SHARED_EXPERT | {"tie_word_embeddings": True}),
    "qwen3": Case(name="Qwen3", settings=WIDE_HEADS),
    "qwen3 moe": Case(name="Qwen3Moe", settings=WIDE_HEADS | EXPERTS | {"norm_topk_prob": True}),
    "gemma": Case(name="Gemma", settings=WIDE_HEADS),
    "gemma2": Case(name="Gemma2", settings=WINDOWED),
    "gemma2 full": Case(name="Gemma2", settings=WINDOWED | {"layer_types": ["full_attention"] * 2}),
    "gemma3": Case(name="Gemma3", settings=WINDOWED | {"num_hidden_layers": 7}, text=True),
    "gemma3 layers": Case(
        name="Gemma3",
        settings=WINDOWED | {"final_logit_softcapping": 20.0, "rope_parameters": LAYERED}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        text=True,
    ),
    "phi3": Case(name="Phi3", settings={"partial_rotary_factor": 0.5}, rope={"partial_rotary_factor": 0.5}),
    # llama.cpp chooses factors by the length of its context, which is 256 here.
    "phi3 short": Case(
        name="Phi3",
        settings={"original_max_position_embeddings": 256},
        rope=LONG | {"original_max_position_embeddings": 256},
    ),
    "phi3 long": Case(name="Phi3", settings=ORIGINAL, rope=LONG, tokens=200),
    "granite": Case(
        name="Granite", settings={"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "logits_scaling": 2.0},
    ),
    "olmo2": Case(name="Olmo2"),
    "olmo3": Case(name="Olmo3", settings={"num_hidden_layers": 5, "sliding_window": 32}),
    "smollm3": Case(name="SmolLM3", settings={"num_hidden_layers": 5}),
    "starcoder2": Case(name="Starcoder2"),
    "stablelm": Case(name="StableLm", settings={"use_qkv_bias": True}),
    "cohere": Case(name="Cohere", settings={"logit_scale": 0.3}),
    "cohere2": Case(name="Cohere2", settings={"logit_scale": 0.3, "sliding_window": 32, "num_hidden_layers": 5}),
}  # fmt: skip


def build(case: Case) -> Any:
    """The model of a case, with gains and biases that are not those that it starts with."""
    torch.manual_seed(1)
    settings = {**SETTINGS, **case.settings}
    if case.rope is not None:
        settings["rope_parameters"] = {"rope_theta": 1e4, **case.rope}
    config = getattr(transformers, f"{case.name}{'Text' if case.text else ''}Config")(**settings)
    model = getattr(transformers, f"{case.name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def saved(case: Case, folder: Path) -> Any:
    """The model of a case, which is also written to a folder."""
    model = build(case)
    model.save_pretrained(folder)
    return model


def token_ids(count: int) -> list[int]:
    """Tokens of which none is special."""
    found: list[int] = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return found


def logits(model: Any, ids: list[int]) -> Any:
    """What a model predicts after each token, [tokens, vocabulary] f32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()
