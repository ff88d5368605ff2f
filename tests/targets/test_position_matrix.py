"""Kinds of rotary embeddings and of windows, in every target: each runtime computes what transformers does with the
source, or the export says that it does not, or refuses.

Texts are shorter than windows and original lengths, or longer. The layers of Gemma, OLMo 3 and Cohere 2 differ, those
of Qwen have a window from the second on, and those of Mistral, Phi and StarCoder all have one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from closeness import bound, distance
from gguf_cases import with_gelu_table
from gguf_files import converted, write_gguf
from helpers import run_command
from position_cases import ids, loader, logits, logits_of_mlx, read_by_mlx, saved

from pqweights.checkpoint.positions import stated_once
from pqweights.errors import ExportError
from pqweights.runtime.models import open_model

LENGTHS = (8, 24)
WINDOW = {"sliding_window": 8}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window_pattern": 2}
FULL = {"layer_types": ["full_attention"] * 2}
HEADS = {"head_dim": 32}
UPPER = {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}
LAYERS = {"num_hidden_layers": 4}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Behind one layer without experts.
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA_NET = HEADS | LAYERS | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
HYBRID = LOCAL_EXPERTS | MAMBA | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]}
LLAMA4 = HEADS | LAYERS | {
    "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
}  # fmt: skip
SECTIONS = {"mrope_section": [6, 5, 5]}
# What configurations state beside rotary embeddings, but for two keys that lie among their parameters.
IN_ROPE = ("mrope_section", "partial_rotary_factor")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2, windows": UPPER,
    "qwen3": HEADS,
    "qwen3, windows": UPPER | HEADS,
    "mistral": {"sliding_window": None},
    "mistral, windows": WINDOW,
    "phi3": {"sliding_window": None},
    "phi3, windows": WINDOW,
    "starcoder2": {"sliding_window": None},
    "starcoder2, windows": WINDOW,
    "ministral3": {"sliding_window": None, **HEADS},
    "ministral3, windows": WINDOW | HEADS,
    "gemma2, windows": WINDOW | HEADS | KINDS | {"query_pre_attn_scalar": 32},
    "gemma3_text, windows": WINDOW | HEADS | {"query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "olmo3, windows": WINDOW | KINDS,
    "cohere2, windows": WINDOW | KINDS,
    "glm4": {"partial_rotary_factor": 0.5, **HEADS},
    # A part of each head.
    "phi3, partial": {"partial_rotary_factor": 0.75, "sliding_window": None},
    "stablelm": {"partial_rotary_factor": 0.25},
    "phi": {"partial_rotary_factor": 0.5},
    # Experts.
    "mixtral": LOCAL_EXPERTS | HEADS | {"sliding_window": None},
    "mixtral, windows": LOCAL_EXPERTS | HEADS | WINDOW,
    "qwen2_moe": EXPERTS | {"norm_topk_prob": False},
    "qwen2_moe, windows": EXPERTS | UPPER | {"norm_topk_prob": False, "max_window_layers": 2},
    "qwen3_moe": EXPERTS | HEADS,
    "qwen3_moe, windows": EXPERTS | HEADS | UPPER,
    "olmoe": EXPERTS | {"num_key_value_heads": 4, "norm_topk_prob": False},
    "granitemoe": LOCAL_EXPERTS,
    "glm4_moe": ROUTED | HEADS | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
    "minimax_m2": LOCAL_EXPERTS | HEADS | {"partial_rotary_factor": 0.5, "rotary_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "dots1, windows": ROUTED | UPPER | {"num_key_value_heads": 4},
    "deepseek_v2": ROUTED | MLA,
    "deepseek_v3": ROUTED | MLA,
    "glm4_moe_lite": ROUTED | MLA,
    # Sinks.
    "gpt_oss, windows": LOCAL_EXPERTS | HEADS | WINDOW,
    "gpt_oss, kinds": LOCAL_EXPERTS | HEADS | WINDOW | {"layer_types": ["full_attention", "sliding_attention"]},
    "gpt_oss, full": LOCAL_EXPERTS | HEADS | WINDOW | FULL,
    "mimo_v2_flash, windows": ROUTED | HEADS | WINDOW | KINDS | {"partial_rotary_factor": 0.5, "v_head_dim": 32},
    # Layers without rotary embeddings.
    "smollm3": LAYERS,
    "smollm3, listed": LAYERS | {"no_rope_layers": [0, 1, 1, 1]},
    "smollm3, windows": LAYERS | WINDOW | {"use_sliding_window": True},
    "exaone4": {"sliding_window": None, "sliding_window_pattern": None, **FULL},
    "exaone4, windows": WINDOW | LAYERS | {"layer_types": KINDS["layer_types"] * 2},
    "exaone4, full": WINDOW | FULL,
    "exaone_moe, windows": EXPERTS | HEADS | WINDOW | LAYERS | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "exaone_moe, full": EXPERTS | HEADS | WINDOW | FULL | {"mlp_layer_types": ["dense", "sparse"]},
    "afmoe, windows": EXPERTS | HEADS | WINDOW | KINDS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "cohere2, full": WINDOW | FULL,
    "llama4": LLAMA4,
    "llama4, chunks": LLAMA4 | {"attention_chunk_size": 8},
    "llama4, listed": LLAMA4 | {"no_rope_layers": [0, 1, 1, 1]},
    "llama4, temperature": LLAMA4 | {"floor_scale": 12, "attn_scale": 0.5},
    "llama4_text": LLAMA4,
    "llama4_text, chunks": LLAMA4 | {"attention_chunk_size": 8},
    "llama4_text, listed": LLAMA4 | {"no_rope_layers": [0, 1, 1, 1]},
    "granitemoehybrid": HYBRID | {"position_embedding_type": "rope"},
    "granitemoehybrid, none": HYBRID,
    # Rotary embeddings in three dimensions.
    "qwen2_vl": SECTIONS,
    "qwen2_vl, windows": SECTIONS | UPPER,
    "qwen2_5_vl": SECTIONS,
    "qwen3_vl": SECTIONS | HEADS,
    "qwen3_vl, sections": HEADS | {"mrope_section": [3, 6, 6]},
    "qwen3_vl_moe": SECTIONS | HEADS | EXPERTS | {"moe_intermediate_size": 96},
    "qwen3_5_text": DELTA_NET | {"partial_rotary_factor": 0.25},
    "qwen3_next": DELTA_NET | EXPERTS | {"partial_rotary_factor": 0.25},
    "gemma4_text, windows": HEADS | WINDOW | KINDS
    | {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, exact": YARN | {"truncate": False},
    "yarn, attention": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", **ORIGINAL},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
# Those whose kinds of layers have rotary embeddings of their own.
LAYERED = ("gemma3_text", "gemma4_text", "mimo_v2_flash", "olmo3")


def stated(family: str, variant: str) -> dict[str, Any]:
    """A configuration as transformers 5 writes it, with the kind of rotary embeddings in layers with full attention."""
    about = FAMILIES[family]
    own = {key: about[key] for key in IN_ROPE if key in about}
    rope = {"rope_theta": 500.0} | own | VARIANTS[variant]
    if variant == "longrope":
        count = int(about.get("qk_rope_head_dim", 32) * about.get("partial_rotary_factor", 1)) // 2
        rope |= {"short_factor": [1.0 + n / 8 for n in range(count)], "long_factor": [1.0 + n for n in range(count)]}
    if family.startswith("ministral3"):
        rope |= {"llama_4_scaling_beta": 0.1, **ORIGINAL}
    if family.startswith(LAYERED):
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0} | own}
    length = {"max_position_embeddings": 16} if variant == "dynamic" else {}
    outer = ORIGINAL if variant == "longrope" else {}
    settings = {key: value for key, value in about.items() if key != "mrope_section"}
    return {"model_type": family.partition(",")[0], **settings, **length, **outer, "rope_parameters": rope}


def outcome(model: Any, said: bool, found: Iterable[npt.NDArray[np.float32]]) -> str:
    """Whether a runtime computes the same for texts of both lengths, in one letter.

    s: the same; l: not for long texts, k: not for short ones, w: for neither, and it is said; o: the same here,
    although something is said; x: not the same, and nothing is said
    """
    expected = (logits(model, length) for length in LENGTHS)
    same = [distance(one, other) < bound("llama.cpp, gelu") for one, other in zip(found, expected, strict=True)]
    if not said:
        return "s" if all(same) else "x"
    return {(True, True): "o", (True, False): "l", (False, True): "k", (False, False): "w"}[same[0], same[1]]


def by_llama_cpp(model: Any, folder: Path) -> str:
    with mock.patch("pqweights.checkpoint.gguf.model.gguf_tower", return_value=None):  # what sees is left out
        try:
            said = bool(converted(folder).notes)
        except ExportError:
            return "r"
        path = write_gguf(folder, "F32")
    opened = open_model(path)
    return outcome(with_gelu_table(model), said, [opened.logits(np.array(ids(length)), length) for length in LENGTHS])


def by_mlx(model: Any, folder: Path) -> str:
    try:
        read = read_by_mlx(folder)
    except ExportError:
        return "r"
    return outcome(model, bool(read.warnings), logits_of_mlx(read.config, folder, *LENGTHS))


def by_transformers(model: Any, folder: Path) -> str:
    """What bf16, vllm and torchao exports are read as, if their configuration says anything in another way."""
    config = json.loads((folder / "config.json").read_text())
    if (stated_again := stated_once(config)) == config:
        return "s"
    exported = folder.parent / "bf16"
    exported.mkdir()
    shutil.copy(folder / "model.safetensors", exported)
    (exported / "config.json").write_text(json.dumps(stated_again))
    again = loader(config).from_pretrained(exported, dtype=torch.float32).eval()
    return outcome(model, False, [logits(again, length) for length in LENGTHS])


# By the columns of VARIANTS, what mlx-lm and llama.cpp make of a model, in the letters of `outcome`; r: it is refused;
# -: transformers does not take the configuration, or it is not tried: all kinds with some families, and with the others
# those that depend on the family. What llama.cpp makes of LongRoPE depends on the size of its context.
EXPECTED: dict[str, tuple[str, str]] = {
    #                          mlx-lm        llama.cpp
    "llama": ("ssssws-sk-", "ssrsrs-sk-"),
    "qwen2": ("ss-s---sk-", "ss-s---rr-"),
    "qwen2, windows": ("l-------w-", "l-------r-"),
    "qwen3": ("ss-s---sk-", "ss-s---rr-"),
    "qwen3, windows": ("l-------w-", "l-------r-"),
    "mistral": ("ss-s---sk-", "ss-s---sk-"),
    "mistral, windows": ("l-------w-", "l-------w-"),
    "phi3": ("s-------k-", "s-------k-"),
    "phi3, windows": ("l-------w-", "l-------w-"),
    "starcoder2": ("swlwww-ww-", "ssrsrs-rr-"),
    "starcoder2, windows": ("l-------w-", "l-------r-"),
    "ministral3": ("sssswr-sk-", "ssrsrs-sk-"),
    "ministral3, windows": ("l-------w-", "l-------w-"),
    "gemma2, windows": ("lw-w---ww-", "sr-r---rr-"),
    "gemma3_text, windows": ("ssssos-sk-", "ssrrrr-rr-"),
    "olmo3, windows": ("ss-s---sk-", "ss-s---rr-"),
    "cohere2, windows": ("sw-w---ww-", "sr-r---rr-"),
    "glm4": ("sw-w---ww-", "ss-s---rr-"),
    "phi3, partial": ("s-------k-", "s-------k-"),
    "stablelm": ("s--w------", "s--s------"),
    "phi": ("s--w------", "r--r------"),
    "mixtral": ("s--w---w--", "s--s---s--"),
    "mixtral, windows": ("l--w---w--", "l--l---l--"),
    "qwen2_moe": ("sw-r------", "ss-s------"),
    "qwen2_moe, windows": ("lw-r------", "ll-l------"),
    "qwen3_moe": ("s--w------", "s--s------"),
    "qwen3_moe, windows": ("l--w------", "l--l------"),
    "olmoe": ("s--s------", "s--s------"),
    "granitemoe": ("s--s---s--", "s--s---s--"),
    "glm4_moe": ("s--w------", "s--s------"),
    "minimax_m2": ("s--w------", "s--s------"),
    "ernie4_5_moe": ("l--w------", "s--s------"),
    "dots1, windows": ("l--l------", "l--l------"),
    "deepseek_v2": ("sr-s--s---", "sr-r--s---"),
    "deepseek_v3": ("s--s--s---", "s--r--s---"),
    "glm4_moe_lite": ("s--s--s---", "s--r--s---"),
    "gpt_oss, windows": ("s-rsw--s--", "s-rsw--r--"),
    "gpt_oss, kinds": ("s-rsw-----", "s-rsw-----"),
    "gpt_oss, full": ("r-rrr-----", "s-rsw-----"),
    "mimo_v2_flash, windows": ("s--w------", "s--r------"),
    "smollm3": ("s--s------", "s--s------"),
    "smollm3, listed": ("s--s------", "r--r------"),
    "smollm3, windows": ("s--s------", "l--l------"),
    "exaone4": ("s--s---s--", "s--s---s--"),
    "exaone4, windows": ("s--s------", "r--r------"),
    "exaone4, full": ("r---------", "r---------"),
    "exaone_moe, windows": ("s--s------", "s--r------"),
    "exaone_moe, full": ("r---------", "r---------"),
    "afmoe, windows": ("s--s------", "r--r------"),
    "cohere2, full": ("r---------", "r---------"),
    "llama4": ("s--s---s--", "s--r---s--"),
    "llama4, chunks": ("s---------", "r---------"),
    "llama4, listed": ("r---------", "r---------"),
    "llama4, temperature": ("s---------", "r---------"),
    "llama4_text": ("r--r---r--", "s--r---s--"),
    "llama4_text, chunks": ("r---------", "r---------"),
    "llama4_text, listed": ("r---------", "r---------"),
    "granitemoehybrid": ("s--w---w--", "s--s---s--"),
    "granitemoehybrid, none": ("s--s------", "s--s------"),
    "qwen2_vl": ("s--s---s--", "s--s---r--"),
    "qwen2_vl, windows": ("l--l------", "l--l------"),
    "qwen2_5_vl": ("s--s------", "s--s------"),
    "qwen3_vl": ("s--s------", "s--s------"),
    "qwen3_vl, sections": ("ss-s------", "ww-l------"),
    "qwen3_vl_moe": ("s--w------", "s--s------"),
    "qwen3_5_text": ("s--s------", "s--s------"),
    "qwen3_next": ("s--s------", "s--s------"),
    "gemma4_text, windows": ("s--------s", "r--------s"),
}
CELLS = [
    (family, variant)
    for family, letters in EXPECTED.items()
    for variant, letter in zip(VARIANTS, letters[0], strict=True)
    if letter != "-"
]


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_targets_compute_what_transformers_does_or_say_what_not(family: str, variant: str, tmp_path: Path) -> None:
    column, folder = list(VARIANTS).index(variant), tmp_path / "src"
    model = saved(folder, stated(family, variant))
    assert by_transformers(model, folder) == "s"
    assert (by_mlx(model, folder), by_llama_cpp(model, folder)) == tuple(row[column] for row in EXPECTED[family])


@pytest.mark.parametrize(("family", "said"), [("qwen2_moe, windows", 1), ("qwen2_moe", 0), ("qwen3_moe, windows", 0)])
def test_windows_that_vllm_does_not_have_are_said(family: str, said: int, tmp_path: Path) -> None:
    """vLLM 0.32 has those of Qwen3-MoE, SmolLM 3, EXAONE 4 and Cohere 2; logits of Qwen2-MoE are off by 0.7."""
    saved(tmp_path / "src", stated(family, "default"))
    report = run_command({"export": str(tmp_path / "src"), "target": "vllm"}, tmp_path / "out")
    assert sum("more than 8 tokens" in warning for warning in report.warnings) == said
