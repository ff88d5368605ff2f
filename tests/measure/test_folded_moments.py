"""Folds with data, and moments of an unfolded model for its folded weights, against inputs measured directly."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import pytest
from folding_models import columns_of, folded_values, kept, rewritten, uneven
from helpers import f32, run_command
from pqweights.planning.statistics_file import Statistics
from test_moments import SMALL, matrix, run

from pqweights.checkpoint.source import open_local
from pqweights.exports.compensation import Compensation
from pqweights.rewrite.folding import fold as folds
from pqweights.rewrite.folding.fold import Fold
from pqweights.rewrite.folding.sizes import mean_squares
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.verify import verify


@pytest.fixture(scope="module", params=SMALL)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with uneven channels, in float32, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    built = families.build(SMALL[request.param], folder / "built")
    return uneven(built, folder / "model")


@pytest.fixture(scope="module")
def moments(model: Path) -> Statistics:
    return run(model, model.with_name("m.safetensors"))


def folded_with(model: Path, moments: Statistics, work: Path) -> Fold:
    checkpoint = open_local(model)
    fold = Fold(checkpoint, plain=kept(checkpoint), moments=moments)
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folds, "SMALLEST_GAIN", -1.0)
        fold.measure(work, fetched=work, threads=1, progress=lambda *_: None)
    return fold


def test_folded_moments_are_those_of_the_folded_model(model, moments, tmp_path):
    fold = folded_with(model, moments, tmp_path / "work")
    compensation = Compensation(moments, {}, fold)
    folded = rewritten(model, tmp_path / "folded", {name: f32(each) for name, each in folded_values(fold).items()})
    direct = run(folded, tmp_path / "direct.safetensors")
    changed = 0
    for tensor in fold.original.tensors:
        known, expected = moments.weights.get(tensor.name), direct.weights.get(tensor.name)
        if known is None or expected is None:
            assert known is expected
            continue
        for number, (old, new) in enumerate(zip(known.vectors, expected.vectors, strict=True)):
            assert (old is None) == (new is None)
            if old is None or new is None:
                continue
            columns = compensation.columns(tensor, number)
            changed += columns is not None and (columns != 1).any()
            found = np.concatenate([strip for _, strip in moments.strips(old, columns=columns)])
            sizes = np.sqrt(np.diagonal(matrix(direct, new))) + 1e-12
            assert np.abs(found - matrix(direct, new)).max() <= 1e-3 * np.abs(np.outer(sizes, sizes)).max()
            assert np.allclose(np.sqrt(np.diagonal(found)), sizes, rtol=1e-3)
    assert changed


def test_sizes_of_channels_are_those_of_the_inputs(model, moments, tmp_path):
    fold = folded_with(model, moments, tmp_path / "work")
    for link in fold.structure.links:
        found = mean_squares(link, moments)
        by_matrix: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(link.matrices)]
        seen = set()
        for side in link.readers:
            known = moments.weights.get(side.tensor)
            for number, vector in enumerate(known.vectors if known else ()):
                place = number if side.stacked else 0
                if vector is None or (place, vector) in seen:
                    continue
                seen.add((place, vector))
                squares = np.diagonal(matrix(moments, vector)).astype(np.float64)
                heads = squares.reshape(-1, side.repeats, side.width)
                by_matrix[place].append((moments.vectors[vector].tokens, heads.mean(axis=1).reshape(-1)))
        for place, parts in enumerate(by_matrix):
            tokens = sum(count for count, _ in parts)
            if tokens:
                expected = sum(count * squares for count, squares in parts) / tokens
                assert np.allclose(found[place], expected, rtol=1e-5)
            else:
                assert np.isnan(found[place]).all()
    assert columns_of(fold)


def test_masters_folded_with_data_are_exported_with_the_original(model, moments, tmp_path):
    file = str(moments.path)
    run_command({"quantize": str(model), "fold": "equalize", "calibration": file}, tmp_path / "master")
    manifest = read_manifest(tmp_path / "master")
    assert manifest.made_by["fold"]["calibration"] == moments.sha256
    work = {"export": str(tmp_path / "master"), "target": "vllm", "group_size": 32, "original": str(model)}
    for rounding in ({}, {"rounding": "gptq"}):
        out = tmp_path / f"out-{len(rounding)}"
        run_command({**work, "calibration": moments.path, **rounding}, out)
        assert verify(out, threads=1).ok
