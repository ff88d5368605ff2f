"""The names of files, of our method, and of the scales of a weight's input channels; a codec names the other parts."""

from __future__ import annotations

import re

AWQ_SUFFIX = "_awq_scale"
QUANT_METHOD = "pqweights"  # of a master, in its quantization_config

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
GENERATION_CONFIG = "generation_config.json"
MANIFEST_FILE = "pqweights.json"
CARD_FILE = "README.md"
EVALUATION_FILE = "pqweights-eval.json"
PICTURE_FILE = "pqweights-kl.svg"
WORK_FOLDER = ".pqweights"
# How the names of weight files end that are PyTorch's pickles.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# In the work folder: which run is under way.
JOURNAL_FILE = "journal.jsonl"
# A folder with a tokenizer has a file that matches one of these patterns.
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "merges.txt", "tekken.json")


def awq_name(weight: str) -> str:
    """Return the stored name of a weight's activation-aware scales."""
    return weight + AWQ_SUFFIX


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def gguf_name(name: str, index: int, count: int) -> str:
    """Return the file name of GGUF file `index` (from 0) of `count`, as llama.cpp numbers them."""
    return f"{name}.gguf" if count == 1 else f"{name}-{index + 1:05d}-of-{count:05d}.gguf"


def file_stem(name: str) -> str:
    """Return a name as one of a file may begin with it; nothing if no letter and no digit is in it."""
    return re.sub(r"[^\w.]+", "-", name, flags=re.ASCII)[:96].strip("-.")


def is_inside(name: str) -> bool:
    """Whether a file name from an index or manifest stays inside the folder of that file."""
    parts = name.replace("\\", "/").split("/")
    return (
        bool(name)
        and "\0" not in name
        and not name.startswith(("/", "\\"))
        and ".." not in parts
        and ":" not in parts[0]
    )
