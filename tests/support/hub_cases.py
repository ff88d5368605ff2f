"""Commands that meet faults of the Hub: run by tests/hub/test_hub.py, and by benchmarks/hub.py for its table.

Each case runs a command against the loopback Hub with faults, and then once more without. In the end, the folder and
the Hub must hold the right bytes.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
from loopback_faults import Corrupt, Cut, Drop, Fault, Run, Short, Stall, Status
from loopback_hub import LoopbackHub

if TYPE_CHECKING:
    import pytest
    from typer.testing import Result

RUN = Path(__file__).with_name("run_hub.py")
SOURCE, TARGET = "me/source", "me/master"
# The first request for this shard, which is for its header, passes.
SHARD = r"resolve/.*/model-00002-of-00003\.safetensors"
CARD = b"---\nlicense: apache-2.0\nlanguage:\n- en\n- de\n---\n# A model\n"
# Weights of other formats and hidden files, which are not fetched.
NOT_NEEDED = {
    "pytorch_model.bin": b"pickled",
    "model.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    ".gitattributes": b"*.bin",
}


@dataclass(frozen=True)
class Case:
    """A command, quantize or push, that meets faults.

    name: what goes wrong
    faults: makes the faults for a Hub
    says: what the line of the first run must contain if it has to fail
    options: further options of the command
    """

    name: str
    faults: Callable[[LoopbackHub], list[Fault]]
    command: str = "quantize"
    _: KW_ONLY
    says: str = ""
    options: tuple[str, ...] = ()


def write_source(folder: Path) -> Path:
    """Write three shards of 180 kB, 66 kB and 33 kB with a card, and files of other formats."""
    layers: list[dict[str, tuple[int, ...]]] = [
        {"mlp.up_proj": (256, 256), "mlp.down_proj": (128, 192), "input_layernorm": (128,)},
        {"mlp.up_proj": (128, 256)},
        {"mlp.up_proj": (64, 256), "input_layernorm": (128,)},
    ]
    shards = [
        {
            f"model.layers.{layer}.{name}.weight": helpers.bf16(helpers.gaussian(*shape, seed=10 * layer + seed))
            for seed, (name, shape) in enumerate(shapes.items())
        }
        for layer, shapes in enumerate(layers)
    ]
    companions = {"README.md": CARD, "tokenizer.json": b'{"version": "1.0"}', "chat/template.jinja": b"{{ x }}"}
    return helpers.write_checkpoint(folder, *shards, config={"model_type": "llama"}, companions=companions | NOT_NEEDED)


def files_of(folder: Path) -> dict[str, bytes | Path]:
    """Return the paths of all files in a folder by name, for a commit."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def run(hub: LoopbackHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, against a Hub."""
    return subprocess.run(
        [sys.executable, str(RUN), *arguments], env=hub.environment(home), capture_output=True, text=True, timeout=120
    )


