"""Folding a model on the Hub: the bytes of a local run, also where norms lie far from what reads them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from folding_models import llama
from helpers import folder_bytes
from hub_cases import SOURCE, Client, files_of, stalled
from loopback_hub import LoopbackHub

from pqweights.checkpoint.names import FACTORS_FILE, WORK_FOLDER

# The official client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

LINKS = 13
STALL_AT = 20_000
FOLD = ("--fold", "equalize", "--threads", "2")


def check_same(master: Path, expected: Path) -> None:
    """Check that masters are the same but for the name of the repository."""
    files, others = folder_bytes(master), folder_bytes(expected)
    tensors, other_tensors = (json.loads(part.pop("pqweights.json"))["tensors"] for part in (files, others))
    assert files == others and tensors == other_tensors


@pytest.mark.parametrize("options", [[], ["--low-disk"]], ids=["cache", "low-disk"])
def test_norms_in_other_files_than_their_readers_are_found(
    options: list[str], hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    """A plan lists what is folded without reading weights."""
    folder = llama(tmp_path / "source", shards=6)
    hub.commit(SOURCE, files_of(folder))
    planned = json.loads(client.well("plan", SOURCE, "--fold", "equalize", "--json").stdout)
    assert len(planned["fold"]["vectors"]) == LINKS
    assert sum(request.bytes_sent for request in hub.requests) < planned["hub"]["source_bytes"] / 2
    client.well("quantize", folder, tmp_path / "expected", *FOLD)
    client.well("quantize", SOURCE, tmp_path / "out", *FOLD, *options)
    check_same(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize(("after", "lines"), [(1, range(1, LINKS)), (2, range(LINKS, LINKS + 1))])
def test_killed_low_disk_run_continues(
    after: int, lines: range, hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    """Killed while the pass that measures fetches a shard, and while the pass that quantizes does."""
    folder, out = llama(tmp_path / "source", shards=6), tmp_path / "out"
    hub.commit(SOURCE, files_of(folder))
    client.well("quantize", folder, tmp_path / "expected", *FOLD)
    command = ["quantize", SOURCE, out, "--low-disk", *FOLD]
    with stalled(hub, client.home, command, shard=4, at=STALL_AT, after=after):
        pass
    (factors,) = (out / WORK_FOLDER).glob(f"*/{FACTORS_FILE}")
    assert factors.read_bytes().count(b"\n") in lines
    sent = len(hub.requests)
    client.well(*command)
    # A request for the header of each shard, and one for each pass that needs it again.
    gets = [request.path for request in hub.requests[sent:] if request.method == "GET"]
    again = Counter(path.rpartition("/")[2] for path in gets)
    counts = [again[f"model-0000{shard}-of-00006.safetensors"] for shard in (2, 3, 4, 5)]
    if after == 1:
        assert counts == [2, 2, 3, 3]
    else:  # whether an earlier one was deleted depends on how far the threads had come
        assert set(counts[:2]) <= {1, 2} and counts[2:] == [2, 2]
    check_same(out, tmp_path / "expected")


def test_folded_master_is_pushed_and_read_again(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    folder = llama(tmp_path / "source")
    for arguments in (
        ["quantize", str(folder), str(tmp_path / "master"), "--fold", "equalize"],
        ["push", str(tmp_path / "master"), "me/master"],
        ["verify", "me/master"],
        ["export", "me/master", str(tmp_path / "out"), "--target", "vllm", "--source", str(folder)],
    ):
        client.well(*arguments)
