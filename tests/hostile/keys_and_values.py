"""Bad inputs: models, texts and options of `inspect --kv`."""

from __future__ import annotations

from typing import Any

from hostile.case import Case, Content, stored
from hostile.evaluation import BERT, evaluating, language_model, language_model_config
from hostile.exports import TEXT
from hostile.generation import T5

INSPECT_KV = "inspect model --kv --text text.txt"
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "vocab_size": 16,
}
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 16,
}


def inspecting(name: str, *fragments: str, command: str = INSPECT_KV, **changed: Any) -> Case:
    """An undamaged model and text, except for some files by key, as `evaluating` has them."""
    return evaluating(f"inspect-kv-{name}", *fragments, command=command, **changed)


def with_options(name: str, options: str, *fragments: str) -> Case:
    """Options that do not go together."""
    return inspecting(f"option-{name}", *fragments, command=f"inspect model {options}")


def all_nan() -> Content:
    """Weights of which the projection of keys is NaN."""
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = language_model()
    return stored({**tensors, name: ("F32", [32, 32], b"\0\0\xc0\x7f" * 1024)})


KV_CASES = [
    with_options("no-text", "--kv", "--kv", "expected --text as well"),
    with_options("text-alone", "--text text.txt", "--text", "without --kv"),
    with_options("max-tokens-alone", "--max-tokens 16", "--max-tokens", "without --kv"),
    with_options("tokenizer-alone", "--distribution --tokenizer model", "--tokenizer", "without --kv"),
    with_options("device-alone", "--device auto", "--device", "without --kv"),
    with_options("distribution", "--kv --text text.txt --distribution", "--distribution", "with --kv"),
    with_options("summary", "--kv --text text.txt --no-summary", "--summary", "with --kv"),
    with_options("threads", "--kv --text text.txt --threads 2", "--threads", "with --kv"),
    with_options("allow-pickle", "--kv --text text.txt --allow-pickle", "--allow-pickle", "with --kv"),
    with_options("max-tokens-one", "--kv --text text.txt --max-tokens 1", "--max-tokens"),
    inspecting("text-missing", "nowhere.txt", "No such file", command="inspect model --kv --text nowhere.txt"),
    inspecting("text-a-folder", "model", "directory", command="inspect model --kv --text model"),
    inspecting("text-empty", TEXT, "an empty file", text=b""),
    inspecting("text-not-utf8", TEXT, "UTF-8", "0xff at offset 3", text=b"abc\xff"),
    inspecting("text-short", "at least 16 tokens", "found 3", "a longer text", text="w1 w2 w3"),
    inspecting("too-few-tokens", "at least 16", "raise --max-tokens", command=INSPECT_KV + " --max-tokens 8"),
    inspecting("beyond-the-model", "--max-tokens 17", "16 tokens", command=INSPECT_KV + " --max-tokens 17"),
    inspecting("plot-of-another-kind", "plot.doc", ".png or .svg", command=INSPECT_KV + " --plot plot.doc"),
    inspecting("model-missing", "nowhere", "no such folder", command="inspect nowhere --kv --text text.txt"),
    inspecting("model-an-encoder", "BertModel", "not a causal language model", config=BERT),
    inspecting("model-an-encoder-decoder", "T5ForConditionalGeneration", "not a causal language model", config=T5),
    inspecting("model-with-latent-attention", "deepseek_v3", "multi-head latent attention", config=LATENT),
    inspecting("model-without-attention", "mamba", "expected a model with attention", config=MAMBA),
    inspecting(
        "model-for-mlx",
        "model",
        "an export for mlx-lm",
        config=language_model_config() | {"quantization": {"group_size": 64, "bits": 4}},
    ),
    inspecting("model-without-config", "config.json", without=("model/config.json",)),
    inspecting("tokenizer-missing", "--tokenizer", without=("model/tokenizer.json", "model/tokenizer_config.json")),
    inspecting("tokens-unknown", "token 15", "has only 8", config=language_model_config(8)),
    inspecting("weights-cut-off", "model", "not fully covered", weights=stored(language_model())[:-400]),
    inspecting("keys-nan", "model", "finite keys", "layer 0", weights=all_nan()),
]
