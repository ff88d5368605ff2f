"""pqweights push."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.push import PushReport


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Master or export that pqweights wrote.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub; made if it is not there.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; one that is there must be.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="BRANCH", help="Branch; made if it is not there.", show_default="main"),
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request against the branch, which must be there.")
    ] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")] = None,
    base_model: options.BaseModelOption = None,
    adopt: options.AdoptOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be pushed, and change nothing.")] = False,
    threads: options.ThreadsOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Bring a master or an export to the Hub, with a model card made from its manifest; a broken folder is refused.

    What is there already is not sent again: interrupted, the same command continues.
    """
    with output.errors(continues=True):
        from pqweights.push import PushOptions, push

        with output.progress("verifying") as verifying, output.progress("pushing") as pushing:
            asked = PushOptions(
                private=private,
                create_pr=create_pr,
                message=message,
                base_model=base_model,
                adopt=adopt,
                dry_run=dry_run,
                threads=options.thread_count(threads),
                verifying=verifying,
                progress=pushing,
            )
            done = push(folder, repository, options.access(revision, token), asked)
        if json:
            output.print_json(done.to_json() | {"dry_run": dry_run})
        else:
            typer.echo("\n".join(_lines(done, dry_run)))


def _lines(done: PushReport, dry_run: bool) -> list[str]:
    shown = [change for change in done.changes if change.kind != "same"]
    lines = [f"{change.kind:8} {output.size(change.byte_count):>10}  {change.name}" for change in shown]
    same = len(done.changes) - len(shown)
    if same:
        lines.append(f"same: {same} file(s)")
    where = f"{done.repository}, branch {done.branch}"
    made = " (made)" if done.created and not dry_run else " (would be made)" if done.created else ""
    if not shown:
        lines.append(f"{where}: holds all of this already; nothing was pushed")
    elif dry_run:
        lines.append(f"{where}{made}: {output.size(done.sent_bytes)} would be pushed; nothing was")
    else:
        lines.append(f"{where}{made}: {output.size(done.sent_bytes)} pushed, commit {done.commit}: {done.url}")
    return lines
