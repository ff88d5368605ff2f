"""What `calibrate` and `sensitivity` refuse in the same way: in one line, before the model runs, with nothing left."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import pytest
from commands import refused

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pqweights.integrations import transformers as integration

COMMANDS = {"calibrate": "s.safetensors", "sensitivity": "s.json"}
TOKENS = np.random.default_rng(11).integers(0, 500, 3000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a tokenizer with a larger vocabulary than that of the model."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("long", 3000), ("short", 100)):
        (folder / f"{name}.txt").write_text(" ".join(f"w{number}" for number in TOKENS[:count]))
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    wide = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": 1999 - i for i in range(500)}, unk_token="w0"))
    wide.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=wide, unk_token="w0").save_pretrained(folder / "wide")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--text {texts}/empty.txt", "an empty file"),
        ("--text {texts}/blank.txt", "only white space"),
        ("--text {texts}/latin.txt", "UTF-8"),
        ("--text {texts}/none.txt", "No such file"),
        ("--text {texts}/short.txt", "found 100; give a longer text"),
        ("--text {texts}/long.txt --window 600", "the 512 tokens that the model takes"),
        ("--text {texts}/long.txt --tokenizer {texts}", "expected a tokenizer"),
        (
            "--text {texts}/long.txt --tokenizer {texts}/wide --window 64",
            "the text contains token 1999, but the model has only 512 tokens",
        ),
        ("--text {texts}/long.txt --window 64 --device-map bogus", "transformers cannot run this model"),
    ],
)
def test_bad_input_is_one_line(
    command: str, arguments: str, expected: str, source: Path, texts: Path, tmp_path: Path
) -> None:
    message = refused(command, source, tmp_path / COMMANDS[command], *arguments.format(texts=texts).split())
    assert expected in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("calibrate", "--text {texts}/short.txt", "expected at least 8192 tokens, 16 windows of 512, found 100"),
        ("sensitivity", "--text {texts}/short.txt", "expected at least 256 tokens, 1 window of 256, found 100"),
        ("sensitivity", "--tokens 255 --window 256", "--tokens 255: expected at least one window of 256"),
    ],
)
def test_too_few_tokens_are_counted(
    command: str, arguments: str, expected: str, source: Path, texts: Path, tmp_path: Path
) -> None:
    assert expected in refused(command, source, tmp_path / "s", *arguments.format(texts=texts).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_output_is_checked_before_the_model_is_loaded(
    command: str, source: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(integration, "load", never)
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes((source / "model.safetensors").read_bytes())
    for out, options, expected in (
        (foreign, [], "the file exists; choose another name, or pass --overwrite"),
        (foreign, ["--overwrite"], "--overwrite replaces nothing else"),
        (tmp_path, [], "expected the name of a file, found a folder"),
        (tmp_path / "none" / "s.safetensors", [], "its folder does not exist"),
    ):
        assert expected in refused(command, source, out, "--text", texts / "long.txt", *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_measuring_a_master_is_refused(
    command: str, texts: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    master = families.master(tmp_path_factory.getbasetemp(), "llama")
    message = refused(command, master, tmp_path / COMMANDS[command], "--text", texts / "long.txt")
    assert "give the checkpoint that it was made from" in message
