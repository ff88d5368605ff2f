"""The codecs: what turns blocks of a weight into a fixed number of bytes and back. Adding one is a file and a line."""

from __future__ import annotations

import difflib

from pqweights.codecs.hadamard_lloyd_max import HadamardLloydMax
from pqweights.codecs.protocol import Codec, EncodedBlocks
from pqweights.errors import RecipeError

__all__ = ["CODECS", "Codec", "EncodedBlocks", "get_codec"]

CODECS: dict[str, Codec] = {
    "hadamard-lloyd-max": HadamardLloydMax(),
}


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises RecipeError, naming the nearest codec.
    """
    if name in CODECS:
        return CODECS[name]
    near = difflib.get_close_matches(name, CODECS, n=1, cutoff=0.0)
    raise RecipeError(f"codec: no codec is called {name!r}; the nearest is {near[0]!r}")
