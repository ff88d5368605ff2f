"""What plan --memory says of exports is what they are: their bytes, their errors, their order, and their commands."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import families
import numpy as np
import pytest
from closeness import ALIKE, F32_FEW, F64_SUM, SAMPLE, SMALL_SAMPLE, approx
from commands import answer, done
from gguf_files import write_llama

import pqweights
from pqweights.checkpoint.source import open_local
from pqweights.errors import MissingDependencyError
from pqweights.exports import EXPORTS, get_target
from pqweights.exports.assignment import distortion
from pqweights.exports.exporting import MasterFolder
from pqweights.exports.gguf import TARGET as GGUF
from pqweights.exports.memory_advice import Proposal, Stored
from pqweights.exports.target import ExportSource
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import stored_bytes
from pqweights.planning.roles import classify
from pqweights.planning.sensitivity_file import Measured, Sensitivity, groups_of, heuristic_alphas, write_sensitivity

WIDE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 5,
}  # fmt: skip
LARGE = "1TB"


def proposed(source: Path, **asked: Any) -> tuple[Proposal, ...]:
    found = pqweights.plan(source, **{"memory": LARGE, **asked}).memory
    assert found is not None
    return found.proposals


def planned_bytes(master: Path, stored: Stored) -> int:
    """The bytes of all tensors of an export, as its own plan has them."""
    checkpoint, manifest = MasterFolder(master, None, None).opened
    source = ExportSource(folder=master, checkpoint=checkpoint, manifest=manifest, original=None)
    target = get_target(stored.target)
    read, transform = target.prepare(source, target.settings(ExportOptions(**stored.options)))
    return sum(stored_bytes(tensor.stored) for tensor in transform.plan(read))


@pytest.mark.parametrize(
    "family",
    sorted(families.FAMILIES.keys() - {"gpt2"}),  # which only bf16 and mlx can hold
)
def test_bytes_are_those_that_the_export_of_the_master_plans(
    family: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tokenizer of these models is none that llama.cpp has; no tensor depends on it.
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.read_vocabulary", lambda *about, **more: None)
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.add_vocabulary", lambda *about, **more: ())
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.GgufModel.has_vocabulary", True)
    master, seen = families.master(base, family), set()
    for proposal in proposed(families.model(base, family), recipe="q6"):
        if proposal.stored.target in EXPORTS and (key := (proposal.stored.target, proposal.stored.format)) not in seen:
            seen.add(key)
            assert proposal.stored.is_exact
            assert proposal.stored.bytes == planned_bytes(master, proposal.stored), key
    runtimes = {"bf16", "vllm"} if family == "llama4" else {"bf16", "vllm", "mlx"}  # whose windows mlx-lm ignores
    assert {target for target, _ in seen} >= runtimes


def test_layers_of_one_file_that_differ_in_type_are_counted_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five layers, llama.cpp's mixes store some wider than others."""
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.GgufModel.has_vocabulary", True)
    source = write_llama(tmp_path / "model", sizes=WIDE)
    done("quantize", source, tmp_path / "master")
    found = proposed(source, runtime="llama.cpp")
    assert {p.stored.format for p in found} == {choice.name for choice in GGUF.choices}
    assert all(p.stored.bytes == planned_bytes(tmp_path / "master", p.stored) for p in found)


