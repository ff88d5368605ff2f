"""How llama.cpp runs models that give vectors of tokens instead of predicting the next one; see llama_cpp.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pqweights.models import llama_cpp
from pqweights.models.llama_cpp import (
    LAYER_NORM,
    LAYERS,
    QKV,
    SILU,
    TANH_GELU,
    Architecture,
    Scaled,
    Setting,
)

# llama.cpp approximates gelu by tanh.
GELU = {"hidden_act": ("gelu", *TANH_GELU)}
RANKS = ("ForSequenceClassification",)
PRETRAINED = ("ForMaskedLM", "ForPreTraining")
_ALL = QKV | {"ATTN_QKV", "ATTN_OUT", "FFN_UP", "FFN_DOWN"}
_NORMS = frozenset({"TOKEN_EMBD_NORM", "ATTN_OUT_NORM", "LAYER_OUT_NORM"})
_SCORES = frozenset({"CLS", "CLS_OUT"})

_BERT = Architecture(
    name="BERT",
    prefix=r"(bert|distilbert|roberta)\.",
    unused=r"pooler\..*|cls\..*|lm_head\..*|vocab_.*|embeddings\.position_ids",
    norm=LAYER_NORM,
    settings=(Setting("token_type_count", "type_vocab_size"),),
    shapes={"POS_EMBD": ("max_position_embeddings", "hidden_size")},
    needed=("token_embd_norm.weight", "position_embd.weight", "token_types.weight"),
    rope=frozenset(),
    free_head_dim=False,
    classes=PRETRAINED,
    encoder=True,
    biases=_ALL | _NORMS,
    values=GELU | {"position_embedding_type": ("absolute", None), "is_decoder": (False, None)},
)


def _with_scores(model: Architecture, **changed: Any) -> Architecture:
    """Return an architecture that also has a head for classes. changed: what differs with that"""
    needed = (*model.needed, "cls.weight", "cls.output.weight")
    ranks = replace(model, classes=RANKS, pooling="RANK", biases=model.biases | _SCORES, needed=needed, **changed)
    return replace(model, variants={"ranks": ranks})


BERT = _with_scores(
    _BERT,
    unused=r"embeddings\.position_ids",
    modules={r"pooler\.dense": "classifier.dense", "classifier": "classifier.out_proj"},
)
# It has no types of tokens, and norms whose epsilon no configuration states.
DISTILBERT = replace(
    _BERT,
    settings=(Setting("token_type_count", "1"),),
    needed=("token_embd_norm.weight", "position_embd.weight"),
    values={"activation": ("gelu",), "layer_norm_eps": (1e-12,)},
)
# Positions are numbered from that of padding on.
ROBERTA = _with_scores(replace(_BERT, first_position="pad_token_id"))
JINA_BERT_V3 = replace(
    _BERT,
    name="JINA_BERT_V3",
    shapes={},
    needed=("token_embd_norm.weight", "token_types.weight"),
    rope=frozenset({"default"}),
    values=GELU,
)
NOMIC_BERT = replace(
    JINA_BERT_V3,
    name="NOMIC_BERT",
    biases=_NORMS,
    values={
        "hidden_act": ("silu",), "activation_function": ("swiglu", None), "prenorm": (False, None),
        "moe_every_n_layers": (0, None), "rotary_emb_fraction": (1.0, None), "rotary_emb_interleaved": (False, None),
        "rotary_emb_scale_base": (None,),
    },
)  # fmt: skip
_MODERN_BERT = Architecture(
    name="MODERN_BERT",
    prefix=r"model\.",
    unused=r"head\..*|decoder\..*",
    norm=LAYER_NORM,
    shapes={"FFN_UP": ("intermediate_size * 2", "hidden_size")},
    uneven=r"attn_norm\.weight",
    rope=frozenset({"default"}),
    free_head_dim=False,
    windows=LAYERS,
    window_listed=True,
    first_period=3,
    classes=PRETRAINED,
    encoder=True,
    values={"hidden_activation": ("gelu",)},
)
MODERN_BERT = _with_scores(
    _MODERN_BERT,
    unused="",
    modules={"classifier": "classifier.out_proj", r"head\.dense": "classifier"},
    values={**_MODERN_BERT.values, "classifier_pooling": ("mean",)},
)
EUROBERT = Architecture(
    name="EUROBERT",
    unused=r"lm_head\..*",
    rope=frozenset({"default"}),
    classes=PRETRAINED,
    encoder=True,
    values=SILU | {"attention_bias": (False, None)},
)
_GEMMA_EMBEDDING = replace(
    llama_cpp.GEMMA3,
    name="GEMMA_EMBEDDING",
    classes=("TextModel",),
    encoder=True,
    layers_of_27b=None,
    values={**llama_cpp.GEMMA3.values, "use_bidirectional_attention": (True,)},
)
GEMMA3 = replace(llama_cpp.GEMMA3, variants={"use_bidirectional_attention": _GEMMA_EMBEDDING})

_T5 = Architecture(
    name="T5",
    unused=r"encoder\.embed_tokens\.weight|decoder\.embed_tokens\.weight",
    settings=(
        Setting("relative_attn_buckets_count", "relative_attention_num_buckets"),
        Setting("decoder_block_count", "num_decoder_layers"),
        Setting("decoder_start_token_id", "decoder_start_token_id", zero=True),
    ),
    scaled={r"decoder\.final_layer_norm": Scaled(("decoder_scale",))},
    needed=("enc.output_norm.weight", "dec.output_norm.weight"),
    uneven=r"attn_rel_b\.weight",
    equal=(("num_decoder_layers", "num_hidden_layers"),),
    rope=frozenset(),
    values={"feed_forward_proj": ("relu", "gated-gelu"), "relative_attention_max_distance": (128, None)},
)
_T5_ENCODER = replace(
    _T5,
    name="T5ENCODER",
    settings=_T5.settings[:1],
    scaled={},
    needed=_T5.needed[:1],
    equal=(),
    classes=("EncoderModel",),
    encoder=True,
)
T5 = replace(_T5, variants={"encodes": _T5_ENCODER})
MT5 = replace(T5, scaled={})
