"""Bad inputs: models, texts and files of `calibrate`."""

from __future__ import annotations

from typing import Any

from hostile.case import Case, stored
from hostile.evaluation import GOOD_MODEL, evaluating, language_model, of_broken_models

CALIBRATE = "calibrate model scales.safetensors --text text.txt"


def there(name: str, command: str, *fragments: str, content: bytes) -> Case:
    """A file at the path where scales are written or read."""
    return Case(name, {command: fragments}, GOOD_MODEL | {"scales.safetensors": content})


def calibrating(name: str, *fragments: str, options: str = "", **changed: Any) -> Case:
    """An undamaged model and text, except for some files by key, as `evaluating` has them."""
    return evaluating(f"calibrate-{name}", *fragments, command=CALIBRATE + options, **changed)


CASES = [
    *of_broken_models("calibrate", CALIBRATE),
    evaluating(
        "calibrate-text-missing",
        "nowhere.txt",
        "No such file",
        command="calibrate model s.safetensors --text nowhere.txt",
    ),
    calibrating("text-empty", "at least 2048 tokens", "found 0", text=b""),
    calibrating("text-not-utf8", "text.txt", "UTF-8", text=b"abc\xff"),
    calibrating("text-short", "at least 2048 tokens", "found 40"),
    evaluating("calibrate-model-missing", "nowhere", command="calibrate nowhere s.safetensors --text text.txt"),
    calibrating("recipe-unknown", "'q55'", "'q5'", options=" --recipe q55"),
    evaluating(
        "calibrate-output-in-no-folder",
        "nowhere",
        "make it first",
        command="calibrate model nowhere/s.safetensors --text text.txt",
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
