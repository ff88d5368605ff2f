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

import pytest
import trained_tokenizers as trained
from commands import answer, done, invoke, raises, refused
from gguf_files import write_gguf, write_llama
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from remote_server import BUCKET, SECRETS, ObjectServer, address_of

import pqweights
from pqweights.checkpoint import ahead
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.errors import SourceError
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.sources import open_source

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the tests are small; they are read in blocks all the same."""
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(ahead, "LARGE_READ_BYTES", 1 << 14)


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


def test_quantized_bytes_are_those_of_a_local_source(
    server: ObjectServer, source: Path, master: Path, tmp_path: Path
) -> None:
    address = server.put(source, "models/source")
    done("quantize", address, tmp_path / "remote", "--max-shard-size", "120kB")
    assert folder_bytes(tmp_path / "remote") == folder_bytes(master)
    assert answer("quantize", address, tmp_path / "remote", "--max-shard-size", "120kB")["already_done"]
    assert answer("plan", f"file://{source}") == answer("plan", source)


def test_gguf_files_are_sources_alone(server: ObjectServer, tmp_path: Path) -> None:
    tokenizer = trained.KINDS["llama3"]()
    trained.save(tokenizer, tmp_path / "model")
    write_llama(tmp_path / "model", rows=tokenizer.get_vocab_size())
    for name in ("m-F32.gguf", "m-BF16.gguf"):
        (tmp_path / name[2:]).mkdir()
        write_gguf(tmp_path / "model", name[2:-5]).rename(tmp_path / name[2:] / name)
    done("quantize", tmp_path / "F32.gguf", tmp_path / "out")
    address = server.put(tmp_path / "F32.gguf", "alone")
    for number, given in enumerate((address, f"{address}/m-F32.gguf")):
        done("quantize", given, tmp_path / str(number))
        assert folder_bytes(tmp_path / str(number)) == folder_bytes(tmp_path / "out")
    server.put(tmp_path / "BF16.gguf", "alone")
    done("quantize", f"{address}/m-F32.gguf", tmp_path / "named")
    assert folder_bytes(tmp_path / "named") == folder_bytes(tmp_path / "out")
    assert "m-BF16.gguf, m-F32.gguf" in refused("plan", address)


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
    done("quantize", address, tmp_path / "out", "--threads", "1")  # of several, one may fall behind on a busy machine
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    headers = 3 * (1 << 16)
    samples = 9 * 2 * 4096
    assert sum(count for name, count in fetched if name.endswith(".safetensors")) <= weights * 1.2 + headers + samples


def test_a_single_file_is_read_like_a_local_one(server: ObjectServer, source: Path, tmp_path: Path) -> None:
    file = "model-00002-of-00003.safetensors"
    address = f"{server.put(source, 'single')}/{file}"
    local, remote = (json.loads(done("plan", model, "--json").stdout) for model in (source / file, address))
    more = remote["totals"].pop("peak_memory_bytes") - local["totals"].pop("peak_memory_bytes")
    assert local == remote and more == Storage(RemoteFolder(address_of(address))).memory_bytes
    done("quantize", source / file, tmp_path / "local")
    done("quantize", address, tmp_path / "remote")
    assert folder_bytes(tmp_path / "remote") == folder_bytes(tmp_path / "local")


def test_exported_bytes_are_those_of_a_local_master(
    server: ObjectServer, source: Path, master: Path, tmp_path: Path
) -> None:
    from_master, from_source = server.put(master, "master"), server.put(source, "source")
    for local, remote in (
        ((master, "--target", "bf16"), (from_master, "--target", "bf16")),
        ((source, "--target", "vllm"), (from_source, "--target", "vllm")),
    ):
        done("export", local[0], tmp_path / "local", *local[1:], "--overwrite")
        done("export", remote[0], tmp_path / "remote", *remote[1:], "--overwrite")
        assert folder_bytes(tmp_path / "remote") == folder_bytes(tmp_path / "local")


def damage(folder: Path, kind: str) -> None:
    """Damage a master."""
    shard, config = folder / "model-00002-of-00006.safetensors", folder / "config.json"
    data = bytearray(shard.read_bytes())
    data[20 if kind == "a header" else -1] ^= 1
    if kind == "missing":
        shard.unlink()
    elif kind == "config":
        config.write_text(config.read_text().replace("LlamaFor", "OtherFor").replace('"llama"', '"other"'))
    elif kind == "unfinished":
        (folder / ".pqweights").mkdir()
        (folder / ".pqweights" / "journal.jsonl").write_text('{"kind": "master"}\n')
    elif kind == "foreign":
        (folder / "more.bin").write_text("[]")
    elif kind != "nothing":
        shard.write_bytes(data[:-1] if kind == "a length" else data)


@pytest.mark.parametrize(
    "kind", ["nothing", "a byte", "a header", "a length", "missing", "foreign", "config", "unfinished"]
)
def test_verify_and_inspect_say_of_a_bucket_what_they_say_of_a_folder(
    kind: str, server: ObjectServer, master: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(master, tmp_path / "master")
    damage(folder, kind)
    address = server.put(folder, kind.replace(" ", "-"))
    outcome = pqweights.verify(address)
    assert outcome.ok == (kind == "nothing") and outcome.to_json() == pqweights.verify(folder).to_json()
    assert kind == "unfinished" or pqweights.inspect(address).to_json() == pqweights.inspect(folder).to_json()


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
    words = ("quantize", server.put(source, "failing"), tmp_path / "out", "--max-shard-size", "120kB")

    def broken(environ: dict[str, Any]) -> Any:
        last = "00003-of-00003" in environ["PATH_INFO"] and not environ.get("HTTP_RANGE", "").startswith("bytes=0-")
        return (500, "InternalError") if last else None

    server.fault = broken
    assert "(InternalError)" in refused(*words)
    server.fault = None
    assert answer(*words)["resumed_tensors"] > 0 and folder_bytes(tmp_path / "out") == folder_bytes(master)


def test_addresses_that_hold_nothing_or_something_else(server: ObjectServer, source: Path, tmp_path: Path) -> None:
    address = server.put(source, "ordinary")
    nothing = f"s3://{BUCKET}/nothing"
    for command in ("plan", "verify"):
        assert f"{nothing}: " in refused(command, nothing)
    assert f"pqweights plan {address}" in refused("inspect", address)
    server.client.put_object(Bucket=BUCKET, Key="unfinished/.pqweights/journal.jsonl", Body=b'{"kind": "master"}\n')
    for command in ("verify", "plan", "inspect"):
        line = refused(command, unfinished := f"s3://{BUCKET}/unfinished")
        assert f"{unfinished}: " in line and "pqweights quantize" in line
    server.client.put_object(Bucket=BUCKET, Key="hostile/a\\b", Body=b"x")
    assert repr("a\\b") in refused("plan", f"s3://{BUCKET}/hostile")


@pytest.mark.parametrize("command", ["eval {} --text n", "generate {} --prompt x", "push {} me/model", "card {}"])
def test_other_commands_name_the_remedy_or_refuse(command: str, server: ObjectServer, master: Path) -> None:
    result = invoke(*command.format(server.put(master, "others")).split())
    assert result.exit_code != 0 and result.stderr.count("\n") == 1
    assert "copy it to a folder first" in result.stderr
    assert "with `aws s3 sync`" in result.stderr or command.startswith(("push", "card"))


def test_options_of_the_hub_and_credentials_are_refused(source: Path) -> None:
    assert "--revision" in refused("plan", "s3://b/x", "--revision", "main")
    line = refused("plan", "s3://key:MARKERSECRETKEY@b/x", code=2)
    assert "credentials" in line and "MARKER" not in line


def test_sent_storage_reads_the_same_bytes_from_any_thread(server: ObjectServer, source: Path) -> None:
    local = Storage(source)
    remote = pickle.loads(pickle.dumps(Storage(RemoteFolder(address_of(server.put(source, "same"))))))
    assert {n: s.byte_count for n, s in remote.files().items()} == {n: s.byte_count for n, s in local.files().items()}
    assert str(remote) == f"s3://{BUCKET}/same" and remote.origin is None and remote.frees == 0

    def compare(seed: int) -> bool:
        chance = random.Random(seed)
        file = chance.choice([*local.files()])
        offset = chance.randrange(local.files()[file].byte_count)
        count = chance.randrange(local.files()[file].byte_count - offset + 1)
        return bytes(read_bytes(remote, file, offset, count)) == bytes(read_bytes(local, file, offset, count))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compare, range(160)))
    with raises(SourceError, "config.json"):
        read_bytes(remote, "config.json", 0, 10_000)


def test_fingerprints_and_headers_of_many_files(server: ObjectServer, tmp_path: Path) -> None:
    """More files than headers are requested at once, and more tensors than samples."""
    shards = [{f"t{number}.{n}.weight": bf16(gaussian(4 + number, 300)) for n in range(3)} for number in range(40)]
    folder = write_checkpoint(tmp_path / "many", *shards)
    opened, local = open_source(server.put(folder, "many")), open_local(folder)
    starts = sum("model-" in line for line in server.log if line.startswith("GET"))
    assert starts <= 2 * 40 and opened.fingerprint() == local.fingerprint()
    assert [tensor.name for tensor in opened.tensors] == [tensor.name for tensor in local.tensors]
