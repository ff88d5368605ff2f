"""What a user may ask of an export, and how a target says that it has no such thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from pqweights.errors import ExportError

T = TypeVar("T")

BEST, MINMAX = "best", "minmax"
PLAIN, ROTATED = "plain", "rotated"


@dataclass(frozen=True)
class ExportOptions:
    """None where the target's default is to hold.

    dtype: bf16, or source (the bf16 target alone). bits, group_size: of integers; mode: of the mlx target. packing: of
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
        """Raise ExportError if another option than these was given."""
        for field in fields(self):
            if getattr(self, field.name) is not None and field.name not in known:
                raise ExportError(f"--{field.name.replace('_', '-')}: the target {target} has no such option")


def one_of(target: str, option: str, asked: T | None, allowed: Sequence[T]) -> T:
    """What was asked for, or the first of those allowed, which may be None.

    Raises ExportError for anything else.
    """
    if asked is None:
        return allowed[0]
    if asked not in allowed:
        listed = ", ".join(str(a) for a in allowed if a is not None)
        raise ExportError(f"--{option} {asked}: the target {target} has {listed}")
    return asked
