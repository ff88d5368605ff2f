"""Fitting to a size: exact bytes, never above the target; groups, rules, recipes, manifests, resuming."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import plan_quantize, quantize
from closeness import F32_SUM, F64_SUM, STATED, approx
from commands import invoke, raises
from helpers import Tensor, bf16, f32, folder_bytes, gaussian, write_checkpoint
from pqweights_cli.plan import fit_lines

from pqweights.convert.plan import Plan
from pqweights.errors import OutputError, RecipeError
from pqweights.formats.lloyd_max import DISTORTION
from pqweights.planning.fit import Fit
from pqweights.planning.layout import DEFAULT_MAX_SHARD_BYTES
from pqweights.planning.recipe import Recipe, load_recipe, make_goal, parse_recipe
from pqweights.planning.sensitivity import Sensitivity
from pqweights.results.verify import verify
from pqweights.targets.master import Learned

LAYERS = 3
MATRICES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 190),
}
SHARDS = (DEFAULT_MAX_SHARD_BYTES, 100_000, 30_000)


def tensors(layers: int = LAYERS) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": bf16(gaussian(96, 128, seed=1)),
        "model.norm.weight": bf16(1 + gaussian(128, seed=2)),
        "model.position_ids": ("I64", np.arange(7, dtype=np.int64)),
        "lm_head.weight": bf16(gaussian(96, 128, seed=3)),
    }
    for layer in range(layers):
        for number, (name, shape) in enumerate(MATRICES.items()):
            found[f"model.layers.{layer}.{name}.weight"] = bf16(gaussian(*shape, seed=10 * layer + number))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fit") / "model", tensors(), config={"model_type": "llama"})


KEEP_ALL = "{rules: [{name: '*', keep: true}]}"


def targeted(size: str | int | None = None, bits: float | None = None) -> Recipe:
    return replace(load_recipe("q5"), goal=make_goal(size, bits))


def fitted(
    source: Path, recipe: Recipe, shard: int = DEFAULT_MAX_SHARD_BYTES, known: Sensitivity | None = None
) -> tuple[Fit, Plan]:
    made = plan_quantize(source, recipe, max_shard_bytes=shard, learned=Learned(sensitivity=known))
    assert made.fit is not None
    assert made.fit.output_bytes == made.output_bytes
    return made.fit, made


@functools.cache
def ends(source: Path, shard: int) -> tuple[int, int]:
    """The smallest and the largest target that can be met, which the refusals of others name."""
    least = fitted(source, targeted(bits=4.5), shard)[0].smallest_bytes
    most = plan_quantize(source, parse_recipe(KEEP_ALL, "all"), max_shard_bytes=shard).output_bytes - 1
    for target, named in ((least - 1, least), (10**12, most + 1)):
        with raises(RecipeError, named):
            fitted(source, targeted(target), shard)
    return least, most


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def bits_of(plan: Plan) -> dict[str, int | None]:
    return {tensor.name: tensor.bits for tensor in plan.tensors}


def sensitivity(
    source: Path, alphas: dict[str, float] | None = None, seed: int = 0, without: Sequence[str] = ()
) -> Sensitivity:
    """Random sensitivities of the weights in the groups that a fit finds. alphas: of groups"""
    rng = np.random.default_rng(seed)
    fit, _ = fitted(source, targeted(bits=5))
    found: dict[str, float] = {}
    for group in fit.groups:
        alpha = (alphas or {}).get(group.name, math.exp(rng.normal(0, 2)))
        found |= {} if group.name in without else dict.fromkeys(group.weights, alpha / len(group.weights))
    return Sensitivity(method={"kind": "random tokens", "tokens": 64}, alphas=found)


# --- sizes ---


@pytest.mark.parametrize("shard", SHARDS)
def test_files_are_within_the_target_and_no_group_could_be_wider(source: Path, shard: int) -> None:
    """For a sweep of targets, one more bit for any group, or keeping it, would make the files too large."""
    least, most = ends(source, shard)
    for size in np.linspace(least, most, 9).astype(int).tolist():
        fit, plan = fitted(source, targeted(size), shard)
        assert least <= fit.output_bytes <= size
        left = size - fit.output_bytes
        # One more bit for each block of 128, or 16 bits for each weight.
        wider = [
            (16 * -(-group.parameters // 128) if group.bits < 8 else group.parameters * 2 - group.bytes)
            for group in fit.groups
            if group.bits is not None
        ]
        # The headers of kept tensors are shorter, by at most this much.
        assert not wider or left < min(wider) + 16 * len(plan.tensors), (size, left, min(wider))


@pytest.mark.parametrize("shard", SHARDS)
def test_smallest_and_largest_targets_are_met(source: Path, shard: int) -> None:
    least, most = ends(source, shard)
    smallest, _ = fitted(source, targeted(least), shard)
    assert smallest.output_bytes == smallest.smallest_bytes == least
    assert {group.bits for group in smallest.groups} == {2}
    largest, plan = fitted(source, targeted(most), shard)
    assert {group.bits for group in largest.groups} == {None, 8}
    assert "quantize" in {tensor.action for tensor in plan.tensors}
    assert fitted(source, targeted(largest.output_bytes), shard)[0].rates == largest.rates


def test_bits_per_parameter_count_all_of_the_files(source: Path) -> None:
    """The smallest mean that a refusal states can be a target itself."""
    keep = {"rules": [{"role": "embedding", "keep": True}]}
    with raises(RecipeError) as caught:
        fitted(source, recipe_of(keep | {"target_bpw": 1}))
    (stated,) = map(float, re.findall(r"\d+\.\d{4}", str(caught.value)))
    fit, plan = fitted(source, recipe_of(keep | {"target_bpw": stated}))
    assert 0 <= stated - fit.bits_per_weight <= 100 * STATED  # four decimals, rounded up
    parameters = sum(tensor.weights for tensor in plan.tensors if tensor.role != "buffer")
    assert fit.bits_per_weight < fit.bits_per_parameter == 8 * plan.output_bytes / parameters


def recipe_of(keys: dict[str, Any]) -> Recipe:
    return parse_recipe(json.dumps(keys), "mine.yaml")


# --- groups ---


def test_weights_of_a_group_share_a_bit_width(source: Path) -> None:
    fit, plan = fitted(source, targeted(bits=4.5), known=sensitivity(source))
    widths = bits_of(plan)
    for layer in range(LAYERS):
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({widths[f"model.layers.{layer}.{name}.weight"] for name in names}) == 1
    assert len(fit.groups) == 2 + 4 * LAYERS
    assert {name: group.bits for group in fit.groups for name in group.weights} == fit.rates
    assert {name: widths[name] for name in fit.rates} == fit.rates


def test_weights_of_a_codec_that_no_runtime_computes_with_have_rates_of_their_own(source: Path) -> None:
    """At equal sizes of the matrices, what is multiplied by a gate gets more bits than the gate."""
    fit, plan = fitted(source, parse_recipe("{codec: hadamard-trellis, bits: 4, target_bpw: 3.5}", "r"))
    assert all(len(group.weights) == 1 for group in fit.groups)
    bits = {name: width for name, width in bits_of(plan).items() if width is not None}
    for name in bits:
        if name.endswith("up_proj.weight"):
            assert bits[name] > bits[name.replace("up_proj", "gate_proj")]
    assert fit.bits_per_weight <= 3.5


def test_most_sensitive_group_gets_most_bits(source: Path) -> None:
    alphas = {"model.layers.1.mlp.down_proj": 1e4, "model.layers.2.mlp.down_proj": 0.0}
    fit, _ = fitted(source, targeted(bits=4.5), known=sensitivity(source, alphas))
    bits = {group.name: group.bits or 16 for group in fit.groups}
    assert bits["model.layers.1.mlp.down_proj"] == max(bits.values())
    assert bits["model.layers.2.mlp.down_proj"] == 2
    assert fit.rise == approx(math.fsum(group.rise for group in fit.groups))


def test_no_other_choice_of_bit_widths_is_better(tmp_path: Path) -> None:
    """Of two layers of one matrix and an embedding: 216 combinations are tried."""
    small = write_checkpoint(
        tmp_path / "small",
        {
            "model.embed_tokens.weight": bf16(gaussian(50, 128)),
            "model.layers.0.mlp.down_proj.weight": bf16(gaussian(64, 128)),
            "model.layers.1.mlp.down_proj.weight": f32(gaussian(33, 100)),
        },
    )
    least, most = ends(small, DEFAULT_MAX_SHARD_BYTES)
    by_widths = []
    some, _ = fitted(small, targeted(most - 200))
    for widths in itertools.product((2, 3, 4, 6, 8, None), repeat=3):
        entries = [
            {"name": name, **({"keep": True} if bits is None else {"bits": bits})}
            for (name,), bits in zip([group.weights for group in some.groups], widths, strict=True)
        ]
        recipe = parse_recipe(json.dumps({"name": "fixed", "rules": entries}), "fixed")
        plan = plan_quantize(small, recipe)
        rises = [g.alpha * DISTORTION[b] for g, b in zip(some.groups, widths, strict=True) if b is not None]
        by_widths.append((plan.output_bytes, math.fsum(rises)))
    for size in np.linspace(least, most, 12).astype(int).tolist():
        fit, _ = fitted(small, targeted(size))
        best = min(rise for output_bytes, rise in by_widths if output_bytes <= size)
        assert fit.rise <= best * (1 + F32_SUM) + F64_SUM, size
    assert min(by_widths)[0] == least


def test_weight_that_no_bit_width_makes_smaller_is_kept(tmp_path: Path) -> None:
    """64 weights are 128 bytes in BF16, and a block of 130 at 8 bits."""
    tiny = write_checkpoint(
        tmp_path / "tiny",
        {
            "model.layers.0.mlp.up_proj.weight": bf16(gaussian(8, 8)),
            "model.layers.1.mlp.up_proj.weight": bf16(gaussian(64, 128)),
        },
    )
    fit, plan = fitted(tiny, targeted(bits=8.2))
    assert {(t.action, t.bits) for t in plan.tensors} == {("keep", None), ("quantize", 8)}
    assert plan.totals.quantized_tensors == 1
    assert [group.bits for group in fit.groups] == [None, 8]


# --- rules ---

RULES = """
name: mine
target_bpw: {bits}
rules:
  - {{role: embedding, keep: true}}
  - {{name: "model.layers.0.mlp.*", bits: 7, reason: first}}
  - {{name: "model.layers.1.self_attn.*", codec: hadamard-trellis}}
