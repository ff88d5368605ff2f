"""What plan --memory prints: which exports fit, and the commands that make them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from pqweights.common.units import counted, size_text

from . import options, output, tables

if TYPE_CHECKING:
    from pqweights.exports.memory_advice import MemoryAdvice, Proposal, Stored

TITLES = ["runtime", "target", "format", "#bits", "#weights", "#context", "#overhead", "#needs", "#rise"]
# What may be left out on a narrow terminal.
LEAST_NEEDED = ["#overhead", "#context", "#weights", "#bits"]
# How many proposals for a runtime are shown if all runtimes are.
MOST_SHOWN = 3
# Options of `plan` that are not for the command that makes a master.
NOT_OF_QUANTIZE = {"source", "token", "threads", "tell", "memory", "context", "runtime"}


def show(advice: MemoryAdvice, asked: Mapping[str, Any]) -> None:
    """Print which exports of a model fit. asked: what `plan` was given"""
    where = f"{size_text(advice.memory_bytes)} of memory, {counted(advice.context, 'token')} of context"
    shown = advice.fitting if "runtime" in asked else [*_first(advice.best)]
    if shown:
        measured = asked.get("sensitivity", "heuristic") != "heuristic"
        by = "as it was measured" if measured else "by a rule of thumb that only compares formats of a model"
        output.show(f"{where}; best expected quality first (least rise of the loss, {by})")
        if any("export" in proposal.stored.steps for proposal in shown):
            output.show("first, once for all exports:")
            output.write_text(f"    {_quantize(asked)}\n")
        heading, *rows = tables.table(TITLES, [_cells(proposal) for proposal in shown], drop=LEAST_NEEDED)
        output.show("", heading)
        for row, proposal in zip_longest(rows, shown):
            output.show(row)
            if proposal is not None:  # below are the columns that are left out
                output.write_text(f"    {_command(proposal.stored, asked)}\n")
        if left := len(advice.fitting) - len(shown):
            output.show("", f"{left} more fit: --runtime lists those of one, --json all")
    elif advice.proposals:
        least = min(advice.proposals, key=lambda proposal: proposal.memory_bytes)
        smallest = f"{least.stored.target} {least.stored.format} for {least.runtime}"
        output.show(f"nothing fits: {where}; the smallest is {smallest}, which needs {size_text(least.memory_bytes)}")
    output.show(*(f"not counted or proposed: {output.with_flags(note)}" for note in advice.notes))


def _first(proposals: Sequence[Proposal]) -> Iterator[Proposal]:
    """Yield the first proposals of each runtime."""
    seen: Counter[str] = Counter()
    for proposal in proposals:
        seen[proposal.runtime] += 1
        if seen[proposal.runtime] <= MOST_SHOWN:
            yield proposal


def _cells(proposal: Proposal) -> list[str]:
    stored = proposal.stored
    sizes = [size_text(n) for n in (proposal.context_bytes, proposal.overhead_bytes, proposal.memory_bytes)]
    weights = f"{'' if stored.is_exact else 'about '}{size_text(stored.bytes)}"
    bits, rise = f"{stored.bits_per_parameter:.2f}", f"{stored.expected_rise:.5f}"
    return [proposal.runtime, stored.target, stored.format, bits, weights, *sizes, rise]


def _command(stored: Stored, asked: Mapping[str, Any]) -> str:
    """Return the command that makes what is proposed."""
    if "export" not in stored.steps:
        return _quantize(asked) if stored.steps else f"nothing to make: {shlex.quote(asked['source'])}"
    out = re.sub(r"[^a-z0-9_]+", "-", f"{stored.target} {stored.format}")
    words = options.spelled(stored.options)
    # The option names neither a revision nor what reads pickles; then the error of the master adds to that of rounding.
    if stored.takes_original and not asked.keys() & {"revision", "allow_pickle"}:
        words += ["--source", shlex.quote(asked["source"])]
    return " ".join(["pqweights export master/", f"{out}/", "--target", stored.target, *words])


def _quantize(asked: Mapping[str, Any]) -> str:
    """Return the command that makes the master."""
    words = options.spelled({name: value for name, value in asked.items() if name not in NOT_OF_QUANTIZE})
    return " ".join(["pqweights quantize", shlex.quote(asked["source"]), "master/", *words])
