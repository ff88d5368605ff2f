"""Verify: an intact folder passes, and damage to any file is found."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from damage import flip
from helpers import bf16, folder_bytes, gaussian, run_command, small_checkpoint, write_checkpoint
from safetensors import safe_open

import pqweights
from pqweights.errors import MasterError, PqweightsError
from pqweights.results.verify import verify

SHARD_BYTES = 20_000


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    source = small_checkpoint(folder / "source")
    run_command({"quantize": str(source), "max_shard_bytes": SHARD_BYTES}, folder / "master")
    return folder / "master"


@pytest.fixture(scope="module")
def exported(master: Path) -> Path:
    out = master.parent / "exported"
    run_command({"export": str(master), "target": "bf16", "max_shard_bytes": 2 * SHARD_BYTES}, out)
    return out


@pytest.fixture
def damaged(master: Path, tmp_path: Path) -> Path:
    """A copy of the master to be damaged."""
    return shutil.copytree(master, tmp_path / "damaged")


def problems(folder: Path) -> tuple[str, ...]:
    """The problems that verify finds, or the error that it raises: both exit with 1."""
    try:
        return verify(folder, threads=2).problems
    except PqweightsError as error:
        return (str(error),)


@pytest.mark.parametrize("kind", ["master", "exported"])
def test_intact_folder_verifies(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    before = folder_bytes(folder)
    result = verify(folder, threads=2)
    assert result.ok and result.tensors == 10, result.problems
    sizes = {name: len(data) for name, data in before.items() if name[-1] != "/" and name != "pqweights.json"}
    assert (result.files, result.bytes) == (len(sizes), sum(sizes.values()))  # a manifest cannot hold its own size
    assert folder_bytes(folder) == before


def positions(name: str, data: bytes) -> list[int]:
    """Both ends and the middle; in a shard also the length, the header and the first and last byte of each tensor."""
    chosen = {0, len(data) // 2, len(data) - 1}
    if name.endswith(".safetensors"):
        start = 8 + int.from_bytes(data[:8], "little")
        chosen |= {1, 7, 8, 20, start - 1, start}
        spans = [entry["data_offsets"] for entry in json.loads(data[8:start]).values() if "data_offsets" in entry]
        for begin, end in spans:
            chosen |= {start + begin, start + end - 1, start + (begin + end) // 2}
    else:
        chosen |= set(range(0, len(data), 97))
    return sorted(at for at in chosen if 0 <= at < len(data))


@pytest.mark.parametrize("kind", ["master", "exported"])
def test_flipped_byte_in_any_file_is_found(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "damaged")
    flips = 0
    for name, data in folder_bytes(folder).items():
        for at in () if name.endswith("/") or name == "pqweights.json" else positions(name, data):
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert any(name in problem for problem in problems(folder)), (name, at)
            (folder / name).write_bytes(data)
            flips += 1
    assert flips > 80


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the parsed manifest, and write it back."""
    path = folder / "pqweights.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def tensor_of(manifest: dict[str, Any], name: str = "model.layers.0.self_attn.q_proj.weight") -> dict[str, Any]:
    return next(tensor for tensor in manifest["tensors"] if tensor["name"] == name)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "kind unknown": lambda m: m.update(kind="nonsense"),
    "kind of an export": lambda m: m.update(kind="export"),
    "shard size": lambda m: m.update(max_shard_bytes=10**9),
    "total error": lambda m: m.update(relative_mse=m["relative_mse"] / 2),
    "exceeding": lambda m: m.update(exceeding=["lm_head.weight"]),
    "tensor gone": lambda m: m["tensors"].pop(),
    "tensor twice": lambda m: m["tensors"].append(m["tensors"][-1]),
    "order": lambda m: m["tensors"].reverse(),
    "companion gone": lambda m: m["files"].pop("tokenizer.json"),
    "config gone": lambda m: m["files"].pop("config.json"),
    "index gone": lambda m: m["files"].pop("model.safetensors.index.json"),
    "file absent": lambda m: m["files"].update({"absent": {"bytes": 0, "sha256": "0" * 64}}),
    "file size": lambda m: m["files"]["tokenizer.json"].update(bytes=1),
    "file hash": lambda m: m["files"]["tokenizer.json"].update(sha256="0" * 64),
    "shape": lambda m: tensor_of(m).update(shape=[64, 256]),
    "dtype": lambda m: tensor_of(m).update(dtype="F16"),
    "bits": lambda m: tensor_of(m).update(bits=4),
    "bits unknown": lambda m: tensor_of(m).update(bits=9),
    "bytes": lambda m: tensor_of(m).update(bytes=1),
    "name": lambda m: tensor_of(m).update(name="model.layers.1.self_attn.q_proj.weight"),
    "rotation": lambda m: tensor_of(m).update(rotation="signed-hadamard"),
    "exponent": lambda m: tensor_of(m).update(norm_exponent=1),
    "error": lambda m: tensor_of(m).update(relative_mse=1e-9),
    "stored hash": lambda m: tensor_of(m)["stored"][0].update(blake3_of_pieces="0" * 64),
    "stored bytes": lambda m: tensor_of(m)["stored"][0].update(bytes=1),
    "stored dtype": lambda m: tensor_of(m)["stored"][0].update(dtype="I8"),
    "stored shape": lambda m: tensor_of(m)["stored"][0].update(shape=[1]),
    "stored name": lambda m: tensor_of(m)["stored"][0].update(name="other"),
    "stored gone": lambda m: tensor_of(m)["stored"].pop(),
}


