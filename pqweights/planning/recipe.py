"""Recipes: YAML that says which codec encodes which tensor, and why.

A recipe has a default codec and bit width, and rules. The first rule that matches a tensor decides; if none does, the
default policy for its role (roles.py) keeps or quantizes it. recipes/README.md describes the keys.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pqweights.checkpoint.config import load_yaml
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.common.advice import instead
from pqweights.common.documents import ClosedDocument, Number, as_document
from pqweights.common.units import parse_size
from pqweights.errors import OptionError, PqweightsError, RecipeError
from pqweights.formats import DEFAULT_CODEC, checked_effort, checked_rate, get_codec, nearest_rate
from pqweights.planning.roles import ROLES, Role

Item = TypeVar("Item")

DEFAULT_BITS = 5
# How the names of recipe files end.
SUFFIXES = (".yaml", ".yml")


class RuleFile(ClosedDocument, frozen=True, kw_only=True):
    """A rule as YAML has it: the fields of Rule, with other names for the lists."""

    name: str | tuple[str, ...] | None = None
    role: str | tuple[str, ...] | None = None
    min_weights: int | None = None
    max_weights: int | None = None
    dims: int | None = None
    keep: bool | None = None
    codec: str | None = None
    bits: Number | None = None
    reason: str | None = None


class RecipeFile(ClosedDocument, frozen=True, kw_only=True):
    """A recipe as YAML has it: the fields of Recipe, with the two kinds of targets."""

    name: str | None = None
    description: str | None = None
    codec: str | None = None
    bits: Number | None = None
    effort: int | None = None
    target_size: str | int | None = None
    target_bpw: int | float | None = None
    rules: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class SizeTarget:
    """An upper bound for the result, one of the two.

    output_bytes: size of its safetensors files, with headers and the tensors that are kept
    bits_per_weight: mean over the weights that the recipe would quantize
    """

    output_bytes: int | None = None
    bits_per_weight: float | None = None

    def __str__(self) -> str:
        if self.output_bytes is not None:
            return f"{self.output_bytes} bytes"
        return f"{self.bits_per_weight:g} bits per weight"

    def to_json(self) -> dict[str, Any]:
        """Return the target with its key in a recipe."""
        if self.output_bytes is not None:
            return {"target_size": self.output_bytes}
        return {"target_bpw": self.bits_per_weight}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of a recipe. A condition that is empty or None always holds.

    names: shell-style patterns, one of which must match the whole name of the tensor
    roles: the tensor must have one of these roles
    min_weights, max_weights: bounds on the number of weights
    dims: number of dimensions
    keep: keep the tensor
    codec, bits: how to encode it; None for the recipe's defaults
    reason: why, for plan and manifest
    """

    names: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    min_weights: int | None = None
    max_weights: int | None = None
    dims: int | None = None
    keep: bool = False
    codec: str | None = None
    bits: float | None = None
    reason: str | None = None

    def matches_name(self, name: str) -> bool:
        """Whether a pattern of the rule matches a name; false for a rule without patterns."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)

    def matches(self, tensor: LogicalTensor, role: Role) -> bool:
        """Whether the rule decides what becomes of a tensor.

        A rule that quantizes only applies to a tensor with a structural role if it names that role.
        """
        weights = math.prod(tensor.shape)
        if role.structural and not self.keep and role.name not in self.roles:
            return False
        return (
            (not self.names or self.matches_name(tensor.name))
            and (not self.roles or role.name in self.roles)
            and (self.min_weights is None or weights >= self.min_weights)
            and (self.max_weights is None or weights <= self.max_weights)
            and (self.dims is None or len(tensor.shape) == self.dims)
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe.

    name, description: for people
    codec, bits: the defaults for weights that are quantized
    rules: the first rule that matches a tensor decides
    overrides: rules that options give, which come before all others; each has a reason that names its option
    target: a size to meet; bit widths that no rule gives are then chosen for it
    effort: how much work codecs that have a choice put into encoding; None for their defaults
    """

    name: str
    description: str
    codec: str
    bits: float
    rules: tuple[Rule, ...] = ()
    overrides: tuple[Rule, ...] = ()
    target: SizeTarget | None = None
    effort: int | None = None

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of its codecs, the default first."""
        return tuple(dict.fromkeys([self.codec, *(rule.codec for rule in self.rules if rule.codec is not None)]))

    def with_codec(self, codec: str) -> Recipe:
        """Return the recipe with another default codec, at the rate that is nearest to its own.

        Raises OptionError for an unknown codec, and for one without the bits of a rule or the effort of the recipe.
        """
        changed = replace(self, codec=codec)

        def check() -> Recipe:
            for rule in self.rules:
                if rule.codec is None and rule.bits is not None:
                    checked_rate(codec, rule.bits)
            if self.effort is not None:
                checked_effort(changed.codecs, self.effort)
            return replace(changed, bits=nearest_rate(codec, self.bits))

        return _checked(f"`codec`: recipe {self.name!r}", check, OptionError)

    def with_effort(self, effort: int) -> Recipe:
        """Return the recipe with another effort.

        Raises OptionError for an effort that its codecs do not have.
        """
        return replace(self, effort=_checked("`effort`", lambda: checked_effort(self.codecs, effort), OptionError))

    def with_bits(self, bits: float) -> Recipe:
        """Return the recipe with another default bit width; rules keep theirs.

        Raises OptionError for a recipe with a target, and for a bit width that the codec does not have.
        """
        if self.target is not None:
            raise OptionError(
                f"`bits`: recipe {self.name!r} chooses bit widths to meet its target size; leave `bits` out"
            )
        return replace(self, bits=_checked("`bits`", lambda: checked_rate(self.codec, bits), OptionError))

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as manifests state it: the keys of the YAML, without those that are not set."""
        rules = []
        for rule in (*self.overrides, *self.rules):
            entry: dict[str, Any] = {"name": list(rule.names), "role": list(rule.roles)}
            entry |= {key: getattr(rule, key) for key in RuleFile.__struct_fields__[2:]}
            rules.append({key: value for key, value in entry.items() if value not in ([], None, False)})
        stated = {
            "name": self.name,
            "description": self.description,
            "codec": self.codec,
            "bits": self.bits,
            **({} if self.effort is None else {"effort": self.effort}),
            "rules": rules,
        }
        return stated | ({} if self.target is None else self.target.to_json())


