"""Helpers of the card tests: changing manifests, and taking cards apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pqweights.common.strict_json import json_bytes
from pqweights.convert.manifest import ManifestFile, read_manifest

BASE = {
    "id": "org/base",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "license": "other",
    "license_name": "own",
    "license_link": "https://example.org/licence",
    "pipeline_tag": "text-generation",
    "language": ["en", "no"],
}


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / "pqweights.json").read_bytes())
    change(data)
    # What is added to the account stands with the rest of it, before the source.
    account = {key: value for key, value in data.items() if key not in ManifestFile.__struct_fields__}
    first = {key: data[key] for key in ("manifest_version", "kind")}
    ordered = first | account
    ordered |= {key: value for key, value in data.items() if key not in ordered}
    (folder / "pqweights.json").write_bytes(json_bytes(ordered))


def set_model(folder: Path, about: dict[str, Any]) -> None:
    """Change the manifest to that of a run whose source had a model card with these facts."""
    manifest = read_manifest(folder)
    changed = replace(manifest, model=about)
    (folder / "pqweights.json").write_bytes(b"".join(changed.to_pieces()))


def facts(text: str) -> dict[str, Any]:
    """The front matter of a card, as huggingface_hub reads it."""
    import huggingface_hub as hub

    found: dict[str, Any] = hub.ModelCard(text, ignore_metadata_errors=False).data.to_dict()
    assert found == yaml.safe_load(text.split("---\n")[1])
    return found


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


def edit_card(folder: Path, change: Callable[[str], str]) -> None:
    (folder / "README.md").write_bytes(change((folder / "README.md").read_bytes().decode()).encode())
