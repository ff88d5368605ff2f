"""Hostile inputs through the command line give one clear line, no traceback and no changed file; and full disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers import bf16, f32, folder_bytes, gaussian, read_all, small_checkpoint, write_checkpoint
from hostile import case as parts
from hostile import evaluation, masters, pickles
from hostile.case import DOWN, UP, Case, run
from hostile.generate import CASES, USAGE_ERRORS
from hostile.pickles import PAYLOAD
from pqweights_cli import output
from typer.testing import Result

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

PAIRS = [pytest.param(case, line, id=f"{case.name}-{line.split()[0]}") for case in CASES for line in case.commands]


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine progress is slow enough for a line, before the one about the input."""
    monkeypatch.setattr(output, "QUIET_SECONDS", 3600.0)


def assert_one_line(result: Result) -> str:
    """Check that a failure is one line on stderr, and return it."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    assert len(result.stderr) < 1500
    return result.stderr


@pytest.mark.parametrize(("case", "line"), PAIRS)
def test_bad_input_gives_one_clear_line_and_changes_nothing(
    case: Case, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "case"
    parts.build(case, folder)
    before = folder_bytes(tmp_path)
    monkeypatch.chdir(folder)
    result = parts.run(line, own_process=case.own_process)
    assert not (folder / PAYLOAD).exists()
    fragments = case.commands[line]
    if fragments is None:
        if result.exit_code:
            assert_one_line(result)
            assert folder_bytes(tmp_path) == before
        return
    if case.name in USAGE_ERRORS:
        assert result.exit_code == 2
        text = " ".join(result.stderr.replace("│", " ").split())
    elif line.startswith("verify") and not result.stderr:
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code == 1
        text = result.stdout
        assert text.strip()
        assert all(line.strip() and not line.startswith(" ") for line in text.splitlines())
    else:
        text = assert_one_line(result)
    for fragment in fragments:
        assert fragment in text
    assert "Traceback" not in text
    assert _but_for_named_work(folder_bytes(tmp_path), text) == before


def _but_for_named_work(files: dict[str, bytes], text: str) -> dict[str, bytes]:
    """The files without the work of a calibration, which stays if a message names its folder."""
    work = re.compile(r"case/(\.[^/]+\.calibration)/")
    return {name: data for name, data in files.items() if not ((match := work.match(name)) and match[1] in text)}


def test_cases_have_unique_names_and_commands() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) and all(case.commands for case in CASES)
    assert names >= USAGE_ERRORS


def test_undamaged_inputs_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the errors of the cases come from the damage."""
    monkeypatch.chdir(tmp_path)
    parts.write(tmp_path, parts.GOOD_SRC)
    masters.make_master(tmp_path / "a")
    parts.write(tmp_path / "b", {"src/pytorch_model.bin": pickles.saved(pickles.weights())})
    shards = {parts.SHARD_1: parts.stored({UP: parts.WEIGHT}), parts.SHARD_2: parts.stored({DOWN: parts.WEIGHT})}
    parts.write(tmp_path, evaluation.GOOD_MODEL)
    parts.write(tmp_path / "c", {**shards, parts.INDEX: {"weight_map": parts.GOOD_MAP}})
    for line in (
        "quantize src out",
        "verify a/master",
        "inspect a/master",
        "export a/master exported --target bf16",
        "quantize b/src b/out --allow-pickle",
        "quantize c/src c/out",
        evaluation.EVAL,
    ):
        result = run(line)
        assert result.exit_code == 0, (line, result.stderr, result.exception)


def test_non_finite_values_in_kept_tensors_are_copied(tmp_path: Path) -> None:
    mask = np.array([-np.inf, np.nan, np.inf, 0], dtype=np.float32)
    tensors = {UP: bf16(gaussian(4, 128)), "model.attn_bias": f32(mask), "model.norm.weight": bf16(mask)}
    write_checkpoint(tmp_path / "src", tensors)
    assert run(f"quantize {tmp_path / 'src'} {tmp_path / 'out'}").exit_code == 0
    kept = read_all(tmp_path / "out")
    assert all(kept[name][1].tobytes() == tensors[name][1].tobytes() for name in tensors.keys() - {UP})


