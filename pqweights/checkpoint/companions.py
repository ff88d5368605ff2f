"""Which files beside the weights belong to a model: they are copied into masters and exports, everything else is not.

The tables below are the whole rule. They are as wide as what transformers, tokenizers, sentence-transformers, vLLM and
MLX read, and as custom code, licences and model cards need. A repository often holds more: data, logs, plots,
checkpoints of the training, the same weights in other formats.

A folder that somebody else packed may also hold `LICENSE -> ../../.ssh/id_rsa`. Copied into a result, and pushed, the
target would be public. So a link is followed only to files of the same folder that are not hidden, and in the cache of
the Hub, where every file is a link, to the blobs of its repository. Files of weights are an exception, because people
keep them on other disks: they are parsed, and nothing but tensors is taken from them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pqweights.checkpoint.names import (
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    PICKLE_SUFFIXES,
    PICTURE_FILE,
)
from pqweights.errors import SourceError

# Files that are read as weights, and may therefore lie anywhere.
PARSED = (".safetensors", *PICKLE_SUFFIXES)
LEADS_OUTSIDE = "a link that leads out of the folder"


def leads_outside(root: Path, path: Path) -> bool:
    """Whether a path in `root` leads, through a link, to a hidden file or to what is not part of that folder.

    The folder itself may be reached through links.
    """
    folder, target = os.path.realpath(root), os.path.realpath(path)
    inner = os.path.relpath(target, folder).split(os.sep)
    if inner[0] != os.pardir:
        return any(part.startswith(".") and part != os.curdir for part in inner)
    return os.path.dirname(target) != _blobs(Path(folder))


def outside(name: str) -> str:
    """Return what is wrong with a file that is such a link."""
    return (
        f"{name}: {LEADS_OUTSIDE}: only weights may lie elsewhere; put the file itself in its place (cp -L copies it), "
        "or remove the link"
    )


def top_level_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, but not of those in folders inside of it, nor of links out of it."""
    paths = (path for path in folder.iterdir() if path.is_file())
    return sorted(path.name for path in paths if not (path.is_symlink() and leads_outside(folder, path)))


