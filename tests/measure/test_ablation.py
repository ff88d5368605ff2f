"""pqweights ablate: each row matches the single commands, and shares are relative to the gain over absmax."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from pqweights_cli.main import app
from test_calibrate import TOKENS, invoke, text, with_outliers
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from calls import quantize

from pqweights.errors import MissingDependencyError
from pqweights.evaluate.protocol import Loss, Scores, Windows, compare
from pqweights.evaluate.weight_errors import relative_mse
from pqweights.measure import ablation
from pqweights.measure.ablation import ABSMAX, BOTH, LEAST_SQUARES, MASTERS, AblationRow, _with_shares
from pqweights.planning.recipe import load_recipe
from pqweights.runtimes.models import open_model
from pqweights.runtimes.texts import tokenize

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
WINDOWS = ("--window", "60", "--stride", "50")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama = families.FAMILIES["llama"]
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    small = replace(llama, settings={**llama.settings, **sizes})
    folder = families.build(small, tmp_path_factory.mktemp("ablated") / "model", with_outliers)
    (folder / "text").write_text(text(3000))
    return folder


@pytest.fixture(scope="module")
def report(source: Path) -> dict[str, Any]:
    arguments = ("ablate", source, "--text", source / "text", "--bits", "3,5", "--json", *WINDOWS)
    done = invoke(*arguments, *([] if HAS_TORCHAO else ["--no-int4"]))
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_there_is_a_row_for_each_configuration(report: dict[str, Any]) -> None:
    names = [(row["bits"], row["name"]) for row in report["rows"]]
    assert names[0] == (None, "original")
    for bits in (3, 5):
        assert {(bits, name) for name, *_ in MASTERS} <= set(names)
        assert not HAS_TORCHAO or (bits, "+ INT4 on top, least squares") in names
    assert not HAS_TORCHAO or (None, "INT4 from the original, torchao's min-max") in names
    assert len(names) == len(set(names)) == (22 if HAS_TORCHAO else 16)
    assert names[-1] == (3.875, "polar")
    assert report["absent"] == []
    # The last third of the text is used for calibration.
    assert report["settings"]["tokens"] == 2000
    assert report["settings"]["calibration_tokens"] == 1000
    assert report["settings"]["scored_tokens"] == 39 * 50


def test_row_matches_the_single_commands(source: Path, report: dict[str, Any], tmp_path: Path) -> None:
    quantize(source, tmp_path / "m", replace(load_recipe("q5"), codec="lloyd-max").with_bits(3), threads=2)
    ids = tokenize(source, (source / "text").read_text())[:2000]
    scores = compare(open_model(tmp_path / "m"), open_model(source), ids=ids, windows=Windows(size=60, stride=50))
    (row,) = [r for r in report["rows"] if (r["bits"], r["name"]) == (3, "+ Lloyd-Max only")]
    assert scores.divergence is not None
    assert row["perplexity"]["value"] == pytest.approx(scores.perplexity.value, rel=1e-6)
    assert row["kl_mean"]["value"] == pytest.approx(scores.divergence.mean.value, rel=1e-5)
    assert row["relative_mse"] == pytest.approx(relative_mse(source, tmp_path / "m").master.relative_mse)
    assert row["bits_per_weight"] == pytest.approx(3.125)


def test_each_part_lowers_the_error(report: dict[str, Any]) -> None:
    found = {(row["bits"], row["name"]): row for row in report["rows"]}
    for bits in (3, 5):
        errors = {name: found[bits, name]["relative_mse"] for name, *_ in MASTERS}
        assert errors[LEAST_SQUARES] < errors[BOTH] < errors[ABSMAX]
        scaled, plain = found[bits, "+ AWQ"], found[bits, LEAST_SQUARES]
        assert scaled["kl_mean"]["value"] < 0.6 * plain["kl_mean"]["value"]
        assert scaled["bits_per_weight"] > plain["bits_per_weight"]


def scores(*losses: float) -> Scores:
    return Scores(tuple(Loss(loss * 10, 10) for loss in losses))


def row(name: str, *losses: float, bits: int | None = 5) -> AblationRow:
    return AblationRow(
        name=name, bits=bits, bits_per_weight=None, relative_mse=None, scores=scores(*losses), share=None
    )


def test_share_is_relative_to_the_gain_of_both_parts() -> None:
    rows = [row(ABSMAX, 2.0, 2.02), row("+ x", 1.2, 1.22), row(BOTH, 1.0, 1.02), row("INT4", 1.0, 1.0, bits=None)]
    shares = [each.share for each in _with_shares(rows)]
    assert shares[0] is None
    assert shares[1] == pytest.approx((math.exp(2) - math.exp(1.2)) / (math.exp(2) - math.exp(1)), rel=1e-6)
    assert shares[2] == 1
    assert shares[3] is None


def test_shares_are_unknown_without_a_significant_gain() -> None:
    """The full codec is worse than absmax, or better by less than the standard error."""
    for both in ((2.1, 2.12), (1.5, 2.5)):
        rows = [row(ABSMAX, 2.0, 2.02), row("+ x", 1.2, 1.22), row(BOTH, *both)]
        assert all(each.share is None for each in _with_shares(rows))


def test_options_leave_out_awq_and_int4(source: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    done = invoke(
        "ablate",
        source,
        "--text",
        source / "text",
        "--no-awq",
        "--no-int4",
        "--work",
        tmp_path / "work",
        "--max-tokens",
        256,
        "--set",
        "*.up_proj.weight=6",  # a width that polar does not have
        *WINDOWS,
    )
    assert done.exit_code == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if " +- " in line]
    assert len(table) == 8  # seven rows, and the line that explains +-
    assert "AWQ" not in "".join(table)
    assert "256 tokens" in done.stdout
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--bits", "3,x"], 2, "expected bit widths such as 3,4,5"),
        (["--bits", "3,3"], 2, "different bit widths"),
        (["--bits", "9"], 2, "expected a whole number of bits from 2 to 8"),
        (["--bits", "4.5", "--recipe", "t4"], 2, "2 to 8 for absmax, found 4.5"),
        (["--max-tokens", "600"], 1, "calibration for AWQ: expected at least 8192 tokens, found 200"),
        (["--no-awq", "--window", "4096"], 1, "takes at most 512 tokens"),
        (["--no-awq", "--window", "512", "--max-tokens", "300"], 1, "--max-tokens 300 leaves fewer"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, expected: str, source: Path) -> None:
    done = CliRunner().invoke(
        app, ["ablate", str(source), "--text", str(source / "text"), *arguments], terminal_width=200
    )
    assert done.exit_code == code
    assert expected in " ".join(done.stderr.replace("│", " ").split())


def test_text_of_the_source_has_the_expected_tokens(source: Path) -> None:
    assert np.array_equal(tokenize(source, (source / "text").read_text()), TOKENS[:3000])


def test_missing_torchao_leaves_out_only_the_int4_rows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is looked for before anything is measured, and the output names it."""

    def package(name: str, extra: str, why: str) -> None:
        raise MissingDependencyError(f"{why} needs {name}: pip install {extra}")

    monkeypatch.setattr(ablation, "package", package)
    done = invoke("ablate", source, "--text", source / "text", "--no-awq", "--max-tokens", 256, *WINDOWS)
    assert done.exit_code == 0, done.stderr
    assert "not measured: INT4 needs torchao: pip install torchao" in done.stdout
    assert "INT4 on top" not in done.stdout
    assert "+ both" in done.stdout
