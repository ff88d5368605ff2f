"""A target that only the tests know goes through every command, with one module (this) and one entry of EXPORTS.

It writes BF16 shards that carry a label in their metadata.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import safetensors
from cards import blocks, facts
from commands import answer, done, invoke, refused
from helpers import read_all

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.convert.manifest import read_manifest
from pqweights.errors import OptionError
from pqweights.planning.layout import DEFAULT_METADATA
from pqweights.results.verify import verify
from pqweights.targets import ALIASES, EXPORTS, bf16
from pqweights.targets.integers import Assignment
from pqweights.targets.target import TRANSFORMERS, ExportSettings, ExportTarget

NAME, LABEL_KEY = "test-labelled", "test_label"
SUMMARY = "a target of the tests; --mode TEXT is written into every shard"


def read_options(options: Options) -> ExportSettings:
    if options.mode == "":
        raise OptionError("--mode: expected a text, found an empty one")
    label = options.mode or "none"
    return ExportSettings(stated={"target": NAME, "mode": label}, assign=partial(assign, label))


def assign(label: str, checkpoint: Checkpoint, name: str | None) -> Assignment:
    """BF16 shards with a label."""
    plain = bf16.read_options(Options()).assign(checkpoint, name)
    return replace(plain, metadata={**DEFAULT_METADATA, LABEL_KEY: label})


def load_section(made_by: Mapping[str, Any], model: Any) -> list[str]:
    return [f"Every shard has the label {made_by['mode']}."]


TARGET = ExportTarget(
    name=NAME,
    runtime=TRANSFORMERS,
    tags=("test-tag", "another-tag"),
    options=("mode",),
    read_options=read_options,
    check=lambda checkpoint: None,
    load_section=load_section,
    library="test-library",
    choices={"first label": (Options(mode="first"), 16)},
)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPORTS, NAME, SUMMARY)
    monkeypatch.setitem(sys.modules, f"pqweights.targets.{NAME}", sys.modules[__name__])


@pytest.fixture
def labelled(base: Path, tmp_path: Path) -> Path:
    """The export of a Llama with the label "first", in several shards."""
    shards = ("--max-shard-size", "500kB")
    done("export", families.master(base, "llama"), tmp_path / "labelled", "-t", NAME, "--mode", "first", *shards)
    return tmp_path / "labelled"


def test_result_is_what_the_target_says_in_every_command(labelled: Path, base: Path) -> None:
    found, expected = read_all(labelled), read_all(families.exported(base, "llama", "bf16"))
    assert found.keys() == expected.keys()
    assert all(found[name][1].tobytes() == expected[name][1].tobytes() for name in expected)
    shards = list(labelled.glob("*.safetensors"))
    assert len(shards) > 2
    for path in shards:
        with safetensors.safe_open(path, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt", LABEL_KEY: "first"}
    about = answer("inspect", labelled)
    assert (about["kind"], about["target"], about["mode"]) == ("export", NAME, "first")
    card = done("card", labelled, "--print", "--repo", "someone/out").stdout
    assert facts(card)["library_name"] == "test-library"
    assert facts(card)["tags"] == ["pqweights", "quantized", "test-tag", "another-tag"]
    assert "## Load\n\nEvery shard has the label first.\n\n" in card and blocks(card, "python") == []
    assert f"This is an export for the target `{NAME}`, mode `first`." in card
    path = labelled / "pqweights.json"
    for key in ("label", "basis"):
        changed = Path(shutil.copytree(labelled, labelled.with_name(key)))
        (changed / path.name).write_text(path.read_text().replace('"mode":', f'"{key}":'))
        (said,) = verify(changed, threads=1).problems
        assert said.startswith("pqweights.json: expected") and said.endswith(f", found '{key}'")


def test_options_have_defaults_and_are_checked_by_the_target(base: Path, tmp_path: Path) -> None:
    export = ("export", families.master(base, "llama"), tmp_path / "out", "-t")
    for target, option, value in ((NAME, "--mode", ""), (NAME, "--bits", "4"), ("bf16", "--mode", "a")):
        line = refused(*export, target, option, value, code=2)
        assert option in line and (target in line or not value)
    done(*export, NAME)
    assert read_manifest(tmp_path / "out").made_by == {"target": NAME, "mode": "none"}


def test_its_formats_are_proposed_for_a_memory(base: Path) -> None:
    found = answer("plan", families.model(base, "llama"), "--memory", "1TB", "--runtime", "vllm")["memory"]["proposals"]
    by_target = {entry["target"]: entry for entry in found}
    ours, plain = by_target[NAME], by_target["bf16"]
    assert (ours["format"], ours["options"]) == ("first label", {"mode": "first"})
    assert (ours["weight_bytes"], ours["memory_bytes"]) == (plain["weight_bytes"], plain["memory_bytes"])


def test_help_and_errors_list_the_target(tmp_path: Path) -> None:
    assert f"{NAME}: a target of the tests" in " ".join(invoke("export", "--help").output.split())
    line = refused("export", tmp_path, tmp_path / "out", "-t", "onnx", code=2)
    assert f"onnx: expected {', '.join([*EXPORTS, *ALIASES])}" in line and NAME in line
