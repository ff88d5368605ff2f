"""Qwen4-Exp: the layers of Qwen 3.5 between hyper-connections, attention to tokens that an indexer chooses, and
embeddings of n-grams in one layer, by hashes that follow from the configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.conventions import FUSED, FusedLayer
from pqweights.models.description import LIKE_LLAMA
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import FULL, LINEAR_ATTENTION, NO_BIAS, SILU_ONLY, Cut, Numbers, Setting
from pqweights.models.qwen import DELTA_NET, LINEAR, QWEN3_5_MOE, restate_linear
from pqweights.models.settings import MOST_OF_ANY, Settings, needs_kinds
from pqweights.models.tensor_names import Names, below
from pqweights.models.traits import Trait

# What llama.cpp has room for (LLAMA_MAX_PLE_NGRAM, LLAMA_MAX_PLE_HEADS).
_LONGEST, _MOST_HEADS = 8, 64
_WORD = (1 << 64) - 1


def _restate(values: dict[str, Any]) -> None:
    """State layers with an indexer as published configurations do: all that have full attention."""
    if isinstance(types := values.get("layer_types"), list):
        values["layer_types"] = [FULL if kind == "indexed_attention" else kind for kind in types]
    restate_linear(values)


def _publish(config: dict[str, Any], held: Set[str]) -> None:
    """State what the rows of the table of n-grams follow from; another seed than the usual one is found later."""
    layers, sizes, rows = (config.pop(key, None) for key in ("ple_layers", "ple_rows", "vocab_size_per_layer_input"))
    first_end = config.pop("ple_eos_token_id", None)
    config |= {"ngram_size": config.pop("ple_longest", 3), "heads_per_ngram": config.pop("ple_heads", 8)}
    for key in ("ple_multipliers", "ple_first_rows", "ple_width"):
        config.pop(key, None)
    if all(isinstance(of, list) and of and all(isinstance(number, int) for number in of) for of in (layers, sizes)):
        config |= {"ple_layer_ids": [layer + 1 for layer in layers], "ngram_vocab_size_base": sizes[0]}
        config |= {"split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": rows, "eos_token_id": first_end}


def _scrambled(value: int) -> int:
    """Return 64 bits that a number of 64 bits is mixed to: SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _multipliers(tokens: int, longest: int, seed: int) -> list[int]:
    """Return the odd numbers that the tokens of an n-gram are multiplied by, the last token's first."""
    bound = max(1, ((1 << 63) - 1) // tokens // 2)
    return [2 * (_scrambled(seed + 0x9E3779B97F4A7C15 * place & _WORD) % bound) + 1 for place in range(1, longest + 1)]


def _primes(least: int) -> Iterator[int]:
    """Yield the primes from a number on."""
    numbers = itertools.count(max(least, 2))
    return (n for n in numbers if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))


def _heads(n: Numbers) -> int:
    return (n("ngram_size") - 1) * n("heads_per_ngram")


def _one_table(settings: Settings) -> str:
    """Check the embeddings of n-grams, of which llama.cpp has one table that fits its layer."""
    layers, eos = settings.get("ple_layer_ids"), _end(settings)
    if not layers:
        return ""
    linear = [number for number, kind in enumerate(settings.get("layer_types"), 1) if kind == LINEAR_ATTENTION]
    if not isinstance(layers, list) or len(layers) != 1 or layers[0] not in linear:
        return f"llama.cpp has embeddings of n-grams in one layer with linear attention, found {layers!r:.80}"
    if settings.get("ple_embed_dim") not in (None, settings.number("hidden_size")):
        return f"llama.cpp expects hidden_size as ple_embed_dim, found {settings.get('ple_embed_dim')!r}"
    if not 2 <= settings.number("ngram_size") <= _LONGEST or settings.number(_heads) > _MOST_HEADS:
        return f"llama.cpp has n-grams of 2 to {_LONGEST} tokens, and at most {_MOST_HEADS} heads of them"
    if settings.number(_heads) * settings.number("ngram_vocab_size_base") > MOST_OF_ANY:
        return f"llama.cpp has at most {MOST_OF_ANY} embeddings of n-grams"
    if not isinstance(settings.get("seed"), int) or not isinstance(eos, int) or eos < 0:
        return f"expected whole numbers as seed and eos_token_id, found {settings.get('seed')!r} and {eos!r}"
    return ""


