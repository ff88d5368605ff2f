"""Tables fit the terminal that they are printed on, and elsewhere are as wide as their cells; summaries."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from closeness import approx
from commands import answer, done, progress_hidden
from helpers import Tensor, bf16, gaussian, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from pqweights_cli import tables
from pqweights_cli.report import MOST_LISTED

WIDE = ["name", "shape", "#bytes", "reason"]
ROWS = [
    ["model.layers.3.self_attn.q_proj.weight", "4096x4096", "10747904", "default for role attention"],
    ["model.layers.10.mlp.experts.17.down_proj.weight", "2048x768", "1006632", "a rule that explains itself at length"],
]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(tables, "terminal_width", lambda: 80)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with more tensors than are listed by default."""
    weights: dict[str, Tensor] = {"model.embed_tokens.weight": bf16(gaussian(64, 128))}
    for layer in range(80):
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"] = bf16(gaussian(128))
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"] = bf16(gaussian(64, 128, seed=layer))
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] = bf16(gaussian(64, 128, seed=layer + 100))
    assert len(weights) > MOST_LISTED
    return write_checkpoint(tmp_path_factory.mktemp("tables") / "model", weights)


@pytest.fixture(scope="module")
def master(source: Path) -> Path:
    out = source.parent / "master"
    done("quantize", source, out, "--set", "*.0.*=6")
    return out


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_table_is_as_wide_as_its_cells_where_stdout_is_not_a_terminal() -> None:
    assert tables.terminal_width() is None
    assert tables.table(WIDE, ROWS) == [
        "name                                             shape         bytes  reason",
        "model.layers.3.self_attn.q_proj.weight           4096x4096  10747904  default for role attention",
        "model.layers.10.mlp.experts.17.down_proj.weight  2048x768    1006632  a rule that explains itself at length",
    ]


def test_text_is_folded_from_the_last_column_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "terminal_width", lambda: 70)
    assert tables.table(WIDE, ROWS) == [
        "name                             shape         bytes  reason",
        "model.layers.3.self_attn.q_proj  4096x4096  10747904  default for role",
        ".weight                                               attention",
        "model.layers.10.mlp.experts.17.  2048x768    1006632  a rule that",
        "down_proj.weight                                      explains itself",
        "                                                      at length",
    ]


def test_columns_that_may_be_left_out_are_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "terminal_width", lambda: 50)
    lines = tables.table(WIDE, ROWS, drop=["shape", "#bytes"])
    assert lines[0].split() == ["name", "reason"]
    assert lines[-1] == "not shown: shape, bytes (for these: a wider terminal, or | cat)"


def test_table_of_many_numbers_is_printed_in_parts_with_the_names_in_each(terminal: None) -> None:
    columns = ["model", *(f"#measure {number}" for number in range(12))]
    rows = [[f"master{row}", *(f"{row}.{number:06}" for number in range(12))] for row in range(3)]
    text = "\n".join(tables.table(columns, rows))
    parts = text.split("\n\n")
    assert len(parts) == 2 and widest(text) <= 80
    for part in parts:
        assert [line.split()[0] for line in part.splitlines()] == ["model", "master0", "master1", "master2"]
    assert {cell for row in rows for cell in row} <= set(text.split())


