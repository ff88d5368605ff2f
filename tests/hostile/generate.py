"""Hostile and broken inputs, one folder per case: how to build it, which commands get it, and what each must print.

`python tests/hostile/generate.py FOLDER` writes all of them, with cases.json beside them. tests/cli/test_hostile.py
runs each command inside the folder of its case: the answer must be one line that names the culprit, and nothing in the
folder may change.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Content = bytes | str | list[Any] | dict[str, Any]  # lists and dicts are written as JSON
Prepare = Callable[[Path], None]

QUANTIZE = "quantize src out"
UNPICKLE = "quantize src out --allow-pickle"
RECIPE = "quantize src out --recipe recipe.yaml"
VERIFY, INSPECT, EXPORT = "verify master", "inspect master", "export master out --target bf16"


@dataclass(frozen=True)
class Case:
    """One bad input.

    name: the name of its folder
    commands: each with the fragments that its error must contain; None if the command need not notice, but may not
        crash
    files: what the folder holds
    prepare: builds what cannot be written down as files
    own_process: whether the input could crash the interpreter
    """

    name: str
    commands: Mapping[str, tuple[str, ...] | None]
    files: Mapping[str, Content] = field(default_factory=dict)
    _: KW_ONLY
    prepare: Prepare | None = None
    own_process: bool = False


def build(case: Case, folder: Path) -> None:
    """Write a case into its folder."""
    folder.mkdir(parents=True)
    write(folder, case.files)
    if case.prepare is not None:
        case.prepare(folder)


def write(folder: Path, files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


# --- safetensors files, written by hand ---

UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
FILE = "src/model.safetensors"
SHARD_1, SHARD_2 = "src/model-00001-of-00002.safetensors", "src/model-00002-of-00002.safetensors"
INDEX = "src/model.safetensors.index.json"
CONFIG = "src/config.json"
WEIGHT_DATA = np.random.default_rng(0).standard_normal(256).astype(np.float32).tobytes()  # of shape [2, 128]

Stored = tuple[str, list[int], bytes]  # dtype, shape, data
WEIGHT: Stored = ("F32", [2, 128], WEIGHT_DATA)
VECTOR: Stored = ("F32", [4], b"\0\0\x80\x3f" * 4)


def raw(header: bytes | str, data: bytes = b"") -> bytes:
    """A file with exactly this header text."""
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2, 128), offsets: Any = (0, 1024)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def headed(header: dict[str, Any], data: bytes = WEIGHT_DATA) -> bytes:
    """A file with this header and these data, whether they agree or not."""
    return raw(json.dumps(header), data)


def stored(tensors: Mapping[str, Stored]) -> bytes:
    """A well-formed file."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = entry(dtype, shape, [len(data), len(data) + len(values)])
        data += values
    return headed(header, data)


def weight_with(value: float, row: int, column: int) -> Stored:
    values = np.frombuffer(WEIGHT_DATA, dtype=np.float32).reshape(2, 128).copy()
    values[row, column] = value
    return ("F32", [2, 128], values.tobytes())


