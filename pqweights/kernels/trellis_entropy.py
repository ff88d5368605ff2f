"""The entropy coder of the trellis codec for sixteen sequences at once, as LLVM vector code for numba.

It is range asymmetric numeral systems (Duda, arXiv:1311.2540) with sixteen states of 32 bits, interleaved (Giesen,
arXiv:1402.3392): in each step every state that became small takes a word of 16 bits from one common stream, in the
order of the lanes. A state is at least 2**16 between steps. The encoder makes the steps in reverse, and writes the
stream from its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pqweights.kernels.emit import (
    DOUBLES,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    Lanes,
    array_pointers,
    constant,
    load,
    loop,
    shuffled,
    splat,
    store,
)
from pqweights.kernels.trellis_search import floats_of
from pqweights.kernels.vector import BLOCK, HAS_COMPRESS

_WORDS = ir.VectorType(I16, LANES)
_TRUTHS = ir.VectorType(ir.IntType(1), LANES)
# The low bits of a state that choose an entry of a table, for numbers and for classes.
TABLE_BITS, CLASS_BITS = 12, 8


def _unsigned(numbers: Lanes) -> Lanes:
    """Integers without a sign as float64."""
    return Lanes(numbers.builder, numbers.builder.uitofp(numbers.value, DOUBLES))


def _quotient(states: Lanes, frequencies: Lanes) -> Lanes:
    """states // frequencies, without signs.

    Rounding to float64 cannot carry a quotient of integers below 2**32 over the next integer.
    """
    builder = states.builder
    return Lanes(builder, builder.fptoui((_unsigned(states) / _unsigned(frequencies)).value, INTS))


def _gathered(builder: Any, table: Any, index: Lanes) -> Lanes:
    """table[index] of u32, for a vector of indices; loads lane by lane, which cost less than LLVM's gather."""
    result = ir.Constant(INTS, ir.Undefined)
    for lane in range(LANES):
        at = builder.gep(table, [builder.extract_element(index.value, I32(lane))])
        result = builder.insert_element(result, builder.load(at), I32(lane))
    return Lanes(builder, result)


# --- encoding ---


def _put(builder: Any, stream: Any, position: Any, states: Lanes, full: Lanes) -> Any:
    """Write the low words of the states that are full before stream[position], and return the place of the first."""
    words = builder.trunc(states.value, _WORDS)
    if HAS_COMPRESS:
        # Packed at the end of a vector: what is before them is overwritten by the next.
        order = list(reversed(range(LANES)))
        truths = shuffled(full, full, order)
        backwards = shuffled(Lanes(builder, words), Lanes(builder, words), order)
        packed = _moved(builder, "compress", backwards.value, truths.value)
        store(shuffled(packed, packed, order), stream, builder.sub(position, I64(LANES)), align=2)
        return builder.sub(position, _count(builder, full))
    for lane in reversed(range(LANES)):  # a word that does not count is overwritten by the next
        at = builder.gep(stream, [builder.sub(position, I64(1))])
        builder.store(builder.extract_element(words, I32(lane)), at).align = 2
        position = builder.sub(position, builder.zext(builder.extract_element(full.value, I32(lane)), I64))
    return position


def _moved(builder: Any, how: str, words: Any, truths: Any) -> Lanes:
    """The words of the lanes where a truth value holds, packed into the first lanes ("compress"); or the inverse."""
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _TRUTHS])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.mask.{how}.v16i16")
    return Lanes(builder, builder.call(function, [words, ir.Constant(_WORDS, None), truths]))


def _count(builder: Any, truths: Lanes) -> Any:
    """How many of the truth values are true, as i64."""
    mask = builder.bitcast(truths.value, I16)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I16, [I16]), "llvm.ctpop.i16")
    return builder.zext(builder.call(function, [mask]), I64)


def _encoded(
    builder: Any, stream: Any, position: Any, states: Lanes, *, entries: Lanes, bits: int
) -> tuple[Any, Lanes]:
    """One step of the encoder: the entries are those of trellis_tables.EncodeTable, of tables with 2**bits."""
    start, frequency = entries & 4095, ((entries >> 12) & 4095) + 1
    low_bits, low = (entries >> 24) & 7, entries >> 27
    room = low_bits.of(32 - bits) - low_bits
    full = Lanes(builder, builder.icmp_unsigned(">=", builder.lshr(states.value, room.value), frequency.value))
    position = _put(builder, stream, position, states, full)
    states = full.choose(states >> 16, states)
    states = Lanes(builder, builder.shl(states.value, low_bits.value)) | low
    quotient = _quotient(states, frequency)
    return position, (quotient << bits) + (states - quotient * frequency) + start


