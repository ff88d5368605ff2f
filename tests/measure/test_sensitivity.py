"""Sensitivities: the rule of thumb, the file and everything that can be wrong with it, and measuring on tiny models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from calls import measure_sensitivity
from commands import invoke
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from typer.testing import Result

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from pqweights import load_model
from pqweights.checkpoint.source import open_local
from pqweights.errors import EvaluationError, OutputError, RecipeError, SourceError
from pqweights.measure import sensitivity as perturb
from pqweights.measure.sensitivity import LEVELS, SensitivityOptions
from pqweights.planning.groups import TIED, grouped
from pqweights.planning.recipe import load_recipe, parse_recipe
from pqweights.planning.result_file import check_free
from pqweights.planning.roles import classify
from pqweights.planning.sensitivity_file import (
    Measured,
    Sensitivity,
    alphas_for,
    fitted_alpha,
    is_tied,
    read_sensitivity,
    write_sensitivity,
)
from pqweights.planning.sensitivity_rule import heuristic_alphas

FOUND = Sensitivity(
    checkpoint="0" * 64,
    method={"kind": "random tokens", "tokens": 64, "levels": [0.01, 0.02]},
    groups=(
        Measured(
            name="model.layers.0.mlp.gate_up",
            weights=("a.gate_proj.weight", "a.up_proj.weight"),
            alpha=0.5,
            points=((0.01, 0.005), (0.02, 0.01)),
        ),
        Measured(name="lm_head", weights=("lm_head.weight",), alpha=0.0, points=((0.01, 0.0), (0.02, -1e-9))),
    ),
)


def group(name: str, *weights: str, alpha: float) -> Measured:
    return Measured(name=name, weights=weights, alpha=alpha, points=())


def of_groups(*groups: Measured) -> Sensitivity:
    return Sensitivity(checkpoint="", method={}, groups=groups)


# ------------------------------------------------------------------------------------------------------------ rule of thumb


def rule(*names: str, tied: bool = False) -> dict[str, float]:
    roles = {name: classify(name, "BF16", (64, 128)).name for name in names}
    return heuristic_alphas(grouped(roles.items(), tied), roles)


MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def llama(layers: int) -> list[str]:
    names = [f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in MODULES]
    return ["model.embed_tokens.weight", *names, "lm_head.weight"]


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_the_rule_is_positive_and_minds_the_first_layer_most(layers: int) -> None:
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


def test_the_sum_over_layers_does_not_grow_with_their_number() -> None:
    few, many = (math.fsum(rule(*llama(layers)).values()) for layers in (4, 64))
    assert many < few


def test_the_rule_orders_the_parts_of_a_layer() -> None:
    alphas = rule(*llama(4), *(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(3)))
    of = {
        kind: alphas[f"model.layers.1.{kind}"]
        for kind in ("self_attn.o_proj", "self_attn.qkv", "mlp.down_proj", "mlp.gate_up", "mlp.experts")
    }
    assert list(of) == sorted(of, key=of.__getitem__)
    assert len(set(of.values())) == 5


def test_tied_embeddings_matter_more_than_either() -> None:
    for names in (("model.embed_tokens.weight", "lm_head.weight"), ("model.embed_tokens.weight",)):
        assert rule(*names, tied=True)[TIED] == 1.5


@pytest.mark.parametrize(
    "name",
    ["", ".", "weight", "layers.", "layers.x.weight", "layers.3", "h.0.", "a.layers.٣.b", "a.layers.²3.b", "\n.layers.1.x", "é",
     "layers.1.layers.2.x", f"model.layers.{'9' * 5000}.x", "x" * 10_000, "layers." * 2000 + "1.x"],
)  # fmt: skip
def test_odd_names_get_a_number_too(name: str) -> None:
    alphas = heuristic_alphas({name: [name]}, {name: "linear"})
    assert 0 < alphas[name] < math.inf


def test_stacks_of_layers_are_counted_apart() -> None:
    """An encoder of two layers and a decoder of eight."""
    names = [f"encoder.layers.{n}.fc1.weight" for n in range(2)] + [f"decoder.layers.{n}.fc1.weight" for n in range(8)]
    alphas = rule(*names)
    assert alphas["encoder.layers.0.fc1"] == pytest.approx(4 * alphas["decoder.layers.0.fc1"])


def test_what_a_file_lacks_is_scaled_by_what_both_know() -> None:
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
    # one that says nothing of any
    other = of_groups(group("x", "x.weight", alpha=9.0))
    assert alphas_for(groups, roles=roles, known=other) == (by_rule, list(groups))


def test_groups_that_were_cut_finer_add_up() -> None:
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
def test_tied_by_the_configuration(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", {"lm_head.weight": bf16(gaussian(4, 128))}, config=config)
    assert is_tied(open_local(folder), [("embed_tokens", "embedding"), ("lm_head", "lm_head")]) is tied


def test_the_slope_goes_through_the_origin() -> None:
    assert fitted_alpha([(0.01, 0.02), (0.02, 0.04), (0.04, 0.08)]) == pytest.approx(2)
    assert fitted_alpha([(1.0, 1.0), (2.0, 4.0)]) == pytest.approx(9 / 5)  # (1*1 + 2*4) / (1 + 4)


# ----------------------------------------------------------------------------------------------------------------- file


def test_the_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_sensitivity(path, FOUND)
    found = read_sensitivity(path)
    assert found == FOUND
    assert found.sha256 is not None
    write_sensitivity(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"s.json", "again.json"}
    assert set(json.loads(path.read_text())) == {"pqweights_sensitivity", "checkpoint", "method", "groups"}


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("mine")
    for path, overwrite, expected in (
        (tmp_path / "s.json", False, "the file exists"),
        (tmp_path, False, "found a folder"),
        (tmp_path, True, "found a folder"),
    ):
        with pytest.raises(OutputError, match=expected):
            check_free(path, overwrite, kind="sensitivities", read=read_sensitivity)
    with pytest.raises(OutputError, match="replaces only a file of sensitivities"):
        check_free(tmp_path / "s.json", True, kind="sensitivities", read=read_sensitivity)
    assert (tmp_path / "s.json").read_text() == "mine"
    check_free(tmp_path / "new.json", False, kind="sensitivities", read=read_sensitivity)


GROUP = FOUND.to_json()["groups"][0]
DAMAGED: list[tuple[str, Any, str]] = [
    ("empty", b"", "expected JSON"),
    ("cut", json.dumps(FOUND.to_json())[:-30].encode(), "expected JSON"),
    ("not UTF-8", b"\xff{}", "expected JSON"),
    ("deep", b"[" * 200_000, "levels of nesting"),
    ("digits", b"1" * 5000, "expected JSON"),
    ("a list", [], "pqweights_sensitivity 1"),
    ("null", None, "pqweights_sensitivity 1"),
    ("another document", json.dumps({"groups": []}).encode(), "pqweights_sensitivity 1"),
    ("another version", {"pqweights_sensitivity": 2}, "pqweights_sensitivity 1"),
    ("no groups", {"groups": []}, "groups: expected at least one group"),
    ("groups null", {"groups": None}, "groups: expected a list"),
    ("groups a mapping", {"groups": {"a": GROUP}}, "groups: expected a list"),
    ("a group of another kind", {"groups": [GROUP, 5]}, "groups: group: expected keys and values"),
    ("a group that is a list", {"groups": [[]]}, "groups: group: expected keys and values"),
    ("checkpoint a number", {"checkpoint": 5}, "checkpoint: expected a text"),
    ("checkpoint null", {"checkpoint": None}, "checkpoint: expected a text"),
    ("method a text", {"method": "random"}, "method: expected keys and values"),
    ("method empty", {"method": {}}, "kind: expected a text"),
    (
        "method of an unknown kind",
        {"method": {"kind": "guess", "tokens": 5}},
        "kind: expected 'random tokens' or 'text'",
    ),
    ("method of a kind that is a list", {"method": {"kind": ["text"], "tokens": 5}}, "kind: expected a text"),
    ("method without tokens", {"method": {"kind": "text"}}, "tokens: expected a whole number"),
    ("a group twice", {"groups": [GROUP, {**GROUP, "weights": ["b.weight"]}]}, "is there twice"),
    ("a weight twice", {"groups": [GROUP, {**GROUP, "name": "b"}]}, "is there twice"),
    ("a weight twice in a group", {"groups": [{**GROUP, "weights": ["a", "a"]}]}, "is there twice"),
]
for _key, _value in (
    ("name", 5), ("name", None), ("weights", []), ("weights", "lm"), ("weights", [5]), ("weights", [["a"]]), ("weights", None),
    ("weights", {"a": 1}), ("alpha", -0.1), ("alpha", math.nan), ("alpha", math.inf), ("alpha", 10**400), ("alpha", 1e308),
    ("alpha", "much"), ("alpha", None), ("alpha", [1.0]), ("points", 5), ("points", None), ("points", [[0.1]]), ("points", [0.1]),
    ("points", [["x", 0.1]]), ("points", [[10**400, 0.1]]),
):  # fmt: skip
    DAMAGED.append((f"{_key} {str(_value)[:12]}", {"groups": [{**GROUP, _key: _value}]}, "group"))
for _key in ("name", "alpha", "weights", "points"):
    _without = {key: value for key, value in GROUP.items() if key != _key}
    DAMAGED.append((f"without {_key}", {"groups": [_without]}, f"{_key}: expected"))


@pytest.mark.parametrize(("content", "expected"), [pytest.param(c, e, id=name) for name, c, e in DAMAGED])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: Any, expected: str) -> None:
    path = tmp_path / "s.json"
    whole = FOUND.to_json()
    if isinstance(content, dict):
        content = whole | content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(SourceError) as caught:
        read_sensitivity(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(
            SourceError, match=f"{reason}.*expected 'heuristic', or a file that pqweights sensitivity wrote"
        ):
            read_sensitivity(path)


# ------------------------------------------------------------------------------------------------------------- measuring


TOKENS = 64
# Few groups: what is measured does not matter.
NARROW = parse_recipe("rules: [{role: [mlp, embedding], keep: true}]", "narrow")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by more, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers; 128 does not divide the down-projections."""
    narrow = {"hidden_size": 128, "intermediate_size": 190, "num_attention_heads": 2, "num_key_value_heads": 1}
    family = families.Family(
        "LlamaForCausalLM", "LlamaConfig", {**families.TEXT, **families.ROPE, **narrow}, (), ()
    )  # fmt: skip
    return families.build(family, tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("sensitivity") / "s.json"
    return out, invoke("sensitivity", source, out, "--tokens", TOKENS, "--window", 32)


def measured(source: Path, recipe: str = "q5", **options: Any) -> Sensitivity:
    return measure_sensitivity(source, load_recipe(recipe), **{"tokens": 32, "window": 16, **options})


def test_noise_costs_the_more_the_more_there_is(source: Path, written: tuple[Path, Result]) -> None:
    path, done = written
    assert done.exit_code == 0, done.stderr
    found = read_sensitivity(path)
    assert found.checkpoint == open_local(source).fingerprint()
    assert found.method == {
        "kind": "random tokens", "text_sha256": None, "tokens": TOKENS, "window": 32, "dtype": "float32", "seed": 0,
        "levels": list(LEVELS),
    }  # fmt: skip
    assert len(found.groups) == 2 + 2 * 4
    for group in found.groups:
        assert [t2 for t2, _ in group.points] == list(LEVELS)
        divergences = [kl for _, kl in group.points]
        assert divergences == sorted(divergences)
        assert divergences[0] > 0
        assert group.alpha == pytest.approx(fitted_alpha(group.points), rel=1e-4)
        assert group.alpha > 0
        # about a line: what a level predicts of the next is right to a factor of two
        slopes = [kl / t2 for t2, kl in group.points]
        assert max(slopes) < 2 * min(slopes)


def test_the_command_prints_what_it_measured(source: Path, written: tuple[Path, Result]) -> None:
    path, done = written
    lines = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("model.", "lm_head"))
    }
    for group in read_sensitivity(path).groups:
        assert lines[group.name] == [
            str(len(group.weights)), f"{group.alpha:.4f}", *(f"{kl:.6f}" for _, kl in group.points)
        ]  # fmt: skip
    assert f"on {TOKENS} tokens (random tokens)" in done.stdout
    assert f"pqweights quantize {source} OUT --target-size SIZE --sensitivity {path}" in done.stdout
    assert "Loading" not in done.stderr


