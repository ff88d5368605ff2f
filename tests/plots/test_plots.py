"""The plots of inspect: readable files with every series, always the same bytes, no change to matplotlib's settings."""

from __future__ import annotations

import builtins
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import numpy as np
import pytest
from commands import invoke

from pqweights.errors import MissingDependencyError, OutputError
from pqweights.planning.roles import ROLES
from pqweights.quality.measure.distribution import measure_distribution
from pqweights.quality.plots.distribution import plot_distribution
from pqweights.quality.plots.figure import check_plot_file
from pqweights.quality.plots.layers import STYLES, layer_of, plot_inspection
from pqweights.rewrite.results.inspect import inspect

matplotlib = pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

RECIPE = """
bits: 4
rules:
  - {name: "*.down_proj.weight", bits: 6}
  - {role: lm_head, codec: hadamard-trellis, bits: 8}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"model.embed_tokens.weight": helpers.bf16(helpers.gaussian(100, 130))}
    for layer in range(3):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": helpers.bf16(helpers.gaussian(128, 128, seed=layer)),
            f"{name}.self_attn.k_proj.weight": helpers.bf16(helpers.gaussian(64, 128, seed=layer + 9)),
            f"{name}.mlp.down_proj.weight": helpers.bf16(helpers.gaussian(64, 256, seed=layer)),
            f"{name}.mlp.gate.weight": helpers.bf16(helpers.gaussian(8, 128, seed=layer)),
            f"{name}.input_layernorm.weight": helpers.bf16(np.ones(128)),
        }
    tensors["lm_head.weight"] = helpers.bf16(helpers.gaussian(100, 128))
    tensors["score.weight"] = helpers.bf16(np.zeros((64, 128)))  # an error of 0, which a logarithmic axis cannot show
    return helpers.write_checkpoint(
        tmp_path_factory.mktemp("source") / "model", tensors, config={"model_type": "llama"}
    )


@pytest.fixture(scope="module")
def master(source: Path) -> Path:
    recipe, out = source.parent / "mine.yaml", source.parent / "master"
    recipe.write_text(RECIPE)
    assert invoke("quantize", source, out, "--recipe", recipe).exit_code == 0
    return out


def texts(file: Path) -> set[str]:
    """Return the texts in an SVG."""
    root = ElementTree.fromstring(file.read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}


def is_png(file: Path) -> bool:
    return file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_of_a_master(master: Path, tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    plot_inspection(inspect(master), file)
    found = texts(file)
    assert {"attention", "mlp", "embedding", "lm_head", "linear", "router"} <= found
    assert not {"norm", "bias", "expert"} & found
    assert {"relative MSE", "bits per weight", "layer", "none", "0", "1", "2"} <= found


def test_plot_of_an_export_without_errors(master: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "plain", tmp_path / "plot.svg"
    assert invoke("export", master, out, "--target", "bf16").exit_code == 0
    plot_inspection(inspect(out), file)
    assert {"no errors are known of these tensors", "attention", "bits per weight"} <= texts(file)


def test_plot_of_an_integer_export_shows_errors_against_the_original(
    source: Path, master: Path, tmp_path: Path
) -> None:
    """The errors are computed, or measured with --source."""
    for number, options in enumerate(([], ["--source", source])):
        out, file = tmp_path / f"integers{number}", tmp_path / f"plot{number}.svg"
        assert invoke("export", master, out, "--target", "torchao-int4", *options).exit_code == 0
        plot_inspection(inspect(out), file)
        assert {"relative MSE against the original", "mlp"} <= texts(file)


def test_plot_of_an_integer_export_falls_back_to_errors_against_the_master(master: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "integers", tmp_path / "plot.svg"
    assert invoke("export", master, out, "--target", "torchao-int4").exit_code == 0
    manifest = json.loads((out / "pqweights.json").read_text())
    for tensor in manifest["tensors"]:
        if tensor["action"] == "integer":
            tensor["total_mse"] = None
    (out / "pqweights.json").write_text(json.dumps(manifest))
    plot_inspection(inspect(out), file)
    assert "relative MSE against the master" in texts(file)


def test_plots_without_quantized_weights(tmp_path: Path) -> None:
    source = helpers.write_checkpoint(tmp_path / "model", {"model.norm.weight": helpers.bf16(np.ones(128))})
    plot_distribution(measure_distribution(source), tmp_path / "distribution.svg")
    assert invoke("quantize", source, tmp_path / "out").exit_code == 0
    plot_inspection(inspect(tmp_path / "out"), tmp_path / "inspection.svg")
    assert "no errors are known of these tensors" in texts(tmp_path / "inspection.svg")


def test_plots_do_not_depend_on_matplotlib_settings_and_do_not_change_them(
    source: Path, master: Path, tmp_path: Path
) -> None:
    inspection, distribution = inspect(master), measure_distribution(source)
    files: dict[int, list[bytes]] = {}
    for number, grid in enumerate((False, True)):
        with matplotlib.rc_context({"axes.grid": grid, "font.size": 8 + number, "svg.hashsalt": str(number)}):
            before = dict(matplotlib.rcParams)
            plot_inspection(inspection, tmp_path / f"i{number}.svg")
            plot_distribution(distribution, tmp_path / f"d{number}.png")
            assert dict(matplotlib.rcParams) == before
        files[number] = [(tmp_path / f"{name}").read_bytes() for name in (f"i{number}.svg", f"d{number}.png")]
    assert files[0] == files[1]
    assert b"<dc:date>" not in files[0][0]
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_commands_write_plots(source: Path, master: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b.SVG"):
        shown = invoke("inspect", master, "--plot", tmp_path / name)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (0, invoke("inspect", master).stdout, "")
    assert is_png(tmp_path / "a.png") and "attention" in texts(tmp_path / "b.SVG")
    answered = invoke("inspect", source, "--distribution", "--plot", tmp_path / "e.svg", "--json")
    found = json.loads(answered.stdout)
    shown = texts(tmp_path / "e.svg")
    assert {"before rotation", "after rotation", "N(0, 1)", "histogram", "quantile-quantile plot"} <= shown
    assert found["recipe"] == "q5" and any(str(found["sampled_weights"]) in text for text in shown)


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "svg", "absent/plot.svg", "folder.svg", "file/plot.png"])
def test_invalid_places_for_a_plot_are_refused(name: str, source: Path, master: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for arguments in ([master], [source, "--distribution"]):
        refused = invoke("inspect", *arguments, "--plot", tmp_path / name)
        assert refused.exit_code == 1 and refused.stdout == ""
        assert len(refused.stderr.splitlines()) == 1 and name in refused.stderr


def test_plot_that_cannot_be_written_is_refused(master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some errors show only when the plot is written, for example a full disk."""
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(OutputError, match="cannot be written"):
        check_plot_file(tmp_path / "plot.svg")
    monkeypatch.undo()

    def no_space(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(OutputError, match=r"plot\.svg: cannot be written: No space"):
        plot_inspection(inspect(master), tmp_path / "plot.svg")


def test_missing_matplotlib_is_reported(
    master: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"pip install 'matplotlib>="):
        check_plot_file(tmp_path / "plot.svg")
    for arguments in ([master], [source, "--distribution"]):
        refused = invoke("inspect", *arguments, "--plot", tmp_path / "plot.svg")
        assert refused.exit_code == 1 and "pip install" in refused.stderr
    assert invoke("inspect", master).exit_code == 0


def test_layer_of_a_tensor() -> None:
    names = {
        "model.layers.17.mlp.up_proj.weight": 17,
        "h.0.attn.c_attn.weight": 0,
        "model.layers.3.mlp.experts.200.w1.weight": 3,
        "lm_head.weight": None,
        "model.embed_tokens.weight": None,
        "blocks.1234567.weight": None,
        "conv1.weight": None,
        "7.weight": 7,
    }
    assert {name: layer_of(name) for name in names} == names


def test_each_role_quantized_by_default_has_its_own_style() -> None:
    assert {role.name for role in ROLES.values() if not role.structural} == STYLES.keys()
    assert (
        len({colour for colour, _ in STYLES.values()}) == len({marker for _, marker in STYLES.values()}) == len(STYLES)
    )


def test_plot_of_an_unusual_manifest(master: Path, tmp_path: Path) -> None:
    """The manifest has a role that this version does not know, and a very large number of layers."""
    manifest = json.loads((master / "pqweights.json").read_text())
    quantized = next(t for t in manifest["tensors"] if t["action"] == "quantize")
    manifest["tensors"] = [
        {**quantized, "name": f"model.layers.{layer}.weight", "role": role}
        for layer, role in ((0, "mlp"), (5000, "novel"), (999_999, "conv"))
    ]
    out = tmp_path / "out"
    out.mkdir()
    (out / "pqweights.json").write_text(json.dumps(manifest))
    plot_inspection(inspect(out), tmp_path / "plot.svg")
    assert {"mlp", "novel", "conv"} <= texts(tmp_path / "plot.svg")


def report_of(models: list[str]) -> Any:
    """A report of models that are close to each other."""
    rows = [
        SimpleNamespace(
            model=model,
            kv_cache=None,
            scores=SimpleNamespace(perplexity=None, divergence=SimpleNamespace(mean=(0.01 + 1e-5 * number, 1e-3))),
            size=SimpleNamespace(bits_per_parameter=5.2 + 1e-3 * number),
        )
        for number, model in enumerate(models)
    ]
    return SimpleNamespace(rows=rows, reference=object(), settings=SimpleNamespace(scored_tokens=192, window=128))


@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_labels_of_models_do_not_overlap(count: int, tmp_path: Path) -> None:
    from pqweights.quality.plots import evaluation

    names = [f"run-{number % 2}/a-rather-long-name-of-a-master-in-a-folder-{number // 2}" for number in range(count)]
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        draw = evaluation.draw_evaluation
        patched.setattr(evaluation, "draw_evaluation", lambda report, drawn: found.append(draw(report, drawn) or drawn))
        evaluation.plot_evaluation(report_of(names), tmp_path / "plot.png")
    (drawn,) = found
    drawn.draw_without_rendering()
    (axes,), (legend,) = drawn.axes, drawn.legends
    labels = [text.get_window_extent() for text in legend.get_texts()]
    assert len({text.get_text() for text in legend.get_texts()}) == len(labels) == count
    boxes = [*labels, axes.get_window_extent()]
    for number, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[number + 1 :])
        assert drawn.bbox.contains(*one.min) and drawn.bbox.contains(*one.max)
    assert axes.get_window_extent().width > 0.5 * drawn.bbox.width
    looks = {(line.get_color(), line.get_marker()) for line, _, _ in axes.containers}
    assert len(looks) == count
