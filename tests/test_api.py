"""The Python API: the examples of docs/python.md, arguments that mirror the commands, reports, paths and progress."""

from __future__ import annotations

import importlib
import inspect as signatures
import pkgutil
import re
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
import typer.main
from commands import answer, raises
from pqweights_cli.main import app

import pqweights
from pqweights.common.options import Options
from pqweights.errors import MasterError, OptionError, OutputError, RecipeError, SourceError
from pqweights.planning.choice import choose_recipe

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
FUNCTIONS = ("plan", "quantize", "export", "verify", "rebuild", "inspect", "generate")
# Options that are about printing, or belong to another function of the API.
ONLY_COMMANDS = {
    "plan": {"json", "html", "summary", "quiet"},
    "quantize": {"json", "dry_run", "summary", "quiet"},
    "export": {"json", "quiet"},
    "verify": {"json", "quiet"},
    "rebuild": {"json", "quiet"},
    "generate": {"json", "quiet", "prompt"},
    "inspect": {"json", "html", "summary", "quiet"},
}
RENAMED = {"set": "set_format", "from": "source"}


def examples() -> str:
    """The code on the page, without its indentation."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line.strip())


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    families.build(families.FAMILIES["llama"], tmp_path / "model")
    for name, data in language_models.tokenizer_files().items():
        (tmp_path / "model" / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(examples(), str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "is kept: " in printed and "{6}" in printed and "100%" in printed
    assert re.search(r"error 0\.00\d+$", printed, re.MULTILINE)
    assert "another result" in printed  # as the page says of the last example
    assert {"plan", "master", "export", "fitted", "found", "said", "model"} <= names.keys()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_are_those_of_the_command(function):
    command = typer.main.get_group(app).commands[function]  # type: ignore[attr-defined]
    options = {
        option.opts[0].removeprefix("--").replace("-", "_") for option in command.params if option.opts[0][0] == "-"
    }
    mirrored = {RENAMED.get(name, name) for name in options - ONLY_COMMANDS[function] - {"help"}}
    parameters = signatures.signature(getattr(pqweights, function)).parameters
    named = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert (
        named - {"progress", "making_progress", "calibration_progress", "on_text", "tell"}
        | ({"recipe"} & parameters.keys())
        | ({"target"} & parameters.keys())
        == mirrored
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_defaults_are_those_of_the_command(function):
    command = importlib.import_module(f"pqweights_cli.{function}").command
    ours = signatures.signature(getattr(pqweights, function)).parameters
    theirs = signatures.signature(command).parameters
    for name in (ours.keys() & theirs.keys()) - {"prompt"}:  # which the command can read from stdin
        defaults = ours[name].default, theirs[name].default
        assert defaults[0] == defaults[1] or defaults == ((), None), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_are_those_of_the_code(function):
    """An editor, which does not run the code, shows them."""
    called = getattr(pqweights, function)
    code = called.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    assert [*signatures.signature(called).parameters] == [*code.co_varnames[:count]]
    assert not hasattr(called, "__wrapped__") and not hasattr(called, "__signature__")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_is_in_the_docstring(function):
    called = getattr(pqweights, function)
    documented = called.__doc__ + (pqweights.quantize.__doc__ if "those of `quantize`" in called.__doc__ else "")
    for name in signatures.signature(called).parameters:
        assert re.search(rf"\b{name}\b", documented), name


def test_the_functions_are_listed_and_typed():
    assert set(FUNCTIONS) <= set(dir(pqweights)) and set(FUNCTIONS) <= set(pqweights.__all__)
    with pytest.raises(AttributeError, match="quantise"):
        pqweights.quantise  # noqa: B018


def test_submodules_do_not_replace_functions():
    """A module of the same name as a function would take its place as soon as it is imported."""
    assert not {module.name for module in pkgutil.iter_modules(pqweights.__path__)} & set(pqweights.__all__)


def test_reports_hold_what_the_commands_print(source, tmp_path):
    planned = pqweights.plan(source, bits=4, threads=2)
    assert planned.to_json() == answer("plan", source, "--bits", 4, "--threads", 2)
    report = pqweights.quantize(source, tmp_path / "a", bits=4)
    printed = answer("quantize", source, tmp_path / "b", "--bits", 4)
    assert report.to_json() == {key: value for key, value in printed.items() if key != "output"}
    assert pqweights.inspect(tmp_path / "a").to_json() == answer("inspect", tmp_path / "a")
    assert pqweights.verify(tmp_path / "a").to_json() == answer("verify", tmp_path / "a")
    exported = pqweights.export(tmp_path / "a", tmp_path / "c", "bf16")
    printed = answer("export", tmp_path / "a", tmp_path / "d", "--target", "bf16")
    assert exported.to_json() == {key: value for key, value in printed.items() if key != "output"}


def test_a_path_is_never_a_repository():
    with raises(SourceError, "org/model"):
        pqweights.plan(Path("org/model"))


def test_rows_have_the_decision_and_the_error(source, master):
    rows = {row.name: row for row in pqweights.inspect(master).tensors}
    kept, rescued = rows["model.norm.weight"], rows["model.layers.0.mlp.up_proj.weight"]
    assert (kept.action, kept.bits, kept.relative_mse, kept.rescued) == ("keep", None, None, False)
    assert rescued.rescued and rescued.bits == 5 and rescued.relative_mse is not None and not rescued.exceeds
    assert {row.name: row.bytes for row in pqweights.plan(source).tensors} == {name: rows[name].bytes for name in rows}
    assert pqweights.quantize(source, master).tensors == tuple(rows.values())  # which is finished already


def test_progress_reaches_the_end(source, tmp_path, monkeypatch):
    monkeypatch.setattr("pqweights.convert.shard.PROGRESS_SECONDS", 0.0)
    seen: list[tuple[int, int, str]] = []
    pqweights.quantize(source, tmp_path / "out", progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] > 0
    assert {name for _, _, name in seen} >= {"lm_head.weight", "model.norm.weight"}
    checked: list[tuple[int, int, str]] = []
    pqweights.verify(tmp_path / "out", progress=lambda *now: checked.append(now))
    assert checked[-1][0] == checked[-1][1] > 0


def test_a_recipe_object_is_taken_with_what_options_added(source):
    recipe = choose_recipe("q5", Options(keep=("lm_head.weight",)))
    again = pqweights.plan(source, recipe, set_format={"*.q_proj.weight": 6})
    bits = {tensor.name: tensor.bits for tensor in again.tensors}
    assert bits["lm_head.weight"] is None and bits["model.layers.0.self_attn.q_proj.weight"] == 6


def test_reports_are_displayed_in_one_line(source, master):
    shown = [repr(pqweights.plan(source)), repr(pqweights.quantize(source, master)), repr(pqweights.inspect(master))]
    for line in shown:
        assert "10 tensors" in line and "per quantized weight" in line and len(line) < 160
    assert shown[1].startswith("<RewriteReport of the master: ") and shown[2].startswith("<Inspection of the master: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recipe", {"bits": 4}),
        ("bits", "4"),
        ("bits", True),
        ("keep", [4]),
        ("set_format", [5]),
        ("set_format", {"*": [6]}),
        ("target_size", [1]),
        ("threads", "2"),
        ("source", 5),
        ("awq", 5),
    ],
)
def test_wrong_types_are_named(source, name, value):
    with pytest.raises(TypeError, match=f"^{name}: "):
        pqweights.plan(**({"source": source} | {name: value}))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda source, out: pqweights.plan(source, threads=0), OptionError, "`threads`: expected 1 to 256"),
        (lambda source, out: pqweights.plan(source, calibration_tokens=4096), OptionError, "`calibrate`"),
        (lambda source, out: pqweights.plan(source, target_size=1e5 + 0.5), OptionError, "whole number of bytes"),
        (lambda source, out: pqweights.plan(source, keep=["nothing*"]), RecipeError, "nothing"),
        (lambda source, out: pqweights.quantize(source, out, max_shard_size="many"), OptionError, "max_shard_size"),
        (lambda source, out: pqweights.quantize(source, source), OutputError, "source"),
        (lambda source, out: pqweights.verify(source), MasterError, "pqweights.json"),
        (lambda source, out: pqweights.inspect(out), MasterError, "out"),
    ],
)  # fmt: skip
def test_failures_are_errors_of_one_line(source, tmp_path, call, error, message):
    with raises(error, message) as caught:
        call(source, tmp_path / "out")
    assert isinstance(caught.value, pqweights.PqweightsError)
    assert not (tmp_path / "out").exists()
