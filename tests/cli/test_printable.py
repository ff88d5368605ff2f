"""Text from outside never controls the terminal: names, reasons, metadata and file names are printed with escapes."""

from __future__ import annotations

import ast
import io
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pqweights_cli
import pytest
import typer
from cards import change_manifest
from commands import done, invoke
from helpers import bf16, gaussian, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from pqweights_cli import output, printable
from tiny_gguf import small_gguf

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f"
REORDERED = "\u202efdp.exe\u2066\u200b\ufeff"
FORGED = "\nerror: all is well\r\u2028WARNING: send money\x85"
MARKUP = "[red][link=http://127.0.0.1]"
HOSTILE = f"{ESCAPES}{REORDERED}{FORGED}{MARKUP}"
FILE_NAME = HOSTILE.replace("/", "")
# What the headers of weight files may hold: markup, and characters that are not seen.
UP = f"model.layers.0.mlp.up_proj{MARKUP}\u3164.weight"
BIDI = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}


def assert_harmless(text: str) -> str:
    """Check by character categories that a terminal shows every character of a text, and no line is forged."""
    bad = {
        char for char in text if char in BIDI or unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co")
    } - {"\n"}
    assert not bad, ascii(text)
    for line in text.split("\n"):
        assert not line.startswith(("error: all", "WARNING: send")), ascii(text)
    return text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with hostile names of tensors and files, and a hostile key in its configuration."""
    folder = tmp_path_factory.mktemp("hostile") / "source"
    weights = {
        "model.embed_tokens.weight": bf16(gaussian(64, 128)),
        UP: bf16(gaussian(64, 128)),
        "norm\ufe0f": bf16(np.ones(4, dtype=np.float32)),
    }
    write_checkpoint(folder, weights)
    for name in (f"tokenizer{FILE_NAME}.json", f"data{FILE_NAME}.csv"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def master(source: Path, tmp_path: Path) -> Path:
    """A master with hostile reasons, too."""
    assert_harmless(done("quantize", source, tmp_path / "master").output)

    def change(manifest: dict[str, Any]) -> None:
        for tensor in manifest["tensors"]:
            tensor["name"] += HOSTILE
            tensor["reason"] = f"because{HOSTILE}"
            tensor["role"] = f"role{HOSTILE}"
        manifest["files"][f"x{HOSTILE}.json"] = {"bytes": 3, "sha256": "0" * 64}

    change_manifest(tmp_path / "master", change)
    return tmp_path / "master"


@pytest.mark.parametrize("options", [(), ("--summary",), ("--no-summary",), ("--target-bpw", "5"), ("--json",)])
def test_plan_shows_hostile_names_with_escapes(source: Path, options: tuple[str, ...]) -> None:
    shown = assert_harmless(done("plan", source, *options).output)
    if not options:
        assert rf"up_proj{MARKUP}\u3164.weight" in shown
        assert r"data\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\u202efdp.exe\u2066\u200b\ufeff\nerror: all" in shown


def test_quantize_inspect_and_verify_show_hostile_manifests_with_escapes(source: Path, master: Path) -> None:
    for command in ("inspect", "inspect --summary", "inspect --json"):
        name, *options = command.split()
        assert_harmless(done(name, master, *options).output)
    shard = next(master.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
    broken = invoke("verify", master)
    assert broken.exit_code == 1 and r"\x1b]0;owned" in assert_harmless(broken.output)
    assert assert_harmless(broken.output).count("\n") == len(
        json.loads(invoke("verify", master, "--json").stdout)["problems"]
    )


def test_exports_show_hostile_names_with_escapes(master: Path, tmp_path: Path) -> None:
    assert_harmless(invoke("export", master, tmp_path / "out", "-t", "vllm").output)


def test_card_and_push_show_hostile_names_with_escapes(master: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_harmless(done("card", master).output)
    assert_harmless(done("card", master, "--print").output)
    assert_harmless(invoke("push", master, "org/name", "--dry-run").output)


def test_card_printed_on_a_terminal_keeps_its_lines_and_escapes_the_rest(
    master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("card", master)
    card = master / "README.md"
    text = card.read_text()
    mark = text.rindex("<!--")
    card.write_text(f"{text[:mark]}mine: \x1b[31m and \t tab\n{text[mark:]}")
    assert "\x1b[31m and \t tab\n" in done("card", master, "--print").stdout  # a file gets the text as it is
    monkeypatch.setattr(output, "_is_terminal", lambda stream: True)
    shown = done("card", master, "--print").stdout
    assert "\\x1b[31m and \t tab\n" in shown and "\x1b" not in shown


def test_errors_are_one_line_with_escapes(tmp_path: Path) -> None:
    named = tmp_path / HOSTILE.replace("/", "")
    for command in ("plan", "inspect", "verify", "card"):
        result = invoke(command, named)
        assert result.exit_code == 1
        assert assert_harmless(result.stderr).count("\n") == 1
    for arguments in (("verify", tmp_path, named), ("verify", f"--{HOSTILE}", tmp_path), (HOSTILE,)):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert_harmless(result.output.replace("\n", " "))


def test_gguf_of_a_stranger_is_shown_with_escapes(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "model.gguf", {"llama.rope.scaling.type": HOSTILE})
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", HOSTILE)
    writer.add_name(HOSTILE)
    writer.add_tokenizer_model(HOSTILE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for file in (path, tmp_path / "other.gguf"):
        assert_harmless(invoke("inspect", file).output)
        assert_harmless(invoke("inspect", file, "--json").output)
    assert r"\x1b[31m" in done("inspect", tmp_path / "other.gguf").stdout


@given(st.text())
def test_any_text_becomes_one_line_of_seen_characters(text: str) -> None:
    shown = printable.printable(text)
    assert "\n" not in assert_harmless(shown)
    assert printable.printable(shown) == shown
    if all(" " <= char <= "~" for char in text):
        assert shown == text


@given(
    st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    st.sampled_from(["utf-8", "ascii", "latin-1"]),
)
def test_json_with_escapes_is_the_same_json(value: Any, encoding: str) -> None:
    text = printable.printable_json(json.dumps(value, indent=2, ensure_ascii=False), encoding)
    assert json.loads(text) == value
    assert_harmless(text)
    text.encode(encoding)


def test_prose_keeps_lines_and_emoji_and_escapes_controls() -> None:
    shown = printable.printable_prose("a\x1b[31mb\x07\x9b\x7f\r\nc\td\x00\u2028\ud800")
    assert shown == "a\\x1b[31mb\\x07\\x9b\\x7f\nc\td\\x00\\u2028\\ud800"
    assert printable.printable_prose("evil \u202etxt.exe\u2066") == "evil \\u202etxt.exe\\u2066"
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"
    assert printable.printable_prose(family + "é\u2764\ufe0f") == family + "é\u2764\ufe0f"


def test_every_way_to_the_terminal_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    for write in (output.show, output.summary, output.note, output.warn, output.complain):
        write(HOSTILE)
    with pytest.raises(typer.Exit):
        output.fail(HOSTILE)
    display = output._Lines("measuring", "groups")
    display._last = display._start = -100.0
    display._first_done, display._done, display._total = 0, 0, 3
    display(1, 3, HOSTILE)
    display._tell(HOSTILE)
    shown = capsys.readouterr()
    assert len(assert_harmless(shown.out).splitlines()) == 2
    assert len(assert_harmless(shown.err).splitlines()) == 6


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_encoding_lacks_are_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    output.show("a\u4e00")
    output.print_json({"a": "\u4e00"})
    output.note("a\u4e00")
    for stream in streams:
        stream.flush()
    assert streams[0].buffer.getvalue() == b'a\\u4e00\n{\n  "a": "\\u4e00"\n}\n'  # type: ignore[attr-defined]
    assert streams[1].buffer.getvalue() == b"a\\u4e00\n"  # type: ignore[attr-defined]


def test_only_one_module_writes_to_the_terminal() -> None:
    """Whatever is printed goes through output.py, which escapes it; the bar is rich's, and an interrupt ends all."""
    folder = Path(pqweights_cli.__file__).parent
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _writes(node.func):
                found.add(path.name)
    assert found <= {"output.py", "interrupts.py"}
    assert "output.py" in found


def _writes(function: ast.expr) -> bool:
    name = ast.unparse(function)
    return name in ("print", "os.write", "typer.secho") or name.endswith((".echo", "stdout.write", "stderr.write"))
