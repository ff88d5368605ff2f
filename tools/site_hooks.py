"""Hooks of the documentation site (mkdocs.yml): pages that lie outside docs/, and links to them.

Links in the Markdown files are relative to the repository, so that they work where the files are read. On the site the
files of OUTSIDE are pages beside those of docs/, and links from and to them are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

DOCS = "docs"
# path in the repository -> page of the site
OUTSIDE = {"recipes/README.md": "recipes.md", "CHANGELOG.md": "changelog.md"}
# [text](target) with a relative target
LINK = re.compile(r"(\]\()(?![a-z]+:|/|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point relative links to where their targets are on the site."""
    here = repository_path(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        relative = posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{relative}{match[3] or ''})"

    return LINK.sub(rewritten, markdown)


def repository_path(page: str) -> str:
    """The path in the repository of a page of the site."""
    outside = {value: key for key, value in OUTSIDE.items()}
    return outside.get(page, f"{DOCS}/{page}")


def site_path(path: str) -> str:
    """The page of the site that shows a file of the repository; a path that does not exist, if there is none."""
    return OUTSIDE.get(path, posixpath.relpath(path, DOCS))