def test_it_is_the_same_every_time(source: Path, written: tuple[Path, Result], tmp_path: Path) -> None:
    before = folder_bytes(source)
    done = invoke("sensitivity", source, tmp_path / "s.json", "--tokens", TOKENS, "--window", 32, "--json")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "s.json").read_bytes() == written[0].read_bytes()
    assert json.loads(done.stdout) == {"output": str(tmp_path / "s.json"), **json.loads(written[0].read_text())}
    assert folder_bytes(source) == before


def test_measurements_serve_two_targets_of_the_same_model_alone(
    base: Path, source: Path, written: tuple[Path, Result], tmp_path: Path
) -> None:
    plans = [
        json.loads(invoke("plan", source, "--target-bpw", bits, "--sensitivity", written[0], "--json").stdout)["fit"]
        for bits in (3.5, 5)
    ]
    assert plans[0]["sensitivity"] == plans[1]["sensitivity"]
    assert plans[0]["predicted_rise"] > plans[1]["predicted_rise"] > 0
    assert plans[0]["unknown_groups"] == plans[1]["unknown_groups"] == []
    other = invoke("plan", families.model(base, "llama-biased"), "--target-bpw", 4, "--sensitivity", written[0])
    assert other.exit_code == 1
    assert "sensitivities of this checkpoint" in other.stderr
    assert other.stderr.count("\n") == 1


