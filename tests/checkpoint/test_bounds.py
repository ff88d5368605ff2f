"""What small files may claim: nothing that takes time or memory out of proportion to their bytes."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import raises
from helpers import bf16, gaussian, write_checkpoint
from hostile.case import entry, raw

from pqweights.checkpoint.gguf.file import parse_gguf
from pqweights.checkpoint.gguf.tokens import read_tokenizer
from pqweights.checkpoint.header import MAX_NAME, MOST_OF_NOTHING, StoredTensor
from pqweights.checkpoint.master import logical_tensors
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Storage
from pqweights.common.documents import as_document
from pqweights.errors import MasterError, PqweightsError, SourceError
from pqweights.formats.columns import MOST_STORED_COLUMNS, ColumnCut
from pqweights.formats.mlx import with_single_experts
from pqweights.planning.recipe import parse_recipe


@contextmanager
def quickly() -> Iterator[None]:
    """Check that something takes little time of the processor; what is quadratic would take minutes."""
    before = time.process_time()
    yield
    assert time.process_time() - before < 3.0


@pytest.mark.parametrize("shape", [[2**34, 0], [0, MOST_OF_NOTHING + 1, 1]], ids=str)
def test_tensors_without_elements_claim_no_large_dimensions(shape: list[int], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw(json.dumps({"x": entry("F32", shape, [0, 0])})))
    with raises(SourceError, "'x'", max(shape)):
        open_local(tmp_path)
    header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sI", 1, b"x", len(shape))
    header += struct.pack(f"<{len(shape)}QIQ", *shape, 0, 0)
    header += bytes(-len(header) % 32)
    with raises(SourceError, "'x'", max(shape)):
        parse_gguf(Path(), "a.gguf", BytesIO(header), len(header))


def test_stacks_of_experts_without_elements_are_not_taken_apart() -> None:
    name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    stored = {name: StoredTensor(name, "U32", (16384, 0, 1), "x", 0, 0)}
    assert with_single_experts(stored) == stored


@pytest.mark.parametrize("name", ["norm_" * 20_000 + "!", "x" * (MAX_NAME + 1)], ids=len)
def test_long_names_of_tensors_are_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {name: bf16(gaussian(4, 128))})
    with quickly(), raises(SourceError, MAX_NAME) as refused:
        open_local(tmp_path)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("model.layers.512.up_proj.weight", True),
        ("model.layers.100000.up_proj.weight", False),
        ("model.layers.0.experts.65535.up_proj.weight", True),
        ("model.layers.0.experts.65537.up_proj.weight", False),
        (f"x.{'9' * 500}.weight", False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_numbers_in_names_are_those_that_the_tensors_explain(name: str, fits: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {name: bf16(gaussian(4, 128))}, config={"model_type": "llama", "num_hidden_layers": 2})
    if fits:
        open_local(tmp_path)
        return
    with raises(SourceError, "1 tensors"):
        open_local(tmp_path)


class _Numbers(msgspec.Struct, frozen=True):
    numbers: list[int]


def test_messages_are_short_whatever_a_value_holds() -> None:
    nested = ["x"]
    for _ in range(30):
        nested = [nested] * 10  # type: ignore[list-item]
    with quickly(), pytest.raises(SourceError) as refused:
        as_document({"numbers": nested}, _Numbers, SourceError)
    assert len(str(refused.value)) < 200
    assert len(str(PqweightsError("x" * 10**6))) < 1500


def test_recipes_do_not_merge_mappings() -> None:
    lines = ["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10))]
    text = "\n".join(lines)
    with quickly(), raises(PqweightsError, "r.yaml"):
        parse_recipe(text, "r.yaml")


def test_long_tokens_are_refused(tmp_path: Path) -> None:
    token = "a" * 1_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {token: 0}, "merges": []}}))
    with quickly(), raises(SourceError, "tokenizer.json", "token"):
        read_tokenizer(Storage(tmp_path))


def master_of(shape: tuple[int, ...], transposed: bool) -> Callable[[], Any]:
    """Return what opens a master with a weight of columns that claims a shape."""
    cut = ColumnCut.of(shape, transposed=transposed)
    parts = {
        "_trellis": ("U8", (8,)), "_lengths": ("I32", cut.lengths), "_row_scales": ("U8", (cut.rows,)),
        "_column_scales": ("U8", (cut.columns,)),
    }  # fmt: skip
    stored = {f"x{end}": StoredTensor(f"x{end}", dtype, of, "f", 0, 8) for end, (dtype, of) in parts.items()}
    settings = {
        "quant_method": "pqweights", "format_version": 1, "block_size": 128, "codec": "hadamard-trellis-columns",
        "bits": 1.0, "dtype": "BF16", "levels": {}, "kept": [], "rotation": "hadamard",
        "overrides": {"x": {"shape": list(shape), **({"transposed": True} if transposed else {})}},
    }  # fmt: skip
    return lambda: logical_tensors(None, stored, {"quantization_config": settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
def test_units_of_columns_are_bounded_when_a_master_is_opened(transposed: bool) -> None:
    with raises(MasterError, "bits"):  # the bits are not those of the stored tensors
        master_of((200, MOST_STORED_COLUMNS), transposed)()
    with raises(MasterError, MOST_STORED_COLUMNS, "columns"):
        master_of((200, MOST_STORED_COLUMNS + 1), transposed)()


def test_a_gguf_file_alone_that_claims_billions_of_experts_is_refused_at_once(tmp_path: Path) -> None:
    from damaged_inputs import GGUF_KEYS, GGUF_TENSORS, gguf_bytes

    from pqweights.storage.sources import open_source

    keys = [(name, kind, 2**31 - 1 if name.endswith(".expert_count") else value) for name, kind, value in GGUF_KEYS]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys, GGUF_TENSORS, b"", None))
    with quickly(), raises(SourceError, "num_experts", 2**31 - 1):
        open_source(tmp_path / "m.gguf")
