"""A format that only the tests know goes through every command, with one file (this): docs/formats.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest
from commands import answer, done, refused
from helpers import as_float32, read_all
from integer_exports import integer_names

from pqweights.common.dtypes import float8_table, from_float32
from pqweights.results.verify import verify
from pqweights.targets.formats import LAYOUTS, StoredPart
from pqweights.targets.schemes import SCHEMES, WeightScheme

NAME, LAYOUT = "fp8-halves", "test-halves"
# E4M3 in groups of 64, with scales in float16 beside them.
PARTS = (
    StoredPart("{weight}", "F8_E4M3", lambda shape, rule: shape, lambda groups, shape, rule: groups.codes.reshape(-1)),
    StoredPart(
        "{module}.half_scale",
        "F16",
        lambda shape, rule: (*shape[:-1], shape[-1] // rule.group_size),
        lambda groups, shape, rule: from_float32(groups.scales, "F16"),
    ),
)


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    LAYOUTS[LAYOUT] = PARTS
    SCHEMES[NAME] = WeightScheme(8, (64,), LAYOUT, "fp8", called="float-quantized")
    yield
    del LAYOUTS[LAYOUT], SCHEMES[NAME]


def test_format_is_stored_stated_and_verified(base: Path, tmp_path: Path) -> None:
    master = families.master(base, "llama")
    shown = answer("export", master, tmp_path / "out", "-t", "vllm", "--format", NAME, "--json")
    assert {tensor["codec"] for tensor in shown["tensors"] if tensor["action"] == "integer"} == {"fp8-g64"}
    tensors, plain = read_all(tmp_path / "out"), read_all(families.exported(base, "llama", "bf16"))
    for name in integer_names(tmp_path / "out"):
        codes, scales = tensors[name][1].view(np.uint8), as_float32(tensors[f"{name[:-6]}half_scale"])
        decoded = float8_table("F8_E4M3")[codes] * scales.repeat(64, axis=-1)
        exact = as_float32(plain[name])
        assert ((decoded - exact) ** 2).sum() < 1.3e-3 * (exact**2).sum()
    assert verify(tmp_path / "out", threads=2).ok
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert (group["weights"]["num_bits"], group["weights"]["type"]) == (8, "float")


def test_rules_may_name_it_and_others_may_stand_beside_it(base: Path, tmp_path: Path) -> None:
    done("export", families.master(base, "llama"), tmp_path / "out", "-t", "vllm", "--set", f"*.mlp.*={NAME}")
    tensors = read_all(tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.half_scale" in tensors
    assert "model.layers.0.self_attn.q_proj.weight_packed" in tensors
    master = families.master(base, "llama")
    line = refused("export", master, tmp_path / "other", "-t", "vllm", "--format", "fp8-quarters", code=2)
    assert NAME in line
