"""Recipes: typed YAML that says which codec encodes which tensor, and why.

A recipe has a default codec and width, and rules. The first rule that matches a tensor decides; where none does, the
policy of `roles` keeps or quantizes it. recipes/README.md describes the keys.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from pqweights.checkpoint.master import encoded_specs
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.codecs import DEFAULT_CODEC, get_codec, nearest_rate
from pqweights.dtypes import item_bytes
from pqweights.errors import OptionError, PqweightsError, RecipeError
from pqweights.planning.roles import ROLES, Role, classify, without_numbers
from pqweights.strict_json import Fields
from pqweights.units import parse_size

DEFAULT_BITS = 5
RECIPE_KEYS = ("name", "description", "codec", "bits", "target_size", "target_bpw", "sensitivity", "rules")
RULE_KEYS = ("name", "role", "min_weights", "max_weights", "dims", "keep", "codec", "bits", "reason")


@dataclass(frozen=True)
class Rule:
    """One rule. Conditions that are empty or None always hold; `names` are shell-style patterns over whole names."""

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
        """Whether one of the patterns matches; there may be none."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)

    def matches(self, tensor: LogicalTensor, role: Role) -> bool:
        """Whether the rule decides over the tensor; one that quantizes reaches structural roles only by name of role."""
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


@dataclass(frozen=True)
class SizeTarget:
    """What the result shall have at most: bytes in its safetensors files, or bits per weight. One of the two."""

    output_bytes: int | None = None
    bits_per_weight: float | None = None

    def __str__(self) -> str:
        if self.output_bytes is not None:
            return f"{self.output_bytes} bytes"
        return f"{self.bits_per_weight:g} bits per weight"

    def to_json(self) -> dict[str, Any]:
        """As in a recipe."""
        if self.output_bytes is not None:
            return {"target_size": self.output_bytes}
        return {"target_bpw": self.bits_per_weight}


def make_target(where: str, size: str | int | None, bits_per_weight: float | None) -> SizeTarget | None:
    """From a size in words or bytes, or from bits per weight; None without either.

    Raises RecipeError.
    """
    if size is not None and bits_per_weight is not None:
        raise RecipeError(f"{where}: expected a target size or target bits per weight, found both")
    if size is not None:
        try:
            return SizeTarget(output_bytes=parse_size(size))
        except RecipeError as error:
            raise RecipeError(f"{where}: target size: {error}") from None
    if bits_per_weight is not None:
        try:
            value = float(bits_per_weight)
        except OverflowError:  # an integer of hundreds of digits
            value = math.inf
        if not 0 < value < math.inf:
            raise RecipeError(f"{where}: target bits per weight: expected a positive number, found {value}")
        return SizeTarget(bits_per_weight=value)
    return None


@dataclass(frozen=True)
class Recipe:
    """A whole recipe. target: the widths that no rule gives are chosen to keep it, by `sensitivity` (heuristic, or a file)."""

    name: str
    description: str
    codec: str
    bits: float
    rules: tuple[Rule, ...] = ()
    target: SizeTarget | None = None
    sensitivity: str | None = None

    def with_bits(self, bits: float) -> Recipe:
        """The same recipe with another default width; rules keep theirs."""
        if self.target is not None:
            raise OptionError(f"--bits: recipe {self.name!r} chooses widths by its target size; leave --bits out")
        try:
            return replace(self, bits=get_codec(self.codec).coder(bits).bits)
        except RecipeError as error:
            raise OptionError(f"--bits: {error}") from None

    def with_target(self, target: SizeTarget | None, sensitivity: str | None) -> Recipe:
        """The same recipe with another target, where one is given, and another sensitivity."""
        target = target or self.target
        if sensitivity is not None and target is None:
            raise OptionError("--sensitivity: expected --target-size or --target-bpw beside it")
        return replace(self, target=target, sensitivity=sensitivity or self.sensitivity)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest: the keys of the YAML, unset ones left out."""
        rules = []
        for rule in self.rules:
            entry: dict[str, Any] = {"name": list(rule.names), "role": list(rule.roles)}
            entry |= {key: getattr(rule, key) for key in RULE_KEYS[2:]}
            rules.append({key: value for key, value in entry.items() if value not in ([], None, False)})
        return {
            "name": self.name, "description": self.description, "codec": self.codec, "bits": self.bits, "rules": rules,
        } | ({} if self.target is None else self.target.to_json())  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What happens to a tensor: codec and bits are None where it is kept. free: no rule gave the width."""

    role: str
    codec: str | None
    bits: float | None
    reason: str
    free: bool = False


