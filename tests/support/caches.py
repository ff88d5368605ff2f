"""Tiny models with caches of keys and values, and states to quantize."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor

from pqweights.runtime.kv.klt import LayerBases, StateBasis
from pqweights.runtime.kv.polar_rope import RopePairs
from pqweights.runtime.kv.schemes import LayerModel, parse_spec
from pqweights.runtime.kv.states import PackedStates

VOCABULARY = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
# The names of the classes of model and configuration, and the arguments of the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", TEXT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", TEXT),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**TEXT, "head_dim": None, "hidden_size": 128}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**TEXT, "head_dim": None, "hidden_size": 128}),
    "glm": ("GlmForCausalLM", "GlmConfig", TEXT),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**TEXT, "hidden_size": 128}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**TEXT, **SLIDING}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 16}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**TEXT, "num_attention_heads": 2, "head_dim": None, "rotary_pct": 0.25},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, **SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, **SLIDING}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**TEXT, **SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**TEXT, **DELTA_NET}),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": {**TEXT, **MROPE}, "vision_config": VISION},
    ),
}


@functools.cache
def model(name: str) -> Any:
    """A model with random weights, the same in all tests of a process: whoever changes one makes it with `made`."""
    return made(name)


def made(name: str, **changed: Any) -> Any:
    """A new model with random weights. changed: arguments of the configuration"""
    torch.manual_seed(7)
    kind, config, settings = MODELS[name]
    net = getattr(transformers, kind)(getattr(transformers, config)(**{**settings, **changed})).float().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms of one and biases of zero would hide mistakes
            else:
                parameter.mul_(4)  # so that attention tells tokens apart
    return net


def causal(name: str = "Llama", **changed: Any) -> Any:
    """A new model with other random weights.

    name: of its family, in the names of classes
    changed: settings of its configuration; head_dim may be None, for families that have none
    """
    torch.manual_seed(1)
    settings = {**TEXT, "vocab_size": 128, "eos_token_id": 2, "initializer_range": 0.3, **changed}
    settings = {key: value for key, value in settings.items() if key != "head_dim" or value is not None}
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def read(net: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Let a model read tokens at once; return the last predictions, [batch, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = net(ids, past_key_values=cache, use_cache=True, attention_mask=mask).logits[:, -1]
    return logits


def one_by_one(net: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Let a model read tokens one by one; return the predictions, [batch, tokens, vocabulary].

    mask: [batch, tokens before and these]
    """
    before = 0 if mask is None else mask.shape[1] - ids.shape[1]
    masks = [None if mask is None else mask[:, : before + at + 1] for at in range(ids.shape[1])]
    return torch.stack([read(net, cache, ids[:, at : at + 1], of_token) for at, of_token in enumerate(masks)], dim=1)


def ids(tokens: int, sequences: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def gaussian(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The mean squared error, relative to the mean square."""
    return float((found.double() - expected.double()).square().sum() / expected.double().square().sum())


def layer(size: int) -> LayerModel:
    """What a method knows of a layer of two heads whose states are not correlated."""
    identity = torch.eye(size, device="cpu").expand(2, -1, -1)
    even = StateBasis(identity, identity, torch.ones(2, size, device="cpu"))
    pairs = RopePairs(size, size, False)
    return LayerModel(key_size=size, value_size=size, pairs=pairs, bases=LayerBases(even, even, None))


def store(spec: str, size: int, kind: str = "keys") -> PackedStates:
    """The store of the keys or the values of such a layer."""
    scheme = parse_spec(spec)
    quantizer = scheme.quantizers(layer(size))[0 if kind == "keys" else 1]
    return PackedStates(quantizer, scheme.residual)


def decoded(spec: str, states: Tensor, kind: str = "keys") -> Tensor:
    """What states [batch, heads, tokens, size] become, all at once."""
    held = store(spec, states.shape[-1], kind)
    held.append(states)
    return held.decoded()
