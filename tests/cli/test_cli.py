"""The command line: exit codes, stdout and stderr, JSON, progress, and what --help imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import answer, done, invoke, refused
from helpers import bf16, gaussian, read_all, write_checkpoint
from pqweights_cli import output
from pqweights_cli.main import COMMANDS, app
from typer.testing import CliRunner

import pqweights

PLAN_TOTALS = {"weights", "quantized_weights", "source_bytes", "output_bytes", "bits_per_weight"}
PLAN_TENSOR = {"name", "shape", "dtype", "action", "codec", "bits", "bytes", "reason"}


def test_plan_json(source: Path, master: Path) -> None:
    found = answer("plan", source)
    assert found["totals"].keys() >= PLAN_TOTALS
    assert all(tensor.keys() >= PLAN_TENSOR for tensor in found["tensors"])
    tensors = read_all(source)
    assert {t["name"]: (t["dtype"], tuple(t["shape"])) for t in found["tensors"]} == {
        name: (dtype, values.shape) for name, (dtype, values) in tensors.items()
    }
    assert found["totals"]["source_bytes"] == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert found["totals"]["output_bytes"] == sum(path.stat().st_size for path in master.glob("*.safetensors"))
    assert {t["action"] for t in found["tensors"]} == {"quantize", "keep"}
    for tensor in found["tensors"]:
        assert (tensor["codec"] is None) == (tensor["bits"] is None) == (tensor["action"] == "keep")


def test_plan_is_a_table_of_all_tensors(source: Path, tmp_path: Path) -> None:
    """Columns are as wide as their widest cell, reasons are unchanged, and no line ends in spaces."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text('rules: [{role: mlp, bits: 8, reason: "two\\nlines  "}, {name: "*.k_proj.*", bits: 2}]')
    tensors = answer("plan", source, "--recipe", recipe)["tensors"]
    titles = ("tensor", "shape", "dtype", "action", "codec", "bits", "bytes", "reason")
    columns = [f"#{title}" if title in ("bits", "bytes") else title for title in titles]
    cells = [
        t | {"tensor": t["name"], "shape": "x".join(map(str, t["shape"])), "bytes": str(t["bytes"])} for t in tensors
    ]
    rows = [[str(cell[title] or "") for title in titles] for cell in cells]
    table = "\n".join(output.table(columns, rows))
    assert invoke("plan", source, "--recipe", recipe).stdout.startswith(f"{table}\n\n")


