"""What docs/gguf.md says of masters follows from the formats, and from the measurements beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pqweights.codecs import CODECS
from pqweights.codecs.hadamard_lloyd_max import HadamardLloydMax
from pqweights.kernels.gguf_types import BLOCK_TYPES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "gguf.md").read_text(encoding="utf-8")


def test_shares_of_masters_follow_from_the_errors_of_gaussian_weights() -> None:
    codec = CODECS["hadamard-lloyd-max"]
    assert isinstance(codec, HadamardLloydMax)
    rows = re.findall(r"^\| `(\w+)` \|((?: \d+% \|)+)$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
    for name, cells in rows:
        own = BLOCK_TYPES[name].distortion
        errors = [codec.distortion(bits) for bits in (8, 7, 6, 5, 4)]
        assert re.findall(r"\d+%", cells) == [f"{error / (error + own * (1 - error)):.0%}" for error in errors]


def kl(model: str, kind: str, what: str) -> float:
    """A measured divergence."""
    rows = json.loads((DOCS / "benchmarks/gguf_types.json").read_text(encoding="utf-8"))["models"]
    (found,) = [row["kl"] for row in rows if (row["model"], row["type"], row["what"]) == (model, kind, what)]
    return float(found)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-llama-outliers"])
def test_files_from_the_original_diverge_less_than_those_of_llama_cpp(model: str) -> None:
    for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0", "Q3_K_M", "Q2_K"):
        assert kl(model, kind, "ours") < kl(model, kind, "llama.cpp")
    for kind in ("Q3_K_M", "Q2_K"):
        assert kl(model, kind, "ours, from the master") < kl(model, kind, "llama.cpp")


def test_wider_files_from_the_6_bit_master_diverge_more() -> None:
    for kind, ours, theirs in (("Q4_K_M", "0.01133", "0.01004"), ("Q8_0", "0.00205", "0.00028")):
        assert f"{kl('tiny-llama', kind, 'ours, from the master'):.5f}" == ours
        assert f"{kl('tiny-llama', kind, 'llama.cpp'):.5f}" == theirs
        assert f"({ours} against {theirs})" in " ".join(PAGE.split())
