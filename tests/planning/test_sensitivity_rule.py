"""The rule of thumb for sensitivities, and groups that a file of sensitivities lacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.planning.roles import classify
from pqweights.planning.sensitivity_file import (
    TIED_EMBEDDINGS,
    Measured,
    Sensitivity,
    alphas_for,
    fitted_alpha,
    grouped,
    heuristic_alphas,
    is_tied,
)


def group(name: str, *weights: str, alpha: float) -> Measured:
    return Measured(name=name, weights=weights, alpha=alpha, points=())


def of_groups(*groups: Measured) -> Sensitivity:
    return Sensitivity(checkpoint="", method={}, groups=groups)


def rule(*names: str, tied: bool = False) -> dict[str, float]:
    roles = {name: classify(name, "BF16", (64, 128)).name for name in names}
    return heuristic_alphas(grouped(roles.items(), tied), roles)


MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def llama(layers: int) -> list[str]:
    names = [f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in MODULES]
    return ["model.embed_tokens.weight", *names, "lm_head.weight"]


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_rule_of_thumb_is_positive_and_largest_for_the_first_layer(layers: int) -> None:
    alphas = rule(*llama(layers))
    assert all(0 < alpha < math.inf for alpha in alphas.values())
    for kind in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj"):
        of_layers = [alphas[f"model.layers.{layer}.{kind}"] for layer in range(layers)]
        assert max(of_layers) == of_layers[0]
        if layers > 2:
            assert of_layers[0] == pytest.approx(3 * of_layers[1])
            assert of_layers[-1] == pytest.approx(1.5 * of_layers[1])
            assert of_layers[1:-1] == [of_layers[1]] * (layers - 2)
    assert alphas["lm_head"] == 1.0
    assert alphas["model.embed_tokens"] == 0.5


def test_sum_of_the_rule_of_thumb_does_not_grow_with_the_layers() -> None:
    few, many = (math.fsum(rule(*llama(layers)).values()) for layers in (4, 64))
    assert many < few


def test_rule_of_thumb_orders_the_parts_of_a_layer() -> None:
    alphas = rule(*llama(4), *(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(3)))
    of = {
        kind: alphas[f"model.layers.1.{kind}"]
        for kind in ("self_attn.o_proj", "self_attn.qkv", "mlp.down_proj", "mlp.gate_up", "mlp.experts")
    }
    assert list(of) == sorted(of, key=of.__getitem__)
    assert len(set(of.values())) == 5


def test_tied_embeddings_get_the_sum_of_both_parts() -> None:
    for names in (("model.embed_tokens.weight", "lm_head.weight"), ("model.embed_tokens.weight",)):
        assert rule(*names, tied=True)[TIED_EMBEDDINGS] == 1.5


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "weight",
        "layers.",
        "layers.x.weight",
        "layers.3",
        "h.0.",
        "a.layers.٣.b",
        "a.layers.²3.b",
        "\n.layers.1.x",
        "é",
        "layers.1.layers.2.x",
        f"model.layers.{'9' * 5000}.x",
        "x" * 10_000,
        "layers." * 2000 + "1.x",
    ],
)
def test_unusual_names_get_a_finite_sensitivity(name: str) -> None:
    alphas = heuristic_alphas({name: [name]}, {name: "linear"})
    assert 0 < alphas[name] < math.inf


def test_layers_of_encoder_and_decoder_are_counted_separately() -> None:
    names = [f"encoder.layers.{n}.fc1.weight" for n in range(2)] + [f"decoder.layers.{n}.fc1.weight" for n in range(8)]
    alphas = rule(*names)
    assert alphas["encoder.layers.0.fc1"] == pytest.approx(4 * alphas["decoder.layers.0.fc1"])


def test_rule_of_thumb_is_scaled_to_the_measured_groups() -> None:
    names = llama(3)
    roles = {name: classify(name, "BF16", (64, 128)).name for name in names}
    groups = grouped(roles.items(), False)
    by_rule, missing = alphas_for(groups, roles=roles, known=None)
    assert missing == []
    measured = [group(name, *groups[name], alpha=7 * by_rule[name]) for name in list(groups)[2:]]
    alphas, missing = alphas_for(groups, roles=roles, known=of_groups(*measured))
    assert missing == list(groups)[:2]
    assert alphas == {name: pytest.approx(7 * alpha) for name, alpha in by_rule.items()}
    assert list(alphas) == list(groups)
    # The file holds none of these groups.
    other = of_groups(group("x", "x.weight", alpha=9.0))
    assert alphas_for(groups, roles=roles, known=other) == (by_rule, list(groups))


def test_sensitivities_of_smaller_groups_add_up() -> None:
    measured = of_groups(
        group("q", "a.q_proj.weight", alpha=1.0), group("kv", "a.k_proj.weight", "a.v_proj.weight", alpha=2.5)
    )
    names = [f"a.{each}_proj.weight" for each in "qkv"]
    roles = dict.fromkeys(names, "attention")
    assert alphas_for({"a.qkv": names}, roles=roles, known=measured) == ({"a.qkv": 3.5}, [])


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"text_config": []}, False),
        ({}, False),
    ],
)
def test_tied_embeddings_are_read_from_the_configuration(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", {"lm_head.weight": bf16(gaussian(4, 128))}, config=config)
    assert is_tied(open_local(folder), [("embed_tokens", "embedding"), ("lm_head", "lm_head")]) is tied


def test_fitted_slope_goes_through_the_origin() -> None:
    assert fitted_alpha([(0.01, 0.02), (0.02, 0.04), (0.04, 0.08)]) == pytest.approx(2)
    assert fitted_alpha([(1.0, 1.0), (2.0, 4.0)]) == pytest.approx(9 / 5)  # (1*1 + 2*4) / (1 + 4)