def bytes_in_files(folder: Path) -> int:
    if files := list(folder.glob("*.gguf")):
        from gguf import GGUFReader

        return sum(tensor.n_bytes for file in files for tensor in GGUFReader(file).tensors)
    headers = [json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
               for file in folder.glob("*.safetensors")]  # fmt: skip
    spans = [entry["data_offsets"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    return sum(end - start for start, end in spans)


def test_printed_commands_make_exports_of_the_stated_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.GgufModel.has_vocabulary", True)
    source = write_llama(tmp_path / "a model", sizes=WIDE)
    rules = ("--keep", "*.layers.0.*", "--set", "*.down_proj.weight=6", "--bits", 7)
    made: dict[str, int] = {}
    for runtime in ("llama.cpp", "mlx", "vllm", "transformers"):
        text = done("plan", source.name, "--memory", LARGE, "--runtime", runtime, *rules).stdout
        first, *commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    pqweights ")]
        assert done(*first).exit_code == 0 and first[0] == "quantize"
        for command, *words in commands:
            target = words[words.index("--target") + 1] if command == "export" else "master"
            if not any(name.startswith(target) for name in made):  # one of each
                done(command, *words)
                made[words[1]] = bytes_in_files(Path(words[1]))
        made |= {"master": bytes_in_files(Path("master"))}
    stored = [p["stored"] for p in answer("plan", source, "--memory", LARGE, *rules)["memory"]["proposals"]]
    sizes = {f"{s['target']}-{s['format']}".replace(" ", "-").replace(",", "") + "/": s["bytes"] for s in stored}
    sizes["master"] = sizes["master-packed/"]
    assert {name: sizes[name] for name in made} == made
    assert {name.partition("-")[0] for name in made} == {"master", "bf16", "gguf", "mlx", "vllm", "torchao"}


def test_best_expected_quality_is_first_and_what_fits_is_what_there_is_memory_for(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    everything = proposed(source)
    rises = [proposal.stored.expected_rise for proposal in everything]
    assert rises == sorted(rises) and rises[0] == 0
    for proposal in everything:
        parts = proposal.stored.bytes + proposal.context_bytes + proposal.overhead_bytes
        assert proposal.memory_bytes >= parts
    middle = sorted(proposal.memory_bytes for proposal in everything)[len(everything) // 2]
    found = pqweights.plan(source, memory=middle).memory
    assert found is not None
    assert {p.fits for p in found.fitting} == {True} and 0 < len(found.fitting) < len(everything)
    assert all(p.fits == (p.memory_bytes <= middle) for p in found.proposals)
    for one, other in itertools.permutations(found.best, 2):
        if one.runtime == other.runtime:
            assert (one.memory_bytes < other.memory_bytes) == (one.stored.expected_rise > other.stored.expected_rise)
    for other in found.fitting:
        beaten = any(
            one.runtime == other.runtime
            and one.memory_bytes <= other.memory_bytes
            and one.stored.expected_rise <= other.stored.expected_rise
            for one in found.best
            if one is not other
        )
        assert beaten != any(one is other for one in found.best)


def test_rise_is_the_sum_over_groups_of_alpha_times_the_error(tmp_path: Path) -> None:
    """As in docs/fit.md, by hand: one weight in a layer, whose alpha the rule of thumb gives, and the embeddings."""
    source = write_llama(tmp_path / "model", sizes=WIDE | {"num_hidden_layers": 3})
    by_format = {p.stored.format: p.stored.expected_rise for p in proposed(source, runtime="vllm")}
    of_layer = 0.3 + 0.15 + 0.5 + 0.35  # q, k and v; o; gate and up; down
    alphas = of_layer / 3 * (3 + 1 + 1.5)  # the first and the last layer count more
    for name, rule in (
        ("w4a16", GroupRule(bits=4, group_size=128, symmetric=True, middle=True, rule="best")),
        ("mxfp4a16", FloatRule("mxfp4", 4, 32, "best")),
    ):
        assert by_format[name] == approx(alphas * distortion(rule), F64_SUM)
    # Rounding what layers read in the same format adds as much again.
    assert by_format["mxfp4"] == approx(2 * by_format["mxfp4a16"], F64_SUM)
    # bf16 takes no --source, so it has the error of the master, and that alone.
    packed = next(p for p in proposed(source, runtime="transformers") if p.stored.target == "master")
    assert by_format["bf16"] == packed.stored.expected_rise > 0


def test_expected_errors_are_those_of_gaussian_weights() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((200, 4096))
    scales = np.abs(values).max(axis=1, keepdims=True) / 127.5
    error = ((np.clip(np.rint(values / scales), -128, 127) * scales - values) ** 2).sum() / (values**2).sum()
    rule = GroupRule(bits=8, group_size=4096, symmetric=True, middle=True, rule="compressed-tensors")
    assert distortion(rule) == approx(error, SAMPLE)
    for choice in GGUF.choices:
        rounding = GGUF.estimate(GGUF.settings(choice.options), 256)
        if rounding is not None:  # a type of blocks, whose error docs/gguf.md has
            known = BLOCK_TYPES[rounding.rule.kind].distortion
            assert distortion(rounding.rule) == approx(known, SMALL_SAMPLE), choice.name


def test_without_packages_bytes_are_estimated_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    exact = {(p.stored.target, p.stored.format): p for p in proposed(source)}
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("pqweights.exports.mlx._check_packages", mock.Mock(side_effect=MissingDependencyError("none")))
    estimated = {(p.stored.target, p.stored.format): p for p in proposed(source)}
    assert estimated.keys() == exact.keys()
    for key, proposal in estimated.items():
        assert proposal.stored.is_exact == (key[0] not in ("gguf", "mlx"))
        tolerance = {"gguf": 25 * ALIKE, "mlx": 2 * ALIKE}.get(key[0], 0)  # mixes store some matrices wider
        assert proposal.stored.bytes == approx(exact[key].stored.bytes, tolerance), key
    shown = done("plan", source, "--memory", LARGE, "--runtime", "mlx").stdout
    assert "about " in shown


def test_nothing_that_fits_is_one_line_with_the_smallest(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    for asked in ((), ("--runtime", "vllm")):
        shown = done("plan", source, "--memory", "1MB", *asked)
        (line,) = shown.stdout.splitlines()
        least = min(proposed(source, **({"runtime": "vllm"} if asked else {})), key=lambda p: p.memory_bytes)
        assert line.startswith("nothing fits: 1.00 MB of memory, 128 tokens of context; the smallest is ")
        assert f"{least.stored.target} {least.stored.format} for {least.runtime}, which needs " in line


def test_context_is_that_of_the_model_and_a_longer_one_is_warned_of(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE, config={"max_position_embeddings": 32768})
    assert answer("plan", source, "--memory", LARGE)["memory"]["context"] == 8192
    long = done("plan", source, "--memory", LARGE, "--context", "48k")
    assert "WARNING: --context 49152: the model takes at most 32768 tokens\n" in long.stderr
    of_eight, of_sixteen = ({p.context_bytes for p in proposed(source, context=context)} for context in (8192, "16K"))
    assert {2 * size for size in of_eight} == of_sixteen == {2 * 2 * 5 * 256 * 16384}


def test_a_runtime_is_proposed_what_it_loads(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    for runtime, targets in {
        "llama.cpp": {"gguf"},
        "mlx": {"source", "bf16", "mlx"},
        "vllm": {"source", "bf16", "vllm"},
        "transformers": {"source", "bf16", "master", "torchao"},
    }.items():
        found = proposed(source, runtime=runtime)
        assert {p.runtime for p in found} == {runtime}
        assert {p.stored.target for p in found} == targets


def test_a_target_that_refuses_the_model_is_named_with_its_reason(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE, config={"model_type": "gpt2"})
    shown = " ".join(done("plan", source, "--memory", LARGE).stdout.split())
    assert "not counted or proposed: gguf: config.json: GGUF cannot hold a model of type gpt2" in shown
    found = pqweights.plan(source, memory=LARGE).memory
    assert found is not None and not {p.stored.target for p in found.proposals} & {"gguf", "vllm", "torchao"}
    unknown = write_llama(tmp_path / "unknown", sizes=WIDE, config={"model_type": "no_such_type"})
    shown = " ".join(done("plan", unknown, "--memory", LARGE).stdout.split())
    assert "not counted or proposed: mlx: mlx-lm does not support this model ('no_such_type')" in shown
    found = pqweights.plan(unknown, memory=LARGE).memory
    assert found is not None and {p.runtime for p in found.proposals} == {"vllm", "transformers"}


def test_a_revision_and_pickles_leave_out_the_original(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    assert "--source" in done("plan", source, "--memory", LARGE).stdout
    shown = done("plan", source, "--memory", LARGE, "--allow-pickle", "--token", "secret").stdout
    assert "--source" not in shown and "secret" not in shown
    assert f"pqweights quantize {source} master/ --allow-pickle" in shown


def test_a_plan_without_memory_says_nothing_of_it(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    assert "memory" not in answer("plan", source) and pqweights.plan(source).memory is None


def test_commands_stay_whole_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE)
    monkeypatch.setattr("pqweights_cli.tables.terminal_width", lambda: 60)
    lines = done("plan", source, "--memory", LARGE).stdout.splitlines()
    exports = [line for line in lines if "--source" in line]
    assert exports and all(line.startswith("    pqweights export master/ ") for line in exports)
    assert any(line.startswith("not shown: overhead") for line in lines)


def test_measured_sensitivities_give_the_expected_rise(base: Path, tmp_path: Path) -> None:
    """Of a file in which every group has a thousand times the sensitivity of the rule of thumb, so a thousand times."""
    source = families.model(base, "llama")
    of_rule = {(p.stored.target, p.stored.format): p.stored.expected_rise for p in proposed(source)}
    checkpoint = open_local(source)
    roles = {t.name: classify(t.name, t.dtype, t.shape).name for t in checkpoint.tensors if len(t.shape) > 1}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas = heuristic_alphas(groups, roles)
    measured = [
        Measured(name=n, weights=tuple(w), alpha=1000 * alphas[n], points=((0.01, 0.02),)) for n, w in groups.items()
    ]
    file = Sensitivity(
        checkpoint=checkpoint.fingerprint(), method={"kind": "random tokens", "tokens": 64}, groups=tuple(measured)
    )
    write_sensitivity(tmp_path / "measured.json", file)
    for proposal in proposed(source, sensitivity=tmp_path / "measured.json"):
        stored = proposal.stored
        assert stored.expected_rise == approx(1000 * of_rule[stored.target, stored.format], F32_FEW)
