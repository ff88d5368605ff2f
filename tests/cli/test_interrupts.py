"""SIGINT at any moment of any command, in a process of its own: one line, exit code 130, and the run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from helpers import folder_bytes, run_command
from pqweights_cli import interrupts, options, output

from pqweights.calibrate.work_folder import folder_beside
from pqweights.storage import open_store

AGAIN = "interrupted; run the same command again to continue where it stopped\n"
NOTHING = "interrupted; no results were kept\n"
ENDED = "interrupted\n"

# Sends SIGINT to itself when a module is imported or a file opened whose name ends as given; a shell ignores SIGINT for
# what it runs in the background.
RUN = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
event, name, start = sys.argv[1:4]
del sys.argv[1:4]
left = 1
def watch(found, arguments):
    global left
    if left and found == event and str(arguments[0]).endswith(name):
        left = 0
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(watch)
if start == "script":
    from pqweights_cli.__main__ import main
    main()
else:
    runpy.run_module("pqweights_cli", run_name="__main__", alter_sys=True)
"""


def interrupted(event: str, name: str, *arguments: object, start: str = "script", **environment: str) -> str:
    """Run a command that gets SIGINT at an event; return what it writes to stderr."""
    command = [sys.executable, "-c", RUN, event, name, start, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("start", "module"), [("script", "pqweights_cli.main"), ("module", "typer"), ("script", "pqweights_cli.options")]
)
def test_before_the_command_begins(start: str, module: str, source: Path, tmp_path: Path) -> None:
    assert interrupted("import", module, "quantize", source, tmp_path / "out", start=start) == ENDED
    assert not (tmp_path / "out").exists()


def told(out: Path) -> str:
    """Return what an interrupted run into a folder says."""
    return AGAIN if (out / ".pqweights/journal.jsonl").exists() else NOTHING


# While the library is imported, headers are read, tensors are read, and the result is written.
MOMENTS = [
    ("import", "pqweights.targets.master"),
    ("import", "pqweights.kernels.native"),
    ("open", "model-00002-of-00002.safetensors"),
    ("open", "model-00001-of-00001.safetensors.json.partial"),
    ("open", "pqweights.json.partial"),
]


@pytest.mark.parametrize(("event", "name"), MOMENTS, ids=[name for _, name in MOMENTS])
def test_quantize_continues(event: str, name: str, source: Path, master: Path, tmp_path: Path) -> None:
    assert interrupted(event, name, "quantize", source, tmp_path / "out", "--threads", 2) == told(tmp_path / "out")
    run_command({"quantize": str(source)}, tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == folder_bytes(master)


def test_a_calibration_continues_what_lies_beside_its_result(source: Path, tmp_path: Path) -> None:
    assert not options.run_continues(str(source), str(tmp_path / "out"), "self")
    work = folder_beside(open_store(tmp_path / "out"))
    work.mkdir()
    assert options.run_continues(str(source), str(tmp_path / "out"), "self") == work
    assert not options.run_continues(str(source), str(tmp_path / "out"), None)


COMMANDS = [
    ("plan SOURCE", "open", "config.json", ENDED),
    ("verify MASTER", "open", "model-00001-of-00001.safetensors", ENDED),
    ("export MASTER OUT --target bf16", "open", "model-00001-of-00001.safetensors", NOTHING),
    ("eval SOURCE --text TEXT", "import", "pqweights.runtime.evaluation", ENDED),
    ("quantize SOURCE OUT --awq TEXT", "import", "pqweights.calibrate.learning", NOTHING),
]


@pytest.mark.parametrize(("line", "event", "name", "told"), COMMANDS, ids=[f"{c[0]} at {c[2]}" for c in COMMANDS])
def test_commands_end_with_one_line(
    line: str, event: str, name: str, told: str, source: Path, master: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("some text")
    places = {"SOURCE": source, "MASTER": master, "OUT": tmp_path / "out", "TEXT": tmp_path / "text"}
    assert interrupted(event, name, *(places.get(word, word) for word in line.split())) == told


def test_ignored_interrupts_stay_ignored(source: Path, tmp_path: Path) -> None:
    """As for a command that a shell runs in the background."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pqweights_cli", "quantize", str(source), str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 0 and (tmp_path / "out/pqweights.json").exists()


def test_error_that_an_interrupt_causes_counts_as_the_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """Imports of compiled modules turn a KeyboardInterrupt into an ImportError."""

    def import_something() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 5)
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts.answer_at_once()
        with pytest.raises(typer.Exit) as ended, output.errors(kept=lambda: True):
            import_something()
        assert ended.value.exit_code == 130
        with pytest.raises(ImportError), output.errors():  # the next command is not interrupted
            raise ImportError("another")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == AGAIN
