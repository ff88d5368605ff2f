"""The command `pqweights card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pqweights.common.units import counted
from pqweights.publish.options import CardArguments

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.publish.card import Card

PrintOption = Annotated[bool, typer.Option("--print", help="Print the card without writing it.")]


@options.taking(CardArguments)
def command(asked: CardArguments, *, shown: PrintOption = False, json: options.JsonOption = False) -> None:
    """Write or update the model card, DIR/README.md, from the manifest and the recorded evaluations.

    Your text between the two comments at the end of the card is kept, and so are keys of the front matter that
    pqweights does not write. A README.md that pqweights did not write is refused.
    """
    from pqweights.publish.card import make_card, read_card, write_card
    from pqweights.rewrite.manifest import read_manifest

    if shown and json:
        raise typer.BadParameter("expected either --print or --json, found both")
    report.warn_of_broken_files(asked.folder, read_manifest(asked.folder))
    if shown:
        output.write_text(make_card(asked.folder, asked, old=read_card(asked.folder)).text)
    else:
        _show(write_card(asked.folder, asked), asked.folder, json)


def _show(card: Card, folder: Path, json: bool) -> None:
    from pqweights.checkpoint.names import CARD_FILE
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
