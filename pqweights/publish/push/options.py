"""The options of a push."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pqweights.rewrite.task import usable_cores

Progress = Callable[[int, int, str], None]  # called with the bytes done, the bytes in all, and a name


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What is asked of a push.

    private: create the repository as private; one that exists must be private
    create_pr: open a pull request against the branch, which must exist, instead of committing to it
    message: the title of the commit
    base_model, adopt: see CardOptions
    dry_run: change nothing, neither on the Hub nor in the folder
    threads: how many threads verify the folder and hash its files
    verifying, hashing, progress: called while the folder is verified, while files are hashed for the Hub, and while
        they are sent
    """

    private: bool = False
    create_pr: bool = False
    message: str | None = None
    base_model: str | None = None
    adopt: bool = False
    dry_run: bool = False
    threads: int = field(default_factory=usable_cores)
    verifying: Progress = lambda done, total, name: None
    hashing: Progress = lambda done, total, name: None
    progress: Progress = lambda done, total, name: None
