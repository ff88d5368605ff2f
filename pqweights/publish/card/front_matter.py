"""The YAML at the top of a card, which the Hub reads.

The format is that of https://huggingface.co/docs/hub/model-cards#model-card-metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pqweights.publish.card.old_card import OldCard
from pqweights.storage.hub.repository import is_repository_id

LICENSE_KEYS = ("license", "license_name", "license_link")
# Keys of the original model, which the manifest carries on. A group that the manifest lacks is left to the user.
CARRIED = (LICENSE_KEYS, ("language",), ("pipeline_tag",))
# Keys that only pqweights writes.
OURS = ("base_model", "base_model_relation", "library_name", "tags")
# The tags that pqweights writes; a bit width may be fractional.
_OUR_TAG = re.compile(r"pqweights|quantized|mlx|vllm|compressed-tensors|torchao|bf16|[0-9]+(?:\.[0-9]+)?-bit")


def make_front_matter(
    model: Mapping[str, Any], old: OldCard, *, base_model: str | None, library: str | None, tags: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the front matter of a card, and which of its keys came from the manifest.

    model: what the manifest says of the original model.
    old: the card that was there, whose own keys and tags are kept.
    base_model: the id of the original on the Hub, if it is known.
    library: library_name, if there is one.
    tags: the tags that pqweights writes.
    """
    carried = {key: model[key] for group in CARRIED for key in group if key in model}
    foreign = own_keys(old)
    own_tags = foreign.pop("tags", [])
    for group in CARRIED:
        if any(key in carried for key in group):
            foreign = {key: value for key, value in foreign.items() if key not in group}
    facts = dict(carried)
    if base_model is not None:
        facts |= {"base_model": base_model, "base_model_relation": "quantized"}
    if library is not None:
        facts["library_name"] = library
    facts["tags"] = [*tags, *own_tags]
    return facts | foreign, list(carried)


def own_keys(card: OldCard) -> dict[str, Any]:
    """Return the keys that the user added to the front matter, with only those tags that pqweights does not write."""
    own = {key: value for key, value in card.facts.items() if key not in (*OURS, *card.written)}
    tags = card.facts.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    tags = list(dict.fromkeys(tag for tag in tags if not _OUR_TAG.fullmatch(tag)))
    return own | ({"tags": tags} if tags else {})


def known_base_model(model: Mapping[str, Any], asked: str | None, old: OldCard) -> str | None:
    """Return the base model that the manifest names, else the one that was asked for, else that of the old card."""
    former = old.facts.get("base_model")
    former = former[0] if isinstance(former, list) and len(former) == 1 else former
    for base_model_id in (model.get("id"), asked, former):
        if isinstance(base_model_id, str) and is_repository_id(base_model_id, namespace=False):
            return base_model_id
    return None


def to_yaml(facts: Mapping[str, Any]) -> str:
    """Return the front matter as YAML between two lines of dashes."""
    text = yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True, width=1000)
    if len(text.splitlines()) != text.count("\n"):  # it contains line separators of Unicode, which YAML must escape
        text = yaml.safe_dump(dict(facts), sort_keys=False, width=1000)
    return f"---\n{text}---\n"
