"""What a user may ask of an export, and how a target says that it has no such thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from pqweights.errors import ExportError, OptionError

T = TypeVar("T")

BEST, MINMAX = "best", "minmax"
PLAIN, ROTATED = "plain", "rotated"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """None where the target's default is to hold.

    dtype: bf16, or source (the bf16 target alone). bits, group_size: of integers. mode: of the mlx target. packing: of
    the torchao target. basis: plain or rotated (the vllm target). qparams: best or minmax.
    """

    dtype: str | None = None
    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None
    packing: str | None = None
    basis: str | None = None
    qparams: str | None = None

    def only(self, target: str, *known: str) -> None:
        """Raise OptionError if another option than these was given."""
        for field in fields(self):
            if getattr(self, field.name) is not None and field.name not in known:
                raise OptionError(f"--{field.name.replace('_', '-')}: the target {target} has no such option")


def one_of(target: str, option: str, asked: T | None, allowed: Sequence[T]) -> T:
    """What was asked for, or the first of those allowed, which may be None.

    Raises OptionError for anything else.
    """
    if asked is None:
        return allowed[0]
    if asked not in allowed:
        listed = ", ".join(str(a) for a in allowed if a is not None)
        raise OptionError(f"--{option} {asked}: the target {target} has {listed}")
    return asked


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """How many weights of a row share a scale.

    target: what messages call it. allowed: sizes that it has, the default first. asked: None for the default, with which
    weights that it does not divide stay plain.
    """

    target: str
    allowed: tuple[int, ...]
    asked: int | None

    @staticmethod
    def of(target: str, allowed: tuple[int, ...], asked: int | None) -> GroupSize:
        """Raises OptionError for a size that the target does not have."""
        return GroupSize(target=target, allowed=allowed, asked=one_of(target, "group-size", asked, (None, *allowed)))

    @property
    def size(self) -> int:
        """The number."""
        return self.asked or self.allowed[0]

    def why_not(self, tensor: str, columns: int) -> str | None:
        """Why rows of so many weights stay plain; None where groups divide them.

        Raises ExportError where they do not, and the size was asked for.
        """
        if columns % self.size == 0:
            return None
        fitting = ", ".join(str(size) for size in sorted(self.allowed) if columns % size == 0) or "none"
        if self.asked is not None:
            raise ExportError(
                f"tensor {tensor!r}: --group-size {self.size} does not divide its rows of {columns} weights; of the sizes "
                f"that {self.target} has these would: {fitting}"
            )
        return f"groups of {self.size} do not divide its rows of {columns} weights (--group-size that would: {fitting})"
