"""The expressions with which a vllm export names layers, matched by compressed-tensors."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from helpers import read_all
from integer_exports import LINEAR_FAMILIES, integer_names, quantization

from pqweights.exports.linear import patterns


def matched(expressions: list[str], modules: list[str]) -> list[str]:
    """The modules that compressed-tensors' match_name finds."""
    from compressed_tensors.utils.match import match_name

    return [module for module in modules if any(match_name(module, expression) for expression in expressions)]


def weights(*modules: str) -> list[str]:
    return [f"{module}.weight" for module in modules]


def both(*modules: str) -> list[str]:
    """Modules under the prefixes of text and image-text models, and without a prefix."""
    return [
        prefix + module
        for module in modules
        for prefix in ("model.", "model.language_model.", "language_model.model.", "")
    ]


LAYERS = [
    f"layers.{n}.{layer}" for n in (0, 1, 10) for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]


def test_patterns_match_under_any_prefix() -> None:
    pytest.importorskip("compressed_tensors")
    chosen = [n for n in LAYERS if n.endswith("q_proj")]
    others = [n for n in LAYERS if not n.endswith("q_proj")]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert len(found) == 1
    assert matched(found, both(*LAYERS)) == both(*(n for n in LAYERS if n in chosen))


def test_pattern_of_one_layer_matches_no_other_layer() -> None:
    """A pattern leaves the number of the layer open only if it then matches no other layer."""
    pytest.importorskip("compressed_tensors")
    chosen = ["layers.1.self_attn.q_proj"]
    others = [n for n in LAYERS if n not in chosen]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert matched(found, both(*LAYERS)) == both(*chosen)
    assert matched(found, ["model.layers.11.self_attn.q_proj", "model.layers.1.self_attn.q_proj_2"]) == []


def test_patterns_tell_text_from_vision_layers_of_the_same_name() -> None:
    pytest.importorskip("compressed_tensors")
    text = [f"model.language_model.{n}" for n in LAYERS]
    seeing = [f"model.vision_tower.encoder.{n}" for n in LAYERS]
    for chosen, others in ((text, seeing), (seeing, text)):
        found = patterns(weights(*chosen), weights(*others))
        assert matched(found, text + seeing) == chosen
        assert patterns(weights(*chosen), []) != []
    assert matched(patterns(weights(*seeing), weights(*text)), [f"model.{n}" for n in LAYERS]) == []


def test_patterns_match_single_and_fused_experts() -> None:
    """For fused experts, vLLM asks for the module that holds all of them."""
    pytest.importorskip("compressed_tensors")
    single = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in (0, 1) for e in (0, 7)]
    others = [f"model.layers.{n}.mlp.shared_expert.up_proj" for n in (0, 1)] + ["model.layers.2.mlp.up_proj"]
    found = patterns(weights(*single), weights(*others))
    assert len(found) == 1
    assert matched(found, single + others) == single
    fused = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in (0, 1)]
    found = patterns(fused, weights(*others))
    assert matched(found, [f"model.layers.{n}.mlp.experts" for n in (0, 1)]) != []
    assert matched(found, [*others, *single]) == single
    assert matched(found, others) == []


def test_dots_of_names_match_only_dots() -> None:
    pytest.importorskip("compressed_tensors")
    found = patterns(weights("h.0.c_fc"), weights("h.0.c_proj"))
    assert matched(found, ["h.0.c_fc", "transformer.h.3.c_fc", "h.0.cxfc", "hx0.c_fc", "h.0xc_fc", "xh.0.c_fc"]) == [
        "h.0.c_fc",
        "transformer.h.3.c_fc",
    ]


@pytest.mark.parametrize("name", LINEAR_FAMILIES)
def test_ignore_list_holds_the_linear_layers_that_stay_plain(name: str, base: Path) -> None:
    """The linear layers are those that vLLM builds from the names in the checkpoint."""
    pytest.importorskip("compressed_tensors")
    exported = families.exported(base, name, "vllm", bits=4)
    rounded = {n.removesuffix(".weight") for n in integer_names(exported)}
    layers = [
        n.removesuffix(".weight")
        for n, (_, values) in read_all(families.model(base, name)).items()
        if n.endswith(".weight") and values.ndim == 2 and "embed" not in n
    ]
    assert rounded <= set(layers)
    assert set(layers) - set(matched(quantization(exported)["ignore"], layers)) == rounded
