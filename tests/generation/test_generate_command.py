"""pqweights generate: one prompt, JSON, stdin, a terminal with a conversation, and interrupts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import answer, done, invoke, refused
from language_models import NO_SYSTEM, SPEECH, TEMPLATE, speaker
from pqweights_cli.main import app
from typer.testing import CliRunner

from pqweights.errors import MasterError
from pqweights.inference.runtimes.steps import TorchStepper

COMMAND = [sys.executable, "-m", "pqweights_cli", "generate"]
# Long enough for a reply to be interrupted.
LIMIT = 10**6


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    speaker(folder / "speaker")
    speaker(folder / "chat", template=TEMPLATE)
    speaker(folder / "endless", template=TEMPLATE, endless=True, max_position_embeddings=LIMIT)
    return folder


# --- one prompt ---


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(work):
    result = done("generate", work / "speaker", "--prompt", "A")
    assert result.stdout == SPEECH + "\n"
    told, speed, setting = result.stderr.splitlines()
    assert told == "the model has no chat template: it continues the text as it is"
    number = r"[\d.e+-]+"
    reply = f"reply: 13 tokens at {number}/s, first token after {number} s; ended by the model"
    assert re.fullmatch(f"prompt: 1 token at {number}/s; {reply}", speed)
    assert re.fullmatch(rf"loaded in {number} s, peak memory {number} [MG]B; float32 on cpu; greedy", setting)


def test_quiet_prints_the_text_alone(work):
    result = done("generate", work / "chat", "--prompt", "A", "--quiet")
    assert (result.stdout, result.stderr) == (SPEECH + "\n", "")


def test_json_is_the_only_output(work):
    found = answer("generate", work / "chat", "--prompt", "Hi", "--max-tokens", 11, "--temperature", 0.01, "--seed", 3)
    assert found["text"] == bytes(found["token_ids"]).decode() and found["model"] == str(work / "chat")
    assert (found["stop"], found["generated_tokens"], found["prompt_tokens"]) == ("length", 11, 5)
    assert found["prompt_tokens_per_second"] > 0 and found["load_seconds"] > 0 and found["peak_bytes"] > 0
    assert found["settings"] | {"runtime": ""} == {
        "runtime": "",
        "device": "cpu",
        "dtype": "float32",
        "packed": False,
        "chat": True,
        "max_tokens": 11,
        "temperature": 0.01,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "seed": 3,
    }


@pytest.mark.parametrize(("data", "tokens"), [(b"Hi\n", 5), (b"Hi", 5), (b"Hi\r\n", 5), ("\ufeffHé\n\n".encode(), 7)])
def test_a_prompt_on_stdin_loses_its_last_line_feed(data, tokens, work):
    result = CliRunner().invoke(app, ["generate", str(work / "chat"), "--json"], input=data)
    assert json.loads(result.stdout)["prompt_tokens"] == tokens


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "stdin: expected a text, found an empty one"),
        (b"\n", "stdin: expected a text"),
        (b"a\xff", "0xff at offset 1"),
    ],
)
def test_what_is_no_prompt_on_stdin_is_refused(data, message, work):
    result = CliRunner().invoke(app, ["generate", str(work / "chat")], input=data)
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and message in result.stderr


def test_a_system_message_needs_a_template_that_takes_it(work, tmp_path):
    assert "--system: the model has no chat template" in refused(
        "generate", work / "speaker", "-p", "A", "--system", "S", "--quiet"
    )
    picky = speaker(tmp_path / "model", template=NO_SYSTEM + TEMPLATE)
    assert "System role not supported" in refused("generate", picky, "-p", "A", "--system", "S")
    assert answer("generate", work / "chat", "-p", "A", "--system", "S")["prompt_tokens"] == 6


def test_a_damaged_template_is_one_line(tmp_path):
    broken = speaker(tmp_path / "model", template="{% for %}")
    assert "chat template" in refused("generate", broken, "-p", "A")


def test_a_revision_needs_a_repository(work):
    result = invoke("generate", work / "chat", "-p", "A", "--revision", "main")
    assert result.exit_code == 2 and "repository on the Hub" in result.stderr


def test_a_pipe_that_cannot_hold_the_text_gets_marks_and_may_be_closed(work):
    line = f"{sys.executable} -m pqweights_cli generate {work / 'endless'} -p A --max-tokens 100000 | head -c 20"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, check=False, env=environment)
    assert found.stdout.startswith(b"Z???\t1") and b"Traceback" not in found.stderr


# --- interrupts ---


def fails_after(steps: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every reply fail after some tokens."""
    original = TorchStepper.run

    def run(stepper: TorchStepper, ids: Any, wanted: Any, on_token: Any) -> None:
        calls = iter(range(steps + 1))

        def taking(token: int) -> None:
            if next(calls) == steps:
                raise error
            on_token(token)

        original(stepper, ids, wanted, taking)

    monkeypatch.setattr(TorchStepper, "run", run)