def _end(settings: Settings) -> Any:
    """Return the token behind which n-grams begin anew, the first of several."""
    ends = settings.get("eos_token_id")
    return ends[0] if isinstance(ends, list) and ends else ends


def _hashes(settings: Settings) -> dict[str, Any]:
    """Return what makes rows of the table of n-grams; nothing without a table."""
    if not settings.get("ple_layer_ids"):
        return {}
    sizes = [*itertools.islice(_primes(settings.number("ngram_vocab_size_base")), settings.number(_heads))]
    tokens, longest = settings.number("vocab_size"), settings.number("ngram_size")
    return {
        "ple_layers": [layer - 1 for layer in settings.get("ple_layer_ids")],
        "ple_multipliers": _multipliers(tokens, longest, settings.get("seed")),
        "ple_rows": sizes,
        "ple_first_rows": [0, *itertools.accumulate(sizes[:-1])],
        "ple_eos_token_id": _end(settings),
        "ple_longest": longest,
        "ple_heads": settings.number("heads_per_ngram"),
        "ple_width": settings.number(lambda n: n("hidden_size") // _heads(n)),
    }


def _attends_to_more(settings: Settings) -> str:
    """Return the note on layers that attend to some tokens, which an indexer chooses."""
    budget, block = settings.number("indexer_budget"), settings.number("indexer_compress_ratio")
    return (
        f"results are those of transformers for texts of at most {budget} tokens. In longer ones, the model attends to "
        f"that many in whole blocks of {block}, and to the tokens after the last whole block; llama.cpp always attends "
        f"to {budget + block - 1} tokens, which may include part of another block"
    )


def _rows(n: Numbers) -> int:
    """Return the rows of the table, which are filled up to a multiple."""
    sizes = itertools.islice(_primes(n("ngram_vocab_size_base")), _heads(n))
    multiple = n("make_ngram_vocab_size_divisible_by")
    return -(-sum(sizes) // multiple) * multiple


def _streams(n: Numbers) -> int:
    return n("hc_count") * n("hidden_size")


_MIXERS = {
    rf"{module}\.{part}": f"{name}_{label}.weight"
    for module, name in (
        (r"attn_hyper_connection", "hc_attn"), (r"mlp_hyper_connection", "hc_ffn"),
        (r"model\.hyper_connection_mixer", "output_hc"),
    )
    for part, label in (
        (r"hc_norm\.weight", "norm"), (r"input_mix_weight_down\.weight", "down"),
        (r"input_mix_weight_up\.weight", "up"), (r"block_inject_weight\.weight", "inject"),
    )
}  # fmt: skip
_TABLE = r"model\.layers\.\d+\.ple\.ple_embedding"
_QWEN4 = replace(
    QWEN3_5_MOE, label="qwen4exp", drafts=None, needed=("output_hc_norm.weight",), uneven=r"ple_.*",
    follows={
        rf"{_TABLE}\.layer_multipliers": "ple_multipliers", rf"{_TABLE}\.ngram_heads_offsets": "ple_first_rows",
        rf"{_TABLE}\.ngram_heads_vocab_sizes": "ple_rows",
    },
    modules={**QWEN3_5_MOE.modules, rf"{_TABLE}\.ngram_embedding(\.shard_\d+)?": r"ngram_embedding\1"},
    cuts={
        r"self_attn\.indexer\.index_qk_proj": Cut(
            parts={"self_attn.indexer.q_proj": (0,), "self_attn.indexer.k_proj": (1,)},
            blocks=(lambda n: n("indexer_n_heads") * n("indexer_head_dim"), "indexer_head_dim"),
        ),
    },
    tensors=_MIXERS | {
        r"self_attn\.indexer\.([qk]_proj)\.weight": r"indexer.\1.weight",
        r"self_attn\.indexer\.([qk])_layernorm\.weight": r"indexer.\1_norm.weight",
        r"ple\.(key|value)_proj\.weight": r"ple_\1.weight",
        r"ple\.(norm_(?:key|query|conv)|conv1d)\.weight": r"ple_\1.weight",
        r"ngram_embedding(?:\.shard_\d+)?\.weight": "per_layer_token_embd.weight",
    },
    settings=(
        *QWEN3_5_MOE.settings, Setting(".hyper_connection.count", "hc_count"),
        Setting(".hyper_connection.low_rank", "hc_lowrank"), Setting("indexer_head_count", "indexer_n_heads"),
        Setting("indexer_key_length", "indexer_head_dim"), Setting("indexer_top_k", "indexer_budget"),
        Setting(".attention.compress_ratios", "indexer_compress_ratio", only=f"{FULL}.*"),
        Setting(".ple.layers", "ple_layers", optional=True, items="UINT32"),
        Setting(".ple.ngram_size", "ple_longest", optional=True),
        Setting(".ple.heads_per_ngram", "ple_heads", optional=True),
        Setting(".ple.conv_kernel", "ple_conv_kernel_size"),
        Setting(".ple.layer_multipliers", "ple_multipliers", optional=True, items="UINT64"),
        Setting(".ple.head_offsets", "ple_first_rows", optional=True, items="UINT64"),
        Setting(".ple.head_vocab_sizes", "ple_rows", optional=True, items="UINT64"),
        Setting(".ple.eos_token_id", "ple_eos_token_id", zero=True),
        Setting(".ple.image_token_id", "image_token_id", optional=True),
        Setting("embedding_length_per_layer_input", "ple_width", optional=True),
    ),
    shapes={
        **QWEN3_5_MOE.shapes, "PER_LAYER_TOKEN_EMBD": (_rows, "ple_width"),
        **{f"{of}_NORM": (_streams, None) for of in ("HC_ATTN", "HC_FFN", "OUTPUT_HC")},
        **{f"{of}_DOWN": ("hc_lowrank", _streams) for of in ("HC_ATTN", "HC_FFN", "OUTPUT_HC")},
        **{f"{of}_UP": (_streams, "hc_lowrank") for of in ("HC_ATTN", "HC_FFN", "OUTPUT_HC")},
    },
    checks=(*QWEN3_5_MOE.checks, needs_kinds(frozenset({LINEAR_ATTENTION})), _one_table), derived=_hashes,
    notes=(*QWEN3_5_MOE.notes, _attends_to_more),
    values=SILU_ONLY | NO_BIAS | {
        "output_gate_type": ("sigmoid",), "norm_topk_prob": (True,), "indexer_kv_heads": (1,),
    },
)  # fmt: skip
_MIXER = "hc_norm input_mix_weight_down input_mix_weight_up block_inject_weight"
# Hyper-connections mix residual streams by small matrices; vLLM has them plain.
_WHOLE = Row(
    roles={r"input_mix_weight_(down|up)|block_inject_weight": "router", r"shard_\d+": "embedding"},
    fused=(*FUSED, FusedLayer("key_proj|value_proj", "kv")),
)

ROWS: dict[str, Row] = {
    "qwen4_exp": _WHOLE,
    "qwen4_exp_text": replace(
        _WHOLE, traits=frozenset({Trait.ZERO_CENTRED_NORMS}), llama_cpp=_QWEN4, restate=_restate, publish=_publish,
        names=Names(
            class_name="Qwen4ExpForCausalLM",
            layers=parts.HEADS + parts.HEAD_NORMS + DELTA_NET + " mlp.gate" + parts.SHARED_EXPERT + parts.EXPERTS
            + below("self_attn.indexer", "index_qk_proj q_layernorm k_layernorm")
            + below("attn_hyper_connection", _MIXER) + below("mlp_hyper_connection", _MIXER)
            + below("ple", "key_proj value_proj norm_key norm_query norm_conv conv1d")
            + " ple.ple_embedding.ngram_embedding.shard_0",
            outside="model.embed_tokens lm_head" + below("model.hyper_connection_mixer", _MIXER),
        ),
        defaults=LIKE_LLAMA | LINEAR | {
            "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "max_position_embeddings": 32768, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
            "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
            "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234,
        },
    ),
}  # fmt: skip
