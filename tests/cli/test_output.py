"""What is shown while a command works: a line that fits the terminal, steps without progress, and --quiet."""

from __future__ import annotations

import io
import time

import pytest
import typer
from pqweights_cli import bar, output
from pqweights_cli.amounts import BYTES, amount_of, duration
from rich.console import Console

from pqweights.common.notices import listening, slow_step

NAME = "model.language_model.layers.17.mlp.experts.113.down_proj.weight"


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)


def shown(width: int, verb: str = "quantizing", unit: str | None = BYTES, name: str = NAME) -> str:
    """Return what a terminal of that width shows in the middle of a job."""
    console = terminal(width)
    display = bar.Bar(verb, unit, console)
    try:
        for done in (0, 10**10, 2 * 10**10):
            display(done, 4 * 10**10, name)
            time.sleep(0.002)  # the speed needs two samples
        return drawn(display, width)
    finally:
        display.close()


def drawn(display: bar.Bar, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(display._progress.get_renderable())
    return captured.get()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 160])
@pytest.mark.parametrize("verb", ["fetching", "quantizing"])
def test_progress_is_one_line_at_any_width(width: int, verb: str) -> None:
    text = shown(width, verb)
    assert text.count("\n") == 1
    assert len(text.rstrip("\n").rstrip()) < width
    assert text.startswith(verb)


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_progress_has_amounts_time_left_and_the_end_of_the_name(width: int) -> None:
    text = shown(width)
    assert "20.00/40.00 GB" in text and "s left" in text
    assert "…" in text and text.rstrip().endswith(".down_proj.weight"[-7:])


def test_wide_progress_has_the_whole_name() -> None:
    text = shown(160)
    assert text.rstrip().endswith(NAME) and "B/s" in text and "█" in text and "░" in text


def test_amounts_have_one_unit_and_durations_a_fitting_one() -> None:
    assert amount_of(5 * 10**8, 12 * 10**9, BYTES) == "0.50/12.00 GB"
    assert (amount_of(3, 900, BYTES), amount_of(3, 12, "steps"), amount_of(3, 12, None)) == (
        "3/900 B",
        "3/12 steps",
        "3/12",
    )
    assert [duration(seconds) for seconds in (0, 119, 120, 7199, 7200)] == ["0 s", "119 s", "2 min", "120 min", "2.0 h"]


def test_progress_does_not_read_markup_in_names() -> None:
    assert "[bold]w[/bold]" in shown(80, name="[bold]w[/bold]")


def test_progress_does_not_print_control_characters() -> None:
    assert "a\\x1b[31mb\\nc" in shown(80, name="a\x1b[31mb\nc")


def test_progress_is_plain_where_the_encoding_is() -> None:
    console = Console(
        width=80, file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), force_terminal=True, color_system=None
    )
    display = bar.Bar("quantizing", BYTES, console)
    display(10**9, 2 * 10**9, NAME)
    text = drawn(display, 80)
    display.close()
    assert text.isascii() and "#####-----" in text and "~" in text


def test_first_line_names_the_step() -> None:
    console = terminal(80)
    display = bar.Bar("", None, console)
    display.status("reading the headers")
    display.close()
    assert isinstance(console.file, io.StringIO)
    first, *_ = console.file.getvalue().partition("0 s")
    assert first.endswith("reading the headers, ")


def test_time_left_counts_only_what_this_run_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = output._Lines("measuring", "groups")
    for seconds, done, total, name in ((0, 12, 18, "a"), (10, 13, 18, "b"), (60, 18, 18, "")):
        now[0] = seconds
        display(done, total, name)
    assert (
        capsys.readouterr().err == "measuring 72% of 18 groups, 50 s left: b\nmeasuring 100% of 18 groups, 0 s left\n"
    )
    for seconds, done, total, name in ((61, 1, 16, "c"), (71, 2, 16, "d")):  # another count
        now[0] = seconds
        display(done, total, name)
    assert capsys.readouterr().err == "measuring 12% of 16 groups, 140 s left: d\n"


def test_new_display_replaces_the_old_one() -> None:
    console = terminal(80)
    first, second = bar.Bar("verifying", None, console), bar.Bar("pushing", None, console)
    first(1, 2, "x")
    second(1, 2, "y")
    assert not first._progress.live.is_started and second._progress.live.is_started
    first(2, 2, "x")
    second.close()
    assert first._progress.live.is_started
    first.close()


def test_slow_step_is_shown_in_the_line_until_it_ends() -> None:
    display = bar.Bar("quantizing", BYTES, terminal(80))
    with listening(display.status):
        with slow_step("looking at the cluster"):
            assert drawn(display, 80).strip() == "quantizing, looking at the cluster, 0 s"
        assert drawn(display, 80).strip() == "quantizing, 0 s"
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
    with output.progress("quantizing"), slow_step("looking at the cluster"):
        assert waited_for("quantizing: looking at the cluster\n", capsys)


def test_first_progress_ends_the_step_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display = bar.Bar("quantizing", BYTES, terminal(80))
    display.status("reading the headers")
    assert drawn(display, 80).strip() == "quantizing, reading the headers, 0 s"
    display(1, 10, "x")
    assert "reading" not in drawn(display, 80)
    display.status("looking at the cluster")
    display(2, 10, "x")
    assert "looking" in drawn(display, 80)
    display.close()
    monkeypatch.setattr(output, "STATUS_SECONDS", 0.02)
    with output.progress("quantizing") as show:
        show.status("reading the headers")
        show(1, 10, "x")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


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
        output.summary("4 tensors", "WARNING: a large error", "done")
        output.warn("this may be wrong")
        output.print_json({})
    assert capsys.readouterr() == ("{}\n", "WARNING: a large error\nWARNING: this may be wrong\n")
    with pytest.raises(typer.Exit), output.errors(quiet=True):
        output.fail("it broke")
    assert capsys.readouterr() == ("", "error: it broke\n")
    with output.errors():
        talk()
    assert capsys.readouterr() == ("a summary\n", "a note\na step\nworking: a step\n")
