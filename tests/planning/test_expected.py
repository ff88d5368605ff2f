"""What a plan says that its bits cost: what was measured, on the model that is nearest in size."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
from commands import done

import pqweights
from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.trellis import Trellis
from pqweights.planning.expected import MEASURED, PARAMETERS, QWEN, QWEN_1B, SMOLLM2, Measured, expected

REAL = Path(__file__).parents[2] / "docs" / "benchmarks" / "real.json"


def test_figures_are_those_of_the_benchmark() -> None:
    names = {name.lower(): name for name in PARAMETERS}
    found, parameters = set(), dict[str, int]()
    for row in json.loads(REAL.read_text())["rows"]:
        if row["format"] == "master" and row["data"] in (None, "self") and "fitted" not in row["name"]:
            name, _, bits = row["name"].partition(" ")
            codec, rate = (Trellis.codec, float(bits)) if bits else (LloydMax.codec, int(name[1:]) + 0.125)
            figures = round(row["kl"], 4), round(row["top1"], 3)
            found.add(Measured(names[row["model"]], codec, rate, row["data"] == "self", *figures))
            parameters[names[row["model"]]] = round(8 * row["bytes"] / row["bits_per_parameter"])
    assert found == set(MEASURED)
    assert parameters == PARAMETERS


@pytest.mark.parametrize(
    ("parameters", "model"), [(5_000_000, SMOLLM2), (240_000_000, SMOLLM2), (900_000_000, QWEN), (9 * 10**9, QWEN_1B)]
)
def test_the_nearest_model_answers(parameters: int, model: str) -> None:
    rows = expected(parameters, 5.13)
    assert {row.model for row in rows if not row.is_calibrated} == {model}
    # Of the largest no calibrated master was measured.
    assert {row.model for row in rows if row.is_calibrated} == {QWEN if model == QWEN_1B else model}
    assert len(rows) == len({(row.codec, row.is_calibrated) for row in rows}) == 3


def test_nothing_is_said_of_bits_that_were_not_measured() -> None:
    assert expected(10**8, 8.125) == expected(10**8, None) == ()


def test_a_plan_says_it(tmp_path: Path) -> None:
    source = families.build(families.FAMILIES["llama"], tmp_path / "model")
    assert pqweights.plan(source).to_json()["measured"][0]["model"] == SMOLLM2
    assert "0.1132 with hadamard-lloyd-max" in done("plan", source).output
    assert "measured" not in pqweights.plan(source, lossless=True).to_json()
