"""Tiny checkpoints and what tests compare; the safetensors layout is written here a second time, on purpose."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from shared import skip_flushes

from pqweights.checkpoint import shard_file
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.common.options import SELF, Options
from pqweights.convert import jobs, shard
from pqweights.convert.report import RewriteReport
from pqweights.planning.recipe import load_recipe
from pqweights.targets import linear

Array = npt.NDArray[Any]
Tensor = tuple[str, Array]  # safetensors dtype, and values whose bytes are stored (BF16 as uint16)


def bf16(values: Array) -> Tensor:
    """float32 values, rounded to nearest even, as a BF16 tensor."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def f16(values: Array) -> Tensor:
    return "F16", values.astype(np.float16)


def f32(values: Array) -> Tensor:
    return "F32", values.astype(np.float32)


def as_float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The values of a floating tensor."""
    dtype, values = tensor
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def gaussian(*shape: int, seed: int = 0, scale: float = 0.02) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    position = 0
    for name, (dtype, values) in tensors.items():
        offsets = [position, position + values.nbytes]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        position += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for _, values in tensors.values())


def write_checkpoint(
    folder: Path,
    *shards: Mapping[str, Tensor],
    config: dict[str, Any] | None = None,
    companions: Mapping[str, bytes] | None = None,
) -> Path:
    """A checkpoint folder of one file, or of several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(shards[0]))
    else:
        weight_map = {}
        for number, tensors in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            (folder / file).write_bytes(safetensors_bytes(tensors))
            weight_map |= dict.fromkeys(tensors, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, data in (companions or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones included, by relative name; folders end in a slash."""
    return {
        path.relative_to(folder).as_posix() + ("/" if path.is_dir() else ""): b""
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, parsed without pqweights; BF16 as uint16, other unusual dtypes as bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {"BF16": "u2", "F16": "f2", "F32": "f4", "F64": "f8", "U8": "u1", "I8": "i1", "U16": "u2", "I32": "i4"}
    kinds |= {"U32": "u4", "I64": "i8", "BOOL": "?"}
    result = {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        values = np.frombuffer(data[begin:end], dtype=kinds.get(entry["dtype"], "u1"))
        result[name] = (entry["dtype"], values.reshape(entry["shape"]))
    return result


def read_all(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder."""
    result: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        result |= read_safetensors(path)
    return result


@contextlib.contextmanager
def narrow_layers_packed() -> Iterator[None]:
    """Let torchao pack layers that are narrower than its tiles, as tiny models have them, instead of leaving them.

    Modules that need it ask for the fixture of that name, commands of run_command for the option.
    """
    before = linear.TOO_MANY_BITS
    linear.TOO_MANY_BITS = math.inf
    try:
        yield
    finally:
        linear.TOO_MANY_BITS = before


def master_weights(folder: Path) -> dict[str, Array]:
    """The weights that a master holds as codes, decoded to float32."""
    result = {}
    for tensor in open_local(folder).tensors:
        if isinstance(tensor, EncodedTensor):
            raw = np.empty(4 * math.prod(tensor.shape), dtype=np.uint8)
            tensor.read(0, math.prod(tensor.shape), "F32", raw)
            result[tensor.name] = raw.view(np.float32).reshape(tensor.shape)
    return result


def small_checkpoint(folder: Path) -> Path:
    """Two shards, ten tensors of every kind that the driver distinguishes, about 170 kB of BF16, and companions."""
    constant = np.full((64, 128), 0.0125, dtype=np.float32)  # every block is a Walsh function: rescued
    first = {
        "model.embed_tokens.weight": bf16(gaussian(96, 128, seed=1)),
        "model.layers.0.input_layernorm.weight": bf16(1 + gaussian(128, seed=2)),
        "model.layers.0.self_attn.q_proj.weight": bf16(gaussian(128, 128, seed=3)),
        "model.layers.0.self_attn.k_proj.weight": bf16(
            gaussian(63, 130, seed=4)
        ),  # 128 divides neither rows nor weight
        "model.layers.0.mlp.up_proj.weight": bf16(constant),
    }
    second = {
        "model.layers.0.mlp.down_proj.weight": bf16(gaussian(128, 192, seed=5, scale=1e-9)),  # norms need an exponent
        "model.layers.0.mamba.A_log": f32(gaussian(33, seed=6)),
        "model.layers.0.position_ids": ("I64", np.arange(7, dtype=np.int64)),
        "model.norm.weight": bf16(1 + gaussian(128, seed=7)),
        "lm_head.weight": bf16(gaussian(96, 128, seed=8)),
    }
    return write_checkpoint(
        folder,
        first,
        second,
        config={"model_type": "llama", "torch_dtype": "bfloat16"},
        companions={
            "tokenizer.json": b'{"tokens": []}\n',
            "code/modeling.py": b"pass\n",
            "NOTICE": b"",
            "README.md": b"#",
        },
    )


# Runs that die: `python tests/support/helpers.py JSON` forks one child per point; each child kills itself at its point.

# The functions of os, and the built-in open, at whose calls a run may die.
KILL_FUNCTIONS = ("replace", "pwrite", "fsync", "unlink", "rmdir", "mkdir", "posix_fallocate", "open")
SMALL_CHUNK = 4096


def killed_runs(command: dict[str, Any], points: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Run `command` once per point in a forked process, to the point where it kills itself.

    command: {"quantize" or "export": source, **keywords}
    points: for each run {"out", "function" to die at, "number" of its call, "when": before, half (of the bytes written)
        or after}, with "may_end" if that call may not come; without a function, the run is undisturbed

    Returns the calls that each run made, by function, or {} if it was killed.
    """
    request = json.dumps({"command": command, "points": points})
    done = subprocess.run([sys.executable, __file__, request], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def run_command(command: dict[str, Any], out: Path | str, threads: int = 2) -> RewriteReport:
    """One quantize or export in this process."""
    from calls import export, learned_scales, quantize

    options = {key: value for key, value in command.items() if key not in ("quantize", "export", "recipe")}
    if "quantize" in command:
        recipe = load_recipe(command.get("recipe", "q5"))
        if "scales" in options:
            options["learned"] = learned_scales(Path(options.pop("scales")))
        return quantize(Path(command["quantize"]), out, recipe, threads=threads, **options)
    asked = {field.name: options.pop(field.name) for field in fields(Options) if field.name in options}
    if "inputs" in options:
        asked["calibrate"] = SELF
    source = Path(options.pop("original", command["export"]))  # in place of the master
    target = options.pop("target")
    packed = narrow_layers_packed() if options.pop("narrow_layers_packed", False) else contextlib.nullcontext()
    with packed:
        return export(source, out, target, Options(**asked), threads=threads, **options)


def small_chunks() -> None:
    """Cut tensors of this process into small chunks, of which all whole pages are written around the page cache."""
    jobs.CHUNK_WEIGHTS = SMALL_CHUNK
    shard_file.DIRECT_BYTES = shard_file.PAGE_BYTES
    shard.PROGRESS_SECONDS = 0.0


Call = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _intercept(name: str, act: Call) -> Iterator[int]:
    """Have `act` called in place of a function, and return the counter of the calls."""
    module: Any = builtins if name == "open" else os
    original, calls = getattr(module, name), itertools.count(1)
    setattr(module, name, lambda *args, **keywords: act(next(calls), original, args, keywords))
    return calls


def _pass_on(number: int, original: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return original(*args, **keywords)


def _die_at(point: dict[str, Any]) -> None:
    def act(number: int, original: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if number != point["number"]:
            return original(*args, **keywords)
        with contextlib.suppress(OSError):  # direct access writes whole pages or nothing
            if point["when"] == "half":
                data = memoryview(args[1]).cast("B")
                original(args[0], data[: len(data) // 2], *args[2:])
            elif point["when"] == "after":
                original(*args, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)
        return signal.pause()

    _intercept(point["function"], act)


def _child(command: dict[str, Any], point: dict[str, Any], answer: int) -> None:
    counters: dict[str, Iterator[int]] = {}
    if "function" in point:
        _die_at(point)
    else:
        counters = {name: _intercept(name, _pass_on) for name in KILL_FUNCTIONS}
    run_command(command, Path(point["out"]))
    os.write(answer, json.dumps({name: next(calls) - 1 for name, calls in counters.items()}).encode())
    os._exit(0)


def _drive(command: dict[str, Any], points: list[dict[str, Any]]) -> None:
    small_chunks()
    skip_flushes()
    with tempfile.TemporaryDirectory() as folder:
        run_command(command, Path(folder) / "out")  # imports and compiles before the forks what every child needs
    answers = []
    for point in points:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _child(command, point, write)
            finally:
                os._exit(3)
        os.close(write)
        with open(read, "rb") as stream:
            text = stream.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        may_end = "function" not in point or "may_end" in point
        assert killed or (status == 0 and may_end), (point, status)
        answers.append({} if killed else json.loads(text))
    print(json.dumps(answers))


if __name__ == "__main__":
    _drive(**json.loads(sys.argv[1]))


def sylvester() -> npt.NDArray[np.float64]:
    """The 128 x 128 Sylvester matrix, entry by entry: -1 to the number of common ones of row and column."""
    index = np.arange(128)
    return np.where(np.bitwise_count(index[:, None] & index[None, :]) % 2, -1.0, 1.0)


def block_families() -> dict[str, npt.NDArray[np.float32]]:
    """Blocks [n, 128] of every kind that the arithmetic treats differently, all finite."""
    rng = np.random.default_rng(20250)
    normal = rng.standard_normal((48, 128))
    one_hot = np.zeros((130, 128))
    one_hot[np.arange(128), np.arange(128)] = np.where(np.arange(128) % 3 == 0, -0.37, 1e-3)
    one_hot[128, 77], one_hot[129, 127] = 3e38, -(2.0**-149)
    zeros = np.zeros((3, 128))
    zeros[1] = -0.0
    zeros[2, ::2] = -0.0
    walsh = np.concatenate([sylvester() * 0.011, -sylvester()[::9] * 3.0])
    families = {
        "gaussian": normal * 0.02,
        "heavy-tailed": rng.standard_t(1.5, (48, 128)) * 0.01,
        "constant": np.outer([0.0125, -1.0, 3.0, 7e-7, 6e4, -1.5e38, 1e-40], np.ones(128)),
        "one-hot": one_hot,
        "two-hot": one_hot[:64] * 0.5 + one_hot[64:128] * 300.0,
        "Walsh-aligned": walsh,
        "tiny": normal * 10.0 ** rng.uniform(-36, -9, (48, 1)),
        "huge": np.clip(normal * 10.0 ** rng.uniform(9, 38, (48, 1)), -3.38e38, 3.38e38),
        "zero": zeros,
        "float32 subnormal": np.round(normal * 1000) * 2.0**-149,
        "float16 subnormal": np.round(normal * 300) * 2.0**-24,
        "near the prescaling limits": normal
        * 2.0 ** rng.uniform(-36, -32, (48, 1))
        * rng.choice([1, 2.0**60], (48, 1)),
        "mixed scales within a block": normal * 10.0 ** rng.uniform(-30, 30, (48, 128)),
        "few distinct values": rng.integers(-1, 2, (48, 128)) * 0.25,
        "with blocks of zeros": normal * rng.integers(0, 2, (48, 1)) * 0.02,
    }
    return {name: values.astype(np.float32) for name, values in families.items()}


def raw_bytes(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """Return values as raw bytes of BF16, F16 or F32: rounded to nearest even, clamped to the range of the dtype."""
    limit = {"BF16": 3.3895313892515355e38, "F16": 65504.0, "F32": 3.4028234663852886e38}[dtype]
    clipped = np.clip(values, np.float32(-limit), np.float32(limit))
    make = {"BF16": bf16, "F16": f16, "F32": f32}[dtype]
    return np.ascontiguousarray(make(clipped)[1]).reshape(-1).view(np.uint8)


def values_of(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """The values [blocks, 128] of whole blocks given as raw bytes."""
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    return as_float32((dtype, raw.view(kind))).reshape(-1, 128)
