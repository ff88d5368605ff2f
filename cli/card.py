"""pqweights card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options, output


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Master or export that pqweights wrote.")],
    repository: Annotated[
        str | None,
        typer.Option(
            "--repo",
            metavar="ORG/NAME",
            help="Where it lies on the Hub, for its commands.",
            show_default="the old card's",
        ),
    ] = None,
    base_model: options.BaseModelOption = None,
    adopt: options.AdoptOption = False,
    shown: Annotated[bool, typer.Option("--print", help="Print the card, and write nothing.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Write or refresh the model card, DIR/README.md, from what pqweights.json and eval say.

    What stands between the two comments at its end is yours and stays as it is, and so do keys of the front matter that are
    not written here. A README.md of another origin is refused, unless --adopt is given.
    """
    if shown and json:
        raise typer.BadParameter("expected either --print or --json")
    with output.errors():
        from pqweights.card import CardOptions, make_card, read_card, write_card
        from pqweights.checkpoint.names import CARD_FILE
        from pqweights.hub.ids import is_repository_id

        if repository is not None and not is_repository_id(repository):
            raise typer.BadParameter(f"--repo: expected ORG/NAME, found {repository!r}")
        if base_model is not None and not is_repository_id(base_model, namespace=False):
            raise typer.BadParameter(f"--base-model: expected ORG/NAME, found {base_model!r}")
        asked = CardOptions(repository=repository, base_model=base_model, adopt=adopt)
        if shown:
            sys.stdout.write(make_card(folder, asked, old=read_card(folder)).text)
            return
        card = write_card(folder, asked)
        written = folder / CARD_FILE
        if json:
            output.print_json({
                "card": str(written), "changed": card.changed, "repository": card.repository, "base_model": card.base_model,
                "evaluations": card.evaluations,
            })  # fmt: skip
            return
        typer.echo(
            f"{written}: {'written' if card.changed else 'is as it should be'}; {card.evaluations} evaluation(s)"
        )
        if card.base_model is None:
            output.note("the base model is not known; --base-model ORG/NAME names it")
        if card.repository is None:
            output.note("its commands name DIR; --repo ORG/NAME names the repository")
