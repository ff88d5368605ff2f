"""The command that lists and prints the built-in recipes."""

from __future__ import annotations

from pathlib import Path

from commands import answer, done, refused

from pqweights.planning.recipe import load_recipe, recipe_names


def test_recipes_are_listed_with_codec_bits_and_description() -> None:
    heading, *lines = done("recipes").stdout.splitlines()
    assert heading.split() == ["recipe", "codec", "bits", "description"]
    assert [line.split()[0] for line in lines] == recipe_names()
    for line, recipe in zip(lines, map(load_recipe, recipe_names()), strict=True):
        assert line.split()[1:3] == [recipe.codec, str(recipe.bits)]
        assert line.endswith(recipe.description)
    assert answer("recipes")["recipes"] == [load_recipe(name).to_json() for name in recipe_names()]


def test_recipe_is_printed_as_its_file_and_can_be_used(tmp_path: Path) -> None:
    text = done("recipes", "q4").stdout
    assert text == (Path(__file__).parents[2] / "recipes" / "q4.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text)
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe("q4")


def test_file_is_checked_and_printed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("# mine\nbits: 4\n")
    assert done("recipes", mine).stdout == "# mine\nbits: 4\n"
    assert answer("recipes", mine) == load_recipe(mine).to_json()
    mine.write_text("bitz: 4\n")
    line = refused("recipes", mine)
    assert "mine.yaml" in line and "'bitz'" in line
