"""Failed requests: whether to send one again, and what to tell the user, in one line without the token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage.hub.official import OfficialClient

# Statuses of a server that may answer the same request later.
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
LOG_IN = "log in with `hf auth login`, or pass `token`"
TOKEN = re.compile(r"hf_[A-Za-z0-9_-]{4,}")
# The user and password in a URL, and everything after its question mark, which may be a signature.
CREDENTIALS = re.compile(r"(https?://)[^\s/@'\"]+@")
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that failed and is not sent again.

    repository: ORG/NAME
    what: the repository, and what the request was about
    error: what the official client raised
    attempts: how often the request was sent
    reached: whether the Hub has answered any request so far
    """

    repository: str
    what: str
    error: Exception
    attempts: int
    reached: bool

    @property
    def response(self) -> Any:
        """The reply of the Hub; None if there was none."""
        return getattr(self.error, "response", None)


class Refusals:
    """Reads the errors of the official client.

    endpoint: the address of the Hub, without credentials
    """

    def __init__(self, official: OfficialClient, token: str | None, address: str) -> None:
        self._official = official
        self._token = token
        self.endpoint = self.clean(address)

    def clean(self, text: str) -> str:
        """Return a text of the client or the server on one line, without tokens and without signatures in URLs."""
        token = self._token or self._official.library.get_token()
        if token:
            text = text.replace(token, "hf_***")
        return " ".join(QUERY.sub(r"\1", CREDENTIALS.sub(r"\1", TOKEN.sub("hf_***", text))).split())

    def concerns_hub(self, error: Exception) -> bool:
        """Return whether an error concerns the Hub or the way to it. Others are of the disk."""
        errors = self._official.errors
        kinds = (self._official.http.HTTPError, errors.OfflineModeIsEnabled, errors.LocalTokenNotFoundError)
        return isinstance(error, kinds)

    def pause(self, error: Exception, wait: float) -> float | None:
        """Return the seconds after which the request may succeed, or None if it never will.

        wait: the seconds to wait if the Hub does not say how many
        """
        if isinstance(error, self._official.errors.OfflineModeIsEnabled):
            return None
        response = getattr(error, "response", None)
        if response is not None:
            if response.status_code not in TEMPORARY:
                return None
            requested = self._requested_pause(response.headers)
            return wait if requested is None else requested
        return wait if isinstance(error, self._official.http.TransportError) else None

    def _requested_pause(self, headers: Any) -> float | None:
        """The seconds that the Hub asks to wait, in either of its headers; None if it does not ask."""
        try:
            return max(0.0, float(headers.get("Retry-After", "")))
        except ValueError:  # no such header, or a date, which the Hub does not send
            limits = self._official.utils.parse_ratelimit_headers(headers)
        return float(limits.reset_in_seconds) if limits is not None and limits.remaining == 0 else None

    def summary(self, error: Exception) -> str:
        """Return a few words on an error after which the request is sent again."""
        response = getattr(error, "response", None)
        if response is not None:
            return f"the Hub answers {response.status_code}"
        return f"the connection failed ({type(error).__name__})"

    def explain(self, failure: Failure) -> HubError:
        """Return one line: what failed, why, and what to do."""
        reason = self._reason_of_kind(failure) or self._reason_of_status(failure) or self._reason_of_connection(failure)
        errors = self._official.errors
        missing_token = isinstance(failure.error, errors.LocalTokenNotFoundError)
        silent = failure.response is None or failure.response.status_code >= 500
        kind = HubUnavailableError if silent or isinstance(failure.error, errors.OfflineModeIsEnabled) else HubError
        return kind(reason if missing_token else f"{failure.what}: {reason}")

    def _reason_of_kind(self, failure: Failure) -> str | None:
        """The reason, if the official client has an exception of its own for it."""
        errors = self._official.errors
        page = f"{self.endpoint}/{failure.repository}"
        # An earlier class may be a subclass of a later one.
        reasons = (
            (errors.LocalTokenNotFoundError, f"pushing needs a token with write access: {LOG_IN}"),
            (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE switches the Hub off; unset it"),
            (
                errors.GatedRepoError,
                f"the repository is gated: accept its conditions at {page}, then log in to that account with "
                "`hf auth login`, or pass its token with `token`",
            ),
            (errors.DisabledRepoError, "the Hub has disabled access to it"),
            (errors.RevisionNotFoundError, f"no such branch, tag or commit; see {page}/tree/main"),
            (
                errors.RepositoryNotFoundError,
                f"neither a local folder nor a repository on {self.endpoint} that you can see: check the name; if it "
                f"is private, {LOG_IN}",
            ),
            (errors.EntryNotFoundError, "is not in the repository"),
        )
        return next((reason for kind, reason in reasons if isinstance(failure.error, kind)), None)

    def _reason_of_status(self, failure: Failure) -> str | None:
        """The reason, if the Hub answered with a status."""
        if failure.response is None:
            return None
        status = failure.response.status_code
        if status >= 500:
            return f"the Hub failed {failure.attempts} times ({status}); run the same command again later"
        if status == 429:
            return self._reason_of_limit(failure)
        said = self._server_message(failure.error)
        reasons = {
            401: f"the Hub does not accept the token: {LOG_IN}",
            403: f"the token does not permit this: {said}; use one that does: {LOG_IN}",
            409: f"somebody else is changing it: {said}; run the same command again",
            412: "somebody else has changed it in between; run the same command again",
        }
        return reasons.get(status, f"the Hub refuses the request ({status}): {said}")

    def _reason_of_limit(self, failure: Failure) -> str:
        requested = self._requested_pause(failure.response.headers)
        duration = "" if requested is None else f" for {requested:.0f} s"
        return (
            f"too many requests: the Hub asks to wait{duration} (429); wait, {LOG_IN} for a higher limit, and run the "
            "same command again"
        )

    def _reason_of_connection(self, failure: Failure) -> str:
        problem = f"the connection to {self.endpoint} keeps breaking"
        if not failure.reached:
            problem = f"{self.endpoint} cannot be reached"
        detail = f"{type(failure.error).__name__}: {self.clean(str(failure.error))[:120]}"
        return f"{problem} ({detail}); check the network and run the same command again"

    def _server_message(self, error: Exception) -> str:
        said = getattr(error, "server_message", None) or str(error).partition("\n\n")[2] or str(error)
        return self.clean(said)[:200].rstrip(".")
