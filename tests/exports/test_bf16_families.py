"""The bf16 target for every family of models."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from families import FAMILIES
from helpers import read_all

from pqweights.rewrite.manifest import read_manifest


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_export_keeps_kept_tensors_and_loads(name: str, base: Path) -> None:
    family, source = FAMILIES[name], read_all(families.model(base, name))
    exported = families.exported(base, name, "bf16")
    after, manifest = read_all(exported), read_manifest(families.master(base, name))
    assert after.keys() == source.keys()
    for tensor in manifest.tensors:
        dtype, values = after[tensor.name]
        if tensor.action == "quantize":
            assert dtype == "BF16", tensor.name
        else:
            assert dtype == source[tensor.name][0], tensor.name
            assert values.tobytes() == source[tensor.name][1].tobytes(), tensor.name
    in_float32 = {n for n, (dtype, _) in after.items() if dtype == "F32"}
    assert in_float32 == {n for n in after if n.endswith(family.float32 or ("?",))}
    assert bool(in_float32) == bool(family.float32)
    families.load(exported, family, "bfloat16")
