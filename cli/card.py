"""The command `pqweights card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pqweights.common.units import counted

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.publish.card import Card


def command(
    folder: options.LocalFolder,
    repo: options.CardRepository = None,
    base_model: options.BaseModel = None,
    shown: options.PrintCard = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write or update the model card, DIR/README.md, from the manifest and the recorded evaluations.

    Your text between the two comments at the end of the card is kept, and so are keys of the front matter that
    pqweights does not write. A README.md that pqweights did not write is refused.
    """
    with output.errors(quiet=quiet):
        from pqweights.convert.manifest import read_manifest
        from pqweights.publish.card import PublishOptions, make_card, model_id, read_card, write_card

        if shown and json:
            raise typer.BadParameter("expected either --print or --json, found both")
        repository = None if repo is None else model_id("repo", repo, namespace=True)
        card_options = PublishOptions(repository=repository, base_model=base_model)
        report.warn_of_broken_files(folder, read_manifest(folder))
        if shown:
            output.write_text(make_card(folder, card_options, old=read_card(folder)).text)
        else:
            _show(write_card(folder, card_options), folder, json)


def _show(card: Card, folder: Path, json: bool) -> None:
    from pqweights.checkpoint.names import CARD_FILE
    from pqweights.results.evaluation_record import FEWEST_TOKENS_FOR_CARD

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
