"""The pages: generated parts are up to date, links have targets, and every page is listed."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from snippets import run_snippet

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "recipes" / "README.md", *sorted(DOCS.rglob("*.md"))]
# [text](target) or ![text](target), outside of code
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
# Fills in the tables of pages as benchmarks/report.py does, without the plots.
FILL = """
import sys
from pathlib import Path
sys.path.insert(0, benchmarks)
import report
sections = report.all_sections(report.read_documents(Path(documents)))
for page in pages:
    report.fill(Path(page), sections)
"""


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(name: str) -> ModuleType:
    return module_of(ROOT / "tools" / f"{name}.py")


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def links(page: Path) -> list[str]:
    return LINK.findall(CODE.sub("`", page.read_text(encoding="utf-8")))


def test_commands_page_is_up_to_date_on_any_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERMINAL_WIDTH", "40")
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == tool("commands_page").page(), "run make docs-commands"


def test_page_of_families_is_up_to_date():
    assert (DOCS / "families.md").read_text(encoding="utf-8") == tool("families_page").page(), "run make docs-families"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_and_anchors_exist(page):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_source_files_that_pages_name_exist():
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for name in re.findall(r"[`|] ?([a-z]\w*(?:/\w+)+\.(?:py|hpp|cpp))\b", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists() or (ROOT / "pqweights" / name).exists(), f"{page}: {name}"


def test_every_page_is_in_the_navigation_and_the_overview():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    outside = tool("site_hooks").OUTSIDE
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def leaves(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        children = entry.values() if isinstance(entry, dict) else entry
        return {leaf for child in children for leaf in leaves(child)}

    assert leaves(navigation) == pages | set(outside.values())
    overview = {link for link in links(DOCS / "README.md") if not link.endswith(".svg")}
    assert overview == pages - {"README.md"} | {f"../{path}" for path in outside}


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "docs/memory.md"])
def test_commands_of_the_first_pages_have_flags_that_exist(page):
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "commands.md").read_text(encoding="utf-8")))
    lines = re.findall(r"(?m)^(?: +|.*\| `)pqweights (\w+) ([^`\n]*)", (ROOT / page).read_text(encoding="utf-8"))
    assert len(lines) >= 4
    for command, rest in lines:
        flags = re.findall(r"(?<!\S)--?[a-z][\w-]*", rest.partition("  #")[0])
        assert all(f"`{flag}" in sections[command] for flag in flags), (command, rest)


def test_links_between_docs_and_pages_outside_are_rewritten_for_the_site():
    def rewritten(text: str, page: str) -> str:
        return tool("site_hooks").on_page_markdown(
            text, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None
        )

    assert rewritten("[a](../recipes/README.md#x)", "fit.md") == "[a](recipes.md#x)"
    assert rewritten("[a](../docs/fit.md)", "recipes.md") == "[a](fit.md)"
    assert rewritten("[a](docs/fit.md#how-good)", "changelog.md") == "[a](fit.md#how-good)"
    assert rewritten("[a](benchmarks/hub-card.md)", "hub.md") == "[a](benchmarks/hub-card.md)"
    unchanged = "[a](https://example.com/x.md) [b](#here) ![c](benchmarks/fit.svg)"
    assert rewritten(unchanged, "fit.md") == unchanged


def test_tables_match_the_benchmark_documents(tmp_path):
    pages = [page for page in PAGES if "<!-- begin " in page.read_text(encoding="utf-8")]
    copies = [tmp_path / f"{number}.md" for number in range(len(pages))]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_bytes(page.read_bytes())
    given = str(ROOT / "benchmarks"), str(DOCS / "benchmarks"), [str(copy) for copy in copies]
    code, log = f"benchmarks, documents, pages = {given!r}\n{FILL}", tmp_path / "log"
    assert run_snippet(code, tmp_path, log) == 0, log.read_text()
    for page, copy in zip(pages, copies, strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), f"{page}: run make bench-report"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_parts_are_between_whole_markers(page):
    text = page.read_text(encoding="utf-8")
    begun = re.findall(r"^<!-- begin ([\w.-]+) -->$", text, re.MULTILINE)
    assert begun == re.findall(r"^<!-- end ([\w.-]+) -->$", text, re.MULTILINE)
    assert len(begun) == len(re.findall(r"<!--\s+begin\s", text)) == len(re.findall(r"<!--\s+end\s", text))


def test_readme_is_short_and_has_one_table_of_models_that_people_use():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    table = lines[lines.index("<!-- begin real-short -->") + 1 : lines.index("<!-- end real-short -->")]
    assert 10 <= len([line for line in table if line.startswith("|")]) <= 2 + 16


def test_the_description_for_package_indexes_has_no_relative_links(monkeypatch):
    """setup.py is imported with a stub of setuptools that does nothing."""
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=lambda **_: None, Distribution=object))
    for command in ("bdist_wheel", "build_ext"):
        monkeypatch.setitem(sys.modules, f"setuptools.command.{command}", SimpleNamespace(**{command: object}))
    text = module_of(ROOT / "setup.py").readme()
    assert "## Documentation" in text
    assert all(re.match(r"https?:", link) for link in LINK.findall(CODE.sub("`", text)))


def test_functions_of_the_architecture_page_exist() -> None:
    steps = re.findall(r"^(?:\d+\.|  ) .*", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    names = [name for step in steps for name in re.findall(r"`((?:\w+\.)+\w+)`", step)]
    assert len(names) > 18
    for name in names:
        assert callable(pkgutil.resolve_name(f"pqweights_{name}" if name.startswith("cli.") else f"pqweights.{name}"))
