"""The options of the model card and of a push."""

from __future__ import annotations

from typing import Any

from pqweights.common import options as checks
from pqweights.common.options import MOST_THREADS, Checked, option, options
from pqweights.common.threads import Progress, no_progress
from pqweights.errors import OptionError


def model_id(name: str, value: Any, *, namespace: bool = False) -> str:
    """Take the id of a repository on the Hub. namespace: whether it must name an organization or a user"""
    from pqweights.storage.addresses import is_repository_id

    if not is_repository_id(checks.text(name, value), namespace=namespace):
        raise OptionError(f"`{name}`: expected ORG/NAME, a repository on the Hub, found {value[:100]!a}")
    return str(value)


@options
class PublishOptions(Checked):
    """What is asked of a card and of a push.

    base_model: the original on the Hub, if the manifest names none
    repository: that of the commands in the card, which may also be a folder; by default that of the earlier card
    revision: the branch that the card names; by default that of the old card if it was for the same repository, or main
    private: create the repository as private; one that exists must be private
    message: the title of the commit
    dry_run: say what would be pushed, and change nothing
    verifying, comparing, progress: called while the folder is verified, compared with the repository, and sent
    """

    base_model: str | None = option(model_id, default=None)
    repository: str | None = None
    revision: str | None = None
    private: bool = False
    message: str | None = None
    dry_run: bool = False
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    verifying: Progress = option(checks.anything, default=no_progress)
    comparing: Progress = option(checks.anything, default=no_progress)
    progress: Progress = option(checks.anything, default=no_progress)
