"""Masters in transformers: weights match the BF16 export, imports in any order, and damage is always refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import raises
from families import FAMILIES
from helpers import bf16, gaussian, read_all, run_command, safetensors_bytes, write_checkpoint
from independent_reader import read_master
from snippets import run_snippet

import pqweights
from pqweights.checkpoint.config import GUARD, GUARD_KEY
from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, MissingDependencyError, SourceError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("narrow_layers_packed"),
]

import torch  # noqa: E402
import transformers  # noqa: E402


@pytest.fixture
def copied(base: Path, tmp_path: Path) -> Path:
    """A copy of the master of a Llama that the test may damage."""
    return Path(shutil.copytree(families.master(base, "llama"), tmp_path / "master"))


def load(folder: Path, auto: str = "AutoModelForCausalLM", **options: Any) -> Any:
    return getattr(transformers, auto).from_pretrained(folder, **options)


def assert_same(one: Any, other: Any) -> None:
    """Check that every parameter and buffer is the same, bit for bit."""
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    change(config)
    path.write_text(json.dumps(config))
    return folder


AUTO = {"qwen3_vl": "AutoModelForImageTextToText", "gpt2": "AutoModel"}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_match_the_bf16_export(name, base):
    auto = AUTO.get(name, "AutoModelForCausalLM")
    loaded = load(families.master(base, name), auto)
    assert_same(loaded, load(families.exported(base, name, "bf16"), auto))
    assert loaded.dtype == torch.bfloat16
    for place in (loaded.config, loaded.config.get_text_config()):
        assert not hasattr(place, "quantization_config")
        assert not hasattr(place, GUARD_KEY)
    assert not getattr(loaded, "hf_quantizer", None)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_image_text_model_matches_the_bf16_export(name, base):
    auto = "AutoModelForImageTextToText"
    assert_same(load(families.master(base, name), auto), load(families.exported(base, name, "bf16"), auto))


def test_fused_experts_in_several_shards_are_loaded(tmp_path):
    family = FAMILIES["qwen3_moe"]
    config = getattr(transformers, family.config)(**family.settings)
    model = getattr(transformers, family.model)(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model", save_original_format=False, max_shard_size="300KB")
    assert any(".experts.gate_up_proj" in name for name in read_all(tmp_path / "model"))
    run_command({"quantize": str(tmp_path / "model"), "max_shard_bytes": 200_000}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "bf16"}, tmp_path / "exported")
    assert len(list((tmp_path / "master").glob("*.safetensors"))) > 2
    assert_same(load(tmp_path / "master"), load(tmp_path / "exported"))


BERT = {"vocab_size": 300, "hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4} | {
    "intermediate_size": 320
}
RECIPE = {"bits": 3, "rules": [{"name": "*query.weight", "bits": 8}, {"name": "*key.weight", "keep": True}]}


def test_float32_is_decoded_without_rounding(tmp_path):
    """The BERT has rows that blocks do not divide, mixed bit widths, a rescued weight and norms beyond float16."""
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    with torch.no_grad():
        model.encoder.layer[0].attention.self.value.weight.fill_(0.0125)
        model.encoder.layer[0].attention.output.dense.weight.mul_(2.0**30)
        model.pooler.dense.weight.mul_(2.0**-40)
    model.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    run_command({"quantize": str(tmp_path / "model"), "recipe": str(recipe)}, tmp_path / "master")
    settings = json.loads((tmp_path / "master" / "config.json").read_bytes())["quantization_config"]
    own = settings["overrides"].values()
    assert {"shape", "norm_exponent", "bits", "rotation"} <= {key for entry in own for key in entry}
    loaded = load(tmp_path / "master", "AutoModel").state_dict()
    for tensor in read_master(tmp_path / "master"):
        assert tensor.dtype == "F32"
        assert loaded[tensor.name].dtype == torch.float32
        assert loaded[tensor.name].numpy().tobytes() == tensor.data, tensor.name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_are_rounded_once_to_the_requested_dtype(dtype, base):
    folder = families.master(base, "llama")
    loaded = load(folder, dtype=getattr(torch, dtype)).state_dict()
    for tensor in open_local(folder).tensors:
        raw = np.empty(int(np.prod(tensor.shape)) * 4, dtype=np.uint8)
        tensor.read(0, len(raw) // 4, "F32", raw)
        expected = torch.from_numpy(raw.view(np.float32)).reshape(tensor.shape).to(getattr(torch, dtype))
        assert torch.equal(loaded[tensor.name], expected), tensor.name


def test_device_map_is_supported_but_not_offloading_to_disk(base):
    folder = families.master(base, "qwen3_moe")
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert_same(load(folder, device_map=device_map).to("cpu"), load(folder))
    with raises(SourceError, "disk"):
        load(folder, device_map={"": "disk"}, offload_folder=str(base / "offload"))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_save_pretrained_writes_an_ordinary_checkpoint(name, base, tmp_path):
    loaded = load(families.master(base, name))
    loaded.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved" / "config.json").read_text()
    assert "quantization" not in text
    assert GUARD_KEY not in text
    assert_same(load(tmp_path / "saved"), loaded)
    # The layout is that of the master, and so of its source.
    assert read_all(tmp_path / "saved").keys() <= read_all(families.exported(base, name, "bf16")).keys()


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


# This file itself imports pqweights before transformers, and loads models.
AFTER = "from transformers.quantizers import auto; import pqweights"
BETWEEN = """
import sys, transformers
assert "transformers.quantizers.auto" not in sys.modules
import importlib, importlib.util, pqweights
spec = importlib.util.find_spec("transformers.quantizers.auto")
assert spec.loader.get_source(spec.name) and spec.origin.endswith("auto.py")
from transformers.quantizers import auto
assert importlib.reload(auto) is auto"""
# Torch, which takes most of the time, is imported once for both.
IN_ORDERS = """
import os, sys, torch
for order in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(order)
        assert "pqweights" in sys.modules["transformers.quantizers.auto"].AUTO_QUANTIZER_MAPPING
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order"""


def test_order_of_imports_does_not_matter():
    done = run_python(IN_ORDERS, AFTER, BETWEEN)
    assert done.returncode == 0, done.stderr


def test_loading_without_pqweights_fails_with_instructions(base, tmp_path):
    """Every function that loads weights raises an error that says what to do; configuration and tokenizer load."""
    code = """
