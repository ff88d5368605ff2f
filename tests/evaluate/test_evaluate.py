"""Evaluation: every runtime computes with the decoded weights of its export."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import export, quantize
from closeness import assert_near, assert_within, bound, deviation, distance
from commands import raises
from export_decoders import export_weight
from families import ATTENTION, TEXT, VOCABULARY, Family, build

from pqweights.common.advice import pip_install
from pqweights.common.options import EvaluationOptions, Options
from pqweights.errors import MissingDependencyError, PqweightsWarning, SourceError
from pqweights.planning.recipe import load_recipe
from pqweights.runtime import evaluation
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import Model, open_model

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

# name -> target, its options, and how near its logits are
EXPORTS: dict[str, tuple[str, dict[str, str], str]] = {
    "bf16": ("bf16", {}, "torch"),
    "torchao tiles": ("torchao", {}, "torch"),
    "torchao plain": ("torchao", {"packing": "plain"}, "torch"),
    "torchao int8": ("torchao", {"format": "int8"}, "torch"),
    "torchao fp8": ("torchao", {"format": "fp8"}, "torch"),
    "vllm": ("vllm", {}, "torch"),
    "vllm nvfp4": ("vllm", {"format": "nvfp4a16"}, "compressed-tensors, E2M1"),
    "mlx": ("mlx", {}, "mlx"),
}
RUNTIMES = {
    "bf16": "transformers",
    "torchao tiles": "torchao's tensors, the CPU's INT4 kernel",
    "torchao plain": "torchao's tensors, the CPU's INT4 kernel",
    "torchao int8": "torchao's tensors, decoded",
    "torchao fp8": "torchao's tensors, decoded",
    "vllm": "transformers, compressed-tensors",
    "vllm nvfp4": "transformers, compressed-tensors",
    "mlx": "mlx-lm",
}
IDS = np.random.default_rng(3).integers(0, VOCABULARY, 160)

Open = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in BF16 with a tokenizer that splits at spaces."""
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    build(Family("LlamaForCausalLM", "LlamaConfig", {**TEXT, "intermediate_size": 384}, ATTENTION), folder)
    quantize(folder, folder.parent / "master", load_recipe("q5"), threads=2)
    return folder


@pytest.fixture(scope="module")
def exported(source: Path) -> Open:
    """A function that makes the export of a name, once."""

    def make(name: str) -> Path:
        target, asked, _ = EXPORTS[name]
        out = source.parent / name.replace(" ", "-")
        if not out.exists():
            export(source.parent / "master", out, target, Options(**asked), threads=2)
        return out

    return make


