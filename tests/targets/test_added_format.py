"""A format that only the tests know goes through every command, with one file (this) and a line: docs/formats.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import families
import numpy as np
import pytest
from commands import answer, done, refused
from helpers import as_float32, read_all
from integer_exports import integer_names

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.source import open_local
from pqweights.common.dtypes import float8_table
from pqweights.formats import sources
from pqweights.formats.packed import QuantizedTensor, Source, weight_of
from pqweights.formats.packing import CODES, SCALES, Bytes, Floats, PackedFormat, StoredPart
from pqweights.kernels.groups import FloatRule, Groups
from pqweights.results.verify import verify
from pqweights.targets.linear import LinearFormat
from pqweights.targets.target import GroupSize
from pqweights.targets.vllm import FORMATS

NAME, LARGEST = "fp8-halves", np.float32(448)


@dataclass(frozen=True)
class Halves:
    """E4M3 with a scale in float16 for each group: the scale takes the largest weight of a group to the largest float.

    Codes are those of FloatRule.
    """

    group_size: int = 64
    name: str = "halves"

    bits, rows, kind, codes = 8, 1, "fp8", "E4M3 and halves"

    def quantize(self, values: Floats) -> Groups:
        """Round weights [groups * group size]."""
        groups = FloatRule("fp8", 8, self.group_size, "compressed-tensors").quantize(values)
        by_group = values.reshape(-1, self.group_size)
        scales = (np.abs(by_group).max(axis=1) / LARGEST).astype(np.float16).astype(np.float32)
        table = float8_table("F8_E4M3")[:127]
        codes = np.abs(np.abs(by_group / np.maximum(scales, 1e-6)[:, None])[..., None] - table).argmin(axis=-1)
        codes = (codes + np.where(by_group < 0, 128, 0)).astype(np.uint8)
        made = replace(groups, codes=codes, scales=scales)
        errors = by_group - self.decode(made)
        return replace(made, errors=(errors.astype(np.float64) ** 2).sum(axis=1))

    def decode(self, groups: Groups) -> Floats:
        """Return the weights."""
        return self.numbers(groups.codes) * groups.scales[:, None]

    def numbers(self, codes: Bytes) -> Floats:
        """Return the floats of codes."""
        return float8_table("F8_E4M3")[codes]


LAYOUT = (StoredPart(CODES, "{weight}", "F8_E4M3"), StoredPart(SCALES, "{module}.half_scale", "F16"))


def find(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `M.weight` in FP8 with `M.half_scale`."""
    scales = source.stored.get(f"{name.removesuffix('.weight')}.half_scale")
    if codes.dtype != "F8_E4M3" or scales is None:
        return None
    return weight_of(
        source, name, codes.shape, codes.dtype, PackedFormat(Halves(), LAYOUT), {CODES: codes, SCALES: scales}
    )


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the target, and that of sources."""
    groups = GroupSize(target="vllm", allowed=(64,), chosen=None)
    row = LinearFormat(Halves(), LAYOUT, groups, "float-quantized")
    monkeypatch.setitem(FORMATS, NAME, row)
    tool = sources.TOOLS["compressed-tensors"]
    monkeypatch.setitem(sources.TOOLS, "compressed-tensors", tool._replace(finders=(find, *tool.finders)))


def test_format_is_stored_stated_verified_and_read(base: Path, tmp_path: Path) -> None:
    master = families.master(base, "llama")
    shown = answer("export", master, tmp_path / "out", "-t", "vllm", "--format", NAME, "--json")
    assert {tensor["codec"] for tensor in shown["tensors"] if tensor["action"] == "integer"} == {"fp8-g64"}
    tensors, plain = read_all(tmp_path / "out"), read_all(families.exported(base, "llama", "bf16"))
    read = {tensor.name: tensor for tensor in open_local(tmp_path / "out").tensors}
    for name in integer_names(tmp_path / "out"):
        codes, scales = tensors[name][1].view(np.uint8), as_float32(tensors[f"{name[:-6]}half_scale"])
        decoded = float8_table("F8_E4M3")[codes] * scales.repeat(64, axis=-1)
        exact = as_float32(plain[name])
        assert ((decoded - exact) ** 2).sum() < 1.3e-3 * (exact**2).sum()
        raw = np.empty(decoded.nbytes, dtype=np.uint8)
        read[name].read(0, decoded.size, "F32", raw)
        assert np.array_equal(raw.view(np.float32).reshape(decoded.shape), decoded)
    assert verify(tmp_path / "out", threads=2).ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (8, 64)


def test_codes_of_a_source_in_the_same_format_are_taken(base: Path, tmp_path: Path) -> None:
    """And the files are the same, byte for byte."""
    done("export", families.master(base, "llama"), tmp_path / "first", "-t", "vllm", "--format", NAME)
    done("quantize", tmp_path / "first", tmp_path / "master", "--lossless")
    done("export", tmp_path / "master", tmp_path / "again", "-t", "vllm", "--format", NAME)
    first, again = read_all(tmp_path / "first"), read_all(tmp_path / "again")
    assert {name: array.tobytes() for name, (_, array) in first.items()} == {
        name: array.tobytes() for name, (_, array) in again.items()
    }


def test_rules_may_name_it_and_others_may_stand_beside_it(base: Path, tmp_path: Path) -> None:
    done("export", families.master(base, "llama"), tmp_path / "out", "-t", "vllm", "--set", f"*.mlp.*={NAME}")
    tensors = read_all(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.half_scale" in tensors
    assert "model.layers.0.self_attn.q_proj.weight_packed" in tensors
    master = families.master(base, "llama")
    line = refused("export", master, tmp_path / "other", "-t", "vllm", "--format", "fp8-quarters", code=2)
    assert NAME in line