@intrinsic
def encode_numbers(
    typingctx: Any, numbers: Any, tile: Any, zeros: Any, table: Any, states: Any, stream: Any, position: Any
) -> Any:
    """Encode the numbers of a tile, i16 [tiles, 128, 16], from the last to the first; return the stream's new start.

    zeros: i32 [2, 16]: where in the table k = 0 of each lane is, for even and odd numbers
    table: u32, trellis_tables.EncodeTable.entries
    states: in and out: u32 [16]
    stream: u16, which grows downwards from `position` on
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, zeros, table, states, stream = array_pointers(context, builder, signature, args)
        even, odd = (load(builder, zeros, I64(place), INTS, align=64) for place in (0, LANES))
        last = builder.add(builder.mul(args[1], I64(BLOCK)), I64(BLOCK - 1))

        def step(i: Any, carried: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            at = builder.mul(builder.sub(last, i), I64(LANES))
            n = Lanes(builder, builder.sext(load(builder, numbers, at, _WORDS, align=32).value, INTS))
            k = Lanes(builder, builder.ashr(n.value, n.of(1).value))
            entries = _gathered(builder, table, k + (n & 1).differs(0).choose(odd, even))
            position, following = _encoded(
                builder, stream, carried[0].value, carried[1], entries=entries, bits=TABLE_BITS
            )
            return Lanes(builder, position), following

        before = (Lanes(builder, args[6]), load(builder, states, I64(0), INTS, align=64))
        position, after = loop(builder, I64(BLOCK), before, step)
        store(after, states, I64(0), align=64)
        return position.value

    return types.int64(numbers, tile, zeros, table, states, stream, position), codegen


@intrinsic
def encode_classes(typingctx: Any, entries: Any, states: Any, stream: Any, position: Any) -> Any:
    """Encode the classes of sixteen blocks; see encode_numbers.

    entries: u32 [16]: start | (frequency - 1) << 12 of each class, of 256; for a lane without a block, 255 << 12
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        entries, states, stream = array_pointers(context, builder, signature, args)
        position, after = _encoded(
            builder,
            stream,
            args[3],
            load(builder, states, I64(0), INTS, align=64),
            entries=load(builder, entries, I64(0), INTS, align=64),
            bits=CLASS_BITS,
        )
        store(after, states, I64(0), align=64)
        return position

    return types.int64(entries, states, stream, position), codegen


# --- decoding ---


