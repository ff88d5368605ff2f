"""The bytes of GGUF's blocks of scales and offsets, as LLVM vector code for numba.

Words of 32 bits of sixteen blocks lie in the sixteen lanes of a vector.
Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, block_q2_K, block_q4_K, block_q5_K, block_q4_1
and block_q5_1).
"""

from __future__ import annotations

from typing import Any

from pqweights.kernels.emit import I64, LANES, Lanes, loop, store
from pqweights.kernels.gguf_affine_parts import BEST_OFFSET_LEVEL, BEST_SCALE_LEVEL, AffineBlocks
from pqweights.kernels.gguf_halves import half_bits


def pack_words(blocks: AffineBlocks, d: Lanes, dmin: Lanes, words: Any) -> None:
    """Write the words of the blocks, i32 [words of a block, 16], of which the work holds the codes, i32.

    d, dmin: F16 numbers as f32.
    """
    if blocks.format.parts == 1:
        _pack_q4_1_or_q5_1(blocks, half_bits(d) | (half_bits(0.0 - dmin) << 16), words)  # not -0 for 0
        return
    halves = half_bits(d) | (half_bits(dmin) << 16)
    levels = [
        [blocks.field(name, I64(part)).whole() for part in range(blocks.format.parts)]
        for name in (BEST_SCALE_LEVEL, BEST_OFFSET_LEVEL)
    ]
    if blocks.format.last_level == 15:
        _pack_q2(blocks, halves, levels, words)
    else:
        _pack_q4_or_q5(blocks, halves, levels, words)


def _codes(blocks: AffineBlocks, j: Any) -> Lanes:
    """The codes of weight j, i32."""
    return blocks.weights(j).bits()


def _in_word(parts: list[Lanes]) -> Lanes:
    """Four bytes, the lowest first."""
    a, b, c, d = parts
    return (a | (b << 8)) | ((c << 16) | (d << 24))


def _pack_q2(blocks: AffineBlocks, halves: Lanes, levels: list[list[Lanes]], words: Any) -> None:
    """block_q2_K: a byte of integers per part; the codes of four times 32 weights in 32 bytes, twice; d and dmin."""
    b = blocks.builder
    pairs = [scale | (offset << 4) for scale, offset in zip(*levels, strict=True)]
    for i in range(4):
        store(_in_word(pairs[4 * i : 4 * i + 4]), words, I64(LANES * i))

    def pack(i: Any, nothing: tuple[()]) -> tuple[()]:
        first = b.add(b.mul(b.lshr(i, I64(3)), I64(128)), b.mul(b.and_(i, I64(7)), I64(4)))
        found = []
        for k in range(4):
            codes = [_codes(blocks, b.add(first, I64(32 * quarter + k))) for quarter in range(4)]
            found.append((codes[0] | (codes[1] << 2)) | ((codes[2] << 4) | (codes[3] << 6)))
        store(_in_word(found), words, b.mul(b.add(i, I64(4)), I64(LANES)))
        return nothing

    loop(b, I64(16), (), pack)
    store(halves, words, I64(LANES * 20))


def _pack_q4_or_q5(blocks: AffineBlocks, halves: Lanes, levels: list[list[Lanes]], words: Any) -> None:
    """block_q4_K and block_q5_K: d and dmin, integers of 6 bits, highest bits of codes (Q5_K), low halves of codes."""
    b, high = blocks.builder, blocks.format.last_code == 31
    store(halves, words, I64(0))
    scales, offsets = levels
    for place, own in ((1, scales), (2, offsets)):
        store(_in_word([own[i] | ((own[i + 4] >> 4) << 6) for i in range(4)]), words, I64(LANES * place))
    low = [(scales[i] & 15) | ((offsets[i] & 15) << 4) for i in range(4, 8)]
    store(_in_word(low), words, I64(LANES * 3))

    def pack_high(i: Any, nothing: tuple[()]) -> tuple[()]:
        found = []
        for k in range(4):
            codes = [_codes(blocks, b.add(b.mul(i, I64(4)), I64(32 * part + k))) >> 4 for part in range(8)]
            bits = [code << part for part, code in enumerate(codes)]
            found.append(((bits[0] | bits[1]) | (bits[2] | bits[3])) | ((bits[4] | bits[5]) | (bits[6] | bits[7])))
        store(_in_word(found), words, b.mul(b.add(i, I64(4)), I64(LANES)))
        return nothing

    def pack_low(i: Any, nothing: tuple[()]) -> tuple[()]:
        first = b.add(b.mul(b.lshr(i, I64(3)), I64(64)), b.mul(b.and_(i, I64(7)), I64(4)))
        found = []
        for k in range(4):
            left, right = (_codes(blocks, b.add(first, I64(32 * half + k))) & 15 for half in (0, 1))
            found.append(left | (right << 4))
        store(_in_word(found), words, b.mul(b.add(i, I64(12 if high else 4)), I64(LANES)))
        return nothing

    if high:
        loop(b, I64(8), (), pack_high)
    loop(b, I64(32), (), pack_low)


def _pack_q4_1_or_q5_1(blocks: AffineBlocks, halves: Lanes, words: Any) -> None:
    """block_q4_1 and block_q5_1: d and m, highest bits of codes (Q5_1), low halves of codes 16 weights apart."""
    b, high = blocks.builder, blocks.format.last_code == 31
    store(halves, words, I64(0))

    def add_high(j: Any, bits: Lanes) -> Lanes:
        return (bits >> 1) | ((_codes(blocks, j) >> 4) << 31)

    def pack_low(i: Any, nothing: tuple[()]) -> tuple[()]:
        found = []
        for k in range(4):
            left, right = (_codes(blocks, b.add(b.mul(i, I64(4)), I64(16 * half + k))) & 15 for half in (0, 1))
            found.append(left | (right << 4))
        store(_in_word(found), words, b.mul(b.add(i, I64(2 if high else 1)), I64(LANES)))
        return nothing

    if high:
        store(loop(b, I64(32), halves.of(0), add_high), words, I64(LANES))
    loop(b, I64(4), (), pack_low)
