"""The vllm target: transformers and compressed-tensors compute with what was rounded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import FAMILIES
from helpers import Array, as_float32, f32, read_all, write_checkpoint
from integer_exports import (
    as_loaded,
    expected_layers,
    from_compressed_tensors,
    integer_names,
)


def with_decoded(base: Path, name: str, out: Path, decoded: Mapping[str, Array]) -> Path:
    """Write the BF16 export in float32, with some of its weights replaced."""
    exported = families.exported(base, name, "bf16")
    config = json.loads((exported / "config.json").read_bytes())
    for settings in (config, *(value for key, value in config.items() if key.endswith("_config"))):
        settings["dtype"] = "float32"
    tensors = {tensor: f32(as_float32(value)) for tensor, value in read_all(exported).items()}
    assert decoded.keys() <= tensors.keys()
    for tensor, values in decoded.items():
        assert values.shape == tensors[tensor][1].shape, tensor
    return write_checkpoint(out, {**tensors, **{n: f32(values) for n, values in decoded.items()}}, config=config)


def all_float32(model: Any) -> Any:
    """Convert all parameters to float32, also those that transformers always loads in BF16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def assert_same_logits(found: Array, expected: Array) -> None:
    assert np.abs(expected).max() > 0.01
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def assert_the_rest_is_plain(base: Path, name: str, exported: Path, rounded: set[str]) -> None:
    """Check that all other tensors are those of the BF16 export, byte for byte."""
    plain, tensors = read_all(families.exported(base, name, "bf16")), read_all(exported)
    parts = {f"{n}_{part}" for n in rounded for part in ("packed", "scale", "shape")}
    assert tensors.keys() == (plain.keys() - rounded) | parts
    for tensor in plain.keys() - rounded:
        assert tensors[tensor][0] == plain[tensor][0]
        assert tensors[tensor][1].tobytes() == plain[tensor][1].tobytes(), tensor


# Of each kind of layers one; test_architectures.py loads others.
NAMES = ("llama-tied", "llama-uneven", "llama-biased", "qwen3_moe", "gpt_oss", "qwen3_5_moe", "qwen3_vl")


@pytest.mark.parametrize(("name", "bits"), [*((name, 4) for name in NAMES), ("mixtral", 8)])
def test_transformers_computes_with_the_integers_of_vllm_int4(name: str, bits: int, base: Path, tmp_path: Path) -> None:
    """Its logits match those of a plain model with the decoded integers as weights."""
    pytest.importorskip("compressed_tensors")
    family = FAMILIES[name]
    exported = families.exported(base, name, "vllm", bits=bits)
    rounded = expected_layers(base, name, family.linear)
    assert set(integer_names(exported)) == rounded
    assert_the_rest_is_plain(base, name, exported, rounded)
    tensors = read_all(exported)
    decoded = {n: from_compressed_tensors(tensors, n, bits) for n in rounded}
    decoded |= {n: as_loaded(values) for n, values in decoded.items() if ".experts." in n}
    expected = families.logits(families.load(with_decoded(base, name, tmp_path / "plain", decoded), family))
    model = families.load(exported, family)
    families.logits(model)  # decompresses; experts are in BF16 from the start
    assert_same_logits(families.logits(all_float32(model)), expected)
