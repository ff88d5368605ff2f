"""What an export target is: which options it takes, how it is made, which runtime loads it, and what its card says.

Each target is one module with a constant TARGET, registered by a line in EXPORTS (the package's `__init__.py`). How the
values of options are checked that several targets have is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import LLAMA_CPP as LLAMA_CPP
from pqweights.common.options import MLX as MLX
from pqweights.common.options import OF_ALL_TARGETS, Options, given_in
from pqweights.common.options import TRANSFORMERS as TRANSFORMERS
from pqweights.errors import ExportError, OptionError
from pqweights.planning.choice import choose_recipe
from pqweights.planning.layout import DEFAULT_MAX_SHARD_BYTES
from pqweights.planning.recipe import NOTHING, Recipe
from pqweights.targets.integers import Assignment
from pqweights.targets.loading import LoadableModel

# The runtimes that load exports: transformers alone, transformers with the package of that name, mlx-lm, or llama.cpp.
TORCHAO, COMPRESSED_TENSORS = "torchao", "compressed-tensors"
# The options of targets that round with a view to the inputs of weights, and those of a target of integers beside its
# own.
INPUT_OPTIONS = ("rounding", "calibrate", "calibration_tokens", "save_sample", "imatrix", "save_imatrix")
INTEGER_OPTIONS = ("bits", "group_size", "qparams", *INPUT_OPTIONS)
# Those of a target that can give weights different formats.
SIZE_OPTIONS = ("target_size", "target_bpw", "max_kl", "eval", "sensitivity")
RECIPE_OPTIONS = ("format", "recipe", "keep", "set_format", *SIZE_OPTIONS)

BEST, MINMAX = "best", "minmax"
PLAIN, GPTQ, IMPORTANCE = "plain", "gptq", "importance"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """A target with its options.

    stated: what the manifest states of both
    assign: decides what becomes of a checkpoint, given what the model is called if anything says so; raises ExportError
        if the target cannot store the model, MissingDependencyError if a package is missing
    recipe: which formats the user asks for
    rounding: how codes are chosen: PLAIN, or with a view to the inputs of weights, GPTQ or IMPORTANCE
    """

    stated: dict[str, Any]
    assign: Callable[[Checkpoint, str | None], Assignment]
    recipe: Recipe = NOTHING
    rounding: str = PLAIN


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """One kind of export.

    name: its key in EXPORTS
    runtime: what loads it, one of the runtimes above
    tags: the tags of its card, the first of which is the format: see `tags_of`
    options: the fields of Options that it takes beside OF_ALL_TARGETS; manifests state them under the same names
    read_options: checks the values of those options; raises OptionError for a value that the target does not have
    check: decides whether a checkpoint can be exported, from the configuration and the names and shapes of tensors;
        raises ExportError if it cannot, MissingDependencyError if a package is missing that knows; by default `assign`
        decides, of one layer of each kind
    concerns: whether it is for models of the kind of a checkpoint; of others plans say nothing about it
    load_section: returns the paragraphs and code blocks of a card that say how to load the result,
        from Manifest.made_by and the model
    library: the library_name of its card, if that is not transformers
    stated: keys that the manifest states besides options
    unchecked: returns what `check` leaves open, for a message; None if it leaves nothing open
    choices: its formats, of which memory.py proposes those that fit, by what a list calls them: the options that ask
        for each, and about how many bits it has for each weight, scales included, or a function of the length of rows
    max_shard_bytes: after how many bytes of data a new file begins, unless the user says otherwise
    plain_roles: of the weights that it stores in 16 bits, whatever the format
    """

    name: str
    runtime: str
    tags: tuple[str, ...]
    options: tuple[str, ...]
    read_options: Callable[[Options], ExportSettings]
    load_section: Callable[[Mapping[str, Any], LoadableModel], list[str]]
    check: Callable[[Checkpoint], object] | None = None
    concerns: Callable[[Checkpoint], bool] = lambda checkpoint: True
    library: str | None = None
    stated: tuple[str, ...] = ()
    unchecked: Callable[[Checkpoint], str | None] = lambda checkpoint: None
    choices: Mapping[str, tuple[Options, float | Callable[[int], float]]] = field(default_factory=dict)
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    plain_roles: tuple[str, ...] = ()

    def with_recipe(self, options: Options) -> Options:
        """Return options whose recipe is loaded, and has what else they say of formats; its default is theirs, too.

        Raises OptionError for an option that the target does not take, RecipeError for what is wrong in a file.
        """
        given = given_in(options) - OF_ALL_TARGETS
        for name in (of.name for of in fields(Options) if of.name in given):
            if name not in self.options:
                raise OptionError(f"`{name}`: the target {self.name} does not take this option")
        if "recipe" not in self.options:
            return options
        recipe = choose_recipe(options.recipe, options, self.name)
        default = options.format or (recipe.format if options.type is None else None)
        return replace(
            options,
            recipe=recipe,
            format=default,
            keep=(),
            set_format=None,
            target_size=None,
            target_bpw=None,
            max_kl=None,
        )

    def tags_of(self, made_by: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the tags of the card of a result. made_by: what its manifest states, perhaps what runs it"""
        programs = made_by.get("runs_in")
        return self.tags if programs is None else (self.tags[0], *(program.lower() for program in programs))

    def settings(self, options: Options) -> ExportSettings:
        """Return the target with its options. Raises OptionError for an option, or a value, that it does not have."""
        return self.read_options(self.with_recipe(options))