import sys
import transformers
assert transformers.AutoConfig.from_pretrained(text).hidden_size == 256
assert len(transformers.AutoTokenizer.from_pretrained(text)) > 100
ways = [
    (transformers.AutoModelForCausalLM.from_pretrained, text), (transformers.AutoModel.from_pretrained, text),
    (transformers.LlamaForCausalLM.from_pretrained, text), (transformers.AutoModelForCausalLM.from_pretrained, both),
    (transformers.AutoModelForImageTextToText.from_pretrained, both),
    (transformers.Qwen3_5TextModel.from_pretrained, both),
    (lambda folder: transformers.pipeline("text-generation", model=folder), text),
]
for way, folder in ways:
    try:
        way(folder)
    except ValueError as error:
        assert "run `import pqweights`" in str(error), error
    else:
        raise SystemExit(f"loaded: {way} {folder}")
assert "pqweights" not in sys.modules
transformers.AutoModelForCausalLM.from_pretrained(text)
"""
    text, both = (str(families.master(base, name)) for name in ("llama", "qwen3_5"))
    log = tmp_path / "log"
    assert run_snippet(f"text, both = {text!r}, {both!r}\n{code}", tmp_path, log) == 1, log.read_text()
    assert log.read_text().strip().splitlines()[-1].endswith(GUARD)


def test_guard_of_a_source_is_replaced_in_masters_and_removed_in_exports(tmp_path):
    """The key names the weight file of an adapter in the source, which the output does not have."""
    config = {"architectures": ["Some"], GUARD_KEY: "adapter.safetensors", "text_config": {GUARD_KEY: "x.safetensors"}}
    source = write_checkpoint(
        tmp_path / "model", {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(64, 128))}, config=config
    )
    run_command({"quantize": str(source)}, tmp_path / "master")
    written = json.loads((tmp_path / "master" / "config.json").read_bytes())
    assert written[GUARD_KEY] == written["text_config"][GUARD_KEY] == GUARD
    for target in ("bf16", "torchao", "vllm"):
        run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / target)
        assert GUARD_KEY not in (tmp_path / target / "config.json").read_text()


@pytest.mark.filterwarnings("ignore::pqweights.errors.PqweightsWarning")
def test_master_that_lacks_a_weight_of_its_index_is_refused(copied):
    """It is damaged, although transformers would only warn."""
    (file,) = copied.glob("*.safetensors")
    kept = {name: tensor for name, tensor in read_all(copied).items() if "layers.1.mlp.up_proj" not in name}
    file.write_bytes(safetensors_bytes(kept, {"format": "pt"}))
    (copied / "pqweights.json").unlink()
    for way in (load, pqweights.load_model, transformers.LlamaForCausalLM.from_pretrained):
        with raises(MasterError, "'model.layers.1.mlp.up_proj.weight_codes'"):
            way(copied)


def scaled_master(master: Path, folder: Path) -> Path:
    """Copy a master, and add scales of input channels to its weights."""
    shutil.copytree(master, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = read_all(folder)
    rng = np.random.default_rng(3)
    for name in [n for n in tensors if n.endswith("_proj.weight_norms")]:
        channels = tensors[name][1].shape[-1] * 128
        scales = (2.0 ** rng.integers(-2, 3, channels) * rng.uniform(1, 2, channels)).astype(np.float16)
        tensors[name.replace("_norms", "_awq_scale")] = ("F16", scales)
    file.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    (folder / "model.safetensors.index.json").unlink()
    file.rename(folder / "model.safetensors")
    (folder / "pqweights.json").unlink()
    return folder


def test_load_model_finds_the_class_and_refuses_other_folders(base, tmp_path):
    for name in ("llama", "qwen3_5", "gpt2"):
        loaded = pqweights.load_model(families.master(base, name))
        assert type(loaded).__name__ == FAMILIES[name].model
        assert_same(loaded, pqweights.load_model(str(families.exported(base, name, "bf16"))))
    with raises(SourceError, str(tmp_path / "nothing")):
        pqweights.load_model(tmp_path / "nothing")
    with raises(SourceError, "config.json"):
        pqweights.load_model(tmp_path)
    with raises(SourceError, str(families.model(base, "llama"))):
        pqweights.load_model(families.model(base, "llama"), packed=True)


def test_load_model_without_transformers_names_the_package(base):
    code = """
