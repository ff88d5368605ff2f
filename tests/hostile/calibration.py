"""Bad inputs: models, texts and files of `calibrate`."""

from __future__ import annotations

from typing import Any

from hostile.case import Case, stored
from hostile.evaluation import GOOD_MODEL, evaluating, language_model, language_model_config, without_tensor
from hostile.exports import TEXT

CALIBRATE = "calibrate model scales.safetensors --text text.txt"
LONG_TEXT = " ".join(f"w{number * 7 % 16}" for number in range(300))


def there(name: str, command: str, *fragments: str, content: bytes) -> Case:
    """A file at the path where scales are written or read."""
    return Case(name, {command: fragments}, GOOD_MODEL | {"scales.safetensors": content})


def calibrating(name: str, *fragments: str, options: str = "", **changed: Any) -> Case:
    """An undamaged model and text, except for some files by key, as `evaluating` has them."""
    return evaluating(f"calibrate-{name}", *fragments, command=CALIBRATE + options, **changed)


CALIBRATE_CASES = [
    evaluating(
        "calibrate-text-missing",
        "nowhere.txt",
        "No such file",
        command="calibrate model s.safetensors --text nowhere.txt",
    ),
    calibrating("text-empty", TEXT, "an empty file", text=b""),
    calibrating("text-not-utf8", TEXT, "UTF-8", "0xff at offset 3", text=b"abc\xff"),
    calibrating("text-short", "at least 256 tokens, 16 windows of 16", "found 40"),
    calibrating("window-beyond-the-model", "16 tokens", "found 17", options=" --window 17"),
    evaluating("calibrate-model-missing", "nowhere", command="calibrate nowhere s.safetensors --text text.txt"),
    calibrating("config-damaged", "config.json", "JSON", config=b"{"),
    calibrating(
        "model-unknown",
        "transformers cannot run",
        "no_such_model",
        text=LONG_TEXT,
        config={"model_type": "no_such_model", "max_position_embeddings": 16},
    ),
    calibrating(
        "tokenizer-missing", "model", "--tokenizer", without=("model/tokenizer.json", "model/tokenizer_config.json")
    ),
    calibrating(
        "tokens-unknown-to-the-model",
        "token 15",
        "has only 8",
        text=LONG_TEXT,
        config=language_model_config(8),
        weights=stored(language_model(8)),
    ),
    calibrating(
        "weight-missing", "lacks 1 weight", "lm_head.weight", text=LONG_TEXT, weights=without_tensor("lm_head.weight")
    ),
    calibrating("recipe-unknown", "'q55'", "'q5'", options=" --recipe q55"),
    evaluating(
        "calibrate-output-in-no-folder",
        "nowhere",
        "make it first",
        command="calibrate model nowhere/s.safetensors --text text.txt",
    ),
    calibrating("moments-with-options-of-scales", "--bits", "--moments", options=" --moments --bits 4"),
    there(
        "calibrate-moments-output-foreign",
        CALIBRATE + " --moments --overwrite",
        "scales.safetensors",
        "file of statistics",
        "move it away",
        content=stored(language_model()),
    ),
    there("calibrate-output-there", CALIBRATE, "scales.safetensors", "--overwrite", content=b"x"),
    there(
        "calibrate-output-foreign",
        CALIBRATE + " --overwrite",
        "scales.safetensors",
        "move it away",
        content=stored(language_model()),
    ),
    there(
        "awq-of-something-else",
        "quantize model out --awq scales.safetensors",
        "scales.safetensors",
        "calibrate",
        content=stored(language_model()),
    ),
    there(
        "awq-truncated",
        "quantize model out --awq scales.safetensors",
        "scales.safetensors",
        content=stored(language_model())[:100],
    ),
    evaluating("awq-missing", "nowhere", "no such file", command="quantize model out --awq nowhere"),
    evaluating("awq-a-folder", "model", "no such file", command="quantize model out --awq model"),
]
