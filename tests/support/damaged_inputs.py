"""Sound inputs that are changed at random and read again: a function for each kind, which takes a random generator."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import without_tokenizer
from hostile.case import DOWN, GOOD_MAP, NORM, SHARD_1, SHARD_2, UP, VECTOR, WEIGHT, stored
from hostile.masters import MAKE

from pqweights.checkpoint import quantized
from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.config_schema import check_layers, checked_config
from pqweights.checkpoint.gguf.model import encode_header, gguf_model
from pqweights.checkpoint.gguf.sources import MODEL_TYPES
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from pqweights.checkpoint.readers import PlainTensor, element_count
from pqweights.checkpoint.source import Checkpoint, open_checkpoint
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.convert.listed_files import open_result
from pqweights.convert.manifest import find_manifest
from pqweights.errors import PqweightsError
from pqweights.planning.context_memory import context_bytes, most_context
from pqweights.results.inspect import inspect_gguf
from pqweights.runtime.folders import read_folder
from pqweights.storage.sources import open_source

Files = dict[str, bytes]
Random = random.Random
MOST_READ = 1 << 20  # elements of a tensor that are read
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 7, 65, 513, 2**16, 2**31 - 1, 2**31, 2**63, 2**80, -(2**70)),
    *(0.0, 0.5, 4.0, -1.5, 1e15, 1e308, float("inf"), float("nan"), "", "x", "9" * 5000, "a" * 70_000),
    *([], {}, [None], [[1]], {"x": [1]}, ["a", "b"], [0] * 4000),
]


class NowhereFiles(Storage):
    """A folder that is not on this machine."""

    def local_folder(self) -> None:
        return None


def memory_files(files: Files) -> Storage:
    """Return a folder in memory."""
    return NowhereFiles(Path("memory"), ()).with_made(files)


def place_in(value: Any, rng: Random) -> tuple[Any, Any] | None:
    """Return an object or a list within a value of JSON, and one of its keys; long lists do not hide short ones."""
    found = None
    while isinstance(value, dict | list) and value and (found is None or rng.random() < 0.7):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found, value = (value, key), value[key]
    return found


def damaged_json(value: Any, rng: Random) -> Any:
    """Return a value of JSON of which some parts, mostly one, were replaced, removed, renamed or multiplied."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if (found := place_in(value, rng)) is None:
            return value
        place, key = found
        old, kind = place[key], rng.randrange(8)
        if kind < 4:
            place[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 4:
            del place[key]
        elif kind == 5 and isinstance(old, int | float):
            place[key] = old + rng.choice((-1, 1, 0.5)) if rng.random() < 0.5 else old * rng.choice((-1, 0, 2, 3, 1000))
        elif kind == 6 and isinstance(place, dict):
            place[rng.choice((key.upper(), f"{key}s", "x.99999999999.y", "layers." + "9" * 30 + ".w"))] = place.pop(key)
        else:
            place[key] = rng.choice(([old], [old] * 3, {"x": old}, str(old), copy.deepcopy(place)))
    return value


def damaged_bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes of which some were changed, or that were cut, or doubled."""
    content, kind = bytearray(data), rng.randrange(5)
    if kind == 0:
        return bytes(content[: rng.randrange(len(content) + 1)])
    if kind == 1:
        at = rng.randrange(len(content) + 1)
        return bytes(
            content[:at] + rng.choice((b"\0", b"\xff" * 9, b"[" * 200, b"9" * 5000, b"\xed\xa0\x80")) + content[at:]
        )
    for _ in range(rng.choice((1, 2, 8))):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def damaged_files(files: Files, rng: Random, names: list[str]) -> Files:
    """Return files of which one of these was damaged."""
    name = rng.choice([name for name in names if name in files])
    if rng.random() < 0.15:
        return {**files, name: damaged_bytes(files[name], rng)}
    return {**files, name: json.dumps(damaged_json(json.loads(files[name]), rng)).encode()}


# --- configurations ---


@functools.cache
def models() -> list[tuple[dict[str, Any], list[StoredTensor]]]:
    """The configurations and the tensors of all models that llama.cpp runs, and of the families of exports."""
    import families
    import gguf_cases
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = []
    with tempfile.TemporaryDirectory() as name:
        made: list[tuple[str, Callable[[Path], Any]]] = [
            *((key, functools.partial(gguf_cases.saved, case)) for key, case in gguf_cases.CASES.items()),
            *((key, functools.partial(families.build, family)) for key, family in families.FAMILIES.items()),
        ]
        for number, (_, make) in enumerate(made[:: STEP[0]]):
            make(folder := Path(name) / str(number))
            found.append(read_model(folder))
    return found


STEP = [1]  # of which models are made, every n-th one


def read_model(folder: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Return the configuration and the stored tensors of a checkpoint."""
    storage = memory_files({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    checkpoint = open_checkpoint(storage)
    assert checkpoint.config is not None
    return checkpoint.config, list(checkpoint.stored)


def config(rng: Random) -> None:
    """A configuration beside the tensors of its model, for everything that is planned from headers."""
    sound, tensors = rng.choice(models())
    try:
        changed = json.loads(json.dumps(damaged_json(sound, rng)))
        use_config(changed, tensors, rng)
    except ValueError as error:  # an integer of too many digits, which no file that is parsed has
        if "digits" not in str(error):
            raise


def use_config(changed: Any, tensors: list[StoredTensor], rng: Random) -> None:
    """Check a configuration, and read everything from it that needs nothing but headers."""
    storage = memory_files({})
    checked_config(changed, CONFIG_FILE)
    names = {tensor.name: tensor for tensor in tensors}
    check_layers(changed, names)
    of_model, _, _ = quantized.logical_tensors(storage, names, changed)
    edited_config(changed, model_dtype(changed, of_model), old_dtype="BF16", tensors=of_model)
    context_bytes(changed, 4096)
    most_context(changed)
    checkpoint = Checkpoint(
        storage=storage, config=changed, stored=tuple(tensors), tensors=tuple(of_model), weight_files=(),
        companions=(), left_out={}, is_master=False,
    )  # fmt: skip
    with contextlib.suppress(PqweightsError):
        model = without_tokenizer(checkpoint)
        encode_header(model.metadata, {})
    if rng.random() < 0.02:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / CONFIG_FILE).write_text(json.dumps(changed))
            read_folder(Path(name))


# --- headers ---


@functools.cache
def checkpoints() -> list[Files]:
    """Small checkpoints: plain, in shards, and in formats of other tools."""
    from hostile.foreign import CASES

    shards = {SHARD_1[4:]: stored({UP: WEIGHT}), SHARD_2[4:]: stored({DOWN: WEIGHT})}
    index = json.dumps({"metadata": {}, "weight_map": GOOD_MAP}).encode()
    of_others = [
        {name.removeprefix("src/"): content if isinstance(content, bytes) else json.dumps(content).encode()
         for name, content in case.files.items()}
        for case in CASES if "src/model.safetensors" in case.files
    ]  # fmt: skip
    plain = {"model.safetensors": stored({UP: WEIGHT, NORM: VECTOR}), CONFIG_FILE: b'{"model_type": "llama"}'}
    sharded = {**shards, INDEX_FILE: index}
    return [*[plain, sharded] * 20, *of_others]


def damaged_header(data: bytes, rng: Random) -> bytes:
    """Return a safetensors file with a damaged header."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        return damaged_bytes(data[: 8 + length], rng) + data[8 + length :]
    text = json.dumps(damaged_json(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def header(rng: Random) -> None:
    """A checkpoint in safetensors, plain or in the formats of other tools: headers, index and configuration."""
    files = dict(rng.choice(checkpoints()))
    names = [name for name in files if name.endswith((".safetensors", ".json"))]
    name = rng.choice(names)
    if name.endswith(".json"):
        files = damaged_files(files, rng, [name])
    else:
        files[name] = damaged_header(files[name], rng)
    read_all(open_checkpoint(memory_files(files)))


def read_all(checkpoint: Checkpoint) -> None:
    """Read the tensors of a checkpoint, the first elements of large ones."""
    for tensor in checkpoint.tensors:
        count = min(element_count(tensor), MOST_READ)
        dtype = tensor.plain_dtype
        tensor.read(0, count, dtype, np.empty(8 * count, dtype=np.uint8))


# --- masters ---


@functools.cache
def masters() -> list[Files]:
    """A master of each codec."""
    found = []
    for make in MAKE.values():
        with tempfile.TemporaryDirectory() as name:
            make(Path(name))
            found.append({path.name: path.read_bytes() for path in (Path(name) / "master").iterdir()})
    return found


def master(rng: Random) -> None:
    """A master, with or without its manifest: configuration, manifest, index and headers."""
    files = dict(rng.choice(masters()))
    if rng.random() < 0.5:
        del files[MANIFEST_FILE]
    if rng.random() < 0.25:
        name = rng.choice([name for name in files if name.endswith(".safetensors")])
        files[name] = damaged_header(files[name], rng)
    else:
        files = damaged_files(files, rng, [CONFIG_FILE, CONFIG_FILE, MANIFEST_FILE, INDEX_FILE])
    storage = memory_files(files)
    read_all(open_result(storage, find_manifest(storage)))


# --- GGUF ---

EXPERTS = {
    "model_type": "qwen2_moe", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1,
    "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 8, "max_position_embeddings": 64,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
GGUF_TENSORS: list[tuple[str, list[int], int]] = [
    ("token_embd.weight", [32, 8], 0), ("output.weight", [32, 8], 8),
    *((f"{name}.weight", [32], 0) for name in _NORMS),
    *((f"blk.0.attn_{part}.weight", [32, 32], 2) for part in ("q", "k", "v", "output")),
    *((f"blk.0.attn_{part}.bias", [32], 0) for part in "qkv"),
    ("blk.0.ffn_gate_inp.weight", [32, 2], 0), ("blk.0.ffn_gate_inp_shexp.weight", [32], 0),
    *((f"blk.0.ffn_{part}_exps.weight", [32, 32, 2], 2) for part in ("gate", "up", "down")),
    *((f"blk.0.ffn_{part}_shexp.weight", [32, 32], 1) for part in ("gate", "up", "down")),
]  # fmt: skip
GGUF_KEYS: list[tuple[str, int, Any]] = [
    ("general.architecture", 8, "qwen2moe"), ("general.alignment", 4, 32), ("qwen2moe.block_count", 4, 1),
    ("qwen2moe.context_length", 4, 64), ("qwen2moe.embedding_length", 4, 32), ("qwen2moe.attention.head_count", 4, 1),
    ("qwen2moe.feed_forward_length", 4, 32), ("qwen2moe.expert_count", 4, 2), ("qwen2moe.expert_used_count", 4, 1),
    ("qwen2moe.attention.head_count_kv", 4, 1), ("qwen2moe.attention.layer_norm_rms_epsilon", 6, 1e-5),
    ("qwen2moe.rope.freq_base", 6, 1e4), ("qwen2moe.expert_feed_forward_length", 4, 32),
    ("qwen2moe.expert_shared_feed_forward_length", 4, 32), ("tokenizer.ggml.model", 8, "gpt2"),
    ("tokenizer.ggml.pre", 8, "qwen2"), ("tokenizer.ggml.tokens", 9, (8, [f"t{n}" for n in range(8)])),
    ("tokenizer.ggml.token_type", 9, (5, [1] * 8)), ("tokenizer.ggml.merges", 9, (8, ["t 0", "t 1"])),
    ("tokenizer.ggml.eos_token_id", 4, 7), ("tokenizer.ggml.bos_token_id", 4, 6),
    ("tokenizer.chat_template", 8, "{{ messages }}"),
]  # fmt: skip
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34)}
_ODD_SIZES = (0, 1, 2, 3, 31, 2**16, 2**16 + 1, 2**31, 2**34, 2**60, 2**63, 2**64 - 1)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _text(str(value))
    if kind == 9:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(_value(value[0], item) for item in value[1])
    form = _FORMS[kind]
    with contextlib.suppress(struct.error, TypeError, ValueError, OverflowError):
        return struct.pack(f"<{form}", float(value) if form in "fd" else int(value))
    return b"\xff" * struct.calcsize(form)


Keys = list[tuple[str, int, Any]]
Shapes = list[tuple[str, list[int], int]]


def damaged_gguf(keys: Keys, tensors: Shapes, data: bytes, rng: Random) -> bytes:
    """Return a GGUF file in which keys or tensors say something else, and data follow as they should, mostly."""
    keys, tensors = [*keys], [*tensors]
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(keys))
        keys[at] = _damaged_key(keys[at], rng.choice(keys)[0], rng)
        if rng.random() < 0.2:
            del keys[at]
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(tensors))
        tensors[at] = _damaged_tensor(tensors[at], rng.choice(tensors)[0], rng)
    return gguf_bytes(keys, tensors, data, rng if rng.random() < 0.2 else None)


def gguf_bytes(keys: Keys, tensors: Shapes, data: bytes, rng: Random | None) -> bytes:
    """Return a GGUF file, whose header is damaged by a generator, if there is one."""
    entries, offset = [], 0
    for name, shape, code in tensors:
        entries.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset & (2**64 - 1)))
        size, block = 1, _BLOCKS.get(code, (1, 2))
        for dimension in shape:
            size *= dimension
        offset += -(-(size // block[0] * block[1]) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(name) + struct.pack("<I", kind) + _value(kind, value) for name, kind, value in keys)
    head += b"".join(entries)
    head += bytes(-len(head) % 32)
    if rng is not None:
        head = damaged_bytes(head, rng)
    length = min(offset, max(1 << 20, len(data)))
    return head + data[:length].ljust(length, b"\0")


def _damaged_key(key: tuple[str, int, Any], other: str, rng: Random) -> tuple[str, int, Any]:
    """Return a key with another value, type or name. other: the name of another key"""
    name, kind, value = key
    odd = rng.choice(ODD)
    if rng.random() < 0.3:
        return name, 9, (rng.choice((4, 6, 8)), odd if isinstance(odd, list) else [odd] * rng.choice((1, 2000)))
    if rng.random() < 0.5:
        return name, kind, _damaged_items(value, odd, rng) if kind == 9 else odd
    return rng.choice((name, "x" * 70_000, other)), rng.choice((4, 6, 7, 8)), odd


def _other_value(kind: int, value: Any, rng: Random) -> tuple[int, Any]:
    """Return another value of the type of a key, mostly."""
    odd = rng.choice(ODD)
    if kind != 9 and isinstance(value, list | dict | str | None):
        return kind, odd
    if kind == 9:
        return kind, _damaged_items(value, rng.choice((odd, *value[1][:3])), rng)
    if kind in (4, 5, 10, 11) and rng.random() < 0.2:  # one for each layer
        return 9, (kind, [value + rng.choice((-1, 0, 0, 1)) for _ in range(rng.choice((1, 2, 3)))])
    if kind in (4, 5, 6, 10, 11, 12) and rng.random() < 0.7:
        return kind, rng.choice((0, 1, 2, 3, value + 1, value - 1, 2 * value, value // 2, -value, value * 1000))
    return kind, odd


def _damaged_items(value: tuple[int, list[Any]], odd: Any, rng: Random) -> tuple[int, list[Any]]:
    """Return a list of the same type that has other items, or more or fewer."""
    kind, items = value
    if rng.random() < 0.5 or not items:
        return kind, [odd] * len(items)
    at = rng.randrange(len(items))
    return kind, rng.choice(([*items[:at], odd, *items[at + 1 :]], items[:at], items + items[at:]))


def _damaged_tensor(tensor: tuple[str, list[int], int], other: str, rng: Random) -> tuple[str, list[int], int]:
    """Return a tensor of another shape, name or type. other: the name of another tensor"""
    name, shape, code = tensor
    kind_of_change = rng.randrange(4)
    if kind_of_change == 0 and shape:
        shape = [*shape]
        shape[rng.randrange(len(shape))] = rng.choice(_ODD_SIZES)
        if rng.random() < 0.5:
            shape[rng.randrange(len(shape))] = 0
    elif kind_of_change == 1:
        name = rng.choice((name.replace("0", "9" * rng.choice((1, 4, 9, 40))), "x", "", "blk.0", other))
    elif kind_of_change == 2:
        code = rng.choice((0, 1, 2, 8, 30, 39, 99))
    else:
        shape = rng.choice(([], [1], [32, 1], shape[::-1], [*shape, 1], [*shape, 2]))
    return name, shape, code


def gguf(rng: Random) -> None:
    """A GGUF file, with or without a configuration beside it."""
    read_gguf(damaged_gguf(GGUF_KEYS, GGUF_TENSORS, b"", rng), EXPERTS if rng.random() < 0.6 else None, rng)


def read_gguf(content: bytes, beside: dict[str, Any] | None, rng: Random) -> None:
    """Read a GGUF file, and all that its source holds. beside: the configuration in its folder"""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.gguf"
        path.write_bytes(content)
        if beside is not None:
            (path.parent / CONFIG_FILE).write_text(json.dumps(beside))
        with contextlib.suppress(PqweightsError):
            inspect_gguf(path).to_json()
        source = open_source(path if rng.random() < 0.5 else path.parent)
        for companion in source.companions:
            read_file(source.storage, companion)
        read_all(source)
        encode_header(gguf_model(source, name=None).metadata, {})


@functools.cache
def lonely_files() -> list[tuple[Keys, Shapes, bytes]]:
    """GGUF files of all architectures whose configuration is read from the metadata: keys, tensors and data."""
    import gguf_cases
    import gguf_files

    found = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate([*gguf_cases.CASES.values()][:: STEP[0]]):
            gguf_cases.saved(case, folder := Path(name) / str(number))
            config = json.loads((folder / CONFIG_FILE).read_bytes())
            if {config["model_type"], config.get("text_config", {}).get("model_type")} & {*MODEL_TYPES}:
                found.append(_parts_of(gguf_files.write_gguf(folder, "F32")))
    return found


@functools.cache
def vocabularies() -> list[Keys]:
    """What files say of the tokenizers of all kinds."""
    import gguf_files
    import trained_tokenizers as trained

    found = []
    with tempfile.TemporaryDirectory() as name:
        for kind in ("gpt2", "llama3", "qwen2", "llama2", "gemma", "bert", "unigrams"):
            tokenizer = trained.KINDS[kind]()
            trained.save(tokenizer, folder := Path(name) / kind, chat_template="{{ messages }}")
            gguf_files.write_llama(folder, rows=tokenizer.get_vocab_size())
            keys, *_ = _parts_of(gguf_files.write_gguf(folder, "F32"))
            found.append([key for key in keys if key[0].startswith("tokenizer.")])
    return found


def _parts_of(file: Path) -> tuple[Keys, Shapes, bytes]:
    """Return the keys, the tensors and the data of a file."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    keys: Keys = []
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            kind, *items = map(int, field.types)
            value = field.contents()
            keys.append((key, kind, (items[0], value) if items else value))
    tensors = [(of.name, [int(size) for size in of.shape], int(of.tensor_type)) for of in reader.tensors]
    return keys, tensors, file.read_bytes()[reader.data_offset :]


# What files of other models say further.
_FURTHER = (
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.freq_base_swa",
    "rope.scaling.yarn_beta_fast", "rope.dimension_count", "expert_count", "expert_used_count", "nextn_predict_layers",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "attention.temperature_scale",
    "expert_gating_func", "leading_dense_block_count", "logit_scale", "final_logit_softcapping", "expert_group_count",
)  # fmt: skip


def lonely(rng: Random) -> None:
    """A GGUF file with nothing beside it, from whose metadata configuration and tokenizer are read."""
    keys, tensors, data = rng.choice(lonely_files())
    if rng.random() < 0.6:
        keys = [*(key for key in keys if not key[0].startswith("tokenizer.")), *rng.choice(vocabularies())]
    if rng.random() < 0.1:
        return read_gguf(damaged_gguf(keys, tensors, data, rng), None, rng)
    said = {name: (kind, value) for name, kind, value in keys}
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice([*said][1:])
        if rng.random() < 0.2:
            name = f"{said['general.architecture'][1]}.{rng.choice(_FURTHER)}"
        said[name] = _other_value(*said.get(name, (rng.choice((4, 6)), 4)), rng)
        if rng.random() < 0.15:
            del said[name]
    if rng.random() < 0.05:
        said["general.architecture"] = (8, rng.choice(lonely_files())[0][0][2])
    if rng.random() < 0.1:
        name = f"{said['general.architecture'][1]}.rope.scaling.type"
        said[name] = (8, rng.choice(("linear", "yarn", "longrope", "none", "dynamic")))
    if rng.random() < 0.2:
        tensors = [*tensors]
        at = rng.randrange(len(tensors))
        tensors[at] = _damaged_tensor(tensors[at], tensors[0][0], rng)
    if rng.random() < 0.1:
        data = damaged_bytes(data, rng)
    return read_gguf(gguf_bytes([(name, *of) for name, of in said.items()], tensors, data, None), None, rng)


# --- tokenizers, templates, and other files beside the weights ---


@functools.cache
def tokenizers() -> list[Files]:
    """The files of small tokenizers of the kinds that are read, beside a Llama of one layer."""
    import trained_tokenizers as trained

    from pqweights.checkpoint.gguf.splits import LLAMA3, QWEN2

    sound = [
        trained.byte_level(), trained.byte_level(LLAMA3, whole_words=True, starts=True), trained.byte_level(QWEN2),
        trained.sentencepiece(), trained.sentencepiece(gemma=True),
    ]  # fmt: skip
    return [{"tokenizer.json": tokenizer.to_str().encode(), **_BESIDE} for tokenizer in sound]


_TEMPLATES = [{"name": "default", "template": "{{ x }}"}, {"name": "tool_use", "template": "{{ y }}"}]
_BESIDE: Files = {
    name: json.dumps(content).encode()
    for name, content in {
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True,
                                  "chat_template": "{{ messages }}", "tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        "chat_template.json": {"chat_template": _TEMPLATES},
        "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.5},
        "added_tokens.json": {"<think>": 5},
    }.items()
}  # fmt: skip


def tokenizer(rng: Random) -> None:
    """What lies beside the weights of a model that becomes a GGUF file."""
    files = dict(rng.choice(tokenizers()))
    rows = 1000
    if rng.random() < 0.5:  # a template has precedence where it is stated
        files["tokenizer_config.json"] = b'{"bos_token": "<s>"}'
    files = damaged_files(files, rng, [*files])
    width = 8
    shapes = {
        "model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,), "lm_head.weight": (rows, width),
        **{f"model.layers.0.{name}.weight": (width, width) for name in ("self_attn.q_proj", "self_attn.k_proj",
           "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")},
        **{f"model.layers.0.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")},
    }  # fmt: skip
    tensors = [PlainTensor.of(memory_files({}), StoredTensor(n, "BF16", s, "x", 0, 0)) for n, s in shapes.items()]
    llama = {"model_type": "llama", "hidden_size": width, "intermediate_size": 8, "num_attention_heads": 1,
             "num_hidden_layers": 1, "vocab_size": rows, "max_position_embeddings": 64, "bos_token_id": 1}  # fmt: skip
    checkpoint = Checkpoint(
        storage=memory_files(files), config=llama, stored=(), tensors=tuple(tensors), weight_files=(),
        companions=tuple(files), left_out={}, is_master=False,
    )  # fmt: skip
    model = gguf_model(checkpoint, name=None)
    encode_header(model.metadata, {})


KINDS: dict[str, Callable[[Random], None]] = {
    "config": config,
    "header": header,
    "master": master,
    "gguf": gguf,
    "lonely": lonely,
    "tokenizer": tokenizer,
}

# What is damaged, which takes longer to make than to read.
SOUND: dict[str, Callable[[], object]] = {
    "config": models,
    "header": checkpoints,
    "master": masters,
    "gguf": lambda: None,
    "lonely": lambda: (lonely_files(), vocabularies()),
    "tokenizer": tokenizers,
}
