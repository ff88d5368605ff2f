"""Recipes: which format each weight gets, in a master and in every export, and why. YAML, options, and what they mean.

A recipe has a default and rules. The first rule that matches a weight decides, those of options before those of the
file; what no rule decides gets the default, or what fits a size. The format of a master is a codec with a bit width,
that of an export one of the formats of its target. recipes/README.md describes the keys.
"""

from __future__ import annotations

import fnmatch
import importlib.resources
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from pqweights.checkpoint.config import load_yaml
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.common.advice import instead, nearest
from pqweights.common.documents import ClosedDocument, Number, as_document, as_json
from pqweights.common.units import counted, parse_size
from pqweights.errors import OptionError, RecipeError
from pqweights.formats import DEFAULT_CODEC, checked_effort, checked_rate, get_codec, nearest_rate
from pqweights.models.conventions import TEXT_LAYERS
from pqweights.models.description import ModelDescription
from pqweights.planning.roles import ROLES, names_of, role_of
from pqweights.planning.sensitivity import Sensitivity

Item = TypeVar("Item")

MASTER = "master"
DEFAULT_BITS = 5
# How the names of recipe files end.
SUFFIXES = (".yaml", ".yml")
# Patterns on the command line that do not mean names: role:expert, layers:0-3.
KINDS = ("role", "layers")


class Rule(ClosedDocument, frozen=True, kw_only=True, omit_defaults=True):
    """One rule of a recipe, with the keys of the YAML. A condition that is not given always holds.

    name: shell-style patterns, one of which must match a whole name of the weight
    role: the weight must have one of these roles
    layers: it must be of one of these layers of the text model: numbers, or texts such as "0-3"
    min_weights, max_weights: bounds on its number of elements
    dims: number of dimensions
    keep: keep it as it is
    codec, bits: in a master, how to encode it; None for the recipe's defaults
    format: in an export, one of the formats of the target
    reason: why, for plan and manifest
    """

    name: tuple[str, ...] = ()
    role: tuple[str, ...] = ()
    layers: tuple[int | str, ...] = ()
    min_weights: int | None = None
    max_weights: int | None = None
    dims: int | None = None
    keep: bool = False
    codec: str | None = None
    bits: Number | None = None
    format: str | None = None
    reason: str | None = None

    def is_about(self, names: Iterable[str]) -> bool:
        """Whether the rule may decide about a weight that is known by these names."""
        known = tuple(names)
        return (not self.name or any(fnmatch.fnmatchcase(name, of) for name in known for of in self.name)) and (
            not self.layers or any(int(at[1]) in _numbers(self.layers) for at in map(TEXT_LAYERS.match, known) if at)
        )

    def may_format(self, role: str) -> bool:
        """Whether it gives weights of a role a format; those of a structural role only if it names the role."""
        return not ROLES[role].structural or role in self.role

    def matches(self, tensor: LogicalTensor, model: ModelDescription) -> bool:
        """Whether the rule decides what becomes of a tensor of a model."""
        count, role = math.prod(tensor.shape), role_of(tensor, model)
        return (
            (self.keep or self.may_format(role))
            and self.is_about(names_of(tensor))
            and (not self.role or role in self.role)
            and (self.min_weights is None or count >= self.min_weights)
            and (self.max_weights is None or count <= self.max_weights)
            and (self.dims is None or len(tensor.shape) == self.dims)
        )


def _numbers(layers: Iterable[int | str]) -> set[int]:
    """Return the layers that numbers and texts such as "0-3" name. Raises ValueError for other texts."""
    numbers: set[int] = set()
    for entry in layers:
        first, _, last = str(entry).partition("-")
        of_entry = range(int(first), int(last or first) + 1)
        if not of_entry:
            raise ValueError(f"{entry}: the last layer comes before the first")
        numbers |= set(of_entry)
    return numbers


