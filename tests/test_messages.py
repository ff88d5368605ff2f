"""What messages say: sizes and counts, and what they suggest in place of an unknown name."""

from __future__ import annotations

import pytest
from commands import raises

from pqweights.common.advice import instead, nearest
from pqweights.common.units import counted, parse_size
from pqweights.errors import RecipeError
from pqweights.formats import CODECS
from pqweights.planning.recipe import RecipeFile, recipe_names
from pqweights.planning.roles import ROLES

SIZES: dict[str | int, int] = {
    "9GB": 9 * 10**9,
    "1KB": 1000,
    "1KiB": 1024,
    "0.5MiB": 2**19,
    "3 tib": 3 * 2**40,
    "2.5 MB": 2_500_000,
    " 17 ": 17,
    "17B": 17,
    "4.35GB": 4_350_000_000,  # not exact as a float
    "1.0000000001GB": 1_000_000_000,
    123456: 123456,
}
NOT_SIZES = ["", "GB", "9 XB", "9GBs", "-5GB", "+5GB", "1e9", "9,5GB", "9.GB", ".5GB", "5 G B", "5G", "inf", "0x10"]
NEAR = [
    ("hadamard", CODECS, "hadamard-trellis"),
    ("nf4", CODECS, None),
    ("atention", ROLES, "attention"),
    ("", ROLES, None),
    ("q55", recipe_names(), "q5"),
    ("target_bwp", RecipeFile.__struct_fields__, "target_bpw"),
]


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_size_is_parsed_to_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", NOT_SIZES)
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with raises(RecipeError, repr(text), "5GB", "5GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0.4", "0GB", "9" * 30, "9" * 5000 + "GB"])
def test_size_out_of_range_is_refused(text: str) -> None:
    with raises(RecipeError, "one byte") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


def test_counted_nouns_have_a_plural() -> None:
    assert [counted(count, "file") for count in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


@pytest.mark.parametrize(("name", "known", "near"), NEAR)
def test_only_a_name_that_is_near_is_suggested(name: str, known: list[str], near: str | None) -> None:
    assert nearest(name, known) == near
    listed = f"expected {', '.join(known)}"
    assert instead(name, known) == (listed if near is None else f"the nearest is {near!r}; {listed}")
