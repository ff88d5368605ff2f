"""What a master can be exported to. Each target is one module and one line of EXPORTS.

Importing this package imports no target, so that `pqweights export --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pqweights.common.advice import instead
from pqweights.errors import OptionError

if TYPE_CHECKING:
    from pqweights.targets.target import ExportTarget


# What loads the result of each target, and how; pqweights.targets.NAME is its module.
EXPORTS = {
    "bf16": (
        "an ordinary checkpoint; --dtype source keeps the dtypes of the source. Everything loads it:\n"
        "AutoModelForCausalLM.from_pretrained(OUT), vllm serve OUT, ..."
    ),
    "torchao": (
        "linear layers in INT4, for PyTorch on CUDA (sm80 or newer; --packing plain also needs mslk), or with\n"
        "--format int8 or fp8 also on a CPU:\n"
        'pip install transformers accelerate torchao; AutoModelForCausalLM.from_pretrained(OUT, device_map="cuda")'
    ),
    "mlx": (
        "for Apple Silicon (making it needs mlx and mlx-lm):\n"
        "pip install mlx-lm; mlx_lm.generate --model OUT --prompt ..."
    ),
    "gguf": (
        "one file for llama.cpp, Ollama and LM Studio; --type TYPE, or --target-size SIZE:\n"
        "llama-cli -m OUT/*.gguf; ollama create NAME -f OUT/Modelfile"
    ),
    "comfyui": (
        "image and video models in FP8, with one scale for each matrix; put the file into models/diffusion_models of\n"
        "ComfyUI"
    ),
    "vllm": (
        "compressed-tensors:\n"
        "vllm serve OUT, or pip install compressed-tensors; AutoModelForCausalLM.from_pretrained(OUT)"
    ),
}

# Other names of targets.
ALIASES = {"torchao-int4": "torchao", "mlx-q4": "mlx"}


def target_name(stated: object) -> str | None:
    """Return the key in EXPORTS of a name or an alias; None for anything else, which a manifest may state."""
    name = ALIASES.get(stated, stated) if isinstance(stated, str) else None
    return name if name in EXPORTS else None


def get_target(name: str) -> ExportTarget:
    """Import the target of a name or an alias.

    Raises OptionError for an unknown name; the message names the nearest one.
    """
    known = target_name(name)
    if known is None:
        raise OptionError(f"`target` {name}: {instead(name, [*EXPORTS, *ALIASES])}")
    target: ExportTarget = importlib.import_module(f"{__name__}.{known}").TARGET
    return target
