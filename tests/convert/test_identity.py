"""What makes two runs the same: everything that decides bytes, the version that makes them, and no prose."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from converting import SHARD_BYTES, command, interrupt, marks
from helpers import folder_bytes, run_command

from pqweights.convert import manifest
from pqweights.convert.manifest import read_manifest
from pqweights.errors import OutputError
from pqweights.planning.decisions import RatePlanner
from pqweights.results.verify import verify

RECIPE = """
name: ours
description: {}
codec: hadamard-lloyd-max
bits: 5
rules:
  - name: "*.down_proj.weight"
    bits: 6
    reason: {}
"""


def test_interrupted_run_is_continued_and_a_finished_one_left_alone_in_other_words(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that gives other reasons makes the same bytes."""
    out, plan = tmp_path / "out", RatePlanner.planned
    with monkeypatch.context() as patch:
        patch.setattr(RatePlanner, "planned", lambda *given: [t._replace(reason="because") for t in plan(*given)])
        interrupt(patch, command(source), out)
    assert run_command(command(source), out).resumed == 5
    assert folder_bytes(out) == undisturbed
    monkeypatch.setattr(RatePlanner, "planned", lambda *given: [t._replace(reason="because") for t in plan(*given)])
    assert run_command(command(source), out).already_done


def test_recipe_in_other_words_is_the_same(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, first, second = tmp_path / "out", tmp_path / "a.yaml", tmp_path / "b.yaml"
    for path, words in ((first, "first words"), (second, "others, and more")):
        path.write_text(RECIPE.format(words, words))
    interrupt(monkeypatch, command(source, recipe=str(first)), out)
    assert run_command(command(source, recipe=str(second)), out).resumed == 5
    assert run_command(command(source, recipe=str(first)), out).already_done
    with raises(OutputError, out):
        run_command(command(source, recipe="q5"), out)


def test_result_of_a_version_with_other_bytes_does_not_count_as_done(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "SAME_BYTES_SINCE", "0.2.0")
        run_command(command(source), out)
        patch.setattr(manifest, "SAME_BYTES_SINCE", "0.9.0")
        with raises(OutputError, "0.2.0", "0.9"):
            run_command(command(source), out)
        run_command(command(source, overwrite=True), out)
        assert run_command(command(source), out).already_done
        assert read_manifest(out).same_bytes_since == "0.9.0"
        assert "same_bytes_since" not in read_manifest(out).made_by
        assert verify(out, threads=1).ok
    with raises(OutputError, "0.9.0", manifest.SAME_BYTES_SINCE):
        run_command(command(source), out)
    run_command(command(source, overwrite=True), out)
    assert folder_bytes(out) == undisturbed


# Options of a quantize and of exports, each of which changes bytes.
MASTERS: list[dict[str, Any]] = [{}, {"recipe": "q4"}, {"max_shard_bytes": 30_000}]
VLLM: list[dict[str, Any]] = [{}, {"bits": 8}, {"format": "int8"}, {"qparams": "minmax"}]


def test_key_of_shards_changes_with_everything_that_changes_their_bytes(
    source: Path, own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with nothing else: runs with other options never mix their shards, and the same run finds its own."""
    outs, master = (tmp_path / str(number) for number in itertools.count()), tmp_path / "master"

    def key(work: dict[str, Any]) -> str:
        out = next(outs)
        interrupt(monkeypatch, work, out, shards=1)
        return marks(out)[0].parent.name

    run_command(command(source), master)
    export = {"export": str(master), "max_shard_bytes": SHARD_BYTES}
    originals = [{"original": str(path)} for path in (source, own_source)]  # the same but for their times
    works = [command(source, **other) for other in MASTERS] + [command(own_source)]
    works += [export | {"target": "vllm"} | other for other in (*VLLM, *originals)]
    works += [export | {"target": "bf16", "dtype": dtype} for dtype in ("bf16", "source")]
    keys = [key(work) for work in works]
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "SAME_BYTES_SINCE", "0.9.0")
        keys.append(key(command(source)))
    assert len(set(keys)) == len(keys)
    assert [key(command(source, **same)) for same in ({"strict": True}, {"overwrite": True})] == keys[:1] * 2
