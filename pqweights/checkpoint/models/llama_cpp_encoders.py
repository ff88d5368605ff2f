"""How llama.cpp runs models that give vectors of tokens instead of predicting the next one; see llama_cpp.py."""

from __future__ import annotations

from dataclasses import replace

from pqweights.checkpoint.models.llama_cpp import (
    LAYER_NORM,
    QKV,
    TANH_GELU,
    Architecture,
    Setting,
)

# llama.cpp approximates gelu by tanh.
GELU = {"hidden_act": ("gelu", *TANH_GELU)}
RANKS = ("ForSequenceClassification",)
PRETRAINED = ("ForMaskedLM", "ForPreTraining", "EncoderModel")
_ALL = QKV | {"ATTN_OUT", "FFN_UP", "FFN_DOWN"}
_NORMS = frozenset({"TOKEN_EMBD_NORM", "ATTN_OUT_NORM", "LAYER_OUT_NORM"})
_SCORES = frozenset({"CLS", "CLS_OUT"})

_BERT = Architecture(
    name="BERT",
    prefix=r"(bert|distilbert|roberta)\.",
    unused=r"pooler\..*|cls\..*|lm_head\..*|vocab_.*|embeddings\.position_ids",
    norm=LAYER_NORM,
    settings=(Setting("token_type_count", "type_vocab_size"),),
    shapes={"POS_EMBD": ("max_position_embeddings", "hidden_size")},
    final_norm="token_embd_norm.weight",
    rope=frozenset(),
    free_head_dim=False,
    classes=PRETRAINED,
    encoder=True,
    biases=_ALL | _NORMS,
    values=GELU | {"position_embedding_type": ("absolute", None), "is_decoder": (False, None)},
)
BERT = replace(
    _BERT,
    variants={
        "ranks": replace(
            _BERT,
            unused=r"embeddings\.position_ids",
            modules={r"pooler\.dense": "classifier.dense", "classifier": "classifier.out_proj"},
            classes=RANKS,
            pooling="RANK",
            biases=_BERT.biases | _SCORES,
        )
    },
)