def test_it_is_a_divergence_from_the_clean_model(source: Path, tmp_path: Path) -> None:
    """The first group and level once more, with torch's own formula and numpy's noise replaced by what was drawn."""
    found = measured(source, tokens=32, window=16)
    model = load_model(source, dtype="float32").eval()
    windows = perturb._windows(source, SensitivityOptions(tokens=32, window=16))
    group, (t2, kl) = found.groups[0], found.groups[0].points[2]
    assert group.weights == ("lm_head.weight",) or len(group.weights) >= 1
    parameters = dict(model.named_parameters())
    ids = torch.tensor(np.stack(windows))
    with torch.inference_mode():
        clean = torch.log_softmax(model(ids).logits.double(), -1)
        generator = torch.Generator().manual_seed(perturb._seed(group.name, 2))
        for name in group.weights:
            values = parameters[name].data
            parameters[name].data = perturb._noisy(
                torch, values, math.sqrt(t2), how=perturb._Noise(False, 128), generator=generator
            )
        now = torch.log_softmax(model(ids).logits.double(), -1)
    expected = (clean.exp() * (clean - now)).sum(-1).mean()
    assert kl == pytest.approx(float(expected), rel=1e-3)


def test_each_group_is_measured_alone_and_put_back(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every measurement the weights of one group differ from the checkpoint's, and no others; at the end none do."""
    seen: list[set[str]] = []
    models: list[Any] = []
    original = dict(load_model(source, dtype="float32").named_parameters())
    real = perturb._divergence

    def changed(model: Any) -> set[str]:
        return {name for name, p in model.named_parameters() if not torch.equal(p, original[name])}

    def divergence(torch: Any, model: Any, windows: Any, *, clean: Any) -> float:
        models.append(model)
        seen.append(changed(model))
        return real(torch, model, windows, clean=clean)

    monkeypatch.setattr(perturb, "_divergence", divergence)
    found = measured(source)
    assert seen == [set(group.weights) for group in found.groups for _ in LEVELS]
    assert changed(models[0]) == set()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("t2", [0.0025, 0.0345])
def test_the_noise_of_every_block_is_in_proportion_to_it(transposed: bool, t2: float) -> None:
    """Of blocks that differ by ten thousand; 130 * 190 weights end with a block of 124, and 50 weights are less than one."""
    rows = torch.tensor(gaussian(130, 190, seed=1)) * torch.exp(3 * torch.randn(130, 1, generator=torch.manual_seed(0)))
    given = rows.T.contiguous() if transposed else rows
    before = given.clone()
    total = torch.zeros(193)
    for seed in range(40):
        noisy = perturb._noisy(
            torch,
            given,
            math.sqrt(t2),
            how=perturb._Noise(transposed, 128),
            generator=torch.Generator().manual_seed(seed),
        )
        assert noisy.shape == given.shape
        error = ((noisy.T if transposed else noisy) - rows).reshape(-1)
        blocks, errors = (torch.nn.functional.pad(v, (0, 4)).view(-1, 128) for v in (rows.reshape(-1), error))
        total += (errors.square().sum(1) / blocks.square().sum(1)) / 40
    assert torch.equal(given, before)
    assert total[:-1].mean() == pytest.approx(t2, rel=0.01)
    assert ((total[:-1] / t2 - 1).abs() < 0.12).all()
    assert total[-1] == pytest.approx(t2 * 124 / 128, rel=0.12)


def test_a_block_that_is_short_errs_as_the_codec_does_in_it() -> None:
    """The codec's error is spread over all 128 places of a block, and what falls behind the end is lost."""
    values = torch.tensor(gaussian(1, 32, seed=3))
    errors = [
        float(
            (
                perturb._noisy(
                    torch, values, 0.1, how=perturb._Noise(False, 128), generator=torch.Generator().manual_seed(seed)
                )
                - values
            )
            .square()
            .sum()
        )
        for seed in range(300)
    ]
    assert np.mean(errors) / float(values.square().sum()) == pytest.approx(0.01 * 32 / 128, rel=0.1)


def test_noise_keeps_dtype_and_zeros() -> None:
    values = torch.zeros(3, 128, dtype=torch.bfloat16)
    values[1] = 1
    noisy = perturb._noisy(
        torch, values, 0.1, how=perturb._Noise(False, 128), generator=torch.Generator().manual_seed(0)
    )
    assert noisy.dtype == torch.bfloat16
    assert torch.equal(noisy[::2], values[::2])
    assert not torch.equal(noisy[1], values[1])


def words(tokens: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(3).integers(0, 500, tokens))


def test_a_text(source: Path, written: tuple[Path, Result], tmp_path: Path) -> None:
    import hashlib

    (tmp_path / "t.txt").write_text(words(200))
    done = invoke(
        "sensitivity", source, tmp_path / "s.json", "--text", tmp_path / "t.txt", "--tokens", 70, "--window", 32
    )
    assert done.exit_code == 0, done.stderr
    found, random = read_sensitivity(tmp_path / "s.json"), read_sensitivity(written[0])
    assert found.method["kind"] == "text"
    assert found.method["text_sha256"] == hashlib.sha256(words(200).encode()).hexdigest()
    assert found.method["tokens"] == 64
    assert "on 64 tokens (text)" in done.stdout
    assert [g.name for g in found.groups] == [g.name for g in random.groups]
    for of_text, of_random in zip(found.groups, random.groups, strict=True):
        assert of_text.alpha != of_random.alpha
        assert 0.2 < of_text.alpha / of_random.alpha < 5


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama-tied", {TIED: 1}),
        ("mixtral", {"model.layers.0.block_sparse_moe.experts": 12, "model.layers.1.block_sparse_moe.experts": 12}),
        ("qwen3_moe", {"model.layers.0.mlp.experts": 12, "model.layers.1.mlp.experts": 12}),
        ("gpt_oss", {"model.layers.0.mlp.experts": 2, "model.layers.1.mlp.experts": 2}),
    ],
)
def test_families(base: Path, family: str, expected: dict[str, int]) -> None:
    folder = families.model(base, family)
    keep = ["attention", "mlp"] if family == "llama-tied" else ["attention", "embedding", "lm_head"]
    recipe = parse_recipe(json.dumps({"rules": [{"role": keep, "keep": True}]}), "r")
    found = measure_sensitivity(folder, recipe, tokens=32, window=32)
    sizes = {group.name: len(group.weights) for group in found.groups}
    assert sizes == expected
    stored = {tensor.name for tensor in open_local(folder).tensors}
    assert {name for group in found.groups for name in group.weights} <= stored
    assert all(group.alpha > 0 for group in found.groups)
    # Not at each step: an expert that the router takes instead of another is a jump.
    assert all(group.points[0][1] < group.points[-1][1] for group in found.groups)


