"""Models of types that nobody examined are exported with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import bf16, gaussian, run_command, write_checkpoint

from pqweights.exports import architectures


def test_list_has_every_type_of_transformers_that_generates_text() -> None:
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM")
    types = {name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    assert types <= architectures.EXAMINED


@pytest.mark.parametrize(("model_type", "target", "warned"), [
    ("llama_of_next_year", "vllm", True), ("llama_of_next_year", "torchao-int4", True), ("llama", "vllm", False),
])  # fmt: skip
def test_type_that_nobody_examined_is_warned_of(model_type: str, target: str, warned: bool, tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(1024, 1024))}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": model_type, "dtype": "bfloat16"})
    run_command({"quantize": str(source)}, tmp_path / "master")
    report = run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / "out")
    found = [line for line in report.warnings if "nobody has examined what transformers does" in line]
    assert len(found) == warned
    assert all(model_type in line and "try it before you publish it" in line for line in found)
