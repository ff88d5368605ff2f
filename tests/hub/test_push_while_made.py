"""export --push: each file is sent once it is whole and removed; the disk holds one, and kills are continued."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
from helpers import folder_bytes
from hub_cases import RUN, SOURCE, Client, files_of
from loopback_faults import Fault, Stall, Status
from loopback_hub import LoopbackHub

from pqweights.storage.repository import Sending

TARGET = "me/model-GGUF"
BESIDE = ("README.md", ".gitattributes")
TYPES = ("q8_0", "q4_0", "q4_k_m")
ASKED = ("--target", "gguf", "--type", ",".join(TYPES), "--name", "model", "-q")
PUSH = ("--push", TARGET, "--low-disk")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


class Killed(BaseException):
    """A stand-in for a kill."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, in several files."""
    import transformers

    folder = tmp_path_factory.mktemp("source")
    language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "whole"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole", dtype="auto")
    model.save_pretrained(folder / "source", max_shard_size="700KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "source" / name).write_bytes((folder / "whole" / name).read_bytes())
    (folder / "source/LICENSE").write_text("as you like\n")
    return folder / "source"


@pytest.fixture
def on_hub(hub: LoopbackHub, client: Client, source: Path) -> LoopbackHub:
    hub.commit(SOURCE, files_of(source))
    return hub


@pytest.fixture
def expected(on_hub: LoopbackHub, client: Client, tmp_path: Path) -> dict[str, bytes]:
    """What the same run makes without a push."""
    client.well("export", SOURCE, tmp_path / "expected", *ASKED, "--low-disk")
    return folder_bytes(tmp_path / "expected")


def held(hub: LoopbackHub) -> dict[str, bytes]:
    """What the repository holds, without the card."""
    repository = hub.repositories[TARGET]
    return {name: repository.read(name) for name in repository.files() if name not in BESIDE}


def weights(files: dict[str, Any]) -> set[str]:
    return {name for name in files if name.endswith((".gguf", ".safetensors"))}


@contextmanager
def disk_watched(*folders: Path) -> Iterator[list[int]]:
    """Measure the most bytes that lie in some folders."""
    most, stop = [0], threading.Event()

    def look() -> None:
        while not stop.is_set():
            sizes = []
            for path in (path for folder in folders for path in folder.rglob("*")):
                try:
                    sizes.append(0 if path.is_symlink() or path.is_dir() else path.stat().st_size)
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], sum(sizes))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look)
        try:
            yield most
        finally:
            stop.set()


