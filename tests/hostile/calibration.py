"""Bad inputs: models and texts of --awq."""

from __future__ import annotations

from typing import Any

from hostile.case import Case
from hostile.evaluation import evaluating, of_broken_models

CALIBRATE = "quantize model out --awq text.txt"


def calibrating(name: str, *fragments: str, options: str = "", **changed: Any) -> Case:
    """An undamaged model and text, except for some files by key, as `evaluating` has them."""
    return evaluating(f"awq-{name}", *fragments, command=CALIBRATE + options, **changed)


CASES: list[Case] = [
    *of_broken_models("awq", CALIBRATE),
    evaluating("awq-text-missing", "nowhere.txt", "No such file", command="quantize model out --awq nowhere.txt"),
    calibrating("text-empty", "at least 2048 tokens", "found 0", text=b""),
    calibrating("text-not-utf8", "text.txt", "UTF-8", text=b"abc\xff"),
    calibrating("text-short", "at least 2048 tokens", "found 40"),
    evaluating("awq-model-missing", "nowhere", command="quantize nowhere out --awq text.txt"),
    evaluating("awq-a-folder", "model", "*.txt", command="quantize model out --awq model"),
    calibrating("and-calibrate", "--awq", "leave out --awq or --calibrate", options=" --calibrate self"),
    evaluating("awq-tokens-alone", "--calibration-tokens", command="quantize model out --calibration-tokens 4096"),
    calibrating("of-few-tokens", "--calibration-tokens", "2048", options=" --calibration-tokens 100"),
]
