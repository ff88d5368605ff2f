"""What a model's card states that the cards of its derivatives repeat: licence, languages, task.

A card is README.md with YAML between two lines of dashes at its top (https://huggingface.co/docs/hub/model-cards). It
may hold anything: a field of the wrong type is ignored.
"""

from __future__ import annotations

from typing import Any

import yaml

from pqweights.checkpoint.names import CARD_FILE
from pqweights.checkpoint.storage import Storage, read_file

# The fields that are text; `language` is a list of texts.
TEXT_KEYS = ("license", "license_name", "license_link", "pipeline_tag")
MAX_CARD_BYTES = 4_000_000
MAX_FRONT_MATTER = 64_000
MAX_TEXT = 300
MAX_LANGUAGES = 500
FENCE = "---"


def model_facts(storage: Storage) -> dict[str, Any]:
    """Return what is known of the model in a folder or repository; what is unknown is absent.

    id, revision: the repository on the Hub and its commit
    license, license_name, license_link, pipeline_tag, language: as in its card
    """
    facts: dict[str, Any] = {} if storage.origin is None else dict(storage.origin._asdict())
    state = storage.files().get(CARD_FILE)
    if state is None or state.byte_count > MAX_CARD_BYTES:
        return facts
    return facts | checked_facts(front_matter(read_file(storage, CARD_FILE).decode("utf-8", "replace"))[0])


def known_facts(model: dict[str, Any]) -> dict[str, Any]:
    """Return what may be known of a model (model_facts), as far as the types of fields are right."""
    return {key: model[key] for key in ("id", "revision") if isinstance(model.get(key), str)} | checked_facts(model)


def checked_facts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return licence, languages and task from the fields of a card or manifest, as far as their types are right."""
    facts: dict[str, Any] = {key: fields[key] for key in TEXT_KEYS if _is_text(fields.get(key))}
    languages = fields.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    # YAML 1.1 reads `no`, Norwegian, as false.
    languages = ["no" if name is False else name for name in languages] if isinstance(languages, list) else []
    if languages and len(languages) <= MAX_LANGUAGES and all(map(_is_text, languages)):
        facts["language"] = languages
    return facts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


class _CardLoader(yaml.SafeLoader):
    """A safe loader without merges of mappings, because copies of copies could fill the memory."""

    def flatten_mapping(self, node: Any) -> None:
        """Leave `<<` a key like any other."""


def front_matter(card: str) -> tuple[dict[str, Any], str]:
    """Split a card into the YAML at its top and the text below; the YAML is empty if there is none or it is invalid."""
    lines = card.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].rstrip() != FENCE:
        return {}, card
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        return {}, card
    body = "".join(lines[end + 1 :])
    text = "".join(lines[1:end])
    if len(text) > MAX_FRONT_MATTER:
        return {}, body
    try:
        fields = yaml.load(text, _CardLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return {}, body
    return (fields if isinstance(fields, dict) else {}), body