@pytest.mark.parametrize("lie", LIES)
def test_false_statement_of_the_manifest_is_found(lie: str, damaged: Path) -> None:
    edit(damaged, LIES[lie])
    assert problems(damaged)


@pytest.mark.parametrize("recipe", ["q5", 5, ["q5"], None])
def test_recipe_that_is_no_object_stops_no_export(recipe: Any, damaged: Path, tmp_path: Path) -> None:
    edit(damaged, lambda manifest: manifest.update(recipe=recipe))
    pqweights.export(damaged, tmp_path / "out", "bf16", threads=1)


def test_missing_longer_and_shorter_files_are_found(damaged: Path) -> None:
    for name, data in folder_bytes(damaged).items():
        for other in () if name.endswith("/") else (None, data + b"\0", data[:-1]):
            if other is None:
                (damaged / name).unlink()
            elif name == "pqweights.json" or other == data:
                continue
            else:
                (damaged / name).write_bytes(other)
            assert any(name in problem for problem in problems(damaged)), name
            (damaged / name).write_bytes(data)
    assert not problems(damaged)


def test_only_what_was_checked_is_counted(damaged: Path) -> None:
    whole, lost = verify(damaged, threads=2), damaged / "model-00001-of-00004.safetensors"
    tensors = len(safe_open(lost, framework="numpy").keys())
    lost_bytes = lost.stat().st_size + (damaged / "tokenizer.json").stat().st_size
    lost.unlink()
    (damaged / "tokenizer.json").unlink()
    outcome = verify(damaged, threads=2)
    assert (outcome.bytes, outcome.files) == (whole.bytes - lost_bytes, whole.files - 2)
    assert whole.tensors - tensors <= outcome.tensors < whole.tensors


def test_foreign_files_and_unfinished_runs_are_found_but_cards_and_hidden_files_may_be_added(damaged: Path) -> None:
    (damaged / "README.md").write_text("a card")
    (damaged / ".gitattributes").write_text("*.safetensors filter=lfs")
    (damaged / ".git").mkdir()
    (damaged / ".git/config").write_text("")
    assert not problems(damaged)
    (damaged / "model-00005-of-00005.safetensors").write_bytes(b"")
    assert any("model-00005" in problem for problem in problems(damaged))
    (damaged / ".pqweights").mkdir()
    assert any("unfinished" in problem for problem in problems(damaged))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.update(rotation="signed-hadamard"),
        lambda q: q.update(bits=4),
        lambda q: q.update(dtype="F16"),
        lambda q: q["overrides"].clear(),
        lambda q: q["levels"]["hadamard-lloyd-max"]["5"].__setitem__(0, -9.0),
        lambda q: q["kept"].pop(),
        lambda q: q.update(quant_method="other"),
    ],
)
def test_configuration_of_other_weights_is_found(change: Callable[[dict[str, Any]], object], damaged: Path) -> None:
    """It is found even if its hash in the manifest was changed to match."""
    path = damaged / "config.json"
    config = json.loads(path.read_bytes())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    record = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit(damaged, lambda manifest: manifest["files"].update({"config.json": record}))
    assert problems(damaged)


def test_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "plain", {"mlp.up_proj.weight": bf16(gaussian(64, 128))})
    (tmp_path / "unfinished" / ".pqweights").mkdir(parents=True)
    for folder in (source, tmp_path / "absent", source / "model.safetensors", tmp_path / "unfinished"):
        with raises(MasterError, folder.name):
            verify(folder, threads=2)
    for text in ("", "[]", "{}", "null", "{" * 100_000, "\xff"):
        (source / "pqweights.json").write_bytes(text.encode("latin-1"))
        with raises(MasterError, "pqweights.json"):
            verify(source, threads=2)


def test_problems_are_identical_across_thread_counts(damaged: Path) -> None:
    flip(damaged, "model.embed_tokens.weight_codes", at=-1)
    assert verify(damaged, threads=1).problems == verify(damaged, threads=5).problems != ()


def test_interrupt_does_not_hash_the_rest(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def slow(*arguments: object) -> Iterator[object]:
        hashed.append(1)
        time.sleep(0.02)
        return iter(())

    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pqweights.results.verify.pieces_of", slow)
    with pytest.raises(KeyboardInterrupt):
        verify(damaged, threads=1, progress=interrupt)
    assert len(hashed) <= 3
