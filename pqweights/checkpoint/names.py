"""The names that a master uses: which stored tensors a weight becomes, and what its files are called.

Underscores, not dots, because transformers splits serialized names at the last dot.
"""

from __future__ import annotations

CODES_SUFFIX = "_codes"
NORMS_SUFFIX = "_norms"
AWQ_SUFFIX = "_awq_scale"

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "pqweights.json"
CARD_FILE = "README.md"
EVALUATION_FILE = "pqweights-eval.json"
WORK_FOLDER = ".pqweights"


def codes_name(weight: str) -> str:
    """The name of a weight's packed codes."""
    return weight + CODES_SUFFIX


def norms_name(weight: str) -> str:
    """The name of a weight's block norms."""
    return weight + NORMS_SUFFIX


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
