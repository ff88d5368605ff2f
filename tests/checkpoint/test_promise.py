"""Where config.json and the files say different things: it is said, and targets make what transformers computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
import transformers
from commands import done
from helpers import bf16, gaussian, read_all, write_checkpoint
from safetensors.torch import load_file, save_file

from pqweights.checkpoint import promise
from pqweights.checkpoint.gguf.model import outline_model
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Storage

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TARGETS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "vllm": ("--format", "w8a16"),
    "mlx": ("--format", "q8"),
    "gguf": (),
}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], object], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and another configuration."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config))
    return folder


def logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(families.IDS)).logits[0]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def other_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def last_row_of_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


def same_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def head_alone(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_that_differs_from_tied_embeddings_reaches_every_target(target: str, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", other_head)
    expected = load_file(source / "model.safetensors")[HEAD].float()
    planned = done("plan", source)
    assert HEAD in planned.stderr and "tie_word_embeddings" in planned.stderr
    assert HEAD in done("quantize", source, tmp_path / "m", "--bits", 8).stderr
    assert config_of(tmp_path / "m")["tie_word_embeddings"] is False
    if target == "gguf":
        found = values_of(gguf_tensors(tmp_path / "m")["output.weight"])
    else:
        done("export", tmp_path / "m", tmp_path / "out", "-t", target, *TARGETS[target])
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
        found = read_values(tmp_path / "out", target)[HEAD]
    assert (found - expected).norm() < 0.02 * expected.norm()


def gguf_tensors(master: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in outline_model(open_local(master)).tensors}


def read_values(folder: Path, target: str) -> dict[str, Any]:
    """The weights of a result, decoded where they are in codes."""
    if target == "mlx":
        import mlx.core as mx

        tensors = mx.load(str(next(folder.glob("*.safetensors"))))
        parts = [tensors["lm_head." + part] for part in ("weight", "scales", "biases")]
        values = mx.dequantize(*parts, group_size=64, bits=8).astype(mx.float32)
        return {HEAD: torch.from_numpy(np.array(values))}
    return {tensor.name: values_of(tensor) for tensor in open_local(folder).tensors}


def values_of(tensor: Any) -> Any:
    count = int(np.prod(tensor.shape))
    raw = np.empty(4 * count, dtype=np.uint8)
    tensor.read(0, count, "F32", raw)
    return torch.from_numpy(raw.view(np.float32).reshape(tensor.shape).copy())


def test_one_number_that_differs_is_found(base: Path, tmp_path: Path) -> None:
    opened = open_local(changed(families.model(base, "llama-tied"), tmp_path / "src", last_row_of_head))
    assert opened.config is not None and opened.config["tie_word_embeddings"] is False and opened.remarks


@pytest.mark.parametrize("change", [same_head, lambda tensors: None], ids=["stored twice", "stored once"])
def test_tied_embeddings_that_are_the_same_stay_tied(change: Any, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", change)
    opened = open_local(source)
    assert opened.remarks == () and opened.config == config_of(source)
    done("quantize", source, tmp_path / "m", "--bits", 8)
    assert "output.weight" not in gguf_tensors(tmp_path / "m")


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_alone_is_the_embeddings_too_if_they_are_tied(target: str, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", head_alone)
    expected = logits(source)
    planned = done("plan", source)
    assert HEAD in planned.stderr and EMBEDDING in planned.stderr
    done("quantize", source, tmp_path / "m", "--bits", 8)
    if target == "gguf":
        assert "token_embd.weight" in gguf_tensors(tmp_path / "m")
        return
    done("export", tmp_path / "m", tmp_path / "out", "-t", target, *TARGETS[target])
    if target == "mlx":
        import mlx.core as mx

        assert "model.embed_tokens.weight" in mx.load(str(next((tmp_path / "out").glob("*.safetensors"))))
    else:
        assert (logits(tmp_path / "out") - expected).norm() < 0.05 * expected.norm()


def test_a_head_in_another_dtype_is_compared_by_its_numbers(base: Path, tmp_path: Path) -> None:
    def wider(tensors: dict[str, Any]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].float()

    assert open_local(changed(families.model(base, "llama-tied"), tmp_path / "src", wider)).remarks == ()


def test_both_places_of_a_configuration_say_that_the_head_is_its_own(tmp_path: Path) -> None:
    names = {f"model.language_model.{name}": gaussian(64, 128, seed=3) for name in ("embed_tokens.weight",)}
    tensors = {name: bf16(values) for name, values in (names | {HEAD: gaussian(64, 128, seed=4)}).items()}
    config = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "tie_word_embeddings": True}}
    opened = open_local(write_checkpoint(tmp_path / "src", tensors, config=config))
    assert opened.config is not None
    assert opened.config["tie_word_embeddings"] is opened.config["text_config"]["tie_word_embeddings"] is False
    assert read_all(tmp_path / "src").keys() == {tensor.name for tensor in opened.tensors}


class Elsewhere(Storage):
    """A folder of which only parts are read, as if each read were a request."""

    def local_folder(self) -> None:
        return None


def test_of_files_elsewhere_parts_are_compared(base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", other_head)
    tensors = {tensor.name: tensor for tensor in open_local(source).tensors}
    storage = Elsewhere(source)
    assert not promise.same_values(storage, tensors[HEAD], tensors[EMBEDDING])
    assert storage.bytes_read <= 2 * promise.SAMPLES * promise.SAMPLE_BYTES
    assert promise.same_values(storage, tensors[HEAD], tensors[HEAD])


@pytest.mark.parametrize("differs", [False, True])
def test_embeddings_of_encoder_and_decoder_that_differ_are_named(differs: bool, tmp_path: Path) -> None:
    shared, other = gaussian(64, 128, seed=1), gaussian(64, 128, seed=2 if differs else 1)
    tensors = {"shared.weight": bf16(shared), "encoder.embed_tokens.weight": bf16(other)}
    config = {"model_type": "t5", "tie_word_embeddings": True, "is_encoder_decoder": True}
    remarks = open_local(write_checkpoint(tmp_path / "src", tensors, config=config)).remarks
    assert len(remarks) == differs and all("encoder.embed_tokens.weight" in remark for remark in remarks)
