"""DeepSeek V2 to V4, and what has their latent attention: GLM 4.7 Flash and 5, Hunyuan V4, Kimi K2, Mistral 4."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import BIASED_SIGMOID, LATENT, LIKE_LLAMA, OWN_HEAD, SILU, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    DENSE_FIRST,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    GROUPS,
    NO_BIAS,
    NORMED,
    ROUTER_BIAS,
    SCALED,
    SHARED,
    SIGMOID,
    SILU_ONLY,
    SOFTMAX,
    Architecture,
    Cut,
    Numbers,
    Rope,
    Setting,
    layer_count,
    list_experts,
    real,
)
from pqweights.models.settings import Settings, chooses, multiple_of, needs_kinds
from pqweights.models.tensor_names import ROUTED, Names, below


def _head(n: Numbers) -> int:
    return n("qk_nope_head_dim") + n("qk_rope_head_dim")


def _latent(n: Numbers) -> int:
    return n("kv_lora_rank") + n("qk_rope_head_dim")


def _queries(n: Numbers) -> int:
    return n("num_attention_heads") * _head(n)


def _values(n: Numbers) -> int:
    return n("num_attention_heads") * n("v_head_dim")


def _has_rank(settings: Settings) -> str:
    """Check that queries are compressed in all models but those of 26 and 27 layers, as llama.cpp expects."""
    rank, layers = settings.get("q_lora_rank"), settings.number("num_hidden_layers")
    if (rank is None) == (layers in (26, 27)):
        return ""
    return f"llama.cpp expects q_lora_rank except in models of 26 or 27 layers, found {rank} with {layers} layers"


# One head of keys and values, from which each head makes its own.
# Any scaling of its frequencies would scale attention, too.
_ROPE = Rope(frozenset({"default", "yarn"}), rotated="qk_rope_head_dim", yarn_scales_attention=True)
DEEPSEEK2 = Architecture(
    name="DEEPSEEK2", modules=ROUTER_BIAS,
    cuts={
        r"self_attn\.kv_b_proj": Cut(
            parts={"self_attn.k_b_proj": (0,), "self_attn.v_b_proj": (1,)}, blocks=("qk_nope_head_dim", "v_head_dim"),
            times="num_attention_heads", stacked=True, transposed=("self_attn.k_b_proj",),
        ),
    },
    settings=(
        Setting("head_count_kv", 1), Setting("q_lora_rank", "q_lora_rank", optional=True),
        Setting("kv_lora_rank", "kv_lora_rank"), Setting("key_length", _latent),
        Setting("value_length", "kv_lora_rank"), Setting("key_length_mla", _head),
        Setting("value_length_mla", "v_head_dim"), *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SHARED, SIGMOID,
        SCALED, NORMED,
    ),
    shapes={
        "ATTN_Q": (_queries, "hidden_size"), "ATTN_Q_A": ("q_lora_rank", "hidden_size"),
        "ATTN_Q_B": (_queries, "q_lora_rank"), "ATTN_KV_A_MQA": (_latent, "hidden_size"),
        "ATTN_OUT": ("hidden_size", _values),
    },
    rope=_ROPE, drafts={}, checks=(_has_rank,),
    values=SILU_ONLY | {"rope_interleave": (True, None)} | NO_BIAS,
)  # fmt: skip
_BY_SOFTMAX = (*(setting for setting in DEEPSEEK2.settings if setting != SIGMOID), SOFTMAX)
_DEEPSEEK_V2 = replace(
    DEEPSEEK2, settings=_BY_SOFTMAX,
    values={**DEEPSEEK2.values, "topk_method": ("greedy", None), "norm_topk_prob": (False,)},
)  # fmt: skip
_MISTRAL4 = replace(
    DEEPSEEK2, name="MISTRAL4", settings=_BY_SOFTMAX, drafts=None, checks=(),
    rope=_ROPE._replace(rotated=_head, partial=True, yarn_mscale=1.0, temperature=True),
)  # fmt: skip
_INDEXER = (
    Setting("indexer_head_count", "index_n_heads"), Setting("indexer_key_length", "index_head_dim"),
    Setting("indexer_top_k", "index_topk"),
)  # fmt: skip
# Attention to the tokens that an indexer chooses.
_GLM_DSA = replace(
    DEEPSEEK2, name="GLM_DSA", settings=(*DEEPSEEK2.settings, *_INDEXER),
    rope=_ROPE._replace(kinds=DEFAULT),
    layer_types=frozenset({"indexed_attention"}), biases=frozenset({"INDEXER_K_NORM"}),
    checks=(multiple_of(64, "index_head_dim"),), notes=(chooses("index_topk"),),
    values={**DEEPSEEK2.values, "indexer_types": ("full", None)},
)  # fmt: skip
_DEEPSEEK32 = replace(_GLM_DSA, label="deepseek32", rope=_ROPE._replace(yarn_mscale=1.0))
_INDEXED_ATTENTION = "indexed_attention"


def _rotates(settings: Settings) -> str:
    """Return the note on rotary embeddings."""
    return (
        "llama.cpp and vLLM rotate pairs of neighbouring channels of queries and keys, but transformers up to 5.24 "
        "pairs the two halves of a head: its results differ for the same weights"
    )


# Hyper-connections, gated attention, and layers that attend to the tokens which the indexer of an earlier one chose.
_HY_V4 = replace(
    _GLM_DSA, label="hy_v4", drafts=None, layer_types=frozenset({_INDEXED_ATTENTION, FULL}), own_head=True,
    checks=(), notes=(chooses("index_topk"), _rotates), values=DEEPSEEK2.values,
    modules=ROUTER_BIAS | {r"mlp\.(shared_experts\.)?linear_gate": r"mlp.\1gate_proj"},  # as transformers saves it
    tensors={
        r"self_attn\.learnable_sink_param": "attn_sinks.weight", r"self_attn\.linear_gate\.weight": "attn_gate.weight",
        **{
            rf"(?:hc_pre\.)?hc_{name}_layer\.(?:hc_pre\.)?hc_(fn|base|scale)": rf"hc_{known}_\1.weight"
            for name, known in (("attn", "attn"), ("mlp", "ffn"))
        },
        r"model\.(?:hc_pre\.)?hc_head\.hc_head_(fn|base|scale)": r"output_hc_\1.weight",
    },
    settings=(
        *_GLM_DSA.settings, real(".swiglu_clamp_exp", "swiglu_limit"), Setting(".hyper_connection.count", "hc_mult"),
        real(".hyper_connection.epsilon", "hc_eps"), real(".hyper_connection.magnitude", "hc_magnitude"),
        Setting(".attention.indexer.types", 1, only=f"{_INDEXED_ATTENTION}.*"),
    ),
    shapes={**DEEPSEEK2.shapes, "ATTN_GATE": (_values, "hidden_size")},
)  # fmt: skip
# What configurations call layers with an indexer, and those without.
_INDEXERS = {"full": _INDEXED_ATTENTION, "shared": FULL}


def _restate_hy_v4(values: dict[str, Any]) -> None:
    """State layers by whether they have an indexer, which their layer_types do not say."""
    layers, types = layer_count(values), values.get("indexer_types")
    if types is None:
        types = ["shared" if layer and (layer - 1) % 4 else "full" for layer in range(layers)]
    if isinstance(types, list):  # layers that predict further tokens are listed, too
        types = [_INDEXERS.get(name, name) if isinstance(name, str) else name for name in types[:layers]]
    values["layer_types"] = types


def _publish_hy_v4(config: dict[str, Any], held: Set[str]) -> None:
    """State layers as published configurations do."""
    names = {kind: name for name, kind in _INDEXERS.items()}
    config["indexer_types"] = [names[kind] for kind in config.pop("layer_types")]
    list_experts(config, held)


_COMPRESSING = frozenset({"compressed 4", "compressed 128"})
# Hyper-connections, and attention to compressed tokens, of which an indexer chooses some.
_DEEPSEEK4 = Architecture(
    name="DEEPSEEK2", label="deepseek4",
    tensors={
        r"(?:model\.)?embed(?:_tokens)?\.weight": "token_embd.weight", r"head\.weight": "output.weight",
        r"(?:model\.)?norm\.weight": "output_norm.weight", r"(attn|ffn)_norm\.weight": r"\1_norm.weight",
        r"(?:model\.hc_head\.hc|hc_head)_(fn|base|scale)": r"output_hc_\1.weight",
        r"hc_(attn|ffn)_(fn|base|scale)": r"hc_\1_\2.weight", r"attn\.attn_sink": "attn_sinks.weight",
        r"attn\.(?:kv_)?norm\.weight": "attn_kv_a_norm.weight", r"attn\.q_norm\.weight": "attn_q_a_norm.weight",
        r"attn\.wq_([ab])\.weight": r"attn_q_\1.weight", r"attn\.wo_([ab])\.weight": r"attn_output_\1.weight",
        r"attn\.wkv\.weight": "attn_kv.weight", r"attn\.indexer\.weights_proj\.weight": "indexer.proj.weight",
        r"attn\.indexer\.wq_b\.weight": "indexer.attn_q_b.weight", r"ffn\.gate\.bias": "exp_probs_b.bias",
        r"(?:attn\.(?=indexer))?(attn|indexer)\.compressor\.w?(kv|gate|norm)\.weight": r"\1_compressor_\2.weight",
        r"(?:attn\.(?=indexer))?(attn|indexer)\.compressor\.ape": r"\1_compressor_ape.weight",
        r"ffn\.gate\.weight": "ffn_gate_inp.weight", r"ffn\.gate\.tid2eid": "ffn_gate_tid2eid.weight",
        **{
            rf"ffn\.{of}experts\.w{number}\.weight": f"ffn_{name}_{label}.weight"
            for of, label in (("", "exps"), ("shared_", "shexp"))
            for number, name in enumerate(("gate", "down", "up"), 1)
        },
    },
    uneven=r"ffn_gate_tid2eid\..*|exp_probs_b\..*",
    settings=(
        Setting("feed_forward_length", "moe_intermediate_size"), Setting("q_lora_rank", "q_lora_rank"),
        *EXPERTS, EXPERT_WIDTH, SHARED, SCALED, NORMED, Setting(".expert_gating_func", 4), *_INDEXER,
        Setting("swiglu_clamp_exp", "swiglu_limits", real=True, listed=True),
        Setting("swiglu_clamp_shexp", "swiglu_limits", real=True, listed=True),
        Setting(".attention.sliding_window", "sliding_window"),
        Setting(".attention.compress_ratios", "compress_ratios", listed=True),
        real(".attention.compress_rope_freq_base", "compress_rope_theta"),
        Setting(".attention.output_group_count", "o_groups"), Setting(".attention.output_lora_rank", "o_lora_rank"),
        Setting(".hyper_connection.count", "hc_mult"), real(".hyper_connection.epsilon", "hc_eps"),
        Setting(".hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        Setting(".hash_layer_count", "num_hash_layers", zero=True),
        Setting(".embedding_length_out", lambda n: n("hidden_size") * n("hc_mult")),
    ),
    shapes={
        "ATTN_Q_A": ("q_lora_rank", "hidden_size"), "ATTN_KV": ("head_dim", "hidden_size"),
        "ATTN_Q_B": (lambda n: n("num_attention_heads") * n("head_dim"), "q_lora_rank"),
    },
    layer_types=_COMPRESSING | {"compressed 0"}, rope=Rope(frozenset({"default", "yarn"}), partial=True),
    checks=(needs_kinds(_COMPRESSING), multiple_of(64, "head_dim"), multiple_of(64, "index_head_dim")),
    notes=(chooses(lambda n: 4 * n("index_topk")),),
    values=SILU_ONLY | {"scoring_func": ("sqrtsoftplus",), "norm_topk_prob": (True,)} | NO_BIAS,
)  # fmt: skip
# Its layers, and how many tokens become one in them.
_COMPRESSED = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _restate_v4(values: dict[str, Any]) -> None:
    """State layers by how much they compress, and the rotary embeddings that are scaled in some."""
    layers, types = layer_count(values), values.get("layer_types")
    ratios = values.get("compress_ratios") or [4 if n > 1 and n % 2 else 128 for n in range(layers)]
    if isinstance(types, list):
        ratios = [_COMPRESSED.get(name) if isinstance(name, str) else name for name in types]
    if isinstance(ratios, list):  # layers that predict further tokens are listed, too
        values["compress_ratios"] = ratios[:layers]
        values["layer_types"] = [f"compressed {ratio}" for ratio in ratios[:layers]]
    experts = values.get("mlp_layer_types")
    hashed = experts.count("hash_moe") if isinstance(experts, list) else values.get("num_hash_layers", 3)
    values["num_hash_layers"] = hashed
    if isinstance(experts, list) and experts[:hashed] == ["hash_moe"] * hashed:
        del values["mlp_layer_types"]
    values["swiglu_limits"] = [values.get("swiglu_limit", 10.0)] * layers
    rope = values.get("rope_parameters") or {}
    if not all(isinstance(rope.get(kind), dict) and "rope_theta" in rope[kind] for kind in ("main", "compress")):
        return
    values["compress_rope_theta"] = rope["compress"]["rope_theta"]
    # llama.cpp does not scale queries and keys by the factor of YaRN, as the model does not.
    scaled = {key: value for key, value in rope["compress"].items() if key != "attention_factor"}
    values["rope_parameters"] = scaled | {"rope_theta": rope["main"]["rope_theta"]}


def _publish_v4(config: dict[str, Any], held: Set[str]) -> None:
    """State layers as published configurations do."""
    config.pop("layer_types", None)
    config["compress_ratios"] = config["compress_ratios"][: config["num_hidden_layers"]]
    config["qk_rope_head_dim"] = int(config["head_dim"] * config.pop("partial_rotary_factor", 1.0))
    config["swiglu_limit"] = next(iter(config.pop("swiglu_limits", ())), 0.0)


MLA = below("self_attn", "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj")
_NAMES = Names(class_name="DeepseekV3ForCausalLM", layers=parts.SHARED + MLA + parts.ROUTER_BIAS, keys=ROUTED)
_INDEXED = replace(
    _NAMES, layers=_NAMES.layers + below("self_attn.indexer", "k_norm weights_proj wk wq_b"),
    class_name="DeepseekV32ForCausalLM",
)  # fmt: skip
_HY_V4_NAMES = Names(
    class_name="HYV4ForCausalLM", keys=ROUTED,
    outside=parts.OUTSIDE + below("model.hc_head", "hc_head_fn hc_head_base hc_head_scale"),
    layers=_INDEXED.layers + below("self_attn", "linear_gate learnable_sink_param")
    + below("mlp.experts", "gate_up_proj down_proj")
    + below("hc_attn_layer.hc_pre", "hc_fn hc_base hc_scale") + below("hc_mlp_layer.hc_pre", "hc_fn hc_base hc_scale"),
)  # fmt: skip
_V3 = sizes(7168, 18432, 61, 128, 4096) | LIKE_LLAMA | LATENT | {
    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_WITH_INDEXER = {"head_dim": 64, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_NEW_KEYS = {key: value for key, value in _V3.items() if key != "rope_interleave"} | _WITH_INDEXER
_GLM = {"rms_norm_eps": 1e-05, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}


def _v2_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    """State YaRN that scales nothing where there is none: mlx-lm's model has no other rotary embeddings."""
    return {} if config.get("rope_scaling") else {"rope_scaling": {"type": "yarn", "factor": 1.0}}


