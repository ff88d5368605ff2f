"""The card of a repository with several files: a table to choose from, and a picture of divergence against size."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from calls import make_card, write_card
from cards import sections
from commands import done, invoke
from gguf_files import write_llama
from measurements import measure, record

from pqweights.convert.manifest import read_manifest
from pqweights.results.evaluation_record import read_records, result_folder_of
from pqweights.results.offers import Offer, offers
from pqweights.results.picture import kl_picture
from pqweights.results.verify import verify

PICTURE = "pqweights-kl.svg"
SVG = "{http://www.w3.org/2000/svg}"
KLS = {"Q4_0": 0.08, "Q5_0": 0.02, "Q8_0": 0.003}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of three types of GGUF, one of two formats of MLX, and a file of one type."""
    folder = tmp_path_factory.mktemp("choice")
    source = write_llama(folder / "source")
    options = ("--target", "gguf", "--without-tokenizer", "-q")
    done("export", source, folder / "ladder", *options, "--type", "q4_0,q5_0,q8_0")
    done("export", source, folder / "one", *options, "--type", "q4_1")
    done("export", source, folder / "formats", "--target", "torchao", "--format", "int8,fp8", "-q")
    return folder


@pytest.fixture
def ladder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "ladder", tmp_path / "ladder"))


def rows(card: str) -> list[list[str]]:
    """The cells of the table to choose from, titles first, without the rule."""
    body = card.partition("## Which file to take\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_a_ladder_is_measured_type_by_type(ladder: Path) -> None:
    measure(ladder, KLS)
    assert verify(ladder, threads=1).ok
    card = write_card(ladder, "me/model-GGUF")
    assert sections(card.text)[0] == "Which file to take"
    titles, *body = rows(card.text)
    assert titles == [
        *("type", "file", "size", "bits per parameter", "relative MSE", "KL (nats)", "top-1", "perplexity", "memory")
    ]
    assert [row[0] for row in body] == list(KLS)
    for row, (kind, kl) in zip(body, KLS.items(), strict=True):
        file = next(path.name for path in ladder.glob(f"*-{kind}.gguf"))
        assert row[1] == f"`{file}`"
        assert row[2] == f"{(ladder / file).stat().st_size / 1000:.2f} kB"
        assert row[5] == f"{kl:.5f} ± {kl / 50:.5f}"
        assert row[6].startswith(f"{1 - kl:.2%}")
        assert row[7].startswith(f"{20 + 10 * kl:.4f}")
        assert row[8] == "2 GB"
    assert card.evaluations == 3 and all(f"| {kind} | `words.txt` |" in card.text for kind in KLS)
    assert f"]({PICTURE})" in card.text and (ladder / PICTURE).read_text() == card.picture
    assert verify(ladder, threads=1).ok
    assert not write_card(ladder).changed


def test_a_ladder_that_was_not_measured_has_a_table_of_sizes(ladder: Path) -> None:
    card = write_card(ladder)
    titles, *body = rows(card.text)
    assert titles[-2:] == ["relative MSE", "memory"] and len(body) == 3
    assert card.picture is None and PICTURE not in card.text and not (ladder / PICTURE).exists()


def test_formats_in_folders_have_a_row_each(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "formats", tmp_path / "formats"))
    kinds = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    measure(folder, dict.fromkeys(kinds, 0.01))
    card = make_card(folder)
    assert sorted(row[0] for row in rows(card.text)[1:]) == kinds
    assert card.picture is not None


def test_one_file_needs_no_choice(made: Path) -> None:
    card = make_card(made / "one")
    assert "Which file to take" not in card.text and card.picture is None


def test_figures_of_other_texts_do_not_stand_in_the_table(ladder: Path) -> None:
    measure(ladder, KLS)
    measure(ladder, {"Q4_0": 5.0}, text="other.txt", text_sha256="cd" * 32)
    measure(ladder, {"Q8_0": 7.0}, scored_tokens=9_999, window=64)
    card = make_card(ladder)
    assert [row[5].partition(" ")[0] for row in rows(card.text)[1:]] == ["0.08000", "0.02000", "0.00300"]
    assert (card.evaluations, card.quick_evaluations) == (4, 1)


def test_what_is_beside_a_result_stands_in_its_table(made: Path, ladder: Path) -> None:
    measure(ladder, KLS)
    beside = [(read_manifest(made / "one"), (record(0.05),))]
    card = make_card(ladder, beside=beside)
    assert [row[0] for row in rows(card.text)[1:]] == ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
    assert rows(card.text)[2][5].startswith("0.05000")


def test_the_picture_has_a_point_for_each_file_and_is_described(ladder: Path) -> None:
    measure(ladder, KLS)
    root = ET.fromstring(make_card(ladder).picture or "")
    assert root.get("role") == "img" and "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")
    described = root.findtext(f"{SVG}desc") or ""
    assert all(kind in described and f"{kl:.4g}" in described for kind, kl in KLS.items())
    points = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter(f"{SVG}circle")]
    assert points == sorted(points) and [y for _, y in points] == sorted(y for _, y in points)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert not re.search(r"(href|src|url\()", ET.tostring(root, "unicode"))


def test_points_that_are_not_finite_or_alone_make_no_picture() -> None:
    def offer(kind: str, size: int, kl: float | None) -> Offer:
        return Offer(kind, (f"{kind}.gguf",), size, 4.0, None, 0, record(kl))

    assert kl_picture([offer("a", 10**9, 0.1)]) is None
    assert kl_picture([offer("a", 10**9, 0.1), offer("b", 10**9, 0.0), offer("c", 10**9, None)]) is None
    strange = kl_picture([offer("<b>&\x00", 10**9, 0.1), offer("c", 10**9, 0.1)])
    assert strange is not None and ET.fromstring(strange) is not None


def test_memory_counts_the_context_and_room_to_compute(made: Path) -> None:
    one = offers([(read_manifest(made / "ladder"), ())])[0]
    assert one.context_bytes == 8192 * 2 * 2 * (8 + 8)  # tokens, bytes, layers, rows of keys and of values
    gib = 1 << 30
    assert [one._replace(bytes=size, context_bytes=0).memory_gb for size in (gib, gib + 1, 1 << 45)] == [2, 4, None]


def test_eval_of_a_folder_records_each_type(ladder: Path) -> None:
    """Which file is which type, without running any of them."""
    for path in ladder.glob("*.gguf"):
        place = result_folder_of(path)
        assert place is not None and place.folder == ladder and place.part == path.stem.rpartition("-")[2]
    measure(ladder, KLS)
    read = read_records(*result_folder_of(ladder)[:2])  # type: ignore[index]
    assert {one.part for one in read} == KLS.keys()
    stated = json.loads((ladder / "pqweights-eval.json").read_text())["evaluations"]
    assert [entry["part"] for entry in stated] == list(KLS)
    assert invoke("card", ladder).exit_code == 0
