"""Print docs/commands.md: every command of the command line with its arguments and options.

    python tools/commands_page.py > docs/commands.md

The page is made from the Typer app itself, so that it cannot differ from `--help`; a test compares the two.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import Any

import typer
from pqweights_cli.main import app

from pqweights.targets import ALIASES, EXPORTS

HEAD = """# Commands

This page is generated from the command line by `make docs-commands`; `pqweights COMMAND --help` says the same.

`SRC` is a checkpoint and `DIR` a folder that pqweights wrote. Wherever a command only reads, both may be `ORG/NAME` on
the Hugging Face Hub ([The Hub](hub.md)). Sizes such as `5GB` are powers of ten, `5GiB` is 2^30 bytes.

With `--json` a command prints one JSON document on stdout; without it, a summary for people. Progress, notes and errors
go to stderr. Exit codes: 0 done; 1 refused or failed, with one line that says why; 2 wrong options or arguments;
130 interrupted.

On a terminal, tables fit its width, and `plan`, `quantize` and `inspect` summarize more than 200 tensors by role, codec
and bit width (`--no-summary` lists them all). Elsewhere tables list everything at full width.
"""
# Where a command's method, formats and measurements are described.
PAGES = {
    "quantize": (
        ("Recipes", "../recipes/README.md"),
        ("Fitting a size", "fit.md"),
        ("Activation-aware scales", "awq.md"),
        ("The method", "method.md"),
    ),
    "plan": (("Which one for me", "memory.md"), ("Recipes", "../recipes/README.md"), ("Fitting a size", "fit.md")),
    "recipes": (("Recipes", "../recipes/README.md"),),
    "inspect": (("The format", "format.md"), ("KV caches", "kv-cache.md")),
    "verify": (("The format", "format.md"),),
    "export": (("Exports", "exports.md"),),
    "generate": (
        ("Generating text", "generate.md"),
        ("KV caches", "kv-cache.md"),
        ("Loading masters", "loading.md"),
    ),
    "card": (("The model card", "card.md"),),
    "push": (("The Hub", "hub.md"), ("The model card", "card.md")),
    "eval": (("Evaluation", "evaluation.md"), ("KV caches", "kv-cache.md")),
}
VALUES = {int: "N", float: "X", str: "TEXT"}


def commands() -> dict[str, Any]:
    """The commands of the app, in its order."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def cell(text: str) -> str:
    """Text inside a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(header)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def value_name(param: Any) -> str:
    """What stands for the value of an option."""
    if param.metavar:
        return str(param.metavar)
    kind = param.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return VALUES.get(kind, "PATH")


def argument_name(param: Any) -> str:
    """An argument as usage shows it, in brackets if it may be left out."""
    return str(param.metavar) if param.required else f"[{param.metavar}]"


def spelling(param: Any) -> str:
    """An option as it is typed, the long form first, and last the one that turns it off."""
    names = [*sorted(param.opts, key=len, reverse=True), *param.secondary_opts]
    value = "" if param.is_flag else f" {value_name(param)}"
    return cell(", ".join(f"`{name}{value}`" for name in names))


def default_text(param: Any) -> str:
    """The default of an option, or that it must be given."""
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return cell(param.show_default)
    if param.is_flag or param.default is None or not param.show_default:
        return ""
    default = param.default.value if isinstance(param.default, enum.Enum) else param.default
    return f"`{default}`"


def section(name: str, command: Any) -> str:
    """One command."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = " ".join(["pqweights", name, *(argument_name(param) for param in arguments), "[OPTIONS]"])
    parts = [f"## {name}", f"    {usage}", text_of(command)]
    if name == "export":
        short = {name: f" or `{alias}`" for alias, name in ALIASES.items()}
        targets = [(f"`{key}`{short.get(key, '')}", cell(summary)) for key, summary in EXPORTS.items()]
        parts.append(table(("target", "what it is"), targets))
    parts.append(table(("argument", "what it is"), [(cell(f"`{p.metavar}`"), cell(p.help or "")) for p in arguments]))
    rows = [(spelling(param), cell(param.help or ""), default_text(param)) for param in options]
    parts.append(table(("option", "what it does", "default"), rows))
    more = ", ".join(f"[{title}]({page})" for title, page in PAGES.get(name, ()))
    return "\n\n".join([*parts, *([f"More: {more}."] if more else [])])


def text_of(command: Any) -> str:
    """The help text of a command, a paragraph a line."""
    paragraphs = str(command.help or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def overview(found: dict[str, Any]) -> str:
    """The commands, each with its first sentence."""
    rows = [(f"[`{name}`](#{name})", cell(text_of(command).split("\n\n")[0])) for name, command in found.items()]
    return table(("command", "what it does"), rows)


def page() -> str:
    """The whole page."""
    found = commands()
    sections = [section(name, command) for name, command in found.items()]
    return "\n\n".join([HEAD.strip(), overview(found), *sections]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
