"""Adapters on the Hub: fetched at one commit, which the manifest states, and merged as those in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import bf16, f32, folder_bytes, gaussian, safetensors_bytes, write_checkpoint
from hub_cases import Client
from loopback_hub import LoopbackHub

NAME = "model.layers.0.mlp.up_proj"
REPOSITORY = "me/lora"


def adapter() -> dict[str, bytes]:
    matrices = {
        f"base_model.model.{NAME}.lora_A.weight": f32(gaussian(4, 128, seed=1)),
        f"base_model.model.{NAME}.lora_B.weight": f32(gaussian(256, 4, seed=2)),
    }
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 64}
    return {
        "adapter_model.safetensors": safetensors_bytes(matrices),
        "adapter_config.json": json.dumps(settings).encode(),
    }


def test_an_adapter_of_a_repository_is_merged_at_its_commit(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    tensors = {f"{NAME}.weight": bf16(gaussian(256, 128))}
    source = write_checkpoint(tmp_path / "source", tensors, config={"model_type": "llama"})
    hub.commit(REPOSITORY, dict(adapter()))
    (tmp_path / "lora").mkdir()
    for name, data in adapter().items():
        (tmp_path / "lora" / name).write_bytes(data)
    client.well("quantize", source, tmp_path / "plain", "-q")
    for weight in ("", ":0.5"):
        done = []
        for given in (f"{tmp_path / 'lora'}{weight}", f"{REPOSITORY}{weight}", f"hf://{REPOSITORY}@main{weight}"):
            plan = json.loads(client.well("plan", source, "--adapter", given, "--json").stdout)
            assert any("lora" in line for line in plan["warnings"])
            out = tmp_path / f"out{len(done)}{weight}"
            client.well("quantize", source, out, "--adapter", given, "-q")
            done.append(folder_bytes(out))
        weights = [{name: data for name, data in of.items() if name.endswith(".safetensors")} for of in done]
        assert weights[0] == weights[1] == weights[2] != folder_bytes(tmp_path / "plain")
        for of in done[1:]:
            (stated,) = json.loads(of["pqweights.json"])["adapters"]
            assert (stated["id"], stated["revision"]) == (REPOSITORY, hub.repositories[REPOSITORY].sha())
            assert stated["weight"] == (0.5 if weight else 1)
    hub.commit(REPOSITORY, {"adapter_config.json": b"{}"})
    assert f"adapter {REPOSITORY}" in client.line("plan", source, "--adapter", REPOSITORY)
    assert "me/absent" in client.line("plan", source, "--adapter", "me/absent")