def test_only_what_the_recipe_quantizes_is_measured(source: Path) -> None:
    recipe = parse_recipe("rules: [{name: '*.mlp.*', keep: true}, {role: [embedding, lm_head], keep: true}]", "r")
    found = measure_sensitivity(source, recipe, tokens=16, window=16)
    assert {group.name.split(".", 3)[-1] for group in found.groups} == {"self_attn.qkv", "self_attn.o_proj"}
    with pytest.raises(RecipeError, match="quantizes something here"):
        measure_sensitivity(source, parse_recipe("rules: [{name: '*', keep: true}]", "r"), tokens=16, window=16)


def test_progress_counts_groups(source: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = measure_sensitivity(
        source, NARROW, tokens=16, window=16, progress=lambda done, total, name: seen.append((done, total, name))
    )
    count = len(found.groups)
    assert seen == [*((number, count, group.name) for number, group in enumerate(found.groups)), (count, count, "")]


def test_windows_are_as_long_as_the_model_takes(base: Path, source: Path) -> None:
    assert [len(ids) for ids in perturb._windows(source, SensitivityOptions(tokens=2048))] == [256] * 8
    assert [len(ids) for ids in perturb._windows(source, SensitivityOptions(tokens=100, window=32))] == [32] * 3
    assert [len(ids) for ids in perturb._windows(families.model(base, "gpt2"), SensitivityOptions(tokens=300))] == [
        128
    ] * 2
    ids = np.concatenate(perturb._windows(source, SensitivityOptions(tokens=2048)))
    assert ids.min() >= 0
    assert 500 < ids.max() < families.VOCABULARY
    assert len(set(ids.tolist())) > 400


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("texts")
    (folder / "short.txt").write_text(words(20))
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_text(words(300))
    wide = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": 1999 - i for i in range(500)}, unk_token="w0"))
    wide.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=wide, unk_token="w0").save_pretrained(folder / "wide")
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--window", "513"], "--window: expected at most the 512 tokens that the model takes, found 513"),
        (["--tokens", "255", "--window", "256"], "--tokens 255: expected at least one window of 256"),
        (["--tokens", "16", "--window", "32"], "--tokens 16: expected at least one window of 32"),
        (["--text", "{texts}/none.txt"], "No such file"),
        (["--text", "{texts}/empty.txt"], "an empty file"),
        (["--text", "{texts}/latin.txt"], "UTF-8"),
        (["--text", "{texts}/short.txt"], "the text: expected at least 256 tokens, 1 window(s) of 256, found 20"),
        (["--text", "{texts}/long.txt", "--tokenizer", "{texts}"], "expected a tokenizer"),
        (
            ["--text", "{texts}/long.txt", "--tokenizer", "{texts}/wide"],
            "the text has the token 1999, the model knows 512 tokens",
        ),
        (["--recipe", "q99"], "no recipe is called"),
        (["--window", "16", "--device-map", "bogus"], "transformers cannot run this model"),
    ],
)
def test_bad_input_is_one_line(source: Path, texts: Path, tmp_path: Path, options: list[str], expected: str) -> None:
    done = invoke("sensitivity", source, tmp_path / "s.json", *(each.format(texts=texts) for each in options))
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 1
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--tokens", "1"], ["--window", "1"], ["--dtype", "int8"]])
def test_wrong_usage(source: Path, tmp_path: Path, options: list[str]) -> None:
    done = invoke("sensitivity", source, tmp_path / "s.json", *options)
    assert done.exit_code == 2
    assert options[0] in done.stderr


