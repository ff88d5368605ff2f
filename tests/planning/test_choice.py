"""Options that change a recipe: --keep and --set, their order, their place in plan and manifest, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import answer, invoke, refused
from helpers import bf16, gaussian, write_checkpoint

from pqweights.common.options import Options
from pqweights.planning.choice import choose_recipe
from pqweights.planning.recipe import Rule

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
NAMES = (Q, UP, "model.layers.1.mlp.up_proj.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {name: bf16(gaussian(64, 128, seed=number)) for number, name in enumerate(NAMES)}
    return write_checkpoint(tmp_path_factory.mktemp("choice") / "model", tensors)


def planned(source: Path, *options: str) -> dict[str, Any]:
    """What plan says of each tensor: its bits, or None, and the reason."""
    tensors = answer("plan", source, *options)["tensors"]
    return {tensor["name"]: (tensor["bits"], tensor["reason"]) for tensor in tensors}


def test_path_is_a_file_even_with_the_name_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q5").write_text("bits: 3")
    assert choose_recipe(Path("q5")).bits == 3
    assert choose_recipe("q5").bits == 5


def test_keep_and_set_come_before_the_rules_of_the_recipe(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("rules: [{name: '*up_proj*', bits: 8, reason: mine}, {role: lm_head, bits: 2}]")
    found = planned(source, "--recipe", str(mine), "--keep", "*.layers.1.*", "--set", "*q_proj*=6", "--set", f"{UP}=3")
    assert found == {
        Q: (6, "--set *q_proj*=6"),
        UP: (3, f"--set {UP}=3"),
        "model.layers.1.mlp.up_proj.weight": (None, "--keep *.layers.1.*"),
        "lm_head.weight": (2, "rule 2 of the recipe"),
    }


def test_keep_comes_before_set_and_the_first_set_decides(source: Path) -> None:
    found = planned(source, "--set", "*q_proj*=6", "--set", "*proj*=3", "--keep", UP)
    assert found[Q] == (6, "--set *q_proj*=6")
    assert found[UP] == (None, f"--keep {UP}")


def test_warning_if_nothing_is_quantized(source: Path, tmp_path: Path) -> None:
    warning = "WARNING: nothing is quantized: every tensor is kept as it is"
    for command in (("plan", source), ("quantize", source, tmp_path / "out")):
        assert warning in invoke(*command, "--keep", "*", "--quiet").stderr
        assert warning not in invoke(*command, "--overwrite" if "quantize" in command else "--quiet").stderr


def test_manifest_states_options_as_rules(source: Path, tmp_path: Path) -> None:
    assert invoke("quantize", source, tmp_path / "out", "--keep", "lm_head*", "--set", "*q_proj*=6").exit_code == 0
    assert json.loads((tmp_path / "out" / "pqweights.json").read_text())["recipe"]["rules"] == [
        {"name": ["lm_head*"], "keep": True, "reason": "--keep lm_head*"},
        {"name": ["*q_proj*"], "bits": 6, "reason": "--set *q_proj*=6"},
    ]


def test_library_takes_widths_by_pattern_as_a_mapping_or_as_pairs() -> None:
    widths = {"*q*": 6, "*": 3}
    recipe = choose_recipe("q5", Options(set_format=widths))
    assert recipe == choose_recipe("q5", Options(set_format=tuple(widths.items())))
    assert recipe.overrides == (
        Rule(name=("*q*",), bits=6, reason="--set *q*=6"),
        Rule(name=("*",), bits=3, reason="--set *=3"),
    )


@pytest.mark.parametrize("before", [("--set", "*proj*=6"), ("--keep", "*q_proj*"), ("--set", "*q_proj*=3")])
def test_set_about_which_options_before_it_decide_alone_is_refused(source: Path, before: tuple[str, str]) -> None:
    error = refused("plan", source, *before, "--set", "*q_proj*=3")
    assert "--set *q_proj*=3: " in error
    assert " ".join(before) in error


@pytest.mark.parametrize("option", ["--keep", "--set"])
def test_pattern_without_a_match_names_the_option_and_the_nearest_tensor(source: Path, option: str) -> None:
    pattern = "*.q_porj.weight" + ("=4" if option == "--set" else "")
    error = refused("plan", source, option, pattern)
    assert error.startswith(f"error: {option} {pattern}: ") and repr(Q) in error


def test_set_that_matches_only_norms_is_refused(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": bf16(gaussian(128)), UP: bf16(gaussian(64, 128))}
    source = write_checkpoint(tmp_path / "model", tensors)
    error = refused("plan", source, "--set", "*norm*=8")
    assert "--set *norm*=8: " in error and "'model.norm.weight'" in error and "role:norm" in error
    assert planned(source, "--set", "*=8") == {"model.norm.weight": (None, "normalisation"), UP: (8, "--set *=8")}


@pytest.mark.parametrize("target", ["vllm", "mlx", "torchao"])
def test_bits_of_an_export_are_refused_beside_a_target_that_chooses_them(
    source: Path, tmp_path: Path, target: str
) -> None:
    error = refused("export", source, tmp_path / "out", "-t", target, "--bits", 4, "--target-bpw", 5, code=2)
    assert "leave --bits out" in error


def test_mix_of_mlx_is_refused_beside_a_target_that_chooses_bits(source: Path, tmp_path: Path) -> None:
    given = ("-t", "mlx", "--format", "mixed_3_6", "--target-bpw", 5)
    assert "--format mixed_3_6: " in refused("export", source, tmp_path / "out", *given, code=2)
