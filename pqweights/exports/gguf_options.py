"""What a user asks of the types of a GGUF file: by options, or by a recipe of types (docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pqweights.checkpoint.writer import sha256_of_file
from pqweights.common.documents import ClosedDocument
from pqweights.common.units import parse_size
from pqweights.errors import OptionError, PqweightsError, RecipeError
from pqweights.gguf.mixes import Mix, find_mix, find_type
from pqweights.options import ExportOptions
from pqweights.planning.recipe import in_recipe, read_yaml, recipe_text, texts
from pqweights.planning.sensitivity_file import HEURISTIC

Item = TypeVar("Item")

DEFAULT_TYPE = "q4_k_m"


class _RuleFile(ClosedDocument, frozen=True):
    """A rule as YAML has it."""

    name: str | tuple[str, ...]
    type: str


class _TypesFile(ClosedDocument, frozen=True, kw_only=True):
    """A recipe of types as YAML has it."""

    type: str | None = None
    pure: bool | None = None
    target_size: str | int | None = None
    sensitivity: str | None = None
    rules: tuple[Any, ...] = ()


class TypeRule(NamedTuple):
    """The type of the tensors whose name matches a pattern: their name in the file, or in the checkpoint."""

    pattern: str
    type: str


@dataclass(frozen=True, kw_only=True)
class TypeOptions:
    """What a user asks for.

    mix: the mix that decides about what no rule matches
    rules: the first that matches a tensor decides
    target_size: the largest size of the files, in bytes, for which types are then chosen; None to leave it to the mix
    sensitivity: by what they are chosen: a file that `pqweights sensitivity` wrote; None for the rule of thumb
    """

    mix: Mix
    rules: tuple[TypeRule, ...] = ()
    target_size: int | None = None
    sensitivity: Path | None = None

    @property
    def label(self) -> str:
        """What file names call the choice."""
        if self.target_size is not None:
            return "fit"
        name = self.mix.type if self.mix.pure else self.mix.name
        return f"{name}-mixed" if self.rules else name

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the choice; what is not said is the default."""
        stated: dict[str, Any] = {} if self.target_size is not None else {"type": self.mix.name}
        if self.mix.pure:
            stated["pure"] = True
        if self.rules:
            stated["types"] = [list(rule) for rule in self.rules]
        if self.target_size is not None:
            stated["target_size"] = self.target_size
        if self.sensitivity is not None:
            stated["sensitivity"] = sha256_of_file(self.sensitivity)
        return stated


def read_types(options: ExportOptions) -> TypeOptions:
    """Return the types that a user asks for; options come before the recipe's own.

    Raises OptionError for an unknown type and for options that contradict each other, RecipeError for a recipe that
    cannot be read.
    """
    asked = _recipe(Path(options.recipe)) if options.recipe is not None else TypeOptions(mix=find_mix(DEFAULT_TYPE))
    if options.type is not None:
        asked = replace(asked, mix=find_mix(options.type))
    if options.pure:
        asked = replace(asked, mix=replace(asked.mix, pure=True))
    by_pattern = options.set_type.items() if isinstance(options.set_type, Mapping) else options.set_type or ()
    added = tuple(TypeRule(pattern, find_type(f"`set_type` {pattern}={kind}", kind)) for pattern, kind in by_pattern)
    asked = replace(asked, rules=(*added, *asked.rules))
    if options.target_size is not None:
        asked = replace(asked, target_size=parse_size(options.target_size))
    if options.sensitivity is not None:
        heuristic = str(options.sensitivity) == HEURISTIC
        asked = replace(asked, sensitivity=None if heuristic else Path(options.sensitivity))
        if asked.target_size is None:
            raise OptionError("`sensitivity`: expected `target_size` as well, for which types are then chosen")
    if asked.target_size is not None and (options.type is not None or asked.mix.pure):
        raise OptionError("`target_size`: chooses the types itself; leave out `type` and `pure`")
    return asked


def _recipe(path: Path) -> TypeOptions:
    """Read a recipe of types.

    Raises RecipeError for everything that is wrong in it.
    """
    file = read_yaml(recipe_text(path), str(path), _TypesFile)
    mix, size = _in_recipe(path, lambda: find_mix(file.type or DEFAULT_TYPE)), file.target_size
    if size is not None and (file.type is not None or file.pure is not None):
        raise RecipeError(f"{path}: target_size chooses the types itself; leave out type and pure")
    rules: list[TypeRule] = []
    for number, entry in enumerate(file.rules, start=1):
        rules += _rules(path, f"rule {number}", entry)
    return TypeOptions(
        mix=replace(mix, pure=bool(file.pure)),
        rules=tuple(rules),
        target_size=None if size is None else _in_recipe(path, lambda: parse_size(size)),
        sensitivity=None if file.sensitivity in (None, HEURISTIC) else Path(str(file.sensitivity)),
    )


def _rules(path: Path, where: str, entry: Any) -> list[TypeRule]:
    """Read one rule, which may have several patterns."""
    rule = in_recipe(entry, f"{path}: {where}", _RuleFile)
    chosen = _in_recipe(path, lambda: find_type(f"{where}: type {rule.type}", rule.type))
    return [TypeRule(name, chosen) for name in texts(rule.name)]


def _in_recipe(path: Path, find: Callable[[], Item]) -> Item:
    """Return what a function returns; what it raises names the recipe."""
    try:
        return find()
    except PqweightsError as error:
        raise RecipeError(f"{path}: {error}") from None
