"""The command `pqweights recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options, output

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME|FILE", help="Recipe to print as YAML; a file is checked.", show_default="list all recipes"
    ),
]


def command(name: NameArgument = None, json: options.Json = False) -> None:
    """List the built-in recipes, or print one, to use it or to begin a recipe of your own.

    --recipe of quantize and plan takes the name of one of these, or a file.
    """
    with output.errors():
        from pqweights.planning.recipe import load_recipe, recipe_names, recipe_text

        output.flags |= {"recipe": "--recipe", "bits": "--bits"}  # those of quantize and plan

        if name is not None:
            recipe = load_recipe(name)
            if json:
                output.print_json(recipe.to_json())
            else:
                output.write_text(recipe_text(name))
            return
        recipes = [load_recipe(known) for known in recipe_names()]
        if json:
            output.print_json({"recipes": [recipe.to_json() for recipe in recipes]})
            return
        columns = ["recipe", "codec", "#bits", "description"]
        rows = [[recipe.name, recipe.codec, f"{recipe.bits:g}", recipe.description] for recipe in recipes]
        output.show(*output.table(columns, rows))
