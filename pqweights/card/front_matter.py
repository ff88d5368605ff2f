"""The YAML at the top of a card: what the Hub reads (https://huggingface.co/docs/hub/model-cards#model-card-metadata)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pqweights.card.old_card import OldCard
from pqweights.hub.ids import is_repository_id

LICENSE_KEYS = ("license", "license_name", "license_link")
# Of the original model: carried over from the manifest. Where it has none of a row, what the user wrote there stands.
CARRIED = (LICENSE_KEYS, ("language",), ("pipeline_tag",))
# Ours alone.
OURS = ("base_model", "base_model_relation", "library_name", "tags")
_OUR_TAG = re.compile(r"pqweights|quantized|mlx|vllm|compressed-tensors|torchao|bf16|[1-9]-bit")


def make_facts(
    model: Mapping[str, Any], base_model: str | None, library: str | None, tags: Sequence[str], old: OldCard
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The front matter, the keys in it that the manifest gave, and what in it is the user's own.

    model: Manifest.model. tags: ours; those that the user added stay.
    """
    facts: dict[str, Any] = {}
    for row in CARRIED:
        facts |= {key: model[key] for key in row if key in model}
    carried = list(facts)
    foreign = own_keys(old)
    own_tags = foreign.pop("tags", [])
    for row in CARRIED:
        if any(key in facts for key in row):
            foreign = {key: value for key, value in foreign.items() if key not in row}
    if base_model is not None:
        facts |= {"base_model": base_model, "base_model_relation": "quantized"}
    if library is not None:
        facts["library_name"] = library
    facts["tags"] = [*tags, *own_tags]
    return facts | foreign, carried, foreign | ({"tags": own_tags} if own_tags else {})


def own_keys(card: OldCard) -> dict[str, Any]:
    """What the user put into the front matter; of the tags those that are not ours."""
    own = {key: value for key, value in card.facts.items() if key not in (*OURS, *card.written)}
    tags = card.facts.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    tags = list(dict.fromkeys(tag for tag in tags if not _OUR_TAG.fullmatch(tag)))
    return own | ({"tags": tags} if tags else {})


def known_base_model(model: Mapping[str, Any], asked: str | None, old: OldCard) -> str | None:
    """The manifest's, else the one that was asked for, else that of the old card."""
    former = old.facts.get("base_model")
    former = former[0] if isinstance(former, list) and len(former) == 1 else former
    for each in (model.get("id"), asked, former):
        if isinstance(each, str) and is_repository_id(each, namespace=False):
            return each
    return None


def to_yaml(facts: Mapping[str, Any]) -> str:
    """Between its two lines of dashes."""
    text = yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True, width=1000)
    if len(text.splitlines()) != text.count("\n"):  # separators of lines that only Unicode has
        text = yaml.safe_dump(dict(facts), sort_keys=False, width=1000)
    return f"---\n{text}---\n"
