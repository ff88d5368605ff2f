"""Bad inputs: pickled checkpoints, some of them malicious."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import NORM, QUANTIZE, UNPICKLE, UP, Case, Content, write

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


def indexed_pickle(name: str, index: Content, *fragments: str) -> Case:
    def prepare(folder: Path) -> None:
        write(folder, {"src/a.bin": saved(weights()), "src/pytorch_model.bin.index.json": index})

    return Case(name, {UNPICKLE: fragments}, prepare=prepare)


CASES = [
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
    pickled("pickle-cut-to-10-bytes", lambda: saved(weights())[:10], "pytorch_model.bin"),
    pickled("pickle-of-a-list", lambda: saved([1]), "pytorch_model.bin", "list"),
    pickled("pickle-nested", lambda: saved(nested_state()), "pytorch_model.bin", "dictionary of tensors"),
    pickled("pickle-sparse", lambda: saved(sparse_state()), "pytorch_model.bin"),
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
    indexed_pickle("pickle-index-without-a-map", {}, "pytorch_model.bin.index.json"),
    indexed_pickle("pickle-index-leaves-the-folder", {"weight_map": {UP: "../a.bin"}}, "../a.bin"),
    indexed_pickle("pickle-index-names-a-missing-file", {"weight_map": {UP: "b.bin"}}, "b.bin", "missing"),
    indexed_pickle(
        "pickle-index-names-a-missing-tensor", {"weight_map": {UP: "a.bin", "absent": "a.bin"}}, "a.bin", "absent"
    ),
]
