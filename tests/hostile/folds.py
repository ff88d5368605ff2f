"""Bad inputs of --fold: names, combinations, and masters that are folded already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from folding_models import CONFIG, llama_tensors, say_rotated
from helpers import run_command, write_checkpoint
from hostile.case import Case

NORM = "model.layers.1.post_attention_layernorm.weight"
FOLD = "quantize src out --fold equalize"
VLLM = "--target vllm --group-size 32"


def folding(
    name: str, commands: Mapping[str, tuple[str, ...] | None], *steps: Callable[[Path], None], without: str = ""
) -> Case:
    """A Llama, and what steps make of it. without: a tensor that is missing"""

    def prepare(folder: Path) -> None:
        tensors = {key: values for key, values in llama_tensors().items() if key != without}
        write_checkpoint(folder / "src", tensors, config=CONFIG)
        for step in steps:
            step(folder)

    return Case(name, commands, prepare=prepare)


def quantized(fold: str | None, out: str) -> Callable[[Path], None]:
    """A step that quantizes src."""

    def step(folder: Path) -> None:
        run_command({"quantize": str(folder / "src"), "fold": fold}, folder / out)

    return step


def nan_gain(folder: Path) -> None:
    """Change a gain of src to NaN."""
    path = folder / "src" / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin = 8 + length + json.loads(data[8 : 8 + length])[NORM]["data_offsets"][0]
    data[begin : begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)


def say_calibrated(master: Path) -> None:
    """Make the manifest of a folded master say what earlier versions did of one that they made with moments."""
    manifest = json.loads((master / "pqweights.json").read_bytes())
    manifest["fold"]["calibration"] = "0" * 64
    (master / "pqweights.json").write_text(json.dumps(manifest, indent=2) + "\n")


CASES = [
    folding(
        "fold-unknown",
        {
            "quantize src out --fold equalise": ("--fold equalise", "'equalize'"),
            "plan src --fold everything": ("--fold everything", "equalize"),
            f"export master out {VLLM} --fold rotate": ("--fold rotate", "equalize"),
        },
        quantized(None, "master"),
    ),
    folding(
        "fold-beside-other-options",
        {
            FOLD + " --awq m.safetensors": ("--fold", "--awq"),
            "export master out --target bf16 --fold equalize": ("--fold", "bf16"),
            f"export master out {VLLM} --rounding plain --calibrate self": ("--calibrate", "--fold"),
            f"export master out {VLLM} --fold equalize --calibration-tokens 4096": ("--calibration-tokens",),
        },
        quantized(None, "master"),
    ),
    folding(
        "fold-without-a-norm",
        {
            FOLD: ("--fold", "expected the norm", NORM, "mlp.gate_proj", "leave out --fold"),
            "plan src --fold equalize": (NORM,),
            f"export master out {VLLM} --fold equalize": (NORM,),
            f"export master out {VLLM} --fold equalize --source src": (NORM,),
        },
        quantized(None, "master"),
        without=NORM,
    ),
    folding(
        "fold-with-a-gain-that-is-not-finite",
        {
            FOLD: ("model.safetensors", NORM, "finite gains", "NaN"),
            f"export master out {VLLM} --fold equalize": (NORM, "finite gains"),
        },
        nan_gain,
        quantized(None, "master"),
    ),
    folding(
        "fold-of-a-master",
        {"quantize folded out --fold equalize": ("already a pqweights master",)},
        quantized("equalize", "folded"),
    ),
    folding(
        "fold-of-a-folded-master",
        {
            f"export folded out {VLLM} --fold equalize": ("--fold equalize", "folded already", "leave out --fold"),
            f"export folded out {VLLM} --fold equalize --source src": ("folded already",),
            f"export rotated out {VLLM} --fold equalize": ("folded already (rotate)", "leave out --fold"),
        },
        quantized("equalize", "folded"),
        quantized("equalize", "rotated"),
        lambda folder: say_rotated(folder / "rotated"),  # as an earlier version made it with --fold rotate
    ),
    folding(
        "master-of-a-fold-that-went",
        {
            f"export rotated out {VLLM} --source src": ("--source", "--fold rotate", "quantize again"),
        },
        quantized("equalize", "rotated"),
        lambda folder: say_rotated(folder / "rotated"),
    ),
    folding(
        "fold-with-moments-of-an-earlier-version",
        {f"export folded out {VLLM} --source src": ("--source", "file of moments", "quantize again")},
        quantized("equalize", "folded"),
        lambda folder: say_calibrated(folder / "folded"),
    ),
]
