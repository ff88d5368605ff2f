"""A decoder of the codec `polar`, written from docs/format.md (sections 4 and 9) alone: numpy and the tables there.

It shares no code with the package, so it shows that the page is enough to read a master of version 3.
"""

import numpy as np
from independent_reader import SIGNS, hadamard

COSINES = {
    1: (0.98078525, 0.8314696, 0.55557024, 0.19509032),
    2: (0.95240796, 0.80567616, 0.5923562, 0.30482638),
    3: (0.91052276, 0.7810911, 0.62441707, 0.41345897),
    4: (0.8657176, 0.7610219, 0.64872617, 0.5005328),
}
# Level: its first byte, how many bytes it has, and the bits of a code.
PLACES = {1: (0, 32, 4), 2: (32, 8, 2), 3: (40, 4, 2), 4: (44, 2, 2)}
O = 0.08838834764831845  # noqa: E741 (the name in the page)


def unpack(packed: np.ndarray, level: int) -> np.ndarray:
    """The codes of a level, [blocks, 128 / 2**level], from [blocks, 46] bytes."""
    first, size, bits = PLACES[level]
    j = np.arange(128 >> level)
    return packed[:, first + j % size].astype(np.int64) >> (bits * (j // size)) & (2**bits - 1)


def vectors(level: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each code of a level, in float32."""
    cos = np.array(COSINES[level], dtype=np.float32)
    if level > 1:
        return cos, cos[::-1]
    cos = np.concatenate([cos, -cos[::-1], -cos, cos[::-1]])
    return cos, cos[(np.arange(16) + 12) % 16]


def decode_blocks(packed: np.ndarray, radii: np.ndarray, *, rotation: str, norm_exponent: int) -> np.ndarray:
    """The float32 values of all blocks, before they are rounded to the output's dtype.

    packed: [blocks, 46] u8
    radii: [blocks, 8] f16
    """
    if not np.isfinite(radii).all() or np.signbit(radii).any():
        raise ValueError("a radius is negative or not finite")
    u = np.ones(radii.shape, dtype=np.float32)
    for level in (4, 3, 2, 1):
        cos, sin = vectors(level)
        code = unpack(packed, level)
        u = np.stack([u * cos[code], u * sin[code]], axis=2).reshape(len(u), -1)
    x = u * np.repeat((radii.astype(np.float64) * O).astype(np.float32), 16, axis=1)
    with np.errstate(over="ignore", under="ignore"):
        y = (hadamard(x).astype(np.float64) * 2.0**norm_exponent).astype(np.float32)
    if rotation not in ("hadamard", "signed-hadamard"):
        raise ValueError(f"unknown rotation {rotation!r}")
    return np.where(SIGNS, -y, y) if rotation == "signed-hadamard" else y