def test_an_interrupt_keeps_the_text_and_shows_the_figures(work, monkeypatch):
    fails_after(3, KeyboardInterrupt(), monkeypatch)
    result = invoke("generate", work / "chat", "-p", "A")
    assert (result.exit_code, result.stdout) == (130, "Zé\n")
    speed, setting, last = result.stderr.splitlines()
    assert speed.endswith("; interrupted") and setting.startswith("loaded in ") and last == "interrupted"
    result = invoke("generate", work / "chat", "-p", "A", "--json")
    found = json.loads(result.stdout)
    assert (found["stop"], found["text"], found["generated_tokens"]) == ("interrupted", "Zé", 3)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


# --- a terminal ---


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: object, stdout: Any = None) -> None:
        self._master, self._slave = pty.openpty()
        self.before = termios.tcgetattr(self._slave)
        environment = os.environ | {"TERM": "xterm", "INPUTRC": "/dev/null", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=self._slave,
            stdout=stdout or self._slave,
            stderr=self._slave,
            env=environment,
            start_new_session=True,
            preexec_fn=self._control,
        )
        self.text = ""

    def _control(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)

    def until(self, wanted: str, times: int = 1) -> str:
        """Read until a text came so often; return everything since the last call."""
        deadline = time.monotonic() + 90
        while self.text.count(wanted) < times:
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if ready:
                with contextlib.suppress(OSError):
                    self.text += os.read(self._master, 65536).decode("utf-8", "replace")
            assert time.monotonic() < deadline and (ready or self.process.poll() is None), self.text[-2000:]
        at = -1
        for _ in range(times):
            at = self.text.index(wanted, at + 1)
        found, self.text = self.text[: at + len(wanted)], self.text[at + len(wanted) :]
        return found

    def type(self, text: str) -> None:
        """Press keys; \x03 is Ctrl-C and \x04 is Ctrl-D."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            ready, _, _ = select.select([self._master], [], [], 0.1)
            if ready:
                self.text += os.read(self._master, 65536).decode("utf-8", "replace")
            assert time.monotonic() < deadline, self.text[-2000:]
        assert termios.tcgetattr(self._slave) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@contextlib.contextmanager
def terminal(*arguments: object, **options: Any) -> Iterator[Terminal]:
    made = Terminal(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def test_a_conversation_on_a_terminal(work):
    with terminal(work / "chat") as at:
        assert "Ctrl-C ends a reply" in at.until("> ")
        at.type("Hi\n")
        said = at.until("ended by the model")
        assert "Zé€😀" in said and "prompt: 5 tokens" in said
        at.until("> ")
        at.type("And?\n")
        assert "(6 new)" in at.until("ended by the model")
        at.until("> ")
        at.type("\n")  # nothing is asked
        at.until("> ")
        at.type("w" * 200 + "\n")
        assert "and the model takes 128" in at.until("shorter prompt")
        at.until("> ")
        at.type("Once more\n")
        assert "Zé€😀" in at.until("ended by the model")
        at.until("> ")
        at.type("\x04")
        assert at.end() == 0 and "peak memory" in at.text


def test_interrupts_on_a_terminal_end_a_reply_and_then_the_command(work):
    with terminal(work / "endless", "--max-tokens", LIMIT) as at:
        at.until("> ")
        at.type("Hi\n")
        at.until("Zé€😀", times=3)
        at.type("\x03")
        assert "; interrupted" in at.until("> ")
        at.type("Again\n")
        at.until("Zé€😀", times=3)
        at.type("\x03")
        at.until("> ")
        at.type("half a line")
        at.until("half a line")
        time.sleep(0.5)  # the editor of lines notices a signal while it waits for keys, not while it shows them
        at.type("\x03")
        assert at.end() == 130 and "interrupted" in at.text and "Traceback" not in at.text


def test_text_goes_to_a_file_and_questions_to_the_terminal(work, tmp_path):
    with (tmp_path / "out").open("wb") as file, terminal(work / "speaker", stdout=file) as at:
        assert "no chat template" in at.until("> ")
        at.type("A\n")
        at.until("ended by the model")
        at.until("> ")
        at.type("\x04")
        assert at.end() == 0
    assert (tmp_path / "out").read_text() == SPEECH + "\n"


def test_json_needs_a_prompt_on_a_terminal(work):
    with terminal(work / "speaker", "--json") as at:
        at.until("or a text on stdin")
        assert at.end() == 2


def test_an_error_in_the_middle_ends_the_line_of_the_text(work, monkeypatch):
    fails_after(2, MasterError("model.safetensors: lm_head.weight: block 3: damaged"), monkeypatch)
    result = invoke("generate", work / "chat", "-p", "A", "--quiet")
    assert (result.exit_code, result.stdout) == (1, "Z\n")
    assert result.stderr == "error: model.safetensors: lm_head.weight: block 3: damaged\n"
    assert invoke("generate", work / "chat", "-p", "A", "--json").stdout == ""


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_those_that_compute(threads: int, work: Path) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        done("generate", work / "speaker", "--prompt", "A", "--threads", threads)
        assert torch.get_num_threads() == threads
        (work / "text.txt").write_text("abc " * 50)
        torch.set_num_threads(2)
        scored = ("eval", work / "speaker", "--text", work / "text.txt", "--threads", threads, "--no-record")
        done(*scored)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
