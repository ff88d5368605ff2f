"""vLLM computes with what exports wrote: its log probabilities are those of transformers with the decoded integers, and
with rotary embeddings and windows as exports state them.

vLLM computes in BF16, transformers in float32, and integers matter much more than that. The models are random, with
weights large enough that the predictions of one token differ.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import transformers
from closeness import assert_within
from export_decoders import awq_codes, from_vllm_format, gptq_codes
from external_runtimes import run_in_vllm
from families import FAMILIES, VOCABULARY, Family
from helpers import Array, as_float32, read_all, run_command
from integer_exports import integer_names
from position_cases import saved
from shared import made_once, run_folder
from test_position_matrix import stated

SCRIPT = Path(__file__).parents[1] / "support" / "run_vllm.py"
# Of the master; vLLM fuses q, k and v, also where a recipe keeps one of them.
RECIPE = "{bits: 8, rules: [{name: model.layers.0.self_attn.k_proj.weight, keep: true}]}"
# The family of the model of each format that vLLM has kernels for on a CPU, and after int8 and fp8 those that it
# emulates (run_vllm.py); it emulates NVFP4 with rounded inputs only, and MXFP4 with a package that is not here.
# Of experts vLLM's kernels for CPUs want AMX: run_vllm.py decodes what vLLM has loaded.
FORMATS = {
    "w4a16": "llama-uneven",
    "w4a16 with its head": "llama",
    "w4a16 of experts": "qwen3_moe",
    "mxfp4-gpt-oss": "gpt_oss",
    **dict.fromkeys(("int8", "fp8", "fp8-block", "fp8-deepseek", "mxfp8", "nvfp4", "nvfp4-modelopt"), "llama"),
    **dict.fromkeys(("w4a16-asym", "awq", "gptq"), "llama"),
}
HEAD = "lm_head.weight"
LEAST_OF_INT4 = 0.1  # what INT4 makes the log probabilities of a token differ by, on average: 0.25
# vLLM rounds what layers read, too.
PROCESSOR = Path("/proc/cpuinfo")
HAS_VNNI = PROCESSOR.exists() and "vnni" in PROCESSOR.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ
INT8 = "int8" if HAS_VNNI else "int8 without VNNI"
ROUNDED_INPUTS = {"int8": INT8, "fp8": "fp8", "nvfp4": "nvfp4", "nvfp4-modelopt": "nvfp4"}
CODES = np.random.default_rng(4).integers(0, 16, (64, 96))  # [K, N]
# Some cells of test_position_matrix.py, with windows of 8 tokens. vLLM takes none in some layers of Qwen 2 and 3.
CELLS = {
    "llama, linear": ("llama", "linear"),
    "llama, llama3": ("llama", "llama3"),
    "llama, yarn": ("llama", "yarn"),
    "mistral, windows": ("mistral, windows", "default"),
    "phi3, windows": ("phi3, windows", "default"),
    "starcoder2": ("starcoder2", "default"),
}
FEW_TOKENS = [np.random.default_rng(seed).integers(3, 120, 48).tolist() for seed in range(2)]
TOKENS = [np.random.default_rng(seed).integers(3, VOCABULARY - 12, 48).tolist() for seed in range(4)]


def wide(name: str) -> Family:
    """The family of the model of a format, with larger weights; each token uses all experts, as BF16 picks others."""
    family = FAMILIES[FORMATS[name]]
    settings = {**family.settings, "initializer_range": 0.06}
    return replace(
        family, settings=settings | ({"num_experts_per_tok": 4} if "num_experts_per_tok" in settings else {})
    )


def make(folder: Path) -> None:
    """Make the models with their exports, and let one process of vLLM score the tokens with all of them."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    for name in FORMATS:
        families.build(wide(name), folder / name)
        master, out = (folder / f"{name}-{suffix}" for suffix in ("master", "vllm"))
        run_command({"quantize": str(folder / name), "recipe": str(folder / "recipe.yaml")}, master)
        form = name.partition(" ")[0]
        rules = {"set_format": {HEAD: form}} if "head" in name else {}
        run_command({"export": str(master), "target": "vllm", "format": form, **rules}, out)
    for name, cell in CELLS.items():
        saved(folder / name, stated(*cell) | {"max_position_embeddings": 256})
        run_command({"export": str(folder / name), "target": "bf16"}, folder / f"{name}-vllm")
    folders = {name: str(folder / f"{name}-vllm") for name in (*FORMATS, *CELLS)}
    tokens = dict.fromkeys(FORMATS, TOKENS) | dict.fromkeys(CELLS, FEW_TOKENS)
    job = {"folders": folders, "tokens": tokens, "codes": CODES.tolist()}
    run_in_vllm(SCRIPT, folder / "result.json", json.dumps(job))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(run_folder(tmp_path_factory.getbasetemp()) / "vllm-runs", make)


