"""Folding a model on the Hub: the bytes of a local run, also where norms lie far from what reads them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from folding_models import llama
from helpers import folder_bytes
from hub_cases import RUN, SOURCE, Client, files_of
from loopback_hub import Fault, LoopbackHub, Stall

from pqweights.checkpoint.names import FACTORS_FILE, WORK_FOLDER

pytest.importorskip("huggingface_hub")
# The official client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

LINKS = 13
STALL_AT = 20_000


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The files of a master, without the manifest, which names the repository."""
    return {name: data for name, data in folder_bytes(folder).items() if name != "pqweights.json"}


def tensors_of(folder: Path) -> object:
    return json.loads((folder / "pqweights.json").read_bytes())["tensors"]


@pytest.mark.parametrize("options", [[], ["--low-disk"]], ids=["cache", "low-disk"])
def test_norms_in_other_files_than_their_readers_are_found(
    options: list[str], hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "source", shards=6)
    hub.commit(SOURCE, files_of(folder))
    fold = ["--fold", "equalize", "--threads", "2"]
    client.well("quantize", str(folder), str(tmp_path / "expected"), *fold)
    client.well("quantize", SOURCE, str(tmp_path / "out"), *fold, *options)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "expected")
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "expected")


def kill_at(hub: LoopbackHub, home: Path, shard: int, *, after: int, command: list[str]) -> None:
    """Run a command until a request for a shard stalls, the one after the first `after`, and kill it there."""
    hub.inject(Fault(Stall(100, at=STALL_AT), "GET", rf"resolve/.*-0000{shard}-of", after=after))
    process = subprocess.Popen([sys.executable, str(RUN), *command], env=hub.environment(home), stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not any(request.fault and request.bytes_sent == STALL_AT for request in hub.requests):
            assert time.monotonic() < end and process.poll() is None, "no request stalled"
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
        hub.clear_faults()


@pytest.mark.parametrize(("after", "lines"), [(1, range(1, LINKS)), (2, range(LINKS, LINKS + 1))])
def test_killed_low_disk_run_continues(
    after: int, lines: range, hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    """Killed while the pass that measures fetches a shard, and while the pass that quantizes does."""
    folder, home, out = llama(tmp_path / "source", shards=6), tmp_path / "home", tmp_path / "out"
    hub.commit(SOURCE, files_of(folder))
    fold = ["--fold", "equalize", "--threads", "2"]
    client.well("quantize", str(folder), str(tmp_path / "expected"), *fold)
    command = ["quantize", SOURCE, str(out), "--low-disk", "--quiet", *fold]
    kill_at(hub, home, 4, after=after, command=command)
    (factors,) = (out / WORK_FOLDER).glob(f"*/{FACTORS_FILE}")
    measured = factors.read_bytes()
    assert measured.count(b"\n") in lines
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
    assert bytes_of(out) == bytes_of(tmp_path / "expected")
    assert tensors_of(out) == tensors_of(tmp_path / "expected")


def test_folded_master_is_pushed_and_read_again(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    folder = llama(tmp_path / "source")
    for arguments in (
        ["quantize", str(folder), str(tmp_path / "master"), "--fold", "equalize"],
        ["push", str(tmp_path / "master"), "me/master"],
        ["verify", "me/master"],
        ["export", "me/master", str(tmp_path / "out"), "--target", "vllm", "--source", str(folder)],
    ):
        client.well(*arguments)


def test_plan_of_a_repository_lists_what_is_folded_without_reading_weights(
    hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "source", shards=6)
    hub.commit(SOURCE, files_of(folder))
    done = client.well("plan", SOURCE, "--fold", "equalize", "--json")
    planned = json.loads(done.stdout)
    assert len(planned["fold"]["vectors"]) == 13
    assert sum(request.bytes_sent for request in hub.requests) < planned["hub"]["source_bytes"] / 2
