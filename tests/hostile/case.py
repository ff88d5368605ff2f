"""A bad input, and the parts that many of them share: safetensors files written by hand, and commands."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

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
    commands: each command with the fragments that its error must contain; None if the command need not notice the
        damage, but may not crash
    files: the content of the folder
    prepare: builds what cannot be given as files
    own_process: whether the input could crash the interpreter
    """

    name: str
    commands: Mapping[str, tuple[str, ...] | None]
    files: Mapping[str, Content] = field(default_factory=dict)
    _: KW_ONLY
    prepare: Prepare | None = None
    own_process: bool = False


def build(case: Case, folder: Path) -> None:
    """Write a case into its folder. What has to be prepared is made once in a process, and copied then."""
    if case.prepare is None:
        folder.mkdir(parents=True)
        write(folder, case.files)
        return
    made = Path(_made().name) / case.name
    if not made.exists():
        made.mkdir()
        write(made, case.files)
        case.prepare(made)
    shutil.copytree(made, folder, symlinks=True)


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process."""
    return tempfile.TemporaryDirectory(prefix="hostile-")


def run(line: str, *, own_process: bool = False) -> Result:
    """Run a command line, in a process of its own if the input could crash this one."""
    from pqweights_cli.main import app

    if not own_process:
        return CliRunner().invoke(app, line.split(), prog_name="pqweights")
    command = [sys.executable, "-m", "pqweights_cli.main", *line.split(), "--quiet"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    ended = SystemExit(1) if done.returncode == 1 and b"Traceback" not in done.stderr else None
    return Result(CliRunner(), done.stdout, done.stderr, done.stdout, None, done.returncode, ended)


def remembered(make: Prepare) -> Prepare:
    """The same for what several cases begin with: files, which are made once and written then."""
    files: dict[str, bytes] = {}

    def prepare(folder: Path) -> None:
        if files:
            write(folder, files)
            return
        make(folder)
        files.update((str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*") if path.is_file())

    return prepare


def write(folder: Path, files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


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


def stored(tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> bytes:
    """A well-formed file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = entry(dtype, shape, [len(data), len(data) + len(values)])
        data += values
    return headed(header, data)


def weight_with(value: float, row: int, column: int) -> Stored:
    values = np.frombuffer(WEIGHT_DATA, dtype=np.float32).reshape(2, 128).copy()
    values[row, column] = value
    return ("F32", [2, 128], values.tobytes())


def zeros(dtype: str, *shape: int) -> Stored:
    bits = {
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
    }[dtype]
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
NAN = float("nan")
