"""The mixes give every tensor the type that llama.cpp's own quantizer gives it."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import raises
from gguf_files import converted, write_gguf
from tiny_gguf import finish

from pqweights.checkpoint.gguf.mixes import (
    ALIASES,
    EMBEDDING,
    MIXES,
    OUTPUT,
    WANT_IMPORTANCE,
    Shape,
    file_type,
    find_mix,
    fitting_type,
    may_be_quantized,
    role_of,
    type_of,
)
from pqweights.checkpoint.source import open_local
from pqweights.errors import OptionError
from pqweights.formats.lloyd_max import DISTORTION
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.planning.recipe import NOTHING, Goal
from pqweights.runtime import llama_library
from pqweights.targets.gguf_types import chosen_types
from pqweights.targets.target import GPTQ, IMPORTANCE, PLAIN

VOCABULARY, WIDTH, INNER = 64, 256, 512


def llama(path: Path, *, layers: int, heads: int, shared: int, experts: int = 0, tied: bool = False) -> None:
    """Write a Llama of zeros, as BF16."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    kv = WIDTH * shared // heads
    matrices = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH)}
    inner = {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    for layer in range(layers):
        if experts:
            matrices["ffn_gate_inp"] = (experts, WIDTH)
            for name, shape in inner.items():
                _add(writer, f"blk.{layer}.{name}_exps.weight", (experts, *shape))
        else:
            matrices |= inner
        for name, shape in matrices.items():
            _add(writer, f"blk.{layer}.{name}.weight", shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, dtype=np.float32))
    _add(writer, "token_embd.weight", (VOCABULARY, WIDTH))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    if not tied:
        _add(writer, "output.weight", (VOCABULARY, WIDTH))
    finish(writer)


