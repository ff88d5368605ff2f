"""The one thing that pyproject.toml cannot say: the README for package indexes, which know no files beside it."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# [text](target) with a relative target
RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


def readme() -> str:
    """README.md, with relative links made absolute by `Source` in project.urls, or shown as text without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project.get("urls", {}).get("Source")
    replacement = r"\1" if source is None else rf"[\1]({source}/blob/main/\2)"
    return RELATIVE_LINK.sub(replacement, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=readme(), long_description_content_type="text/markdown")
