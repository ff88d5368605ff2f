"""The form of a repository's name on the Hub (huggingface_hub.utils.validate_repo_id)."""

from __future__ import annotations

import re

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
MAX_LENGTH = 96


def is_repository_id(text: str, namespace: bool = True) -> bool:
    """Return whether a text can name a repository.

    namespace: whether to accept only ORG/NAME, not the bare NAME that some of the oldest models have
    """
    return (
        _ID.fullmatch(text) is not None
        and len(text) <= MAX_LENGTH
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
        and ("/" in text or not namespace)
    )
