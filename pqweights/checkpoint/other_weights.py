"""Folders without weights at their top: what they hold in place of them, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from pqweights.checkpoint.names import CONFIG_FILE, PICKLE_SUFFIXES
from pqweights.common.units import first_names

# Pickles that are not weights: the state of a training, and weights of other runtimes whose names end alike.
NO_WEIGHTS = (
    *("training_args.*", "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*", "trainer_state*"),
    *("openvino_*.bin", "*_optim_rng.pt", "*mp_rank_*", "*zero_pp_rank_*", "consolidated*.pth", "*_optim_states.pt"),
)
# Patterns of whole paths, in lower case: what the file belongs to, and what makes a model of it.
OTHER_FORMATS = {
    "*zero_pp_rank_*": ("DeepSpeed", "run the zero_to_fp32.py beside it with --safe_serialization"),
    "*mp_rank_*model_states.pt": ("DeepSpeed", "run the zero_to_fp32.py beside it with --safe_serialization"),
    "*mp_rank_*": ("Megatron", "convert it with Megatron's checkpoint converter"),
    "*.distcp": ("torch.distributed.checkpoint (FSDP)", "join its parts with `accelerate merge-weights`"),
    "*.nemo": ("NeMo", "convert it with NeMo's script for Hugging Face"),
    "consolidated*.pth": (
        "the layout of the original code of the model",
        "take the files for transformers, or convert it with the script in transformers' folder of that model",
    ),
    "*flax_model*.msgpack": ("Flax", "load it in transformers with from_flax, and save it"),
    "tf_model*.h5": ("TensorFlow", "load it in transformers with from_tf, and save it"),
    "*.keras": ("Keras", "take the files for transformers"),
    "*.ckpt*.index": ("TensorFlow", "convert it with the script in transformers' folder of that model"),
    "*saved_model.pb": ("TensorFlow", "take the files for transformers"),
    "*.onnx": ("ONNX", "take the model that it was exported from"),
    "*openvino_*.bin": ("OpenVINO", "take the model that it was exported from"),
    "*.tflite": ("TensorFlow Lite", "take the model that it was exported from"),
    "*.mlmodel": ("Core ML", "take the model that it was exported from"),
    "*.pdparams": ("PaddlePaddle", "take the files for transformers"),
    "*rust_model.ot": ("rust-bert", "take the files for transformers"),
    "*.npz": ("MLX before safetensors", "convert it with a current mlx-lm"),
}
_SETTINGS = "model_index.json"  # of diffusers: a pipeline of several models


def holds_weights(name: str) -> bool:
    """Whether a file that is called like PyTorch's pickles may hold the weights of a model."""
    base = name.rpartition("/")[2]
    return not any(fnmatchcase(base, pattern) for pattern in NO_WEIGHTS)


def found_instead(files: Collection[str]) -> str:
    """Return what a folder without weights holds, and what to do, for a message; empty if nothing is known of it."""
    folders = _folders(files)
    if folders and _SETTINGS in files:
        return f"found a pipeline of several models: give one of the folders {first_names(folders)}"
    if folders:
        several = f" (also in {first_names(folders[1:])})" if len(folders) > 1 else ""
        return f"the model lies one folder down, in {folders[0]}/{several}: give that folder"
    for pattern, (kind, advice) in OTHER_FORMATS.items():
        match = next((name for name in files if fnmatchcase(name.lower(), pattern)), None)
        if match is not None:
            return f"found {match}, a checkpoint of {kind}: {advice}, and give the result"
    return ""


def _folders(files: Collection[str]) -> list[str]:
    """Return the folders inside that hold weights, those with a configuration and the newest of a training first."""
    suffixes = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
    folders = {name.rpartition("/")[0] for name in files if name.lower().endswith(suffixes) and holds_weights(name)}

    def order(folder: str) -> tuple[int, bool, int, str]:
        numbers = re.findall(r"\d+", folder) if "checkpoint" in folder else []
        return folder.count("/"), f"{folder}/{CONFIG_FILE}" not in files, -int(numbers[-1]) if numbers else 0, folder

    return sorted(folders - {""}, key=order)
