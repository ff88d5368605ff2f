"""The ablation of the benchmarks: its codecs are as they are defined, and its rows match the single commands."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import helpers
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from calls import quantize
from independent_reader import unpack
from test_calibrate import outlier_model, text
from weight_errors import relative_mse

from pqweights.codecs import CODECS, lloyd_max
from pqweights.codecs.weight import encode_weight
from pqweights.inference.runtimes.models import open_model
from pqweights.inference.runtimes.texts import Ids, load_tokenizer, tokenize
from pqweights.planning.recipe import load_recipe
from pqweights.quality.evaluate.protocol import Loss, Scores, Windows, compare

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])  # only here: names clash
    from ablation import ABSMAX, BOTH, LEAST_SQUARES, MASTERS, Ablation, Row, with_shares
    from comparison_codecs import COMPARED

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
WINDOWS = Windows(size=60, stride=50)
BITS = range(2, 9)

each = pytest.mark.parametrize(("name", "bits"), list(itertools.product(COMPARED, BITS)))


# --- the codecs ---


def definition(name: str, blocks: npt.NDArray[np.float64], bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes and norms by definition, in float64, and where the code is not a near tie."""
    turned = blocks @ helpers.sylvester() / math.sqrt(128) if name.startswith("hadamard") else blocks
    if name.endswith("absmax"):
        steps = 2 ** (bits - 1) - 1
        norms = np.abs(turned).max(axis=1)
        levels, first = np.arange(-steps, steps + 1) / steps, 1
        distance = turned / norms[:, None]
    else:
        upper = np.array(lloyd_max.HALF_LEVELS[bits])
        norms = np.sqrt((turned**2).sum(axis=1))
        levels, first = np.concatenate([-upper[::-1], upper]), 0
        distance = turned / norms[:, None] * math.sqrt(128)
    nearest = np.abs(distance[:, :, None] - levels).argmin(axis=2)
    gap = np.abs(distance[:, :, None] - (levels[:-1] + levels[1:]) / 2).min(axis=2)
    return first + nearest, norms, gap > 2e-5 * np.abs(levels).max()


@each
def test_codes_and_norms_match_the_definition_and_errors_are_those_of_the_decoded(name: str, bits: int) -> None:
    values = helpers.gaussian(128, 128, seed=bits, scale=0.03)
    weight, measured = encode_weight(
        helpers.raw_bytes(values, "F32"), dtype="F32", shape=values.shape, coder=COMPARED[name].coder(bits)
    )
    exact = values.astype(np.float64)
    codes, norms, clear = definition(name, exact, bits)
    assert clear.mean() > 0.98
    assert np.array_equal(unpack(weight.parts[0], bits)[clear], codes[clear])
    assert np.allclose(weight.parts[1].view(np.float16).reshape(-1).astype(np.float64), norms, rtol=2.0**-11 * 1.001)
    error = (weight.decode_blocks(0, 128, "F32").view(np.float32).reshape(values.shape) - exact) ** 2
    assert measured.energy == pytest.approx((exact**2).sum(), rel=1e-6)
    assert measured.error == pytest.approx(error.sum(), rel=1e-5)
    ratio = measured.relative_mse / weight.coder.distortion
    assert 0.95 <= ratio <= 1.03


# --- the rows ---


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outlier_model(tmp_path_factory.mktemp("ablated") / "model")


@pytest.fixture(scope="module")
def ids(source: Path) -> Ids:
    return tokenize(source, text(3000))


@pytest.fixture(scope="module")
def codecs() -> Iterator[None]:
    """The codecs, which are removed again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, codec in COMPARED.items():
            patch.setitem(CODECS, name, codec)
        yield


@pytest.fixture(scope="module")
def rows(source: Path, ids: Ids, codecs: None, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    work = tmp_path_factory.mktemp("work")
    asked = Ablation(
        source=source,
        original=open_model(source),
        recipe=load_recipe("q5"),
        widths=(3,),
        ids=ids[:1000],
        windows=WINDOWS,
        calibration=str(load_tokenizer(source).decode(ids[2000:].tolist())),
        work=work,
        threads=2,
    )
    found = asked.rows()
    assert asked.absent.keys() == (set() if HAS_TORCHAO else {"INT4"})
    return found


def test_there_is_a_row_for_each_configuration(rows: list[Row]) -> None:
    names = [(row.bits, row.name) for row in rows]
    assert names[0] == (None, "original")
    assert {(3, name) for name, *_ in MASTERS} <= set(names)
    assert not HAS_TORCHAO or (3, "+ INT4 on top, least squares") in names
    assert not HAS_TORCHAO or (None, "INT4 from the original, torchao's min-max") in names
    assert len(names) == len(set(names)) == (13 if HAS_TORCHAO else 9)
    assert names[-1] == (3.875, "polar")


def test_row_matches_the_single_commands(source: Path, ids: Ids, rows: list[Row], tmp_path: Path) -> None:
    quantize(source, tmp_path / "m", replace(load_recipe("q5"), codec="lloyd-max").with_bits(3), threads=2)
    scores = compare(open_model(tmp_path / "m"), open_model(source), ids=ids[:1000], windows=WINDOWS)
    (row,) = [each for each in rows if (each.bits, each.name) == (3, "+ Lloyd-Max only")]
    assert scores.divergence is not None and row.scores.divergence is not None
    assert row.scores.perplexity.value == pytest.approx(scores.perplexity.value, rel=1e-6)
    assert row.scores.divergence.mean.value == pytest.approx(scores.divergence.mean.value, rel=1e-5)
    assert row.relative_mse == pytest.approx(relative_mse(source, tmp_path / "m").master.relative_mse)
    assert row.bits_per_weight == pytest.approx(3.125)


def test_each_part_lowers_the_error(rows: list[Row]) -> None:
    found = {row.name: row for row in rows if row.bits == 3}
    absmax, both, least_squares, scaled = (found[n] for n in (ABSMAX, BOTH, LEAST_SQUARES, "+ AWQ"))
    assert absmax.relative_mse and both.relative_mse and least_squares.relative_mse
    assert least_squares.relative_mse < both.relative_mse < absmax.relative_mse
    assert scaled.scores.divergence is not None and least_squares.scores.divergence is not None
    assert scaled.scores.divergence.mean.value < 0.6 * least_squares.scores.divergence.mean.value
    assert scaled.bits_per_weight and least_squares.bits_per_weight
    assert scaled.bits_per_weight > least_squares.bits_per_weight


@pytest.mark.parametrize(("both", "known"), [((1.0, 1.02), True), ((2.1, 2.12), False), ((1.5, 2.5), False)])
def test_share_is_relative_to_the_gain_of_both_parts_if_that_is_significant(
    both: tuple[float, float], known: bool
) -> None:
    """The full codec may be worse than absmax, or better by less than the standard error."""

    def row(name: str, *losses: float) -> Row:
        scores = Scores(tuple(Loss(loss * 10, 10) for loss in losses))
        return Row(name=name, bits=5, bits_per_weight=None, relative_mse=None, scores=scores)

    found = with_shares([row(ABSMAX, 2.0, 2.02), row("+ x", 1.2, 1.22), row(BOTH, *both)])
    share = (math.exp(2) - math.exp(1.2)) / (math.exp(2) - math.exp(1))
    assert [each.share for each in found] == ([None, pytest.approx(share, rel=1e-6), 1] if known else [None] * 3)
