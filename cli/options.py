"""The options that several commands share, and what the commands make of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import output

if TYPE_CHECKING:
    from pqweights.storage.hub.sources import Access, Fetched


def thread_count(asked: int | None) -> int:
    """Return the number of threads that was asked for, by default one for each core that this process may use."""
    from pqweights.rewrite.task import usable_cores

    return asked or usable_cores()


def run_continues(source: str, out: str) -> bool:
    """Whether an interrupted run left something: finished tensors in its folder, or fetched files of a repository."""
    from pqweights.errors import PqweightsError
    from pqweights.rewrite.identity import is_under_way
    from pqweights.storage import open_store

    try:
        under_way = is_under_way(open_store(out))
    except PqweightsError:  # an address that does not answer, or cannot be one
        under_way = False
    return under_way or _is_fetched(source)


def _is_fetched(source: str) -> bool:
    """Whether files of a source are fetched to this machine: those of a repository."""
    from pqweights.storage.remote.addresses import is_address, local_path

    return not is_address(source) and not Path(local_path(source)).exists()


def fetched(source: str, access: Access) -> Fetched:
    """Return a local folder, or a repository on the Hub as a folder in the cache."""
    from pqweights.storage.hub.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access, progress=progress)


SummaryOption = Annotated[
    bool | None,
    typer.Option(
        "--summary/--no-summary",
        show_default="a summary on a terminal, above 200 tensors",
        help="Show a line for each role, codec and bit width in place of one for each tensor.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
