"""The values of the options of an export, and the checks with which a target refuses those that it does not have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from pqweights.errors import ExportError, OptionError
from pqweights.options import ExportOptions

T = TypeVar("T")

BEST, MINMAX = "best", "minmax"
PLAIN, GPTQ, IMPORTANCE = "plain", "gptq", "importance"


def is_compensated(options: ExportOptions) -> bool:
    """Whether codes are chosen with a view to the error of outputs: if data are given, unless something else is."""
    if options.rounding is not None:
        return options.rounding in (GPTQ, IMPORTANCE)
    return (
        options.calibration is not None
        and options.qparams != MINMAX
        and options.mode in (None, "affine")
        and options.format in (None, "w4a16", "w8a16")
    )


def check_known(options: ExportOptions, target: str, known: Collection[str]) -> None:
    """Raise OptionError if an option was given that is not in `known`."""
    for name in (field.name for field in fields(ExportOptions) if field.name in options.given):
        if name not in known:
            raise OptionError(f"`{name}`: the target {target} does not take this option")


def check_rounding(target: str, options: ExportOptions, *, why_not: str | None = None) -> None:
    """Raise OptionError for a rounding that does not exist, or that does not go with the other options.

    why_not: why the format that was asked for has no compensated rounding; None if it has
    """
    rounding = one_of(target, "rounding", options.rounding, allowed=(PLAIN, GPTQ))
    if rounding == PLAIN:
        return
    if why_not is not None:
        raise OptionError(f"`rounding` {GPTQ}: {why_not}")
    if options.calibration is None:
        raise OptionError(
            f"`rounding` {GPTQ}: expected `calibration` FILE as well, with moments that pqweights calibrate --moments "
            "wrote"
        )
    if options.qparams == MINMAX:
        raise OptionError(f"`rounding` {GPTQ}: expected `qparams` {BEST}, found {MINMAX}")


def one_of(target: str, option: str, asked: T | None, *, allowed: Sequence[T]) -> T:
    """Return the value that was asked for, or by default the first allowed value, which may be None.

    Raises OptionError for a value that is not allowed.
    """
    if asked is None:
        return allowed[0]
    if asked not in allowed:
        ordered = sorted(allowed, key=lambda value: value if isinstance(value, int) else 0)
        listed = ", ".join(str(value) for value in ordered if value is not None)
        raise OptionError(f"`{option}` {asked}: the target {target} takes {listed}")
    return asked


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """How many weights of a row share a scale.

    target: what messages call the target
    allowed: the sizes that the target has, the default first
    asked: the size that the user asked for, which must divide every row; None for the default, and where it does not
        divide the rows of a layer, for the largest smaller size that does
    only: the size that all layers have, if the runtime reads one size for all
    """

    target: str
    allowed: tuple[int, ...]
    asked: int | None
    only: int | None = None

    @staticmethod
    def of(target: str, allowed: tuple[int, ...], asked: int | None) -> GroupSize:
        """Check the size that was asked for.

        Raises OptionError for a size that the target does not have.
        """
        checked = one_of(target, "group_size", asked, allowed=(None, *sorted(allowed)))
        return GroupSize(target=target, allowed=allowed, asked=checked)

    @property
    def size(self) -> int:
        """The number of weights that share a scale wherever that is possible."""
        return self.asked or self.only or self.allowed[0]

    @property
    def tried(self) -> tuple[int, ...]:
        """The sizes that a layer may get, the largest first."""
        if self.asked is not None or self.only is not None:
            return (self.asked or self.only or self.size,)
        return tuple(size for size in sorted(self.allowed, reverse=True) if size <= self.size)

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
        """Raise ExportError if the user asked for a size that does not divide the rows of a tensor."""
        if self.asked is None or columns % self.asked == 0:
            return
        fitting = self._dividing(columns)
        advice = "; without `group_size` each layer gets one that divides its rows" if fitting else ""
        raise ExportError(
            f"tensor {tensor!r}: `group_size` {self.asked} does not divide its rows of {columns} weights; of the sizes "
            f"that {self.target} has, these would: {fitting or 'none'}{advice}"
        )

    def _dividing(self, columns: int) -> str:
        return ", ".join(str(size) for size in sorted(self.allowed) if columns % size == 0)