def _blobs(folder: Path) -> str | None:
    """Return where the files of a folder lie that is a snapshot in the cache of the Hub, or a part of one.

    Format: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    for snapshot in (folder, *folder.parents):
        snapshots = snapshot.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return str(snapshots.parent / "blobs")
    return None


# Files of weights in any format: a result has weights of its own, so they are never copied along.
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".npy", ".ot"),
    *(".h5", ".hdf5", ".keras", ".pb", ".tflite", ".msgpack", ".onnx", ".onnx_data", ".mlmodel"),
    *(".gguf", ".llamafile", ".nemo", ".distcp", ".pdparams"),
)

# Patterns of file names that are copied, wherever the file lies; case does not matter.
COPIED = (
    # configurations: generation, processors, sentence-transformers, and those that custom code names after itself
    *("*config*.json", "configuration.json", "modules.json", "params.json", "modelcard.json"),
    # tokenizers, by the names that the tokenizers of transformers, mistral-common and tiktoken read
    *("tokenizer*", "*.tokenizer", "tekken.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json"),
    *("*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.bpe", "*vocab*.json", "*vocab*.txt", "*.vocab", "merges*.txt"),
    *("bpe.codes", "dict.txt", "dict.*.txt", "byte_maps.json", "emoji.json"),
    *("calibration.json", "word_shape.json", "word_pronunciation.json", "speaker_embeddings_path.json"),
    # chat templates
    *("*.jinja", "chat_template*.json"),
    # custom code, its kernels and what it needs
    *("*.py", "*.cu", "*.cuh", "*.cpp", "*.h", "requirements*.txt"),
    # licences and cards
    *("*license*", "*licence*", "copying*", "copyright*", "notice*", "*policy*", "readme*", "citation*", "authors*"),
)
# Patterns of paths that are copied although they are weights: the modules of sentence-transformers, such as 2_Dense.
COPIED_WEIGHTS = ("[0-9]_*/*.safetensors",)
# Names that a pattern above matches, and that would mislead: adapters without their weights, formats of the source.
NOT_COPIED = (
    *("adapter_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    "accelerate_config*.json",
)
# Folders of which nothing is copied: the training, and the same model in other formats.
OTHER_FOLDERS = (
    *("checkpoint-*", "runs", "logs", "wandb", "tensorboard"),
    *("original", "onnx", "openvino", "coreml", "gguf", "ggml", "metal", "tflite", "tensorrt"),
)

NOT_NEEDED = "not needed to load the model (--include-files PATTERN copies it)"
OTHER_WEIGHTS = "weights that are not part of the checkpoint read"
NOT_GIVEN = "in the folder of the file that was given; only that file is read"
ABOUT_SOURCE = "it describes the source, not this result"
# Records that pqweights writes beside weights, and writes anew for each result.
OWN_RECORDS = (MANIFEST_FILE, EVALUATION_FILE, PICTURE_FILE)
REASONS = {
    **dict.fromkeys((MANIFEST_FILE, CARD_FILE), ABOUT_SOURCE),
    **dict.fromkeys((EVALUATION_FILE, PICTURE_FILE), "its figures are those of the source"),
}


def check_links(broken: Iterable[str], outside_links: Iterable[str]) -> None:
    """Raise SourceError for a link of a checkpoint to a file that is not there, or that may not lie elsewhere."""
    for name in broken:
        raise SourceError(f"{name}: a broken link: fetch the file again")
    for name in outside_links:
        if name in (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE) or is_needed(name):
            raise SourceError(outside(name))


def companions(
    files: Iterable[str],
    weight_files: Collection[str],
    include: Sequence[str] = (),
    *,
    outside_links: Collection[str] = (),
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return which files of a checkpoint are copied beside its weights, and why each of the others is not.

    files: all files, by their paths in the folder
    weight_files: those that hold the weights that are read
    include: patterns of paths or names that are copied as well
    outside_links: links that lead out of the folder; what they lead to is read if it is weights, and never copied

    Raises SourceError for a pattern that matches nothing that could be copied, or such a link.
    """
    copied: list[str] = []
    left_out: dict[str, str] = {}
    unused = set(include)
    for name in sorted({*files, *outside_links}):
        if name in weight_files or name in (CONFIG_FILE, INDEX_FILE):
            continue
        reason, matching = _reason(name), set[str]()
        if name not in REASONS and ("/" in name or not is_weight_file(name)):  # not files that a result writes itself
            matching = {pattern for pattern in include if is_included(name, [pattern])}
        unused -= matching
        if name in outside_links:
            if reason is None or matching:
                raise SourceError(outside(name))
            reason = LEADS_OUTSIDE
        if reason is None or matching:
            copied.append(name)
        else:
            left_out[name] = reason
    if unused:
        raise SourceError(
            f"`include_files` {min(unused)}: matches no file that could be copied; expected a path in the folder of "
            "the source, or a pattern such as 'data/*' (weights at the top are never copied)"
        )
    return tuple(copied), left_out


def is_included(name: str, include: Collection[str]) -> bool:
    """Whether patterns of paths or names match a file."""
    return _any_match(name, include) or _any_match(name.rpartition("/")[2], include)


def is_weight_file(name: str) -> bool:
    """Whether a file holds weights, or is an index of them, judged by its name."""
    return name.lower().endswith((*WEIGHT_SUFFIXES, ".index.json"))


def is_needed(name: str) -> bool:
    """Whether loading a model may need a file beside its weights, judged by its name."""
    return _reason(name) is None


def _reason(name: str) -> str | None:
    """Return why a file is not copied; None for one that is."""
    if name in REASONS:
        return REASONS[name]
    path = name.lower()
    *folders, base = path.split("/")
    if is_weight_file(name):
        return None if _any_match(path, COPIED_WEIGHTS) else OTHER_WEIGHTS
    if any(_any_match(folder, OTHER_FOLDERS) for folder in folders) or _any_match(base, NOT_COPIED):
        return NOT_NEEDED
    return None if _any_match(base, COPIED) else NOT_NEEDED


def _any_match(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
