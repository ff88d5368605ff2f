"""The command `pqweights card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.publish.card import Card

RepositoryOption = Annotated[
    str | None,
    typer.Option(
        "--repo",
        metavar="ORG/NAME",
        help="Repository on the Hub to name in the commands of the card.",
        show_default="that of the earlier card",
    ),
]
PrintOption = Annotated[bool, typer.Option("--print", help="Print the card without writing it.")]


def command(
    folder: options.LocalFolderArgument,
    repository: RepositoryOption = None,
    base_model: options.BaseModelOption = None,
    adopt: options.AdoptOption = False,
    shown: PrintOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Write or update the model card, DIR/README.md, from the manifest and the recorded evaluations.

    Your text between the two comments at the end of the card is kept, and so are keys of the front matter that
    pqweights does not write. A README.md that pqweights did not write is refused unless --adopt is given.
    """
    if shown and json:
        raise typer.BadParameter("expected either --print or --json, found both")
    with output.errors(quiet=quiet):
        from pqweights.publish.card import CardOptions, make_card, read_card, write_card
        from pqweights.rewrite.manifest import read_manifest

        _check_repositories(repository, base_model)
        report.warn_of_broken_files(folder, read_manifest(folder))
        asked = CardOptions(repository=repository, base_model=base_model, adopt=adopt)
        if shown:
            output.write_text(make_card(folder, asked, old=read_card(folder)).text)
        else:
            _show(write_card(folder, asked), folder, json)


def _check_repositories(repository: str | None, base_model: str | None) -> None:
    from pqweights.storage.hub.ids import is_repository_id

    if repository is not None and not is_repository_id(repository):
        raise typer.BadParameter(f"--repo: expected ORG/NAME, found {repository!r}")
    if base_model is not None and not is_repository_id(base_model, namespace=False):
        raise typer.BadParameter(f"--base-model: expected ORG/NAME, found {base_model!r}")


def _show(card: Card, folder: Path, json: bool) -> None:
    from pqweights.checkpoint.names import CARD_FILE
    from pqweights.common.units import counted
    from pqweights.rewrite.results.evaluation_record import FEWEST_TOKENS_FOR_CARD

    written = folder / CARD_FILE
    if json:
        output.print_json(
            {
                "card": str(written),
                "changed": card.changed,
                "repository": card.repository,
                "base_model": card.base_model,
                "evaluations": card.evaluations,
                "quick_evaluations": card.quick_evaluations,
            }
        )
        return
    output.summary(
        f"{written}: {'written' if card.changed else 'up to date'}; {counted(card.evaluations, 'evaluation')}"
    )
    if card.quick_evaluations:
        output.note(
            f"{counted(card.quick_evaluations, 'evaluation')} with fewer than {FEWEST_TOKENS_FOR_CARD} scored tokens "
            "left out of the card"
        )
    if card.base_model is None:
        output.note("the base model is not known; name it with --base-model ORG/NAME")
    if card.repository is None:
        output.note("the commands in the card say DIR; name the repository with --repo ORG/NAME")
