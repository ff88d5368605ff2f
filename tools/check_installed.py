"""Quantize, verify, inspect and export a tiny checkpoint with the pqweights that is installed beside this interpreter.

    python tools/check_installed.py

`make dist` runs it in an environment that has nothing but the wheel and what the wheel asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import pqweights
from pqweights.checkpoint.header import TensorSpec, build_header
from pqweights.kernels import native

HIDDEN = 256
SHAPES = {
    "model.embed_tokens.weight": (320, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN),
    "lm_head.weight": (320, HIDDEN),
}


def write_checkpoint(folder: Path) -> None:
    """Gaussian float32 weights under a Llama's names."""
    folder.mkdir()
    random = np.random.default_rng(0)
    specs = [TensorSpec(name, "F32", shape) for name, shape in SHAPES.items()]
    header, stored = build_header("model.safetensors", specs, {"format": "pt"})
    data = b"".join(random.standard_normal(SHAPES[tensor.name], dtype=np.float32).tobytes() for tensor in stored)
    (folder / "model.safetensors").write_bytes(header + data)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def run(*arguments: str) -> str:
    """Run the console script, show the command, and return what it printed on stdout."""
    print("$ pqweights", *(Path(each).name if "/" in each else each for each in arguments), flush=True)
    script = Path(sysconfig.get_path("scripts")) / "pqweights"
    return subprocess.run([str(script), *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def usable_levels() -> list[str]:
    """The levels that are installed and that this processor has."""
    found = sorted(path.stem for path in native.LIBRARIES.glob("*.so"))
    return [level for level in found if native._library(level, native.LIBRARIES).pqweights_runs_here()]


def weights_of(folder: str) -> bytes:
    """The bytes of the weights in a folder."""
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors")))


def main() -> None:
    """Raises CalledProcessError if a command fails, SystemExit if a result is not as it must be."""
    installed = Path(pqweights.__file__).parent
    if installed.parent != Path(sysconfig.get_path("purelib")):
        sys.exit(f"error: expected an installed pqweights, found {installed}")
    with tempfile.TemporaryDirectory() as work:
        source, master, plain, integers = (str(Path(work) / name) for name in ("source", "master", "bf16", "int4"))
        write_checkpoint(Path(source))
        run("quantize", source, master)
        run("verify", master)
        totals = json.loads(run("inspect", master, "--json"))["totals"]
        run("export", master, plain, "--target", "bf16")
        run("verify", plain)
        run("export", master, integers, "--target", "vllm")
        made = weights_of(master), weights_of(integers)
        levels = usable_levels()
        for level in levels:
            os.environ["PQWEIGHTS_LEVEL"] = level
            again = [str(Path(work) / f"{name}-{level}") for name in ("master", "int4")]
            run("quantize", source, again[0])
            run("export", master, again[1], "--target", "vllm")
            if (weights_of(again[0]), weights_of(again[1])) != made:
                sys.exit(f"error: {level} makes other bytes")
    if totals["bits_per_weight"] != 5.125:
        sys.exit(f"error: expected 5.125 bits per weight, found {totals['bits_per_weight']}")
    version = run("--version").strip()
    print(f"the same bytes from {', '.join(levels)}")
    print(f"{version}: {totals['quantized_tensors']} of {totals['tensors']} tensors at 5.125 bits per weight")


if __name__ == "__main__":
    main()