import sys
sys.modules["transformers"] = None
import pqweights
pqweights.load_model(sys.argv[1])
"""
    done = run_python(code, str(families.master(base, "llama")))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError" in last
    assert last.endswith("pip install 'accelerate>=1.10' 'torch>=2.6' 'transformers>=5.23'")


@pytest.mark.parametrize(
    ("target", "needs"),
    [
        ("torchao", "pip install 'torch>=2.6' 'torchao>=0.18'"),
        ("vllm", "pip install 'compressed-tensors>=0.20' 'torch>=2.6'"),
    ],
)
def test_load_model_of_an_export_names_the_missing_package(target, needs, base, monkeypatch):
    folder = families.exported(base, "llama", target)
    assert pqweights.load_model(folder).config.architectures == ["LlamaForCausalLM"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(MissingDependencyError, needs):
        pqweights.load_model(folder)


def test_load_model_of_an_export_that_cannot_run_is_refused(base, tmp_path):
    folder = Path(shutil.copytree(families.exported(base, "llama", "bf16"), tmp_path / "export"))
    for settings, expected in (
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx_lm.load"),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": "bogus"}}, "torchao"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": 3}}}}, ""),
    ):
        edit_config(folder, lambda config, settings=settings: config.update(settings))
        with raises(SourceError, expected):
            pqweights.load_model(folder)
        edit_config(folder, lambda config: [config.pop(key, None) for key in ("quantization", "quantization_config")])
    pqweights.load_model(folder)


def test_guard_is_removed_from_unknown_nested_configurations(copied, tmp_path):
    """transformers saves a nested dict that it does not know as it is."""
    config = json.loads((copied / "config.json").read_text())
    config["foo_config"] = {"a": 1, GUARD_KEY: GUARD}
    (copied / "config.json").write_text(json.dumps(config))
    load(copied).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["foo_config"] == {"a": 1}
    assert GUARD_KEY not in json.dumps(saved)


def test_plain_weights_with_the_configuration_of_a_master_are_refused(copied, base):
    """AutoConfig.from_pretrained(master), from_config and save_pretrained together make such a folder."""
    plain = families.exported(base, "llama", "bf16")
    for path in copied.glob("model*"):
        path.unlink()
    for path in plain.glob("model*"):
        shutil.copy(path, copied)
    (copied / "pqweights.json").unlink()
    with pytest.raises(MasterError):
        load(copied)
