"""Every architecture of the table through every target: it loads and computes what it should, or it is refused.

torchao's tensors have no kernel for a CPU; here they get one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import IDS, build, check_packed, computed, load, open_master, rename
from closeness import assert_near, assert_within, distance
from export_decoders import export_weight, from_tiles
from helpers import Array, as_float32, bf16, f32, gaussian, master_weights, read_all, run_command, write_checkpoint
from integer_exports import as_loaded, integer_names, quantization
from known_architectures import (
    ARCHITECTURES,
    BEGIN,
    END,
    IN_VLLM,
    LOADS,
    OF_MLX_LM,
    OF_THE_HUB,
    ON_METAL,
    Architecture,
    markdown,
    with_table,
)
from safetensors.torch import load_file, save_file

from pqweights.errors import ExportError
from pqweights.models import has_trait
from pqweights.models.traits import Trait
from pqweights.runtime.models import open_model

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


def check_master(about: Architecture, folder: Path, decoded: Any, expected: Array) -> None:
    """The BF16 export holds the decoded weights and loads as they do; the master computes what the source does."""
    source, exported, weights = read_all(folder / "src"), read_all(folder / "bf16"), master_weights(folder / "master")
    for name, values in weights.items():
        assert exported[name][1].tobytes() == bf16(values)[1].tobytes(), name
    for name in source.keys() - weights.keys():
        assert exported[name][1].tobytes() == source[name][1].tobytes(), name
    plain, state = load(about, folder / "bf16", torch.bfloat16).state_dict(), decoded.state_dict()
    assert plain.keys() == state.keys()
    # Of some types, transformers keeps weights in float32 that the export has in BF16.
    assert all(torch.equal(state[name].bfloat16(), value.bfloat16()) for name, value in plain.items())
    assert_within(distance(expected, computed(about, load(about, folder / "src"))), "8-bit weights")


def with_integers(folder: Path, exported: Path, exact: bool = False) -> Path:
    """Write a plain float32 checkpoint with the integers of an export decoded.

    exact: do not round the decoded weights to BF16, experts excepted, which transformers stacks in BF16
    """
    config = json.loads((folder / "bf16" / "config.json").read_bytes())
    for settings in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "dtype" in settings:
            settings["dtype"] = "float32"
    tensors = {n: f32(as_float32(t)) if t[0] in ("BF16", "F32") else t for n, t in read_all(folder / "bf16").items()}
    decode = export_weight(exported)
    for name in integer_names(exported):
        values = decode(name)
        is_stacked = ".experts." in name and name in tensors
        values = values if exact and not is_stacked else as_loaded(values)
        if name in tensors:
            tensors[name] = f32(values)
        else:  # of an expert: [out, in], gate before up, in a stack [experts, out, in], of Llama 4 [experts, in, out]
            path, number, matrix, _ = name.rsplit(".", 3)
            stack = tensors[f"{path}.{'down_proj' if matrix == 'down_proj' else 'gate_up_proj'}"][1][int(number)]
            first = len(values) if matrix == "up_proj" else 0
            (stack.T if config["model_type"].startswith("llama4") else stack)[first : first + len(values)] = values
    return write_checkpoint(exported.with_name(f"{exported.name}-plain"), tensors, config=config)


def check_vllm(about: Architecture, folder: Path, exported: Path, of_master: Array) -> None:
    """compressed-tensors decodes the weights, and transformers computes with them."""
    from compressed_tensors.utils import is_match

    settings, integers = quantization(exported), [name for name in integer_names(exported) if ".experts." not in name]
    early = "dequantize" in settings  # decoded as it is loaded, in BF16, whatever the names of those to be ignored
    plain = load(about, with_integers(folder, exported, exact=not early))
    linear = {name: module for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    rounded = {name.removesuffix(".weight") for name in integers}
    if rounded <= linear.keys():  # others have other names in memory
        assert {name for name, module in linear.items() if not is_match(name, module, settings["ignore"])} == rounded
    expected = computed(about, plain)
    model = load(about, exported)
    computed(about, model)  # decodes what is still packed
    torch.nn.Module.float(model)  # the method of transformers refuses
    assert_near(computed(about, model), expected, "torch")


def check_torchao(about: Architecture, folder: Path, exported: Path, of_master: Array) -> None:
    """transformers puts every integer into its place, and computes with torchao's tensors."""
    expected = load(about, with_integers(folder, exported))
    model = load(about, exported, torch.bfloat16)
    weights, integers = dict(expected.named_parameters()), 0
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "Int4TilePackedTo4dTensor":
            integers += 1
            rows, columns = parameter.shape
            found = from_tiles(parameter.qdata.numpy(), parameter.scale_and_zero.float().numpy())[:rows, :columns]
            assert np.array_equal(as_loaded(found), weights[name].detach().numpy()), name
        else:
            assert torch.equal(parameter, weights[name].to(parameter.dtype)), name
    assert integers == len(integer_names(exported))
    # In BF16 either of the two may take another expert where two are as near: what is expected is exact.
    assert_within(distance(computed(about, model), computed(about, expected)), "torch, BF16")