@dataclass(kw_only=True)
class Client:
    """The command line in this process, against a Hub. Starting a process would take most of a second.

    url: the address of the Hub
    home: the folder of the cache and of the token that a login leaves
    token: the token in the environment
    patch: undoes the settings

    The official client reads its settings when it is imported, so they are set in its module.
    """

    url: str
    home: Path
    token: str | None
    patch: pytest.MonkeyPatch

    def set_up(self) -> Client:
        """Make the settings of run_hub.py and LoopbackHub.environment, until `patch` is undone."""
        from huggingface_hub import constants
        from huggingface_hub.utils import _http, close_session, disable_progress_bars, logging

        from pqweights.storage import requests

        close_session()
        logging.set_verbosity_error()
        disable_progress_bars()
        settings = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_TOKEN_PATH": str(self.home / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            self.patch.setattr(constants, name, value)
        self.patch.setattr(requests, "FIRST_WAIT_SECONDS", 0.005)
        sleep = time.sleep
        self.patch.setattr(_http.time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
        for name in ("NO_PROXY", "no_proxy"):
            self.patch.setenv(name, "127.0.0.1,localhost")
        self.patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        return self

    def __call__(self, *arguments: str | Path) -> Result:
        """Run a command. Exceptions other than the exit of the command are bugs, and raised."""
        from pqweights_cli.main import app
        from typer.testing import CliRunner

        words = [str(argument) for argument in arguments]
        result = CliRunner(env={"HF_TOKEN": self.token}).invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert not self.token or self.token not in result.output
        return result

    def well(self, *arguments: str | Path) -> Result:
        """Run a command that must succeed."""
        result = self(*arguments)
        assert result.exit_code == 0, result.output
        return result

    def line(self, *arguments: str | Path) -> str:
        """Run a command that must fail with exit code 1, and return its one line; waits are reported before it."""
        from commands import progress_hidden

        with progress_hidden():
            result = self(*arguments)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        return the_line(result.stderr)


def the_line(stderr: str) -> str:
    """Return the one line of a command that failed, after those of its waits."""
    *waits, line = stderr.splitlines()
    assert all("trying again in" in wait for wait in waits), stderr
    assert line.startswith("error: ") and len(line) < 1500 and line.isprintable()
    return line


@contextmanager
def stalled(hub: LoopbackHub, home: Path, command: Sequence[str | Path], *, at: int) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process of its own until the second reply with shard 2 stalls; it is killed in the end.

    at: after how many bytes the reply stalls
    """
    hub.inject(Fault(Stall(100, at=at), "GET", "resolve/.*-00002-of", after=1))
    process = subprocess.Popen(
        [sys.executable, str(RUN), *map(str, command), "--quiet"],
        env=hub.environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not any(request.fault and request.bytes_sent == at for request in hub.requests):
            assert time.monotonic() < end and process.poll() is None, "no request stalled"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()
        hub.clear_faults()


def another_commit(hub: LoopbackHub) -> None:
    """Commit a change to the source, as its owner might while it is read."""
    source = hub.repositories[SOURCE]
    data = bytearray(source.read("model-00003-of-00003.safetensors"))
    data[-1] ^= 1
    hub.commit(SOURCE, {"model-00003-of-00003.safetensors": bytes(data), "NOTICE": b"!"})


TRANSIENT = {
    "connection cut in the middle of a shard": Fault(Cut(40_000), "GET", SHARD, after=1, times=2),
    "connection reset in the middle of a shard": Fault(Cut(40_000, reset=True), "GET", SHARD, after=1),
    "connection closed without an answer": Fault(Drop(), "GET", SHARD, after=1, times=2),
    "truncated range, honestly announced": Fault(Short(30_000), "GET", SHARD, after=1),
    "truncated range, wrongly announced": Fault(Short(30_000, consistent=False), "GET", SHARD, after=1),
    "503 on a shard": Fault(Status(503), "GET", SHARD, after=1, times=3),
    "500 on a shard": Fault(Status(500), "GET", SHARD, after=1),
    "429 with Retry-After on a shard": Fault(Status(429, {"Retry-After": "1"}), "GET", SHARD, after=1),
    "503 on the list of files": Fault(Status(503), "GET", "/api/models/"),
    "429 with Retry-After on the list of files": Fault(Status(429, {"Retry-After": "1"}), "GET", "/api/models/"),
    "503 on a header": Fault(Status(503), "GET", r"resolve/.*-00001-of"),
    "header cut": Fault(Cut(100), "GET", r"resolve/.*-00001-of"),
    "503 on config.json": Fault(Status(503), "GET", r"resolve/.*config\.json"),
    "tokenizer cut": Fault(Cut(3), "GET", r"resolve/.*tokenizer\.json"),
    "wrong checksum, once": Fault(Corrupt(50_000), "GET", SHARD, after=1),
    "wrong checksum of config.json, once": Fault(Corrupt(3), "GET", r"resolve/.*config\.json"),
}

ALWAYS = 1000  # more often than any command tries
LOW_DISK = ("--low-disk",)
INTO_CACHE = (
    "connection cut in the middle of a shard",
    "connection reset in the middle of a shard",
    "503 on a shard",
    "429 with Retry-After on a shard",
    "wrong checksum, once",
)


def always(fault: Fault) -> Callable[[LoopbackHub], list[Fault]]:
    """Return a function that makes this fault for any Hub."""
    return lambda hub: [fault]


def on_shard(action: Any) -> Callable[[LoopbackHub], list[Fault]]:
    """Return a function that makes a fault which hits every request for the shard."""
    return always(Fault(action, "GET", SHARD, after=1, times=ALWAYS))


GONE = Status(404, {"X-Error-Code": "EntryNotFound"})
SOON, LATER = Status(429, {"Retry-After": "1"}), Status(429, {"Retry-After": "3600"})
CASES = [
    *(Case(name, always(fault), options=LOW_DISK) for name, fault in TRANSIENT.items()),
    *(Case(f"{name} (into the cache)", always(TRANSIENT[name])) for name in INTO_CACHE),
    Case("wrong checksum, always", on_shard(Corrupt(50_000)), says="hash", options=LOW_DISK),
    Case("wrong checksum, always (into the cache)", on_shard(Corrupt(50_000)), says="hash"),
    Case("503 that does not end", on_shard(Status(503)), says="is failing (503", options=LOW_DISK),
    Case("429 that asks to wait an hour", on_shard(LATER), says="wait for 3600 s", options=LOW_DISK),
    Case(
        "a commit between two requests",
        lambda hub: [Fault(Run(lambda: another_commit(hub)), "GET", SHARD, after=1)],
        options=LOW_DISK,
    ),
    Case("a shard that is gone", on_shard(GONE), says="is not in the repository", options=LOW_DISK),
    Case("upload cut half-way, once", always(Fault(Cut(5_000), "PUT")), "push"),
    Case("upload that dies half-way, always", always(Fault(Cut(5_000), "PUT", times=ALWAYS)), "push", says="network"),
    Case("503 on an upload", always(Fault(Status(503), "PUT")), "push"),
    Case("503 on the commit", always(Fault(Status(503), "POST", r"/commit/")), "push"),
    Case("429 on the commit", always(Fault(SOON, "POST", r"/commit/")), "push"),
    Case("reply to the commit lost", always(Fault(Drop(applied=True), "POST", r"/commit/")), "push"),
    Case(
        "token without write access",
        always(Fault(Status(403), "POST", r"/commit/", times=ALWAYS)),
        "push",
        says="does not permit",
    ),
    Case(
        "somebody else commits while we push",
        lambda hub: [Fault(Run(lambda: hub.commit(TARGET, {"NOTES": b"x"})), "POST", r"/commit/")],
        "push",
        says="changed it in between",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the two runs of a case ended: their exit codes, the line of the first, and how many requests that sent."""

    first: int
    line: str
    second: int
    requests: int


def play(case: Case, folder: Path, run: Callable[..., subprocess.CompletedProcess[str]] = run) -> Outcome:
    """Run the commands of a case with `run`. Raises AssertionError if they do not end as they must."""
    source, out = _made() / "source", folder / "out"
    expected = shutil.copytree(_made() / "expected", folder / "expected")
    with LoopbackHub() as hub:
        commit = hub.commit(SOURCE, files_of(source))
        if case.command == "push":
            arguments = ["push", str(expected), TARGET]
        else:
            arguments = ["quantize", SOURCE, str(out), *case.options]
        for fault in case.faults(hub):
            hub.inject(fault)
        first = run(hub, folder / "home", *arguments)
        requests = len(hub.requests)
        met = [request for request in hub.requests if request.fault]
        hub.clear_faults()
        if case.command == "quantize":
            arguments += ["--revision", commit]  # the commit that the first run was reading
        second = run(hub, folder / "home", *arguments)
        line = first.stderr.strip().splitlines()[-1] if first.returncode else ""
        assert met, "the fault was never met"
        assert (first.returncode == 0) == (not case.says), first.stderr
        assert case.says in line, line
        assert "Traceback" not in first.stderr + second.stderr, first.stderr + second.stderr
        assert hub.token not in first.stdout + first.stderr + second.stdout + second.stderr
        assert second.returncode == 0, second.stderr
        if case.command == "push":
            _check_pushed(hub, expected)
        else:
            _check_quantized(hub, expected, out, commit)
    return Outcome(first=first.returncode, line=line, second=second.returncode, requests=requests)


@functools.cache
def _made() -> Path:
    """A folder with the source and its master."""
    folder = Path(tempfile.mkdtemp(prefix="hub-cases-"))
    atexit.register(shutil.rmtree, folder)
    helpers.run_command({"quantize": str(write_source(folder / "source"))}, folder / "expected")
    return folder


def _check_quantized(hub: LoopbackHub, expected: Path, out: Path, commit: str) -> None:
    written, right = helpers.folder_bytes(out), helpers.folder_bytes(expected)
    manifest, of_folder = json.loads(written.pop("pqweights.json")), json.loads(right.pop("pqweights.json"))
    assert written == right
    assert (manifest["source"].pop("id"), manifest["source"].pop("revision")) == (SOURCE, commit)
    assert {"id": SOURCE, "revision": commit, **of_folder.pop("model")} == manifest.pop("model")
    of_folder["source"].pop("id")
    assert manifest == of_folder
    fetched = {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}
    assert not fetched & {name.rpartition("/")[2] for name in NOT_NEEDED}


def _check_pushed(hub: LoopbackHub, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            assert hub.repositories[TARGET].read(name) == path.read_bytes(), name