def recipe_folder() -> Traversable:
    """Return the folder of the recipes that come with pqweights."""
    return importlib.resources.files("pqweights_recipes")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with pqweights."""
    return sorted(f.name.removesuffix(".yaml") for f in recipe_folder().iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_file: str | Path) -> Recipe:
    """Load a recipe by its name, or from a YAML file; a Path is always a file.

    Raises OptionError for an unknown name, and RecipeError for everything that is wrong in a file.
    """
    is_name = isinstance(name_or_file, str) and name_or_file in recipe_names()
    return parse_recipe(recipe_text(name_or_file), f"recipe {name_or_file!r}" if is_name else str(name_or_file))


def recipe_text(name_or_file: str | Path) -> str:
    """Return the YAML of a recipe by its name, or that of a file; a Path is always a file.

    Raises OptionError for an unknown name, and RecipeError for a file that cannot be read.
    """
    if isinstance(name_or_file, str) and name_or_file in recipe_names():
        return (recipe_folder() / f"{name_or_file}.yaml").read_text(encoding="utf-8")
    path = Path(name_or_file)
    if isinstance(name_or_file, str) and path.suffix not in SUFFIXES and len(path.parts) == 1 and not path.exists():
        raise OptionError(f"no recipe is called {name_or_file!r}; {_other_recipe(name_or_file)}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{path}: cannot be read: {reason}") from None


def _other_recipe(name: str) -> str:
    """Return what to give in place of an unknown name of a recipe."""
    for file in (f"{name}{suffix}" for suffix in SUFFIXES):
        if Path(file).is_file():
            return f"there is a file {file!r}: give its whole name, as in `recipe` {file}"
    width = re.fullmatch(r"q(\d+)", name)
    if width is not None and int(width[1]) in get_codec(DEFAULT_CODEC).rates:
        return f"any recipe takes another bit width, as in `recipe` q{DEFAULT_BITS} `bits` {width[1]}"
    return f"{instead(name, recipe_names())}, or a .yaml file"


def parse_recipe(text: str, where: str) -> Recipe:
    """Parse the YAML of a recipe. where: what messages call it.

    Raises RecipeError for everything that is wrong in it.
    """
    data = parse_yaml(text, where)
    if data is None:
        raise RecipeError(f"{where}: the recipe is empty; expected keys and values, such as bits: 5")
    file = as_document(data, RecipeFile, lambda problem: RecipeError(f"{where}: {problem}"))
    codec = _checked(where, lambda: get_codec(file.codec or DEFAULT_CODEC).name)
    bits = nearest_rate(codec, DEFAULT_BITS) if file.bits is None else file.bits
    target = make_target(file.target_size, file.target_bpw, file=where)
    recipe = Recipe(
        name=file.name or Path(where).stem,
        description=(file.description or "").strip(),
        codec=codec,
        bits=_checked(f"{where}: bits", lambda: checked_rate(codec, bits)),
        rules=tuple(_rule(f"{where}: rule {i}", entry, codec) for i, entry in enumerate(file.rules or (), start=1)),
        target=target,
    )
    effort = file.effort
    if effort is None:
        return recipe
    return replace(recipe, effort=_checked(f"{where}: effort", lambda: checked_effort(recipe.codecs, effort)))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a text as YAML. where: what messages call it. Raises RecipeError if it is none."""
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{where}: not YAML: {_yaml_problem(text, error)}") from None


