"""Feed kernels with damaged input, in processes that end at once where they read or write beyond an array.

    PYTHONPATH=tests/support:tools python tests/fuzz_decoders.py [--seconds 600] [--seed N] [KERNEL...]

The calls that run_kernels.py makes are recorded. Again and again one is repeated with what may come from a file, or
from a model, changed at random; everything else stays, as the library makes it itself. All kernels are compiled with
the sanitizer of addresses, whose library g++ brings, and with traps for what C++ leaves undefined. Where kernels
promise the same bytes everywhere, they are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernel_runner
import numpy as np
import numpy.typing as npt
import run_kernels

from pqweights.kernels import native

# Kernel, each of them -> which of its arguments may hold anything. Decoders first: what they read comes from files.
UNTRUSTED: dict[str, tuple[int, ...]] = {
    "decode": (0, 1),
    "decode_trellis": (0,),
    "decode_columns": (0,),
    "decode_lossless": (0,),
    "restore_levels": (1, 2),
    "hadamard_scores": (1, 2, 3),
    "weighted_values": (1, 2, 4, 5),
    "polar_scores": (1, 2, 3, 4),
    "product": (1, 2, 4, 5),
    "product_f32": (1, 2, 4),
    "add_low_rank": (0, 1, 2),
    "encode": (0,),
    "encode_trellis": (0,),
    "encode_lossless": (0,),
    "load_columns": (1, 2, 3),
    "feed_back_columns": (1, 2),
    "search_columns": (1, 2, 3, 4),
    "pack_columns": (),  # it packs what a search found
    "encode_gguf_affine": (1, 2),
    "encode_gguf_symmetric": (1, 2),
    "encode_gguf_grids": (1, 2),
    "fit": (0,),
    "round": (0,),
    "fit_floats": (0, 1),
    "recover_blocks": (1,),
    "recover_groups": (0,),
    "nearest_levels": (1,),
    "prepare": (0, 1),
    "rotate": (0,),
    "prepare_f32": (0, 1),
    "fit_by_importance": (0, 1, 3, 4),
    "factor": (0,),
    "compensate": (0, 1, 2, 3, 4),
    "output_errors": (0, 1),
    "add_in_order": (0, 1, 2),
    "pack_bits": (0,),
    "pack_tiles": (0,),
}
# Of decoders of pieces that have lengths of their own, whose sum is checked before: the places of the lengths, and of
# where pieces begin if that is told, the least length, and whether the longest piece stays the longest.
LENGTHS: dict[str, tuple[int, int | None, int, bool]] = {
    "decode_columns": (2, 1, 7, True),
    "decode_lossless": (1, None, 1, False),
}
# Sums of floats in an order of each processor's own.
OWN_ORDER = tuple(run_kernels.BOUNDED)
MOST_BYTES = 1 << 21  # of the arguments of a call; larger ones take long to send


@dataclass(frozen=True)
class Call:
    """A recorded call; arrays are copies."""

    name: str
    arguments: list[Any]

    def with_arrays(self, arrays: dict[int, npt.NDArray[Any]]) -> list[Any]:
        """The arguments, some of them replaced; what is written begins as it was."""
        result = []
        for place, argument in enumerate(self.arguments):
            if isinstance(argument, native.Array):
                values = arrays.get(place, argument.owner).copy()
                argument = native.array(values, values.dtype, values.size, written=argument.written)
            result.append(argument)
        return result


def recorded(kernels: list[str]) -> list[Call]:
    """The calls that the digests of some kernels make, those of them that are not large."""
    calls, own = [], native.call

    def call(name: str, *arguments: Any, threads: int = 1) -> None:
        if name in kernels and sum(_bytes_of(argument) for argument in arguments) <= MOST_BYTES:
            calls.append(Call(name, [_copied(argument) for argument in arguments]))
        own(name, *arguments)

    native.call = call
    try:
        for kernel in kernels:
            run_kernels.digest(kernel)
    finally:
        native.call = own
    return calls


def _bytes_of(argument: Any) -> int:
    return kernel_runner.size_of(argument) if isinstance(argument, native.Array) else 0


def _copied(argument: Any) -> Any:
    """An argument whose memory is a copy of its own."""
    if not isinstance(argument, native.Array):
        return argument
    values = np.frombuffer(kernel_runner.content_of(argument), np.dtype(argument.dtype)).copy()
    return native.array(values, values.dtype, values.size, written=argument.written)


def damaged(values: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    """The same number of elements with some bytes changed, or all."""
    content = np.frombuffer(values.tobytes(), np.uint8).copy()
    if not content.size:
        return values
    kind = rng.integers(5)
    if kind == 0:
        content[:] = rng.integers(0, 256, content.size)
    elif kind == 1:
        content[:] = rng.choice([0, 0xFF, 0x7F, 0x80])
    elif kind == 2:
        start = rng.integers(content.size)
        content[start:] = np.roll(content, int(rng.integers(1, 9)))[start:]
    else:
        places = rng.integers(0, min(content.size, int(rng.choice([16, 64, 1 << 30]))), int(rng.integers(1, 9)))
        content[places] = rng.choice([rng.integers(0, 256, len(places)), np.full(len(places), 0xFF)])
    return content.view(values.dtype)


def moved_lengths(call: Call, rng: np.random.Generator) -> dict[int, npt.NDArray[Any]]:
    """Return other lengths of the pieces with the same sum, and where the pieces begin then."""
    place, begins, least, bounded = LENGTHS[call.name]
    lengths = call.arguments[place].owner.reshape(-1).copy()
    most = int(lengths.max()) if bounded else int(lengths.sum(dtype=np.int64))
    for _ in range(int(rng.integers(1, 5))):
        one, other = rng.integers(len(lengths), size=2)
        count = min(int(lengths[one]) - least, most - int(lengths[other]))
        if one != other and count > 0:
            moved = rng.choice([1, count, int(rng.integers(count + 1))])
            lengths[one] -= moved
            lengths[other] += moved
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return {place: lengths, **({} if begins is None else {begins: starts})}


def check(call: Call, runner: kernel_runner.Runner, rng: np.random.Generator) -> None:
    """Repeat a call with damaged input. Raises RunnerError, or AssertionError if the bytes differ."""
    places = [place for place in UNTRUSTED[call.name] if isinstance(call.arguments[place], native.Array)]
    chosen = [place for place in places if rng.random() < 0.7] or places
    arrays = {place: damaged(call.arguments[place].owner, rng) for place in chosen}
    if call.name in LENGTHS and rng.random() < 0.5:
        arrays |= moved_lengths(call, rng)
    here, there = call.with_arrays(arrays), call.with_arrays(arrays)
    runner.call(call.name, *there)
    native.call(call.name, *here)
    for place, (one, other) in enumerate(zip(here, there, strict=True)):
        if isinstance(one, native.Array) and one.written and call.name not in OWN_ORDER:
            assert bytes_of(one.owner) == bytes_of(other.owner), f"{call.name}: argument {place} differs"


def bytes_of(values: npt.NDArray[Any]) -> bytes:
    """The bytes of an array in which all NaNs are the same: which of two an addition keeps is the compiler's choice."""
    return (np.where(np.isnan(values), np.nan, values) if values.dtype.kind == "f" else values).tobytes()


