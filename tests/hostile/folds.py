"""Bad inputs of --fold: names, combinations, moments of other models, and masters that are folded already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from folding_models import CONFIG, llama, llama_tensors, say_rotated
from helpers import run_command, write_checkpoint
from hostile.case import Case, stored
from random_moments import write_random_moments

NORM = "model.layers.1.post_attention_layernorm.weight"
FOLD = "quantize src out --fold equalize"
WITH_DATA = FOLD + " --calibration m.safetensors"
VLLM = "--target vllm --group-size 32"
GPTQ = "--rounding gptq --calibration m.safetensors"


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


def quantized(fold: str | None, out: str, calibration: str | None = None) -> Callable[[Path], None]:
    """A step that quantizes src."""

    def step(folder: Path) -> None:
        moments = {} if calibration is None else {"calibration": str(folder / calibration)}
        run_command({"quantize": str(folder / "src"), "fold": fold, **moments}, folder / out)

    return step


def moments(of: str = "src", out: str = "m.safetensors", rows: int = 300) -> Callable[[Path], None]:
    """A step that writes moments of a model."""

    def step(folder: Path) -> None:
        write_random_moments(folder / of, folder / out, tokens=lambda name, matrix: rows)

    return step


def nan_gain(folder: Path) -> None:
    """Change a gain of src to NaN."""
    path = folder / "src" / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin = 8 + length + json.loads(data[8 : 8 + length])[NORM]["data_offsets"][0]
    data[begin : begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)


def scales_file(folder: Path) -> None:
    """Write a file with the metadata of calibrate's scales."""
    (folder / "m.safetensors").write_bytes(stored({"a_awq_scale": ("F16", [1], b"\0\0")}))


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
            "quantize src out --calibration m.safetensors": ("--calibration", "--fold"),
            "plan src --calibration m.safetensors": ("--calibration", "--fold"),
            "export master out --target bf16 --fold equalize": ("--fold", "bf16"),
            f"export master out {VLLM} --rounding plain --calibration m.safetensors": ("--calibration", "--fold"),
        },
        quantized(None, "master"),
        moments(),
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
        "fold-moments-missing",
        {
            WITH_DATA: ("m.safetensors", "no such file", "calibrate --moments"),
            f"export master out {VLLM} --fold equalize --calibration m.safetensors": ("m.safetensors", "no such file"),
        },
        quantized(None, "master"),
    ),
    folding(
        "fold-moments-of-another-model",
        {
            WITH_DATA: ("m.safetensors", "this checkpoint", "another checkpoint"),
            f"export master out {VLLM} --fold equalize --calibration m.safetensors": ("m.safetensors", "this master"),
            f"export master out {VLLM} --fold equalize --source src --calibration m.safetensors": (
                "m.safetensors",
                "this original",
            ),
        },
        quantized(None, "master"),
        lambda folder: llama(folder / "other", "F32"),
        moments("other"),
    ),
    folding(
        "fold-moments-of-a-folded-model",
        {
            WITH_DATA: ("m.safetensors", "this checkpoint", "another checkpoint"),
            f"export folded out {VLLM} --source src {GPTQ}": ("m.safetensors", "this original"),
        },
        quantized("equalize", "folded"),
        moments("folded"),
    ),
    folding("fold-moments-that-are-something-else", {WITH_DATA: ("m.safetensors", "moments")}, scales_file),
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
            f"export rotated out {VLLM} --source src {GPTQ}": ("--source", "--fold rotate", "quantize again"),
        },
        quantized("equalize", "rotated"),
        lambda folder: say_rotated(folder / "rotated"),
        moments("rotated"),
    ),
    folding(
        "folded-master-with-moments-of-the-original",
        {f"export folded out {VLLM} {GPTQ}": ("m.safetensors", "folded from", "add --source")},
        quantized("equalize", "folded"),
        moments(),
    ),
    folding(
        "fold-with-moments-that-the-original-lacks-now",
        {
            f"export folded out {VLLM} --source src": ("--source", "folded with the moments", "--calibration"),
            f"export folded out {VLLM} --source src {GPTQ.replace('m.', 'n.')}": ("--source", "--calibration"),
            f"export folded out {VLLM} --source src --calibration n.safetensors": (
                "--source",
                "folded with the moments",
            ),
            f"export folded out {VLLM} --rounding plain --calibration m.safetensors": (
                "--calibration",
                "--rounding gptq",
            ),
        },
        moments(),
        quantized("equalize", "folded", calibration="m.safetensors"),
        moments(out="n.safetensors", rows=301),
    ),
]
