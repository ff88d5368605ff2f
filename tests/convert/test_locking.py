"""Two runs into one folder: the second is refused while the first one works."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
from commands import raises
from converting import SHARD_BYTES, command
from helpers import folder_bytes, run_command

from pqweights.errors import OutputError


@pytest.fixture
def holder(source: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in another process that has finished two shards into tmp_path/out and waits."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from helpers import run_command, small_chunks
from pqweights.convert.run import Run
small_chunks()
add, seen = Run.add, []
def stand_still(self, shard, *given):
    if len(seen) == 2:
        print("holding", flush=True)
        sys.stdin.read()
    seen.append(shard)
    add(self, shard, *given)
Run.add = stand_still
run_command({"quantize": sys.argv[2], "max_shard_bytes": int(sys.argv[3])}, Path(sys.argv[4]))
"""
    arguments = [str(Path(helpers.__file__).parent), str(source), str(SHARD_BYTES), str(tmp_path / "out")]
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def settled(folder: Path) -> dict[str, bytes]:
    """The files of a waiting run, once its threads have finished the chunks that they were given."""
    before: dict[str, bytes] = {}
    while (now := folder_bytes(folder)) != before:
        before = now
        time.sleep(0.2)
    return before


def test_second_run_is_refused_while_the_first_works(
    holder: subprocess.Popen[str], source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    before = settled(tmp_path / "out")
    for options in ({}, {"recipe": "q4"}, {"overwrite": True}, {"overwrite": True, "recipe": "q4"}):
        with raises(OutputError, "another run"):
            run_command(command(source, **options), tmp_path / "out")
        assert folder_bytes(tmp_path / "out") == before
    holder.communicate()  # closes its stdin, so that it continues
    assert holder.returncode == 0
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_lock_of_a_killed_run_does_not_block(
    holder: subprocess.Popen[str], source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "out/.pqweights/lock").exists()
    assert run_command(command(source), tmp_path / "out").resumed == 5
    assert folder_bytes(tmp_path / "out") == undisturbed
