"""The options of the model card and of a push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pqweights.common import parameters as checks
from pqweights.common.parameters import Options, option, options
from pqweights.errors import OptionError
from pqweights.planning.options import MAIN_BRANCH, HubOptions, Progress, ThreadsOption


def _model_id(name: str, value: Any, *, namespace: bool = False) -> str:
    """Take the id of a repository on the Hub. namespace: whether it must name an organization or a user"""
    from pqweights.storage.addresses import is_repository_id

    if not is_repository_id(checks.text(name, value), namespace=namespace):
        raise OptionError(f"`{name}`: expected ORG/NAME, a repository on the Hub, found {value[:100]!a}")
    return str(value)


def _ignore(done: int, total: int, name: str) -> None:
    """Show no progress."""


@options
class PublishOptions(Options):
    """What is asked of a model card."""

    base_model: str | None = option(
        "Original model on the Hub to name in the card, if the manifest names none.",
        _model_id,
        default=None,
        metavar="ORG/MODEL",
    )


@options
class CardOptions(PublishOptions):
    """What is asked of the card of a folder; its repository may also be a folder, for the commands in the card."""

    repository: str | None = option(
        "Repository on the Hub to name in the commands of the card.",
        default=None,
        flags=("--repo",),
        metavar="ORG/NAME",
        default_text="that of the earlier card",
    )
    revision: str | None = option(
        "Branch of the repository; by default that of the old card if it was for the same repository, else main.",
        default=None,
        flags=(),
    )


@options
class CardArguments(CardOptions):
    """What the command `card` takes."""

    folder: Path = option(
        "Folder of a master or an export written by pqweights.", kw_only=False, argument=True, metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repository is not None:
            _model_id("repository", self.repository, namespace=True)


@options
class PushOptions(ThreadsOption, PublishOptions):
    """What is asked of a push; the functions are called while the folder is verified, compared and sent."""

    private: bool = option("Create the repository as private; one that exists must be private.", default=False)
    message: str | None = option("Title of the commit.", checks.text, default=None, flags=("--message", "-m"))
    dry_run: bool = option(
        "Say what would be pushed, and change nothing. The folder is checked without a network or a token, too.",
        checks.flag,
        default=False,
    )
    verifying: Progress = option("Called while the folder is verified.", checks.anything, default=_ignore, flags=())
    comparing: Progress = option(
        "Called while files are compared with those on the Hub.", checks.anything, default=_ignore, flags=()
    )
    progress: Progress = option("Called while files are sent.", checks.anything, default=_ignore, flags=())


@options
class PushArguments(PushOptions, HubOptions):
    """What the command `push` takes."""

    folder: Path = option(
        "Master or export that pqweights wrote.", checks.path, kw_only=False, argument=True, metavar="DIR"
    )
    repository: str = option(
        "Repository on the Hub; created if it does not exist.", kw_only=False, argument=True, metavar="ORG/NAME"
    )
    revision: str | None = option(
        "Branch; created if it does not exist.", default=None, metavar="BRANCH", default_text=MAIN_BRANCH
    )
