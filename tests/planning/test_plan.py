"""The plan: a run writes what a dry run prints, byte for byte, and no weight is read for it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import plan_quantize
from helpers import bf16, f32, gaussian, read_all, read_safetensors, run_command, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from pqweights.checkpoint.header import TensorSpec, build_header, parse_header
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.convert.plan import Plan
from pqweights.planning.layout import KEEP, Safetensors, TensorPlan, stored_bytes
from pqweights.planning.recipe import load_recipe

SHARD_BYTES = 20_000


def planned(source: Path, max_shard_bytes: int = SHARD_BYTES, recipe: str = "q5") -> Plan:
    return plan_quantize(source, load_recipe(recipe), max_shard_bytes=max_shard_bytes)


@pytest.mark.parametrize("recipe", ["q2", "q5", "q8"])
@pytest.mark.parametrize("max_shard_bytes", [1, SHARD_BYTES, 10**9])
def test_result_has_the_planned_files_and_tensors(
    recipe: str, max_shard_bytes: int, source: Path, tmp_path: Path
) -> None:
    plan = planned(source, max_shard_bytes, recipe)
    run_command({"quantize": str(source), "recipe": recipe, "max_shard_bytes": max_shard_bytes}, tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    assert {shard.file: shard.file_bytes for shard in plan.shards} == {name: len(data) for name, data in files.items()}
    assert plan.output_bytes == sum(len(data) for data in files.values())
    for shard in plan.shards:
        assert files[shard.file].startswith(shard.header)
        found, metadata = parse_header(
            shard.file, len(files[shard.file]), lambda at, count, data=files[shard.file]: data[at : at + count]
        )
        assert tuple(found) == shard.stored
        assert metadata == {"format": "pt"}
    stored = read_all(tmp_path / "out")
    assert [spec.name for tensor in plan.tensors for spec in tensor.stored] != []
    assert {spec.name for tensor in plan.tensors for spec in tensor.stored} == stored.keys()
    for tensor in plan.tensors:
        assert tensor.bytes == sum(stored[spec.name][1].nbytes for spec in tensor.stored)
        for spec in tensor.stored:
            assert (spec.dtype, spec.shape) == (stored[spec.name][0], stored[spec.name][1].shape)


def test_index_lists_every_tensor(source: Path, tmp_path: Path) -> None:
    run_command({"quantize": str(source), "max_shard_bytes": SHARD_BYTES}, tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_bytes())
    found = {name: path.name for path in (tmp_path / "out").glob("*.safetensors") for name in read_safetensors(path)}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(v.nbytes for _, v in read_all(tmp_path / "out").values())
    assert len(set(found.values())) == 4
    for name in found:
        if name.endswith("_codes"):
            assert found[name] == found[name.removesuffix("_codes") + "_norms"]


def test_planning_reads_no_weight(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, int, int]] = []
    read_into = Storage.read_into

    def recorded(self: Storage, file: str, offset: int, buffer: Any) -> None:
        reads.append((file, offset, len(buffer)))
        read_into(self, file, offset, buffer)

    monkeypatch.setattr(Storage, "read_into", recorded)
    planned(source)
    weights = [read for read in reads if read[0].endswith(".safetensors")]
    assert {file for file, _, _ in weights} == {path.name for path in source.glob("*.safetensors")}
    for file, offset, count in weights:
        with open(source / file, "rb") as stream:
            header_end = 8 + int.from_bytes(stream.read(8), "little")
        assert offset + count <= header_end, (file, offset, count)
    others = [file for file, _, _ in reads if not file.endswith(".safetensors")]
    assert sorted(others) == ["config.json", "model.safetensors.index.json"]  # once each
    assert len(weights) == 2 * len({file for file, _, _ in weights})  # a length and a header each


def test_bits_per_weight_count_norms_and_padding(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "even", {"mlp.up_proj.weight": bf16(gaussian(64, 256)), "norm.weight": bf16(gaussian(256))}
    )
    totals = planned(source).totals
    assert totals.bits_per_weight == 5.125
    assert (totals.weights, totals.quantized_weights) == (64 * 256 + 256, 64 * 256)
    source = write_checkpoint(tmp_path / "odd", {"mlp.up_proj.weight": bf16(gaussian(65, 129))})
    blocks = -(-65 * 129 // 128)
    assert planned(source).totals.bits_per_weight == 8 * blocks * (80 + 2) / (65 * 129)
    for bits, recipe in ((2, "q2"), (3, "q3"), (4, "q4"), (6, "q6"), (8, "q8")):
        assert planned(tmp_path / "even", recipe=recipe).totals.bits_per_weight == bits + 16 / 128


def test_empty_and_scalar_tensors_are_copied(tmp_path: Path) -> None:
    tensors = {
        "empty": f32(np.zeros((0, 128))),
        "mlp.up_proj.weight": bf16(gaussian(64, 128)),
        "scalar": f32(np.array(2.5)),
        "flag": ("BOOL", np.array([True, False])),
    }
    source = write_checkpoint(tmp_path / "model", tensors)
    run_command({"quantize": str(source)}, tmp_path / "out")
    stored = read_all(tmp_path / "out")
    for name in ("empty", "scalar", "flag"):
        assert stored[name][1].shape == tensors[name][1].shape
        assert stored[name][1].tobytes() == tensors[name][1].tobytes()


NAMES = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), max_size=8, unique=True).filter(
    lambda names: "__metadata__" not in names
)


@settings(max_examples=150, deadline=None)
@given(NAMES, st.data())
def test_header_is_the_json_that_python_writes(names: list[str], data: st.DataObject) -> None:
    """Tensors that share dtype and shape share encoded text, whatever characters their names hold."""
    kinds = st.sampled_from([("BF16", (2, 3)), ("U8", (2, 3)), ("F32", ()), ("F64", (0, 7)), ("F4", (1, 2))])
    specs = [TensorSpec(name, *data.draw(kinds)) for name in names]
    metadata = {"format": "pt", 'a"b': "\\é\n"}
    header, stored = build_header("file", specs, metadata)
    expected: dict[str, Any] = {"__metadata__": metadata}
    for tensor in stored:
        begin = tensor.offset - len(header)
        offsets = [begin, begin + tensor.byte_count]
        expected[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(expected, separators=(",", ":"), ensure_ascii=False).encode()
    assert header[8:] == text + b" " * (-len(text) % 8)
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert sorted(tensor.name for tensor in stored) == sorted(names)


STORED_DTYPES = [name for name in DTYPE_BITS if not name.startswith("F6")]
SPECS = st.lists(
    st.tuples(st.sampled_from(STORED_DTYPES), st.lists(st.integers(0, 9).map(lambda n: 2 * n), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(SPECS, st.integers(1, 20_000))
def test_shards_are_aligned_in_order_and_within_the_limit(
    specs: list[tuple[str, list[int]]], max_shard_bytes: int
) -> None:
    tensors = []
    for number, (dtype, shape) in enumerate(specs):
        name, stored = f"t{number}", (TensorSpec(f"t{number}", dtype, tuple(shape)),)
        if dtype == "BF16":  # a pair that must stay together, as codes and norms
            stored = (TensorSpec(f"{name}_codes", "U8", tuple(shape)), TensorSpec(f"{name}_norms", "F16", tuple(shape)))
        tensors.append(TensorPlan(name, tuple(shape), dtype, "", KEEP, None, None, "", stored_bytes(stored), stored))
    shards = Safetensors().shards(tensors, max_shard_bytes)
    assert [place for shard in shards for place in shard.tensors] == list(range(len(tensors)))
    for number, shard in enumerate(shards, start=1):
        assert shard.file == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        own = [tensors[place] for place in shard.tensors]
        assert {s.name for s in shard.stored} == {spec.name for tensor in own for spec in tensor.stored}
        data_bytes = sum(stored.byte_count for stored in shard.stored)
        assert data_bytes <= max_shard_bytes or sum(1 for tensor in own if tensor.bytes) == 1
        position = shard.header_bytes
        assert position % 8 == 0
        for stored in shard.stored:
            assert stored.offset == position
            assert stored.offset % max(1, DTYPE_BITS[stored.dtype] // 8) == 0
            position += stored.byte_count
        assert shard.file_bytes == position
    for before, after in pairwise(shards):
        first = tensors[after.tensors[0]].bytes
        assert sum(tensors[place].bytes for place in before.tensors) + first > max_shard_bytes  # cut only where needed
