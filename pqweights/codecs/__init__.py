"""The codecs, which turn blocks of a weight into a fixed number of bytes and back, by name."""

from __future__ import annotations

from pqweights.codecs.comparison import ComparisonCodec
from pqweights.codecs.hadamard_lloyd_max import HadamardLloydMax
from pqweights.codecs.protocol import Codec
from pqweights.errors import RecipeError
from pqweights.suggestions import instead

__all__ = ["CODECS", "DEFAULT_CODEC", "get_codec", "nearest_rate"]

DEFAULT_CODEC = "hadamard-lloyd-max"

CODECS: dict[str, Codec] = {
    "hadamard-lloyd-max": HadamardLloydMax(),
    "absmax": ComparisonCodec(name="absmax", rotated=False, uniform=True),
    "hadamard-absmax": ComparisonCodec(name="hadamard-absmax", rotated=True, uniform=True),
    "lloyd-max": ComparisonCodec(name="lloyd-max", rotated=False, uniform=False),
    "hadamard-lloyd-max-l2": ComparisonCodec(name="hadamard-lloyd-max-l2", rotated=True, uniform=False),
}


def get_codec(name: str) -> Codec:
    """Return the codec of a name.

    Raises RecipeError for an unknown name; the message lists the codecs, and names the nearest.
    """
    if name in CODECS:
        return CODECS[name]
    raise RecipeError(f"codec: no codec is called {name!r}; {instead(name, CODECS)}")


def nearest_rate(codec: str, bits: float) -> float:
    """Return the rate of a codec that is nearest to `bits`; of two such rates the lower one."""
    return min(get_codec(codec).rates, key=lambda rate: abs(rate - bits))