def check_mlx(about: Architecture, folder: Path, exported: Path, of_master: Array) -> None:
    """With 8 bits, mlx-lm computes about what the master does."""
    assert_within(distance(open_model(exported).logits(np.array(IDS), len(IDS)), of_master[0]), "8-bit weights")


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernel() -> Iterator[None]:
    """Give PyTorch a CPU kernel for what torchao's tiles are multiplied with."""
    library = torch.library.Library("aten", "IMPL")

    def multiply(inputs: Any, tiles: Any, group_size: int, pairs: Any) -> Any:
        weights = torch.from_numpy(from_tiles(tiles.numpy(), pairs.float().numpy()))
        return (inputs.float() @ weights.T).to(inputs.dtype)

    library.impl("_weight_int4pack_mm", multiply, "CPU")
    yield
    library._destroy()


CHECKS = {"vllm": check_vllm, "torchao": check_torchao, "mlx": check_mlx}
OPTIONS: dict[str, dict[str, Any]] = {"mlx": {"bits": 8, "group_size": 32}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_target_loads_an_architecture_or_refuses_it(name: str, tmp_path: Path) -> None:
    about = ARCHITECTURES[name]
    build(about, tmp_path / "src")
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q8"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "bf16"}, tmp_path / "bf16")
    decoded = open_master(tmp_path / "master", dtype="float32")
    of_master = computed(about, decoded)
    check_master(about, tmp_path, decoded, of_master)
    check_packed(about, tmp_path / "master", decoded, of_master)
    for target, check in CHECKS.items():
        expected, out = about.expected[target], tmp_path / target
        command = {"export": str(tmp_path / "master"), "target": target, **OPTIONS.get(target, {})}
        if expected in (LOADS, IN_VLLM, ON_METAL):
            report = run_command(command, out)
            assert any("vLLM alone" in line for line in report.warnings) == (expected == IN_VLLM)
            if expected == LOADS:
                check(about, tmp_path, out, of_master)
        else:
            with pytest.raises(ExportError) as refusal:
                run_command(command, out)
            assert re.search(expected, str(refusal.value)), str(refusal.value)
            assert not out.exists()
            advised = set(str(refusal.value).partition("use --target ")[2].split(" or "))
            loading = {other for other, found in about.expected.items() if found in (LOADS, IN_VLLM)}
            assert loading - {"mlx"} <= advised <= loading


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", OF_THE_HUB)
def test_type_of_the_hub_alone_is_written_for_vllm_and_computes_in_mlx_lm(model_type: str, tmp_path: Path) -> None:
    """As the type of transformers that it is does."""
    name, published = OF_THE_HUB[model_type]
    build(ARCHITECTURES[name], tmp_path / "src")
    expected = computed(ARCHITECTURES[name], load(ARCHITECTURES[name], tmp_path / "src"))
    config = json.loads((tmp_path / "src" / "config.json").read_bytes())
    config = {"text_config": config, "model_type": model_type} if published else config | {"model_type": model_type}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    rename(tmp_path / "src" / "model.safetensors", published)
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q8"}, tmp_path / "master")
    for target in ("vllm", "mlx"):
        run_command(
            {"export": str(tmp_path / "master"), "target": target, **OPTIONS.get(target, {})}, tmp_path / target
        )
    check_mlx(ARCHITECTURES[name], tmp_path, tmp_path / "mlx", expected)
    assert {*integer_names(tmp_path / "vllm")} < master_weights(tmp_path / "master").keys()


@pytest.mark.parametrize("model_type", OF_MLX_LM)
def test_type_of_mlx_lm_alone_computes_there_as_before(model_type: str, tmp_path: Path) -> None:
    from mlx.core import array, float32
    from mlx_lm.utils import load_model

    config, shapes = OF_MLX_LM[model_type]
    tensors = {
        name: bf16(gaussian(*shape, seed=n, scale=0.1) + ("norm" in name))
        for n, (name, shape) in enumerate(shapes.items())
    }
    config = {"model_type": model_type, "dtype": "bfloat16"} | config
    source = write_checkpoint(tmp_path / "src", tensors, config=config)
    model = load_model(source)[0]
    model.set_dtype(float32)  # there are experts of no other on a CPU
    expected = np.array(model(array([IDS]))[0])
    run_command({"quantize": str(source), "recipe": "q8"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "mlx", **OPTIONS["mlx"]}, tmp_path / "mlx")
    found = open_model(tmp_path / "mlx").logits(np.array(IDS), len(IDS))
    assert_within(distance(found, expected), "8-bit weights")
    run_command({"export": str(tmp_path / "master"), "target": "bf16"}, tmp_path / "bf16")
    assert read_all(tmp_path / "bf16").keys() == tensors.keys()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_experts_of_qwen3_vl_moe_as_published_compute_in_mlx_lm(tmp_path: Path) -> None:
    """Stacks [experts, in, out], which transformers 5 saves as [experts, out, in]."""
    about = ARCHITECTURES["qwen3_vl_moe"]
    build(about, tmp_path / "src")
    expected = computed(about, load(about, tmp_path / "src"))
    tensors = load_file(tmp_path / "src" / "model.safetensors")
    turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(turned, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q8"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "mlx", **OPTIONS["mlx"]}, tmp_path / "mlx")
    check_mlx(about, tmp_path, tmp_path / "mlx", expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["laguna", "kimi_k25"])
def test_torchao_export_is_whole_where_weights_have_other_names_in_memory(name: str, tmp_path: Path) -> None:
    build(ARCHITECTURES[name], tmp_path / "src")
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q8"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "torchao", "format": "int8"}, tmp_path / "torchao")
    expected = computed(ARCHITECTURES[name], load(ARCHITECTURES[name], tmp_path / "src"))
    assert_within(
        distance(open_model(tmp_path / "torchao").logits(np.array(IDS), len(IDS)), expected[0]), "8-bit weights"
    )


def test_page_holds_the_table() -> None:
    """`python tests/architectures/known_architectures.py` writes it, with a row for every outcome."""
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_table(page) == page
    assert all(name in page for name in ARCHITECTURES)
    outcomes = {tuple(about.expected.values()) for about in ARCHITECTURES.values()}
    assert 5 < len(markdown().splitlines()) - 2 <= len(outcomes)


def test_list_has_every_type_of_transformers_that_generates_text() -> None:
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM")
    types = {name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    assert all(has_trait(model_type, Trait.EXAMINED) for model_type in types)


@pytest.mark.parametrize(("model_type", "target", "warned"), [
    ("llama_of_next_year", "vllm", True), ("llama_of_next_year", "torchao", True), ("llama", "vllm", False),
])  # fmt: skip
def test_type_that_nobody_examined_is_warned_of(model_type: str, target: str, warned: bool, tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(1024, 1024))}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": model_type, "dtype": "bfloat16"})
    run_command({"quantize": str(source)}, tmp_path / "master")
    report = run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / "out")
    found = [line for line in report.warnings if "nobody has examined what transformers does" in line]
    assert len(found) == warned
    assert all(model_type in line and "try it before you publish it" in line for line in found)
