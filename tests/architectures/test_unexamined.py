"""Models of types that nobody examined: transformers itself is asked, and finds what the examined sets say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from building import build
from helpers import run_command
from known_architectures import ARCHITECTURES, LOADS, RENAMED, RESHAPED

from pqweights.errors import ExportError
from pqweights.exports import architectures

transformers = pytest.importorskip("transformers")

WARNING = "nobody has examined what transformers does with the layers of the model type"
TARGETS = ("vllm", "torchao-int4")
BY_NAMES = [name for name, about in ARCHITECTURES.items() if {RESHAPED, RENAMED} & {about.expected[t] for t in TARGETS}]


@pytest.fixture
def _nothing_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "EXAMINED", frozenset())
    monkeypatch.setattr(architectures, "_REFUSALS", {"vllm": (), "torchao-int4": ()})


def master(name: str, folder: Path, **settings: object) -> Path:
    build(ARCHITECTURES[name], folder / "src")
    config = folder / "src" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | settings))
    run_command({"quantize": str(folder / "src"), "recipe": "q5"}, folder / "master")
    return folder / "master"


def test_list_has_every_type_of_transformers_that_generates_text() -> None:
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM")
    types = {name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    assert types <= architectures.EXAMINED


@pytest.mark.usefixtures("narrow_layers_packed", "_nothing_examined")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [*BY_NAMES, "qwen3_moe"])
def test_names_are_checked_in_transformers(name: str, tmp_path: Path) -> None:
    folder = master(name, tmp_path)
    for target in TARGETS:
        expected, command = ARCHITECTURES[name].expected[target], {"export": str(folder), "target": target}
        if expected == LOADS:
            if name not in BY_NAMES:
                assert not any(WARNING in line for line in run_command(command, tmp_path / target).warnings)
            continue
        with pytest.raises(ExportError) as refusal:
            run_command(command, tmp_path / target)
        assert re.search(f"{RESHAPED}|{RENAMED}|transformers renames layers that stay plain", str(refusal.value))
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("missing", [(), ("torch", "transformers")])
def test_type_that_cannot_be_checked_is_warned_of(missing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    command = {"export": str(master("llama", tmp_path, model_type="llama_of_next_year")), "target": "vllm"}
    (line,) = (line for line in run_command(command, tmp_path / "out").warnings if WARNING in line)
    assert "llama_of_next_year" in line and "try it before you publish it" in line
    assert ("pip install" if missing else "cannot tell: KeyError") in line


def test_transformers_without_these_functions_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = {"export": str(master("llama", tmp_path)), "target": "vllm"}
    monkeypatch.setattr(architectures, "EXAMINED", frozenset())
    monkeypatch.delitem(sys.modules, "pqweights.exports.renamed_layers", raising=False)
    monkeypatch.delattr("pqweights.exports.renamed_layers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    (line,) = (line for line in run_command(command, tmp_path / "out").warnings if WARNING in line)
    assert "cannot tell: ModuleNotFoundError" in line