ROWS: dict[str, Row] = {
    "deepseek_v2": Row(
        llama_cpp=_DEEPSEEK_V2, names=replace(_NAMES, class_name="DeepseekV2ForCausalLM"),
        mlx=MlxDifferences(computed=_v2_mlx),
        defaults=sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA | {
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "num_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
            "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "attention_bias": False,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Row(
        llama_cpp=DEEPSEEK2, names=_NAMES, defaults=_V3,
        always=parts.NORMS + below("self_attn", "kv_a_proj_with_mqa kv_a_layernorm o_proj") + " mlp.gate mlp.experts",
    ),
    "glm4_moe_lite": Row(
        llama_cpp=DEEPSEEK2, names=replace(_NAMES, class_name="Glm4MoeLiteForCausalLM"),
        defaults={key: value for key, value in _V3.items() if key != "first_k_dense_replace"} | _GLM
        | sizes(2048, 10240, 47, 20, 202752) | {
            "num_key_value_heads": 20, "q_lora_rank": 768, "num_experts": 64, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
        },
    ),
    # Of the configuration's own code; what published files leave out is what DeepSeek V3 leaves out.
    "kimi_k2": Row(llama_cpp=DEEPSEEK2, names=_NAMES, defaults=OWN_HEAD | SILU | {"rope_interleave": True}),
    "deepseek_v32": Row(
        llama_cpp=_DEEPSEEK32, names=_INDEXED, defaults=_NEW_KEYS | sizes(7168, 18432, 61, 128, 163840),
    ),
    "glm_moe_dsa": Row(
        llama_cpp=_GLM_DSA, names=replace(_INDEXED, class_name="GlmMoeDsaForCausalLM"),
        mlx=MlxDifferences(constants=BIASED_SIGMOID | {"moe_layer_freq": 1}),
        defaults=_NEW_KEYS | _GLM | sizes(6144, 12288, 78, 64, 202752) | {
            "num_key_value_heads": 64, "q_lora_rank": 2048, "index_n_heads": 32,
        },
    ),
    "hy_v4": Row(
        llama_cpp=_HY_V4, names=_HY_V4_NAMES, restate=_restate_hy_v4, publish=_publish_hy_v4,
        defaults=_NEW_KEYS | _GLM | sizes(2816, 6912, 34, 32, 262144) | {
            "num_key_value_heads": 32, "head_dim": 256, "moe_intermediate_size": 768, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827, "index_n_heads": 16, "swiglu_limit": 10.0, "hc_mult": 4,
            "hc_magnitude": 2.0, "hc_eps": 1e-6,
        },
    ),
    "deepseek_v4": Row(
        llama_cpp=_DEEPSEEK4, restate=_restate_v4, publish=_publish_v4,
        names=Names(
            class_name="DeepseekV4ForCausalLM", keys=ROUTED,
            layers="attn_norm ffn_norm hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base hc_ffn_scale"
            + below("attn", "attn_sink norm q_norm wkv wo_a wo_b wq_a wq_b indexer.weights_proj indexer.wq_b")
            + below("attn.compressor", "ape norm wgate wkv") + below("attn.indexer.compressor", "ape norm wgate wkv")
            + below("ffn", "gate gate.tid2eid shared_experts.w1 shared_experts.w2 shared_experts.w3")
            + below("ffn.experts.{}", "w1 w2 w3"),
            outside="model.embed_tokens model.norm head" + below("model.hc_head", "hc_fn hc_base hc_scale"),
        ),
        in_memory={
            r"^layers\.": "model.layers.", r"\.attn\.": ".self_attn.", r"\.ffn\.": ".mlp.",
            r"\.w(q_a|kv|o_a|o_b)\.": r".\1_proj.", r"\.wgate\.": ".gate_proj.",
            r"\.indexer\.compressor\.": ".compressor.indexer.",
            r"\.indexer\.weights_proj\.": ".compressor.indexer.scorer.weights_proj.",
            r"\.indexer\.wq_b\.": ".compressor.indexer.q_b_proj.", r"\.wq_b\.": ".q_b_proj.",
            r"\.shared_experts\.w1\.": ".shared_experts.gate_proj.",
            r"\.shared_experts\.w2\.": ".shared_experts.down_proj.",
            r"\.shared_experts\.w3\.": ".shared_experts.up_proj.",
        },
        defaults=OWN_HEAD | SILU | {
            "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
            "max_position_embeddings": 1048576, "head_dim": 512, "rms_norm_eps": 1e-6, "q_lora_rank": 1024,
            "num_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.5, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
            "sliding_window": 128, "compress_rope_theta": 160000.0, "o_groups": 8, "o_lora_rank": 1024, "hc_mult": 4,
            "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
            "attention_bias": False,
        },
    ),
    "mistral4": Row(
        llama_cpp=_MISTRAL4,
        names=Names(
            class_name="Mistral4ForCausalLM", keys=ROUTED,
            layers=parts.ATTENTION + parts.MLP + parts.FEED_FORWARD_NORMS + " mlp.gate" + parts.SHARED_EXPERT + MLA
            + parts.SHARED_EXPERTS + below("mlp.experts", "gate_up_proj down_proj"),
        ),
        defaults=_V3 | sizes(4096, 12288, 36, 32, 1048576) | {
            "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
            "num_experts": 128, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        },
    ),
}  # fmt: skip
