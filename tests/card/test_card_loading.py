"""The commands of a card: they run, and name branch, class, tokenizer and custom code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import make_card
from cards import blocks, change_manifest, facts
from families import exported
from families import master as master_of
from snippets import run_snippet


@pytest.mark.parametrize("kind", ["master", "bf16", "vllm", "mlx"])
def test_load_commands_run(kind: str, base: Path, tmp_path: Path) -> None:
    folder = master_of(base, "llama") if kind == "master" else exported(base, "llama", kind)
    commands = blocks(make_card(folder, str(folder)).text, "python")
    assert len(commands) == (2 if kind == "master" else 1)
    for command in commands:
        code = f"{command}\nname = type(model).__name__\nassert 'Llama' in name or name == 'Model', name"
        assert run_snippet(code, tmp_path, tmp_path / "log") == 0, (tmp_path / "log").read_text()


COMMANDS = {
    "master": ['load_model("a/b", revision="x/y")', "pqweights export a/b OUT --target bf16 --revision x/y"],
    "bf16": [
        'LM.from_pretrained("a/b", revision="x/y", dtype="auto")',
        'Tokenizer.from_pretrained("a/b", revision="x/y")',
    ],
    "vllm": ["vllm serve a/b --revision x/y", 'from_pretrained("a/b", revision="x/y", dtype="auto")'],
    "mlx": [
        'load("a/b", revision="x/y")',
        "hf download a/b --revision x/y --local-dir b-x-y\nmlx_lm.generate --model b-x-y ",
    ],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_name_the_branch(kind: str, base: Path) -> None:
    folder = master_of(base, "llama") if kind == "master" else exported(base, "llama", kind)
    text = make_card(folder, "a/b", revision="x/y").text
    assert "It is on the branch `x/y`, which the commands name." in text
    assert all(command in text for command in COMMANDS[kind])
    for block in blocks(text, "python"):
        compile(block, kind, "exec")
    main = make_card(folder, "a/b").text
    assert "revision" not in main and "branch" not in main
    # A refresh keeps the branch for the same repository only.
    assert make_card(folder, old=text).text == make_card(folder, "a/b", old=text).text == text
    assert make_card(folder, "a/b", old=text, revision="main").text == main
    assert "revision" not in make_card(folder, "c/d", old=text).text
    # A folder has no branches.
    assert "revision" not in make_card(folder, str(folder), revision="x/y").text


def test_mlx_lm_takes_a_revision_in_python_but_not_on_the_command_line() -> None:
    import inspect as python

    from mlx_lm import generate, load

    assert "revision" in python.signature(load).parameters
    parser = sys.modules[generate.__module__].setup_arg_parser()
    assert not any("revision" in option for action in parser._actions for option in action.option_strings)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "AutoModel"),
        ({"architectures": ["T5EncoderModel"], "model_type": "t5"}, None),
        ({"architectures": ["T5ForConditionalGeneration"]}, None),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}, "AutoModelForImageTextToText"),
        ({"architectures": []}, None),
    ],
)
def test_commands_name_the_auto_class_of_the_architecture(
    config: dict[str, Any], expected: str | None, master: Path
) -> None:
    (master / "config.json").write_text(json.dumps({"model_type": "x"} | config))
    text = make_card(master, "a/b").text
    assert 'model = pqweights.load_model("a/b")' in text
    assert (f"from transformers import {expected}, AutoTokenizer" in text) == (expected is not None)
    assert ("from transformers" in text) == (expected is not None)


def test_commands_depend_on_tokenizer_model_type_and_custom_code(master: Path) -> None:
    change_manifest(master, lambda data: data["files"].pop("tokenizer.json"))
    (master / "config.json").write_text(
        '{"model_type": "x", "architectures": ["XForCausalLM"], "auto_map": {"a": "b"}}'
    )
    text = make_card(master, "a/b").text
    assert "AutoTokenizer" not in text and 'load_model("a/b", trust_remote_code=True)' in text
    (master / "config.json").write_text("{}")
    text = make_card(master, "a/b").text
    assert facts(text)["library_name"] == "pqweights"
    assert not blocks(text, "python") and "pqweights export a/b OUT --target bf16" in text