def test_the_output_is_checked_before_the_model_is_run(
    source: Path, written: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(perturb, "_divergence", never)
    before = written[0].read_bytes()
    for out, expected in (
        (written[0], "pass --overwrite"),
        (tmp_path, "expected the name of a file, found a folder"),
        (tmp_path / "none/s.json", "its folder does not exist"),
    ):
        done = invoke("sensitivity", source, out, "--tokens", 16, "--window", 16)
        assert isinstance(done.exception, SystemExit), repr(done.exception)
        assert done.exit_code == 1
        assert expected in done.stderr
    assert written[0].read_bytes() == before


def test_overwriting(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    for options in ([], ["--overwrite"]):
        recipe = tmp_path / "r.yaml"
        recipe.write_text("rules: [{role: [mlp, attention], keep: true}]")
        done = invoke("sensitivity", source, out, "--tokens", 16, "--window", 16, "--recipe", recipe, *options)
        assert done.exit_code == 0, done.stderr
    assert len(read_sensitivity(out).groups) == 2


def test_a_master_is_not_measured(base: Path, tmp_path: Path) -> None:
    done = invoke("sensitivity", families.master(base, "llama"), tmp_path / "s.json")
    assert done.exit_code == 1
    assert "give the checkpoint that it was made from" in done.stderr


def test_a_model_without_predictions_is_refused(base: Path, tmp_path: Path) -> None:
    """GPT2Model has no head: nothing is predicted, nothing diverges."""
    done = invoke("sensitivity", families.model(base, "gpt2"), tmp_path / "s.json", "--tokens", 16, "--window", 16)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 1
    assert "GPT2Model: it is not a causal language model" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_transposed_in_the_file(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=128, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    found = measured(tmp_path / "gpt2")
    assert {"transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"} <= {group.name for group in found.groups}
    assert all(group.alpha > 0 for group in found.groups)


def test_logits_that_are_no_numbers_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturb, "_divergence", lambda *_, **__: math.nan)
    with pytest.raises(EvaluationError, match="with noise, logits are NaN or infinite; pass --dtype float32"):
        measured(source)
    monkeypatch.undo()
    monkeypatch.setattr(perturb, "_log_probabilities", lambda *_: torch.tensor([math.inf]))
    with pytest.raises(EvaluationError, match="model: logits are NaN or infinite"):
        measured(source)
