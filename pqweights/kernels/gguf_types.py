"""The block formats of GGUF: how many weights a block has, how many bytes it takes, and how wide its codes are.

Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, the structures block_q1_0 to block_iq4_xs).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One block format.

    name: what GGUF calls it
    number: ggml's number of it
    bits: width of a code
    block_size: weights of a block
    block_bytes: bytes of a block, with its scales
    distortion: the relative squared error of Gaussian weights, which for NVFP4 depends on their size: here 0.02
    """

    name: str
    number: int
    bits: int
    block_size: int
    block_bytes: int
    distortion: float

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with scales."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, columns: int) -> int:
        """Return the size of a row in bytes; the block size must divide its length."""
        assert columns % self.block_size == 0
        return columns // self.block_size * self.block_bytes


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType(name="Q8_0", number=8, bits=8, block_size=32, block_bytes=34, distortion=2.1e-5),
        BlockType(name="Q6_K", number=14, bits=6, block_size=256, block_bytes=210, distortion=2.74e-4),
        BlockType(name="Q5_K", number=13, bits=5, block_size=256, block_bytes=176, distortion=1.17e-3),
        BlockType(name="Q5_1", number=7, bits=5, block_size=32, block_bytes=24, distortion=1.11e-3),
        BlockType(name="Q5_0", number=6, bits=5, block_size=32, block_bytes=22, distortion=1.6e-3),
        BlockType(name="Q4_1", number=3, bits=4, block_size=32, block_bytes=20, distortion=4.75e-3),
        BlockType(name="Q4_K", number=12, bits=4, block_size=256, block_bytes=144, distortion=4.83e-3),
        BlockType(name="Q4_0", number=2, bits=4, block_size=32, block_bytes=18, distortion=6.54e-3),
        BlockType(name="IQ4_NL", number=20, bits=4, block_size=32, block_bytes=18, distortion=5.41e-3),
        BlockType(name="NVFP4", number=40, bits=4, block_size=64, block_bytes=36, distortion=7.9e-3),
        BlockType(name="MXFP4", number=39, bits=4, block_size=32, block_bytes=17, distortion=1.24e-2),
        BlockType(name="IQ4_XS", number=23, bits=4, block_size=256, block_bytes=136, distortion=5.47e-3),
        BlockType(name="Q3_K", number=11, bits=3, block_size=256, block_bytes=110, distortion=2.06e-2),
        BlockType(name="IQ3_S", number=21, bits=3, block_size=256, block_bytes=110, distortion=1.66e-2),
        BlockType(name="IQ3_XXS", number=18, bits=3, block_size=256, block_bytes=98, distortion=3.12e-2),
        BlockType(name="Q2_K", number=10, bits=2, block_size=256, block_bytes=84, distortion=6.69e-2),
        BlockType(name="IQ2_S", number=22, bits=2, block_size=256, block_bytes=82, distortion=5.67e-2),
        BlockType(name="IQ2_XS", number=17, bits=2, block_size=256, block_bytes=74, distortion=8.1e-2),
        BlockType(name="Q2_0", number=42, bits=2, block_size=64, block_bytes=18, distortion=0.123),
        BlockType(name="TQ2_0", number=35, bits=2, block_size=256, block_bytes=66, distortion=0.188),
        BlockType(name="IQ2_XXS", number=16, bits=2, block_size=256, block_bytes=66, distortion=0.107),
        BlockType(name="IQ1_M", number=29, bits=1, block_size=256, block_bytes=56, distortion=0.17),
        BlockType(name="TQ1_0", number=34, bits=1, block_size=256, block_bytes=54, distortion=0.188),
        BlockType(name="IQ1_S", number=19, bits=1, block_size=256, block_bytes=50, distortion=0.197),
        BlockType(name="Q1_0", number=41, bits=1, block_size=128, block_bytes=18, distortion=0.36),
    )
}