def test_dry_run_prints_the_plan(source: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", ("--recipe", "q4", "--max-shard-size", "20kB", "--threads", "3")
    for extra in (options, (*options, "--json")):
        dry, plan = invoke("quantize", source, out, "--dry-run", *extra), invoke("plan", source, *extra)
        assert (dry.exit_code, dry.stdout, dry.stderr) == (0, plan.stdout, "")
    assert not out.exists()


def test_quantize_and_inspect_json(source: Path, tmp_path: Path) -> None:
    planned, made = answer("plan", source), answer("quantize", source, tmp_path / "out")
    inspected = answer("inspect", tmp_path / "out")
    for found in (made, inspected):
        assert found["totals"].keys() >= PLAN_TOTALS - {"source_bytes"} | {"relative_mse"}
        assert {key: found["totals"].get(key) for key in PLAN_TOTALS} == {
            key: planned["totals"][key] for key in PLAN_TOTALS
        }
        for tensor, plan in zip(found["tensors"], planned["tensors"], strict=True):
            assert {key: tensor[key] for key in plan} == plan
            assert (tensor["relative_mse"] is None) == (tensor["action"] == "keep")
        assert 0.002 < found["totals"]["relative_mse"] < 0.003
    assert (made["already_done"], made["resumed_tensors"], made["exceeding"]) == (False, 0, [])
    again = answer("quantize", source, tmp_path / "out")
    assert again["already_done"] is True and again["totals"] == made["totals"]


def test_verify_reports_a_changed_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    invoke("quantize", source, out)
    (out / "tokenizer.json").write_bytes(b"{}")
    result = invoke("verify", out, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert len(found["problems"]) == 1 and "tokenizer.json" in found["problems"][0]
    text = invoke("verify", out)
    assert text.exit_code == 1
    assert text.stdout.splitlines() == found["problems"]


def test_results_go_to_stdout(source: Path, master: Path, tmp_path: Path) -> None:
    for arguments in (
        ("plan", source),
        ("quantize", source, tmp_path / "out"),
        ("inspect", master),
        ("verify", master),
        ("export", master, tmp_path / "exported", "--target", "bf16"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.strip()
        assert "\x1b" not in result.stdout  # no colours in a pipe


def test_summary_says_what_was_kept_and_left_out_and_why(source: Path, tmp_path: Path) -> None:
    text = invoke("quantize", source, tmp_path / "out").stdout
    assert "left out: README.md" in text
    assert "model.layers.0.mamba.A_log" in text and "state-space" in text
    assert "rescued: model.layers.0.mlp.up_proj.weight" in text
    assert " per quantized weight, " in text and "coverage" in text
    again = invoke("quantize", source, tmp_path / "out")
    assert "already holds" in again.stderr


WRONG_USAGE = ["unknown", "plan", "quantize a", "plan a --unknown", "plan a --bits x", "export a o -t bf16 --dtype x"]


@pytest.mark.parametrize("line", WRONG_USAGE)
def test_wrong_usage_exits_2(line: str) -> None:
    result = invoke(*line.split())
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr


def test_export_without_a_target_lists_the_targets() -> None:
    text = " ".join(invoke("export", "somewhere", "out").stderr.replace("│", " ").split())
    assert "Missing option '--target' / '-t'. Expected one of bf16, torchao, mlx, gguf, comfyui, vllm" in text


def test_unexpected_errors_keep_their_traceback(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **keywords: Any) -> None:
        raise ValueError("our own mistake")

    monkeypatch.setattr("pqweights.results.plan_report.plan_quantize", broken)
    result = CliRunner().invoke(app, ["plan", str(source)])
    assert isinstance(result.exception, ValueError)


def test_operating_system_errors_are_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> int:
        raise OSError(5, "Input/output error", "config.json")

    monkeypatch.setattr("os.preadv", failing)
    line = refused("plan", source)
    assert "config.json" in line and "Input/output error" in line


def test_help_lists_the_commands_and_every_command_has_json() -> None:
    for option in ("--help", "-h"):
        shown = done(option).stdout
        for command in COMMANDS:
            assert command in shown and "--json" in done(command, option).stdout
    assert {c.name: (c.help or "").split("\n\n")[0] for c in app.registered_commands} == COMMANDS
    assert done("--version").stdout == f"pqweights {pqweights.__version__}\n"


def test_single_file_is_a_source(tmp_path: Path) -> None:
    """A tensor without dimensions is one, too."""
    tensors = {
        "scale": ("F32", np.array(1.0, dtype=np.float32)),
        "mlp.up_proj.weight": bf16(gaussian(64, 128)),
        "norm.weight": bf16(gaussian(128)),
    }
    folder = write_checkpoint(tmp_path / "folder", tensors, companions={"secret.txt": b"not asked for"})
    file = (folder / "model.safetensors").rename(folder / "weights-of-mine.safetensors")
    assert "scalar" in invoke("plan", file).stdout
    found = answer("quantize", file, tmp_path / "out")
    assert found["copied_files"] == []
    assert {tensor["name"] for tensor in found["tensors"]} == tensors.keys()
    assert answer("verify", tmp_path / "out")["ok"]
    assert not (tmp_path / "out/secret.txt").exists()
    answer("export", tmp_path / "out", tmp_path / "exported", "--target", "bf16")
    assert read_all(tmp_path / "exported").keys() == tensors.keys()


MAIN = "from pqweights_cli.main import main; main()"


def imported_by(*arguments: str) -> set[str]:
    """The packages that a command line imports in a fresh process."""
    command = [sys.executable, "-X", "importtime", "-c", MAIN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


def run_into(stdout: Any, unbuffered: str, *arguments: object) -> tuple[int, str]:
    """The exit code of a command line in a fresh process, and what it writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    return done.returncode, done.stderr


# Python writes to stdout at once, or when its buffer is full and when it ends, as it does by default.
BUFFERING = pytest.mark.parametrize("unbuffered", ["1", ""], ids=["unbuffered", "buffered"])


@pytest.mark.parametrize("arguments", [("--help",), ("export", "--help"), ("eval", "--help"), ("--version",)])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    imported = imported_by(*arguments)
    assert "typer" in imported  # the list is one
    assert not imported & {"torch", "triton", "transformers", "numpy", "yaml", "safetensors"}


def test_commands_import_neither_torch_nor_a_compiler(source: Path, master: Path, tmp_path: Path) -> None:
    """The kernels are compiled already, because the master was made with them."""
    invoke("export", master, tmp_path / "compiled", "--target", "bf16")
    for arguments in (
        ("quantize", source, tmp_path / "out"),
        ("export", master, tmp_path / "exported", "--target", "bf16"),
        ("verify", master),
    ):
        assert not imported_by(*map(str, arguments)) & {"torch", "triton", "transformers", "safetensors"}


@BUFFERING
def test_closed_pipe_ends_a_command_silently(unbuffered: str, source: Path) -> None:
    """As in `pqweights plan ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        assert run_into(pipe, unbuffered, "plan", source, "--quiet") == (1, "")


@BUFFERING
@pytest.mark.parametrize("arguments", [("plan",), ("plan", "--json"), ("--version",)])
def test_full_disk_under_stdout_is_one_line(arguments: tuple[str, ...], unbuffered: str, source: Path) -> None:
    with open("/dev/full", "w") as full:
        code, error = run_into(full, unbuffered, *arguments, *([source] if "plan" in arguments else []))
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1
    assert "No space left on device" in error
