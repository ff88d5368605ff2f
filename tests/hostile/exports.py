"""Bad inputs: options of exports, masters that a target cannot store, and wrong originals."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostile.case import (
    CONFIG,
    DOWN,
    EXPORT,
    FILE,
    NORM,
    UP,
    VECTOR,
    WEIGHT,
    Case,
    Content,
    Prepare,
    remembered,
    stored,
    write,
)
from hostile.masters import DOWN_192, Damage, overwrite, run_quantize, set_json

EXPORT_SRC: dict[str, Content] = {
    FILE: stored({UP: WEIGHT, DOWN: DOWN_192, NORM: VECTOR}),
    CONFIG: {"model_type": "llama"},
}
VLLM, MLX, GGUF = (f"export master out --target {target}" for target in ("vllm", "mlx", "gguf"))
TORCHAO = "export master out --target torchao --packing plain"  # in tiles, layers as narrow as these stay plain


@functools.cache
def source_and_master(config: str) -> Prepare:
    def make(folder: Path) -> None:
        write(folder, {**EXPORT_SRC, CONFIG: config})
        run_quantize(folder / "src", folder / "master")

    return remembered(make)


def exporting(
    name: str,
    commands: Mapping[str, tuple[str, ...] | None],
    config: dict[str, Any] | None = None,
    damage: Damage = lambda folder: None,
    files: Mapping[str, Content] | None = None,
    own_process: bool = False,
) -> Case:
    """A source and its master, with another configuration, or damaged. damage: gets the folder of both."""

    def prepare(folder: Path) -> None:
        source_and_master(json.dumps(EXPORT_SRC[CONFIG] if config is None else config))(folder)
        damage(folder)

    return Case(name, commands, files or {}, prepare=prepare, own_process=own_process)


def of_master(damage: Damage) -> Damage:
    return lambda folder: damage(folder / "master")


ABSENT: dict[str, Content] = {
    "mlx/__init__.py": "raise ImportError(\"No module named 'mlx'\")\n",
    "mlx/__pycache__": "",  # a file, so that none is written
}


CASES = [
    exporting(
        "group-size-that-no-target-has",
        {
            TORCHAO + " --group-size 100": ("--group-size 100", "torchao", "32, 64, 128, 256"),
            VLLM + " --group-size 100": ("--group-size 100", "vllm", "32, 64, 128"),
            MLX + " --group-size 100": ("--group-size 100", "mlx", "32, 64, 128"),
            VLLM + " --group-size 0": ("--group-size 0", "32, 64, 128"),
            TORCHAO + " --group-size -128": ("--group-size -128",),
        },
    ),
    exporting(
        "group-size-that-does-not-divide",
        {
            TORCHAO + " --group-size 128": (DOWN, "--group-size 128", "rows of 192", "32, 64"),
            VLLM + " --group-size 128": (DOWN, "--group-size 128", "rows of 192", "32, 64"),
        },
    ),
    exporting(
        "bits-that-no-target-has",
        {
            TORCHAO + " --bits 3": ("--bits 3", "the format int4 has 4"),
            VLLM + " --bits 3": ("--bits 3", "vllm", "takes 4, 8"),
            MLX + " --bits 7": ("--bits 7", "mlx", "2, 3, 4, 5, 6, 8"),
            MLX + " --mode mxfp4 --bits 8": ("--bits 8", "mode mxfp4", "takes 4"),
            EXPORT + " --bits 4": ("--bits", "bf16"),
            VLLM + " --bits 0": ("--bits 0",),
        },
    ),
    exporting(
        "option-of-another-target",
        {
            TORCHAO + " --mode affine": ("--mode", "torchao"),
            VLLM + " --packing plain": ("--packing", "vllm"),
            VLLM + " --dtype source": ("--dtype", "vllm"),
            MLX + " --packing plain": ("--packing", "mlx"),
            EXPORT + " --qparams minmax": ("--qparams", "bf16"),
        },
    ),
    exporting("qparams-best-of-rows", {VLLM + " --format fp8 --qparams best": ("--qparams best", "minmax")}),
    exporting("format-unknown", {VLLM + " --format fp4": ("--format fp4", "mxfp4a16")}),
    exporting("format-of-other-bits", {VLLM + " --format mxfp4 --bits 8": ("--bits 8", "mxfp4", "4")}),
    exporting(
        "rounding-without-or-beside-what-it-needs",
        {
            VLLM + " --rounding gptq": ("--rounding gptq", "--calibrate as well"),
            VLLM + " --rounding plain --calibrate self": ("--calibrate", "--rounding gptq"),
            TORCHAO + " --rounding nearest": ("--rounding nearest", "plain, gptq"),
            TORCHAO + " --rounding gptq --calibrate self --qparams minmax": ("--rounding gptq", "--qparams best"),
            VLLM + " --format fp8 --rounding gptq --calibrate self": ("--rounding gptq", "fp8"),
            EXPORT + " --rounding gptq --calibrate self": ("--calibrate", "bf16"),
        },
    ),
    exporting(
        "calibrate-that-cannot-be",
        {
            VLLM + " --calibrate nowhere.txt": ("nowhere.txt", "No such file"),
            "export src out -t vllm --calibrate src": ("src", "*.txt in the folder"),
        },
    ),
    exporting(
        "calibrate-beside-other-options",
        {
            VLLM + " --calibrate self --ray local": ("--ray", "--calibrate"),
            VLLM + " --calibrate self --calibration-tokens 100": ("--calibration-tokens", "2048"),
        },
    ),
    exporting(
        "export-onto-an-input",
        {
            "export master master -t vllm": ("master",),
            "export master master/out -t torchao": ("master/out",),
            "export src src/out -t vllm": ("src/out",),
            "export master . -t vllm": ("master",),
        },
    ),
    exporting("export-of-nothing", {"export nowhere out -t torchao": ("nowhere", "no such")}),
    exporting(
        "export-of-nan-norms",
        {
            TORCHAO: (UP + "_norms", "blake3_of_pieces", "verify"),
            VLLM: (UP + "_norms", "blake3_of_pieces"),
            TORCHAO + " --qparams minmax": (UP + "_norms", "blake3_of_pieces"),
            EXPORT: (UP + "_norms", "blake3_of_pieces"),
        },
        damage=of_master(overwrite("model-00001-of-00003.safetensors", UP + "_norms", 0, b"\x00\x7e")),
    ),
    exporting(
        "export-of-a-newer-master",
        dict.fromkeys((TORCHAO, VLLM, MLX), ("config.json", "format_version", "99")),
        damage=of_master(set_json("config.json", "quantization_config", "format_version", to=99)),
    ),
    exporting(
        "export-of-transposed-weights",
        dict.fromkeys((TORCHAO, VLLM), ("config.json", "gpt2", "transposed", "mlx")),
        {"model_type": "gpt2"},
    ),
    exporting(
        "export-of-layers-that-transformers-renames",
        {TORCHAO: ("config.json", "vit", "--target vllm or bf16")},
        {"model_type": "vit"},
    ),
    exporting(
        "export-of-layers-that-transformers-cuts",
        dict.fromkeys((TORCHAO, VLLM), ("config.json", "dinov2", "--target bf16")),
        {"model_type": "encoder-decoder", "encoder": {"model_type": "dinov2"}, "decoder": {"model_type": "bert"}},
    ),
    exporting(
        "gguf-type-misspelled",
        {
            GGUF + " --type q4_k_n": ("--type q4_k_n", "the nearest is 'Q4_K_S'"),
            GGUF + " --type fp8": ("--type fp8", "expected F32, F16, BF16, Q8_0"),
            GGUF + " --set *.attn_v.weight": ("--set", "expected PATTERN=FORMAT"),
            GGUF + " --set *=q9_k": ("--set *=q9_k", "expected Q8_0"),
        },
    ),
    exporting(
        "gguf-options-that-exclude-each-other",
        {
            GGUF + " --target-size 1GB --type q4_0": ("--target-size", "leave out --type"),
            GGUF + " --rounding gptq": ("--rounding gptq", "expected --calibrate as well"),
            GGUF + " --bits 4": ("--bits", "gguf"),
        },
    ),
    exporting(
        "gguf-of-an-architecture-that-is-not-covered",
        {GGUF: ("config.json", "cannot hold a model of type zamba2", "--target bf16")},
        {"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]},
    ),
    exporting("gguf-without-a-configuration", {GGUF: ("config.json",)}, {}),
    exporting("target-misspelled", {"export master out --target mlx_q4": ("--target mlx_q4", "'mlx-q4'")}),
    Case(
        "export-of-no-linear-layer",
        dict.fromkeys((TORCHAO, VLLM), ("embedding",)),
        prepare=lambda folder: (
            write(folder, {FILE: stored({"model.embed_tokens.weight": WEIGHT}), CONFIG: {"model_type": "llama"}}),
            run_quantize(folder / "src", folder / "master"),
        )[0],
    ),
    exporting(
        "export-without-mlx",
        {MLX: ("mlx", "No module named 'mlx'", "pip install 'mlx", "'mlx-lm>=0.32'")},
        files=ABSENT,
        own_process=True,
    ),
    exporting(
        "export-of-a-model-unknown-to-mlx",
        {MLX: ("mlx-lm", "no_such_model", "--target vllm or torchao or bf16")},
        {"model_type": "no_such_model"},
    ),
    exporting("export-of-an-unnamed-model-to-mlx", {MLX: ("mlx-lm", "model_type", "--target bf16")}, {}),
    exporting("export-of-half-a-configuration-to-mlx", {MLX: ("mlx-lm", "'llama'", "or bf16")}),
]
MODEL, TEXT = "model/model.safetensors", "text.txt"
