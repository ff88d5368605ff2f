"""`pqweights inspect --kv`: its tables, its JSON and its plot, for a model with a planted pair of outliers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import answer, done, refused
from families import ATTENTION, FAMILIES, TEXT, Family, build

from pqweights.inference.runtimes.texts import read_text
from pqweights.quality.measure.kv_distribution import distribution_of
from pqweights.quality.measure.kv_states import read_states
from pqweights.quality.options import StatesOptions

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WORDS = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))
LLAMA = TEXT | {"attention_bias": True, "num_hidden_layers": 2}
TOKENS = 200
LAYER, HEAD, PAIR = 1, 0, 7  # of 32 pairs, this one turns by 0.13 for each token


def plant(model: Any) -> None:
    """Make one pair of key channels large, by a bias that RoPE turns around a circle."""
    with torch.no_grad():
        model.model.layers[LAYER].self_attn.k_proj.bias[64 * HEAD + PAIR] = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inspect-kv")
    build(Family("LlamaForCausalLM", "LlamaConfig", LLAMA, ATTENTION), made / "model", plant)
    (made / "text.txt").write_text(WORDS)
    return made


def asked(folder: Path, *options: object) -> tuple[object, ...]:
    given = ("inspect", folder / "model", "--kv", "--text", folder / "text.txt", "--max-tokens", TOKENS)
    return (*given, *options)


def test_tables(folder: Path) -> None:
    shown = done(*asked(folder)).stdout
    lines = shown.splitlines()
    assert lines[0] == f"{TOKENS} tokens, float32, computed by transformers"
    for name in ("layer 0 keys", "layer 1 values", "all keys", "all values"):
        coordinates, angles = (line for line in lines if line.startswith(f"{name} "))
        assert len(re.findall(r"\d\.\d+", coordinates)) == 7 and len(re.findall(r"\d\.\d{4}", angles)) == 8
    (planted,) = (line.split() for line in lines if line.startswith("layer 1  "))
    assert planted[2:5] == ["0", "7,", "39"] and float(planted[7]) < 0.1
    assert "2 of 256 key channels are outliers" in shown and "1 pair with outliers: 0 with one, 1 with two" in shown


def test_json_is_what_the_library_measures(folder: Path) -> None:
    found = answer(*asked(folder))
    text = read_text(folder / "text.txt")
    assert found == distribution_of(read_states(folder / "model", text, StatesOptions(max_tokens=TOKENS))).to_json()
    assert found["tokens"] == TOKENS and len(found["layers"]) == 4
    assert {"before", "after", "norm_cv", "vectors", "sizes"} <= found["keys"].keys() == found["values"].keys()
    (pair,) = found["key_channels"][LAYER]["outlier_pairs"]
    assert (pair["layer"], pair["head"], pair["channels"]) == (LAYER, HEAD, [PAIR, PAIR + 32])
    assert pair["outliers"] == 2 and pair["radius_cv"] < 0.1 < 0.4 < min(pair["coordinate_cvs"])
    assert found["key_channels"][0]["outlier_pairs"] == []


def test_plot_beside_the_tables(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = done(*asked(folder, "--plot", tmp_path / "plot.svg"))
    assert shown.stdout == done(*asked(folder)).stdout
    drawn = (tmp_path / "plot.svg").read_text()
    assert "channels 7 and 39" in drawn and "layer 1, head 0" in drawn


def test_model_without_rope(tmp_path: Path) -> None:
    build(FAMILIES["gpt2"], tmp_path / "model")
    (tmp_path / "text.txt").write_text(WORDS)
    shown = done("inspect", tmp_path / "model", "--kv", "--text", tmp_path / "text.txt").stdout
    assert shown.startswith("128 tokens") and "the model has no RoPE" in shown


def test_sizes_without_angles_have_no_table_of_them(tmp_path: Path) -> None:
    family = Family("LlamaForCausalLM", "LlamaConfig", TEXT | {"head_dim": 24}, ATTENTION)
    build(family, tmp_path / "model")
    (tmp_path / "text.txt").write_text(WORDS)
    shown = done("inspect", tmp_path / "model", "--kv", "--text", tmp_path / "text.txt").stdout
    assert "\nangles" not in shown and "vectors of 24 coordinates in random directions" in shown


def test_misplaced_option_exits_as_a_wrong_option(folder: Path) -> None:
    assert "--text: means nothing without --kv" in refused("inspect", folder, "--text", folder / "text.txt", code=2)
    assert "--threads: means nothing with --kv" in refused(*asked(folder, "--threads", 2), code=2)


@pytest.mark.parametrize("package", ["torch", "transformers", "matplotlib"])
def test_missing_packages_are_named(package: str, folder: Path, tmp_path: Path) -> None:
    command = ["pqweights", *map(str, asked(folder, "--plot", tmp_path / "plot.svg"))]
    without = f"import sys; sys.modules[{package!r}] = None; sys.argv = {command!r}"
    code = f"{without}; from pqweights_cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert re.search(rf"needs? {package}: pip install", ended.stderr)
