"""The names of files, and of the scales of a weight's input channels. (Those of its other parts are the codec's.)"""

from __future__ import annotations

AWQ_SUFFIX = "_awq_scale"

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "pqweights.json"
CARD_FILE = "README.md"
EVALUATION_FILE = "pqweights-eval.json"
WORK_FOLDER = ".pqweights"
# One of these files is there wherever a tokenizer is.
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "tekken.json")


def awq_name(weight: str) -> str:
    """The name of a weight's activation-aware scales."""
    return weight + AWQ_SUFFIX


def shard_name(index: int, count: int) -> str:
    """The name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def is_inside(name: str) -> bool:
    """Whether a file name from a foreign index or manifest stays inside its folder."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in parts and ":" not in parts[0]
