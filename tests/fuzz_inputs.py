"""Feed what reads files with damaged ones: headers, configurations, tokenizers, templates, masters.

    PYTHONPATH=tests/support:tests:tools python tests/fuzz_inputs.py [--count 1000] [--seed N] [KIND...]

Each input is a sound one that was changed at random. It must be read, or refused by an error of ours, in little time
and memory: anything else is printed with the number of the mutation, which `--only NUMBER` repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from damaged_inputs import KINDS, SOUND

from pqweights.errors import PqweightsError

SECONDS = 10.0  # of the processor, for one input
MEMORY_BYTES = 1 << 30  # beyond what sound inputs and the libraries take


class TooSlowError(Exception):
    """An input took more than SECONDS."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raise TooSlowError for what takes longer than SECONDS of this process."""

    def stop(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def problem(kind: str, seed: int, number: int) -> str | None:
    """Return what is wrong with how a mutation was read; None if it was read or refused as it should be."""
    rng = random.Random(f"{kind} {seed} {number}")
    try:
        with in_time():
            KINDS[kind](rng)
    except PqweightsError as error:
        told = str(error)
        return None if "\n" not in told and len(told) < 1500 else f"a message of {len(told)} characters: {told[:200]!r}"
    except (Exception, MemoryError) as error:
        lines = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {str(error)[:160]} at {' < '.join(lines[-1:-5:-1])}"
    return None


def fuzz(kinds: Sequence[str], seed: int, count: int, tell: Callable[[str], None]) -> dict[str, int]:
    """Return how many of `count` mutations of each kind were not read as they should be. tell: called with each"""
    found = dict.fromkeys(kinds, 0)
    for kind in kinds:
        SOUND[kind]()
        for number in range(count):
            if wrong := problem(kind, seed, number):
                found[kind] += 1
                tell(f"{kind} --seed {seed} --only {number}: {wrong}")
    return found


def main() -> None:
    """Fuzz as the options say, print what was found, and exit with 1 if that is something."""
    parser = argparse.ArgumentParser(description="Feed what reads files with damaged ones.")
    parser.add_argument("--count", type=int, default=1000, help="mutations of each kind")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=int, help="the number of one mutation, with its traceback")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    arguments: Any = parser.parse_args()
    kinds = arguments.kinds or list(KINDS)
    if arguments.only is not None:
        for kind in kinds:
            KINDS[kind](random.Random(f"{kind} {arguments.seed} {arguments.only}"))
        return
    for kind in kinds:
        SOUND[kind]()
        problem(kind, arguments.seed, 0)  # which imports what reading needs
    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held[1]) + MEMORY_BYTES,) * 2)
    print(f"seed {arguments.seed}", flush=True)
    start = time.process_time()
    found = fuzz(kinds, arguments.seed, arguments.count, lambda line: print(line, flush=True))
    print(json.dumps({"mutations of each kind": arguments.count, "found": found}))
    print(f"{time.process_time() - start:.0f} s of the processor")
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
