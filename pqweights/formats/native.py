"""The source's own numbers without loss: its stored tensors, those of which that get smaller coded by their entropy.

The exponents of trained weights have about 2.6 bits of information in BF16's 8 (Zhang et al., arXiv:2504.11651, and
Hershcovitch et al., arXiv:2411.05239). docs/format.md, section 11, has the bytes. Here the codec is described, and the
items of a stored tensor are cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pqweights.common.strict_json import rounded
from pqweights.formats.master import MasterFormat, exact_rate
from pqweights.kernels.lossless import CHUNK_ITEMS

# What follows the name of a stored tensor that is coded: its chunks, and the bytes of each.
CODED, LENGTHS = "_coded", "_lengths"
# What is wrong with a chunk, by what the kernel returns.
REASONS = {
    1: "it is too short or too long",
    2: "its frequencies are not those of a chunk",
    3: "its words do not end where they should",
}
# Of these dtypes, items are whole floats; of others, bytes, which may be two codes.
_FLOAT_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}


def item_width(dtype: str) -> int:
    """Return the bytes of an item of a stored tensor."""
    return _FLOAT_WIDTHS.get(dtype, 1)


@dataclass(frozen=True, kw_only=True)
class Native(MasterFormat):
    """The source's own numbers. bits: see bits_of"""

    codec: ClassVar[str] = "native"
    suffixes: ClassVar[tuple[str, ...]] = (CODED, LENGTHS)
    stated_block_size: ClassVar[int] = CHUNK_ITEMS
    description: ClassVar[str] = (
        "Nothing was rounded: weights are the numbers of the original, bit for bit. Their exponents, which repeat each "
        "other, are packed by an entropy coder; signs and mantissas are stored as they are."
    )
    papers: ClassVar[Sequence[str]] = (
        "Duda, *Asymmetric numeral systems*, [arXiv:1311.2540](https://arxiv.org/abs/1311.2540): the entropy coder.",
        "Zhang et al., *DFloat11*, [arXiv:2504.11651](https://arxiv.org/abs/2504.11651), and Hershcovitch et al., "
        "*ZipNN*, [arXiv:2411.05239](https://arxiv.org/abs/2411.05239): what exponents of weights take.",
    )

    distortion = 0.0
    orthogonal_error = True


def bits_of(byte_count: int, weights: int) -> float:
    """Return the bits per weight of one that takes so many bytes, to seven significant digits."""
    return exact_rate(rounded(8 * byte_count / weights))
