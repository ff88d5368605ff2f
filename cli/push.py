"""The command `pqweights push`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pqweights.common.options import options_in
from pqweights.common.units import counted, size_text

from . import options, output

if TYPE_CHECKING:
    from pqweights.publish.push import PushReport


def command(
    ctx: typer.Context,
    folder: options.LocalFolder,
    repository: options.Repository,
    base_model: options.BaseModel = None,
    private: options.Private = False,
    message: options.Message = None,
    dry_run: options.DryPush = False,
    threads: options.Threads = None,
    revision: options.Branch = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Push a master or an export to the Hub, with a model card made from its manifest; a broken folder is refused.

    What is there already is not sent again: after an interruption, the same command continues.
    """
    with output.errors(quiet=quiet, kept=None if dry_run else lambda: True):
        from pqweights.publish.card import PublishOptions
        from pqweights.publish.push import push

        with (
            output.progress("verifying") as verifying,
            output.progress("comparing") as comparing,
            output.progress("pushing") as pushing,
        ):
            shown = {"verifying": verifying, "comparing": comparing, "progress": pushing}
            pushed = options_in(PublishOptions, ctx.params | shown)
            done = push(folder, repository, options.hub(revision, token), options=pushed)
        _show(done, dry_run=dry_run, json=json)


def _show(done: PushReport, *, dry_run: bool, json: bool) -> None:
    if json:
        output.print_json(done.to_json() | {"dry_run": dry_run})
    else:
        show = output.show if dry_run else output.summary  # a dry run has nothing else to show
        show(*push_lines(done, dry_run=dry_run))
    if done.card.replaces_edits:
        were = "would be" if dry_run else "were"
        output.note(
            f"your notes and keys in README.md on the Hub {were} replaced by those of the folder; commit "
            f"{done.replaced} has them"
        )


def push_lines(done: PushReport, *, dry_run: bool) -> list[str]:
    """Return what a push did, or would do."""
    shown = [change for change in done.changes if change.change != "same"]
    compared = done.not_checked is None
    lines = [
        f"{f'{change.change:8} ' if compared else ''}{size_text(change.byte_count):>10}  {change.name}"
        for change in shown
    ]
    same = len(done.changes) - len(shown)
    if same:
        lines.append(f"same: {counted(same, 'file')}")
    where = f"{done.repository}, branch {done.branch}"
    created = ""
    if done.created:
        created = " (would be created)" if dry_run else " (created)"
    if not shown:
        lines.append(f"{where}: holds all of this already; nothing was pushed")
    elif done.not_checked is not None:
        lines.append(f"{where}: at most {size_text(done.sent_bytes)} would be pushed (dry run)")
        lines.append(
            "not checked: whether the repository can take this, which of these files it holds already, and whether it "
            f"accepts the card: {output.with_flags(done.not_checked)}"
        )
    elif dry_run:
        lines.append(f"{where}{created}: {size_text(done.sent_bytes)} would be pushed (dry run)")
    else:
        lines.append(f"{where}{created}: {size_text(done.sent_bytes)} pushed, commit {done.commit}: {done.url}")
    return lines
