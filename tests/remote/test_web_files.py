"""Files at addresses of any web server as sources: the bytes of local files, and one line for what is wrong."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import trained_tokenizers as trained
from commands import answer, done, raises, refused
from export_decoders import values_of
from gguf_files import write_gguf, write_llama
from helpers import bf16, folder_bytes, gaussian, write_checkpoint
from tiny_gguf import edited
from web_server import WebServer, web_server

from pqweights.checkpoint import ahead
from pqweights.errors import SourceChangedError
from pqweights.storage import requests
from pqweights.storage.addresses import parse_location
from pqweights.storage.sources import open_source
from pqweights.storage.web import WebFolder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(requests, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(ahead, "LARGE_READ_BYTES", 1 << 12)
    with web_server() as served:
        yield served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file alone in a folder."""
    folder = tmp_path_factory.mktemp("web")
    tokenizer = trained.KINDS["llama3"]()
    trained.save(tokenizer, folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    file = write_gguf(write_llama(folder / "model", rows=tokenizer.get_vocab_size(), sizes=sizes), "Q8_0")
    (folder / "alone").mkdir()
    return Path(shutil.copy(file, folder / "alone" / "m Q8 100%.gguf"))


def address(server: WebServer, query: str = "") -> str:
    return f"{server.url}/m%20Q8%20100%25.gguf{query}"


def test_a_gguf_file_makes_the_bytes_of_the_local_file(server: WebServer, model: Path, tmp_path: Path) -> None:
    server.put(model.parent)
    local, remote = tmp_path / "local", tmp_path / "remote"
    done("quantize", model, local)
    done("quantize", address(server, "?download=true"), remote)
    assert folder_bytes(local) == folder_bytes(remote)
    assert all(path.endswith("?download=true") and part for path, part in server.log)
    done("export", address(server), tmp_path / "out", "-t", "gguf", "--type", "q4_0")
    assert answer("quantize", address(server, "?download=true"), remote)["already_done"]


def test_parts_of_a_split_model_are_found_by_its_name(server: WebServer, model: Path, tmp_path: Path) -> None:
    edited(model, tmp_path / "parts" / "m.gguf", split_max_tensors=8)
    server.put(tmp_path / "parts")
    parts = sorted(server.files)
    assert len(parts) > 1
    source = open_source(f"{server.url}{parts[-1]}")
    assert len(pickle.loads(pickle.dumps(source)).weight_files) == len(parts)
    del server.files[parts[0]]
    assert parts[0].strip("/") in refused("plan", f"{server.url}{parts[-1]}")


def test_a_safetensors_file_is_a_source(server: WebServer, tmp_path: Path) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": bf16(gaussian(256, 512))}
    folder = write_checkpoint(tmp_path / "src", weights, config={"model_type": "llama"})
    file = next(folder.glob("*.safetensors"))
    server.put(folder)
    done("quantize", file, tmp_path / "local")
    done("quantize", f"{server.url}/{file.name}", tmp_path / "remote")
    assert folder_bytes(tmp_path / "local") == folder_bytes(tmp_path / "remote")


def test_requests_are_sent_again(server: WebServer, model: Path, tmp_path: Path) -> None:
    server.put(model.parent)
    faults = (503, "cut", 429)
    server.fault = lambda n: faults[n % 3] if server.log[:n].count(server.log[n - 1]) == 1 else ""
    done("quantize", address(server), tmp_path / "out")
    done("verify", tmp_path / "out")


def test_redirections_are_followed(server: WebServer, model: Path) -> None:
    server.put(model.parent)
    server.files["/moved/m.gguf"] = address(server).encode()
    assert open_source(f"{server.url}/moved/m.gguf").weight_files == ("m.gguf",)


def test_a_file_that_is_replaced_is_refused(server: WebServer, model: Path, tmp_path: Path) -> None:
    server.put(model.parent)
    source = open_source(address(server))
    values_of(source.tensors[0])
    content = server.files[f"/{model.name}"]
    server.files[f"/{model.name}"] = content[:-1] + bytes([content[-1] ^ 1])
    with raises(SourceChangedError, "100%"):
        source.storage.check_unchanged()
    folder = WebFolder(parse_location(server.url + "/"))
    before = folder.state(model.name)
    server.files[f"/{model.name}"] = content
    with raises(SourceChangedError, "replaced"):
        folder.read(model.name, 0, 4, expected=before)


@pytest.mark.parametrize(
    ("path", "fault", "said"),
    [
        ("/none.gguf", "", "no such file"),
        ("/", "", "/"),
        ("/a/model", "", "server has no list"),
        ("/a%2Fb.gguf", "", "a%2Fb.gguf"),
        ("", 403, "403"),
        ("", 401, "401"),
        ("", 500, "failing"),
        ("", "whole", "part of a file"),
        ("", "cut", "RemoteProtocolError"),
    ],
)
def test_what_fails_ends_in_a_line_without_secrets(
    path: str, fault: int | str, said: str, server: WebServer, model: Path
) -> None:
    server.put(model.parent)
    server.fault = lambda number: fault
    given = address(server, "?token=SECRET") if not path else f"{server.url}{path}?token=SECRET"
    line = refused("plan", given.replace("://", "://me:SECRET@"))
    assert said in line and "SECRET" not in line


@pytest.mark.parametrize("given", ["https://[::1/x.gguf", "http://127.0.0.1:x/x.gguf", "http://127.0.0.1:1:2/x.gguf"])
def test_an_address_that_is_none_is_refused(given: str) -> None:
    assert given in refused("plan", given)


def test_nothing_is_written_to_a_web_server(server: WebServer, model: Path) -> None:
    assert "http" in refused("quantize", model, f"{server.url}/out", code=2)


def test_a_web_file_is_gguf_as_the_package_reads_it(server: WebServer, model: Path) -> None:
    server.put(model.parent)
    server.stamped = False
    source = open_source(address(server))
    assert len(source.tensors) == len(gguf.GGUFReader(model).tensors)