"""


def test_rules_with_bits_or_keep_are_obeyed(source: Path) -> None:
    for bits in (3.5, 8.0):
        fit, plan = fitted(source, parse_recipe(RULES.format(bits=bits), "mine.yaml"))
        widths = bits_of(plan)
        assert widths["model.embed_tokens.weight"] is None
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert widths[f"model.layers.0.mlp.{name}.weight"] == 7
            assert f"model.layers.0.mlp.{name}.weight" not in fit.rates
        codecs = {t.name: t.codec for t in plan.tensors if t.name.startswith("model.layers.1.self_attn.") and t.codec}
        assert set(codecs.values()) <= {"hadamard-trellis"}
        assert set(codecs) <= set(fit.rates)
        counted = [t for t in plan.tensors if t.bits is not None or t.name in fit.rates]
        assert fit.bits_per_weight <= bits
        assert fit.bits_per_weight == approx(8 * sum(t.bytes for t in counted) / sum(t.weights for t in counted))


# --- sensitivities and manifests ---


def test_groups_that_were_not_measured_get_the_rule_of_thumb(source: Path) -> None:
    lacking = ["lm_head", "model.layers.1.mlp.gate_up"]
    rule = {group.name: group.alpha for group in fitted(source, targeted(bits=5))[0].groups}
    tenfold = {name: 10 * alpha for name, alpha in rule.items()}
    fit, _ = fitted(source, targeted(bits=4.5), known=sensitivity(source, tenfold, without=lacking))
    assert sorted(fit.unknown) == lacking
    assert {g.name: g.alpha for g in fit.groups} == {name: approx(alpha) for name, alpha in tenfold.items()}
    assert any("not measured, so fitted by the rule of thumb: 2 groups: " in line for line in fit_lines(fit))


def test_manifest_states_how_bit_widths_were_chosen(source: Path, tmp_path: Path) -> None:
    recipe, known = targeted("250kB"), sensitivity(source)
    learned = Learned(sensitivity=known)
    done = quantize(source, tmp_path / "out", recipe, threads=2, max_shard_bytes=SHARDS[1], learned=learned)
    manifest = json.loads((tmp_path / "out/pqweights.json").read_text())
    fit, _ = fitted(source, recipe, SHARDS[1], known)
    assert manifest["fit"] == fit.describe()
    assert manifest["fit"]["sensitivity"] == {"kind": "random tokens", "tokens": 64, "alphas": known.alphas}
    assert Sensitivity.read(manifest["fit"]["sensitivity"]) == known
    assert manifest["fit"]["predicted_rise"] == approx(fit.rise, F32_SUM)
    assert manifest["recipe"]["target_size"] == 250_000
    assert str(tmp_path) not in json.dumps(manifest)
    again = parse_recipe(json.dumps(manifest["recipe"]), "manifest")
    assert again.target == recipe.target
    assert again.rules == recipe.rules
    assert verify(tmp_path / "out", threads=2).problems == ()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert done.plan.output_bytes == fit.output_bytes == files_bytes(tmp_path / "out") <= 250_000


def test_finished_result_is_recognised_and_another_target_refused(source: Path, tmp_path: Path) -> None:
    first, second = (Learned(sensitivity=sensitivity(source, seed=seed)) for seed in (0, 1))
    out = tmp_path / "out"
    done = quantize(source, out, targeted(bits=4.5), threads=2, learned=first)
    before = folder_bytes(out)
    again = quantize(source, out, targeted(bits=4.5), threads=2, learned=first)
    assert (done.already_done, again.already_done) == (False, True)
    for other, learned in ((targeted(bits=4.5), second), (targeted(done.plan.output_bytes), first)):
        with raises(OutputError, "`overwrite`"):
            quantize(source, out, other, threads=2, learned=learned)
    assert folder_bytes(out) == before


# --- command line ---


def test_plan_prints_the_fit_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = folder_bytes(source)
    done = invoke("plan", source, "--target-size", "250kB")
    assert done.exit_code == 0, done.stderr
    assert folder_bytes(source) == before
    fit, plan = fitted(source, targeted("250kB"))
    text = done.stdout
    assert f"output: {fit.output_bytes} bytes in 1 safetensors file; " in text
    line = next(line for line in text.splitlines() if line.startswith("target: "))
    assert line == (
        f"target: 250000 bytes; result: {fit.output_bytes} bytes ({fit.output_bytes / 250_000:.2%}); "
        f"smallest possible: {fit.smallest_bytes} bytes"
    )
    assert (
        f"\nbits, all overhead counted: {fit.bits_per_weight:.4f} per weight that the recipe quantizes, "
        f"{fit.bits_per_parameter:.4f} per parameter\n" in text
    )
    assert (
        f"predicted rise of the loss: {fit.rise:.5f} (by the rule of thumb, which only compares sizes of one model)"
        in text
    )
    table = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    widths = {group.name: "kept" if group.bits is None else str(group.bits) for group in fit.groups}
    for kind in ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj"):
        assert table[f"model.layers.*.{kind}"] == [widths[f"model.layers.{layer}.{kind}"] for layer in range(LAYERS)]
    assert table["lm_head"] == [widths["lm_head"]]
    for tensor in plan.tensors:
        if tensor.name in fit.rates:
            assert tensor.reason.endswith("; to keep 250000 bytes")
    dry = invoke("quantize", source, tmp_path / "out", "--target-size", "250kB", "--dry-run")
    assert dry.stdout == text
    assert not (tmp_path / "out").exists()


def test_plan_warns_of_few_bits_and_says_how_many_weights_are_kept(source: Path) -> None:
    fit, _ = fitted(source, targeted(bits=12))
    kept = sum(group.parameters for group in fit.groups if group.bits is None)
    text = invoke("plan", source, "--target-bpw", 12).stdout
    assert kept and f"per weight that the recipe quantizes ({kept} of them kept for the target), " in text
    assert "below 3 bits, where the loss rises more" in invoke("plan", source, "--target-bpw", 2.5).stdout
    assert "below 3 bits" not in text


def test_weights_fixed_by_rules_count_in_the_prediction(source: Path) -> None:
    """They count in groups, too: a rule fixes q, k and v get free bits, and the error is that of all three."""
    free, _ = fitted(source, targeted(bits=4.0))
    text = "target_bpw: 4.0\nrules:\n  - role: mlp\n    bits: 2\n  - name: '*.q_proj.weight'\n    bits: 8\n"
    fixed, plan = fitted(source, parse_recipe(text, "mine.yaml"))
    assert fixed.rise > 2 * free.rise
    assert {group.name for group in fixed.groups} == {group.name for group in free.groups}
    widths = bits_of(plan)
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        group = next(group for group in fixed.groups if group.name == f"{attention}.qkv")
        assert widths[f"{attention}.q_proj.weight"] == 8
        assert widths[f"{attention}.k_proj.weight"] == widths[f"{attention}.v_proj.weight"] == group.bits


def test_json_holds_the_whole_fit(source: Path, tmp_path: Path) -> None:
    arguments = ("--target-bpw", "4.5", "--json")
    planned = invoke("plan", source, *arguments)
    done = invoke("quantize", source, tmp_path / "out", *arguments)
    assert (planned.exit_code, done.exit_code) == (0, 0), done.stderr
    fit = json.loads(planned.stdout)["fit"]
    assert json.loads(done.stdout)["fit"] == fit
    assert fit["target"] == {"target_bpw": 4.5}
    assert fit["bits_per_parameter"] == json.loads(done.stdout)["totals"]["bits_per_parameter"]
    assert fit["unknown_groups"] == []
    assert fit["sensitivity"]["kind"] == "heuristic"
    assert fit["output_bytes"] == json.loads(planned.stdout)["totals"]["output_bytes"] == files_bytes(tmp_path / "out")
    assert set(fit["groups"][0]) == {"name", "weights", "bits", "bytes", "parameters", "alpha", "rise"}
    again = json.loads(invoke("quantize", source, tmp_path / "out", *arguments).stdout)
    assert again["already_done"]
    assert again["fit"] == fit


def test_recipe_file_with_a_target(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("target_size: 0.25MB\n")
    by_recipe = json.loads(invoke("plan", source, "--recipe", mine, "--json").stdout)
    assert by_recipe == json.loads(invoke("plan", source, "--target-size", 250_000, "--json").stdout)
    # an option overrides the recipe
    smaller = json.loads(invoke("plan", source, "--recipe", mine, "--target-bpw", 3, "--json").stdout)["fit"]
    assert smaller["target"] == {"target_bpw": 3.0}
