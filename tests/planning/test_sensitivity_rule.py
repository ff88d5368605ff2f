"""The rule of thumb for sensitivities, the groups that share a bit width, and those that a file lacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from closeness import approx
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.models.names import TIED_EMBEDDINGS
from pqweights.planning.roles import classify
from pqweights.planning.sensitivity import Sensitivity, alphas_for, grouped, heuristic_alphas, is_tied, taken_apart


def group(*weights: str, alpha: float) -> dict[str, float]:
    return dict.fromkeys(weights, alpha / len(weights))


def of_groups(*groups: dict[str, float]) -> Sensitivity:
    return Sensitivity(method={}, alphas={name: alpha for of_one in groups for name, alpha in of_one.items()})


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
def test_rule_of_thumb_weighs_the_first_and_the_last_layer(layers: int) -> None:
    alphas = rule(*llama(layers))
    assert all(0 < alpha < math.inf for alpha in alphas.values())
    for kind, first, last in (
        ("self_attn.qkv", 1.0, 1.0),
        ("self_attn.o_proj", 2.0, 1.0),
        ("mlp.gate_up", 1.5, 3.0),
        ("mlp.down_proj", 2.0, 2.0),
    ):
        of_layers = [alphas[f"model.layers.{layer}.{kind}"] for layer in range(layers)]
        if layers > 2:
            assert of_layers[0] == approx(first * of_layers[1])
            assert of_layers[-1] == approx(last * of_layers[1])
            assert of_layers[1:-1] == [of_layers[1]] * (layers - 2)
    assert alphas["lm_head"] == 1.0
    assert alphas["model.embed_tokens"] == 0.3


def test_rule_of_thumb_gives_more_to_all_layers_of_a_deeper_model() -> None:
    kind = "self_attn.qkv"
    sums = [sum(alpha for name, alpha in rule(*llama(layers)).items() if name.endswith(kind)) for layers in (3, 24)]
    assert sums[1] == approx(2 * sums[0])


def test_rule_of_thumb_orders_the_parts_of_a_layer() -> None:
    alphas = rule(*llama(4), *(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(3)))
    of = {
        kind: alphas[f"model.layers.1.{kind}"]
        for kind in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate_up", "self_attn.qkv", "mlp.experts")
    }
    assert list(of) == sorted(of, key=of.__getitem__)
    assert len(set(of.values())) == 5


def test_layers_of_encoder_and_decoder_are_counted_separately() -> None:
    names = [f"encoder.layers.{n}.fc1.weight" for n in range(2)] + [f"decoder.layers.{n}.fc1.weight" for n in range(8)]
    alphas = rule(*names)
    # The fewer there are, the more each has: 4 times, but for the cube root of 4.
    assert alphas["encoder.layers.0.fc1"] == approx(4 ** (2 / 3) * alphas["decoder.layers.0.fc1"])


def test_rule_of_thumb_is_scaled_to_the_measured_groups() -> None:
    names = llama(3)
    roles = {name: classify(name, "BF16", (64, 128)).name for name in names}
    groups = grouped(roles.items(), False)
    by_rule, missing = alphas_for(groups, roles=roles, known=None)
    assert missing == []
    measured = [group(*groups[name], alpha=7 * by_rule[name]) for name in list(groups)[2:]]
    alphas, missing = alphas_for(groups, roles=roles, known=of_groups(*measured))
    assert missing == list(groups)[:2]
    assert alphas == {name: approx(7 * alpha) for name, alpha in by_rule.items()}
    assert list(alphas) == list(groups)
    # The file holds none of these groups.
    other = of_groups(group("x.weight", alpha=9.0))
    assert alphas_for(groups, roles=roles, known=other) == (by_rule, list(groups))


def test_groups_taken_apart_have_the_alphas_of_the_whole() -> None:
    """Values and gates have more of it than their size; experts and tied embeddings stay together."""
    names = [*llama(2), *(f"model.layers.2.mlp.experts.{n}.up_proj.weight" for n in range(3))]
    roles = {name: classify(name, "BF16", (64, 128)).name for name in names}
    groups = grouped(roles.items(), True)
    alphas = heuristic_alphas(groups, roles)
    single, divided = taken_apart(groups, alphas, roles)
    assert sorted(name for members in single.values() for name in members) == sorted(names)
    together = {TIED_EMBEDDINGS, "model.layers.2.mlp.experts"}
    assert {name for name, members in single.items() if len(members) > 1} == together
    assert list(single) == list(divided)
    for name, members in groups.items():
        parts = [part for part, weights in single.items() if set(weights) <= set(members)]
        assert math.fsum(divided[part] for part in parts) == approx(alphas[name])
    layer = {module: divided[f"model.layers.1.{module}"] for module in MODULES}
    assert layer["self_attn.v_proj"] > layer["self_attn.q_proj"] == layer["self_attn.k_proj"]
    assert layer["mlp.up_proj"] > layer["mlp.gate_proj"]


def test_groups_taken_apart_have_the_shares_that_were_measured() -> None:
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    roles = dict.fromkeys(names, "attention")
    groups = grouped(roles.items(), False)
    (name,) = groups
    measured = of_groups(*(group(each, alpha=alpha) for each, alpha in zip(names, (1.0, 3.0, 4.0), strict=True)))
    _, divided = taken_apart(groups, {name: 16.0}, roles, measured)
    assert list(divided.values()) == [approx(alpha) for alpha in (2.0, 6.0, 8.0)]
    # One that was not measured alone leaves the rule of thumb.
    without = Sensitivity(method={}, alphas=dict([*measured.alphas.items()][:2]))
    assert taken_apart(groups, {name: 16.0}, roles, without) == taken_apart(groups, {name: 16.0}, roles)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({}, False),
    ],
)
def test_tied_embeddings_are_read_from_the_configuration(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", {"lm_head.weight": bf16(gaussian(4, 128))}, config=config)
    assert is_tied(open_local(folder), [("embed_tokens", "embedding"), ("lm_head", "lm_head")]) is tied


# --- which weights share a bit width, by the names of many architectures ---


def groups_of_names(*names: str, tied: bool = False) -> dict[str, list[str]]:
    """Group weights by name, with the roles that the names have in a plan."""
    return grouped([(name, classify(name, "BF16", (64, 128)).name) for name in names], tied)


ALONE = ""
# A module, the modules in it, and the name of their group within it; ALONE for a group of each.
FUSED_MODULES: list[tuple[str, tuple[str, ...], str]] = [
    # Llama, and the names in Meta's own checkpoints
    ("model.layers.7.self_attn.", ("k_proj", "q_proj", "v_proj"), "qkv"),
    ("model.layers.7.mlp.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.7.", ("self_attn.o_proj", "mlp.down_proj"), ALONE),
    ("layers.0.attention.", ("wq", "wk", "wv"), "qkv"),
    ("layers.0.feed_forward.", ("w1", "w3"), "gate_up"),
    ("layers.0.", ("attention.wo", "feed_forward.w2"), ALONE),
    # shared experts, which are not those of a mixture
    ("model.layers.2.mlp.shared_expert.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.2.mlp.shared_experts.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.2.mlp.shared_experts.", ("down_proj",), ALONE),
    # MLA of DeepSeek; V2-Lite has no latent for the queries
    ("model.layers.1.self_attn.", ("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
    ("model.layers.1.self_attn.", ("q_b_proj", "kv_b_proj", "o_proj"), ALONE),
    # GPT-2 and BERT
    ("", ("wte", "wpe", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"), ALONE),
    ("encoder.layer.0.attention.self.", ("query", "key", "value"), "qkv"),
    ("encoder.layer.0.", ("attention.output.dense", "intermediate.dense", "output.dense"), ALONE),
    # linear attention of Qwen3-Next and Qwen3.5
    ("model.layers.0.linear_attn.", ("in_proj_qkvz",), "in_proj_qkvz"),
    ("model.layers.0.linear_attn.", ("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    # other names of q, k and v, and some that are only similar
    ("a.", ("q", "k", "v"), "qkv"),
    ("a.", ("q_lin", "k_lin", "v_lin"), "qkv"),
    ("", ("q", "k"), "qkv"),
    ("a.", ("qk", "q_projection", "my_q_proj", "queries", "w12", "gate"), ALONE),
]


@pytest.mark.parametrize(("path", "modules", "group"), FUSED_MODULES)
def test_modules_that_runtimes_fuse_are_one_group(path: str, modules: tuple[str, ...], group: str) -> None:
    names = [f"{path}{module}.weight" for module in modules]
    alone = {path + module: [f"{path}{module}.weight"] for module in modules}
    assert groups_of_names(*names) == (alone if group == ALONE else {path + group: names})
    other = f"x.layers.8.{names[0]}"
    assert other not in groups_of_names(*names, other)[path + (group or modules[0])]


@pytest.mark.parametrize(
    ("path", "modules"),
    [
        ("model.layers.3.block_sparse_moe.experts", ("w1", "w2", "w3")),
        ("model.layers.3.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("model.layers.3.mlp.local_experts", ("gate_proj", "up_proj", "down_proj")),
        ("experts", ("w1", "w2", "w3")),
    ],
)
def test_all_experts_of_a_layer_are_one_group(path: str, modules: tuple[str, ...]) -> None:
    names = [f"{path}.{expert}.{module}.weight" for expert in range(12) for module in modules]
    assert groups_of_names(*names) == {path: names}
    fused = [f"{path}.{module}" for module in ("gate_up_proj", "down_proj")]
    assert groups_of_names(*fused) == {path: fused}


def test_tied_embeddings_are_one_group() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert groups_of_names(*names, tied=True) == {TIED_EMBEDDINGS: list(names)}
    assert len(groups_of_names(*names)) == 2
    assert groups_of_names("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", tied=True) == {
        TIED_EMBEDDINGS: ["model.embed_tokens.weight"],
        "model.layers.0.mlp.gate_up": ["model.layers.0.mlp.up_proj.weight"],
    }
