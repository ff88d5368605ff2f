"""Sizes and counts as people write and read them."""

from __future__ import annotations

import pytest

from pqweights.common.units import counted, parse_size
from pqweights.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("9GB", 9 * 10**9),
        ("9GiB", 9 * 2**30),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2.5 MB", 2_500_000),
        ("0.5MiB", 2**19),
        ("3 tib", 3 * 2**40),
        ("1TB", 10**12),
        (" 17 ", 17),
        ("17B", 17),
        ("4.35GB", 4_350_000_000),  # not exact as a float
        ("1.0000000001GB", 1_000_000_000),
        (123456, 123456),
    ],
)
def test_size_is_parsed_to_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


NOT_SIZES = ["", "GB", "9 XB", "9GBs", "nine", "-5GB", "+5GB", "1e9", "9,5GB", "9.GB"]
NOT_SIZES += [".5GB", "5 G B", "5G", "inf", "nan", "0x10"]


@pytest.mark.parametrize("text", NOT_SIZES)
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"5GB \(10\*\*9 bytes\), 5GiB \(2\*\*30\)") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0.4", "0GB", "9" * 30, "9" * 5000 + "GB"])
def test_size_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="at least one byte") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files")])
def test_counted_nouns_have_a_plural(count: int, text: str) -> None:
    assert counted(count, "file") == text