@pytest.mark.parametrize("stored", ["x_codes", "x_norms", "x.weight_codes", "x_awq_scale"])
def test_tensor_with_a_name_like_ours_is_refused_or_survives(stored: str, tmp_path: Path) -> None:
    """A kept tensor called X_codes, without an X beside it, must not give a master that cannot be read."""
    write_checkpoint(tmp_path / "src", {UP: bf16(gaussian(4, 128)), stored: ("U8", np.arange(7, dtype=np.uint8))})
    result = run(f"quantize {tmp_path / 'src'} {tmp_path / 'out'}")
    if result.exit_code:
        assert stored in assert_one_line(result)
        return
    result = run(f"export {tmp_path / 'out'} {tmp_path / 'exported'} --target bf16")
    assert result.exit_code == 0, result.stderr
    assert read_all(tmp_path / "exported")[stored][1].tolist() == list(range(7))


def test_manifest_and_journal_that_point_outside_remove_nothing_there(tmp_path: Path) -> None:
    masters.make_master(tmp_path)
    names = ["../x", str(tmp_path / "x")]
    journal = json.dumps({"work": "", "source": {}, "outputs": names, "replaces": names})
    parts.write(tmp_path, {**parts.GOOD_SRC, "x": "mine", "master/notes.txt": "mine"})
    parts.write(tmp_path, {"out/.pqweights/journal.jsonl": f"{journal}\n"})
    for name in names:
        masters.set_json("pqweights.json", "files", name, to={"bytes": 4, "sha256": "0" * 64})(tmp_path / "master")
    for out in ("master", "out"):
        result = run(f"quantize {tmp_path / 'src'} {tmp_path / out} --overwrite")
        assert result.exit_code == 0, result.stderr
    assert (tmp_path / "x").read_text() == (tmp_path / "master/notes.txt").read_text() == "mine"


COMMAND = "quantize {0}/src {0}/out --max-shard-size 12000 --threads 2"


def assert_recovers(folder: Path, trouble: AbstractContextManager[object], says: str) -> None:
    """Check that COMMAND, in trouble, leaves only whole files, and finishes the same result without."""
    (small_checkpoint(folder / "src") / "merges.txt").write_bytes(b"m" * 64_000)
    assert run(COMMAND.format(folder)).exit_code == 0
    whole = folder_bytes(folder / "out")
    shutil.rmtree(folder / "out")
    with trouble:
        result = run(COMMAND.format(folder))
    assert says in assert_one_line(result)
    present = {name: data for name, data in folder_bytes(folder / "out").items() if not name.startswith(".pqweights")}
    assert "pqweights.json" not in present and present.items() <= whole.items()
    assert run(COMMAND.format(folder)).exit_code == 0
    assert folder_bytes(folder / "out") == whole


def failing(real: Callable[..., Any], calls_that_pass: int, code: int = errno.ENOSPC) -> Callable[..., Any]:
    """Return a system call that succeeds `calls_that_pass` times and then fails."""
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > calls_that_pass:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


@contextlib.contextmanager
def limited(byte_count: int) -> Iterator[None]:
    """Let the kernel refuse to write files that are larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = [
    *(("pwrite", n, errno.ENOSPC) for n in (0, 1, 5, 12)),
    *(("posix_fallocate", n, errno.ENOSPC) for n in (0, 1, 2)),
    *(("fsync", n, errno.EDQUOT) for n in (0, 1, 4, 7, 9)),
    *(("replace", n, errno.ENOSPC) for n in (1, 3)),
]


@pytest.mark.parametrize(("call", "passing", "code"), FULL)
def test_full_disk_gives_one_line_and_the_same_command_finishes_later(
    call: str, passing: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.checkpoint.shard_file.DIRECT_BYTES", 4096)
    trouble = mock.patch.object(os, call, failing(getattr(os, call), passing, code))
    assert_recovers(tmp_path, trouble, "disk")


@pytest.mark.parametrize("limit", [4096, 24_000, 32_768], ids=str)
def test_limit_on_file_size_gives_one_line(limit: int, tmp_path: Path) -> None:
    """In a shard, or in the companion of 64 kB."""
    assert_recovers(tmp_path, limited(limit), "disk")


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    assert_recovers(tmp_path, mock.patch.object(shutil, "disk_usage", return_value=usage), "1000 are free")


def test_read_only_folder_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint(tmp_path / "src")
    monkeypatch.setattr(os, "mkdir", failing(os.mkdir, 0, errno.EROFS))
    assert "out" in assert_one_line(run(COMMAND.format(tmp_path)))
    assert not (tmp_path / "out").exists()
