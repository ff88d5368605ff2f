"""Whether a tokenizer.json has the structure that the rest of the package relies on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.checkpoint.storage import Storage
from pqweights.errors import SourceError
from pqweights.gguf.tokens import FAST, read_json

# The parts that process a text, and where each lists its steps if it has several.
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
SCHEMES = (None, "first", "always", "never")


def read_tokenizer(storage: Storage) -> dict[str, Any]:
    """Return a tokenizer.json.

    Raises SourceError if a part of it is not of the kind that the tokenizers library writes.
    """
    tokenizer = read_json(storage, FAST)
    _expect_object(tokenizer.get("model") or {}, "model")
    added = tokenizer.get("added_tokens") or []
    _expect_list(added, "added_tokens")
    for entry in added:
        _expect_object(entry, "each of its added_tokens")
        if not isinstance(entry.get("content"), str):
            raise SourceError(f"{FAST}: expected the text of an added token, found {entry.get('content')!r}")
    for part, steps in STEPS.items():
        _check_steps(tokenizer.get(part) or {}, part, steps)
    return tokenizer


def _check_steps(found: Any, part: str, steps: str) -> None:
    """Raise SourceError unless a part of the pipeline is an object, or holds a list of them."""
    _expect_object(found, part)
    several = found.get(steps, [found])
    _expect_list(several, steps)
    for step in several:
        _expect_object(step, f"each of its {steps}")
        _expect_object(step.get("pattern") or {}, "the pattern of a step")
        if step.get("prepend_scheme") not in SCHEMES:
            raise SourceError(f"{FAST}: unknown prepend_scheme {step['prepend_scheme']!r:.80}")


def check_merges(merges: Any) -> list[tuple[str, str]]:
    """Return the pairs that a model joins, in order.

    Raises SourceError if they are not pairs of texts.
    """
    _expect_list(merges, "merges")
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else pair for pair in merges]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise SourceError(f"{FAST}: expected two texts as each of its merges, found {pair!r:.80}")
    return [(left, right) for left, right in pairs]


def _expect_object(found: Any, name: str) -> None:
    if not isinstance(found, Mapping):
        raise SourceError(f"{FAST}: expected an object as {name}, found {found!r:.80}")


def _expect_list(found: Any, name: str) -> None:
    if not isinstance(found, list):
        raise SourceError(f"{FAST}: expected a list as {name}, found {found!r:.80}")
