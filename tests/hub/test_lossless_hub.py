"""Masters without loss of a model on the Hub, whose files are fetched to be measured, and to be stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from hub_cases import SOURCE, Client, files_of
from loopback_hub import LoopbackHub

# The official client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.mark.parametrize(("option", "times"), [((), 1.2), (("--low-disk",), 2.2)])
def test_master_is_that_of_a_local_run_and_files_are_fetched_twice_if_none_is_kept(
    option: tuple[str, ...], times: float, hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    shards = [{f"model.layers.{n}.mlp.up_proj.weight": bf16(gaussian(512, 512, seed=n))} for n in range(4)]
    folder = write_checkpoint(tmp_path / "source", *shards, config={"model_type": "llama"})
    hub.commit(SOURCE, files_of(folder))
    client.well("quantize", folder, tmp_path / "expected", "--lossless")
    client.well("quantize", SOURCE, tmp_path / "out", "--lossless", *option)
    sent = sum(request.bytes_sent for request in hub.requests)
    assert sent < times * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    files, others = folder_bytes(tmp_path / "out"), folder_bytes(tmp_path / "expected")
    tensors, expected = (json.loads(part.pop("pqweights.json"))["tensors"] for part in (files, others))
    assert files == others and tensors == expected
