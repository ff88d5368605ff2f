"""What quantize and plan say of the files beside the weights: left out, included, or beside a single file."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import answer, done, invoke, refused
from helpers import bf16, folder_bytes, gaussian, write_checkpoint

TENSORS = {"mlp.up_proj.weight": bf16(gaussian(64, 128))}
SMALL = {"tokenizer.json": b"{}", "train.parquet": b"rows", "runs/log.txt": b"loss", "README.md": b"#"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", TENSORS, config={"model_type": "llama"}, companions=SMALL)


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_left_out_files_are_named_with_the_option_that_copies_them(command: str, source: Path, tmp_path: Path) -> None:
    out = [tmp_path / "out"] if command == "quantize" else []
    text = done(command, source, *out).stdout
    expected = "not needed to load the model (--include-files PATTERN copies it)"
    assert f"left out: runs/log.txt, train.parquet: {expected}" in text
    out = [tmp_path / "json"] if command == "quantize" else []
    found = answer(command, source, *out, "--include-files", "*.parquet", "--include-files", "runs/*")
    assert found["copied_files"] == ["runs/log.txt", "tokenizer.json", "train.parquet"]
    assert found["left_out_files"].keys() == {"README.md"}
    line = refused(command, source, *([tmp_path / "none"] if out else []), "--include-files", "typo*")
    assert "--include-files typo*" in line and not (tmp_path / "none").exists()


def test_many_left_out_files_are_counted(source: Path) -> None:
    for number in range(20):
        (source / f"log-{number:02}.txt").write_text("x")
    text = done("plan", source).stdout
    (line,) = [line for line in text.splitlines() if "log-00.txt" in line]
    assert "log-07.txt and 14 more files: " in line and "log-08.txt" not in line


@pytest.mark.parametrize("command", ["quantize", "plan"])
@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_single_file_of_a_model_is_warned_of(command: str, quiet: tuple[str], source: Path, tmp_path: Path) -> None:
    file = source / "model.safetensors"
    result = done(command, file, *([tmp_path / "out"] if command == "quantize" else []), *quiet)
    (line,) = result.stderr.splitlines()
    assert line.startswith("WARNING: model.safetensors: ") and f"give {source} " in line
    assert "config.json, tokenizer.json" in line
    assert "left out" not in result.stdout
    assert not (tmp_path / "out/config.json").exists() or "llama" not in (tmp_path / "out/config.json").read_text()
    found = invoke(command, file, *([tmp_path / "json"] if command == "quantize" else []), "--json")
    assert '"left_out_files": {\n    "config.json": "in the folder of the file' in found.stdout


def test_single_file_without_a_model_beside_it_is_not_warned_of(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", TENSORS, companions={"notes.txt": b""})
    assert done("quantize", folder / "model.safetensors", tmp_path / "out").stderr == ""


def test_quiet_commands_print_errors_alone(source: Path, tmp_path: Path) -> None:
    for arguments in (
        ("quantize", source, tmp_path / "master"),
        ("quantize", source, tmp_path / "master"),  # "already holds this result" is a note
        ("export", tmp_path / "master", tmp_path / "bf16", "--target", "bf16"),
        ("verify", tmp_path / "master"),
    ):
        result = done(*arguments, "-q")
        assert (result.stdout, result.stderr) == ("", "")
    assert folder_bytes(tmp_path / "master")
    assert done("plan", source, "--quiet").stdout == done("plan", source).stdout
    (tmp_path / "master/tokenizer.json").unlink()
    result = invoke("verify", tmp_path / "master", "--quiet")
    assert (result.exit_code, result.stdout) == (1, "tokenizer.json: missing\n")
    assert "tokenizer.json" in refused("export", tmp_path / "master", tmp_path / "x", "--target", "bf16", "--quiet")
    assert answer("quantize", source, tmp_path / "json", "--quiet")["copied_files"] == ["tokenizer.json"]
