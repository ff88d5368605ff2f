"""The plot of keys and values: every part is there, whatever a model lacks, and the same data gives the same bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from key_value_states import gaussian, layer_of, model_of, structured, with_circle

from pqweights.inference.kv.polar_rope import RopePairs
from pqweights.quality.measure.kv_distribution import KVDistribution, distribution_of
from pqweights.quality.measure.kv_states import LayerStates
from pqweights.quality.plots.kv import plot_kv

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ALWAYS = {
    "keys and values of 512 tokens, before and after preconditioning",
    "keys: angles of the recursive polar transform",
    "values: angles of the recursive polar transform",
    *(f"level {level}" for level in range(1, 5)),
    "before",
    "after",
    "density",
    "N(0, 1)",
    "|K|",
}


def measured(*layers: LayerStates) -> KVDistribution:
    return distribution_of(model_of(*layers))


def texts(file: Path) -> set[str]:
    """Return the texts in an SVG."""
    root = ElementTree.fromstring(file.read_bytes())
    return {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}


def test_plot_names_the_strongest_pair(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    plot_kv(measured(layer_of(structured(1), gaussian(2)), layer_of(with_circle(), gaussian(3), layer=6)), file)
    shown = texts(file)
    assert shown >= ALWAYS | {"outliers: 4 and above"}
    # Keys of different sizes have larger channels than the planted circle.
    assert any(text.startswith("keys with the largest channel: layer ") for text in shown)
    plot_kv(measured(layer_of(with_circle(), gaussian(3), layer=6)), file)
    assert texts(file) >= {"keys with the largest channel: layer 6, head 1", "channels 5 and 37", "channel 5"}


def test_plot_of_a_model_without_rope(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    plot_kv(measured(layer_of(with_circle(), gaussian(2), pairs=None)), file)
    assert texts(file) >= ALWAYS | {"the model has no RoPE"}


def test_plot_of_what_has_no_angles(tmp_path: Path) -> None:
    """Keys of a size that the transform does not take, and values that are all zero."""
    file = tmp_path / "plot.svg"
    pairs = RopePairs(40, 40, interleaved=False)
    plot_kv(measured(layer_of(gaussian(1, 40), torch.zeros(2, 512, 64), pairs=pairs)), file)
    assert any(text.endswith("none were measured") for text in texts(file))
    plot_kv(measured(layer_of(torch.zeros(2, 512, 64), torch.zeros(2, 512, 64))), file)
