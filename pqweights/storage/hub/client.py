"""The Hub: requests of the official client (huggingface_hub 2.4), and one line for those that fail in the end.

The official client sends few requests again. So this package does: lost connections, replies that are cut short, 429
with Retry-After and errors of the server. Every refusal becomes a HubError, one line without the token.

All users of the official client in a process share its HTTP session. Two hooks are put into it, which do nothing but
for requests of ours: they limit the time of those that the official client does not, so that no stalled reply is
awaited forever, and leave temporary refusals to `Hub.call`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage.addresses import is_inside
from pqweights.storage.hub.repository import RemoteFile, Repository
from pqweights.storage.remote.failures import Stop, TransferStopped

ATTEMPTS = 6
FIRST_ATTEMPTS = 3  # until the Hub has answered once
FIRST_WAIT_SECONDS = 1.0  # doubled after each attempt
LONGEST_WAIT_SECONDS = 120.0  # if the Hub asks for more, the user decides whether to wait
TIMEOUT_SECONDS = 30.0
COMMIT_TIMEOUT_SECONDS = 300.0  # a commit of many files takes long
# What a request has for a timeout that nobody has set, and what it gets.
UNLIMITED: dict[str, float | None] = {"connect": None, "read": None, "write": None, "pool": None}
TIMEOUTS = dict.fromkeys(UNLIMITED, COMMIT_TIMEOUT_SECONDS) | {"connect": TIMEOUT_SECONDS}

# Statuses of a server that may answer the same request later.
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
LOG_IN = "log in with `hf auth login`, or pass `token`"
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
TOKEN = re.compile(r"hf_[A-Za-z0-9_-]{4,}")
# The user and password in a URL, and everything after its question mark, which may be a signature.
CREDENTIALS = re.compile(r"(https?://)[^\s/@'\"]+@")
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")

Result = TypeVar("Result")
Tell = Callable[[str], None]  # called with a line for the user: what is being waited for
Show = Callable[[int], None]  # called with the number of bytes transferred since the last call


class OfficialClient(NamedTuple):
    """The modules of the official client, which have no types here, and the HTTP library that it uses."""

    library: Any
    utils: Any
    errors: Any
    constants: Any
    http: Any


def load_official_client() -> OfficialClient:
    """Import the official client: when it is first used, because that takes half as long as most commands run."""
    names = ("huggingface_hub", "huggingface_hub.utils", "huggingface_hub.errors", "huggingface_hub.constants")
    return OfficialClient(*map(importlib.import_module, (*names, "httpx2")))


class Hub:
    """Requests with one token.

    official: the modules of the official client
    api: its HfApi with the token
    token: None for the one that the user logged in with
    endpoint: the address of the Hub, without credentials
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
        self.endpoint = self.clean(str(self.api.endpoint))
        self.tell = tell
        self._has_answered = False
        try:
            self.official.utils.get_session()
        except (ValueError, self.official.http.InvalidURL) as error:
            raise HubError(f"HF_ENDPOINT: not the address of a Hub: {self.clean(str(error))}") from None

    def __reduce__(self) -> tuple[type[Hub], tuple[str | None]]:
        return Hub, (self.token,)

    @property
    def is_offline(self) -> bool:
        """Whether the user has switched the Hub off."""
        return bool(self.official.constants.is_offline_mode())

    def clean(self, text: str) -> str:
        """Return a text of the client or the server on one line, without tokens and without signatures in URLs."""
        token = self.token or self.official.library.get_token()
        if token:
            text = text.replace(token, "hf_***")
        return " ".join(QUERY.sub(r"\1", CREDENTIALS.sub(r"\1", TOKEN.sub("hf_***", text))).split())

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
        if self.is_offline:
            return self._in_cache(id, revision)
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

    def _in_cache(self, id: str, revision: str | None) -> Repository:
        """Return what the cache says of a repository. Raises HubError if it does not have it.

        The list of its files is in the cache if somebody has fetched all of them at once; else those count that are
        there, whose blobs are called by their hashes.
        """
        folder = Path(str(self.official.constants.HF_HUB_CACHE)) / f"models--{id.replace('/', '--')}"
        wanted = revision or "main"
        if not HASH.fullmatch(wanted):
            reference = folder / "refs" / wanted
            wanted = reference.read_text().strip() if is_inside(wanted) and reference.is_file() else ""
        snapshot = folder / "snapshots" / wanted
        if not HASH.fullmatch(wanted) or not snapshot.is_dir():
            raise HubError(
                f"{id}{f' at revision {revision}' if revision else ''}: not in the cache "
                f"({folder.parent}), and HF_HUB_OFFLINE switches the Hub off; unset it"
            )
        found = {
            file.name: file for file in (_cached_file(path, snapshot) for path in snapshot.rglob("*") if path.is_file())
        }
        with contextlib.suppress(self.official.errors.CachedRepoTreeNotFoundError):
            for file in self.official.library.get_cached_repo_tree(id, revision=wanted):
                there = found.get(file.path)
                if there is None or there.byte_count != file.size:
                    found[file.path] = RemoteFile(
                        name=file.path, byte_count=file.size, sha256=None, blob_id=file.blob_id
                    )
        return Repository(id=id, commit=wanted, files=dict(sorted(found.items())))

    def call(
        self,
        repository: str,
        request: Callable[[], Result],
        *,
        about: str = "",
        stop: Stop = lambda: False,
        attempts: int | None = None,
    ) -> Result:
        """Send a request, again if that may help, and return its result.

        about: what it is about, for messages; follows the name of the repository
        stop: asked while waiting
        attempts: how often it is sent at most; by default less often until the Hub has answered once

        Raises HubError, TransferStopped. Errors of the disk stay what they are.
        """
        what = repository + about
        for attempt in itertools.count(1):
            try:
                result = self._send(request, what)
            except (self.official.http.HTTPError, OSError) as error:
                self._has_answered |= getattr(error, "response", None) is not None
                pause = self._pause(error, FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
                most = attempts or (ATTEMPTS if self._has_answered else FIRST_ATTEMPTS)
                if pause is None or attempt >= most or pause > LONGEST_WAIT_SECONDS:
                    if pause is None and not self._concerns_hub(error):
                        raise
                    raise self._explained(error, repository, what=what, attempts=attempt) from None
                again = f"trying again in {pause:.0f} s ({attempt} of {most - 1})"
                self.tell(f"{what}: {_summary(error)}; {again}")
                _wait(pause, stop)
            else:
                self._has_answered = True
                break
        return result

    def _send(self, request: Callable[[], Result], what: str) -> Result:
        """Send a request with the hooks of this module."""
        _hook(self.official.utils.get_session())
        ours = _official.set(self.official)
        try:
            return request()
        except (self.official.http.HTTPError, OSError):
            raise
        except (ValueError, KeyError, TypeError) as error:  # the client cannot read the answer
            detail = f"{type(error).__name__}: {self.clean(str(error))[:120]}"
            raise HubError(f"{what}: {self.endpoint} does not respond like a Hub ({detail})") from None
        finally:
            _official.reset(ours)

    def _concerns_hub(self, error: Exception) -> bool:
        """Return whether an error concerns the Hub or the way to it. Others are of the disk."""
        errors = self.official.errors
        kinds = (self.official.http.HTTPError, errors.OfflineModeIsEnabled, errors.LocalTokenNotFoundError)
        return isinstance(error, kinds)

    def _pause(self, error: Exception, wait: float) -> float | None:
        """Return the seconds after which the request may succeed, or None if it never will.

        wait: the seconds to wait if the Hub does not say how many
        """
        if isinstance(error, self.official.errors.OfflineModeIsEnabled):
            return None
        response = getattr(error, "response", None)
        if response is None:
            return wait if isinstance(error, self.official.http.TransportError) else None
        if response.status_code not in TEMPORARY:
            return None
        requested = self._requested_pause(response.headers)
        return wait if requested is None else requested

    def _requested_pause(self, headers: Any) -> float | None:
        """The seconds that the Hub asks to wait, in either of its headers; None if it does not ask."""
        try:
            return max(0.0, float(headers.get("Retry-After", "")))
        except ValueError:  # no such header, or a date, which the Hub does not send
            limits = self.official.utils.parse_ratelimit_headers(headers)
        return float(limits.reset_in_seconds) if limits is not None and limits.remaining == 0 else None

    def _explained(self, error: Exception, repository: str, *, what: str, attempts: int) -> HubError:
        """Return one line: what failed, why, and what to do."""
        errors, response = self.official.errors, getattr(error, "response", None)
        reason = self._reason_of_class(error, repository)
        if reason is None and response is not None:
            reason = self._reason_of_status(error, response, attempts)
        elif reason is None:
            problem = f"the connection to {self.endpoint} keeps breaking"
            if not self._has_answered:
                problem = f"{self.endpoint} cannot be reached"
            detail = f"{type(error).__name__}: {self.clean(str(error))[:120]}"
            reason = f"{problem} ({detail}); check the network and run the same command again"
        is_silent = response is None or response.status_code >= 500
        error_class = HubUnavailableError if is_silent else HubError
        return error_class(reason if isinstance(error, errors.LocalTokenNotFoundError) else f"{what}: {reason}")

    def _reason_of_class(self, error: Exception, repository: str) -> str | None:
        """The reason, if the official client has an exception of its own for it."""
        errors = self.official.errors
        page = f"{self.endpoint}/{repository}"
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
        return next((reason for refusal, reason in reasons if isinstance(error, refusal)), None)

    def _reason_of_status(self, error: Exception, response: Any, attempts: int) -> str:
        """The reason, if the Hub answered with a status."""
        status = response.status_code
        if status >= 500:
            return f"the Hub failed {attempts} times ({status}); run the same command again later"
        said = getattr(error, "server_message", None) or str(error).partition("\n\n")[2] or str(error)
        said = self.clean(said)[:200].rstrip(".")
        requested = self._requested_pause(response.headers)
        duration = "" if requested is None else f" for {requested:.0f} s"
        reasons = {
            401: f"the Hub does not accept the token: {LOG_IN}",
            403: f"the token does not permit this: {said}; use one that does: {LOG_IN}",
            409: f"somebody else is changing it: {said}; run the same command again",
            412: "somebody else has changed it in between; run the same command again",
            429: f"too many requests: the Hub asks to wait{duration} (429); wait, {LOG_IN} for a higher limit, and run "
            "the same command again",
        }
        return reasons.get(status, f"the Hub refuses the request ({status}): {said}")


def _summary(error: Exception) -> str:
    """Return a few words on an error after which the request is sent again."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the Hub answers {response.status_code}"
    return f"the connection failed ({type(error).__name__})"


def _wait(seconds: float, stop: Stop) -> None:
    """Sleep. Raises TransferStopped once `stop` returns True."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if stop():
            raise TransferStopped
        time.sleep(min(0.1, left))


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


def _cached_file(path: Path, snapshot: Path) -> RemoteFile:
    """Return a file of a snapshot in the cache. It is a link to a blob, which is called by its hash."""
    blob = path.resolve().name if path.is_symlink() else ""
    return RemoteFile(
        name=path.relative_to(snapshot).as_posix(),
        byte_count=path.stat().st_size,
        sha256=blob if re.fullmatch("[0-9a-f]{64}", blob) else None,
        blob_id=blob if re.fullmatch("[0-9a-f]{40}", blob) else None,
    )


# Set while a request of ours is under way in this thread.
_official: ContextVar[OfficialClient | None] = ContextVar("pqweights_official_client", default=None)


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
    if _official.get() is not None and request.extensions.get("timeout") == UNLIMITED:
        request.extensions["timeout"] = dict(TIMEOUTS)


def _leave_to_caller(response: Any) -> None:
    """Raise the error of a temporary refusal, which the official client might wait for without a limit."""
    official = _official.get()
    if official is not None and response.status_code in TEMPORARY:
        response.read()  # the message of the server, which the exception holds
        official.utils.hf_raise_for_status(response)
