"""The option --ray, and how a run is carried out with or without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.rewrite.task import RunOptions

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|auto|local",
        help=(
            "Have the nodes of a Ray cluster do the work, output file by output file: HOST:PORT of its head node, auto "
            "for the cluster of this machine, local for a new one on it. --threads is then that of a task. The output "
            "bytes are the same."
        ),
    ),
]


@contextlib.contextmanager
def run_options(
    ray: str | None, *, threads: int | None, overwrite: bool, progress: output.Display
) -> Iterator[RunOptions]:
    """Yield how a command is carried out."""
    from pqweights.distributed.engine import engine_of
    from pqweights.rewrite.task import RunOptions

    with engine_of(ray, threads, output.note) as engine:
        yield RunOptions(
            threads=options.thread_count(threads),
            overwrite=overwrite,
            progress=progress,
            engine=engine,
        )