def scores(model: Any, tokens: list[list[int]] = TOKENS) -> Array:
    """What transformers gives: the log probability of each token but the first, [texts, tokens]."""
    with torch.inference_mode():
        logits = model(torch.tensor(tokens)).logits.float().log_softmax(-1)
    found = logits[:, :-1].gather(-1, torch.tensor(tokens)[:, 1:, None])
    return np.asarray(found[..., 0].numpy())


def of_parameter(stored: dict[str, Any], name: str) -> Array:
    """The values of a parameter, which may be a stack of experts that are stored one by one."""
    if name in stored:
        found = stored[name]
        return as_float32(found) if isinstance(found, tuple) else np.asarray(found)
    experts, _, stack = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
    one_by_one = range(
        sum(other.startswith(f"{experts}.") and other.endswith(f".{parts[0]}.weight") for other in stored)
    )
    return np.stack([np.concatenate([stored[f"{experts}.{e}.{part}.weight"] for part in parts]) for e in one_by_one])


@pytest.mark.parametrize("name", FORMATS)
def test_vllm_predicts_what_transformers_does_with_the_decoded_integers(name: str, work: Path) -> None:
    model = families.load(work / name, wide(name))
    plain, tensors, layers = scores(model), read_all(work / f"{name}-vllm"), integer_names(work / f"{name}-vllm")
    weights = dict(model.named_parameters())
    stored = {**tensors, **{layer: from_vllm_format(tensors, layer) for layer in layers}}
    assert layers and "model.layers.0.self_attn.k_proj.weight" not in layers
    assert (HEAD in layers) == ("head" in name)
    for weight in weights:
        values = of_parameter(stored, weight)
        weights[weight].data = torch.from_numpy(np.ascontiguousarray(values))
    expected = scores(model)
    if name == "w4a16":
        assert np.abs(expected - plain).mean() > LEAST_OF_INT4
    check(work, name, expected, f"vLLM, {ROUNDED_INPUTS.get(name, 'BF16')}")


@pytest.mark.parametrize("name", CELLS)
def test_vllm_predicts_what_transformers_does_with_rotary_embeddings_and_windows(name: str, work: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.bfloat16).float()
    check(work, name, scores(model, FEW_TOKENS), "vLLM, BF16")


def check(work: Path, name: str, expected: Array, kind: str) -> None:
    """Compare what vLLM gave with what it should."""
    found = json.loads((work / "result.json").read_text())["scores"][name]
    assert not isinstance(found, str), f"vLLM does not load it: {found}"
    difference = np.abs(np.array(found) - expected)
    assert_within(difference.mean(), f"{kind} on average")
    assert_within(difference.max(), kind)


def test_vllm_packs_words_that_the_decoders_of_the_tests_read(work: Path) -> None:
    """And test_layouts_with_zeros.py decodes what exports store: the same codes are the same words."""
    words = json.loads((work / "result.json").read_text())["words"]
    assert np.array_equal(awq_codes(np.array(words["awq"], np.int32)), CODES)
    assert np.array_equal(gptq_codes(np.array(words["gptq"], np.int32).T.copy(), 4).T, CODES)
