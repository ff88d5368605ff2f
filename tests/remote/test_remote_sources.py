"""Commands that read from object storage: the same bytes as from a local folder, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import answer, done, invoke, refused
from helpers import bf16, folder_bytes, gaussian, safetensors_bytes, write_checkpoint
from remote_server import BUCKET, SECRETS, ObjectServer

import pqweights
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import LocalStorage, read_bytes
from pqweights.errors import SourceError
from pqweights.storage.remote import blocks
from pqweights.storage.remote import storage as remote_storage
from pqweights.storage.remote.addresses import parse_address
from pqweights.storage.remote.folder import RemoteFolder
from pqweights.storage.remote.storage import RemoteStorage, open_address

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the tests are small; they are read in blocks all the same."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(remote_storage, "LARGE_READ_BYTES", 1 << 14)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three files with companions, in a folder inside of it too."""
    shards = []
    for number in range(3):
        weights = {f"mlp.{name}_proj": bf16(gaussian(256, 512, seed=number)) for name in ("up", "down")}
        weights["input_layernorm"] = bf16(gaussian(512))
        shards.append({f"model.layers.{number}.{name}.weight": value for name, value in weights.items()})
    companions = {"tokenizer.json": b"{}" * 1000, "generation_config.json": b"{}", "notes.txt": b"left out"}
    folder = tmp_path_factory.mktemp("remote") / "source"
    return write_checkpoint(folder, *shards, config=CONFIG, companions=companions)


@pytest.fixture(scope="module")
def master(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("remote") / "master"
    done("quantize", source, out, "--max-shard-size", "120kB")
    return out


@pytest.fixture(autouse=True)
def no_secrets(capfd: pytest.CaptureFixture[str]) -> Any:
    yield
    shown = "".join(capfd.readouterr())
    assert not any(secret in shown for secret in SECRETS)


def without_secrets(*arguments: object) -> str:
    result = invoke(*arguments)
    assert not any(secret in result.output for secret in SECRETS)
    return str(result.stderr)


def test_quantized_bytes_are_those_of_a_local_source(server: ObjectServer, source: Path, tmp_path: Path) -> None:
    address = server.put(source, "models/source")
    done("quantize", source, tmp_path / "local", "--max-shard-size", "120kB")
    done("quantize", address, tmp_path / "remote", "--max-shard-size", "120kB")
    assert folder_bytes(tmp_path / "remote") == folder_bytes(tmp_path / "local")
    again = answer("quantize", address, tmp_path / "remote", "--max-shard-size", "120kB")
    assert again["already_done"]


def test_a_source_that_was_changed_between_its_samples_is_quantized_again(
    server: ObjectServer, source: Path, tmp_path: Path
) -> None:
    """Its fingerprint is the same, but it is newer than the result."""
    address, file = server.put(source, "changed"), "model-00002-of-00003.safetensors"
    done("quantize", address, tmp_path / "out")
    data = bytearray((source / file).read_bytes())
    data[100_001] ^= 0x40
    path = tmp_path / "out" / "pqweights.json"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 5_000_000_000))
    server.client.put_object(Bucket=BUCKET, Key=f"changed/{file}", Body=bytes(data))
    line = refused("quantize", address, tmp_path / "out")
    assert "pass --overwrite" in line


