"""docs/exports.md lists what the targets make of every architecture of the table."""

from __future__ import annotations

from pathlib import Path

from known_architectures import ARCHITECTURES, BEGIN, END, markdown, with_table

PAGE = Path(__file__).parents[2] / "docs" / "exports.md"


def test_page_holds_the_table() -> None:
    """`python tests/architectures/known_architectures.py` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_table(page) == page
    assert all(name in page for name in ARCHITECTURES)


def test_table_has_a_row_for_every_outcome() -> None:
    outcomes = {(about.vllm, about.torchao, about.mlx) for about in ARCHITECTURES.values()}
    assert 5 < len(markdown().splitlines()) - 2 <= len(outcomes)
