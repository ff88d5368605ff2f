"""What plan --memory proposes: about the bytes that the exports take, the runtimes that load them, and the commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from closeness import ALIKE, approx
from commands import answer, done
from gguf_files import write_llama

import pqweights
from pqweights.targets.memory import GIB, Proposal, share_of

WIDE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 5,
}  # fmt: skip
LARGE = "1TB"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("memory") / "a model", sizes=WIDE)


def proposed(source: Path, **asked: Any) -> tuple[Proposal, ...]:
    found = pqweights.plan(source, **{"memory": LARGE, **asked}).memory
    assert found is not None
    return found.proposals


def test_printed_commands_make_exports_of_about_the_estimated_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.GgufModel.has_vocabulary", True)
    planned = proposed(source)
    made: dict[str, int] = {}
    for runtime in ("llama.cpp", "mlx", "vllm", "transformers"):
        text = done("plan", source.name, "--memory", LARGE, "--runtime", runtime).stdout
        commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    pqweights ")]
        for command, *words in commands:
            target = words[words.index("--target") + 1] if command == "export" else "master"
            if target not in made:  # one of each
                done(command, *words)
                files = [path for end in ("gguf", "safetensors") for path in Path(words[1]).glob(f"*.{end}")]
                made[target] = sum(path.stat().st_size for path in files)
                format_of = "packed" if target == "master" else words[1].strip("/").removeprefix(f"{target}-")
                (stated,) = {p.weight_bytes for p in planned if (p.target, p.format) == (target, format_of)}
                assert stated == approx(made[target], 20 * ALIKE), (target, words)
    assert made.keys() == {"master", "bf16", "gguf", "mlx", "vllm", "torchao"}


def test_rows_that_blocks_do_not_divide_take_what_their_types_do(tmp_path: Path) -> None:
    """As those of 576 weights of SmolLM2: llama.cpp's fallbacks have more bits."""
    sizes = WIDE | {"hidden_size": 192, "intermediate_size": 576, "num_attention_heads": 3, "num_key_value_heads": 3}
    source = write_llama(tmp_path / "narrow", sizes=sizes)
    made = pqweights.export(source, tmp_path / "out", "gguf", type="q2_k", without_tokenizer=True)
    (stated,) = {p.weight_bytes for p in proposed(source) if (p.target, p.format) == ("gguf", "q2_k")}
    assert stated == approx(made.totals.output_bytes, 20 * ALIKE)


def test_most_bits_come_first_and_what_fits_is_what_there_is_memory_for(source: Path) -> None:
    everything = proposed(source)
    bits = [proposal.bits for proposal in everything]
    assert bits == sorted(bits, reverse=True) and bits[0] == approx(16, ALIKE)
    middle = sorted(proposal.memory_bytes for proposal in everything)[len(everything) // 2]
    found = pqweights.plan(source, memory=middle).memory
    assert found is not None and 0 < len(found.fitting) < len(everything)
    assert [p.fits for p in found.proposals] == [p.memory_bytes <= middle for p in found.proposals]
    assert found.fitting == tuple(p for p in found.proposals if p.fits)


def test_memory_is_weights_context_and_a_gibibyte_over_the_share_of_the_runtime(source: Path) -> None:
    shares = {"llama.cpp": 1.0, "transformers": 1.0, "vllm": 0.92, "mlx": 0.75}  # of a Mac with more than 32 GiB
    for proposal in proposed(source):
        used = proposal.weight_bytes + proposal.context_bytes + GIB
        assert proposal.memory_bytes == approx(used / shares[proposal.runtime], ALIKE)
    assert share_of("mlx", 16 * GIB) == 2 / 3


def test_nothing_that_fits_is_one_line_with_the_smallest(source: Path) -> None:
    for asked in ((), ("--runtime", "vllm")):
        (line,) = done("plan", source, "--memory", "1MB", *asked).stdout.splitlines()
        found = proposed(source, memory="1MB", **({"runtime": "vllm"} if asked else {}))
        least = min(found, key=lambda proposal: proposal.memory_bytes)
        assert line.startswith("nothing fits: 1.00 MB of memory, 128 tokens of context; the smallest is ")
        assert f"{least.target} {least.format} for {least.runtime}, which needs " in line


def test_context_is_that_of_the_model_and_a_longer_one_is_warned_of(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", sizes=WIDE, config={"max_position_embeddings": 32768})
    assert answer("plan", source, "--memory", LARGE)["memory"]["context"] == 8192
    long = done("plan", source, "--memory", LARGE, "--context", "48k")
    assert "WARNING: --context 49152: the model takes at most 32768 tokens\n" in long.stderr
    of_eight, of_sixteen = ({p.context_bytes for p in proposed(source, context=context)} for context in (8192, "16K"))
    assert {2 * size for size in of_eight} == of_sixteen == {2 * 2 * 5 * 256 * 16384}


def test_a_runtime_is_proposed_what_it_loads(source: Path) -> None:
    for runtime, targets in {
        "llama.cpp": {"gguf"},
        "mlx": {"source", "bf16", "mlx"},
        "vllm": {"source", "bf16", "vllm"},
        "transformers": {"source", "bf16", "master", "torchao"},
    }.items():
        found = proposed(source, runtime=runtime)
        assert {p.runtime for p in found} == {runtime}
        assert {p.target for p in found} == targets


def test_a_target_that_refuses_the_model_is_named_with_its_reason(tmp_path: Path) -> None:
    unknown = write_llama(tmp_path / "unknown", sizes=WIDE, config={"model_type": "no_such_type"})
    shown = " ".join(done("plan", unknown, "--memory", LARGE).stdout.split())
    assert "not proposed: mlx: mlx-lm does not support this model ('no_such_type')" in shown
    assert {p.runtime for p in proposed(unknown)} == {"vllm", "transformers"}


def test_formats_that_a_target_cannot_give_the_model_are_not_proposed(tmp_path: Path) -> None:
    """No group of 128 weights divides rows of 192, and the format of gpt-oss needs its experts."""
    narrow = write_llama(tmp_path / "model", sizes=WIDE | {"hidden_size": 192, "num_attention_heads": 3})
    formats = {p.format for p in proposed(narrow, runtime="vllm") if p.target == "vllm"}
    assert "int8" in formats


def test_commands_export_from_the_source_with_what_opens_it(source: Path) -> None:
    shown = done("plan", source, "--memory", LARGE, "--allow-pickle", "--token", "secret").stdout
    exports = [line for line in shown.splitlines() if "pqweights export" in line]
    assert exports and "secret" not in shown
    assert all(f"export {shlex.quote(str(source))} " in line and "--allow-pickle" in line for line in exports)


def test_a_plan_without_memory_says_nothing_of_it(source: Path) -> None:
    assert "memory" not in answer("plan", source) and pqweights.plan(source).memory is None


def test_commands_stay_whole_on_a_narrow_terminal(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pqweights_cli.tables.terminal_width", lambda: 60)
    lines = done("plan", source, "--memory", LARGE).stdout.splitlines()
    exports = [line for line in lines if "pqweights export" in line]
    assert exports and all(line.startswith(f"    pqweights export {shlex.quote(str(source))} ") for line in exports)
    assert any(line.startswith("not shown: context") for line in lines)
