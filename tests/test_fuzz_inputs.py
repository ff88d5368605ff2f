"""A short run of tests/fuzz_inputs.py, which `make fuzz` runs for longer, and that it finds what it looks for."""

from __future__ import annotations

import random
import time

import damaged_inputs
import fuzz_inputs
import pytest

from pqweights.errors import SourceError

COUNT, SEED = 60, 1


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_damaged_inputs_are_read_or_refused_in_a_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damaged_inputs, "STEP", [12])  # a few of all models
    found: list[str] = []
    fuzz_inputs.fuzz([kind], SEED, COUNT, found.append)
    assert not found


def test_tracebacks_long_messages_and_loops_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rng: random.Random) -> None:
        raise rng.choice([KeyError("x"), SourceError("two\nlines"), MemoryError()])

    def loop(rng: random.Random) -> None:
        while time.time():
            pass

    monkeypatch.setattr(fuzz_inputs, "SECONDS", 0.05)
    monkeypatch.setattr(fuzz_inputs, "KINDS", {"fail": fail, "loop": loop, "fine": lambda rng: None})
    assert all(fuzz_inputs.problem("fail", 0, number) for number in range(9))
    assert "TooSlowError" in str(fuzz_inputs.problem("loop", 0, 0))
    assert fuzz_inputs.problem("fine", 0, 0) is None


def test_mutations_are_those_of_their_seed_and_number() -> None:
    def mutation(seed: str) -> object:
        return damaged_inputs.damaged_json({"a": [1, {"b": 2}], "c": "d"}, random.Random(seed))

    made = [str(mutation(str(seed))) for seed in range(20)]
    assert made == [str(mutation(str(seed))) for seed in range(20)]
    assert len(set(made)) > 10