def plain_model(source: Path, folder: Path) -> Any:
    """The model of the source in float32, with the decoded weights of the export."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    decode = export_weight(folder)
    model.load_state_dict({name: torch.from_numpy(decode(name)) for name in model.state_dict()})
    return model


def plain_logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()


@pytest.mark.parametrize("name", EXPORTS)
def test_logits_match_a_model_with_the_decoded_weights(name, source, exported):
    """In float32 only the order of additions differs; mlx also computes norms and positions in another way."""
    folder = exported(name)
    model = open_model(folder)
    assert model.runtime == RUNTIMES[name]
    found, expected = model.logits(IDS[:48], 48), plain_logits(plain_model(source, folder), IDS[:48])
    assert found.shape == (48, VOCABULARY)
    assert found.dtype == np.float32
    assert_near(found, expected, EXPORTS[name][2])
    assert deviation(found, plain_logits(plain_model(source, source), IDS[:48])) > 10 * bound(EXPORTS[name][2])


def test_each_model_is_gone_before_the_next_is_loaded(source, exported, monkeypatch, request):
    """Those of compressed-tensors are in cycles, which Python alone frees some time later."""
    loaded = list[list[weakref.ref[Any]]]()

    def opened(*arguments: Any, **options: Any) -> Model:
        assert all(weight() is None for weights in loaded[1:] for weight in weights), "only the reference stays"
        model = open_model(*arguments, **options)
        loaded.append([weakref.ref(module.weight) for module in model.net.modules() if hasattr(module, "weight")])
        return model

    monkeypatch.setattr(evaluation, "open_model", opened)
    gc.disable()
    request.addfinalizer(gc.enable)
    options = EvaluationOptions(reference=source, window=16, stride=16)
    evaluation.evaluate([exported("vllm"), exported("vllm nvfp4"), exported("vllm")], "w1 w2 w3 w4 " * 16, options)
    assert len(loaded) == 4


def test_transforms_of_inputs_are_refused(exported, tmp_path):
    """transformers ignores them silently. Some tools write none as {}."""
    folder = Path(shutil.copytree(exported("vllm"), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_bytes())
    for stated, refuses in (({}, False), ({"config_groups": {"hadamard": {"type": "hadamard"}}}, True)):
        config["quantization_config"]["transform_config"] = stated
        (folder / "config.json").write_text(json.dumps(config))
        with raises(SourceError, "transform_config") if refuses else contextlib.nullcontext():
            read_folder(folder)


@pytest.mark.parametrize("name", EXPORTS)
def test_logits_in_half_precision_are_near_those_in_float32(name, exported):
    folder, ids = exported(name), IDS[:16]
    exact, kind = open_model(folder), "mlx, BF16" if name == "mlx" else "torch, BF16"
    assert exact.dtype == "float32"
    expected = exact.logits(ids, 16)
    for dtype, loaded in (("auto", "bfloat16"), ("float16", "float16")):
        model = open_model(folder, dtype=dtype)
        found = model.logits(ids, 16)
        assert model.dtype == loaded and found.dtype == np.float32
        assert deviation(found, expected) > bound("torch")
        assert_within(distance(found, expected), kind)


@pytest.mark.parametrize("name", ["bf16", "mlx"])
def test_last_logits_match_those_of_all_tokens(name, exported):
    model = open_model(exported(name))
    assert_near(model.logits(IDS[:48], 5), model.logits(IDS[:48], 48)[-5:], EXPORTS[name][2])
    assert model.logits(IDS[:48], 5).shape == (5, VOCABULARY)


def rewrite_weights(folder: Path, drop: str = "", add: str = "") -> None:
    """Remove a tensor from a folder, or add one."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != drop}  # noqa: SIM118
        metadata = file.metadata()
    if add:
        tensors[add] = next(iter(tensors.values())).clone()
    save_file(tensors, path, metadata)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    path.rename(folder / "model.safetensors")


MODULE = "model.layers.1.mlp.up_proj"
PARTS = {
    "bf16": f"{MODULE}.weight",
    "torchao tiles": f"{MODULE}._weight_qdata",
    "torchao plain": f"{MODULE}._weight_scale",
    "torchao int8": f"{MODULE}._weight_qdata",
    "torchao fp8": f"{MODULE}._weight_scale",
    "vllm": f"{MODULE}.weight_scale",
    "vllm nvfp4": f"{MODULE}.weight_scale",
    "mlx": f"{MODULE}.scales",
}


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("what", ["norm", "part of a weight", "more"])
def test_incomplete_folders_are_refused(name, what, exported, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported(name), folder)
    if what == "more":
        rewrite_weights(folder, add="model.layers.1.stranger.weight")
    else:
        rewrite_weights(folder, drop="model.norm.weight" if what == "norm" else PARTS[name])
    if what == "more" and name != "mlx":
        with pytest.warns(PqweightsWarning, match="stranger"):
            open_model(folder)
        return
    with raises(SourceError, folder, {"norm": "model.norm.weight", "more": "stranger"}.get(what, MODULE)):
        open_model(folder)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("bf16", "transformers", "transformers"),
        ("torchao tiles", "torchao", "torchao"),
        ("vllm", "compressed_tensors", "vllm"),
        ("mlx", "mlx_lm.utils", "mlx"),
    ],
)
def test_missing_package_is_named(name, package, extra, exported, monkeypatch):
    folder = exported(name)
    there = importlib.import_module

    def without(asked: str) -> Any:
        if asked == package:
            raise ImportError(asked)
        return there(asked)

    monkeypatch.setattr(importlib, "import_module", without)
    with raises(MissingDependencyError, pip_install(extra)):
        open_model(folder)
