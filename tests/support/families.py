"""Tiny models of the families that exports must know: random weights from a seed, saved by transformers in BF16.

Layers are as narrow as the groups and blocks of 128 allow. What a published checkpoint of the family keeps in float32
is in float32 here, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import run_command
from shared import made_once, run_folder

VOCABULARY = 512
IDS = [[5, 77, 3, 9, 100, 42, 7, 7, 250, 33, 12, 8]]

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "bos_token_id": 500, "eos_token_id": 501, "pad_token_id": None,
}  # fmt: skip
# Not the base that any of them takes by default.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 256,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "out_proj")


@dataclass(frozen=True)
class Family:
    """A family of models.

    model, config: names of its classes in transformers
    settings: arguments of the config
    linear: the last names of the layers that vllm takes, single experts included
    float32: ends of the names of the tensors that are kept in that dtype
    sees: whether it is loaded as a model of images and text
    """

    model: str
    config: str
    settings: dict[str, Any]
    linear: tuple[str, ...]
    float32: tuple[str, ...] = ()
    sees: bool = False


def causal(
    stem: str, linear: tuple[str, ...] = ATTENTION + MLP, *, float32: tuple[str, ...] = (), **settings: Any
) -> Family:
    """A family of text models whose classes are named by a stem. settings: beside those of TEXT"""
    return Family(f"{stem}ForCausalLM", f"{stem}Config", {**TEXT, **settings}, linear, float32)


def seeing(stem: str, linear: tuple[str, ...], *, sees: bool = False, **settings: Any) -> Family:
    """A family of image-text models. settings: of the text model, beside those of TEXT"""
    untied = {"tie_word_embeddings": False} if sees else {}
    parts = {"text_config": {**TEXT, **settings, **untied}, "vision_config": VISION, **untied}
    float32 = () if sees else ("linear_attn.A_log", "linear_attn.norm.weight")
    return Family(f"{stem}ForConditionalGeneration", f"{stem}Config", parts, linear, float32, sees)


FAMILIES = {
    "llama": causal("Llama", **ROPE),
    "llama-tied": causal("Llama", **ROPE, tie_word_embeddings=True),
    # Rows of 192 weights take groups of 64; those of o and down groups of 128. Not loaded with dequantize=True, for
    # which transformers has one size.
    "llama-uneven": causal("Llama", hidden_size=192),
    # As Qwen2, whose q, k and v have biases; here o, too.
    "llama-biased": causal("Llama", attention_bias=True),
    "qwen3": causal("Qwen3", **ROPE),
    "qwen3_moe": causal("Qwen3Moe", **ROPE, **EXPERTS),
    "mixtral": causal("Mixtral", (*ATTENTION, "w1", "w2", "w3"), **ROPE, intermediate_size=128, num_local_experts=4),
    # Fused experts [E, in, out], and a bias on every layer.
    "gpt_oss": causal(
        "GptOss", ATTENTION, float32=("mlp.router.bias",), intermediate_size=128, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=32,
    ),
    # Fused experts [E, in, out] without biases.
    "llama4": Family(
        "Llama4ForCausalLM", "Llama4TextConfig", {
            **TEXT, "intermediate_size": 128, "intermediate_size_mlp": 256, "num_local_experts": 4,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "head_dim": 64, "tie_word_embeddings": False,
        }, ATTENTION + MLP,
    ),
    "qwen3_5": seeing("Qwen3_5", ATTENTION + MLP + DELTA_NET, **HYBRID),
    "qwen3_5_moe": seeing(
        "Qwen3_5Moe", ATTENTION + MLP + DELTA_NET, **HYBRID, **EXPERTS, shared_expert_intermediate_size=128
    ),
    "qwen3_vl": seeing("Qwen3VL", ATTENTION + MLP, sees=True),
    # Transposed weights, [in, out]; the published checkpoints have no prefix, as the model without its head.
    "gpt2": Family(
        "GPT2Model", "GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4,
        "n_positions": 128, "bos_token_id": 501, "eos_token_id": 501}, (),
    ),
}  # fmt: skip


@functools.cache
def model(base: Path, name: str) -> Path:
    """Return the checkpoint of a family, made once for all workers. base: tmp_path_factory.getbasetemp()."""
    return made_once(run_folder(base) / "families" / name, lambda folder: build(FAMILIES[name], folder))


@functools.cache
def master(base: Path, name: str) -> Path:
    """Return a master of that checkpoint, at 6 bits."""
    command = {"quantize": str(model(base, name)), "recipe": "q6"}
    return made_once(run_folder(base) / "masters" / name, lambda out: run_command(command, out))


@functools.cache
def exported(base: Path, name: str, target: str, **options: Any) -> Path:
    """Return an export of that master."""
    command = {"export": str(master(base, name)), "target": target, "narrow_layers_packed": True, **options}
    folder = "-".join([name, target, *(str(value) for value in options.values())])
    return made_once(run_folder(base) / "exports" / folder, lambda out: run_command(command, out))


def build(family: Family, folder: Path, change: Callable[[Any], None] = lambda model: None) -> Path:
    """A model with random weights, and a tokenizer of words `w0`, `w1`, ... change: what else is done to the model."""
    import torch
    import transformers

    torch.manual_seed(20250)
    made = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.settings))
    made = made.to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms of one and biases of zero would hide mistakes
            elif not parameter.any():
                parameter.normal_(0, 0.05)
            if name.endswith(family.float32 or (".",)):
                parameter.data = parameter.data.float() * 1.01  # no BF16 number
    change(made)
    made.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(500)} | {"<unk>": 500, "<eos>": 501}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        folder
    )


def load(folder: Path, family: Family, dtype: str = "float32", **options: Any) -> Any:
    """The model in transformers; no weight is missing, none is left over."""
    import torch
    import transformers

    auto = transformers.AutoModelForImageTextToText if family.sees else transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        # of a quantization_config that says how to load what config.json describes
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        loaded, info = auto.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, attn_implementation="eager", **options
        )
    found = {kind: sorted(names) for kind, names in info.items() if kind.endswith("_keys") and names}
    assert not found, found
    assert not info["error_msgs"], info["error_msgs"]
    return loaded.eval()


def logits(loaded: Any) -> Any:  # [positions, vocabulary] f32
    """What it makes of IDS."""
    import torch

    with torch.inference_mode():
        return loaded(torch.tensor(IDS)).logits[0].float().numpy()