def test_each_byte_of_a_source_is_fetched_about_once(
    server: ObjectServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, fetched = server.put(source, "once"), []
    read = RemoteFolder.read

    def counted(self: RemoteFolder, name: str, start: int, end: int, **more: Any) -> bytes:
        fetched.append((name, end - start))
        return read(self, name, start, end, **more)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    done("quantize", address, tmp_path / "out")
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    headers = 3 * (1 << 16)
    samples = 9 * 2 * 4096
    assert sum(count for name, count in fetched if name.endswith(".safetensors")) <= weights * 1.2 + headers + samples


@pytest.mark.parametrize("command", [("quantize",), ("plan",)])
def test_a_single_file_is_read_like_a_local_one(
    command: tuple[str], server: ObjectServer, source: Path, tmp_path: Path
) -> None:
    file = "model-00002-of-00003.safetensors"
    address = f"{server.put(source, 'single')}/{file}"
    if command == ("plan",):
        local, remote = (json.loads(done("plan", each, "--json").stdout) for each in (source / file, address))
        more = remote["totals"].pop("peak_memory_bytes") - local["totals"].pop("peak_memory_bytes")
        assert local == remote and more == RemoteStorage(RemoteFolder(parse_address(address))).memory_bytes
        return
    done("quantize", source / file, tmp_path / "local")
    done("quantize", address, tmp_path / "remote")
    assert folder_bytes(tmp_path / "remote") == folder_bytes(tmp_path / "local")


def test_exported_bytes_are_those_of_a_local_master(
    server: ObjectServer, source: Path, master: Path, tmp_path: Path
) -> None:
    from_master, from_source = server.put(master, "master"), server.put(source, "source")
    done("export", master, tmp_path / "local", "--target", "bf16")
    done("export", from_master, tmp_path / "remote", "--target", "bf16")
    assert folder_bytes(tmp_path / "remote") == folder_bytes(tmp_path / "local")
    options = ("--target", "vllm", "--source")
    done("export", master, tmp_path / "local4", *options, source)
    done("export", from_master, tmp_path / "remote4", *options, from_source)
    assert folder_bytes(tmp_path / "remote4") == folder_bytes(tmp_path / "local4")
    line = refused("export", from_source, tmp_path / "no", "--target", "bf16")
    assert f"{from_source}: expected a pqweights master" in line


def test_verify_and_inspect_say_the_same_of_a_master_in_a_bucket(server: ObjectServer, master: Path) -> None:
    address = server.put(master, "verified")
    assert answer("verify", address) == answer("verify", master)
    assert answer("inspect", address) == answer("inspect", master)
    assert pqweights.verify(address).ok and pqweights.inspect(address).kind == "master"


def damage(folder: Path, kind: str) -> None:
    """Damage a master."""
    shard, config = folder / "model-00002-of-00006.safetensors", folder / "config.json"
    data = bytearray(shard.read_bytes())
    data[{"a byte": -1, "a header": 20}.get(kind, 0)] ^= 1
    if kind == "missing":
        shard.unlink()
    elif kind == "config":
        config.write_text(config.read_text().replace("LlamaFor", "OtherFor").replace('"llama"', '"other"'))
    elif kind == "unfinished":
        (folder / ".pqweights").mkdir()
        (folder / ".pqweights" / "journal.jsonl").write_text('{"kind": "master"}\n')
    elif kind in ("foreign", "small"):
        (folder / ("more.bin" if kind == "foreign" else "tokenizer.json")).write_text("[]" * 1000)
    else:
        shard.write_bytes(data[:-1] if kind == "a length" else data)


@pytest.mark.parametrize(
    "kind", ["a byte", "a header", "a length", "missing", "foreign", "small", "config", "unfinished"]
)
def test_verify_finds_in_a_bucket_what_it_finds_locally(
    kind: str, server: ObjectServer, master: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(master, tmp_path / "master")
    damage(folder, kind)
    found = pqweights.verify(server.put(folder, kind.replace(" ", "-")))
    assert found.problems == pqweights.verify(folder).problems != ()
    assert found.to_json() == pqweights.verify(folder).to_json()


def every(number: int, fault: Any) -> Callable[[dict[str, Any]], Any]:
    """Every so many-th request fails, from any thread."""
    seen, lock = [0], threading.Lock()

    def decide(environ: dict[str, Any]) -> Any:
        with lock:
            seen[0] += 1
            return fault if seen[0] % number == 0 and environ["REQUEST_METHOD"] == "GET" else None

    return decide


@pytest.mark.parametrize("fault", [(500, "InternalError"), (503, "SlowDown"), 0, 30_000], ids=str)
def test_a_run_heals_from_failures_of_its_source(
    fault: Any, server: ObjectServer, source: Path, master: Path, tmp_path: Path
) -> None:
    address = server.put(source, "failing")
    server.fault = every(3, fault)
    done("quantize", address, tmp_path / "out", "--max-shard-size", "120kB", "--threads", 3)
    assert folder_bytes(tmp_path / "out") == folder_bytes(master)


def test_a_run_whose_source_fails_is_one_line_and_continues(
    server: ObjectServer, source: Path, master: Path, tmp_path: Path
) -> None:
    address = server.put(source, "failing")

    def broken(environ: dict[str, Any]) -> Any:
        last = "00003-of-00003" in environ["PATH_INFO"] and not environ.get("HTTP_RANGE", "").startswith("bytes=0-")
        return (500, "InternalError") if last else None

    server.fault = broken
    line = refused("quantize", address, tmp_path / "out", "--max-shard-size", "120kB")
    assert "is failing (InternalError): run the same command again later" in line
    assert not any(secret in line for secret in SECRETS)
    server.fault = None
    found = answer("quantize", address, tmp_path / "out", "--max-shard-size", "120kB")
    assert found["resumed_tensors"] > 0 and folder_bytes(tmp_path / "out") == folder_bytes(master)


def test_addresses_that_hold_nothing_or_something_else(server: ObjectServer, source: Path, tmp_path: Path) -> None:
    address = server.put(source, "ordinary")
    nothing = f"s3://{BUCKET}/nothing"
    assert f"{nothing}: no such file or folder" in refused("plan", nothing)
    assert f"{nothing}: no such folder, or nothing in it" in refused("verify", nothing)
    assert f"if it is an ordinary checkpoint, pqweights plan {address} shows" in refused("inspect", address)
    server.client.put_object(Bucket=BUCKET, Key="unfinished/.pqweights/journal.jsonl", Body=b'{"kind": "master"}\n')
    for command in ("verify", "plan", "inspect"):
        line = refused(command, f"s3://{BUCKET}/unfinished")
        assert "holds an unfinished run of pqweights quantize: run the same command again" in line
    server.client.put_object(Bucket=BUCKET, Key="hostile/a\\b", Body=b"x")
    assert "expected a path inside of it" in refused("plan", f"s3://{BUCKET}/hostile")


@pytest.mark.parametrize(
    "command",
    [
        "eval {} --text notes.txt",
        "generate {} --prompt x",
        "push {} me/model",
        "card {}",
        "calibrate {} x.safetensors --text notes.txt",
    ],
)
def test_other_commands_name_the_remedy_or_refuse(command: str, server: ObjectServer, master: Path) -> None:
    address = server.put(master, "others")
    result = invoke(*(part.format(address) for part in command.split()))
    assert result.exit_code != 0 and not any(secret in result.output for secret in SECRETS)
    assert "copy it to a folder first" in result.stderr and result.stderr.count("\n") == 1
    if command.split()[0] in ("eval", "generate", "calibrate"):
        assert "with `aws s3 sync`" in result.stderr


def test_options_of_the_hub_and_credentials_are_refused(source: Path) -> None:
    assert "--revision: expected a repository on the Hub" in refused("plan", "s3://b/x", "--revision", "main")
    line = refused("plan", "s3://key:MARKERSECRETKEY@b/x", code=2)
    assert "found credentials in the address" in line and "MARKER" not in line


def test_file_addresses_are_local(source: Path, tmp_path: Path) -> None:
    assert answer("plan", f"file://{source}") == answer("plan", source)


def test_storages_read_the_same_bytes_in_any_order_from_any_thread(server: ObjectServer, source: Path) -> None:
    local = LocalStorage(source)
    remote = pickle.loads(pickle.dumps(RemoteStorage(RemoteFolder(parse_address(server.put(source, "same"))))))
    assert {n: s.byte_count for n, s in remote.files().items()} == {n: s.byte_count for n, s in local.files().items()}
    assert str(remote) == f"s3://{BUCKET}/same" and remote.origin is None and remote.frees == 0

    def compare(seed: int) -> bool:
        chance = random.Random(seed)
        for _ in range(20):
            file = chance.choice([*local.files()])
            size = local.files()[file].byte_count
            offset = chance.randrange(size)
            count = chance.randrange(size - offset + 1)
            buffer = np.empty(count, dtype=np.uint8)
            remote.read_into(file, offset, buffer)
            if buffer.tobytes() != read_bytes(local, file, offset, count):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compare, range(8)))
    with pytest.raises(SourceError, match="it is shorter"):
        read_bytes(remote, "config.json", 0, 10_000)


def test_fingerprints_and_headers_of_many_files(server: ObjectServer, tmp_path: Path) -> None:
    """More files than headers are requested at once, and more tensors than samples."""
    folder, weight_map = tmp_path / "many", {}
    folder.mkdir()
    for number in range(40):
        tensors = {f"t{number}.{each}.weight": bf16(gaussian(4 + number, 300)) for each in range(3)}
        file = f"model-{number:05d}.safetensors"
        (folder / file).write_bytes(safetensors_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = open_address(parse_address(server.put(folder, "many")))
    starts = sum("model-" in line for line in server.log if line.startswith("GET"))
    assert starts <= 2 * 40 and opened.fingerprint() == open_local(folder).fingerprint()
    assert [t.name for t in opened.tensors] == [t.name for t in open_local(folder).tensors]