def _refilled(builder: Any, stream: Any, position: Any, states: Lanes) -> tuple[Any, Lanes]:
    """Give each state below 2**16 a word of the stream, in the order of the lanes."""
    empty = (states >> 16).equals(0)
    at = builder.gep(stream, [position])
    if HAS_COMPRESS:
        kind = ir.FunctionType(_WORDS, [at.type, _TRUTHS, _WORDS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.expandload.v16i16")
        words = builder.call(function, [at, empty.value, ir.Constant(_WORDS, None)])
        wide = Lanes(builder, builder.zext(words, INTS))
    else:
        mask = builder.zext(builder.bitcast(empty.value, I16), I32)
        below = splat(builder, mask) & constant(builder, INTS, [(1 << lane) - 1 for lane in range(LANES)])
        kind = ir.FunctionType(INTS, [INTS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.ctpop.v16i32")
        places = builder.call(function, [below.value])
        result = ir.Constant(_WORDS, ir.Undefined)
        for lane in range(LANES):  # lanes that need no word read one all the same, at most sixteen ahead
            word = builder.load(builder.gep(at, [builder.extract_element(places, I32(lane))]))
            word.align = 2
            result = builder.insert_element(result, word, I32(lane))
        wide = Lanes(builder, builder.zext(result, INTS))
    position = builder.add(position, _count(builder, empty))
    return position, empty.choose((states << 16) | wide, states)


@intrinsic
def decode_classes(typingctx: Any, table: Any, present: Any, states: Any, stream: Any, position: Any, out: Any) -> Any:
    """Decode the classes of sixteen blocks; return the place of the next word.

    table: u32 [256]: for each value of a state's lowest byte its distance from the first of the class; from bit 12 on
        the frequency less 1; from bit 24 on the class
    present: i32 [16]: 0 for a lane without a block, whose class is 0
    states: in and out: u32 [16]
    stream: u16; may be read up to 16 words beyond the place that is returned
    out: i32 [16], the classes
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table, present, pointer, stream, out = array_pointers(context, builder, signature, args)
        states = load(builder, pointer, I64(0), INTS, align=64)
        there = load(builder, present, I64(0), INTS, align=64).differs(0)
        entries = _gathered(builder, table, states & ((1 << CLASS_BITS) - 1))
        following = (((entries >> 12) & 4095) + 1) * (states >> CLASS_BITS) + (entries & 4095)
        store(there.choose(entries >> 24, 0), out, I64(0), align=64)
        position, following = _refilled(builder, stream, args[4], there.choose(following, states))
        store(following, pointer, I64(0), align=64)
        return position

    return types.int64(table, present, states, stream, position, out), codegen


@intrinsic
def decode_numbers(
    typingctx: Any,
    table: Any,
    lanes: Any,
    trellis: Any,
    scales: Any,
    states: Any,
    paths: Any,
    streams: Any,
    second: Any,
    positions: Any,
    work: Any,
) -> Any:
    """Decode the numbers of a tile, times a scale, of two superblocks, whose steps need not wait for each other.

    table: u32, trellis_tables.decode_table
    lanes: i32 [2, 3, 16]: where the tables of each lane begin; its core bits; its tail bits
    trellis: i32 [2, 2]: what the parity of n and bit 1 of n flip in the next state of the trellis
    scales: f32 [2, 16]
    states, paths: in and out: u32 [2, 16], the states of the coder, and those of the trellis
    streams: u16, of which up to 129 * 16 words are read from each position; see decode_classes
    second: where the stream of the second superblock begins
    positions: in and out: i64 [2], the place of the next word in each stream
    work: out: f32 [2, 128, 16]
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = array_pointers(context, builder, signature, args)
        table, lanes, trellis, scales, states, paths, streams, positions, work = pointers
        decoders = [
            _Decoder(
                builder=builder,
                table=table,
                tables=[load(builder, lanes, I64((3 * k + i) * LANES), INTS, align=64) for i in range(3)],
                flips=[splat(builder, builder.load(builder.gep(trellis, [I64(2 * k + i)]))) for i in range(2)],
                scale=load(builder, scales, I64(k * LANES), align=64),
                stream=builder.gep(streams, [builder.mul(args[7], I64(k))]),
                work=builder.gep(work, [I64(k * BLOCK * LANES)]),
            )
            for k in range(2)
        ]

        def step(t: Any, carried: tuple[_Place, _Place]) -> tuple[_Place, _Place]:
            first, other = (decoder.step(t, place) for decoder, place in zip(decoders, carried, strict=True))
            return first, other

        places = [builder.gep(positions, [I64(k)]) for k in range(2)]
        before = [
            _Place(
                Lanes(builder, builder.load(places[k])),
                *(load(builder, pointer, I64(k * LANES), INTS, align=64) for pointer in (states, paths)),
            )
            for k in range(2)
        ]
        for k, after in enumerate(loop(builder, I64(BLOCK), (before[0], before[1]), step)):
            builder.store(after.position.value, places[k])
            store(after.state, states, I64(k * LANES), align=64)
            store(after.path, paths, I64(k * LANES), align=64)
        return context.get_dummy_value()

    kinds = (table, lanes, trellis, scales, states, paths, streams, second, positions, work)
    return types.void(*kinds), codegen


class _Place(NamedTuple):
    """Where the decoder of a superblock is: the next word of its stream (i64), and its states (u32)."""

    position: Lanes
    state: Lanes
    path: Lanes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Decoder:
    """One superblock of a pair; see decode_numbers."""

    builder: Any
    table: Any
    tables: list[Lanes]
    flips: list[Lanes]
    scale: Lanes
    stream: Any
    work: Any

    def step(self, t: Any, place: _Place) -> _Place:
        """Decode number t of sixteen blocks."""
        builder, state = self.builder, place.state
        (first, core, tail), (by_parity, by_bit) = self.tables, self.flips
        parity = place.path & 1
        entries = _gathered(builder, self.table, first + (parity << TABLE_BITS) + (state & ((1 << TABLE_BITS) - 1)))
        state = (((entries >> 12) & 4095) + 1) * (state >> TABLE_BITS) + (entries & 4095)
        low_bits = (entries & (1 << 24)).differs(0).choose(tail, core)
        low = state & (Lanes(builder, builder.shl(state.of(1).value, low_bits.value)) - 1)
        state = Lanes(builder, builder.lshr(state.value, low_bits.value))
        base = Lanes(builder, builder.ashr(entries.value, entries.of(25).value))
        k = Lanes(builder, builder.shl(base.value, core.value)) + low
        number = (k << 1) | parity
        store(floats_of(number) * self.scale, self.work, builder.mul(t, I64(LANES)), align=64)
        flips = parity.differs(0).choose(by_parity, 0) ^ (k & 1).differs(0).choose(by_bit, 0)
        position, state = _refilled(builder, self.stream, place.position.value, state)
        return _Place(Lanes(builder, position), state, (place.path >> 1) ^ flips)
