"""What is shown while a command works: a line that fits the terminal, steps without progress, and --quiet."""

from __future__ import annotations

import io
import re
import time
import types

import pytest
import typer
from pqweights_cli import bar, output
from pqweights_cli.output import BYTES
from rich.console import Console

from pqweights.common import threads
from pqweights.common.threads import listening, slow_step, told_steps

NAME = "model.language_model.layers.17.mlp.experts.113.down_proj.weight"


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)


def drawn(display: bar.Bar, width: int = 80) -> str:
    """Return the line that a terminal of that width shows."""
    assert bar.Bar._shown is not None
    with (console := Console(width=width, file=io.StringIO(), color_system=None)).capture() as captured:
        console.print(bar.Bar._shown.get_renderable())
    return captured.get()


@pytest.mark.parametrize("width", [30, 60, 80, 160])
@pytest.mark.parametrize("unit", [BYTES, "steps"])
def test_progress_is_one_line_at_any_width(width: int, unit: str) -> None:
    display = bar.Bar("quantizing", unit, terminal(width))
    for done in (0, 10, 20):
        display(done * 10**9, 4 * 10**10, NAME)
        time.sleep(0.002)  # the speed needs two samples
    text = drawn(display, width)
    display.close()
    assert text.count("\n") == 1 and len(text.rstrip()) <= width
    assert text.startswith("quant")
    if width > 30 and unit == BYTES:
        assert "20.0/40.0 GB" in text and "layers.1" in text
    if width == 160:
        assert text.rstrip().endswith(NAME) and "━" in text and ("B/s" in text) == (unit == BYTES)


def test_progress_is_plain_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One every few seconds, none for short jobs; the time left counts what this run did, and one count at a time."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def told(display: object, *calls: tuple[float, int, int, str]) -> str:
        for seconds, done, total, name in calls:
            now[0] = seconds
            display(done, total, name)  # type: ignore[operator]
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    with output.progress("quantizing") as show:
        lines = told(show, *((second, second * 10**8, 4 * 10**9, NAME) for second in range(1, 31))).splitlines()
    assert 4 <= len(lines) <= 8
    for line in lines:
        assert re.fullmatch(rf"quantizing \d+% of 4.00 GB, 100.00 MB/s, \d+ s left: {NAME}", line)
    with output.progress("verifying") as show:
        assert told(show, *((30 + step / 20, step, 20, "x") for step in range(20))) == ""
        assert told(show, (100, 0, 100, "x"), (200, 0, 0, "x")) == ""
    now[0] = 0.0
    display = output._Lines("measuring", "groups")
    earlier = told(display, (0, 12, 18, "a"), (10, 13, 18, "b"), (60, 18, 18, ""))
    assert earlier == "measuring 72% of 18 groups, 50 s left: b\nmeasuring 100% of 18 groups, 0 s left\n"
    assert told(display, (61, 1, 16, "c"), (71, 2, 16, "d")) == "measuring 12% of 16 groups, 140 s left: d\n"


def test_slow_step_is_shown_in_the_line_until_it_ends() -> None:
    display = bar.Bar("quantizing", BYTES, terminal(80))
    with listening(display.status):
        with slow_step("looking at the cluster"):
            assert drawn(display).startswith("quantizing, looking at the cluster")
        assert drawn(display).startswith("quantizing ")
        display(1, 10, "x")
        assert drawn(display).startswith("quantizing 1/10")
        with slow_step("looking at the cluster"):
            assert "looking" in drawn(display)
        assert drawn(display).startswith("quantizing 1/10")
    display.close()


def waited_for(text: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Wait until a line is printed by another thread."""
    found = ""
    for _ in range(500):
        found += capsys.readouterr().err
        if text in found:
            return found == text
        time.sleep(0.01)
    return False


def test_status_is_a_line_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.status("loading the model"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "STATUS_SECONDS", 0.01)
    with output.status("loading the model"):
        assert waited_for("loading the model\n", capsys)
        with slow_step("looking at the cluster"):
            assert waited_for("looking at the cluster\n", capsys)
        time.sleep(0.03)
        assert capsys.readouterr().err == ""  # it was said already
    with output.progress("quantizing") as show:  # the first call ends the step before it
        show.status("reading the headers")
        show(1, 10, "x")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    with output.progress("quantizing"), slow_step("looking at the cluster"):
        assert waited_for("quantizing: looking at the cluster\n", capsys)


def test_quiet_silences_notes_progress_and_summaries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "STATUS_SECONDS", 0.0)

    def talk() -> None:
        output.note("a note")
        output.summary("a summary")
        with output.status("a step"):
            time.sleep(0.02)
        with output.progress("working") as show:
            show(1, 2, "x")
            show.status("a step")
            time.sleep(0.02)

    with output.errors(quiet=True):
        talk()
    assert capsys.readouterr() == ("", "")
    with output.errors(quiet=True):
        output.summary("4 tensors", "done")
        output.warn("this may be wrong")
        output.print_json({})
    assert capsys.readouterr() == ("{}\n", "WARNING: this may be wrong\n")
    with pytest.raises(typer.Exit), output.errors(quiet=True):
        output.fail("it broke")
    assert capsys.readouterr() == ("", "error: it broke\n")
    with output.errors():
        talk()
    assert capsys.readouterr() == ("a summary\n", "a note\na step\nworking: a step\n")


def test_steps_are_told_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = iter(range(0, 1000, 4)), list[str]()
    monkeypatch.setattr(threads, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    with listening(told.append):
        assert list(told_steps(range(1, 6), "drawing", "tokens", each=8)) == [1, 2, 3, 4, 5]
    assert told == ["drawing: 8 of 40 tokens, 32 s left", "drawing: 24 of 40 tokens, 11 s left"]