def read_rounding(target: str, options: Options, *, why_not: str | None = None) -> str:
    """Return how codes are chosen: PLAIN, or with a view to the inputs of weights, GPTQ or IMPORTANCE.

    why_not: why the format that was asked for has no compensated rounding; None if it has

    Raises OptionError for a rounding that does not exist, or that does not go with the other options.
    """
    asked = one_of(target, "rounding", options.rounding, allowed=(None, PLAIN, GPTQ, IMPORTANCE))
    if asked is None and options.imatrix is not None:
        asked = IMPORTANCE
    if asked is None:
        # For a size other formats are chosen, too, of which some have compensated rounding.
        sized = isinstance(options.recipe, Recipe) and options.recipe.goal is not None
        possible = (why_not is None or sized) and options.qparams != MINMAX
        return GPTQ if options.calibrate is not None and possible else PLAIN
    if asked == PLAIN:
        return PLAIN
    if asked == GPTQ and why_not is not None:
        raise OptionError(f"`rounding` {GPTQ}: {why_not}")
    if asked == GPTQ and options.calibrate is None:
        raise OptionError(f"`rounding` {GPTQ}: expected `calibrate` as well, which samples the inputs of weights")
    if options.calibrate is None and options.imatrix is None:
        raise OptionError(f"`rounding` {IMPORTANCE}: expected `calibrate` or `imatrix` as well")
    if options.qparams == MINMAX:
        raise OptionError(f"`rounding` {asked}: expected `qparams` {BEST}, found {MINMAX}")
    return asked


def one_of(target: str, option: str, value: T | None, *, allowed: Sequence[T]) -> T:
    """Return an option's value, or by default the first allowed value, which may be None."""
    if value is None:
        return allowed[0]
    if value not in allowed:
        ordered = sorted(allowed, key=lambda other: other if isinstance(other, int) else 0)
        listed = ", ".join(str(other) for other in ordered if other is not None)
        raise OptionError(f"`{option}` {value}: the target {target} takes {listed}")
    return value


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """How many weights of a row share a scale.

    target: what messages call the target
    allowed: the sizes that the target has, the default first
    chosen: the size that the user chose, which must divide every row; None for the default, and where it does not
        divide the rows of a layer, for the largest smaller size that does
    only: the size that all layers have, if the runtime reads one size for all
    """

    target: str
    allowed: tuple[int, ...]
    chosen: int | None
    only: int | None = None

    @staticmethod
    def of(target: str, allowed: tuple[int, ...], chosen: int | None) -> GroupSize:
        """Check the size that the user chose. Raises OptionError for one that the target does not have."""
        checked = one_of(target, "group_size", chosen, allowed=(None, *sorted(allowed)))
        return GroupSize(target=target, allowed=allowed, chosen=checked)

    @property
    def size(self) -> int:
        """The number of weights that share a scale wherever that is possible."""
        return self.chosen or self.only or self.allowed[0]

    @property
    def tried(self) -> tuple[int, ...]:
        """The sizes that a layer may get, the largest first."""
        one_alone = self.chosen is not None or self.only is not None
        return (self.size,) if one_alone else tuple(s for s in sorted(self.allowed, reverse=True) if s <= self.size)

    def fitting(self, columns: Collection[int]) -> int | None:
        """Return the largest size that divides rows of these lengths; None if there is none."""
        return next((size for size in self.tried if all(length % size == 0 for length in columns)), None)

    def why_not(self, columns: int) -> str | None:
        """Return why a tensor with rows of `columns` weights stays plain; None if groups divide its rows.

        Manifests state the reason, so its words stay as they are.
        """
        if self.fitting([columns]) is not None:
            return None
        sizes, would = " or ".join(str(size) for size in self.tried), self._dividing(columns) or "none"
        return f"groups of {sizes} do not divide its rows of {columns} weights (--group-size that would: {would})"

    def check(self, tensor: str, columns: int) -> None:
        """Raise ExportError if the user chose a size that does not divide the rows of a tensor."""
        if self.chosen is None or columns % self.chosen == 0:
            return
        fitting = self._dividing(columns)
        advice = "; without `group_size` each layer gets one that divides its rows" if fitting else ""
        raise ExportError(
            f"tensor {tensor!r}: `group_size` {self.chosen} does not divide its rows of {columns} weights; of the "
            f"sizes that {self.target} has, these would: {fitting or 'none'}{advice}"
        )

    def _dividing(self, columns: int) -> str:
        return ", ".join(str(size) for size in sorted(self.allowed) if columns % size == 0)
