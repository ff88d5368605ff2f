"""Reading from the Hub: what is fetched and where it lies, interrupted runs, and refusals in one line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import hub_cases
import numpy as np
import pytest
import transformers
from helpers import bf16, f32, folder_bytes, gaussian, run_command, write_checkpoint
from hub_cases import CASES, NOT_NEEDED, SOURCE, Case, Client, files_of, stalled, write_source
from loopback_faults import Fault, Request, Run, Stall
from loopback_hub import LoopbackHub

from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.source import Checkpoint
from pqweights.targets.master import EncodeJob

# The official client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

LOG_IN = "hf auth login"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
LARGE_BYTES = 1 << 20
STALL_AT = 1 << 19


@pytest.fixture
def source(hub: LoopbackHub, tmp_path: Path) -> Path:
    """The checkpoint of hub_cases, in a local folder and on the Hub."""
    folder = write_source(tmp_path / "source")
    hub.commit(SOURCE, files_of(folder))
    return folder


def fetched(requests: list[Request]) -> list[str]:
    """Return the names of the requested files, in order."""
    paths = [request.path for request in requests if request.method == "GET" and "/resolve/" in request.path]
    return [path.partition("/resolve/")[2].partition("/")[2] for path in paths]


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "pqweights.json").read_bytes())


def model_of(folder: Path) -> Any:
    return manifest_of(folder)["model"]


def without_origin(folder: Path) -> tuple[dict[str, bytes], dict[str, object]]:
    """Return the files of a master and its manifest, without what names the repository of the source."""
    files = folder_bytes(folder)
    manifest = json.loads(files.pop("pqweights.json"))
    for part in ("source", "model"):
        for key in ("id", "revision"):
            manifest.get(part, {}).pop(key, None)
    if not manifest.get("model"):
        manifest.pop("model", None)
    return files, manifest


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.command}: {case.name}")
def test_commands_survive_or_report_faults(case: Case, tmp_path: Path) -> None:
    from huggingface_hub.utils import close_session

    def run(hub: LoopbackHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            done = Client(url=hub.url, home=home, token=hub.token, patch=patch).set_up()(*arguments)
            close_session()
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    hub_cases.play(case, tmp_path, run)


# --- What is fetched --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cdn", [False, True])
def test_a_plan_takes_one_request_for_each_header(cdn: bool, hub: LoopbackHub, client: Client, source: Path) -> None:
    hub.cdn = cdn
    planned = json.loads(client.well("plan", SOURCE, "--json").stdout)
    names = fetched(hub.requests)
    assert names[:2] == ["config.json", "model.safetensors.index.json"] and sorted(names[2:]) == SHARDS
    of_the_cdn = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert len(of_the_cdn) == (3 if cdn else 0)
    assert not any(request.authorized for request in of_the_cdn)  # the token must not be sent to a signed address
    assert len(hub.requests) == 1 + 2 + 3 + len(of_the_cdn)
    sizes = [(source / name).stat().st_size for name in SHARDS]
    assert planned.pop("hub") == {
        "repository": SOURCE,
        "revision": hub.repositories[SOURCE].sha(),
        "source_bytes": sum(sizes),
        "low_disk_bytes": sum(sorted(sizes)[1:]),
    }
    assert planned == json.loads(client.well("plan", source, "--json").stdout)
    assert not client.home.exists()


def test_longer_headers_take_one_request_each_after_the_first(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    shards = [
        {f"model.layers.{layer}.{'x' * 150}.{number}.weight": f32(gaussian(2)) for number in range(500)}
        for layer in range(3)
    ]
    folder = write_checkpoint(tmp_path / "source", *shards, config={"model_type": "llama"})
    assert (folder / SHARDS[0]).read_bytes()[:8] > (1 << 16).to_bytes(8, "little")
    hub.commit(SOURCE, files_of(folder))
    client.well("plan", SOURCE)
    # The first shard shows how much to ask for of the others at once.
    names = fetched(hub.requests)
    assert [names.count(name) for name in SHARDS] == [2, 1, 1]


@pytest.mark.parametrize("options", [[], ["--low-disk"]], ids=["cache", "low-disk"])
def test_quantize_fetches_only_needed_files_and_gives_the_bytes_of_a_local_run(
    options: list[str], hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    run_command({"quantize": str(source)}, tmp_path / "expected")
    client.well("quantize", SOURCE, tmp_path / "out", *options)
    assert without_origin(tmp_path / "out") == without_origin(tmp_path / "expected")
    origin = {"id": SOURCE, "revision": hub.repositories[SOURCE].sha()}
    facts = {"license": "apache-2.0", "language": ["en", "de"]}
    assert (model_of(tmp_path / "out"), model_of(tmp_path / "expected")) == (origin | facts, facts)
    assert origin.items() <= manifest_of(tmp_path / "out")["source"].items()
    assert set(fetched(hub.requests)) == set(files_of(source)) - set(NOT_NEEDED)
    blobs = [path.stat().st_size for path in (client.home / "hub").rglob("blobs/*") if path.is_file()]
    assert (max(blobs, default=0) > 30_000) == (not options)

    before = len(hub.requests)
    assert f"{tmp_path / 'out'}: " in client.well("quantize", SOURCE, tmp_path / "out", *options).stderr
    assert not any(name.endswith(".safetensors") and name != SHARDS[0] for name in fetched(hub.requests[before + 10 :]))


def test_verify_inspect_and_export_fetch_only_needed_files(
    hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    master = tmp_path / "master"
    run_command({"quantize": str(source)}, master)
    (master / "README.md").write_text("# card\n")
    hub.commit("me/master", {**files_of(master), ".gitattributes": b"*.bin", ".cache/x": b"hidden"})
    shown = client.well("inspect", "me/master").stdout
    assert fetched(hub.requests) == ["pqweights.json"]
    assert shown == client.well("inspect", master).stdout
    assert ": ok: 6 tensors" in client.well("verify", "me/master").stdout
    assert not any("/." in name or name.startswith(".") or name == "README.md" for name in fetched(hub.requests))
    client.well("export", "me/master", tmp_path / "by-id", "--target", "bf16")
    client.well("export", master, tmp_path / "by-folder", "--target", "bf16")
    assert without_origin(tmp_path / "by-id")[0] == without_origin(tmp_path / "by-folder")[0]
    origin = {"id": "me/master", "revision": hub.repositories["me/master"].sha()}
    assert origin.items() <= manifest_of(tmp_path / "by-id")["source"].items()

    others = {"model.gguf": b"GGUF", "pytorch_model.bin": b"what is this"}
    hub.commit("me/master", others)
    sent = len(hub.requests)
    refused = client("verify", "me/master")
    assert refused.exit_code == 1
    assert [line.partition(": ")[0] for line in refused.stdout.splitlines()] == [*others]
    assert not set(fetched(hub.requests[sent:])) & others.keys()


@pytest.mark.parametrize("options", [[], ["--low-disk"]], ids=["cache", "low-disk"])
def test_file_that_the_hub_sends_by_xet_only_needs_a_package(
    options: list[str], client: Client, source: Path, tmp_path: Path
) -> None:
    client.patch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    line = client.line("quantize", SOURCE, tmp_path / "out", *options)
    assert "pip install hf_xet" in line


def test_cached_files_are_not_fetched_again(hub: LoopbackHub, client: Client, source: Path, tmp_path: Path) -> None:
    """--low-disk does not fetch what the cache holds, and does not delete it there."""
    client.well("quantize", SOURCE, tmp_path / "first")
    sent = len(hub.requests)
    for number, options in enumerate((["--bits", "4"], ["--low-disk"], ["--bits", "3"])):
        client.well("quantize", SOURCE, tmp_path / str(number), *options)
    assert not [name for name in fetched(hub.requests[sent:]) if name.endswith(".safetensors")]
    assert sum(request.bytes_sent for request in hub.requests[sent:]) < 30_000
    assert (tmp_path / "1/pqweights.json").read_bytes() == (tmp_path / "first/pqweights.json").read_bytes()


# --- Which source is meant --------------------------------------------------------------------------------------------


def test_revisions_are_branches_tags_pull_requests_and_commits(
    hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    """Files are always requested by commit."""
    old = hub.repositories[SOURCE].sha()
    hub.commit(SOURCE, {"NOTICE": b"1"})
    dev = hub.commit(SOURCE, {"NOTICE": b"2"}, branch="feature/x")
    hub.repositories[SOURCE].branches |= {"v1.0": old, "refs/pr/1": dev}  # the loopback Hub keeps a tag like a branch
    wanted = {"feature/x": dev, "v1.0": old, "refs/pr/1": dev, old: old, "main": hub.repositories[SOURCE].sha()}
    for revision, commit in wanted.items():
        options = [] if revision == "main" else ["--revision", revision]
        planned = json.loads(client.well("plan", SOURCE, "--json", *options).stdout)
        assert planned["hub"]["revision"] == commit
        if revision in ("feature/x", old):
            out = tmp_path / f"out-{commit}"
            client.well("quantize", SOURCE, out, "--low-disk", *options)
            assert model_of(out)["revision"] == commit
            assert (out / "NOTICE").exists() == (commit == dev)
    asked = (request.path.partition("/resolve/")[2].partition("/")[0] for request in hub.requests)
    assert {*asked} <= {"", *wanted.values()}


@pytest.mark.parametrize("option", [["--revision", "main"], ["--low-disk"]], ids=" ".join)
def test_options_of_the_hub_are_refused_for_folders(
    option: list[str], hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    line = client.line("quantize", source, tmp_path / "out", *option)
    assert option[0] in line and str(source) in line and "hf://" in line
    assert not (tmp_path / "out").exists()
    for command in ("plan", "verify", "inspect") if option[0] == "--revision" else ():
        assert option[0] in client.line(command, source, *option)
    assert hub.requests == []


def test_local_folder_takes_precedence_over_repository(
    hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    client.patch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / SOURCE)
    hub.commit(SOURCE, {"NOTICE": b"of the Hub"})
    client.well("quantize", SOURCE, "from-folder")
    assert hub.requests == []
    client.well("quantize", f"hf://{SOURCE}", "from-hub")
    assert not (tmp_path / "from-folder/NOTICE").exists()
    assert (tmp_path / "from-hub/NOTICE").read_bytes() == b"of the Hub"
    assert model_of(tmp_path / "from-hub")["id"] == SOURCE  # not hf://...


FOLDERS, REPOSITORIES = (
    ("./me/source", "source", "/me/source", "me/a/b"),
    ("me/a/b", "../../x", "", "me/a--b", "me/a..b"),
)


@pytest.mark.parametrize("source", [*FOLDERS, *(f"hf://{name}" for name in REPOSITORIES)])
def test_invalid_repository_names_are_refused(source: str, hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    line = client.line("quantize", source, tmp_path / "out")
    assert source.removeprefix("hf://").removeprefix("./") in line
    assert ("repository" in line) == source.startswith("hf://")
    assert hub.requests == [] and not (tmp_path / "out").exists()


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    (["me/source", "--revision", "nope"], "right", ["me/source at revision nope"]),
    (["me/source", "--revision", "../../x"], "right", ["me/source"]),
    (["me/nothing"], None, ["me/nothing", "check the name", LOG_IN]),
    (["me/private"], "right", ["me/private", "private", LOG_IN]),
    (["me/gated"], "right", ["me/gated", "http://", LOG_IN]),
    (["me/gated"], None, ["me/gated", "http://", LOG_IN]),
    (["me/private"], "wrong", ["token", LOG_IN]),
]


def test_token_that_no_header_can_carry_is_refused(client: Client, hub: LoopbackHub) -> None:
    assert "--token" in client.line("plan", "me/source", "--token", "hf_\u00e4")
    assert not hub.requests


@pytest.mark.usefixtures("source")
def test_repository_that_pqweights_did_not_push_is_refused_where_its_manifest_is_read(client: Client) -> None:
    for command in ("verify me/source", "inspect me/source"):
        line = client.line(*command.split())
        assert "me/source: " in line and "pqweights.json" in line


@pytest.mark.parametrize(("arguments", "token", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_say_what_to_do(
    arguments: list[str], token: str | None, says: list[str], hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    files = files_of(write_source(tmp_path / "source"))
    for name in ("source", "private", "gated"):
        hub.create(f"me/{name}", private=name == "private", gated="manual" if name == "gated" else False)
        hub.commit(f"me/{name}", files | {"pqweights.json": b"{}"})
        hub.repositories[f"me/{name}"].access = name == "source"
    client.token = {"right": hub.token, "wrong": "hf_" + "Wrong" * 7, None: None}[token]
    for command in ("plan", "quantize", "quantize --low-disk", "verify", "inspect", "export --target bf16"):
        name, *options = command.split()
        out = [tmp_path / "out"] if name in ("quantize", "export") else []
        sent = len(hub.requests)
        line = client.line(name, arguments[0], *out, *arguments[1:], *options)
        assert all(part in line for part in says)
        assert not (tmp_path / "out").exists()
        assert len(hub.requests) - sent <= 4  # none of these requests is sent again


def test_token_gives_access_to_private_and_gated_repositories(
    hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    hub.create("me/private", private=True, gated="auto")
    hub.commit("me/private", files_of(source))
    client.well("plan", "me/private")
    client.token = None
    client.line("plan", "me/private")
    for name, options in (("out", ()), ("low", ("--low-disk",))):
        client.well("quantize", "me/private", tmp_path / name, "--token", hub.token, *options)
    client.home.mkdir(exist_ok=True)
    (client.home / "token").write_text(hub.token)  # as hf auth login leaves it
    client.well("plan", "me/private")


def test_unreachable_hub_is_reported(client: Client, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        client.set_up()
        for command in (["plan", SOURCE], ["quantize", SOURCE, tmp_path / "out"], ["verify", SOURCE]):
            result = client(*command)
            *waits, line = result.stderr.splitlines()
            assert result.exit_code == 1
            assert [wait.rpartition("(")[2] for wait in waits] == ["1 of 2)", "2 of 2)"]
            assert line.startswith(f"error: {SOURCE}: ") and client.url in line
    assert not (tmp_path / "out").exists()


# --- --low-disk -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def most_files(out: Path) -> Iterator[list[int]]:
    """Watch what is fetched for a run, and count how many files, whole or partial, there were at most."""
    most, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.001):
            with contextlib.suppress(FileNotFoundError):
                names = {path.name.removesuffix(".partial") for path in out.glob(".pqweights/*/fetched/*")}
                most[0] = max(most[0], len(names))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look)
        yield most
        stop.set()


@pytest.mark.parametrize(
    "slow", [(EncodeJob, "write"), (Checkpoint, "file_fingerprint")], ids=["encoding", "releasing"]
)
def test_low_disk_holds_two_files_at_most(
    slow: tuple[Any, str], hub: LoopbackHub, client: Client, tmp_path: Path
) -> None:
    shards = [{f"model.layers.{n}.mlp.up_proj.weight": bf16(gaussian(64, 256, seed=n))} for n in range(6)]
    hub.commit(SOURCE, files_of(write_checkpoint(tmp_path / "source", *shards)))
    step = getattr(*slow)

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)  # leaves time to fetch more files than are allowed
        return step(*arguments)

    client.patch.setattr(*slow, slowly)
    hub.inject(*(Fault(Stall(0.01, at=20_000), "GET", rf"resolve/.*-0000{n}-of", after=1) for n in range(1, 7)))
    with most_files(tmp_path / "out") as most:
        client.well("quantize", SOURCE, tmp_path / "out", "--low-disk", "--threads", "1")
    assert most == [2]
    assert not (tmp_path / "out/.pqweights").exists()
    assert not list(client.home.rglob("*.safetensors"))


def test_low_disk_fetches_once_for_several_formats(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    source = families.build(families.FAMILIES["llama"], tmp_path / "whole")
    transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(
        tmp_path / "source", max_shard_size="600KB"
    )
    source = tmp_path / "source"
    hub.commit(SOURCE, files_of(source))
    asked = ("--target", "torchao", "--format", "int8,fp8", "--max-shard-size", "200KB", "-q")
    client.well("export", source, tmp_path / "expected", *asked)
    hub.requests.clear()
    with most_files(tmp_path / "out") as most:
        client.well("export", SOURCE, tmp_path / "out", *asked, "--low-disk")
    assert without_origin(tmp_path / "out") == without_origin(tmp_path / "expected")
    fetches = Counter(name for name in fetched(hub.requests) if name.endswith(".safetensors"))
    assert len(fetches) > 3 and set(fetches.values()) == {2}  # once for the header, once whole
    assert most[0] <= 3


def test_low_disk_with_scales_in_another_shard(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    """The scales of four shards of weights lie in the last one, but for one in the first."""
    rng, names = np.random.default_rng(0), [f"model.layers.{n}.mlp.up_proj.weight" for n in range(4)]
    shards: list[dict[str, Any]] = [{n: ("F8_E4M3", rng.integers(0, 120, (128, 256), dtype=np.uint8))} for n in names]
    for number, name in enumerate(names):
        scales = {f"{name}_scale_inv": f32(np.exp2(gaussian(1, 2, seed=number, scale=1)))}
        shards[0 if number == 3 else 3] |= scales
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = write_checkpoint(tmp_path / "source", *shards, config=config)
    hub.commit(SOURCE, files_of(source))
    run_command({"quantize": str(source)}, tmp_path / "expected")
    with most_files(tmp_path / "out") as most:
        client.well("quantize", SOURCE, tmp_path / "out", "--low-disk")
    assert without_origin(tmp_path / "out") == without_origin(tmp_path / "expected")
    # The first and the last shard are needed until the end, besides the one being read and the one being fetched.
    assert most[0] <= 4
    assert not (tmp_path / "out/.pqweights").exists()
    fetches = Counter(name for name in fetched(hub.requests) if name.endswith(".safetensors"))
    assert set(fetches.values()) == {2}  # once for the header, once whole


def test_cache_and_result_on_one_disk_need_room_together(client: Client, source: Path, tmp_path: Path) -> None:
    weights = sum((source / name).stat().st_size for name in SHARDS)
    plan = run_command({"quantize": str(source)}, tmp_path / "local").plan
    usage, needed = shutil.disk_usage(tmp_path), weights + plan.output_bytes + plan.companion_bytes
    client.patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    line = client.line("quantize", SOURCE, tmp_path / "out")
    assert all(named in line for named in (SOURCE, str(weights), str(needed - 1), "pass --low-disk"))
    assert not (tmp_path / "out").exists()
    client.patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    client.well("quantize", SOURCE, tmp_path / "out")
    client.patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    client.well("quantize", SOURCE, tmp_path / "out")


# --- Sources that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_disk", [False, True])
def test_fetched_file_that_changes_while_it_is_read_ends_the_run(
    low_disk: bool, hub: LoopbackHub, client: Client, source: Path, tmp_path: Path
) -> None:
    write, out, changed = EncodeJob.write, tmp_path / "out", list[Path]()
    folder, files = (out / ".pqweights", "*/fetched") if low_disk else (client.home / "hub", "models--*/blobs")
    first = hashlib.sha256((source / SHARDS[0]).read_bytes()).hexdigest()
    asked, ended = threading.Event(), threading.Event()

    def stall() -> None:
        asked.set()
        ended.wait()

    def changing(job: EncodeJob, chunk: int, values: Any, file: ShardFile) -> Any:
        done = write(job, chunk, values, file)
        if not changed:
            assert not low_disk or asked.wait(20)  # the next file is being fetched
            (path,) = (path for path in folder.glob(f"{files}/{first[:15]}*") if path.suffix != ".partial")
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            changed.append(path)
        return done

    client.patch.setattr(EncodeJob, "write", changing)
    client.patch.setattr("pqweights.checkpoint.ahead.STOP_SECONDS", 0.01)
    if low_disk:
        hub.inject(Fault(Run(stall), "GET", f"resolve/.*{SHARDS[1]}", after=1))
    line = client.line("quantize", SOURCE, out, "--threads", "1", *(["--low-disk"] if low_disk else []))
    assert changed and SHARDS[0] in line
    assert not out.exists() or not [*out.iterdir()]
    ended.set()
    for thread in (thread for thread in threading.enumerate() if thread.name.startswith("pqweights-fetch")):
        thread.join()
    assert not out.exists() or not [*out.iterdir()]  # what was being fetched does not come back


# --- Interrupted runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def large(hub: LoopbackHub, tmp_path: Path) -> Path:
    """A small shard and two large ones, in a local folder and on the Hub."""
    shapes = [(64, 256), (LARGE_BYTES // 1024, 512), (LARGE_BYTES // 1024, 512)]
    shards = [
        {f"model.layers.{n}.mlp.up_proj.weight": bf16(gaussian(*shape, seed=n))} for n, shape in enumerate(shapes)
    ]
    folder = write_checkpoint(tmp_path / "source", *shards, companions={"NOTICE.txt": b"of the source"})
    hub.commit(SOURCE, files_of(folder))
    return folder


def test_killed_run_continues_with_the_shard_that_was_fetched(
    hub: LoopbackHub, client: Client, large: Path, tmp_path: Path
) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"
    run_command({"quantize": str(large)}, tmp_path / "expected")
    with stalled(hub, client.home, ["quantize", SOURCE, out, "--low-disk"], at=STALL_AT) as process:
        process.kill()
        process.wait()
    shutil.copytree(out, killed)
    assert list(killed.rglob("*.incomplete"))

    sent = len(hub.requests)
    continued = client.well("quantize", SOURCE, out, "--low-disk")
    assert "continued" not in continued.stderr  # no output file was finished
    assert without_origin(out) == without_origin(tmp_path / "expected")
    names = fetched(hub.requests[sent:])
    assert [names.count(name) for name in SHARDS[1:]] == [2, 2]  # once for the header, once whole
    check_new_commit(hub, client, large, out=out, killed=killed)


def check_new_commit(hub: LoopbackHub, client: Client, large: Path, *, out: Path, killed: Path) -> None:
    """Check that files of two commits are not mixed if the owner commits before a killed run continues.

    large: the source
    out: the result of the old commit
    killed: what the killed run left
    """
    old = hub.repositories[SOURCE].sha()
    changed = bytearray((large / SHARDS[0]).read_bytes())
    changed[-2] ^= 1
    new = hub.commit(SOURCE, {SHARDS[0]: bytes(changed), "NOTICE.txt": b"of the new one"})
    before = folder_bytes(killed)
    line = client.line("quantize", SOURCE, killed, "--low-disk")
    assert new in line and f"--revision {old}" in line and "--overwrite" in line
    assert folder_bytes(killed) == before
    renewed = shutil.copytree(killed, killed.with_name("renewed"))
    client.well("quantize", SOURCE, killed, "--low-disk", "--revision", old)
    assert folder_bytes(killed) == folder_bytes(out)

    client.well("quantize", SOURCE, renewed, "--low-disk", "--overwrite")
    assert model_of(renewed)["revision"] == new
    (large / SHARDS[0]).write_bytes(changed)
    (large / "NOTICE.txt").write_bytes(b"of the new one")
    run_command({"quantize": str(large)}, killed.with_name("expected-new"))
    assert without_origin(renewed) == without_origin(killed.with_name("expected-new"))


@pytest.mark.parametrize("options", [["--low-disk"], []], ids=["low-disk", "cache"])
def test_interrupt_works_while_a_reply_stalls(
    options: list[str], hub: LoopbackHub, client: Client, large: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_command({"quantize": str(large)}, tmp_path / "expected")
    with stalled(hub, client.home, ["quantize", SOURCE, out, *options], at=STALL_AT) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=20)  # less than the reply stalls
        assert (process.returncode, printed, told.count("\n")) == (130, "", 1)
        assert told.startswith("interrupted; run the same command again")
    client.well("quantize", SOURCE, out, *options)
    assert without_origin(out) == without_origin(tmp_path / "expected")
