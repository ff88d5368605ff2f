"""Bad inputs: models, texts and options of `eval`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hostile.case import Case, Content, Stored, stored
from hostile.exports import MODEL, TEXT

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(16)}, "unk_token": "w0"},
}


def language_model(vocabulary: int = 16, value: float | None = None) -> dict[str, Stored]:
    """The tensors of a Llama of one layer. value: of all weights of lm_head; by default they are random."""
    shapes = {
        "model.embed_tokens": (vocabulary, 32),
        "lm_head": (vocabulary, 32),
        "model.norm": (32,),
        "model.layers.0.input_layernorm": (32,),
        "model.layers.0.post_attention_layernorm": (32,),
        **{f"model.layers.0.self_attn.{name}_proj": (32, 32) for name in "qkvo"},
        "model.layers.0.mlp.gate_proj": (64, 32),
        "model.layers.0.mlp.up_proj": (64, 32),
        "model.layers.0.mlp.down_proj": (32, 64),
    }
    random = np.random.default_rng(2)
    tensors: dict[str, Stored] = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if value is not None and name == "lm_head":
            values[:] = value
        tensors[f"{name}.weight"] = ("F32", list(shape), values.tobytes())
    return tensors


def language_model_config(vocabulary: int = 16) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }


GOOD_MODEL: dict[str, Content] = {
    MODEL: stored(language_model()),
    "model/config.json": language_model_config(),
    "model/tokenizer.json": TOKENIZER,
    "model/tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    TEXT: " ".join(f"w{number * 7 % 16}" for number in range(40)),
}
EVAL = "eval model --text text.txt"


def evaluating(
    name: str, *fragments: str, command: str = EVAL, without: tuple[str, ...] = (), **changed: Content
) -> Case:
    """An undamaged model and text, except for some files by key: text, config, tokenizer, weights."""
    places = {"text": TEXT, "config": "model/config.json", "tokenizer": "model/tokenizer.json", "weights": MODEL}
    files = {file: content for file, content in GOOD_MODEL.items() if file not in without}
    return Case(name, {command: fragments}, files | {places[key]: content for key, content in changed.items()})


def beside(name: str, *fragments: str, vocabulary: int = 16, words: dict[str, int] | None = None) -> Case:
    """A model and a reference with another vocabulary or another tokenizer."""
    tokenizer = TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": words}} if words else TOKENIZER
    files = GOOD_MODEL | {
        "other/model.safetensors": stored(language_model(vocabulary)),
        "other/tokenizer.json": tokenizer,
        "other/config.json": language_model_config(vocabulary),
        "other/tokenizer_config.json": GOOD_MODEL["model/tokenizer_config.json"],
    }
    return Case(name, {EVAL + " --reference other": fragments}, files)


def without_tensor(name: str) -> bytes:
    return stored({key: tensor for key, tensor in language_model().items() if key != name})


BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}
UNKNOWN = {"model_type": "no_such_model", "max_position_embeddings": 16, "vocab_size": 16}
LONG_TEXT = " ".join(f"w{number * 7 % 16}" for number in range(2100))


def of_broken_models(prefix: str, command: str) -> list[Case]:
    """What a command that runs a model over a text says of models that cannot run, or not on this text."""

    def broken(name: str, *fragments: str, **changed: Any) -> Case:
        return evaluating(f"{prefix}-{name}", *fragments, command=command, **({"text": LONG_TEXT} | changed))

    no_tokenizer = ("model/tokenizer.json", "model/tokenizer_config.json")
    lacks = ("lacks 1 weight",) if prefix == "eval" else ("no tensor for",)
    remedy = "--tokenizer" if prefix == "eval" else "tokenizer"
    not_finite = "logits are NaN" if prefix == "eval" else "finite"
    small, nan = stored(language_model(8)), stored(language_model(value=float("nan")))
    return [
        broken("config-damaged", "config.json", "JSON", config=b"{"),
        broken("model-unknown", "transformers cannot", "no_such_model", config=UNKNOWN),
        broken("model-an-encoder", "BertModel", config=BERT),
        broken("tokenizer-missing", "model", remedy, without=no_tokenizer),
        broken("tokens-unknown-to-the-model", "token 15", "has only 8", config=language_model_config(8), weights=small),
        broken("weight-missing", *lacks, "lm_head.weight", weights=without_tensor("lm_head.weight")),
        broken("logits-nan", not_finite, weights=nan),
    ]


CASES = [
    *of_broken_models("eval", EVAL),
    evaluating("eval-text-missing", "nowhere.txt", "No such file", command="eval model --text nowhere.txt"),
    evaluating("eval-text-empty", TEXT, "an empty file", text=b""),
    evaluating("eval-text-blank", TEXT, "only white space", text=b" \n \n"),
    evaluating("eval-text-not-utf8", TEXT, "UTF-8", "0xff at offset 3", text=b"abc\xff"),
    evaluating("eval-text-short", "at least 16 tokens", "found 3", text="w1 w2 w3"),
    evaluating("eval-text-twice", "either --text or --dataset", command=EVAL + " --dataset wikitext"),
    evaluating("eval-window-beyond-the-model", "--window 17", "model", "16 tokens", command=EVAL + " --window 17"),
    evaluating("eval-stride-beyond-the-window", "--stride 17", "16 tokens", command=EVAL + " --stride 17"),
    evaluating("eval-model-missing", "nowhere", command="eval nowhere --text text.txt"),
    evaluating("eval-tokenizer-damaged", "model", "tokenizer", tokenizer={"added_tokens": [], "model": 3}),
    evaluating("eval-tokenizer-elsewhere", "nowhere", "--tokenizer", command=EVAL + " --tokenizer nowhere"),
    evaluating("eval-weights-cut-off", "model", "not fully covered", weights=stored(language_model())[:-400]),
    evaluating("eval-weights-missing", "model", without=(MODEL,)),
    evaluating("eval-packed-without-a-master", "--packed", "model", command=EVAL + " --packed"),
    evaluating("eval-reference-missing", "nowhere", command=EVAL + " --reference nowhere"),
    beside("eval-reference-of-another-vocabulary", "16 tokens", "18", vocabulary=18),
    beside(
        "eval-reference-of-another-tokenizer",
        "model",
        "splits the text differently",
        "other",
        words={f"w{number}": (number + 1) % 16 for number in range(16)},
    ),
]