def _yaml_problem(text: str, error: Exception) -> str:
    """Return what is wrong with a text that is not YAML."""
    mark, problem = None, ""
    if isinstance(error, yaml.MarkedYAMLError):
        mark, problem = error.problem_mark, error.problem or ""
    lines = text.splitlines()
    # For YAML, * begins the name of an alias.
    if mark is not None and "alias" in str(error) and mark.line < len(lines):
        pattern = re.search(r"\*[^\s,\]}]*", lines[mark.line])
        if pattern is not None:
            return f'line {mark.line + 1}: quote a pattern that begins with *, as in "{pattern[0][:80]}"'
    if isinstance(error, yaml.reader.ReaderError):  # it has a position, but no mark
        before = text[: error.position]
        line, column = before.count("\n"), error.position - (before.rfind("\n") + 1)
        return f"line {line + 1}, column {column + 1}: {error.reason}"
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).split())[:160]


def _rule(where: str, data: Any, default_codec: str) -> Rule:
    file = as_document(data, RuleFile, lambda problem: RecipeError(f"{where}: {problem}"))
    names, roles = ((value,) if isinstance(value, str) else value or () for value in (file.name, file.role))
    bits = file.bits
    for role in roles:
        if role not in ROLES:
            raise RecipeError(f"{where}: no role is called {role!r}; {instead(role, ROLES)}")
    if file.keep and (file.codec is not None or bits is not None):
        raise RecipeError(f"{where}: expected keep or a codec and bits, found both")
    if not file.keep and file.codec is None and bits is None:
        raise RecipeError(f"{where}: expected keep: true, bits or codec, found none of them")
    codec = _checked(where, lambda: get_codec(file.codec or default_codec).name)
    conditions = {"min_weights": file.min_weights, "max_weights": file.max_weights, "dims": file.dims}
    if not names and not roles and all(value is None for value in conditions.values()):
        raise RecipeError(f"{where}: expected a condition (name, role, min_weights, max_weights or dims), found none")
    return Rule(
        names=names,
        roles=roles,
        **conditions,
        keep=bool(file.keep),
        codec=file.codec,
        bits=None if bits is None else _checked(f"{where}: bits", lambda: checked_rate(codec, bits)),
        reason=file.reason,
    )


def _checked(where: str, check: Callable[[], Item], error: type[PqweightsError] = RecipeError) -> Item:
    """Return what a check returns; the message of what it raises names the place in the recipe, or the option."""
    try:
        return check()
    except RecipeError as problem:
        raise error(f"{where}: {problem}") from None


def make_target(size: str | int | None, bits_per_weight: float | None, *, file: str | None = None) -> SizeTarget | None:
    """Return the target for a size, as text or in bytes, or for bits per weight; None without either.

    file: the recipe file that gives the target, whose keys messages name; None for options

    Raises RecipeError for both at once and for a value that is not a size.
    """
    keys = ("`target_size`", "`target_bpw`") if file is None else ("target_size", "target_bpw")
    size_key, bits_key = keys if file is None else (f"{file}: {key}" for key in keys)
    if size is not None and bits_per_weight is not None:
        raise RecipeError(f"{'' if file is None else f'{file}: '}give either {keys[0]} or {keys[1]}, not both")
    if size is not None:
        return SizeTarget(output_bytes=_checked(size_key, lambda: parse_size(size)))
    if bits_per_weight is None:
        return None
    try:
        value = float(bits_per_weight)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not 0 < value < math.inf:
        raise RecipeError(f"{bits_key}: expected a positive number of bits per weight, found {value}")
    return SizeTarget(bits_per_weight=value)