def decide(recipe: Recipe, tensors: Sequence[LogicalTensor]) -> list[Decision]:
    """One decision per tensor.

    Raises RecipeError for a name pattern that matches no tensor at all, naming the nearest tensor.
    """
    _check_patterns(recipe, tensors)
    named = [rule for rule in recipe.rules if rule.names]
    made: dict[tuple[object, ...], Decision] = {}
    decisions = []
    for tensor in tensors:
        name = tensor.name
        matching = tuple([rule.matches_name(name) for rule in named]) if named else ()
        # All that a decision depends on; experts by the thousand have it in common.
        kind = (without_numbers(name), matching, tensor.dtype, tensor.plain_dtype, tensor.shape)
        if kind not in made:
            made[kind] = _decide_one(recipe, tensor)
        decisions.append(made[kind])
    return decisions


def _decide_one(recipe: Recipe, tensor: LogicalTensor) -> Decision:
    role = classify(tensor.name, tensor.dtype, tensor.shape)
    number, rule = next(((i, r) for i, r in enumerate(recipe.rules, start=1) if r.matches(tensor, role)), (0, Rule()))
    if rule.keep:
        return Decision(role.name, None, None, rule.reason or f"rule {number} of the recipe")
    if number == 0 and role.keep is not None:
        return Decision(role.name, None, None, role.keep)
    codec = rule.codec or recipe.codec
    bits = rule.bits or nearest_rate(codec, recipe.bits)
    if role.name == "buffer":
        return Decision(role.name, None, None, ROLES["buffer"].keep or "")
    if not is_smaller(tensor, codec, bits):
        encoded, plain = _sizes(tensor, codec, bits)
        return Decision(role.name, None, None, f"encoding would not make it smaller ({encoded} against {plain} bytes)")
    reason = (rule.reason or f"rule {number} of the recipe") if number else f"default for role {role.name}"
    return Decision(role.name, codec, bits, reason, free=rule.bits is None)


def is_smaller(tensor: LogicalTensor, codec: str | None, bits: float) -> bool:
    """Whether encoding makes a tensor smaller than it is."""
    if codec is None:
        return False
    encoded, plain = _sizes(tensor, codec, bits)
    return encoded < plain


def _sizes(tensor: LogicalTensor, codec: str, bits: float) -> tuple[int, int]:
    """Bytes of a tensor when it is encoded, and when it is kept."""
    encoded = sum(spec.byte_count for spec in encoded_specs(tensor.name, tensor.shape, get_codec(codec).coder(bits)))
    return encoded, math.prod(tensor.shape) * item_bytes(tensor.plain_dtype)


def _check_patterns(recipe: Recipe, tensors: Sequence[LogicalTensor]) -> None:
    names = [tensor.name for tensor in tensors]
    for number, rule in enumerate(recipe.rules, start=1):
        for pattern in rule.names:
            if not fnmatch.filter(names, pattern):
                fixed = pattern.replace("*", "")
                ends = {name[-len(fixed) :] if fixed else name: name for name in names}
                near = [ends[end] for end in difflib.get_close_matches(fixed, ends, n=1, cutoff=0.0)]
                raise RecipeError(
                    f"recipe {recipe.name!r}: rule {number}: the pattern {pattern!r} matches no tensor; the nearest is "
                    f"{near[0]!r}"
                )


def recipe_folder() -> Traversable:
    """The folder of the recipes that come with pqweights."""
    return importlib.resources.files("pqweights_recipes")


