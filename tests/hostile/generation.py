"""Bad inputs: models, prompts and options of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calls import quantize
from hostile.case import Case, Content
from hostile.evaluation import BERT, GOOD_MODEL, evaluating, language_model_config, without_tensor

from pqweights.checkpoint.source import open_local
from pqweights.planning.recipe import load_recipe

GENERATE = "generate model --prompt w1"
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 16,
}

HEADS_OF_4 = language_model_config() | {"num_attention_heads": 8, "num_key_value_heads": 8}


def generating(name: str, *fragments: str, command: str = GENERATE, **changed: Any) -> Case:
    """An undamaged model, except for some files by key, as `evaluating` has them."""
    return evaluating(f"generate-{name}", *fragments, command=command, **changed)


def caching(name: str, spec: str, *fragments: str, **changed: Any) -> Case:
    """An undamaged model, except for some files by key, and a quantized cache."""
    return generating(f"kv-cache-{name}", *fragments, command=f"{GENERATE} --kv-cache {spec}", **changed)


def with_file(name: str, content: Content, *fragments: str) -> Case:
    """An undamaged model with these settings of generation."""
    return Case(f"generate-{name}", {GENERATE: fragments}, {**GOOD_MODEL, "model/generation_config.json": content})


def with_template(name: str, template: str, *fragments: str) -> Case:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    return Case(f"generate-{name}", {GENERATE: fragments}, {**GOOD_MODEL, "model/tokenizer_config.json": settings})


def make_cut_master(folder: Path) -> None:
    """A master whose file of weights ends too early."""
    quantize(folder / "model", folder / "master", load_recipe("q4"), threads=1)
    (file,) = (folder / "master").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def make_damaged_trellis(folder: Path) -> None:
    """A master of which one block cannot be decoded; packed, this is found when the block is used."""
    quantize(folder / "model", folder / "master", load_recipe("t4"), threads=1)
    (file,) = (folder / "master").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    (head,) = (tensor for tensor in open_local(folder / "master").tensors if tensor.name == "lm_head.weight")
    codes = head.parts[0]
    data[codes.offset : codes.offset + codes.byte_count] = b"\xff" * codes.byte_count
    file.write_bytes(data)


# The keys of per_layer_config are the numbers of layers.
NOT_A_LAYER = {**language_model_config(), "per_layer_config": {"0": {"intermediate_size": 64}, "dtype": "float32"}}
CASES = [
    generating("prompt-empty", "--prompt", "found ''", command="generate model --prompt="),
    generating("temperature-negative", "--temperature", "found -1", command=GENERATE + " --temperature -1"),
    generating("temperature-nan", "--temperature", "found nan", command=GENERATE + " --temperature nan"),
    generating("temperature-no-number", "--temperature", "number", command=GENERATE + " --temperature hot"),
    generating("max-tokens-zero", "--max-tokens", "found 0", command=GENERATE + " --max-tokens 0"),
    generating("seed-negative", "--seed", "found -3", command=GENERATE + " --seed -3"),
    generating("seed-too-large", "--seed", "found 1e+20", command=GENERATE + " --seed " + "9" * 20),
    generating("packed-without-a-master", "--packed", "model", command=GENERATE + " --packed"),
    generating("revision-of-a-folder", "--revision", "repository", command=GENERATE + " --revision main"),
    caching("misspelled", "hadamrd:3", "'hadamrd'", "'hadamard'"),
    caching("heads-of-no-multiple", "hadamard:4", "multiple of 8 coordinates", "found 4", config=HEADS_OF_4),
    generating("model-missing", "nowhere", "no such", command="generate nowhere --prompt w1"),
    generating("model-an-encoder", "BertModel", "not a causal language model", config=BERT),
    generating("model-an-encoder-decoder", "T5ForConditionalGeneration", config=T5),
    generating("config-damaged", "config.json", "JSON", config=b"{"),
    generating("config-refused", "model", "transformers cannot read this configuration", config=NOT_A_LAYER),
    generating("tokenizer-damaged", "model", "tokenizer", tokenizer={"added_tokens": [], "model": 3}),
    generating("tokenizer-missing", "tokenizer", without=("model/tokenizer.json", "model/tokenizer_config.json")),
    generating("weight-missing", "lacks 1 weight", "lm_head.weight", weights=without_tensor("lm_head.weight")),
    with_file("config-of-generation-damaged", b"{", "generation_config.json", "JSON"),
    with_file("config-of-generation-a-list", [], "generation_config.json", "expected a JSON object"),
    with_file(
        "temperature-of-the-model",
        {"do_sample": True, "temperature": -1},
        "generation_config.json",
        "--temperature (=-1)",
    ),
    with_template("template-damaged", "{% for %}", "chat template"),
    with_template("template-that-refuses", "{{ raise_exception('no system here') }}", "no system here"),
    Case(
        "generate-master-cut-off",
        {"generate master --prompt w1": ("model-00001-of-00001.safetensors",)},
        GOOD_MODEL,
        prepare=make_cut_master,
    ),
    Case(
        "generate-trellis-damaged-in-the-middle",
        {"generate master --prompt w1 --packed --quiet": ("lm_head.weight_trellis", "blake3_of_pieces")},
        GOOD_MODEL,
        prepare=make_damaged_trellis,
    ),
]