@given(
    st.lists(st.tuples(st.text("ab. /", max_size=90), st.integers(0, 10**12), st.text("ab ", max_size=200)), min_size=1)
)
def test_any_table_fits(cells: list[tuple[str, int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "terminal_width", lambda: 60)
        rows = [[name, str(count), why] for name, count, why in cells]
        text = "\n".join(tables.table(["name", "#bytes", "why"], rows))
    assert widest(text) <= 60
    for _, count, why in cells:
        assert str(count) in text
        assert all(word in text for word in why.split() if len(word) <= tables.LEAST_TEXT)


def test_many_tensors_are_summarized_on_a_terminal_only(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = done("plan", source).stdout
    assert "model.layers.79.mlp.down_proj.weight" in listed
    monkeypatch.setattr(tables, "terminal_width", lambda: 80)
    summary = done("plan", source).stdout
    assert "--no-summary lists all 241 tensors" in summary and "layers.79" not in summary
    assert widest(summary) <= 80
    everything = done("plan", source, "--no-summary").stdout
    assert "layers.79.mlp.down_proj.weight" in everything and widest(everything) <= 80
    small = done("plan", source, "--summary").stdout
    assert small == summary.replace("--no-summary lists all 241 tensors\n", "")


def test_summary_adds_up_to_the_totals(source: Path, master: Path) -> None:
    totals = answer("inspect", master)["totals"]
    for command in (("plan", source, "--set", "*.0.*=6"), ("inspect", master)):
        heading, *lines = done(*command, "--summary").stdout.split("\n\n")[0].splitlines()
        titles = heading.replace("relative MSE", "error").split()
        assert titles == ["role", "action", "codec", "bits", "tensors", "weights", "bytes", "bits/weight"] + (
            ["error"] if command[0] == "inspect" else []
        )
        rows = [dict(zip(titles, line.split(), strict=True)) for line in lines if "quantize" in line]
        assert {(row["role"], row["bits"], row["tensors"]) for row in rows} == {
            ("attention", "5", "79"),
            ("mlp", "5", "79"),
            ("attention", "6", "1"),
            ("mlp", "6", "1"),
            ("embedding", "5", "1"),
        }
        assert sum(int(row["weights"]) for row in rows) == totals["quantized_weights"]
        bits = 8 * sum(int(row["bytes"]) for row in rows) / totals["quantized_weights"]
        assert bits == approx(totals["bits_per_weight"])
        assert [int(row["bytes"]) for row in rows] == sorted((int(row["bytes"]) for row in rows), reverse=True)
        assert any(line.split()[:2] == ["norm", "keep"] for line in lines)


def test_quantize_prints_the_summary_before_its_totals(source: Path, master: Path) -> None:
    again = done("quantize", source, master, "--set", "*.0.*=6", "--summary").stdout
    table = done("inspect", master, "--summary").stdout.split("\n\n")[0]
    assert again.split("\n", 1)[1].startswith(table + "\n\nweights: ")


def test_inspect_lists_all_or_summarizes(master: Path, terminal: None) -> None:
    summary, everything = done("inspect", master).stdout, done("inspect", master, "--no-summary").stdout
    assert "--no-summary lists all 241 tensors" in summary and "layers" not in summary.split("\n\n")[0]
    assert everything.count("\nmodel.layers.") == 240
    assert widest(summary) <= 80 and widest(everything) <= 80


def test_reasons_stand_below_a_table_that_has_no_room_for_them(source: Path, terminal: None) -> None:
    text = done("plan", source, "--no-summary", "--keep", "*.1.*", "--set", "*.0.*=6").stdout
    table, reasons = text.split("\n\n")[:2]
    assert "reason" not in table.splitlines()[0]
    assert "kept: 80 tensors (10240 weights), normalisation" not in reasons  # those of layer 1 have another reason
    assert "kept: 79 tensors (10112 weights), normalisation" in reasons
    assert "kept: 3 tensors (16512 weights), --keep *.1.*" in reasons
    assert "quantized: 2 tensors (16384 weights), --set *.0.*=6" in reasons


def test_bits_by_layer_are_folded(source: Path, terminal: None) -> None:
    text = done("plan", source, "--target-bpw", "4.5").stdout
    assert widest(text) <= 80
    lines = text[text.index("bits of each group") : text.index("target: ")].splitlines()[1:]
    assert len(lines) == 9  # two kinds of 80 layers in tens, and the embeddings


def test_output_follows_a_real_terminal(source: Path, tmp_path: Path) -> None:
    """Tables fit it, and the summary and the warnings of an export are folded between words."""
    text = on_terminal(80, "plan", source, "--no-summary", "--keep", "*.1.*")
    assert 75 <= widest(text) <= 80 and "layers.79.mlp.down_proj.weight" in text
    done("quantize", source, tmp_path / "master", "--recipe", "t3")
    arguments = ("export", tmp_path / "master", tmp_path / "out", "-t", "vllm", "--overwrite")
    with progress_hidden():
        plain = done(*arguments)
    for stream, text in (("stdout", plain.stdout), ("stderr", plain.stderr)):
        shown = on_terminal(60, *arguments, stream=stream)
        shown = shown[shown.index(text[:8]) :]  # without the bar
        assert widest(text) > 60 and shown.split() == text.split()
        assert all(len(line) <= 60 or " " not in line.strip() for line in shown.splitlines())


def on_terminal(columns: int, *arguments: object, stream: str = "stdout") -> str:
    """What a command prints on a terminal. stream: the one that is a terminal; the other is not."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "pqweights_cli.main", *map(str, arguments)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: theirs}
    with subprocess.Popen(command, env=environment, **streams) as process:
        os.close(theirs)
        pieces = []
        while piece := read_or_end(ours):
            pieces.append(piece)
        assert process.wait() == 0, pieces
    os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def read_or_end(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end of a terminal as an error
        return b""
