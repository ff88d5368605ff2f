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
    from pqweights.targets.memory import MemoryAdvice, Proposal

TITLES = ["runtime", "target", "format", "#bits", "#weights", "#context", "#needs"]
# What may be left out on a narrow terminal.
LEAST_NEEDED = ["#context", "#weights", "#bits"]
# How many proposals for a runtime are shown if all runtimes are.
MOST_SHOWN = 3
# Options of `plan` that are not for the command that makes a master.
NOT_OF_QUANTIZE = {"source", "token", "threads", "tell", "memory", "context", "runtime"}


def show(advice: MemoryAdvice, given: Mapping[str, Any]) -> None:
    """Print which exports of a model fit. asked: what `plan` was given"""
    where = f"{size_text(advice.memory_bytes)} of memory, {counted(advice.context, 'token')} of context"
    shown = advice.fitting if "runtime" in given else [*_first(advice.fitting)]
    if shown:
        output.show(f"{where}; the most bits first, sizes estimated")
        heading, *rows = tables.table(TITLES, [_cells(proposal) for proposal in shown], drop=LEAST_NEEDED)
        output.show("", heading)
        for row, proposal in zip_longest(rows, shown):
            output.show(row)
            if proposal is not None:  # below are the columns that are left out
                output.write_text(f"    {_command(proposal, given)}\n")
        if left := len(advice.fitting) - len(shown):
            output.show("", f"{left} more fit: --runtime lists those of one, --json all")
    elif advice.proposals:
        least = min(advice.proposals, key=lambda proposal: proposal.memory_bytes)
        smallest = f"{least.target} {least.format} for {least.runtime}"
        output.show(f"nothing fits: {where}; the smallest is {smallest}, which needs {size_text(least.memory_bytes)}")
    output.show(*(f"not proposed: {output.with_flags(note)}" for note in advice.notes))


def _first(proposals: Sequence[Proposal]) -> Iterator[Proposal]:
    """Yield the first proposals of each runtime."""
    seen: Counter[str] = Counter()
    for proposal in proposals:
        seen[proposal.runtime] += 1
        if seen[proposal.runtime] <= MOST_SHOWN:
            yield proposal


def _cells(proposal: Proposal) -> list[str]:
    sizes = [size_text(n) for n in (proposal.weight_bytes, proposal.context_bytes, proposal.memory_bytes)]
    return [proposal.runtime, proposal.target, proposal.format, f"{proposal.bits:.2f}", *sizes]


def _is_exported(proposal: Proposal) -> bool:
    """Whether it needs an export, and is not the model as it is or its master."""
    from pqweights.targets import EXPORTS

    return proposal.target in EXPORTS


def _command(proposal: Proposal, given: Mapping[str, Any]) -> str:
    """Return the command that makes what is proposed."""
    from pqweights.targets.memory import SOURCE

    if not _is_exported(proposal):
        return f"nothing to make: {shlex.quote(given['source'])}" if proposal.target == SOURCE else _quantize(given)
    out = re.sub(r"[^a-z0-9_]+", "-", f"{proposal.target} {proposal.format}")
    words = options.spelled(proposal.options)
    words += options.spelled({key: given[key] for key in ("revision", "allow_pickle") if key in given})
    return " ".join(["pqweights export", shlex.quote(given["source"]), f"{out}/", "--target", proposal.target, *words])


def _quantize(given: Mapping[str, Any]) -> str:
    """Return the command that makes the master."""
    words = options.spelled({name: value for name, value in given.items() if name not in NOT_OF_QUANTIZE})
    return " ".join(["pqweights quantize", shlex.quote(given["source"]), "master/", *words])
