"""Packed weights are decoded in the threads that torch has now, and in processes that were forked from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import bf16, gaussian, run_command, write_checkpoint
from snippets import run_snippet

from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.runtime.loading import packed_rows
from pqweights.runtime.loading.packed import PackedTensor, pack
from pqweights.runtime.loading.packed_rows import share

ROWS, COLUMNS = 512, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A master of one weight."""
    made = tmp_path_factory.mktemp("threads")
    source = write_checkpoint(made / "model", {"model.up.weight": bf16(gaussian(ROWS, COLUMNS))})
    run_command({"quantize": str(source)}, made / "master")
    return made / "master"


@pytest.fixture(autouse=True)
def small_chunks_and_the_threads_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_rows, "CHUNK_WEIGHTS", 8 * COLUMNS)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def opened(folder: Path) -> PackedTensor:
    (weight,) = open_local(folder).tensors
    assert isinstance(weight, EncodedTensor)
    return pack(weight, torch.bfloat16)


def test_bytes_are_the_same_for_any_number_of_threads(folder):
    weight, found = opened(folder), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(weight.decode())
    assert all(torch.equal(each, found[0]) for each in found)


def test_error_of_the_first_chunk_is_raised(folder):
    weight = opened(folder)
    torch.set_num_threads(3)

    def work(start: int, stop: int) -> None:
        if start >= ROWS // 2:
            raise ValueError(f"row {start}")

    for _ in range(20):
        with pytest.raises(ValueError, match=f"row {ROWS // 2}$"):
            share(work, weight.matrices[0], device=torch.device("cpu"))


FORKED = """
import os, signal, sys
from pathlib import Path
import torch
import test_packed_threads as t
t.packed_rows.CHUNK_WEIGHTS = 8 * t.COLUMNS
torch.set_num_threads(2)
weight = t.opened(Path("."))
x = torch.ones(1, t.COLUMNS, dtype=torch.bfloat16)
def computed():
    # Compared as bytes, because torch itself waits for such threads where it compares large tensors.
    tensors = weight.decode(), torch.nn.functional.linear(x, weight)
    return [each.view(torch.uint8).numpy().tobytes() for each in tensors]
before = computed()
child = os.fork()
if not child:
    signal.alarm(60)  # a process that waits for threads that it does not have is ended
    os._exit(0 if computed() == before else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_forked_process_decodes_and_multiplies(folder, tmp_path):
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{FORKED}"
    assert run_snippet(code, folder, tmp_path / "log") == 0, (tmp_path / "log").read_text()
