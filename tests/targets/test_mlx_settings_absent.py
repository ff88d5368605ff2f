"""Keys that a configuration leaves out mean in MLX what they mean in transformers, as in those of GGUF files alone."""

from __future__ import annotations

from pathlib import Path

import gguf_cases
import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_near
from commands import done, refused
from gguf_cases import CASES, Case
from gguf_files import write_gguf
from mlx_lm.utils import load_model

FALCON_BIASED = Case(name="FalconH1", settings=CASES["falcon h1"].settings | {"attention_bias": True})


def check(source: Path, out: Path, expected: object, ids: list[int]) -> None:
    done("export", source, out, "-t", "mlx", "--format", "q8")
    model, _ = load_model(out)
    assert_near(np.array(model(mx.array([ids]))[0].astype(mx.float32)), expected, "8-bit weights")


@pytest.mark.parametrize("name", ["falcon h1", "cohere2", "ernie4_5", "lfm2", "nemotron h", "granite moe"])
def test_gguf_file_alone_is_exported_as_what_transformers_computes(name: str, tmp_path: Path) -> None:
    ids = gguf_cases.token_ids(24)
    expected = gguf_cases.logits(gguf_cases.saved(CASES[name], tmp_path / "model"), ids)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(write_gguf(tmp_path / "model", "F32").read_bytes())
    check(alone, tmp_path / "of-gguf", expected, ids)
    check(tmp_path / "model", tmp_path / "of-model", expected, ids)


def test_qwen3_with_experts_needs_no_list_of_layers_without(tmp_path: Path) -> None:
    """mlx's product of experts runs in float32 alone on a CPU."""
    gguf_cases.saved(CASES["qwen3 moe"], tmp_path / "model")
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(write_gguf(tmp_path / "model", "F32").read_bytes())
    done("export", alone, tmp_path / "out", "-t", "mlx", "--format", "q8")


@pytest.mark.parametrize("case", [FALCON_BIASED, CASES["granite hybrid"]], ids=["biases", "groups"])
def test_what_mlx_multiplies_or_norms_otherwise_is_refused(case: Case, tmp_path: Path) -> None:
    gguf_cases.saved(case, tmp_path / "model")
    assert "mlx-lm" in refused("export", tmp_path / "model", tmp_path / "out", "-t", "mlx", "--format", "q8")