def fuzz(command: list[str], kernels: list[str], seed: int, more: Callable[[int], bool]) -> Counter[str]:
    """How many damaged calls of each kernel passed. more: whether to go on after so many rounds.

    Raises RunnerError or AssertionError for the first that did not.
    """
    rng, passed, rounds = np.random.default_rng(seed), Counter[str](), 0
    calls = recorded(kernels)
    by_kernel = {kernel: [call for call in calls if call.name == kernel] for kernel in kernels}
    assert all(by_kernel.values()), f"no recorded call is small enough: {by_kernel}"
    with contextlib.closing(kernel_runner.Runner(command)) as runner:
        while more(rounds):
            rounds += 1
            for kernel in kernels:
                check(by_kernel[kernel][rng.integers(len(by_kernel[kernel]))], runner, rng)
                passed[kernel] += 1
    return passed


def main() -> None:
    """Fuzz as the options say, and print how many calls passed."""
    parser = argparse.ArgumentParser(description="Feed kernels with damaged input.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}; compiling takes a minute", flush=True)
    command = kernel_runner.sanitized_command()
    end = time.monotonic() + arguments.seconds
    kernels = arguments.kernels or list(UNTRUSTED)
    passed = fuzz(command, kernels, arguments.seed, lambda rounds: time.monotonic() < end)
    for kernel, count in sorted(passed.items()):
        print(f"{kernel}: {count} damaged calls, nothing found")


if __name__ == "__main__":
    main()
