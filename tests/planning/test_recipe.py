"""Recipes: what the YAML may hold, which rule decides, what rules cannot change, and the error messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import raises

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import PlainTensor
from pqweights.common.options import Options
from pqweights.errors import OptionError, RecipeError
from pqweights.planning.choice import choose_recipe
from pqweights.planning.decisions import Decision, decide
from pqweights.planning.recipe import Goal, Recipe, Rule, load_recipe, parse_recipe, recipe_folder, recipe_names
from pqweights.planning.roles import ROLES

CODEC = "hadamard-lloyd-max"
RECIPES = Path(__file__).parents[2] / "recipes"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (256, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 128),
    "model.layers.0.mlp.up_proj.weight": (384, 128),
    "model.layers.1.mlp.up_proj.weight": (384, 128),
    "model.layers.0.mlp.experts.down_proj": (4, 128, 128),
    "model.layers.0.mlp.gate.weight": (4, 128),
    "model.layers.0.linear_attn.conv1d.weight": (256, 1, 4),
    "model.norm.weight": (256,),
    "model.position_ids": (300,),
    "lm_head.weight": (256, 128),
}


def tensor(name: str, shape: tuple[int, ...]) -> PlainTensor:
    dtype = "I64" if "ids" in name else "BF16"
    stored = StoredTensor(name=name, dtype=dtype, shape=shape, file="f", offset=0, byte_count=0)
    return PlainTensor.of(None, stored)  # type: ignore[arg-type]


def decisions(text: str) -> dict[str, Decision]:
    tensors = [tensor(name, shape) for name, shape in SHAPES.items()]
    return dict(zip(SHAPES, decide(parse_recipe(text, "test"), tensors), strict=True))


def bits(text: str) -> dict[str, int | None]:
    """The bit width of each tensor; None if it is kept."""
    return {name: decision.bits for name, decision in decisions(text).items()}


def kept(role: str, reason: str) -> Decision:
    return Decision(role=role, codec=None, bits=None, reason=reason)


DEFAULT = {
    "model.embed_tokens.weight": 5,
    "model.layers.0.self_attn.q_proj.weight": 5,
    "model.layers.0.mlp.up_proj.weight": 5,
    "model.layers.1.mlp.up_proj.weight": 5,
    "model.layers.0.mlp.experts.down_proj": 5,
    "model.layers.0.mlp.gate.weight": None,
    "model.layers.0.linear_attn.conv1d.weight": None,
    "model.norm.weight": None,
    "model.position_ids": None,
    "lm_head.weight": 5,
}


# --- the recipes of the package ---


def test_recipe_names_are_the_files_in_the_folder() -> None:
    assert recipe_names() == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert "q5" in recipe_names()
    assert {f.name for f in recipe_folder().iterdir()} >= {path.name for path in RECIPES.glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_recipe_loads_by_name_and_by_path(path: Path) -> None:
    recipe = load_recipe(path.stem)
    assert recipe == load_recipe(str(path))
    assert recipe.name == path.stem
    assert len(recipe.description) > 20
    assert recipe.codec == {"q": CODEC, "t": "hadamard-trellis"}[path.stem[0]]


# --- parsing ---


def test_every_key_is_read() -> None:
    text = """
    name: mine
    description: >-
      Two words.
    codec: hadamard-lloyd-max
    bits: 4
    rules:
      - {name: ["*.mlp.*", lm_head.weight], role: [mlp, lm_head], min_weights: 10, max_weights: 99, dims: 2, bits: 3}
      - {role: attention, codec: hadamard-lloyd-max, reason: few}
      - {name: model.norm.weight, keep: true}
    """
    large = {"name": ("*.mlp.*", "lm_head.weight"), "role": ("mlp", "lm_head"), "min_weights": 10, "max_weights": 99}
    rules = (
        Rule(**large, dims=2, bits=3),  # type: ignore[arg-type]
        Rule(role=("attention",), codec=CODEC, reason="few"),
        Rule(name=("model.norm.weight",), keep=True),
    )
    expected = Recipe(name="mine", description="Two words.", codec=CODEC, bits=4, rules=rules, target="master")
    assert parse_recipe(text, "file.yaml") == expected


def test_missing_keys_have_defaults() -> None:
    assert parse_recipe("{}", "folder/file.yaml") == Recipe(name="file", description="", codec=CODEC, bits=5)
    assert parse_recipe("rules:\n", "a.yaml").rules == ()


def test_recipe_of_a_manifest_parses_back() -> None:
    text = "{name: a, bits: 3, rules: [{name: '*.q_proj.*', bits: 8, reason: r}, {role: norm, dims: 1, keep: true}]}"
    recipe = parse_recipe(text, "a.yaml")
    assert parse_recipe(yaml.safe_dump(recipe.to_json()), "b.yaml") == recipe
    assert recipe.to_json()["rules"][1] == {"role": ["norm"], "dims": 1, "keep": True}


# --- which rule decides ---


def test_default_policy_decides_without_rules() -> None:
    assert bits("{}") == DEFAULT
    assert all(decision.reason for decision in decisions("{}").values())


def test_first_matching_rule_decides() -> None:
    narrow = "{name: 'model.layers.0.mlp.up_proj.weight', bits: 8, reason: first layer}"
    wide = "{role: mlp, bits: 3}"
    assert bits(f"rules: [{narrow}, {wide}]") == DEFAULT | {
        "model.layers.0.mlp.up_proj.weight": 8,
        "model.layers.1.mlp.up_proj.weight": 3,
    }
    assert bits(f"rules: [{wide}, {narrow}]") == DEFAULT | {
        "model.layers.0.mlp.up_proj.weight": 3,
        "model.layers.1.mlp.up_proj.weight": 3,
    }
    made = decisions(f"rules: [{narrow}, {wide}]")
    assert made["model.layers.0.mlp.up_proj.weight"].reason == "first layer"
    assert made["model.layers.1.mlp.up_proj.weight"].reason == "rule 2 of the recipe"


def test_all_conditions_of_a_rule_must_hold() -> None:
    assert bits("rules: [{role: mlp, name: '*.1.*', bits: 8}]") == DEFAULT | {"model.layers.1.mlp.up_proj.weight": 8}
    assert bits("rules: [{role: attention, name: '*.mlp.*', bits: 8}]") == DEFAULT
    assert bits("rules: [{dims: 3, bits: 8}]") == DEFAULT | {"model.layers.0.mlp.experts.down_proj": 8}
    large = {
        name: 8 if width and len(SHAPES[name]) == 2 and SHAPES[name][0] >= 256 else width
        for name, width in DEFAULT.items()
    }
    assert bits("rules: [{dims: 2, min_weights: 32768, bits: 8}]") == large
    assert bits("rules: [{max_weights: 16384, min_weights: 16384, bits: 8}]") == DEFAULT | {
        "model.layers.0.self_attn.q_proj.weight": 8
    }


def test_name_patterns_match_whole_names_and_case() -> None:
    assert bits("rules: [{name: 'model.layers.[01].mlp.up_proj.weight', bits: 8}]") == DEFAULT | {
        "model.layers.0.mlp.up_proj.weight": 8,
        "model.layers.1.mlp.up_proj.weight": 8,
    }
    for pattern in ("mlp.up_proj.weight", "*.MLP.*"):
        with raises(RecipeError, pattern):
            decisions(f"rules: [{{name: '{pattern}', bits: 8}}]")


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    [
        ("q_proj", "did you mean '*.q_proj.weight' (1 tensor)?"),
        ("lm_head", "did you mean 'lm_head.weight' (1 tensor)?"),
        ("*.up_proj", "did you mean '*.up_proj.weight' (2 tensors)?"),
        ("model.layers.1", "did you mean 'model.layers.1.*' (1 tensor)?"),
        ("up_pr", "did you mean '*up_pr*' (2 tensors)?"),
        ("*.up_pr", "did you mean '*.up_pr*' (2 tensors)?"),
        ("lm_haed*", "the nearest is 'lm_head.weight'"),
        ("q_porj", "the nearest is 'model.layers.0.self_attn.q_proj.weight'"),
        ("xyz", "the first of its"),
    ],
)
def test_error_for_a_pattern_without_match_suggests_a_wider_one_or_the_nearest(pattern: str, suggestion: str) -> None:
    with pytest.raises(RecipeError) as caught:
        decisions(f"rules: [{{role: mlp, bits: 4}}, {{name: [lm_head.weight, '{pattern}'], bits: 8}}]")
    assert f"rule 2 of the recipe: the pattern {pattern!r} matches no tensor of the checkpoint; {suggestion}" in str(
        caught.value
    )


# --- structural roles ---


def test_pattern_does_not_quantize_a_structural_tensor() -> None:
    """A rule for all names quantizes routers, which are ordinary matrices, but not norms or convolutions."""
    assert bits("rules: [{name: '*', bits: 4}]") == {
        name: None
        if name in ("model.norm.weight", "model.layers.0.linear_attn.conv1d.weight", "model.position_ids")
        else 4
        for name in SHAPES
    }
    assert decisions("rules: [{name: '*', bits: 4}]")["model.norm.weight"].reason == ROLES["norm"].keep


def test_rule_with_its_role_quantizes_a_structural_tensor() -> None:
    """Also behind a rule that it fell through; a buffer of integers never is quantized, a router by its name is."""
    assert bits("rules: [{role: norm, bits: 8}]") == DEFAULT | {"model.norm.weight": 8}
    conv, router = "model.layers.0.linear_attn.conv1d.weight", "model.layers.0.mlp.gate.weight"
    assert bits("rules: [{role: [conv, mlp], name: '*conv1d*', bits: 8}]") == DEFAULT | {conv: 8}
    assert bits("rules: [{name: '*', bits: 4}, {role: norm, bits: 8}]")["model.norm.weight"] == 8
    made = decisions("rules: [{role: buffer, bits: 8}]")["model.position_ids"]
    assert made == kept("buffer", str(ROLES["buffer"].keep))
    assert bits("rules: [{name: '*.mlp.gate.weight', bits: 8}]") == DEFAULT | {router: 8}


def test_rule_may_keep_any_tensor() -> None:
    assert set(bits("rules: [{name: '*', keep: true}]").values()) == {None}
    made = decisions("rules: [{name: '*', keep: true, reason: all}]")
    assert made["model.norm.weight"].reason == made["lm_head.weight"].reason == "all"
    made = decisions("rules: [{role: lm_head, keep: true}]")
    assert made["lm_head.weight"] == kept("lm_head", "rule 1 of the recipe")


def test_pattern_with_a_number_matches_that_layer_or_expert_only() -> None:
    """Tensors whose names differ only in a number share a decision, unless a rule distinguishes them by name."""
    numbered = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(3) for expert in range(12)
    ]
    tensors = [tensor(name, (64, 128)) for name in numbered]
    recipe = parse_recipe(
        "rules: [{name: '*.layers.1.*', bits: 8, min_weights: 1}, "
        "{name: ['*.experts.1.*', '*.experts.11.*'], keep: true}, {role: expert, bits: 3}]",
        "test",
    )
    found = dict(zip(numbered, decide(recipe, tensors), strict=True))
    for name, decision in found.items():
        is_kept = ".experts.1." in name or ".experts.11." in name
        assert decision.bits == (8 if ".layers.1." in name else None if is_kept else 3), name


# --- --bits ---


def test_with_bits_replaces_only_the_default() -> None:
    recipe = parse_recipe(
        "{bits: 5, rules: [{role: mlp, bits: 8}, {role: attention, codec: hadamard-lloyd-max}]}", "a.yaml"
    )
    changed = choose_recipe(recipe, Options(bits=3))
    assert (changed.bits, changed.rules, changed.name) == (3, recipe.rules, recipe.name)
    expected = {"mlp": 8, "attention": 3, "embedding": 3, "expert": 3, "lm_head": 3}
    tensors = [tensor(name, shape) for name, shape in SHAPES.items()]
    for decision in decide(changed, tensors):
        if decision.bits is not None:
            assert decision.bits == expected[decision.role]


# --- targets ---


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("target_size: 9GB", Goal(output_bytes=9 * 10**9)),
        ("target_size: 1.5 GiB", Goal(output_bytes=3 * 2**29)),
        ("target_size: 123456", Goal(output_bytes=123_456)),
        ("target_bpw: 4.5", Goal(bits_per_weight=4.5)),
        ("target_bpw: 4", Goal(bits_per_weight=4.0)),
        ("max_kl: 0.02", Goal(divergence=0.02)),
        ("{}", None),
    ],
)
def test_target_of_a_recipe_parses_and_round_trips(text: str, target: Goal | None) -> None:
    recipe = parse_recipe(text, "a.yaml")
    assert recipe.goal == target
    again = parse_recipe(yaml.safe_dump(recipe.to_json()), "a.yaml")
    assert again == replace(recipe, target="master")  # as its codec and bits say


def test_options_override_the_target_of_the_recipe() -> None:
    recipe = parse_recipe("target_size: 9GB", "a.yaml")
    assert choose_recipe(recipe) == recipe
    assert choose_recipe(recipe, Options(target_bpw=3)).goal == Goal(bits_per_weight=3.0)
    with raises(OptionError, "`bits`"):
        choose_recipe(recipe, Options(bits=4))


def test_only_bit_widths_without_a_rule_are_free() -> None:
    made = decisions(
        "{target_bpw: 4.5, rules: [{role: mlp, bits: 8}, {role: attention, codec: hadamard-trellis}, "
        "{role: lm_head, keep: true}]}"
    )
    assert {name for name, decision in made.items() if decision.free} == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.down_proj",
    }
