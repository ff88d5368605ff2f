"""Types that give vectors of tokens, or scores, instead of predicting the next one: BERT and what came of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from pqweights.models.description import LIKE_LLAMA, TIED, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    FULL,
    LAYER_NORM,
    NO_BIAS,
    QKV,
    SILU_ONLY,
    SLIDING,
    TANH_GELU,
    Architecture,
    Rope,
    Setting,
    Windows,
    first_class,
    gate_and_up_rows,
    layer_count,
)
from pqweights.models.settings import Settings, unused_positions
from pqweights.models.tensor_names import NO_GROUPS, Names, below

UNUSED = "not needed for the vectors of tokens"
# llama.cpp approximates gelu by tanh.
_GELU = {"hidden_act": ("gelu", *TANH_GELU)}
_PRETRAINED = ("ForMaskedLM", "ForPreTraining")
_RANKS = "ForSequenceClassification"
_NORMS = frozenset({"TOKEN_EMBD_NORM", "ATTN_OUT_NORM", "LAYER_OUT_NORM"})


def _ranks(settings: Settings) -> bool:
    return first_class(settings.values).endswith(_RANKS)


def _with_scores(model: Architecture, **changed: Any) -> Architecture:
    """Return how llama.cpp runs models with a head for classes. changed: what differs with that"""
    biases, needed = model.biases | {"CLS", "CLS_OUT"}, (*model.needed, "cls.weight", "cls.output.weight")
    return replace(model, when=_ranks, classes=(_RANKS,), pooling="RANK", biases=biases, needed=needed, **changed)


_BERT = Architecture(
    name="BERT", prefix=r"(bert|distilbert|roberta)\.", norm=LAYER_NORM, rope=None, free_head_dim=False,
    unused={r"pooler\..*|cls\..*|lm_head\..*|vocab_.*|embeddings\.position_ids": UNUSED},
    settings=(Setting("token_type_count", "type_vocab_size"),),
    shapes={"POS_EMBD": ("max_position_embeddings", "hidden_size")},
    needed=("token_embd_norm.weight", "position_embd.weight", "token_types.weight"),
    classes=_PRETRAINED, encoder=True, biases=QKV | {"ATTN_QKV", "ATTN_OUT", "FFN_UP", "FFN_DOWN"} | _NORMS,
    values=_GELU | {"position_embedding_type": ("absolute", None), "is_decoder": (False, None)},
)  # fmt: skip
_BERT_RANKS = _with_scores(
    _BERT, unused={r"embeddings\.position_ids": UNUSED},
    modules={r"pooler\.dense": "classifier.dense", "classifier": "classifier.out_proj"},
)  # fmt: skip
# It has no types of tokens, and norms whose epsilon no configuration states.
_DISTILBERT = replace(
    _BERT, settings=(Setting("token_type_count", 1),), needed=("token_embd_norm.weight", "position_embd.weight"),
    values={"activation": ("gelu",), "layer_norm_eps": (1e-12,)},
)  # fmt: skip


# Positions are numbered from that of padding on.
def _positions(settings: Settings) -> dict[str, int]:
    return {"max_position_embeddings": settings.number("max_position_embeddings") - unused_positions(settings)}


_ROBERTA = replace(_BERT, first_position="pad_token_id", derived=_positions)
_JINA_V3 = replace(
    _BERT, name="JINA_BERT_V3", shapes={}, needed=("token_embd_norm.weight", "token_types.weight"), rope=Rope(DEFAULT),
    values=_GELU,
)  # fmt: skip
_NOMIC = replace(
    _JINA_V3, name="NOMIC_BERT", biases=_NORMS,
    values={
        "hidden_act": ("silu",), "activation_function": ("swiglu", None), "prenorm": (False, None),
        "moe_every_n_layers": (0, None), "rotary_emb_fraction": (1.0, None), "rotary_emb_interleaved": (False, None),
        "rotary_emb_scale_base": (None,),
    },
)  # fmt: skip
_MODERN = Architecture(
    name="MODERN_BERT", prefix=r"model\.", unused={r"head\..*|decoder\..*": UNUSED}, norm=LAYER_NORM,
    shapes={"FFN_UP": (gate_and_up_rows, "hidden_size")}, uneven=r"attn_norm\.weight", rope=Rope(DEFAULT),
    free_head_dim=False, windows=Windows(first_period=3, listed=True), classes=_PRETRAINED, encoder=True,
    values={"hidden_activation": ("gelu",)},
)  # fmt: skip
_MODERN_RANKS = _with_scores(
    _MODERN, unused={}, modules={"classifier": "classifier.out_proj", r"head\.dense": "classifier"},
    values={**_MODERN.values, "classifier_pooling": ("mean",)},
)  # fmt: skip


def _restate_modern(values: dict[str, Any]) -> None:
    every = values.get("global_attn_every_n_layers")
    if isinstance(every, int) and every > 0:
        kinds = [SLIDING if layer % every else FULL for layer in range(layer_count(values))]
        values.setdefault("layer_types", kinds)


def _publish_nomic(config: dict[str, Any], held: Set[str]) -> None:
    """Its configuration takes a number only."""
    if config["pad_token_id"] is None:
        del config["pad_token_id"]


_EMBEDDINGS = "word_embeddings position_embeddings token_type_embeddings LayerNorm"
_BERT_NAMES = Names(
    class_name="BertModel", before="bert.encoder.layer.#.", keys=NO_GROUPS,
    layers="attention.self.query attention.self.key attention.self.value attention.output.dense "
    "attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm",
    outside=below("bert.embeddings", _EMBEDDINGS) + " bert.pooler.dense classifier",
)  # fmt: skip
_FLASH_NAMES = Names(
    before="encoder.layers.#.", outside="embeddings.word_embeddings embeddings.token_type_embeddings emb_ln",
    keys=NO_GROUPS,
)  # fmt: skip
_DEFAULTS = sizes(768, 3072, 12, 12, 512) | TIED | {
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False,
}  # fmt: skip
# Alone, a file of these becomes a BERT.
_ROBERTA_ROW = Row(
    llama_cpp=_ROBERTA, variants=(_with_scores(_ROBERTA),), defaults=_DEFAULTS | {"pad_token_id": 1},
    names=replace(
        _BERT_NAMES, class_name="", before="roberta.encoder.layer.#.", keys={},
        outside=below("roberta.embeddings", _EMBEDDINGS) + " classifier.dense classifier.out_proj",
    ),
)  # fmt: skip

ROWS: dict[str, Row] = {
    "bert": Row(llama_cpp=_BERT, variants=(_BERT_RANKS,), defaults=_DEFAULTS, names=_BERT_NAMES),
    "distilbert": Row(
        llama_cpp=_DISTILBERT, defaults=sizes(768, 3072, 6, 12, 512) | TIED | {
            "activation": "gelu", "layer_norm_eps": 1e-12,
        },
        names=Names(
            class_name="DistilBertModel", before="distilbert.transformer.layer.#.",
            layers=below("attention", "q_lin k_lin v_lin out_lin") + " sa_layer_norm ffn.lin1 ffn.lin2 "
            "output_layer_norm",
            outside=below("distilbert.embeddings", "word_embeddings position_embeddings LayerNorm"),
            keys=NO_GROUPS | {
                "hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads", "layer_norm_eps": "",
            },
        ),
    ),
    "jina_embeddings_v3": Row(
        llama_cpp=_JINA_V3, defaults=sizes(1024, 4096, 24, 16, 8194) | TIED | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        },
        names=replace(
            _FLASH_NAMES, class_name="JinaEmbeddingsV3Model",
            layers="mixer.Wqkv mixer.out_proj mlp.fc1 mlp.fc2 norm1 norm2",
        ),
    ),
    "nomic_bert": Row(
        llama_cpp=_NOMIC, publish=_publish_nomic, defaults=sizes(768, 3072, 12, 12, 2048) | {
            "hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
        },
        names=replace(
            _FLASH_NAMES, class_name="NomicBertModel",
            layers="attn.Wqkv attn.out_proj mlp.fc11 mlp.fc12 mlp.fc2 norm1 norm2",
        ),
    ),
    "modernbert": Row(
        llama_cpp=_MODERN, variants=(_MODERN_RANKS,), restate=_restate_modern,
        defaults=sizes(768, 1152, 22, 12, 8192) | TIED | {
            "hidden_activation": "gelu", "layer_norm_eps": 1e-5, "sliding_window": 128, "classifier_pooling": "cls",
        },
        names=Names(
            class_name="ModernBertModel", layers="attn.Wqkv attn.Wo attn_norm mlp.Wi mlp.Wo mlp_norm",
            outside=below("model", "embeddings.tok_embeddings embeddings.norm final_norm")
            + " head.dense head.norm classifier",
            keys=NO_GROUPS | {
                "sliding_window": "local_attention", "layer_norm_eps": "norm_eps", "rope_theta": "global_rope_theta",
                "rope_local_base_freq": "local_rope_theta",
            },
        ),
    ),
    "eurobert": Row(
        llama_cpp=Architecture(
            name="EUROBERT", unused={r"lm_head\..*": UNUSED}, rope=Rope(DEFAULT), classes=_PRETRAINED, encoder=True,
            values=SILU_ONLY | NO_BIAS,
        ),
        defaults=sizes(768, 3072, 12, 12, 8192) | LIKE_LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False},
        names=Names(class_name="EuroBertModel"),
    ),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA_ROW),
}  # fmt: skip
