"""The codecs by name: those that encode blocks of a weight, and what weights of masters may be encoded with."""

from __future__ import annotations

from collections.abc import Iterable

from pqweights.common.advice import instead
from pqweights.errors import RecipeError
from pqweights.formats.columns import TrellisColumns
from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.master import (
    BlockFormat,
    MasterFormat,
    alternatives,
    check_effort,
    exact_rate,
    has_rate,
    rates_text,
)
from pqweights.formats.native import Native
from pqweights.formats.trellis import Trellis

__all__ = [
    "CODECS",
    "DEFAULT_CODEC",
    "MASTER_CODECS",
    "UNRATED",
    "checked_effort",
    "checked_rate",
    "get_codec",
    "nearest_rate",
]

DEFAULT_CODEC = "hadamard-lloyd-max"

CODECS: dict[str, type[BlockFormat]] = {"hadamard-lloyd-max": LloydMax, "hadamard-trellis": Trellis}
# Those that recipes do not name, and whose weights take as many bytes as they take: that of calibrations, and the
# source's own numbers.
UNRATED: dict[str, type[MasterFormat]] = {"hadamard-trellis-columns": TrellisColumns, "native": Native}
MASTER_CODECS: dict[str, type[MasterFormat]] = {**CODECS, **UNRATED}


def get_codec(name: str, key: str = "codec") -> type[BlockFormat]:
    """Return the formats of a codec. key: what messages call the name

    Raises RecipeError for an unknown name; the message lists the codecs, and names the nearest.
    """
    if name in CODECS:
        return CODECS[name]
    if name in MASTER_CODECS:
        takes = "takes whole checkpoints (`lossless`)" if name == Native.codec else "takes a calibration"
        raise RecipeError(f"{key}: {name} {takes} and is not for recipes; expected {', '.join(CODECS)}")
    raise RecipeError(f"{key}: no codec is called {name!r}; {instead(name, CODECS)}")


def nearest_rate(codec: str, bits: float) -> float:
    """Return the rate of a codec that is nearest to `bits`; of two such rates the lower one."""
    of_name = get_codec(codec)
    return exact_rate(bits) if has_rate(of_name, bits) else min(of_name.rates, key=lambda rate: abs(rate - bits))


def checked_rate(codec: str, bits: float) -> float:
    """Return a rate that a user gives, as files and messages write it.

    Raises RecipeError for one that the codec does not have; the message names a codec that has it, if any.
    """
    try:
        return get_codec(codec).at(bits).bits
    except RecipeError as error:
        other = next((other for other in CODECS.values() if has_rate(other, bits)), None)
        hint = "" if other is None else f"; {other.codec} has {rates_text(other)}"
        raise RecipeError(f"{error}{hint}") from None


def checked_effort(codecs: Iterable[str], effort: int) -> int | None:
    """Return an effort that a user gives for these codecs, of which those without a choice ignore it.

    Returns None for the default of all that have one, so that asking for it gives the same result as not asking.

    Raises RecipeError if a codec has others, or if none of them has any; the message then names a codec that has.
    """
    named = [get_codec(name) for name in codecs]
    choosing = [codec for codec in named if codec.efforts]
    for codec in choosing or named:
        try:
            check_effort(codec, effort)
        except RecipeError as error:
            other = None if choosing else next((other for other in CODECS.values() if other.efforts), None)
            hint = "" if other is None else f"; {other.codec} has {alternatives(other.efforts)}"
            raise RecipeError(f"{error}{hint}") from None
    return None if all(effort == codec.efforts[0] for codec in choosing) else effort
