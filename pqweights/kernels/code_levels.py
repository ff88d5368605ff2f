"""The packed codes of a block to levels of 16 bits, 32 in a vector, and their products with integers, as LLVM code.

This is the inner step of cpu_products.py. What a machine is good at decides how it is done. With AVX-512, the bytes of
a row are taken for words of 16 bits, in which a shift brings every second code to the lower end, and a permutation of
words looks it up. Elsewhere codes are unfolded to bytes; the lower and the higher bytes of the levels are looked up
apart, by shuffles of bytes (AVX2, NEON) or loads, and then interleaved. The order of the 128 levels differs: `ORDER`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config as numba_config

from pqweights.kernels.emit import I8, I16, I32, I64, INTS, Lanes, call, constant, load, shuffled
from pqweights.kernels.packing import HALF, with_field

BLOCK = 128
WIDE = 32  # words of 16 bits in a vector
WORDS = ir.VectorType(I16, WIDE)
_TARGET = (getattr(numba_config, "CPU_NAME", None), getattr(numba_config, "CPU_FEATURES", None))
_FEATURES = llvm.get_host_cpu_features() if _TARGET == (None, None) and bool(numba_config.ENABLE_AVX) else {}
_ARM = platform.machine() in ("arm64", "aarch64")


def has(*features: str) -> bool:
    """Whether kernels are compiled for a processor with all these features."""
    return all(bool(_FEATURES.get(feature, False)) for feature in features)


PERMUTES_WORDS = has("avx512f", "avx512bw")
_DOT_PRODUCTS = PERMUTES_WORDS and has("avx512vnni")
_SHUFFLES_BYTES = has("avx2") or _ARM
CONVERTS_HALVES = has("f16c") or _ARM
# Tables of more entries than this are read entry by entry where bytes are shuffled 16 at a time.
_MOST_SHUFFLED = 128 if _ARM else 64


def _order() -> list[int]:
    """Return which code of a block each of the 4 * 32 levels of `block_levels` stands for."""
    if PERMUTES_WORDS:  # even codes of both halves, then odd ones
        return [half + 2 * k + odd for odd in (0, 1) for half in (0, HALF) for k in range(WIDE)]
    # Interleaving works on 16 bytes at a time: the first eight of each, then the last.
    runs = [half + 16 * run + 8 * last for half in (0, HALF) for last in (0, 1) for run in range(4)]
    return [run + k for run in runs for k in range(8)]


ORDER = _order()


def block_levels(table: LevelTable, row: Any, at: Any, bits: int) -> list[Lanes]:
    """Return the levels of a block, four vectors of 32 i16, in the order of ORDER. row[at]: its first byte."""
    if PERMUTES_WORDS:
        return [table.permuted(index) for index in _index_words(table.builder, row, at, bits)]
    return [words for codes in _index_bytes(table.builder, row, at, bits) for words in table.shuffled(codes)]


def _index_words(builder: Any, row: Any, at: Any, bits: int) -> list[Lanes]:
    """Return four vectors of words of which the lowest `bits` bits are codes; what is above them does not matter."""
    if bits == 8:
        low, high = (load(builder, row, builder.add(at, I64(start)), WORDS, 1) for start in (0, HALF))
        return [low, high, low >> 8, high >> 8]
    found: list[Lanes] | None = None
    place = 0  # of the field's lowest bit in a code
    for width in (4, 2, 1):
        if not bits & width:
            continue
        # The four fields of a word, four bits apart, belong to the four vectors.
        field, four = _field_words(builder, row, at, width), []
        at = builder.add(at, I64(16 * width))
        for k in range(4):
            shift = place - 4 * k
            moved = field << shift if shift > 0 else field >> -shift if shift else field
            if found is not None:
                lower = (1 << place) - 1
                moved = (found[k] & lower) | (moved & (0xFFFF ^ lower))
            four.append(moved)
        found, place = four, place + width
    assert found is not None
    return found


def _field_words(builder: Any, row: Any, at: Any, width: int) -> Lanes:
    """Return 32 words that have a field of codes 2i, 64 + 2i, 2i + 1 and 65 + 2i in lane i at the bits 0, 4, 8, 12."""
    words = load(builder, row, at, ir.VectorType(I16, 8 * width), 1)
    if width == 4:
        return words
    repeated = shuffled(words, words, [k % (8 * width) for k in range(WIDE)])
    shifts = constant(builder, WORDS, [width * (k // (8 * width)) for k in range(WIDE)])
    return Lanes(builder, builder.lshr(repeated.value, shifts.value))


def _index_bytes(builder: Any, row: Any, at: Any, bits: int) -> list[Lanes]:
    """Return the codes of both halves of a block, 64 bytes each."""
    halves, place = None, 0
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        packed = load(builder, row, at, ir.VectorType(I8, 16 * width))
        at = builder.add(at, I64(16 * width))
        if width == 8:
            halves = [shuffled(packed, packed, range(start, start + HALF)) for start in (0, HALF)]
        elif width == 4:
            halves = [packed & 15, packed >> 4]
        else:
            if halves is None:
                halves = [constant(builder, ir.VectorType(I8, HALF), [0] * HALF)] * 2
            halves = with_field(halves, packed, width, I8(1 << place))
        place += width
    assert halves is not None
    return halves


class LevelTable:
    """A table of levels (i16, 32 or more, a power of two) in memory, held in registers where that helps."""

    def __init__(self, builder: Any, pointer: Any, bits: int) -> None:
        self.builder, self._pointer, self._entries = builder, pointer, max(32, 1 << bits)
        places = range(0, self._entries, WIDE)
        if PERMUTES_WORDS:
            self._registers = [load(builder, pointer, I64(place), WORDS, 2) for place in places]
        elif _SHUFFLES_BYTES and self._entries <= _MOST_SHUFFLED:
            self._planes = self._byte_planes(1 << bits)

    def permuted(self, index: Lanes) -> Lanes:
        """Return table[index modulo entries] for 32 words."""
        builder, registers = self.builder, self._registers
        if len(registers) == 1:
            return call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, registers[0], index)
        pairs = zip(registers[::2], registers[1::2], strict=True)
        parts = [call(builder, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, a, index, b) for a, b in pairs]
        return _chosen(parts, index, 2 * WIDE)

    def shuffled(self, codes: Lanes) -> tuple[Lanes, Lanes]:
        """Return table[code] for 64 bytes: of the first eight of each 16, and of the last eight."""
        if not _SHUFFLES_BYTES or self._entries > _MOST_SHUFFLED:
            return self._loaded(codes)
        low, high = (_looked_up(plane, codes) for plane in self._planes)
        first = [16 * run + k for run in range(4) for k in range(8)]
        result = []
        for start in (0, 8):
            order = [place for k in first for place in (k + start, HALF + k + start)]
            both = shuffled(low, high, order)
            result.append(Lanes(self.builder, self.builder.bitcast(both.value, WORDS)))
        return result[0], result[1]

    def _byte_planes(self, entries: int) -> list[list[Lanes]]:
        """Return the lower and the higher bytes of the levels, 16 in a vector."""
        planes: list[list[Lanes]] = [[], []]
        for place in range(0, max(16, entries), 16):
            words = load(self.builder, self._pointer, I64(place), ir.VectorType(I16, 16), 2)
            both = Lanes(self.builder, self.builder.bitcast(words.value, ir.VectorType(I8, 32)))
            for odd, plane in enumerate(planes):
                plane.append(shuffled(both, both, range(odd, 32, 2)))
        return planes

    def _loaded(self, codes: Lanes) -> tuple[Lanes, Lanes]:
        """Return what `shuffled` does, entry by entry."""
        builder, result = self.builder, []
        for start in (0, 8):
            words = ir.Constant(WORDS, ir.Undefined)
            for lane in range(WIDE):
                code = builder.extract_element(codes.value, I32(16 * (lane // 8) + start + lane % 8))
                level = builder.load(builder.gep(self._pointer, [builder.zext(code, I64)]))
                words = builder.insert_element(words, level, I32(lane))
            result.append(Lanes(builder, words))
        return result[0], result[1]


def _looked_up(plane: Sequence[Lanes], codes: Lanes) -> Lanes:
    """Return plane[code] for 64 bytes; a plane is a table of bytes, 16 in a vector."""
    builder = codes.builder
    if _ARM:
        kind, name = ir.VectorType(I8, 16), "llvm.aarch64.neon.tbl{}.v16i8"
        quarters = [shuffled(codes, codes, range(start, start + 16)) for start in range(0, HALF, 16)]
        found = []
        for quarter in quarters:
            parts = [
                call(builder, name.format(len(four)), kind, *four, quarter - 16 * start)
                for start in range(0, len(plane), 4)
                for four in [plane[start : start + 4]]
            ]  # codes beyond a table give 0
            whole = parts[0]
            for part in parts[1:]:
                whole = whole | part
            found.append(whole)
        pairs = [shuffled(a, b, range(32)) for a, b in (found[:2], found[2:])]
        return shuffled(pairs[0], pairs[1], range(HALF))
    kind, found = ir.VectorType(I8, 32), []
    for start in (0, 32):
        half = shuffled(codes, codes, range(start, start + 32))
        twice = [shuffled(table, table, [*range(16), *range(16)]) for table in plane]
        parts = [call(builder, "llvm.x86.avx2.pshuf.b", kind, table, half) for table in twice]
        found.append(_chosen(parts, half, 16))
    return shuffled(found[0], found[1], range(HALF))


def _chosen(parts: list[Lanes], index: Lanes, bit: int) -> Lanes:
    """Return for each lane the part whose number is that of the index divided by `bit`."""
    while len(parts) > 1:
        upper = (index & bit).differs(0)
        parts = [upper.choose(b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


def add_products(total: Lanes, a: Lanes, b: Lanes) -> Lanes:
    """Return sixteen i32, to which the products of 32 i16 were added, those of two lanes to each."""
    builder = total.builder
    if _DOT_PRODUCTS:
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", INTS, total, a, b)
    if PERMUTES_WORDS:
        return total + call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, a, b)
    if has("avx2"):
        kind, sums = ir.VectorType(I32, 8), []
        for start in (0, 16):
            halves = [shuffled(each, each, range(start, start + 16)) for each in (a, b)]
            sums.append(call(builder, "llvm.x86.avx2.pmadd.wd", kind, *halves))
        return total + shuffled(sums[0], sums[1], range(16))
    kind = ir.VectorType(I32, WIDE)
    products = Lanes(builder, builder.mul(builder.sext(a.value, kind), builder.sext(b.value, kind)))
    halves = [shuffled(products, products, range(start, start + 16)) for start in (0, 16)]
    return total + halves[0] + halves[1]
