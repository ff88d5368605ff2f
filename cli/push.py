"""The command `pqweights push`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.publish.push import PushReport


FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Master or export that pqweights wrote.")]
RepositoryArgument = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub; created if it does not exist.")
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Create the repository as private; one that exists must be private.")
]
BranchOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="BRANCH", help="Branch; created if it does not exist.", show_default="main"),
]
PullRequestOption = Annotated[
    bool, typer.Option("--create-pr", help="Open a pull request against the branch, which must exist.")
]
MessageOption = Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be pushed, and change nothing. The folder is checked without a network or a token, too.",
    ),
]


def command(
    folder: FolderArgument,
    repository: RepositoryArgument,
    private: PrivateOption = False,
    revision: BranchOption = None,
    create_pr: PullRequestOption = False,
    message: MessageOption = None,
    base_model: options.BaseModelOption = None,
    adopt: options.AdoptOption = False,
    dry_run: DryRunOption = False,
    threads: options.ThreadsOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Bring a master or an export to the Hub, with a model card made from its manifest; a broken folder is refused.

    What is there already is not sent again: after an interruption, the same command continues.
    """
    with output.errors(kept=None if dry_run else lambda: True, quiet=quiet):
        from pqweights.publish.push import PushOptions, push

        with (
            output.progress("verifying") as verifying,
            output.progress("hashing") as hashing,
            output.progress("pushing") as pushing,
        ):
            asked = PushOptions(
                private=private,
                create_pr=create_pr,
                message=message,
                base_model=base_model,
                adopt=adopt,
                dry_run=dry_run,
                threads=options.thread_count(threads),
                verifying=verifying,
                hashing=hashing,
                progress=pushing,
            )
            done = push(folder, repository, options.access(revision, token), options=asked)
        if json:
            output.print_json(done.to_json() | {"dry_run": dry_run})
        else:
            show = output.show if dry_run else output.summary  # a dry run has nothing else to show
            show(*_lines(done, dry_run))
        for part in done.card.replaced:
            were = "would be" if dry_run else "were"
            output.note(
                f"the {part} of README.md on the Hub {were} replaced by that of the folder; commit {done.before} has it"
            )


def _lines(done: PushReport, dry_run: bool) -> list[str]:
    from pqweights.common.units import counted

    shown = [change for change in done.changes if change.kind != "same"]
    compared = done.not_checked is None
    lines = [
        f"{f'{change.kind:8} ' if compared else ''}{output.size(change.byte_count):>10}  {change.name}"
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
        lines.append(f"{where}: at most {output.size(done.sent_bytes)} would be pushed (dry run)")
        lines.append(
            "not checked: whether the repository can take this, which of these files it holds already, and whether it "
            f"accepts the card: {done.not_checked}"
        )
    elif dry_run:
        lines.append(f"{where}{created}: {output.size(done.sent_bytes)} would be pushed (dry run)")
    else:
        lines.append(f"{where}{created}: {output.size(done.sent_bytes)} pushed, commit {done.commit}: {done.url}")
    return lines
