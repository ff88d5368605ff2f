"""A target that only the tests know goes through every command, with one module and one entry of EXPORTS."""

from __future__ import annotations

import shutil
from pathlib import Path

import families
import pytest
import safetensors
from added_target import ENTRY, LABEL_KEY, NAME
from cards import blocks, facts
from commands import answer, done, invoke, refused
from helpers import read_all

from pqweights.exports import ALIASES, EXPORTS
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.verify import verify

SHARDS = ("--max-shard-size", "500kB")


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPORTS, NAME, ENTRY)


@pytest.fixture(scope="module")
def labelled(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a Llama with the label "first", in several shards."""
    out = tmp_path_factory.mktemp("labelled") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPORTS, NAME, ENTRY)
        done("export", families.master(base, "llama"), out, "--target", NAME, "--mode", "first", *SHARDS)
    return out


def test_shards_hold_the_bf16_tensors_and_the_label(labelled: Path, base: Path) -> None:
    found, expected = read_all(labelled), read_all(families.exported(base, "llama", "bf16"))
    assert found.keys() == expected.keys()
    assert all(found[name][1].tobytes() == expected[name][1].tobytes() for name in expected)
    shards = list(labelled.glob("*.safetensors"))
    assert len(shards) > 2
    for path in shards:
        with safetensors.safe_open(path, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt", LABEL_KEY: "first"}


def test_option_has_a_default_and_is_checked_by_the_target(base: Path, tmp_path: Path) -> None:
    master = families.master(base, "llama")
    done("export", master, tmp_path / "out", "-t", NAME)
    assert read_manifest(tmp_path / "out").made_by == {"target": NAME, "mode": "none"}
    line = refused("export", master, tmp_path / "other", "-t", NAME, "--mode", "", code=2)
    assert line == "error: --mode: expected a text, found an empty one\n"


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (NAME, ("--bits", "4"), f"--bits: the target {NAME} does not take this option"),
        (NAME, ("--packing", "plain"), f"--packing: the target {NAME} does not take this option"),
        ("bf16", ("--mode", "a"), "--mode: the target bf16 does not take this option"),
    ],
)
def test_option_that_a_target_lacks_exits_with_2(
    target: str, options: tuple[str, ...], message: str, base: Path, tmp_path: Path
) -> None:
    master = families.master(base, "llama")
    assert refused("export", master, tmp_path / "out", "-t", target, *options, code=2) == f"error: {message}\n"
    assert not (tmp_path / "out").exists()


def test_help_and_errors_list_the_target(tmp_path: Path) -> None:
    assert f"{NAME}: a target of the tests" in " ".join(invoke("export", "--help").output.split())
    line = refused("export", tmp_path, tmp_path / "out", "-t", "onnx", code=2)
    assert line == f"error: --target onnx: expected {', '.join([*EXPORTS, *ALIASES])}\n" and NAME in line


@pytest.mark.parametrize("key", ["label", "basis"])
def test_verify_finds_a_key_that_the_target_does_not_write(key: str, labelled: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(labelled, tmp_path / "changed"))
    path = changed / "pqweights.json"
    path.write_text(path.read_text().replace('"mode":', f'"{key}":'))
    problems = verify(changed, threads=1).problems
    assert problems == (f"pqweights.json: expected master_errors, mode, original_fingerprint, target, found '{key}'",)


def test_inspect_shows_target_and_options(labelled: Path) -> None:
    found = answer("inspect", labelled)
    assert (found["kind"], found["target"], found["mode"]) == ("export", NAME, "first")
    assert "\nexport: " in done("inspect", labelled).stdout


def test_card_has_the_load_section_tags_and_library_of_the_target(labelled: Path, base: Path) -> None:
    text = done("card", labelled, "--print", "--repo", "someone/out").stdout
    front = facts(text)
    assert front["library_name"] == "test-library"
    assert front["tags"] == ["pqweights", "quantized", "test-tag", "another-tag"]
    assert "## Load\n\nEvery shard has the label first.\n\n" in text
    assert "from_pretrained(" in blocks(text, "python")[0]
    assert f"This is an export for the target `{NAME}`, mode `first`." in text
    assert f"`{NAME}`" in done("card", families.master(base, "llama"), "--print").stdout