def test_a_ladder_is_made_file_by_file(
    on_hub: LoopbackHub, client: Client, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The repository holds what a run without a push makes; the disk never holds two files of either side."""
    out, send, waiting = tmp_path / "out", Sending.send, []

    def watching(self: Sending, name: str, path: Path, stop: Callable[[], bool]) -> None:
        waiting.append([file.name for file in out.rglob("*.gguf*") if not file.name.endswith(".json")])
        time.sleep(0.05)  # so that what is measured sees it
        send(self, name, path, stop)

    client.patch.setattr(Sending, "send", watching)
    fetched = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    small = sum(len(data) for name, data in expected.items() if name not in weights(expected)) + 200_000
    with disk_watched(out) as most:
        report = json.loads(client.well("export", SOURCE, out, *ASKED, *PUSH, "--json").stdout)
    assert held(on_hub) == expected
    assert [len(files) for files in waiting] == [1] * len(weights(expected))
    assert most[0] <= max(fetched.values()) + max(len(expected[name]) for name in weights(expected)) + small
    assert not weights(folder_bytes(out)) and not list(client.home.rglob("*.safetensors"))
    assert report["pushed"]["repository"] == TARGET
    card = on_hub.repositories[TARGET].read("README.md").decode()
    assert all(name in card for name in weights(expected))
    assert "ok" in client.well("verify", TARGET).stdout
    commits = len(on_hub.repositories[TARGET].commits)
    client.well("export", SOURCE, out, *ASKED, *PUSH)
    assert len(on_hub.repositories[TARGET].commits) == commits


@pytest.mark.parametrize(("number", "point"), [(0, "before"), (0, "after"), (1, "before"), (2, "after")])
def test_killed_while_sending_continues(
    number: int, point: str, on_hub: LoopbackHub, client: Client, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """A file that was whole is sent again, and not made again."""
    out, send, sent = tmp_path / "out", Sending.send, []

    def killed(self: Sending, name: str, path: Path, stop: Callable[[], bool]) -> None:
        if len(sent) == number and point == "before":
            raise Killed
        send(self, name, path, stop)
        sent.append(name)
        if len(sent) > number:
            raise Killed

    with client.patch.context() as patch:
        patch.setattr(Sending, "send", killed)
        with pytest.raises(Killed):
            client("export", SOURCE, out, *ASKED, *PUSH)
    assert "pqweights.json" not in on_hub.repositories[TARGET].files()
    report = json.loads(client.well("export", SOURCE, out, *ASKED, *PUSH, "--json").stdout)
    assert held(on_hub) == expected
    tensors = len(report["tensors"]) // len(TYPES)
    assert report["resumed_tensors"] == (number + 1) * tensors


@pytest.mark.parametrize(
    ("method", "path", "after"),
    [
        *(("GET", rf"{SOURCE}/resolve/.*safetensors", after) for after in (5, 9, 19)),
        *(("PUT", "uploads", after) for after in (0, 2)),
        *(("POST", f"{TARGET}/commit", after) for after in (0, 1, 3)),
    ],
)
def test_killed_process_continues(
    method: str, path: str, after: int, on_hub: LoopbackHub, client: Client, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """SIGKILL while some request to the Hub is under way: of the source, of an upload, or of a commit."""
    out, before = tmp_path / "out", len(on_hub.requests)
    command = [sys.executable, str(RUN), "export", SOURCE, str(out), *ASKED, *PUSH]
    on_hub.inject(Fault(Stall(100, at=0), method, path, after=after))
    process = subprocess.Popen(command, env=on_hub.environment(tmp_path / "home"), stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 100
        while not any(request.fault for request in on_hub.requests[before:]):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    on_hub.clear_faults()
    client.well("export", SOURCE, out, *ASKED, *PUSH)
    assert held(on_hub) == expected and not weights(folder_bytes(out))


def test_a_later_push_adds_files_and_keeps_others(on_hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    client.well("export", SOURCE, tmp_path / "one", *ASKED[:3], "q8_0", *ASKED[4:], *PUSH)
    on_hub.commit(TARGET, {"notes.txt": b"mine", "imatrix.dat": b"of others"})
    before = on_hub.repositories[TARGET].files()
    client.well("export", SOURCE, tmp_path / "two", *ASKED[:3], "q4_0,q4_k_m", *ASKED[4:], *PUSH)
    after = on_hub.repositories[TARGET].files()
    kept = before.keys() - {"README.md", "pqweights.json", "Modelfile"}
    assert all(after[name] == before[name] for name in kept)
    assert weights(after) == {f"model-{name}.gguf" for name in ("Q8_0", "Q4_0", "Q4_K_M")}
    card = on_hub.repositories[TARGET].read("README.md").decode()
    assert all(name in card for name in weights(after))


def test_folders_of_formats_are_sent_as_well(on_hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    asked = ("--target", "mlx", "--bits", "4,8", "--group-size", "32", "--max-shard-size", "300KB", "-q")
    client.well("export", SOURCE, tmp_path / "expected", *asked, "--low-disk")
    client.well("export", SOURCE, tmp_path / "out", *asked, *PUSH)
    expected = {name: data for name, data in folder_bytes(tmp_path / "expected").items() if not name.endswith("/")}
    assert held(on_hub) == expected and len(weights(expected)) > 4
    assert not weights(folder_bytes(tmp_path / "out"))


def test_what_cannot_be_pushed_is_refused_before_anything_is_made(
    on_hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    on_hub.commit("me/other", {"model.safetensors": b"of others"})
    out = tmp_path / "out"
    line = client.line("export", SOURCE, out, "--target", "bf16", "--push", "me/other")
    assert "model.safetensors" in line and not out.exists()
    assert "nobody" in client.line("export", SOURCE, out, "--target", "bf16", "--push", "nobody") and not out.exists()
    for options in (("--ray", "local"), ()):
        place = out if options else "memory://pushed/out"
        refused = client("export", SOURCE, place, "--target", "bf16", "--push", TARGET, *options)
        assert refused.exit_code == 2 and "--push" in refused.stderr and not out.exists()
    on_hub.inject(Fault(Status(403), "POST", "commit"))
    assert "denied" in client.line("export", SOURCE, out, *ASKED, *PUSH)
    on_hub.clear_faults()
    client.well("export", SOURCE, out, *ASKED, *PUSH)


def test_a_repository_is_made_private_on_request(on_hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    client.well("export", SOURCE, tmp_path / "out", *ASKED, *PUSH, "--private")
    assert on_hub.repositories[TARGET].private
    on_hub.create("me/public")
    arguments = ("export", SOURCE, tmp_path / "other", "--target", "bf16", "--private")
    assert "me/public" in client.line(*arguments, "--push", "me/public") and not (tmp_path / "other").exists()
    alone = client(*arguments)
    assert alone.exit_code == 2 and "--private" in alone.stderr and not (tmp_path / "other").exists()