def zeros(dtype: str, *shape: int) -> Stored:
    bits = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64}[dtype]
    return (dtype, list(shape), bytes(int(np.prod(shape)) * bits // 8))


GOOD = stored({UP: WEIGHT, NORM: VECTOR})
GOOD_SRC: dict[str, Content] = {FILE: GOOD, CONFIG: {"model_type": "llama"}}


def one_file(name: str, data: bytes, *fragments: str) -> Case:
    """A source with a single file."""
    return Case(name, {QUANTIZE: ("model.safetensors", *fragments)}, {FILE: data})


def two_shards(
    name: str,
    weight_map: Any,
    *fragments: str,
    files: Mapping[str, Content] | None = None,
    index: Content | None = None,
) -> Case:
    """A source of two shards with this weight_map, or with this index."""
    shards = {SHARD_1: stored({UP: WEIGHT}), SHARD_2: stored({DOWN: WEIGHT})}
    content = index if index is not None else {"metadata": {}, "weight_map": weight_map}
    return Case(name, {QUANTIZE: fragments}, {**shards, INDEX: content, **(files or {})})


GOOD_MAP = {UP: Path(SHARD_1).name, DOWN: Path(SHARD_2).name}

# --- headers ---

NAN, INFINITY = float("nan"), float("inf")

WEIGHT_CASES = [
    one_file("nan-in-a-weight", stored({UP: weight_with(NAN, 1, 5)}), UP, "[1, 5]", "NaN"),
    one_file("infinity-in-a-weight", stored({UP: weight_with(INFINITY, 0, 127)}), UP, "[0, 127]", "infinity"),
    one_file("minus-infinity-in-a-weight", stored({UP: weight_with(-INFINITY, 1, 0)}), UP, "[1, 0]", "infinity"),
    one_file(
        "nan-in-a-bf16-weight",
        stored({UP: ("BF16", [3, 128], b"\0\0" * 128 + b"\0\0" * 7 + b"\xc0\x7f" + b"\0\0" * 120 + b"\0\0" * 128)}),
        UP,
        "[1, 7]",
    ),
    two_shards(
        "nan-after-a-finished-shard",
        GOOD_MAP,
        "model-00002-of-00002.safetensors",
        DOWN,
        "[1, 127]",
        files={SHARD_2: stored({DOWN: weight_with(NAN, 1, 127)})},
    ),
]

HEADER_CASES = [
    one_file("empty-file", b"", "0 bytes"),
    one_file("shorter-than-8-bytes", b"\x02\0\0\0\0\0\0", "7 bytes"),
    one_file("header-longer-than-the-file", (1000).to_bytes(8, "little") + b"{}", "header length", "1000"),
    one_file("header-above-100-mb", (100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000", "100000001"),
    one_file("header-length-of-all-ones", b"\xff" * 8 + b"{}", "header length", str(2**64 - 1)),
    one_file("header-not-utf-8", raw(b'{"\xff\xfe": 1}'), "header"),
    one_file("header-not-json", raw('{"a": '), "header", "JSON"),
    one_file("header-of-no-bytes", raw(""), "header", "JSON"),
    one_file("header-a-list", raw("[]"), "header", "list"),
    one_file("header-a-number", raw("1"), "header", "int"),
    one_file("header-nested-100", raw('{"a":' + "[" * 100 + "]" * 100 + "}"), "'a'", "shape"),
    one_file("header-nested-900", raw('{"a":' + "[" * 900 + "]" * 900 + "}")),
    one_file("header-nested-960", raw('{"a":' + "[" * 960 + "]" * 960 + "}")),
    one_file("header-nested-100000", raw('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "header"),
    one_file("header-number-of-5000-digits", raw('{"a":' + "9" * 5000 + "}"), "header"),
    one_file(
        "header-key-twice",
        raw(f'{{"{UP}": {json.dumps(entry())}, "{UP}": {json.dumps(entry())}}}', WEIGHT_DATA),
        UP,
        "twice",
    ),
    one_file(
        "entry-key-twice",
        raw('{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0\0\0\0"),
        "dtype",
        "twice",
    ),
    one_file("metadata-not-strings", headed({"__metadata__": {"a": 1}, UP: entry()}), "__metadata__"),
    one_file("metadata-a-list", headed({"__metadata__": [], UP: entry()}), "__metadata__"),
    one_file("no-tensors", headed({}, b""), "none"),
    one_file("no-tensors-but-metadata", headed({"__metadata__": {"format": "pt"}}, b""), "none"),
    one_file("entry-a-list", headed({UP: []}), UP),
    one_file("entry-without-a-shape", headed({UP: {"dtype": "F32", "data_offsets": [0, 1024]}}), UP, "shape"),
    one_file("entry-with-another-key", headed({UP: {**entry(), "strides": [1]}}), UP),
    one_file("dtype-unknown", headed({UP: entry("F128")}), UP, "F128"),
    one_file("dtype-a-list", headed({UP: entry(["F32"])}), UP, "dtype"),
    one_file("shape-negative", headed({UP: entry(shape=[-2, -128])}), UP, "shape"),
    one_file("shape-of-floats", headed({UP: entry(shape=[2.0, 128.0])}), UP, "shape"),
    one_file("shape-of-booleans", headed({UP: entry(shape=[True, 256])}), UP, "shape"),
    one_file("shape-of-strings", headed({UP: entry(shape=["2", "128"])}), UP, "shape"),
    one_file("shape-a-number", headed({UP: entry(shape=256)}), UP, "shape"),
    one_file("shape-overflows", headed({UP: entry(shape=[2**40, 2**40])}), UP, "overflows"),
    one_file("shape-overflows-64-bits-to-zero", headed({UP: entry(shape=[2**32, 2**32], offsets=[0, 0])}, b""), UP),
    one_file("shape-overflows-beside-zero", headed({UP: entry(shape=[0, 2**70], offsets=[0, 0])}, b""), UP),
    one_file("shape-too-long-to-print", headed({UP: entry(shape=[1] * 5000)}), UP),
    one_file("half-a-byte", headed({UP: entry("F4", [3], [0, 1])}, b"\0"), UP),
    one_file(
        "offsets-against-the-shape", headed({UP: entry(offsets=[0, 1020])}, WEIGHT_DATA[:1020]), UP, "1024", "1020"
    ),
    one_file("offsets-reversed", headed({UP: entry(offsets=[1024, 0])}), UP),
    one_file("offsets-negative", headed({UP: entry(offsets=[-1024, 0])}), UP, "offsets"),
    one_file("offsets-of-floats", headed({UP: entry(offsets=[0.0, 1024.0])}), UP, "offsets"),
    one_file("offsets-three", headed({UP: entry(offsets=[0, 512, 1024])}), UP, "offsets"),
    one_file("offsets-beyond-the-file", headed({UP: entry(offsets=[2**62, 2**62 + 1024])}), UP, "hole"),
    one_file("tensors-overlap", headed({UP: entry(), DOWN: entry(offsets=[512, 1536])}, bytes(1536)), DOWN, "overlap"),
    one_file("tensors-share-their-bytes", headed({UP: entry(), DOWN: entry()}), "overlap"),
    one_file(
        "hole-between-tensors", headed({UP: entry(), DOWN: entry(offsets=[1032, 2056])}, bytes(2056)), DOWN, "hole"
    ),
    one_file("hole-at-the-start", headed({UP: entry(offsets=[8, 1032])}, bytes(1032)), UP, "hole"),
    one_file("bytes-after-the-data", headed({UP: entry()}, WEIGHT_DATA + b"\0"), "foreign"),
    one_file("truncated-file", headed({UP: entry()}, WEIGHT_DATA[:-1]), "truncated"),
    one_file("name-with-half-a-surrogate", raw('{"\\ud800": ' + json.dumps(entry()) + "}", WEIGHT_DATA), "ud800"),
]

INDEX_CASES = [
    two_shards(
        "index-leaves-the-folder",
        {UP: "../x.safetensors"},
        "model.safetensors.index.json",
        UP,
        "../x.safetensors",
        "same folder",
        files={"x.safetensors": stored({UP: WEIGHT})},
    ),
    two_shards(
        "index-absolute-path",
        {UP: "/x.safetensors"},
        "model.safetensors.index.json",
        UP,
        "/x.safetensors",
        "same folder",
    ),
    two_shards("index-windows-path", {UP: "C:\\x.safetensors"}, "model.safetensors.index.json", UP, "same folder"),
    two_shards("index-windows-parent", {UP: "..\\x.safetensors"}, "model.safetensors.index.json", UP, "same folder"),
    two_shards("index-names-a-number", {UP: 1}, "model.safetensors.index.json", UP),
    two_shards("index-names-the-config", {UP: "config.json"}, UP, "config.json", files={CONFIG: {}}),
    two_shards("index-names-a-missing-file", {**GOOD_MAP, "x": "y.safetensors"}, "y.safetensors", "missing"),
    two_shards("index-names-a-missing-tensor", {**GOOD_MAP, "x": GOOD_MAP[UP]}, GOOD_MAP[UP], "'x'"),
    two_shards(
        "index-names-the-wrong-file", {UP: GOOD_MAP[UP], DOWN: GOOD_MAP[UP], "x": GOOD_MAP[DOWN]}, "00001-of-00002"
    ),
    two_shards("index-swaps-files", {UP: GOOD_MAP[DOWN], DOWN: GOOD_MAP[UP]}, UP, GOOD_MAP[UP], GOOD_MAP[DOWN]),
    two_shards("index-without-a-map", None, "model.safetensors.index.json", "weight_map", index={"metadata": {}}),
    two_shards("index-map-empty", {}, "model.safetensors.index.json", "weight_map"),
    two_shards("index-map-a-list", [UP], "model.safetensors.index.json", "weight_map"),
    two_shards("index-a-list", None, "model.safetensors.index.json", "list", index=[]),
    two_shards("index-not-json", None, "model.safetensors.index.json", "JSON", index="{"),
    two_shards("index-not-utf-8", None, "model.safetensors.index.json", "JSON", index=b'{"\xff": 1}'),
    two_shards("index-nested", None, "model.safetensors.index.json", index="[" * 100_000),
    two_shards("truncated-shard", GOOD_MAP, GOOD_MAP[DOWN], "truncated", files={SHARD_2: stored({DOWN: WEIGHT})[:-1]}),
    two_shards(
        "tensor-in-two-shards",
        GOOD_MAP,
        UP,
        GOOD_MAP[UP],
        GOOD_MAP[DOWN],
        "twice",
        files={SHARD_2: stored({UP: WEIGHT, DOWN: WEIGHT})},
    ),
    Case(
        "several-files-without-an-index",
        {QUANTIZE: ("model.safetensors.index.json", "2 safetensors files")},
        {SHARD_1: stored({UP: WEIGHT}), SHARD_2: stored({DOWN: WEIGHT})},
    ),
]

SOURCE_CASES = [
    Case("source-missing", {QUANTIZE: ("src", "no such")}),
    Case("source-an-empty-folder", {QUANTIZE: ("no weights",)}, prepare=lambda folder: (folder / "src").mkdir()),
    Case("source-of-a-config-alone", {QUANTIZE: ("no weights",)}, {CONFIG: {"model_type": "llama"}}),
    Case("source-of-texts", {QUANTIZE: ("no weights",)}, {CONFIG: {}, "src/tokenizer.json": {}}),
    Case(
        "source-a-text-file", {"quantize src/notes.txt out": ("notes.txt", "header")}, {"src/notes.txt": "hello, world"}
    ),
    Case("gguf-folder", {QUANTIZE: ("GGUF",)}, {"src/model.gguf": b"GGUF\3\0\0\0" + bytes(24), CONFIG: {}}),
    Case("gguf-file", {"quantize src/a.gguf out": ("GGUF",)}, {"src/a.gguf": b"GGUF\3\0\0\0" + bytes(24)}),
    Case("gguf-renamed", {QUANTIZE: ("GGUF", "model.safetensors")}, {FILE: b"GGUF\3\0\0\0" + bytes(24)}),
    Case("config-not-json", {QUANTIZE: ("config.json", "JSON")}, {FILE: GOOD, CONFIG: '{"model_type": '}),
    Case("config-empty", {QUANTIZE: ("config.json", "JSON")}, {FILE: GOOD, CONFIG: b""}),
    Case("config-not-utf-8", {QUANTIZE: ("config.json", "JSON")}, {FILE: GOOD, CONFIG: b'{"a": "\xe9"}'}),
    Case("config-a-list", {QUANTIZE: ("config.json", "list")}, {FILE: GOOD, CONFIG: "[]"}),
    Case("config-nested-300", {QUANTIZE: None}, {FILE: GOOD, CONFIG: '{"a": ' + "[" * 300 + "]" * 300 + "}"}),
    Case("config-nested-700", {QUANTIZE: None}, {FILE: GOOD, CONFIG: '{"a": ' + "[" * 700 + "]" * 700 + "}"}),
    Case("config-nested-100000", {QUANTIZE: ("config.json",)}, {FILE: GOOD, CONFIG: "[" * 100_000}),
    Case(
        "config-with-half-a-surrogate", {QUANTIZE: ("config.json",)}, {FILE: GOOD, CONFIG: '{"bos_token": "\\ud83d"}'}
    ),
    Case(
        "codes-beside-their-weight",
        {QUANTIZE: (UP + "_codes",)},
        {FILE: stored({UP: WEIGHT, UP + "_codes": zeros("U8", 4)})},
    ),
    Case(
        "norms-beside-their-weight",
        {QUANTIZE: (UP + "_norms",)},
        {FILE: stored({UP: WEIGHT, UP + "_norms": zeros("F16", 4)})},
    ),
    Case(
        "source-is-a-master", {"quantize master out": ("already a pqweights master",)}, prepare=lambda f: make_master(f)
    ),
    Case("export-of-a-source", {"export src out --target bf16": ("src", "expected a pqweights master")}, GOOD_SRC),
    Case(
        "inspect-of-a-source", {"inspect src": ("src", "pqweights.json"), "verify src": ("pqweights.json",)}, GOOD_SRC
    ),
    Case("inspect-of-nothing", {"inspect src": ("src",), "verify src": ("src",), "export src out -t bf16": ("src",)}),
]

# --- sources quantized by others ---


def named_by_config(name: str, config: dict[str, Any], *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: GOOD, CONFIG: config})


def named_by_tensors(name: str, tensors: Mapping[str, Stored], *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: stored({NORM: VECTOR, **tensors}), CONFIG: {"model_type": "llama"}})


def compressed(weights: Any, layout: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}}


Q = "model.layers.0.self_attn.q_proj"

FOREIGN_CASES = [
    named_by_config("gptq-config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "config.json", "GPTQ"),
    named_by_config("awq-config", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "config.json", "AWQ"),
    named_by_config(
        "bitsandbytes-config",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "config.json",
        "bitsandbytes",
    ),
    named_by_config(
        "compressed-tensors-int4-config",
        compressed({"num_bits": 4, "type": "int", "group_size": 128}, "pack-quantized"),
        "config.json",
        "compressed-tensors",
        "pack-quantized",
    ),
    named_by_config(
        "compressed-tensors-int8-config",
        compressed({"num_bits": 8, "type": "int"}, "int-quantized"),
        "config.json",
        "compressed-tensors",
        "int-quantized",
    ),
    named_by_config(
        "compressed-tensors-nvfp4-config",
        compressed({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized"),
        "config.json",
        "nvfp4",
    ),
    named_by_config(
        "modelopt-nvfp4-config",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "config.json",
        "NVFP4",
    ),
    named_by_config("mlx-config", {"quantization": {"group_size": 64, "bits": 4}}, "config.json", "MLX"),
    named_by_config(
        "mlx-config-of-two-keys",
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
        "config.json",
        "MLX",
    ),
    named_by_config(
        "torchao-config",
        {"quantization_config": {"quant_method": "torchao", "quant_type": {}}},
        "config.json",
        "torchao",
    ),
    named_by_config("quark-config", {"quantization_config": {"quant_method": "quark"}}, "config.json", "quark"),
    named_by_config("unnamed-config", {"quantization_config": {"bits": 3}}, "config.json", "unnamed"),
    named_by_config(
        "nested-config", {"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "config.json", "GPTQ"
    ),
    named_by_config("compressed-tensors-of-strings", compressed("int4", "pack-quantized"), "config.json"),
    named_by_config(
        "modelopt-of-strings",
        {"quantization_config": {"quant_method": "modelopt", "quantization": "FP8"}},
        "config.json",
    ),
    named_by_tensors(
        "gptq-tensors",
        {
            f"{Q}.qweight": zeros("I32", 16, 128),
            f"{Q}.qzeros": zeros("I32", 1, 16),
            f"{Q}.scales": zeros("F16", 1, 128),
            f"{Q}.g_idx": zeros("I32", 128),
        },
        "model.safetensors",
        f"{Q}.",
        "GPTQ",
    ),
    named_by_tensors(
        "awq-tensors",
        {
            f"{Q}.qweight": zeros("I32", 128, 16),
            f"{Q}.qzeros": zeros("I32", 1, 16),
            f"{Q}.scales": zeros("F16", 1, 128),
        },
        f"{Q}.qweight",
        "AWQ",
    ),
    named_by_tensors(
        "bitsandbytes-4-bit-tensors",
        {
            f"{Q}.weight": zeros("U8", 8192, 1),
            f"{Q}.weight.absmax": zeros("U8", 256),
            f"{Q}.weight.quant_map": zeros("F32", 16),
            f"{Q}.weight.quant_state.bitsandbytes__nf4": zeros("U8", 80),
        },
        f"{Q}.weight.absmax",
        "bitsandbytes",
    ),
    named_by_tensors(
        "bitsandbytes-8-bit-tensors",
        {f"{Q}.weight": zeros("I8", 128, 128), f"{Q}.SCB": zeros("F32", 128)},
        f"{Q}.SCB",
        "bitsandbytes",
    ),
    named_by_tensors(
        "compressed-tensors-int4-tensors",
        {
            f"{Q}.weight_packed": zeros("I32", 128, 16),
            f"{Q}.weight_scale": zeros("BF16", 128, 1),
            f"{Q}.weight_shape": zeros("I64", 2),
        },
        f"{Q}.weight_packed",
        "compressed-tensors",
    ),
    named_by_tensors(
        "compressed-tensors-int8-tensors",
        {f"{Q}.weight": zeros("I8", 128, 128), f"{Q}.weight_scale": zeros("BF16", 128, 1)},
        f"{Q}.weight",
    ),
    named_by_tensors(
        "compressed-tensors-nvfp4-tensors",
        {
            f"{Q}.weight_packed": zeros("U8", 128, 64),
            f"{Q}.weight_scale": zeros("F8_E4M3", 128, 8),
            f"{Q}.weight_global_scale": zeros("F32", 1),
        },
        f"{Q}.weight_",
        "NVFP4",
    ),
    named_by_tensors(
        "modelopt-nvfp4-tensors",
        {
            f"{Q}.weight": zeros("U8", 128, 64),
            f"{Q}.weight_scale": zeros("F8_E4M3", 128, 8),
            f"{Q}.weight_scale_2": zeros("F32"),
        },
        f"{Q}.weight_scale_2",
        "NVFP4",
    ),
    named_by_tensors(
        "mlx-tensors",
        {
            f"{Q}.weight": zeros("U32", 128, 16),
            f"{Q}.scales": zeros("BF16", 128, 2),
            f"{Q}.biases": zeros("BF16", 128, 2),
        },
        f"{Q}.",
        "MLX",
    ),
    named_by_tensors(
        "torchao-tensors",
        {
            f"{Q}._weight_qdata": zeros("I8", 128, 128),
            f"{Q}._weight_scale": zeros("BF16", 128, 1),
            f"{Q}._weight_zero_point": zeros("I8", 128, 1),
        },
        f"{Q}._weight_",
        "torchao",
    ),
]

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def scaled(name: str, tensors: Mapping[str, Stored], config: Content, *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: stored(tensors), CONFIG: config})


PACKED_CASES = [
    scaled("fp8-without-scales", {UP: zeros("F8_E4M3", 2, 128)}, FP8, UP, "without its scales", f"{UP}_scale_inv"),
    scaled(
        "fp8-scales-of-a-wrong-shape",
        {UP: zeros("F8_E4M3", 200, 300), UP + "_scale_inv": zeros("F32", 2, 2)},
        FP8,
        UP + "_scale_inv",
        "[2, 2]",
    ),
    scaled(
        "fp8-scales-per-column",
        {UP: zeros("F8_E4M3", 200, 300), UP + "_scale": zeros("F32", 300)},
        FP8,
        UP + "_scale",
        "[300]",
    ),
    scaled(
        "fp8-scales-of-integers",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale": zeros("I32", 1)},
        FP8,
        UP + "_scale",
        "I32",
    ),
    scaled(
        "fp8-scales-infinite",
        {UP: ("F8_E4M3", [2, 128], b"\x38" * 256), UP + "_scale": ("F32", [1], b"\0\0\x80\x7f")},
        FP8,
        UP,
        "[0, 0]",
    ),
    scaled(
        "fp8-block-of-zero",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale_inv": zeros("F32", 1, 1)},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        "config.json",
        "weight_block_size",
    ),
    scaled(
        "fp8-block-a-string",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale_inv": zeros("F32", 1, 1)},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128x128"}},
        "config.json",
        "weight_block_size",
    ),
    scaled("mxfp4-without-scales", {EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16)}, MXFP4, EXPERTS),
    scaled(
        "mxfp4-scales-of-a-wrong-shape",
        {EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16), EXPERTS + "_scales": zeros("U8", 2, 32, 4)},
        MXFP4,
        EXPERTS,
    ),
    scaled(
        "mxfp4-beside-a-plain-weight",
        {
            EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16),
            EXPERTS + "_scales": zeros("U8", 2, 32, 2),
            EXPERTS: zeros("BF16", 2, 64, 32),
        },
        MXFP4,
        EXPERTS,
        "twice",
    ),
]

# --- pickles ---

BIN = "src/pytorch_model.bin"
PAYLOAD = "payload-ran"  # a malicious pickle writes this file if it is executed


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({PAYLOAD!r}, 'w').close()",)


def saved(value: Any, **options: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    import torch

    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def weights() -> dict[str, Any]:
    import torch

    return {UP: torch.arange(256, dtype=torch.float32).reshape(2, 128), NORM: torch.ones(4)}


def pickled(
    name: str, content: Callable[[], bytes], *fragments: str, command: str = UNPICKLE, own_process: bool = False
) -> Case:
    def prepare(folder: Path) -> None:
        write(folder, {BIN: content()})

    return Case(name, {command: fragments}, prepare=prepare, own_process=own_process)


def rezipped(data: bytes, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """The same zip file with changed records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return stream.getvalue()


def sparse_state() -> dict[str, Any]:
    import torch

    return {UP: torch.eye(128).to_sparse()}


def nested_state() -> dict[str, Any]:
    return {"epoch": 3, "state_dict": weights()}


def transposed_state() -> dict[str, Any]:
    return {UP: weights()[UP].T}


def indexed_pickle(name: str, index: Content, *fragments: str) -> Case:
    def prepare(folder: Path) -> None:
        write(folder, {"src/a.bin": saved(weights()), "src/pytorch_model.bin.index.json": index})

    return Case(name, {UNPICKLE: fragments}, prepare=prepare)


PICKLE_CASES = [
    pickled("pickle-unasked", lambda: saved(weights()), "pytorch_model.bin", "--allow-pickle", command=QUANTIZE),
    pickled(
        "pickle-malicious-unasked",
        lambda: pickle.dumps(Malicious()),
        "pytorch_model.bin",
        "--allow-pickle",
        command=QUANTIZE,
    ),
    pickled("pickle-malicious", lambda: saved({UP: Malicious()}), "pytorch_model.bin", "weights_only"),
    pickled("pickle-malicious-bare", lambda: pickle.dumps(Malicious()), "pytorch_model.bin", "zip"),
    pickled(
        "pickle-malicious-legacy",
        lambda: saved({UP: Malicious()}, _use_new_zipfile_serialization=False),
        "pytorch_model.bin",
        "zip",
    ),
    pickled("pickle-truncated", lambda: saved(weights())[:-200], "pytorch_model.bin"),
    pickled("pickle-cut-to-10-bytes", lambda: saved(weights())[:10], "pytorch_model.bin"),
    pickled("pickle-empty", lambda: b"", "pytorch_model.bin"),
    pickled("pickle-of-noise", lambda: bytes(range(256)), "pytorch_model.bin"),
    pickled("pickle-legacy", lambda: saved(weights(), _use_new_zipfile_serialization=False), "pytorch_model.bin"),
    pickled("pickle-of-nothing", lambda: saved({}), "pytorch_model.bin", "none"),
    pickled("pickle-of-a-list", lambda: saved([1]), "pytorch_model.bin", "list"),
    pickled("pickle-nested", lambda: saved(nested_state()), "pytorch_model.bin", "dictionary of tensors"),
    pickled("pickle-sparse", lambda: saved(sparse_state()), "pytorch_model.bin"),
    pickled("pickle-transposed", lambda: saved(transposed_state()), "pytorch_model.bin", UP, "contiguous"),
    pickled(
        "pickle-with-a-short-record",
        lambda: rezipped(saved(weights()), lambda name, data: data[:-4] if name.endswith("/data/0") else data),
        "pytorch_model.bin",
    ),
    pickled(
        "pickle-compressed",
        lambda: rezipped(saved(weights()), lambda name, data: data, zipfile.ZIP_DEFLATED),
        "pytorch_model.bin",
    ),
    pickled(
        "pickle-of-the-other-byte-order",
        lambda: rezipped(saved(weights()), lambda name, data: b"big" if name.endswith("/byteorder") else data),
        "pytorch_model.bin",
        own_process=True,
    ),
    indexed_pickle("pickle-index-not-json", "{", "pytorch_model.bin.index.json"),
    indexed_pickle("pickle-index-without-a-map", {}, "pytorch_model.bin.index.json"),
    indexed_pickle("pickle-index-a-list", [], "pytorch_model.bin.index.json"),
    indexed_pickle("pickle-index-map-a-list", {"weight_map": ["a.bin"]}, "pytorch_model.bin.index.json"),
    indexed_pickle("pickle-index-leaves-the-folder", {"weight_map": {UP: "../a.bin"}}, "../a.bin"),
    indexed_pickle("pickle-index-names-a-missing-file", {"weight_map": {UP: "b.bin"}}, "b.bin", "missing"),
    indexed_pickle(
        "pickle-index-names-a-missing-tensor", {"weight_map": {UP: "a.bin", "absent": "a.bin"}}, "a.bin", "absent"
    ),
]

# --- recipes ---


def recipe(name: str, text: Content, *fragments: str) -> Case:
    return Case(name, {RECIPE: ("recipe.yaml", *fragments)}, {**GOOD_SRC, "recipe.yaml": text})


RECIPE_CASES = [
    Case("recipe-name-unknown", {"quantize src out --recipe q55": ("'q55'", "'q5'")}, GOOD_SRC),
    Case("recipe-file-missing", {RECIPE: ("recipe.yaml",)}, GOOD_SRC),
    Case("recipe-a-folder", {RECIPE: ("recipe.yaml",)}, {**GOOD_SRC, "recipe.yaml/a": b""}),
    recipe("recipe-not-yaml", "bits: [", "not YAML"),
    recipe("recipe-not-utf-8", b"name: \xff"),
    recipe("recipe-empty", ""),
    recipe("recipe-a-list", "- bits: 5\n", "keys and values"),
    recipe("recipe-of-tabs", "rules:\n\t- keep: true\n", "not YAML"),
    recipe("recipe-with-python", "!!python/object/apply:os.system [touch payload-ran]", "not YAML"),
    recipe("recipe-impossible-date", "name: 2020-13-45\n"),
    recipe("recipe-impossible-number", "bits: !!int five\n"),
    recipe("recipe-nested", "[" * 5000),
    recipe("recipe-key-unknown", "bitz: 5\n", "'bitz'", "'bits'"),
    recipe("recipe-key-a-number", "5: 5\n", "unknown key"),
    recipe("recipe-bits-too-many", "bits: 9\n", "bits", "2 to 8", "9"),
    recipe("recipe-bits-too-few", "bits: 1\n", "bits", "2 to 8"),
    recipe("recipe-bits-negative", "bits: -5\n", "bits"),
    recipe("recipe-bits-a-string", "bits: five\n", "bits", "five"),
    recipe("recipe-bits-a-boolean", "bits: true\n", "bits"),
    recipe("recipe-bits-a-float", "bits: 5.5\n", "bits", "whole", "5.5"),
    recipe("recipe-rules-a-mapping", "rules: {keep: true}\n", "rules"),
    recipe("recipe-rules-a-string", "rules: all\n", "rules"),
    recipe("rule-a-string", "rules: [all]\n", "rule 1"),
    recipe("rule-key-unknown", "rules: [{nome: a, keep: true}]\n", "rule 1", "'nome'", "'name'"),
    recipe("rule-role-unknown", "rules: [{role: atention, bits: 4}]\n", "rule 1", "'atention'", "'attention'"),
    recipe("rule-bits-too-many", "rules: [{name: '*', keep: true}, {name: '*', bits: 16}]\n", "rule 2", "16"),
    recipe("rule-bits-zero", "rules: [{name: '*', bits: 0}]\n", "rule 1"),
    recipe("rule-keep-and-bits", "rules: [{name: '*', keep: true, bits: 4}]\n", "rule 1", "both"),
    recipe("rule-without-an-action", "rules: [{name: '*'}]\n", "rule 1"),
    recipe("rule-without-a-condition", "rules: [{bits: 4}]\n", "rule 1", "condition"),
    recipe("rule-name-a-number", "rules: [{name: 5, bits: 4}]\n", "rule 1", "name"),
    recipe("rule-dims-a-string", "rules: [{dims: two, bits: 4}]\n", "rule 1", "dims"),
    Case(
        "recipe-codec-unknown",
        {RECIPE: ("'hadamard'", "'hadamard-absmax'")},
        {**GOOD_SRC, "recipe.yaml": "codec: hadamard\n"},
    ),
    Case(
        "rule-matches-nothing",
        {RECIPE: ("rule 1", "'model.layers.*.mlp.up_porj.weight'", UP)},
        {**GOOD_SRC, "recipe.yaml": "rules: [{name: model.layers.*.mlp.up_porj.weight, bits: 4}]\n"},
    ),
]

# --- output ---


def finished_out(folder: Path) -> None:
    """A source, and the finished result of another recipe in OUT."""
    write(folder, GOOD_SRC)
    run_quantize(folder / "src", folder / "out", bits=3)


def symlinked_out(folder: Path) -> None:
    write(folder, GOOD_SRC)
    (folder / "out").symlink_to("src", target_is_directory=True)


def foreign_name(folder: Path) -> None:
    """A companion whose name is not Unicode text, so that no JSON manifest can hold it."""
    write(folder, GOOD_SRC)
    (folder / "src" / b"caf\xe9.txt".decode("utf-8", "surrogateescape")).write_bytes(b"")


JOURNAL = "out/.pqweights/journal.jsonl"

OUTPUT_CASES = [
    Case("out-holds-something-else", {QUANTIZE: ("out", "'notes.txt'")}, {**GOOD_SRC, "out/notes.txt": "mine"}),
    Case(
        "out-holds-something-else-to-overwrite",
        {QUANTIZE + " --overwrite": ("out", "'notes.txt'")},
        {**GOOD_SRC, "out/notes.txt": "mine"},
    ),
    Case("out-a-file", {QUANTIZE: ("out", "folder")}, {**GOOD_SRC, "out": "mine"}),
    Case("out-below-a-file", {"quantize src file/out": ("file",)}, {**GOOD_SRC, "file": "mine"}),
    Case("out-is-the-source", {"quantize src src": ("src", "outside")}, GOOD_SRC),
    Case("out-inside-the-source", {"quantize src src/out": ("src/out", "outside")}, GOOD_SRC),
    Case(
        "out-around-the-source",
        {"quantize out/src out": ("out", "outside")},
        {f"out/{name}": content for name, content in GOOD_SRC.items()},
    ),
    Case("out-a-link-to-the-source", {QUANTIZE: ("out", "outside")}, prepare=symlinked_out),
    Case("out-holds-another-result", {QUANTIZE: ("out", "--overwrite")}, prepare=finished_out),
    Case("out-with-a-broken-manifest", {QUANTIZE: ("pqweights.json",)}, {**GOOD_SRC, "out/pqweights.json": "{"}),
    Case(
        "out-with-a-broken-manifest-to-overwrite",
        {QUANTIZE + " --overwrite": ("pqweights.json",)},
        {**GOOD_SRC, "out/pqweights.json": "{"},
    ),
    Case("journal-empty", {QUANTIZE: ("journal",)}, {**GOOD_SRC, JOURNAL: b"", "out/.pqweights/lock": b""}),
    Case("journal-of-zeros", {QUANTIZE: ("journal",)}, {**GOOD_SRC, JOURNAL: bytes(512), "out/.pqweights/lock": b""}),
    Case("journal-a-list", {QUANTIZE: ("journal",)}, {**GOOD_SRC, JOURNAL: b"[]\n", "out/.pqweights/lock": b""}),
    Case("journal-a-text", {QUANTIZE: ("journal",)}, {**GOOD_SRC, JOURNAL: b"hello\n", "out/.pqweights/lock": b""}),
    Case(
        "journal-without-its-keys",
        {QUANTIZE: ("journal",)},
        {**GOOD_SRC, JOURNAL: b"{}\n", "out/.pqweights/lock": b""},
    ),
    Case("name-of-a-file-not-utf-8", {QUANTIZE: ("caf",)}, prepare=foreign_name),
    Case("bits-out-of-range", {QUANTIZE + " --bits 9": ("--bits", "8")}, GOOD_SRC),
    Case("bits-no-number", {QUANTIZE + " --bits five": ("--bits",)}, GOOD_SRC),
    Case("size-no-size", {QUANTIZE + " --max-shard-size huge": ("huge",)}, GOOD_SRC),
    Case("size-zero", {QUANTIZE + " --max-shard-size 0": ("at least one byte",)}, GOOD_SRC),
    Case("threads-zero", {QUANTIZE + " --threads 0": ("--threads",)}, GOOD_SRC),
    Case("target-unknown", {"export src out --target bf61": ("bf61",)}, GOOD_SRC),
]

# --- masters ---

SHARD = "model-00001-of-00002.safetensors"
LAST_SHARD = "model-00002-of-00002.safetensors"
MASTER_SRC: dict[str, Content] = {
    FILE: stored(
        {UP: WEIGHT, "model.layers.0.mlp.gate_proj.weight": ("F32", [4, 65], WEIGHT_DATA + bytes(16)), NORM: VECTOR}
    ),
    CONFIG: {"model_type": "llama"},
    "src/tokenizer.json": {"tokens": []},
}


def run_quantize(source: Path, out: Path, bits: int = 5) -> None:
    from calls import quantize

    from pqweights.planning.recipe import load_recipe

    quantize(source, out, load_recipe("q5").with_bits(bits), threads=1, max_shard_bytes=300)


def make_master(folder: Path) -> None:
    """An undamaged master of two shards: two weights, one with a shape override, a kept vector, a tokenizer."""
    write(folder, MASTER_SRC)
    run_quantize(folder / "src", folder / "master")
    shutil.rmtree(folder / "src")


Damage = Callable[[Path], None]  # damages the folder of a master


def damaged(name: str, damage: Damage, **expected: tuple[str, ...] | None) -> Case:
    """A master that was changed after it was finished. expected: fragments by command; others need not notice."""

    def prepare(folder: Path) -> None:
        make_master(folder)
        damage(folder / "master")

    commands = {"verify": VERIFY, "inspect": INSPECT, "export": EXPORT}
    return Case(name, {line: expected.get(key) for key, line in commands.items()}, prepare=prepare)


def flip(file: str, tensor: str | None) -> Damage:
    """Flip one bit of a tensor, or of the header."""

    def damage(master: Path) -> None:
        data = bytearray((master / file).read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        at = 12 if tensor is None else 8 + length + header[tensor]["data_offsets"][0] + 1
        data[at] ^= 4
        (master / file).write_bytes(data)

    return damage


def set_json(file: str, *path: str | int, to: Any) -> Damage:
    """Replace the value at a path; `to` may also be a function of the old value."""

    def damage(master: Path) -> None:
        place = document = json.loads((master / file).read_bytes())
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to(place.get(path[-1])) if callable(to) else to
        (master / file).write_text(json.dumps(document, indent=2) + "\n")

    return damage


def remove_key(file: str, *path: str | int) -> Damage:
    def damage(master: Path) -> None:
        place = document = json.loads((master / file).read_bytes())
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        (master / file).write_text(json.dumps(document, indent=2) + "\n")

    return damage


def replace(file: str, content: Content) -> Damage:
    return lambda master: write(master, {file: content})


def cut(file: str, count: int) -> Damage:
    return lambda master: write(master, {file: (master / file).read_bytes()[:-count]})


def delete(file: str) -> Damage:
    return lambda master: (master / file).unlink()


def consistently(file: str, damage: Damage) -> Damage:
    """Damage a file, and make the manifest agree with it."""
    import hashlib

    def both(master: Path) -> None:
        damage(master)
        data = (master / file).read_bytes()
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        set_json("pqweights.json", "files", file, to=record)(master)

    return both


CODEC = "hadamard-lloyd-max"
GATE = "model.layers.0.mlp.gate_proj.weight"
MANIFEST = "pqweights.json"


def settings(name: str, *path: str | int, to: Any, export: tuple[str, ...]) -> Case:
    """A changed quantization_config: verify finds another file, and export finds a contradiction."""
    damage = set_json("config.json", "quantization_config", *path, to=to)
    return damaged(name, damage, verify=("config.json",), export=("config.json", *export))


def settings_in_manifest(name: str, *path: str | int, to: Any, verify: tuple[str, ...]) -> Case:
    """A changed quantization_config whose hash in the manifest was changed, too."""
    damage = consistently("config.json", set_json("config.json", "quantization_config", *path, to=to))
    return damaged(name, damage, verify=("config.json", *verify))


def manifest(name: str, *path: str | int, to: Any) -> Case:
    """A manifest that is JSON but makes no sense."""
    return damaged(name, set_json(MANIFEST, *path, to=to), verify=(MANIFEST,), inspect=(MANIFEST,))


MASTER_CASES = [
    damaged("master-codes-flipped", flip(SHARD, UP + "_codes"), verify=(SHARD, UP + "_codes", "sha256")),
    damaged("master-norms-flipped", flip(SHARD, UP + "_norms"), verify=(SHARD, UP + "_norms", "sha256")),
    damaged("master-kept-tensor-flipped", flip(LAST_SHARD, NORM), verify=(LAST_SHARD, NORM, "sha256")),
    damaged("master-header-flipped", flip(SHARD, None), verify=(SHARD, "header"), export=(SHARD,)),
    damaged("master-shard-truncated", cut(SHARD, 1), verify=(SHARD, "bytes"), export=(SHARD, "truncated")),
    damaged(
        "master-shard-longer",
        lambda master: write(master, {SHARD: (master / SHARD).read_bytes() + b"\0"}),
        verify=(SHARD, "bytes"),
        export=(SHARD, "foreign"),
    ),
    damaged("master-shard-missing", delete(SHARD), verify=(f"{SHARD}: missing",), export=(SHARD, "missing")),
    damaged("master-index-missing", delete(INDEX[4:]), verify=(INDEX[4:], "missing"), export=(INDEX[4:], "missing")),
    damaged("master-index-not-json", replace(INDEX[4:], "{"), verify=(INDEX[4:],), export=(INDEX[4:], "JSON")),
    damaged(
        "master-index-edited",
        set_json(INDEX[4:], "weight_map", NORM, to=SHARD),
        verify=(INDEX[4:], "sha256"),
        export=(NORM, SHARD),
    ),
    damaged(
        "master-index-edited-with-the-manifest",
        consistently(INDEX[4:], set_json(INDEX[4:], "weight_map", NORM, to=SHARD)),
        verify=(INDEX[4:], "not the index"),
        export=(NORM, SHARD),
    ),
    damaged(
        "master-index-leaves-the-folder",
        set_json(INDEX[4:], "weight_map", NORM, to="../x.safetensors"),
        verify=(INDEX[4:],),
        export=(INDEX[4:], NORM, "../x.safetensors"),
    ),
    damaged(
        "master-companion-edited", replace("tokenizer.json", '{"tokens": {}}'), verify=("tokenizer.json", "sha256")
    ),
    damaged("master-companion-missing", delete("tokenizer.json"), verify=("tokenizer.json", "missing")),
    damaged("master-with-another-file", replace("notes.txt", "mine"), verify=("notes.txt", "not in the manifest")),
    damaged(
        "master-with-another-shard",
        replace("model-00003-of-00003.safetensors", GOOD),
        verify=("model-00003-of-00003.safetensors",),
    ),
    damaged("master-with-a-journal", replace(".pqweights/journal.jsonl", "{}\n"), verify=(".pqweights", "unfinished")),
    damaged("master-config-missing", delete("config.json"), verify=("config.json", "missing"), export=("config.json",)),
    damaged(
        "master-config-not-json", replace("config.json", "{"), verify=("config.json",), export=("config.json", "JSON")
    ),
    damaged(
        "master-config-of-no-master",
        remove_key("config.json", "quantization_config"),
        verify=("config.json",),
        export=("quant_method",),
    ),
    damaged(
        "master-config-of-no-master-with-the-manifest",
        consistently("config.json", remove_key("config.json", "quantization_config")),
        verify=("config.json",),
        export=("quant_method",),
    ),
    settings("master-version-99", "format_version", to=99, export=("format_version", "99")),
    settings("master-version-missing", "format_version", to=None, export=("format_version",)),
    settings("master-block-size-64", "block_size", to=64, export=("block_size", "64")),
    settings("master-key-unknown", "bit_order", to="big", export=("'bit_order'",)),
    damaged(
        "master-bits-4",
        set_json("config.json", "quantization_config", "bits", to=4),
        verify=("config.json",),
        export=("levels", "4 bits"),
    ),
    settings("master-bits-9", "bits", to=9, export=("bits", "found 9")),
    settings("master-bits-a-string", "bits", to="5", export=("bits",)),
    settings("master-bits-a-float", "bits", to=5.5, export=("bits", "5.5")),
    settings("master-codec-unknown", "codec", to="hadamard", export=("'hadamard'", CODEC)),
    settings("master-codec-a-list", "codec", to=[CODEC], export=("codec",)),
    settings("master-rotation-unknown", "rotation", to="givens", export=("'givens'",)),
    settings("master-dtype-a-number", "dtype", to=16, export=("dtype",)),
    settings("master-dtype-unknown", "dtype", to="BF61", export=("dtype", "BF61")),
    settings("master-levels-missing", "levels", to={}, export=("levels",)),
    settings("master-levels-a-list", "levels", to=[], export=("levels",)),
    settings("master-levels-too-few", "levels", CODEC, "5", to=[-1.0, 1.0], export=("levels", "32")),
    settings("master-levels-descending", "levels", CODEC, "5", to=lambda old: old[::-1], export=("levels",)),
    settings("master-levels-of-strings", "levels", CODEC, "5", to=lambda old: [*old[:-1], "3"], export=("levels",)),
    settings("master-levels-with-nan", "levels", CODEC, "5", to=lambda old: [*old[:-1], NAN], export=("levels",)),
    settings(
        "master-levels-beyond-float32", "levels", CODEC, "5", to=lambda old: [*old[:-1], 1e300], export=("levels",)
    ),
    settings(
        "master-levels-beyond-float64", "levels", CODEC, "5", to=lambda old: [*old[:-1], 10**400], export=("levels",)
    ),
    settings(
        "master-levels-equal-in-float32",
        "levels",
        CODEC,
        "5",
        to=lambda o: [*o[:-1], o[-2] + 1e-12],
        export=("levels",),
    ),
    settings("master-overrides-a-list", "overrides", to=[], export=("overrides",)),
    settings("master-override-unknown-key", "overrides", GATE, to={"shape": [4, 65], "bit": 4}, export=(GATE, "'bit'")),
    settings("master-override-unknown-weight", "overrides", "model.absent", to={"bits": 4}, export=("'model.absent'",)),
    settings("master-override-a-number", "overrides", GATE, to=5, export=(GATE,)),
    settings("master-override-null", "overrides", GATE, to=None, export=(GATE,)),
    settings("master-override-shape-a-string", "overrides", GATE, "shape", to="4x65", export=(GATE, "shape")),
    settings(
        "master-override-exponent-1000", "overrides", GATE, "norm_exponent", to=1000, export=(GATE, "norm_exponent")
    ),
    settings(
        "master-override-exponent-a-float", "overrides", GATE, "norm_exponent", to=1.5, export=(GATE, "norm_exponent")
    ),
    damaged(
        "master-override-shape-wrong",
        set_json("config.json", "quantization_config", "overrides", GATE, "shape", to=[4, 200]),
        verify=("config.json",),
        export=(GATE, "[4, 200]"),
    ),
    damaged(
        "master-override-missing",
        remove_key("config.json", "quantization_config", "overrides", GATE),
        verify=("config.json",),
        export=None,  # the flattened blocks are read as rows of 128; only verify notices
    ),
    settings_in_manifest(
        "master-levels-edited", "levels", CODEC, "5", to=lambda o: [*o[:-1], o[-1] + 0.1], verify=("levels",)
    ),
    settings_in_manifest("master-shape-edited", "overrides", GATE, "shape", to=[65, 4], verify=(GATE, "shape")),
    settings_in_manifest(
        "master-exponent-edited", "overrides", GATE, "norm_exponent", to=1, verify=(GATE, "norm_exponent")
    ),
    settings_in_manifest("master-rotation-edited", "rotation", to="signed-hadamard", verify=(UP, "rotation")),
    settings_in_manifest("master-dtype-edited", "dtype", to="F16", verify=(UP, "dtype")),
    settings_in_manifest("master-kept-edited", "kept", to=[], verify=("kept",)),
    damaged("manifest-absent", delete(MANIFEST), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-empty", replace(MANIFEST, b""), verify=(MANIFEST, "JSON"), inspect=(MANIFEST, "JSON")),
    damaged("manifest-cut", cut(MANIFEST, 10), verify=(MANIFEST, "JSON"), inspect=(MANIFEST, "JSON")),
    damaged("manifest-not-utf-8", replace(MANIFEST, b'{"a": "\xff"}'), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-a-list", replace(MANIFEST, "[]"), verify=(MANIFEST, "list"), inspect=(MANIFEST, "list")),
    damaged("manifest-nested", replace(MANIFEST, "[" * 100_000), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-without-tensors", remove_key(MANIFEST, "tensors"), verify=(MANIFEST,), inspect=(MANIFEST,)),
    damaged("manifest-without-hashes", remove_key(MANIFEST, "tensors", 0, "stored", 0, "sha256"), verify=(MANIFEST,)),
    manifest("manifest-version-99", "manifest_version", to=99),
    manifest("manifest-source-null", "source", to=None),
    manifest("manifest-tensors-a-number", "tensors", to=5),
    manifest("manifest-tensor-a-string", "tensors", 0, to="x"),
    manifest("manifest-dtype-unknown", "tensors", 0, "stored", 0, "dtype", to="F128"),
    manifest("manifest-dtype-a-list", "tensors", 0, "stored", 0, "dtype", to=["U8"]),
    manifest("manifest-shape-of-strings", "tensors", 0, "shape", to=["2", "128"]),
    manifest("manifest-stored-shape-of-strings", "tensors", 0, "stored", 0, "shape", to=["2", "128"]),
    manifest("manifest-stored-shape-negative", "tensors", 0, "stored", 0, "shape", to=[-2, 128]),
    manifest("manifest-shape-null", "tensors", 0, "shape", to=None),
    manifest("manifest-codec-unknown", "tensors", 0, "codec", to="hadamard"),
    manifest("manifest-codec-a-list", "tensors", 0, "codec", to=[CODEC]),
    manifest("manifest-bits-a-string", "tensors", 0, "bits", to="five"),
    manifest("manifest-bits-99", "tensors", 0, "bits", to=99),
    manifest("manifest-error-a-string", "tensors", 0, "relative_mse", to="small"),
    manifest("manifest-name-a-number", "tensors", 0, "name", to=5),
    manifest("manifest-action-unknown", "tensors", 0, "action", to="dropp"),
    manifest("manifest-shard-size-a-string", "max_shard_bytes", to="5GB"),
    manifest("manifest-shard-size-negative", "max_shard_bytes", to=-5),
    manifest("manifest-files-a-list", "files", to=[]),
    manifest("manifest-file-a-string", "files", "tokenizer.json", to="x"),
    manifest("manifest-file-of-a-string-size", "files", "tokenizer.json", "bytes", to="16"),
    damaged(
        "manifest-leaves-the-folder",
        set_json(MANIFEST, "files", "../x", to={"bytes": 1, "sha256": "0" * 64}),
        verify=(MANIFEST, "'../x'", "outside"),
    ),
    damaged(
        "manifest-absolute-path",
        set_json(MANIFEST, "files", "/x", to={"bytes": 1, "sha256": "0" * 64}),
        verify=(MANIFEST, "'/x'", "outside"),
    ),
    damaged("manifest-without-the-index", remove_key(MANIFEST, "files", INDEX[4:]), verify=(MANIFEST, INDEX[4:])),
    damaged(
        "manifest-of-other-hashes",
        set_json(MANIFEST, "tensors", 0, "stored", 0, "sha256", to="0" * 64),
        verify=("sha256",),
    ),
    damaged(
        "manifest-of-another-name", set_json(MANIFEST, "tensors", 0, "stored", 0, "name", to="x_codes"), verify=(SHARD,)
    ),
    damaged(
        "manifest-tensor-twice",
        set_json(MANIFEST, "tensors", to=lambda old: [*old, old[0]]),
        verify=(MANIFEST, "twice"),
    ),
]

# --- exports ---

DOWN_192: Stored = ("F32", [8, 192], np.random.default_rng(1).standard_normal(8 * 192).astype(np.float32).tobytes())
EXPORT_SRC: dict[str, Content] = {
    FILE: stored({UP: WEIGHT, DOWN: DOWN_192, NORM: VECTOR}),
    CONFIG: {"model_type": "llama"},
}
TORCHAO, VLLM, MLX = (f"export master out --target {target}" for target in ("torchao-int4", "vllm-int4", "mlx-q4"))


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
        write(folder, {**EXPORT_SRC, **({CONFIG: config} if config is not None else {})})
        run_quantize(folder / "src", folder / "master")
        damage(folder)

    return Case(name, commands, files or {}, prepare=prepare, own_process=own_process)


def of_master(damage: Damage) -> Damage:
    return lambda folder: damage(folder / "master")


def nan_norms(master: Path) -> None:
    """Change a norm to NaN; of the commands, only verify looks for that."""
    for path in sorted(master.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == UP + "_norms":
                begin = 8 + length + entry["data_offsets"][0]
                data[begin : begin + 2] = b"\x00\x7e"
                path.write_bytes(data)


def other_source(tensors: Mapping[str, Stored], manifest: bool = True) -> Damage:
    """Another original beside the master; without the manifest, there is no fingerprint to compare."""

    def damage(folder: Path) -> None:
        write(folder, {"other/model.safetensors": stored(tensors)})
        if not manifest:
            (folder / "master" / MANIFEST).unlink()

    return damage


def newer_master(folder: Path) -> None:
    set_json("config.json", "quantization_config", "format_version", to=99)(folder / "master")


OTHER_UP: Stored = ("F32", [2, 128], WEIGHT_DATA[512:] + WEIGHT_DATA[:512])
LONG_UP: Stored = ("F32", [4, 128], WEIGHT_DATA * 2)
ABSENT: dict[str, Content] = {
    "mlx/__init__.py": "raise ImportError(\"No module named 'mlx'\")\n",
    "mlx/__pycache__": "",  # a file, so that none is written
}

EXPORT_CASES = [
    exporting(
        "group-size-that-no-target-has",
        {
            TORCHAO + " --group-size 100": ("--group-size 100", "torchao-int4", "128, 64, 32, 256"),
            VLLM + " --group-size 100": ("--group-size 100", "vllm-int4", "128, 64, 32"),
            MLX + " --group-size 100": ("--group-size 100", "mlx-q4", "64, 32, 128"),
            VLLM + " --group-size 0": ("--group-size 0", "128, 64, 32"),
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
            TORCHAO + " --bits 3": ("--bits 3", "torchao-int4", "has 4"),
            VLLM + " --bits 3": ("--bits 3", "vllm-int4", "has 4, 8"),
            MLX + " --bits 7": ("--bits 7", "mlx-q4", "2, 3, 5, 6, 8"),
            MLX + " --mode mxfp4 --bits 8": ("--bits 8", "mode mxfp4", "has 4"),
            EXPORT + " --bits 4": ("--bits", "bf16"),
            VLLM + " --bits 0": ("--bits 0",),
        },
    ),
    exporting(
        "option-of-another-target",
        {
            TORCHAO + " --basis rotated": ("--basis", "torchao-int4"),
            TORCHAO + " --mode affine": ("--mode", "torchao-int4"),
            VLLM + " --packing plain": ("--packing", "vllm-int4"),
            VLLM + " --dtype source": ("--dtype", "vllm-int4"),
            MLX + " --basis plain": ("--basis", "mlx-q4"),
            EXPORT + " --qparams minmax": ("--qparams", "bf16"),
            EXPORT + " --source src": ("--source", "bf16"),
        },
    ),
    exporting("qparams-best-of-a-float", {MLX + " --mode mxfp4 --qparams best": ("--qparams best", "mxfp4", "minmax")}),
    exporting(
        "export-onto-an-input",
        {
            "export master master -t vllm-int4": ("master", "outside"),
            "export master master/out -t torchao-int4": ("master/out", "outside"),
            "export master src -t torchao-int4 --source src": ("src", "outside"),
            "export master src/out -t vllm-int4 --source src": ("src/out", "outside"),
            "export master . -t vllm-int4": ("outside",),
        },
    ),
    exporting(
        "export-original-missing",
        {TORCHAO + " --source nowhere": ("nowhere", "no such")},
    ),
    exporting(
        "export-original-a-master",
        {VLLM + " --source master": ("--source master", "the original checkpoint", "pqweights master")},
    ),
    exporting(
        "export-original-of-other-weights",
        {VLLM + " --source other": ("--source other", "is not the checkpoint", "fingerprint")},
        damage=other_source({UP: OTHER_UP, DOWN: DOWN_192, NORM: VECTOR}),
    ),
    exporting(
        "export-original-of-another-shape",
        {TORCHAO + " --source other": ("--source other", UP, "[2, 128]", "[4, 128]")},
        damage=other_source({UP: LONG_UP, DOWN: DOWN_192, NORM: VECTOR}, manifest=False),
    ),
    exporting(
        "export-original-without-a-tensor",
        {TORCHAO + " --source other": ("--source other", DOWN, "none")},
        damage=other_source({UP: WEIGHT, NORM: VECTOR}, manifest=False),
    ),
    exporting(
        "export-of-nan-norms",
        {
            TORCHAO: (UP, "NaN", "rows 0 to 1", "verify"),
            VLLM: (UP, "NaN"),
            VLLM + " --basis rotated": (UP, "NaN"),
            TORCHAO + " --packing plain --qparams minmax": (UP, "NaN"),
            EXPORT: None,
        },
        damage=of_master(nan_norms),
    ),
    exporting(
        "export-of-a-newer-master",
        dict.fromkeys((TORCHAO, VLLM, MLX), ("config.json", "format_version", "99")),
        damage=newer_master,
    ),
    exporting(
        "export-of-transposed-weights",
        dict.fromkeys((TORCHAO, VLLM), ("config.json", "gpt2", "transposed", "mlx-q4")),
        {"model_type": "gpt2"},
    ),
    exporting("export-of-llama-4", {VLLM: ("Llama 4", "mlx-q4")}, {"model_type": "llama4"}),
    Case(
        "export-of-no-linear-layer",
        dict.fromkeys((TORCHAO, VLLM), ("no weight of this model can become integers", "embedding")),
        prepare=lambda folder: (
            write(folder, {FILE: stored({"model.embed_tokens.weight": WEIGHT}), CONFIG: {"model_type": "llama"}}),
            run_quantize(folder / "src", folder / "master"),
        )[0],
    ),
    exporting(
        "export-without-mlx",
        {MLX: ("mlx-q4", "No module named 'mlx'", "pip install 'pqweights[mlx]'")},
        files=ABSENT,
        own_process=True,
    ),
    exporting(
        "export-of-a-model-unknown-to-mlx",
        {MLX: ("mlx-lm", "no_such_model", "--target bf16")},
        {"model_type": "no_such_model"},
    ),
    exporting("export-of-an-unnamed-model-to-mlx", {MLX: ("mlx-lm", "model_type", "--target bf16")}, {}),
    exporting("export-of-half-a-configuration-to-mlx", {MLX: ("mlx-lm", "'llama'", "--target bf16")}),
]

# --- eval ---

MODEL, TEXT = "model/model.safetensors", "text.txt"
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(16)}, "unk_token": "w0"},
}


def language_model(vocabulary: int = 16, value: float | None = None) -> dict[str, Stored]:
    """The tensors of a Llama of one layer. value: of all weights of lm_head; by default they are random."""
    shapes = {
        "model.embed_tokens": (vocabulary, 32),
        "lm_head": (vocabulary, 32),
        "model.norm": (32,),
        "model.layers.0.input_layernorm": (32,),
        "model.layers.0.post_attention_layernorm": (32,),
        **{f"model.layers.0.self_attn.{name}_proj": (32, 32) for name in "qkvo"},
        "model.layers.0.mlp.gate_proj": (64, 32),
        "model.layers.0.mlp.up_proj": (64, 32),
        "model.layers.0.mlp.down_proj": (32, 64),
    }
    random = np.random.default_rng(2)
    tensors: dict[str, Stored] = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if value is not None and name == "lm_head":
            values[:] = value
        tensors[f"{name}.weight"] = ("F32", list(shape), values.tobytes())
    return tensors


def language_model_config(vocabulary: int = 16) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }


GOOD_MODEL: dict[str, Content] = {
    MODEL: stored(language_model()),
    "model/config.json": language_model_config(),
    "model/tokenizer.json": TOKENIZER,
    "model/tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    TEXT: " ".join(f"w{number * 7 % 16}" for number in range(40)),
}
EVAL = "eval model --text text.txt"


def evaluating(
    name: str, *fragments: str, command: str = EVAL, without: tuple[str, ...] = (), **changed: Content
) -> Case:
    """An undamaged model and text, except for some files by key: text, config, tokenizer, weights."""
    places = {
        "text": TEXT,
        "config": "model/config.json",
        "tokenizer": "model/tokenizer.json",
        "weights": MODEL,
    }
    files = {file: content for file, content in GOOD_MODEL.items() if file not in without}
    return Case(name, {command: fragments}, files | {places[key]: content for key, content in changed.items()})


def beside(name: str, *fragments: str, vocabulary: int = 16, words: dict[str, int] | None = None) -> Case:
    """A model and a reference with another vocabulary or another tokenizer."""
    tokenizer = TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": words}} if words else TOKENIZER
    files = GOOD_MODEL | {
        "other/model.safetensors": stored(language_model(vocabulary)),
        "other/tokenizer.json": tokenizer,
        "other/config.json": language_model_config(vocabulary),
        "other/tokenizer_config.json": GOOD_MODEL["model/tokenizer_config.json"],
    }
    return Case(name, {EVAL + " --reference other": fragments}, files)


def without_tensor(name: str) -> bytes:
    return stored({key: tensor for key, tensor in language_model().items() if key != name})


BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}

EVAL_CASES = [
    evaluating("eval-text-missing", "nowhere.txt", "No such file", command="eval model --text nowhere.txt"),
    evaluating("eval-text-empty", TEXT, "an empty file", text=b""),
    evaluating("eval-text-blank", TEXT, "only white space", text=b" \n \n"),
    evaluating("eval-text-not-utf8", TEXT, "UTF-8", "0xff at offset 3", text=b"abc\xff"),
    evaluating("eval-text-short", "at least 16 tokens", "found 3", text="w1 w2 w3"),
    evaluating("eval-text-twice", "either --text FILE or --dataset", command=EVAL + " --dataset wikitext"),
    evaluating("eval-window-beyond-the-model", "--window 17", "model", "16 tokens", command=EVAL + " --window 17"),
    evaluating("eval-stride-beyond-the-window", "--stride 17", "16 tokens", command=EVAL + " --stride 17"),
    evaluating("eval-model-missing", "nowhere", "config.json", command="eval nowhere --text text.txt"),
    evaluating("eval-config-damaged", "config.json", "JSON", config=b"{"),
    evaluating(
        "eval-model-unknown",
        "model",
        "no_such_model",
        config={"model_type": "no_such_model", "max_position_embeddings": 16},
    ),
    evaluating("eval-model-an-encoder", "BertModel", "not a causal language model", config=BERT),
    evaluating(
        "eval-tokenizer-missing",
        "model",
        "--tokenizer DIR",
        without=("model/tokenizer.json", "model/tokenizer_config.json"),
    ),
    evaluating("eval-tokenizer-damaged", "model", "tokenizer", tokenizer={"added_tokens": [], "model": 3}),
    evaluating("eval-tokenizer-elsewhere", "nowhere", "--tokenizer DIR", command=EVAL + " --tokenizer nowhere"),
    evaluating(
        "eval-tokens-unknown-to-the-model",
        "the token 15",
        "knows 8",
        config=language_model_config(8),
        weights=stored(language_model(8)),
    ),
    evaluating("eval-weights-cut-off", "model", "not fully covered", weights=stored(language_model())[:-400]),
    evaluating("eval-weights-missing", "model", without=(MODEL,)),
    evaluating("eval-weight-missing", "missing", "lm_head.weight", weights=without_tensor("lm_head.weight")),
    evaluating(
        "eval-weight-too-many", "unexpected", UP + ".x", weights=stored({**language_model(), UP + ".x": VECTOR})
    ),
    evaluating("eval-logits-nan", "logits are NaN", weights=stored(language_model(value=float("nan")))),
    evaluating("eval-packed-without-a-master", "--packed", "expected a pqweights master", command=EVAL + " --packed"),
    evaluating("eval-plot-of-another-kind", "plot.doc", ".png or .svg", command=EVAL + " --plot plot.doc"),
    evaluating("eval-reference-missing", "nowhere", "config.json", command=EVAL + " --reference nowhere"),
    beside("eval-reference-of-another-vocabulary", "16 tokens", "18", vocabulary=18),
    beside(
        "eval-reference-of-another-tokenizer",
        "model",
        "other tokens",
        "other",
        words={f"w{number}": (number + 1) % 16 for number in range(16)},
    ),
]

# --- calibrate, ablate ---

CALIBRATE = "calibrate model scales.safetensors --text text.txt"
LONG_TEXT = " ".join(f"w{number * 7 % 16}" for number in range(300))


def there(name: str, command: str, *fragments: str, content: bytes) -> Case:
    """A file at the path where scales are written or read."""
    return Case(name, {command: fragments}, GOOD_MODEL | {"scales.safetensors": content})


CALIBRATE_CASES = [
    evaluating(
        "calibrate-text-missing",
        "nowhere.txt",
        "No such file",
        command="calibrate model s.safetensors --text nowhere.txt",
    ),
    evaluating("calibrate-text-empty", TEXT, "an empty file", command=CALIBRATE, text=b""),
    evaluating("calibrate-text-not-utf8", TEXT, "UTF-8", "0xff at offset 3", command=CALIBRATE, text=b"abc\xff"),
    evaluating("calibrate-text-short", "at least 256 tokens, 16 window(s) of 16", "found 40", command=CALIBRATE),
    evaluating("calibrate-window-beyond-the-model", "16 tokens", "found 17", command=CALIBRATE + " --window 17"),
    evaluating("calibrate-model-missing", "nowhere", command="calibrate nowhere s.safetensors --text text.txt"),
    evaluating("calibrate-config-damaged", "config.json", "JSON", command=CALIBRATE, config=b"{"),
    evaluating(
        "calibrate-model-unknown",
        "transformers cannot run",
        "no_such_model",
        command=CALIBRATE,
        text=LONG_TEXT,
        config={"model_type": "no_such_model", "max_position_embeddings": 16},
    ),
    evaluating(
        "calibrate-tokenizer-missing",
        "model",
        "--tokenizer DIR",
        command=CALIBRATE,
        without=("model/tokenizer.json", "model/tokenizer_config.json"),
    ),
    evaluating(
        "calibrate-tokens-unknown-to-the-model",
        "the token 15",
        "knows 8",
        command=CALIBRATE,
        text=LONG_TEXT,
        config=language_model_config(8),
        weights=stored(language_model(8)),
    ),
    evaluating(
        "calibrate-weight-missing",
        "missing",
        "lm_head.weight",
        command=CALIBRATE,
        text=LONG_TEXT,
        weights=without_tensor("lm_head.weight"),
    ),
    evaluating("calibrate-recipe-unknown", "'q55'", "'q5'", command=CALIBRATE + " --recipe q55"),
    evaluating(
        "calibrate-output-in-no-folder",
        "nowhere",
        "make it first",
        command="calibrate model nowhere/s.safetensors --text text.txt",
    ),
    there("calibrate-output-there", CALIBRATE, "scales.safetensors", "--overwrite", content=b"x"),
    there(
        "calibrate-output-foreign",
        CALIBRATE + " --overwrite",
        "scales.safetensors",
        "move it away",
        content=stored(language_model()),
    ),
    there(
        "awq-of-something-else",
        "quantize model out --awq scales.safetensors",
        "scales.safetensors",
        "calibrate",
        content=stored(language_model()),
    ),
    there(
        "awq-truncated",
        "quantize model out --awq scales.safetensors",
        "scales.safetensors",
        content=stored(language_model())[:100],
    ),
    evaluating("awq-missing", "nowhere", "no such file", command="quantize model out --awq nowhere"),
    evaluating("awq-a-folder", "model", "no such file", command="quantize model out --awq model"),
    evaluating("ablate-text-empty", TEXT, "an empty file", command="ablate model --text text.txt", text=b""),
    evaluating(
        "ablate-text-too-short-for-awq", "at least 256 tokens", "--no-awq", command="ablate model --text text.txt"
    ),
    evaluating(
        "ablate-text-shorter-than-a-window",
        "at least 16 tokens",
        "found 3",
        command="ablate model --text text.txt --no-awq",
        text="w1 w2 w3",
    ),
    evaluating("ablate-model-missing", "nowhere", "config.json", command="ablate nowhere --text text.txt --no-awq"),
    evaluating(
        "ablate-an-encoder",
        "BertModel",
        "not a causal language model",
        command="ablate model --text text.txt --no-awq",
        config=BERT,
    ),
]

# --- target sizes, sensitivity ---

FIT = "plan model --target-size 15kB"
BY_FILE = FIT + " --sensitivity s.json"
MEASURE = "sensitivity model s.json --tokens 16"
SENSITIVITIES: dict[str, Any] = {
    "pqweights_sensitivity": 1,
    "checkpoint": "0" * 64,
    "method": {"kind": "random tokens", "tokens": 16},
    "groups": [{"name": "lm_head", "alpha": 0.5, "points": [[0.01, 0.005]], "weights": ["lm_head.weight"]}],
}


def fitting(name: str, options: str, *fragments: str, recipe: str | None = None) -> Case:
    """An undamaged model with a target, in a recipe or by options, for plan and quantize."""
    files: dict[str, Content] = GOOD_MODEL if recipe is None else GOOD_MODEL | {"recipe.yaml": recipe}
    by = options if recipe is None else f"--recipe recipe.yaml {options}".rstrip()
    return Case(name, {f"plan model {by}": fragments, f"quantize model out {by}": fragments}, files)


def by_file(name: str, *fragments: str, content: Content | None = None, **changed: Any) -> Case:
    """A damaged file of sensitivities. changed: keys of the file, or of its only group."""
    group = SENSITIVITIES["groups"][0] | {key: value for key, value in changed.items() if key not in SENSITIVITIES}
    whole = SENSITIVITIES | {"groups": [group]} | {key: value for key, value in changed.items() if key in SENSITIVITIES}
    return Case(name, {BY_FILE: ("s.json", *fragments)}, GOOD_MODEL | {"s.json": whole if content is None else content})


FIT_CASES = [
    fitting("fit-size-no-size", "--target-size 9XB", "'9XB'", "5GiB (2**30)"),
    fitting("fit-size-zero", "--target-size 0", "at least one byte"),
    fitting("fit-size-beyond-all-files", "--target-size " + "9" * 5000, "at most 2**63"),
    fitting("fit-bits-no-number", "--target-bpw many", "--target-bpw"),
    fitting("fit-bits-and-target", "--target-bpw 4.5 --bits 4", "which chooses the widths"),
    fitting("fit-both-targets", "--target-size 15kB --target-bpw 4.5", "found both"),
    fitting("fit-bits-nan", "--target-bpw nan", "positive number, found nan"),
    fitting("fit-bits-negative", "--target-bpw -4.5", "positive number, found -4.5"),
    fitting("fit-bits-beyond-numbers", "--target-bpw 1e308", "above what the source has", "no quantization is needed"),
    fitting("fit-bits-below-the-smallest", "--target-bpw 2", "below the smallest possible", "2.1250 bits per weight"),
    fitting("fit-size-below-the-smallest", "--target-size 1kB", "1000 bytes: below the smallest possible"),
    fitting("fit-size-above-the-source", "--target-size 1GB", "above the", "no quantization is needed"),
    fitting("fit-sensitivity-without-target", "--sensitivity heuristic", "--target-size or --target-bpw beside it"),
    fitting("fit-recipe-both-targets", "", "recipe.yaml", "found both", recipe="{target_size: 15kB, target_bpw: 4.5}"),
    fitting("fit-recipe-size-no-size", "", "recipe.yaml", "'9 XB'", "5GiB", recipe="target_size: 9 XB"),
    fitting("fit-recipe-size-a-list", "", "recipe.yaml", "target_size", "[5]", recipe="target_size: [5]"),
    fitting("fit-recipe-bits-a-text", "", "recipe.yaml", "target_bpw", "'4.5'", recipe="target_bpw: '4.5'"),
    fitting("fit-recipe-bits-beyond-numbers", "", "recipe.yaml", "target", recipe="target_bpw: " + "9" * 400),
    fitting("fit-recipe-sensitivity-alone", "", "recipe.yaml", "sensitivity", recipe="sensitivity: heuristic"),
    fitting("fit-recipe-with-bits", "--bits 4", "leave --bits out", recipe="target_bpw: 4.5"),
    fitting("fit-recipe-nothing-free", "", "width is free", recipe="{target_bpw: 4.5, rules: [{name: '*', bits: 4}]}"),
    by_file("fit-sensitivity-of-another-model", "sensitivities of this checkpoint", "pqweights sensitivity"),
    fitting(
        "fit-sensitivity-missing", "--target-bpw 4.5 --sensitivity nowhere", "nowhere", "No such file", "'heuristic'"
    ),
    fitting("fit-sensitivity-a-folder", "--target-bpw 4.5 --sensitivity model", "model", "Is a directory"),
    by_file("fit-sensitivity-not-json", "expected JSON", content=b"{"),
    by_file("fit-sensitivity-deep", "levels of nesting", content=b"[" * 200_000),
    by_file("fit-sensitivity-something-else", "a file that pqweights sensitivity wrote", content={"groups": []}),
    by_file("fit-sensitivity-newer", "pqweights_sensitivity 1", pqweights_sensitivity=2),
    by_file("fit-sensitivity-without-groups", "groups: expected at least one group", groups=[]),
    by_file("fit-sensitivity-a-group-of-nothing", "groups: group: expected keys and values", groups=[5]),
    by_file("fit-sensitivity-method-unknown", "half of a surrogate pair", method={"kind": "\ud800"}),
    by_file("fit-sensitivity-weights-a-text", "weights: expected a list of texts", weights="lm"),
    by_file("fit-sensitivity-weight-twice", "is there twice", weights=["lm_head.weight"] * 2),
    by_file("fit-sensitivity-alpha-nan", "alpha: expected a number, found 'nan'", alpha=float("nan")),
    by_file("fit-sensitivity-alpha-negative", "alpha: expected a number from 0 to 1e+30, found '-1.0'", alpha=-1),
    by_file("fit-sensitivity-alpha-beyond-numbers", "alpha: expected a number", alpha=10**400),
    evaluating("sensitivity-model-missing", "nowhere", command="sensitivity nowhere s.json"),
    evaluating(
        "sensitivity-output-in-no-folder", "nowhere", "make it first", command="sensitivity model nowhere/s.json"
    ),
    evaluating("sensitivity-output-there", TEXT, "--overwrite", command="sensitivity model text.txt"),
    evaluating("sensitivity-output-a-folder", "model", "found a folder", command="sensitivity model model --overwrite"),
    evaluating("sensitivity-window-beyond-the-model", "16 tokens", "found 17", command=MEASURE + " --window 17"),
    evaluating(
        "sensitivity-too-few-tokens",
        "--tokens 15",
        "one window of 16",
        command="sensitivity model s.json --tokens 15 --window 16",
    ),
    evaluating("sensitivity-recipe-unknown", "'q55'", "'q5'", command=MEASURE + " --recipe q55"),
    evaluating("sensitivity-config-damaged", "config.json", "JSON", command=MEASURE, config=b"{"),
    evaluating(
        "sensitivity-model-unknown",
        "transformers cannot run",
        "no_such_model",
        command=MEASURE,
        config={"model_type": "no_such_model", "max_position_embeddings": 16, "vocab_size": 16},
    ),
    evaluating(
        "sensitivity-vocabulary-unknown",
        "vocab_size",
        "--text FILE",
        command=MEASURE + " --window 16",
        config={"model_type": "llama"},
    ),
    evaluating("sensitivity-an-encoder", "BertModel", command=MEASURE, config=BERT),
    evaluating(
        "sensitivity-weight-missing",
        "missing",
        "lm_head.weight",
        command=MEASURE,
        weights=without_tensor("lm_head.weight"),
    ),
    evaluating(
        "sensitivity-logits-nan", "logits are NaN", command=MEASURE, weights=stored(language_model(value=float("nan")))
    ),
    evaluating("sensitivity-text-missing", "nowhere.txt", "No such file", command=MEASURE + " --text nowhere.txt"),
    evaluating(
        "sensitivity-text-short", "1 window(s) of 16", "found 3", command=MEASURE + " --text text.txt", text="w1 w2 w3"
    ),
    evaluating(
        "sensitivity-tokens-unknown-to-the-model",
        "the token 15",
        "knows 8",
        command=MEASURE + " --text text.txt",
        config=language_model_config(8),
        weights=stored(language_model(8)),
    ),
    evaluating(
        "sensitivity-tokenizer-missing",
        "model",
        "--tokenizer DIR",
        command=MEASURE + " --text text.txt",
        without=("model/tokenizer.json", "model/tokenizer_config.json"),
    ),
]

CASES = [
    *WEIGHT_CASES,
    *HEADER_CASES,
    *INDEX_CASES,
    *SOURCE_CASES,
    *FOREIGN_CASES,
    *PACKED_CASES,
    *PICKLE_CASES,
    *RECIPE_CASES,
    *OUTPUT_CASES,
    *MASTER_CASES,
    *EXPORT_CASES,
    *EVAL_CASES,
    *CALIBRATE_CASES,
    *FIT_CASES,
]


def main(folder: Path) -> None:
    for case in CASES:
        build(case, folder / case.name)
    described = [{"folder": case.name, "commands": dict(case.commands)} for case in CASES]
    (folder / "cases.json").write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