def recipe_names() -> list[str]:
    """The names of the recipes that come with pqweights."""
    return sorted(f.name.removesuffix(".yaml") for f in recipe_folder().iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe by name, or from a YAML file.

    Raises RecipeError for an unknown name and for everything that is wrong in a file.
    """
    if name_or_file in recipe_names():
        text = (recipe_folder() / f"{name_or_file}.yaml").read_text(encoding="utf-8")
        return parse_recipe(text, f"recipe {name_or_file!r}")
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name_or_file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        return parse_recipe(text, name_or_file)
    near = difflib.get_close_matches(name_or_file, recipe_names(), n=1, cutoff=0.0)[0]
    raise RecipeError(
        f"no recipe is called {name_or_file!r}; the nearest of {', '.join(recipe_names())} is {near!r} (or give a .yaml file)"
    )


def parse_recipe(text: str, where: str) -> Recipe:
    """A recipe from YAML; `where` names it in errors."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not YAML: {' '.join(str(error).split())[:160]}") from None
    fields = _checked_fields(where, data, RECIPE_KEYS)
    codec = get_codec(fields.optional("codec", fields.text, DEFAULT_CODEC)).name
    bits = fields.optional("bits", fields.number, nearest_rate(codec, DEFAULT_BITS))
    bits = _checked_bits(f"{where}: bits", codec, bits)
    entries = fields.optional("rules", fields.items, [])
    rules = tuple(_parse_rule(f"{where}: rule {i}", entry, codec) for i, entry in enumerate(entries, start=1))
    size = fields.raw("target_size")
    if size is not None and (not isinstance(size, str | int) or isinstance(size, bool)):
        raise RecipeError(f"{where}: target_size: expected a size such as 9GB, found {size!r}")
    per_weight = fields.raw("target_bpw")
    if per_weight is not None and (not isinstance(per_weight, float | int) or isinstance(per_weight, bool)):
        raise RecipeError(f"{where}: target_bpw: expected a number, found {per_weight!r}")
    target = make_target(where, size, per_weight)
    sensitivity = fields.optional("sensitivity", fields.text, None)
    if sensitivity is not None and target is None:
        raise RecipeError(f"{where}: sensitivity: expected target_size or target_bpw beside it")
    return Recipe(
        name=fields.optional("name", fields.text, Path(where).stem),
        description=fields.optional("description", fields.text, "").strip(),
        codec=codec,
        bits=bits,
        rules=rules,
        target=target,
        sensitivity=sensitivity,
    )


def _parse_rule(where: str, data: Any, default_codec: str) -> Rule:
    fields = _checked_fields(where, data, RULE_KEYS)
    names, roles = _texts(fields, "name"), _texts(fields, "role")
    for role in roles:
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1, cutoff=0.0)[0]
            raise RecipeError(f"{where}: no role is called {role!r}; the nearest of {', '.join(ROLES)} is {near!r}")
    keep = fields.optional("keep", fields.flag, False)
    codec, bits = fields.optional("codec", fields.text, None), fields.optional("bits", fields.number, None)
    if keep and (codec is not None or bits is not None):
        raise RecipeError(f"{where}: expected keep or a codec and bits, found both")
    if not keep and codec is None and bits is None:
        raise RecipeError(f"{where}: expected keep: true, bits or codec, found none of them")
    if codec is not None:
        get_codec(codec)
    if bits is not None:
        bits = _checked_bits(f"{where}: bits", codec or default_codec, bits)
    counts = {key: fields.optional(key, fields.whole, None) for key in ("min_weights", "max_weights", "dims")}
    if not names and not roles and all(value is None for value in counts.values()):
        raise RecipeError(f"{where}: expected a condition (name, role, min_weights, max_weights or dims), found none")
    reason = fields.optional("reason", fields.text, None)
    return Rule(names=names, roles=roles, **counts, keep=keep, codec=codec, bits=bits, reason=reason)


def _checked_fields(where: str, data: Any, known: tuple[str, ...]) -> Fields:
    """The keys and values of a recipe or a rule, none of them unknown."""

    def wrong(key: str, expected: str, found: Any) -> PqweightsError:
        return RecipeError(f"{where}{key and f': {key}'}: expected {expected}, found {found!r}")

    fields = Fields(data, wrong)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise RecipeError(f"{where}: unknown key {key!r}; the nearest of {', '.join(known)} is {near!r}")
    return fields


def _texts(fields: Fields, key: str) -> tuple[str, ...]:
    """A text, or a list of them."""
    value = fields.raw(key)
    return (value,) if isinstance(value, str) else tuple(fields.optional(key, fields.texts, []))


def _checked_bits(where: str, codec: str, bits: float) -> float:
    """The rate, where the codec has it."""
    try:
        return get_codec(codec).coder(bits).bits
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
