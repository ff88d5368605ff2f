"""What plan says a checkpoint can be exported to is what export then does."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import done, refused
from diffusion_cases import single_file
from gguf_files import CONFIG, llama_tensors, write_llama
from helpers import bf16, gaussian, write_checkpoint

from pqweights.targets import EXPORTS

OF_TEXT = [name for name in EXPORTS if name != "comfyui"]  # what plans of models of text speak of
WITHOUT_MLX = [name for name in OF_TEXT if name != "mlx"]
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}


def wide_llama(folder: Path, **config: Any) -> Path:
    """A Llama that every target takes."""
    return write_llama(folder, sizes=WIDE, config=config)


def incomplete(folder: Path) -> Path:
    tensors = {name: value for name, value in llama_tensors().items() if "layers.1.mlp.up_proj" not in name}
    return write_checkpoint(folder, tensors, config=CONFIG)


def without_config(folder: Path) -> Path:
    return write_checkpoint(folder, {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(256, 1024, seed=1))}, config={})


MODELS: dict[str, Callable[[Path], Path]] = {
    "wide": wide_llama,
    "rows that neither groups nor tiles divide": write_llama,
    "unknown type": lambda folder: wide_llama(folder, model_type="gpt2"),
    "setting that llama.cpp has not": lambda folder: wide_llama(folder, hidden_act="relu"),
    "incomplete": incomplete,
    "without configuration": without_config,
}


def answers(*arguments: object) -> dict[str, dict[str, Any]]:
    """What a command says of each target."""
    listed = json.loads(done(*arguments, "--json").stdout)["exports"]
    return {entry["target"]: entry for entry in listed}


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_refuses_what_export_refuses_in_the_same_words(name: str, tmp_path: Path) -> None:
    source, master = MODELS[name](tmp_path / "model"), tmp_path / "master"
    planned = answers("plan", source)
    assert list(planned) == OF_TEXT
    done("quantize", source, master)
    for target in WITHOUT_MLX:
        entry = planned[target]
        arguments = ("export", master, tmp_path / target, "--target", target)
        arguments += ("--without-tokenizer",) if target == "gguf" else ()
        if entry["possible"]:
            done(*arguments)
        else:
            line = refused(*arguments)
            assert entry["reason"] in line


def test_refusals_that_are_known_are_shown_by_plan(tmp_path: Path) -> None:
    text = " ".join(done("plan", wide_llama(tmp_path / "model", model_type="gpt2")).stdout.split())
    assert "can be exported to: bf16, mlx (if mlx-lm takes its configuration and tensors)" in text
    assert re.search("cannot be exported to torchao: config.json: .* gpt2", text)
    assert re.search("cannot be exported to gguf: config.json: .* gpt2", text)


@pytest.mark.parametrize("target", ["vllm", "torchao"])
def test_runtimes_of_language_models_are_refused_image_models(target: str, tmp_path: Path) -> None:
    source = single_file(tmp_path / "model", "FLUX.1")
    assert answers("plan", source)[target]["possible"] is False
    assert "use --target gguf or comfyui" in refused("export", source, tmp_path / "out", "--target", target)


@pytest.mark.parametrize("target", ["vllm", "torchao"])
def test_export_of_a_model_without_a_type_warns_that_no_runtime_loads_it(target: str, tmp_path: Path) -> None:
    source = wide_llama(tmp_path / "model")
    export = ("export", source, tmp_path / "out", "--target", target, "--dry-run", "-q")
    assert "no model_type" not in done(*export).stderr
    (source / "config.json").unlink()
    assert "WARNING: config.json: no model_type" in done(*export).stderr


def test_layers_that_differ_are_each_looked_at(tmp_path: Path) -> None:
    """Only the last layer has rows that groups divide; the others are alike."""
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": bf16(gaussian(64, 100, seed=n)) for n in range(3)}
    tensors["model.layers.3.mlp.up_proj.weight"] = bf16(gaussian(64, 1024, seed=3))
    source = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"})
    assert answers("plan", source)["vllm"]["possible"] is True
    del tensors["model.layers.3.mlp.up_proj.weight"]
    source = write_checkpoint(tmp_path / "narrow", tensors, config={"model_type": "llama"})
    found = answers("plan", source)["vllm"]
    assert found["possible"] is False and "100" in found["reason"]


def test_a_missing_package_leaves_the_answer_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = wide_llama(tmp_path / "model")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "mlx_lm" else real(name, *of))
    monkeypatch.setitem(sys.modules, "gguf", None)
    found = answers("plan", source)
    assert found["gguf"]["possible"] is found["mlx"]["possible"] is None
    assert found["gguf"]["reason"].startswith("the gguf target needs gguf: pip install")
    assert found["mlx"]["reason"].startswith("it needs mlx and mlx-lm: pip install")
    assert "not known whether it can be exported to gguf: the gguf target needs" in " ".join(
        done("plan", source).stdout.split()
    )


def test_mlx_is_asked_for_its_types_without_an_import(tmp_path: Path) -> None:
    assert answers("plan", wide_llama(tmp_path / "model"))["mlx"]["possible"] is True
    assert answers("plan", wide_llama(tmp_path / "mapped", model_type="kimi_k2"))["mlx"]["possible"] is True
    found = answers("plan", wide_llama(tmp_path / "unknown", model_type="no_such_type"))["mlx"]
    assert found["possible"] is False
    assert found["reason"].startswith("mlx-lm does not support this model ('no_such_type'); use --target ")


def test_a_plan_loads_no_framework(tmp_path: Path) -> None:
    source = wide_llama(tmp_path / "model")
    script = (
        "import sys\nfrom pqweights import plan\n"
        f"report = plan({str(source)!r})\nassert len(report.exports) == {len(OF_TEXT)}\n"
        "print([name for name in ('torch', 'transformers', 'mlx') if name in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"
