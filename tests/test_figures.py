"""Figures are those of the codecs as they are: documents of benchmarks state the digests of what they measured."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted((DOCS / "benchmarks").glob("*.json"))
# Of the tables of the README, whose rows have to be measured with the codecs as they are.
OF_README = {"peers": lambda row: True, "quality": lambda row: row["part"] == "calibrated", "real": lambda row: True}

sys.path.append(str(ROOT / "benchmarks"))
import digests  # noqa: E402
from harness import MEASURED_WITH, STALE, measured_with, stale_lines, statements  # noqa: E402


def document_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def earlier(document: Any) -> set[str]:
    """The codecs of which a document states another digest than that of the code."""
    return {codec for codec, stated in statements(document) if stated != digests.digest(codec)}


def rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in document.values():
        yield from (row for row in part if isinstance(row, dict)) if isinstance(part, list) else ()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_were_measured_with_the_codecs_as_they_are_or_say_what_was_not(path):
    document = document_of(path)
    stated = [MEASURED_WITH in row for row in rows(document)]
    assert MEASURED_WITH in document or (stated and all(stated)), "no digests: measure it again"
    said = {codec for codecs in document.get(STALE, {}).values() for codec in codecs}
    assert earlier(document) == said, f"{path.name}: measure again, or say under {STALE!r} what was not, and why"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_pages_say_what_was_measured_with_an_earlier_version(path):
    lines = stale_lines(document_of(path))
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    parts = [re.search(rf"<!-- begin {path.stem}-machine -->(.*?)<!-- end", page, re.DOTALL) for page in pages]
    assert not lines or any(part and all(line in part[1] for line in lines) for part in parts)


@pytest.mark.parametrize("name", OF_README)
def test_tables_of_the_readme_were_measured_with_the_codecs_as_they_are(name):
    rows_shown = [row for row in document_of(DOCS / "benchmarks" / f"{name}.json")["rows"] if OF_README[name](row)]
    assert rows_shown and not earlier(rows_shown)


def test_digest_changes_with_the_bytes_of_a_codec_alone(monkeypatch):
    before = measured_with(["q2", "q3", "trellis"])[MEASURED_WITH]
    monkeypatch.setattr("pqweights.formats.lloyd_max.LloydMax.gained", (3,))
    digests.digest.cache_clear()
    try:
        after = measured_with(["q2", "q3", "trellis"])[MEASURED_WITH]
    finally:
        digests.digest.cache_clear()
    assert [after[codec] == before[codec] for codec in before] == [False, True, True]


@pytest.mark.parametrize("codec", [name for name in digests.CODECS if name != "trellis"])
def test_every_codec_has_a_digest_that_its_weights_decide(codec, monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{16}", digests.digest(codec))
    same = digests.digest.__wrapped__(codec)
    monkeypatch.setattr(digests, "weights", lambda exact=digests.weights: np.roll(exact(), 1, axis=0))
    assert same == digests.digest(codec)
    assert (digests.digest.__wrapped__(codec) == same) == (codec == "kv")
