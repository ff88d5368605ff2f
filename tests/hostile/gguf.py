"""Bad inputs: GGUF files that are damaged, and GGUF where a checkpoint or a master is expected."""

from __future__ import annotations

import struct
from typing import Any

from hostile.case import Case

EVAL, INSPECT = "eval a.gguf --text text.txt", "inspect a.gguf"
TEXT = {"text.txt": "once upon a time"}
OTHERS = "only pqweights eval, export, inspect, plan and quantize read"


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _file(*entries: bytes, keys: int = 0, tensors: int = 0, data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(entries)
    return head + bytes(-len(head) % 32 + data)


def _tensor(name: str, columns: int, kind: int, offset: int = 0) -> bytes:
    return _text(name) + struct.pack("<IQIQ", 1, columns, kind, offset)


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1,
    "vocab_size": 8, "max_position_embeddings": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def _source(name: str, data: bytes, config: Any, *fragments: str) -> Case:
    return Case(name, {"quantize src out": fragments}, {"src/a.gguf": data, "src/config.json": config})


def _damaged(name: str, data: bytes, *fragments: str) -> Case:
    said = ("a.gguf", *fragments)
    return Case(name, {INSPECT: said, EVAL: said}, {"a.gguf": data, **TEXT})


GOOD = _file(_tensor("a", 32, 0), tensors=1, data=128)
OF_LLAMA = _file(
    _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
    _tensor("a", 32, 0),
    keys=1,
    tensors=1,
    data=128,
)

CASES = [
    _damaged("gguf-empty", b"", "found a file of 0 bytes"),
    _damaged("gguf-another-format", b"PK\3\4" + bytes(60), "expected the bytes GGUF"),
    _damaged("gguf-big-endian", _file(version=3 << 24), "big-endian"),
    _damaged("gguf-type-unknown", _file(_tensor("a", 32, 99), tensors=1, data=128), "tensor 'a'", "found 99"),
    _damaged("gguf-rows-of-33", _file(_tensor("a", 33, 2), tensors=1, data=32), "multiple of 32 for Q4_0"),
    _damaged("gguf-cut", GOOD[:-1], "data is truncated"),
    _damaged("gguf-followed-by-others", GOOD + b"\0", "followed by foreign bytes"),
    _damaged(
        "gguf-with-a-hole",
        _file(_tensor("a", 32, 0), _tensor("b", 32, 0, 160), tensors=2, data=288),
        "tensor 'b' leaves a hole before it",
    ),
    Case(
        "gguf-part-missing",
        {"inspect m-00001-of-00002.gguf": ("m-00002-of-00002.gguf: missing",)},
        {"m-00001-of-00002.gguf": _file(_text("split.count") + struct.pack("<IH", 2, 2), keys=1)},
    ),
    Case(
        "gguf-two-models-in-a-folder",
        {"inspect src": ("expected one GGUF model, found 2",)},
        {"src/a.gguf": GOOD, "src/b.gguf": GOOD},
    ),
    Case(
        "gguf-as-a-source-or-a-result",
        {
            **{f"{command} a.gguf": (OTHERS,) for command in ("verify", "card")},
            "plan a.gguf": ("a.gguf", "general.architecture", "put config.json of the original model beside it"),
            "export a.gguf out --target bf16": ("a.gguf", "general.architecture"),
        },
        {"a.gguf": GOOD, **TEXT},
    ),
    _source("gguf-source-of-a-foreign-tensor", OF_LLAMA, LLAMA, "llama.cpp needs", "config.json"),
    _source("gguf-source-cut", GOOD[:-1], LLAMA, "data is truncated"),
    _source("gguf-source-of-an-unknown-type", GOOD, {"model_type": "unheard"}, "a.gguf", "general.architecture"),
    _source("gguf-source-of-another-model", GOOD, LLAMA, "config.json", "the architecture llama"),
    _source(
        "gguf-source-of-many-layers", OF_LLAMA, LLAMA | {"num_hidden_layers": 10**9}, "config.json", "num_hidden_layers"
    ),
]
