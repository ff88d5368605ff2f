"""The YAML file of `export --recipe`: which format each weight gets, for any target. docs/exports.md has its keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pqweights.common.documents import ClosedDocument, as_document
from pqweights.errors import OptionError, RecipeError
from pqweights.planning.options import ExportOptions
from pqweights.planning.recipe import parse_yaml, recipe_text
from pqweights.targets.assignment import ROLE


class FormatRuleFile(ClosedDocument, frozen=True, kw_only=True):
    """A rule: patterns of names or roles, and the format of the weights that they match."""

    format: str
    name: str | tuple[str, ...] | None = None
    role: str | tuple[str, ...] | None = None


class FormatsFile(ClosedDocument, frozen=True, kw_only=True):
    """The whole file. format: the default"""

    name: str | None = None
    description: str | None = None
    format: str | None = None
    rules: tuple[Any, ...] = ()
    target_size: str | int | None = None


def with_recipe(options: ExportOptions) -> ExportOptions:
    """Return options with what their recipe says where they say nothing; its rules come after theirs.

    Raises RecipeError for everything that is wrong in the file, OptionError for options that contradict it.
    """
    if options.recipe is None:
        return options
    where = str(options.recipe)
    data = parse_yaml(recipe_text(Path(options.recipe)), where)
    file = as_document(data, FormatsFile, lambda problem: RecipeError(f"{where}: {problem}"))
    if options.format is not None and file.format not in (None, options.format):
        raise OptionError(f"`format` {options.format}: the recipe {where} says {file.format}; leave out one of the two")
    rules = list(options.set_format or ())
    for number, entry in enumerate(file.rules, start=1):
        rules += _rules(f"{where}: rule {number}", entry)
    return replace(
        options,
        recipe=None,
        format=options.format or file.format,
        set_format=tuple(rules) or None,
        target_size=options.target_size if options.target_size is not None else file.target_size,
    )


def _rules(where: str, entry: Any) -> list[tuple[str, str]]:
    """Return the patterns of a rule with its format."""
    rule = as_document(entry, FormatRuleFile, lambda problem: RecipeError(f"{where}: {problem}"))
    names, roles = _listed(rule.name), _listed(rule.role)
    if not names and not roles:
        raise RecipeError(f"{where}: expected name or role, found neither")
    return [(pattern, rule.format) for pattern in (*names, *(f"{ROLE}{role}" for role in roles))]


def _listed(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value or ()
