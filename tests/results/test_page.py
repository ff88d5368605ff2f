"""Pages of HTML on results and plans: well-formed, alone, complete and accessible, whatever names there are."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from closeness import approx
from commands import done, invoke
from gguf_files import write_llama
from measurements import measure

from pqweights.checkpoint.header import TensorSpec
from pqweights.convert.manifest import read_manifest
from pqweights.convert.records import TensorRecord
from pqweights.planning.layout import KEEP, QUANTIZE, TensorPlan, total
from pqweights.results.page import STEPS, Scale, error_of, heat_map, plan_page, scale_for, stacks

VOID = {"meta", "br", "line", "circle", "rect", "polyline"}


class Page(HTMLParser):
    """A page that was parsed; each element must be closed where it may be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def checked(text: str) -> Page:
    """Parse a page, and check what holds for all of them."""
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in page.elements}
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)", text) and "@import" not in text
    assert "url(" not in text and "prefers-color-scheme:dark" in text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [html["lang"] for html in page.all("html")] == ["en"]
    assert len(page.all("h1")) == len(page.all("title")) - len(page.all("svg")) == len(page.all("main")) == 1
    for link in page.all("a"):
        assert (link["href"] or "")[1:] in ids
    named = [attributes for tag, attributes in page.elements if tag in ("section", "nav", "svg")]
    for attributes in [*named, *(div for div in page.all("div") if div.get("role") == "region")]:
        labels = (attributes.get("aria-labelledby") or "").split()
        assert attributes.get("aria-label") or (labels and set(labels) <= set(ids))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell["scope"] in ("col", "row") for cell in page.all("th"))
    assert all(div["tabindex"] == "0" for div in page.all("div"))  # what scrolls is reached by the keyboard
    return page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, its master, and a ladder of two types."""
    folder = tmp_path_factory.mktemp("page")
    source = write_llama(folder / "source")
    done("quantize", source, folder / "master", "-q")
    options = ("--target", "gguf", "--type", "q4_0,q8_0", "--without-tokenizer")
    done("export", source, folder / "ladder", *options, "-q")
    return folder


def written(*arguments: Any, path: Path) -> Page:
    result = invoke(*arguments, "--html", path)
    assert result.exit_code == 0, result.stderr
    assert str(path) in result.stderr
    return checked(path.read_text())


def test_a_page_of_a_master_has_every_tensor(made: Path, tmp_path: Path) -> None:
    page = written("inspect", made / "master", path=tmp_path / "page.html")
    text = "\n".join(page.text)
    for tensor, record in read_manifest(made / "master").pairs:
        assert tensor.name in text
        assert record.relative_mse is None or f"{record.relative_mse:.3g}" in text
    assert {"Map", "Worst tensors", "Not quantized", "Sizes", "All tensors"} <= set(page.text)
    titles = [cell["title"] for cell in page.all("td") if "title" in cell]
    assert any(re.fullmatch(r"layer 1, [\d.]+ bits, relative MSE [\d.e-]+", title or "") for title in titles)


def test_a_page_of_a_ladder_has_each_type_and_what_was_measured(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "ladder", tmp_path / "ladder"))
    before = written("inspect", folder, path=tmp_path / "before.html")
    assert not before.all("svg") and "Files" in before.text
    measure(folder, {"Q4_0": 0.05, "Q8_0": 0.004})
    page = written("inspect", folder, path=tmp_path / "page.html")
    assert len(page.all("svg")) == 1 and {"0.05000", "0.00400", "99.60%"} <= set(page.text)
    assert len(page.all("details")) == 3  # two maps, and the list
    assert all(f"{kind}/blk: " in "".join(page.text) for kind in ("Q4_0", "Q8_0"))


def test_a_page_of_a_plan_has_bits_and_no_errors(made: Path, tmp_path: Path) -> None:
    page = written("plan", made / "source", path=tmp_path / "page.html")
    assert "Colour: bits per weight" in page.text and "Worst tensors" not in page.text
    assert all(tensor.name in "\n".join(page.text) for tensor in read_manifest(made / "master").tensors)
    assert not [cell for cell in page.all("td") if "relative MSE" in (cell.get("title") or "")]


def planned(name: str, *, role: str = "expert", error: float | None = None) -> tuple[TensorPlan, TensorRecord]:
    action, codec, bits = (QUANTIZE, "hadamard-lloyd-max", 5) if role != "norm" else (KEEP, None, None)
    tensor = TensorPlan(name, (128, 128), "BF16", role, action, codec, bits, "a reason", 10496, ())
    tensor = tensor._replace(stored=(TensorSpec(name, "U8", (10496,)),))
    return tensor, TensorRecord(name=name, relative_mse=error, energy=None if error is None else 1.0)


def page_of(pairs: Sequence[tuple[TensorPlan, TensorRecord]]) -> str:
    tensors = tuple(tensor for tensor, _ in pairs)
    report: Any = SimpleNamespace(tensors=tensors, totals=total(tensors, source_bytes=1, output_bytes=1))
    return plan_page("model", report)


def test_sixty_thousand_tensors_make_a_small_page() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(60) for expert in range(336)]
    pairs = [planned(f"{name}.{kind}.weight") for name in names for kind in ("up_proj", "down_proj", "gate_proj")]
    text = page_of(pairs)
    page = checked(text)
    assert len(pairs) > 60_000 and len(text) < 1_000_000
    assert len([cell for cell in page.all("td") if "title" in cell]) == 3 * 60
    assert "model.layers.59.mlp.experts.*.up_proj.weight (336 tensors)" in page.text


def test_many_tensors_that_have_nothing_in_common_are_not_listed() -> None:
    for name in ("model.layers.{}.weight_of_{}", "weight_of_{}"):
        text = page_of([planned(name.replace("{}", str(number))) for number in range(6_500)])
        said = "".join(checked(text).text)
        is_listed, is_cut = "which inspect --json lists" in said, "the first 6000 of 6500" in said
        assert is_listed and is_cut == (name == "weight_of_{}") and len(text) < 5_000_000


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=y>.3.&amp;', "a.1.\u202eb", "]]>.0."]
)
def test_names_of_strangers_have_no_effect(name: str) -> None:
    text = page_of([planned(name), planned("model.layers.0.norm.weight", role="norm")])
    page = checked(text)
    assert not page.all("script") and "\u202e" not in text
    shown = name.replace("\u202e", "\N{REPLACEMENT CHARACTER}")
    assert any(shown in part for part in page.text)


def test_experts_share_a_cell_which_names_the_worst() -> None:
    errors = [0.001, 0.003, 0.002]
    pairs = [planned(f"m.layers.0.experts.{n}.up.weight", error=error) for n, error in enumerate(errors)]
    layered, others = stacks([*pairs, planned("m.embed.weight")])
    (row,) = layered["m.layers"]
    assert (row.label, row.role) == ("experts.*.up.weight", "expert") and others == [planned("m.embed.weight")]
    assert error_of(row.cells[0]) == approx(0.002)
    shown = heat_map("m.layers", [row], scale_for([row.cells[0]]))
    assert "3 tensors" in shown and "worst m.layers.0.experts.1.up.weight: 0.003" in shown


def test_steps_of_a_scale_are_logarithmic_and_cover_it() -> None:
    scale = Scale("relative MSE", 1e-4, 1e-2)
    assert [scale.step(value) for value in (0, 1e-4, 1.001e-3, 1e-2, 1)] == [0, 0, STEPS // 2, STEPS - 1, STEPS - 1]
    assert scale.bound(STEPS) == approx(1e-2)
    alike = scale_for([[planned("m.0.a", error=0.002)], [planned("m.1.a", error=0.0021)]])
    assert alike is not None and alike.most / alike.least == approx(2)
    assert scale_for([[planned("m.0.norm", role="norm")]]) is None


def test_a_gguf_file_of_others_has_no_page(made: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(next((made / "ladder").glob("*.gguf")), tmp_path))
    result = invoke("inspect", file, "--html", tmp_path / "page.html")
    assert result.exit_code == 2 and "--html" in result.stderr
    assert not (tmp_path / "page.html").exists()
