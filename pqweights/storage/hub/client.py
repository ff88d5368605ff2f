"""The Hub: requests that are sent again after temporary failures, and what the Hub says of repositories and the user.

The official client retries few requests and does not check the hash of what it fetched. So this package does: here,
lost connections, replies that are cut short, 429 with Retry-After and errors of the server are retried; transfers.py
checks files against the hash that the Hub lists. Every refusal becomes a HubError, one line without the token
(refusals.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from pqweights.errors import HubError
from pqweights.storage.hub.official import load_official_client
from pqweights.storage.hub.refusals import Failure, Refusals
from pqweights.storage.hub.repository import RemoteFile, Repository
from pqweights.storage.hub.session import TIMEOUT_SECONDS, Traffic, counted_call
from pqweights.storage.remote.attempts import Stop, attempted

ATTEMPTS = 6
FIRST_ATTEMPTS = 3  # until the Hub has answered once
FIRST_WAIT_SECONDS = 1.0  # doubled after each attempt
LONGEST_WAIT_SECONDS = 120.0  # if the Hub asks for more, the user decides whether to wait
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Result = TypeVar("Result")
Tell = Callable[[str], None]  # called with a line for the user: what is being waited for
Show = Callable[[int], None]  # called with the number of bytes transferred since the last call


class Hub:
    """Requests with one token.

    official: the modules of the official client
    api: its HfApi with the token
    token: None for the one that the user logged in with
    """

    def __init__(self, token: str | None = None, tell: Tell = lambda line: None) -> None:
        """Load the official client.

        token: by default the one that the user logged in with, or that HF_TOKEN holds
        tell: called with a line about every wait

        Raises HubError if the token cannot be one, or HF_ENDPOINT is not an address.
        """
        if token is not None:
            token = token.strip()
            if not (token.isascii() and token.isprintable() and token):
                raise HubError("`token`: expected printable ASCII characters; copy the token again")
        self.official = load_official_client()
        self.token = token
        self.api: Any = self.official.library.HfApi(token=token)
        self.refusals = Refusals(self.official, token, str(self.api.endpoint))
        self.tell = tell
        self._traffic = Traffic()
        try:
            self.official.utils.get_session()
        except (ValueError, self.official.http.InvalidURL) as error:
            raise HubError(f"HF_ENDPOINT: not the address of a Hub: {self.clean(str(error))}") from None

    def __reduce__(self) -> tuple[type[Hub], tuple[str | None]]:
        return Hub, (self.token,)

    @property
    def requests(self) -> int:
        """How many requests were answered so far."""
        return self._traffic.requests

    @property
    def bytes(self) -> int:
        """How many bytes came back so far."""
        return self._traffic.bytes

    @property
    def endpoint(self) -> str:
        """The address of the Hub."""
        return self.refusals.endpoint

    @property
    def is_offline(self) -> bool:
        """Whether the user has switched the Hub off."""
        return bool(self.official.constants.is_offline_mode())

    def clean(self, text: str) -> str:
        """Return a text of the client or the server on one line, without tokens and without signatures in URLs."""
        return self.refusals.clean(text)

    def log_in(self) -> str:
        """Return the user name of the token, before anything is sent.

        Raises HubError if there is no token, or if it is not valid.
        """
        return str(self.call("login", lambda: self.api.whoami())["name"])

    def exists(self, repository: str) -> bool:
        """Return whether there is a repository that the user can see. Raises HubError."""
        return bool(self.call(repository, lambda: self.api.repo_exists(repository)))

    def repository(self, id: str, revision: str | None = None) -> Repository:
        """Return what a repository holds at a branch, tag or commit, by default the branch main.

        Raises HubError.
        """
        try:
            self.official.utils.validate_repo_id(id)
        except self.official.errors.HFValidationError as error:
            raise HubError(f"{id}: not the name of a repository: {self.clean(str(error))}") from None
        info = self.call(
            id,
            lambda: self.api.model_info(id, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS),
            about=f" at revision {revision}" if revision else "",
        )
        listed = [_remote_file(id, sibling) for sibling in info.siblings or ()]
        if not HASH.fullmatch(str(info.sha)):
            raise HubError(f"{id}: the Hub does not say which commit this is")
        files = {file.name: file for file in listed}
        return Repository(
            id=str(info.id), commit=str(info.sha), files=dict(sorted(files.items())), private=bool(info.private)
        )

    def call(
        self,
        repository: str,
        request: Callable[[], Result],
        *,
        about: str = "",
        stop: Stop = lambda: False,
        attempts: int | None = None,
        how_far: Callable[[], int] = lambda: 0,
    ) -> Result:
        """Send a request, again if that may help, and return its result.

        about: what it is about, for messages; follows the name of the repository
        stop: asked while waiting
        attempts: how often it is sent at most; by default less often until the Hub has answered once
        how_far: returns how far the transfer came; the attempts are counted from zero when it grows

        Raises HubError, TransferStopped.
        """
        failures = _Failures(self, repository=repository, what=repository + about, attempts=attempts)

        def send() -> Result:
            with counted_call(self.official, self._traffic):
                try:
                    return request()
                except (self.official.http.HTTPError, OSError):
                    raise
                except (ValueError, KeyError, TypeError) as error:  # the client cannot read the answer
                    detail = f"{type(error).__name__}: {self.clean(str(error))[:120]}"
                    raise HubError(f"{failures.what}: {self.endpoint} does not respond like a Hub ({detail})") from None

        return attempted(send, failures, first_wait=FIRST_WAIT_SECONDS, stop=stop, how_far=how_far)


class _Failures:
    """Failures of one request, for `attempted`."""

    def __init__(self, hub: Hub, *, repository: str, what: str, attempts: int | None) -> None:
        self.kinds: tuple[type[Exception], ...] = (hub.official.http.HTTPError, OSError)
        self.what = what
        self._hub, self._repository, self._attempts = hub, repository, attempts

    def pause(self, error: Exception, wait: float, attempt: int) -> float | None:
        """Return the seconds to wait, see Failures; the user is told of them."""
        most = self._attempts or (ATTEMPTS if self._hub.requests else FIRST_ATTEMPTS)
        pause = self._hub.refusals.pause(error, wait)
        if pause is None or attempt >= most or pause > LONGEST_WAIT_SECONDS:
            return None
        again = f"trying again in {pause:.0f} s ({attempt} of {most - 1})"
        self._hub.tell(f"{self.what}: {self._hub.refusals.summary(error)}; {again}")
        return pause

    def explained(self, error: Exception, attempt: int) -> Exception:
        """Return what to tell the user, see Failures. Errors of the disk stay what they are."""
        refusals = self._hub.refusals
        if not refusals.concerns_hub(error) and refusals.pause(error, 0) is None:
            return error
        reached = self._hub.requests > 0
        return refusals.explain(
            Failure(repository=self._repository, what=self.what, error=error, attempts=attempt, reached=reached)
        )


def _remote_file(repository: str, listed: Any) -> RemoteFile:
    """Return an entry of the Hub's list of files.

    Raises HubError if it lacks a size or a hash.
    """
    file = RemoteFile(
        name=listed.rfilename,
        byte_count=listed.size,
        sha256=None if listed.lfs is None else listed.lfs.sha256,
        blob_id=listed.blob_id,
    )
    if not isinstance(file.byte_count, int) or file.byte_count < 0 or not HASH.fullmatch(str(file.content_hash)):
        raise HubError(f"{repository}: {file.name!a}: the Hub does not list its size and its hash")
    return file