def _add(writer: Any, name: str, shape: tuple[int, ...]) -> None:
    if "ffn_gate_inp" in name:
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    else:
        data = np.zeros((*shape[:-1], shape[-1] * 2), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


MODELS: dict[str, dict[str, Any]] = {
    "17 layers": {"layers": 17, "heads": 4, "shared": 2},
    "shared heads, tied": {"layers": 9, "heads": 8, "shared": 2, "tied": True},
    "eight experts": {"layers": 8, "heads": 8, "shared": 2, "experts": 8},
}


def importances(library: Any, path: Path) -> tuple[Any, list[Any]]:
    """The same importance for all columns of every matrix of a file, as llama_model_quantize takes it.

    Returns the structs, and what they point to, which must be kept as long as they are.
    """
    matrices = [(tensor.name, tensor.shape.tolist()) for tensor in gguf.GGUFReader(path).tensors]
    data = (library.llama_model_imatrix_data * (len(matrices) + 1))()
    kept: list[Any] = []
    for entry, (name, shape) in zip(data, matrices, strict=False):
        means = np.ones(shape[0] * (shape[2] if len(shape) == 3 else 1), dtype=np.float32)
        kept += [means, name.encode()]
        entry.name, entry.size = kept[-1], means.size
        entry.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return data, kept


def without_quantizing(path: Path, settings: Any) -> tuple[dict[str, str], bool]:
    """The type that llama.cpp would give each tensor of a file, and whether it would want an importance matrix."""
    (functions, log), lines = llama_library.library(), []
    settings.dry_run = True
    note = functions.llama_log_callback(lambda level, text, data: lines.append(text.decode()))
    functions.llama_log_set(note, ctypes.c_void_p(0))
    try:
        assert functions.llama_model_quantize(str(path).encode(), b"nowhere", ctypes.byref(settings)) == 0
    finally:
        functions.llama_log_set(log._callback, ctypes.c_void_p(0))
    log = "".join(lines)
    told = re.findall(r"\] +(\S+) +- \[.*?type = +(\w+), size = .*?MiB(?: -> .*?\((\w+)\))?", log)
    return {name: (after or before).upper() for name, before, after in told}, "will require an imatrix" in log


@pytest.mark.parametrize(("name", "imatrix"), [("17 layers", False), *((name, True) for name in MODELS)])
def test_types_are_those_of_llama_cpp(name, imatrix, tmp_path):
    """Of all matrices in all mixes, with an importance matrix or without."""
    model, folder, library = MODELS[name], tmp_path, llama_library.library()[0]
    llama(folder / "plain.gguf", **model)
    shape = Shape(
        layers=model["layers"],
        shared=model["heads"] // model["shared"],
        experts=model.get("experts", 0),
        tied=model.get("tied", False),
        large=False,
        imatrix=imatrix,
    )
    plain = {
        tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in gguf.GGUFReader(folder / "plain.gguf").tensors
    }
    for mix, (most, _) in MIXES.items():
        if most in ("F32", "F16", "BF16") or mix == "NVFP4":  # of which this llama.cpp makes no files
            continue
        expected = {tensor: fitting_type(type_of(mix, tensor, size, shape), size[-1]) for tensor, size in plain.items()}
        inner = {kind for tensor, kind in expected.items() if role_of(tensor) not in (OUTPUT, EMBEDDING)}
        settings = library.llama_model_quantize_default_params()
        settings.ftype = file_type(mix)
        if imatrix:
            data, kept = importances(library, folder / "plain.gguf")
            settings.imatrix = data
            assert kept
        types, wants_imatrix = without_quantizing(folder / "plain.gguf", settings)
        assert types == expected, mix
        assert wants_imatrix == (not imatrix and bool(inner & {*WANT_IMPORTANCE} or mix == "Q2_K_S")), mix


@pytest.mark.parametrize("name", ["lfm2 moe", "gemma4", "hy v4", "qwen3_5 moe", "qwen4 exp", "nemotron h moe"])
def test_types_in_layers_of_several_kinds_are_those_of_llama_cpp(name, tmp_path):
    """Where only some layers have values, llama.cpp counts these to choose wider types."""
    import gguf_cases

    case = gguf_cases.CASES[name]
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    gguf_cases.saved(dataclasses.replace(case, settings=case.settings | sizes), tmp_path)
    plain, out, library = write_gguf(tmp_path), tmp_path / "quantized.gguf", llama_library.library()[0]
    model = converted(tmp_path)
    for mix in ("Q4_K_M", "Q3_K_M"):
        settings = library.llama_model_quantize_default_params()
        settings.ftype = file_type(mix)
        assert library.llama_model_quantize(str(plain).encode(), str(out).encode(), ctypes.byref(settings)) == 0
        types = chosen_types(mix, NOTHING, model, open_local(tmp_path), rounding=PLAIN)
        expected = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        assert {name: type_name for name, (type_name, _) in types.items()} == expected


def test_an_importance_matrix_widens_the_first_eighth_of_ffn_down():
    """As in llama_tensor_get_type_impl of src/llama-quant.cpp: only with a matrix, and only in these two mixes."""
    for name, wider in (("Q4_0", "Q4_1"), ("Q5_0", "Q5_1")):
        for imatrix in (False, True):
            model = Shape(layers=17, shared=2, experts=0, tied=False, large=False, imatrix=imatrix)
            types = [type_of(name, f"blk.{n}.ffn_down.weight", (256, 512), model) for n in range(17)]
            assert types == ([wider] * 2 if imatrix else [name] * 2) + [name] * 15
            assert type_of(name, "blk.0.ffn_up.weight", (512, 256), model) == name


def test_names_are_found_in_any_case_and_the_nearest_is_named():
    assert find_mix("q4_k_m") == find_mix("Q4_K") == "Q4_K_M"
    assert set(ALIASES.values()) <= MIXES.keys()
    with raises(OptionError, "`type` q4km", "'Q4_K_M'"):
        find_mix("q4km")


def test_every_type_of_a_mix_has_blocks_and_a_file_type():
    for mix, (most, others) in MIXES.items():
        assert most in BLOCK_TYPES or most in ("F32", "F16", "BF16")
        assert all(wider in BLOCK_TYPES for _, _, wider in others)
        of_package = gguf.LlamaFileType.__members__.get("ALL_F32" if mix == "F32" else f"MOSTLY_{mix}")
        assert file_type(mix) == of_package or (of_package is None and mix == "Q2_0")


def test_what_llama_cpp_computes_in_float32_is_never_quantized():
    assert may_be_quantized("blk.0.ffn_up_exps.weight", (4, 8, 256))
    for name, shape in (("blk.0.ffn_gate_inp.weight", (8, 256)), ("output_norm.weight", (256,)), ("a.bias", (4, 4))):
        assert not may_be_quantized(name, shape)


def test_fallbacks():
    assert [fitting_type("Q4_K", columns) for columns in (512, 96, 80)] == ["Q4_K", "Q5_0", "F16"]
    assert [fitting_type("Q8_0", columns) for columns in (96, 80)] == ["Q8_0", "F16"]
    assert [fitting_type(name, 96) for name in ("IQ2_XS", "TQ1_0", "NVFP4", "Q1_0", "Q2_0")] == [
        "IQ4_NL",
        "Q4_0",
        "MXFP4",
        "Q4_0",
        "Q4_0",
    ]


def test_shares_of_masters_follow_from_the_errors_of_gaussian_weights() -> None:
    """Those of the table in docs/gguf.md."""
    page = (Path(__file__).parents[2] / "docs/gguf.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|((?: \d+% \|)+)$", page, re.MULTILINE)
    assert [name for name, _ in rows] == ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
    for name, cells in rows:
        own = BLOCK_TYPES[name].distortion
        errors = [DISTORTION[bits] for bits in (8, 7, 6, 5, 4)]
        assert re.findall(r"\d+%", cells) == [f"{error / (error + own * (1 - error)):.0%}" for error in errors]


@pytest.mark.parametrize(
    ("rounding", "taken", "left"), [(PLAIN, "Q3_K", "IQ3_S"), (IMPORTANCE, "IQ3_S", "Q3_K"), (GPTQ, "Q3_K", "IQ3_S")]
)
def test_a_size_is_met_with_types_that_suit_how_codes_are_chosen(rounding, taken, left, tmp_path):
    """With grids if errors are weighed; with codes of single weights if errors cancel, which those of grids do not."""
    import gguf_cases

    case = gguf_cases.CASES["lfm2 moe"]
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    gguf_cases.saved(dataclasses.replace(case, settings=case.settings | sizes), tmp_path)
    recipe = dataclasses.replace(NOTHING, goal=Goal(bits_per_weight=3.0))
    types = chosen_types("Q4_K_M", recipe, converted(tmp_path), open_local(tmp_path), rounding=rounding)
    kinds = {kind for kind, _ in types.values()}
    assert taken in kinds and left not in kinds