@dataclass(frozen=True)
class Goal:
    """What formats are chosen for: an upper bound for the result, one of the three.

    output_bytes: size of its files of weights, with headers and the tensors that are kept
    bits_per_weight: mean over the weights that get a format
    divergence: KL(original || result), in nats per token; of the results that stay below, the smallest
    """

    output_bytes: int | None = None
    bits_per_weight: float | None = None
    divergence: float | None = None

    def __str__(self) -> str:
        if self.divergence is not None:
            return f"a divergence of {self.divergence:g}"
        if self.output_bytes is not None:
            return f"{self.output_bytes} bytes"
        return f"{self.bits_per_weight:g} bits per weight"

    def check_measured(self, sensitivity: Sensitivity | None) -> None:
        """Raise OptionError for a divergence if no sensitivities were measured: the rule of thumb tells none."""
        if self.divergence is not None and sensitivity is None:
            raise OptionError("`max_kl`: expected `calibrate` as well, on whose tokens the divergence is measured")

    def limit(self, weights: int) -> int:
        """Return the bytes that files may have, or if bits per weight are bounded, the data of so many weights."""
        if self.output_bytes is not None:
            return self.output_bytes
        assert self.bits_per_weight is not None
        return math.floor(min(self.bits_per_weight * weights / 8, 2.0**62))

    def measured(self, size: int, weights: int) -> str:
        """Return what messages say of a size in bytes: in the unit of the goal, rounded up."""
        if self.output_bytes is not None:
            return f"{size} bytes"
        return f"{math.ceil(80_000 * size / weights) / 10_000:.4f} bits per weight"

    def to_json(self) -> dict[str, Any]:
        """Return the goal with its key in a recipe."""
        if self.divergence is not None:
            return {"max_kl": self.divergence}
        if self.output_bytes is not None:
            return {"target_size": self.output_bytes}
        return {"target_bpw": self.bits_per_weight}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe.

    name, description: for people
    target: that of which it is alone; None for any
    codec, bits: in a master, the defaults for weights that are quantized
    effort: how much work codecs that have a choice put into encoding; None for their defaults
    format: in an export, the default; None for that of the target
    rules: the first rule that matches a weight decides
    overrides: rules that options give, which come before all others; each has a reason that names its option
    goal: what the result has to meet; formats that no rule gives are then chosen for it
    sensitivity: by what they are chosen in an export, if it was measured; else by the rule of thumb
    """

    name: str = ""
    description: str = ""
    target: str | None = None
    codec: str = DEFAULT_CODEC
    bits: float = DEFAULT_BITS
    effort: int | None = None
    format: str | None = None
    rules: tuple[Rule, ...] = ()
    overrides: tuple[Rule, ...] = ()
    goal: Goal | None = None
    sensitivity: Sensitivity | None = None

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of its codecs, the default first."""
        return tuple(dict.fromkeys([self.codec, *(rule.codec for rule in self.rules if rule.codec is not None)]))

    @property
    def labelled(self) -> Iterator[tuple[str, Rule]]:
        """All rules in the order in which they are tried, each with what messages call it."""
        yield from ((rule.reason or "", rule) for rule in self.overrides)
        yield from ((f"rule {number} of the recipe", rule) for number, rule in enumerate(self.rules, start=1))

    @property
    def decides(self) -> bool:
        """Whether it says more than the default: rules, or a size."""
        return bool(self.overrides or self.rules or self.goal)

    def rule_for(self, model: ModelDescription, *tensors: LogicalTensor) -> tuple[Rule | None, str]:
        """Return the first rule that matches one of some weights that share a format, and why it decides."""
        for label, rule in self.labelled:
            if any(rule.matches(tensor, model) for tensor in tensors):
                return rule, rule.reason or label
        return None, ""

    def check(self, model: ModelDescription, weights: Sequence[LogicalTensor], names: Sequence[str]) -> None:
        """Raise RecipeError for a rule that is about no tensor, or that can decide about none by its names.

        That is a pattern that matches none, a format for what gets none, and an option that comes too late.

        weights: those that rules with names are about, as far as they can get a format
        names: those of all tensors
        """
        decided: dict[str, tuple[str, Rule]] = {}
        for index, (label, rule) in enumerate(self.labelled):
            if not rule.name and not rule.layers:
                formatted = [weight for weight in weights if role_of(weight, model) in rule.role]
                if index < len(self.overrides) and not rule.keep and not formatted:
                    raise RecipeError(f"{label}: no tensor of this role can be quantized")
                continue
            for pattern in rule.name:
                if not fnmatch.filter(names, pattern):
                    raise RecipeError(
                        f"{label}: the pattern {pattern!r} matches no tensor of the checkpoint; "
                        f"{instead_of(pattern, names)}"
                    )
            first = next((name for name in names if rule.is_about([name])), None)
            if first is None:
                raise RecipeError(f"{label}: matches no tensor of the layers {', '.join(map(str, rule.layers))}")
            about = [weight for weight in weights if rule.is_about(names_of(weight))]
            if not rule.keep and not any(rule.may_format(role_of(weight, model)) for weight in about):
                name, role = (about[0].name, role_of(about[0], model)) if about else (first, "buffer")
                why = f" ({ROLES[role].keep})" if about else ""
                hint = "" if role == "buffer" else f"; only a rule for role:{role} quantizes those"
                raise RecipeError(
                    f"{label}: matches nothing that it can quantize, only tensors such as {name!r}{why}{hint}"
                )
            taken = [weight.name for weight in about if rule.matches(weight, model)]
            if index < len(self.overrides) and not rule.keep and taken and decided.keys() >= set(taken):
                before, earlier = decided[taken[0]]
                narrower = "" if earlier.keep or set(earlier.name) == set(rule.name) else "; give it before that option"
                raise RecipeError(
                    f"{label}: applies to no tensor, because {before} matches all of its tensors first, such as "
                    f"{taken[0]!r}{narrower}"
                )
            for name in taken:
                decided.setdefault(name, (label, rule))

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as manifests state it: the keys of the YAML, without those that are not set."""
        given: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.target in (None, MASTER):
            given |= {"codec": self.codec, "bits": self.bits, "effort": self.effort}
        else:
            given |= {"target": self.target, "format": self.format}
        stated = {key: value for key, value in given.items() if value is not None}
        stated["rules"] = [as_json(rule) for rule in (*self.overrides, *self.rules)]
        return stated | ({} if self.goal is None else self.goal.to_json())


# What an export is given if nothing is asked for.
NOTHING = Recipe()


class RecipeFile(ClosedDocument, frozen=True, kw_only=True):
    """A recipe as YAML has it: the fields of Recipe, with the two kinds of sizes."""

    name: str | None = None
    description: str | None = None
    target: str | None = None
    codec: str | None = None
    bits: Number | None = None
    effort: int | None = None
    format: str | None = None
    target_size: str | int | None = None
    target_bpw: int | float | None = None
    max_kl: int | float | None = None
    rules: tuple[Any, ...] | None = None


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
    data = _parse_yaml(text, where)
    if data is None:
        raise RecipeError(f"{where}: the recipe is empty; expected keys and values, such as bits: 5")
    file = as_document(data, RecipeFile, lambda problem: RecipeError(f"{where}: {problem}"))
    rules = tuple(_rule(f"{where}: rule {number}", entry) for number, entry in enumerate(file.rules or (), start=1))
    given: list[RecipeFile | Rule] = [file, *rules]
    has_codecs = any(of.codec is not None or of.bits is not None for of in given) or file.effort is not None
    has_formats = any(of.format is not None for of in given) or file.target not in (None, MASTER)
    if has_codecs and has_formats:
        raise RecipeError(f"{where}: expected codecs and bits, of a master, or formats, of an export; found both")
    codec = file.codec or DEFAULT_CODEC
    recipe = Recipe(
        name=file.name or Path(where).stem,
        description=(file.description or "").strip(),
        target=MASTER if has_codecs else file.target,
        codec=codec,
        bits=checked(where, lambda: nearest_rate(codec, DEFAULT_BITS)) if file.bits is None else file.bits,
        effort=file.effort,
        format=file.format,
        rules=rules,
        goal=checked(where, lambda: make_goal(file.target_size, file.target_bpw, file.max_kl, mark="")),
    )
    return checked(where, partial(with_known_codecs, recipe, ("bits", "effort")))


def _rule(where: str, data: Any) -> Rule:
    """Return a rule of a file; its codec and bits are not checked."""
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if value is not None}
        data |= {key: [data[key]] for key in ("name", *KINDS) if not isinstance(data.get(key, []), list)}
    rule = as_document(data, Rule, lambda problem: RecipeError(f"{where}: {problem}"))
    conditions = ("name", "role", "layers", "min_weights", "max_weights", "dims")
    gives = (rule.keep, rule.codec is not None or rule.bits is not None, rule.format is not None)
    if sum(gives) != 1:
        found = "more than one of them" if any(gives) else "none of them"
        raise RecipeError(f"{where}: expected keep: true, a codec and bits, or a format, found {found}")
    if not any(getattr(rule, key) not in (None, ()) for key in conditions):
        raise RecipeError(f"{where}: expected a condition ({', '.join(conditions)}), found none")
    if rule.min_weights is not None and rule.max_weights is not None and rule.min_weights > rule.max_weights:
        raise RecipeError(f"{where}: min_weights {rule.min_weights} is more than max_weights {rule.max_weights}")
    checked(where, partial(checked_condition, {"role": rule.role, "layers": rule.layers}))
    return rule


def checked_condition(condition: dict[str, Any]) -> dict[str, Any]:
    """Return a condition whose roles and layers there can be. Raises RecipeError for others."""
    for role in condition.get("role", ()):
        if role not in ROLES:
            raise RecipeError(f"no role is called {role!r}; {instead(role, ROLES)}")
    try:
        _numbers(condition.get("layers", ()))
    except ValueError:
        raise RecipeError(f"layers: expected numbers, or texts such as '0-3', found {condition['layers']}") from None
    return condition


def with_known_codecs(recipe: Recipe, keys: tuple[str, str] = ("", "")) -> Recipe:
    """Return a recipe with bit widths and effort as manifests state them. Raises RecipeError for what no codec has.

    keys: what messages call its bits and its effort
    """
    rules = []
    for number, rule in enumerate(recipe.rules, start=1):
        codec = checked(f"rule {number}", partial(get_codec, rule.codec or recipe.codec)).codec
        bits = None if rule.bits is None else checked(f"rule {number}: bits", partial(checked_rate, codec, rule.bits))
        rules.append(msgspec.structs.replace(rule, bits=bits))
    bits = checked(keys[0], partial(checked_rate, recipe.codec, recipe.bits))
    recipe = replace(recipe, rules=tuple(rules), bits=bits)
    if recipe.effort is None:
        return recipe
    return replace(recipe, effort=checked(keys[1], partial(checked_effort, recipe.codecs, recipe.effort)))


def checked(where: str, check: Callable[[], Item], error: type[OptionError | RecipeError] = RecipeError) -> Item:
    """Return what a check returns; the message of what it raises begins with the place in the recipe, or the option."""
    try:
        return check()
    except RecipeError as problem:
        raise error(f"{where}: {problem}" if where else str(problem)) from None


def make_goal(
    size: str | int | None = None,
    bits_per_weight: float | None = None,
    divergence: float | None = None,
    *,
    mark: str = "`",
) -> Goal | None:
    """Return the goal of a size, as text or in bytes, of bits per weight, or of a divergence; None without any.

    mark: what messages put around the keys

    Raises RecipeError for several at once, and for a value that is not possible.
    """
    given = {"target_size": size, "target_bpw": bits_per_weight, "max_kl": divergence}
    keys = [f"{mark}{key}{mark}" for key, value in given.items() if value is not None]
    if len(keys) > 1:
        raise RecipeError(f"give either {keys[0]} or {keys[1]}, not both")
    if size is not None:
        return Goal(output_bytes=checked(keys[0], partial(parse_size, size)))
    if bits_per_weight is not None:
        return Goal(bits_per_weight=_positive(bits_per_weight, keys[0], "number of bits per weight"))
    if divergence is not None:
        return Goal(divergence=_positive(divergence, keys[0], "number of nats per token, such as 0.02"))
    return None


def _positive(given: float, key: str, what: str) -> float:
    """Return a number. Raises RecipeError if it is not a finite one above zero."""
    try:
        value = float(given)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not 0 < value < math.inf:
        raise RecipeError(f"{key}: expected a positive {what}, found {value}")
    return value


def _parse_yaml(text: str, where: str) -> Any:
    """Parse a text as YAML. where: what messages call it. Raises RecipeError if it is none."""
    try:
        return load_yaml(text, with_unique_keys=True)
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


def instead_of(pattern: str, names: Sequence[str]) -> str:
    """Return what to give in place of a pattern that matches no tensor.

    That is a wider pattern which matches some; else the nearest tensor; if none is near, the first one as an example.
    """
    for wider in (f"{pattern}.weight", f"*.{pattern}.weight", f"{pattern}.*", f"*.{pattern}.*", f"*{pattern}*"):
        matching = fnmatch.filter(names, wider)
        if matching:
            return f"did you mean {wider.replace('**', '*')!r} ({counted(len(matching), 'tensor')})?"
    fixed = pattern.replace("*", "").strip(".")
    by_part: dict[str, str] = {}
    for name in names:
        components = name.split(".")
        count = fixed.count(".") + 1
        runs = (".".join(components[at : at + count]) for at in range(len(components) - count + 1))
        for part in (name[-len(fixed) :], *runs):
            by_part.setdefault(part, name)
    near = nearest(fixed, by_part) if fixed else None
    if near is None:
        return f"the first of its {len(names)} tensors is {names[0]!r}"
    return f"the nearest is {by_part[near]!r}"
