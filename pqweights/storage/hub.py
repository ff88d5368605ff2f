"""The Hugging Face Hub: requests of the official client (huggingface_hub 2.4), and one line for those that fail.

The official client sends some requests again, and would wait for an hour if the Hub asks for that. So its requests are
made through `Hub.call`: lost connections, replies that are cut short, 429 with Retry-After and errors of the server.

All users of the official client in a process share its HTTP session. Two hooks are put into it, which do nothing but
for requests of ours: they limit the time of those that the official client does not, so that no stalled reply is
awaited forever, and leave temporary refusals to `Hub.call`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from pqweights.checkpoint.ahead import Stop
from pqweights.common.options import Tell
from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage import requests
from pqweights.storage.requests import (
    TEMPORARY_STATUSES,
    TIMEOUT_SECONDS,
    Result,
    Truncated,
    reason,
    repeated,
    status_and_code,
)

FIRST_ATTEMPTS = 3  # until the Hub has answered once
LONGEST_WAIT_SECONDS = 120.0  # if the Hub asks for more, the user decides whether to wait
# What a request has for a timeout that nobody has set, and what it gets: a commit of many files takes long.
UNLIMITED: dict[str, float | None] = {"connect": None, "read": None, "write": None, "pool": None}
TIMEOUTS = dict.fromkeys(UNLIMITED, 300.0) | {"connect": TIMEOUT_SECONDS}

LOG_IN = "log in with `hf auth login`, or pass `token`"
TOKEN = re.compile(r"hf_[A-Za-z0-9_-]{4,}")
# The user and password in a URL, and everything after its question mark, which may be a signature.
CREDENTIALS = re.compile(r"(https?://)[^\s/@'\"]+@")
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")


def load_client() -> Any:
    """Import the official client: when it is first used, because that takes half as long as most commands run."""
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


class Hub:
    """Requests with one token.

    client: the official client
    api: its HfApi with the token
    token: None for the one that the user logged in with
    endpoint: the address of the Hub, without credentials
    """

    def __init__(self, token: str | None = None, tell: Tell | None = None) -> None:
        """Load the official client.

        token: by default the one that the user logged in with, or that HF_TOKEN holds
        tell: called with a line about every wait

        Raises HubError if the token cannot be one, or HF_ENDPOINT is not an address.
        """
        if token := token or None:
            token = token.strip()
            if not (token.isascii() and token.isprintable() and token):
                raise HubError("`token`: expected printable ASCII characters; copy the token again")
        self.client, self.token, self.tell = load_client(), token, tell or (lambda line: None)
        self.api: Any = self.client.HfApi(token=token)
        self.endpoint = self.clean(str(self.api.endpoint))
        self._has_answered = False
        from httpx2 import InvalidURL  # the HTTP library of the official client

        try:
            self.client.utils.get_session()
        except (ValueError, InvalidURL) as error:
            raise HubError(f"HF_ENDPOINT: not the address of a Hub: {self.clean(str(error))}") from None

    def __reduce__(self) -> tuple[type[Hub], tuple[str | None]]:
        return Hub, (self.token,)

    @property
    def is_offline(self) -> bool:
        """Whether the user has switched the Hub off."""
        return bool(self.client.constants.is_offline_mode())

    def clean(self, text: str) -> str:
        """Return a text of the client or the server on one line, without tokens and without signatures in URLs."""
        token = self.token or self.client.get_token()
        if token:
            text = text.replace(token, "hf_***")
        return " ".join(QUERY.sub(r"\1", CREDENTIALS.sub(r"\1", TOKEN.sub("hf_***", text))).split())

    def call(
        self, repository: str, request: Callable[[], Result], *, about: str = "", stop: Stop = lambda: False
    ) -> Result:
        """Send a request, again if that may help, and return its result.

        about: what it is about, for messages; follows the name of the repository
        stop: asked while waiting

        Raises HubError, TransferStopped. Errors of the disk stay what they are.
        """
        from httpx2 import HTTPError

        errors, what = self.client.errors, repository + about

        def explained(error: Exception) -> Exception:
            kinds = (HTTPError, Truncated, errors.OfflineModeIsEnabled, errors.LocalTokenNotFoundError)
            return self._explained(error, repository, what) if isinstance(error, kinds) else error  # of the disk

        def waiting(error: Exception, seconds: float, attempt: int) -> bool:
            status, _ = status_and_code(error)
            most = requests.ATTEMPTS if self._has_answered else FIRST_ATTEMPTS
            if attempt >= most or seconds > LONGEST_WAIT_SECONDS:
                return False
            problem = f"the Hub answers {status}" if status else f"the connection failed ({type(error).__name__})"
            self.tell(f"{what}: {problem}; trying again in {seconds:.0f} s ({attempt} of {most - 1})")
            return True

        def send() -> Result:
            return self._send(request, what)

        result = repeated(send, explained, wanted=self._wait_that_is_wanted, waiting=waiting, stop=stop)
        self._has_answered = True
        return result

    def _send(self, request: Callable[[], Result], what: str) -> Result:
        """Send a request with the hooks of this module."""
        from httpx2 import HTTPError

        _hook(self.client.utils.get_session())
        ours = _client.set(self.client)
        try:
            return request()
        except (HTTPError, OSError):
            raise
        except (ValueError, KeyError, TypeError) as error:  # the client cannot read the answer
            detail = f"{type(error).__name__}: {self.clean(str(error))[:120]}"
            raise HubError(f"{what}: {self.endpoint} does not respond like a Hub ({detail})") from None
        finally:
            _client.reset(ours)

    def _wait_that_is_wanted(self, error: Exception) -> float | None:
        """Return the seconds that the Hub asks to wait, in either of its headers; None if it does not ask."""
        response = getattr(error, "response", None)
        if response is None:
            return None
        self._has_answered = True
        try:
            return max(0.0, float(response.headers.get("Retry-After", "")))
        except ValueError:  # no such header, or a date, which the Hub does not send
            limits = self.client.utils.parse_ratelimit_headers(response.headers)
        return float(limits.reset_in_seconds) if limits is not None and limits.remaining == 0 else None

    def _explained(self, error: Exception, repository: str, what: str) -> HubError:
        """Return one line: what failed, why, and what to do."""
        wanted, (status, _) = self._wait_that_is_wanted(error), status_and_code(error)
        said = str(error)
        if status:
            said = getattr(error, "server_message", None) or said.partition("\n\n")[2]
        why = reason(
            error,
            said=self.clean(said)[:200].rstrip("."),
            service="the Hub",
            at=f" at {self.endpoint}",
            page=f"{self.endpoint}/{repository}",
            credentials=LOG_IN,
            permission=f"the token does not permit this: use one that does: {LOG_IN}",
            wait="" if wanted is None else f" for {wanted:.0f} s",
            limit=f", or {LOG_IN} for a higher limit,",
        )
        return (HubUnavailableError if not status or status >= 500 else HubError)(f"{what}: {why}")


# Set while a request of ours is under way in this thread.
_client: ContextVar[Any] = ContextVar("pqweights_official_client", default=None)


def _hook(session: Any) -> None:
    """Put our hooks into a session of the official client, once."""
    hooks = session.event_hooks
    if _limit not in hooks["request"]:
        session.event_hooks = {
            "request": [*hooks["request"], _limit],
            "response": [*hooks["response"], _leave_to_caller],
        }


def _limit(request: Any) -> None:
    """Limit how long a request of ours may take, if the official client does not."""
    if _client.get() is not None and request.extensions.get("timeout") == UNLIMITED:
        request.extensions["timeout"] = dict(TIMEOUTS)


def _leave_to_caller(response: Any) -> None:
    """Raise the error of a temporary refusal, which the official client might wait for without a limit."""
    client = _client.get()
    if client is not None and response.status_code in TEMPORARY_STATUSES:
        response.read()  # the message of the server, which the exception holds
        client.utils.hf_raise_for_status(response)
