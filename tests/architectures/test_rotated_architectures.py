"""Which families can be rotated, and that the rotated model computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from building import build, computed, load
from folding_models import folded_values, measured, rewritten, uneven
from helpers import f32
from known_architectures import ARCHITECTURES

from pqweights.folding.fold import ROTATE

ROTATED = ("llama", "mistral", "qwen2", "qwen3", "phi3")
REFUSED = {
    "llama with a tied head": "tied to the embedding",
    "gemma": "tied to the embedding",
    "gemma2": "that no rotation passes",
    "qwen3_moe": "stays plain, and rotating would round it",
    "mixtral": "stays plain, and rotating would round it",
    "gpt_oss": "that no rotation passes",
    "qwen3_5": "that no rotation passes",
    "mistral3": "may read or write the residual stream, too",
}


@pytest.mark.parametrize("name", ROTATED)
def test_rotated_model_computes_the_same(name: str, tmp_path: Path) -> None:
    about = ARCHITECTURES[name]
    build(about, tmp_path / "built")
    source = uneven(tmp_path / "built", tmp_path / "source")
    fold = measured(source, tmp_path / "work", kind=ROTATE)
    assert not fold.warnings
    found = folded_values(fold)
    rewritten(source, tmp_path / "rotated", {key: f32(values) for key, values in found.items()})
    for link in fold.structure.links:
        assert link.norm is None or (found[link.norm] == 1).all()
    expected = computed(about, load(about, source))
    assert np.abs(computed(about, load(about, tmp_path / "rotated")) - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_cannot_be_rotated_is_left_alone(name: str, tmp_path: Path) -> None:
    build(ARCHITECTURES[name], tmp_path / "source")
    fold = measured(tmp_path / "source", tmp_path / "work", kind=ROTATE)
    (warning,) = fold.warnings
    assert REFUSED[name] in warning
    assert fold.folded.tensors == fold.original.tensors
