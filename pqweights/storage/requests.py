"""Requests to the Hub and to object storage: sent again while that may help, and one line for what fails in the end.

The messages of servers and clients may quote tokens, keys, signatures and whole requests. So nothing of them is shown
but the code of the error, and of the Hub what `Hub.clean` leaves.
"""

from __future__ import annotations

import errno
import itertools
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pqweights.checkpoint.ahead import Stop, TransferStopped
from pqweights.checkpoint.file_reader import FileState
from pqweights.errors import SourceError

ATTEMPTS = 6
FIRST_WAIT_SECONDS = 1.0  # doubled after each attempt
TIMEOUT_SECONDS = 30.0
# Statuses and codes of a server that may answer the same request later.
TEMPORARY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_TEMPORARY = (
    *("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "TooManyRequests"),
    *map(str, TEMPORARY_STATUSES),
)
_CODE = re.compile(r"[A-Za-z0-9_.]{1,60}")
# What is said of a failure by the names of its exception's classes, the code of the storage, or the status of the
# reply. The first line that has one of them counts.
_REASONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Truncated",), "{shown}: the file was cut, or the connection fails: run the same command again"),
    (("LocalTokenNotFoundError",), "pushing needs a token with write access: {credentials}"),
    (("OfflineModeIsEnabled",), "HF_HUB_OFFLINE switches the Hub off; unset it"),
    (
        ("GatedRepoError",),
        "the repository is gated: accept its conditions at {page}, then log in to that account with `hf auth login`, "
        "or pass its token with `token`",
    ),
    (("DisabledRepoError",), "the Hub has disabled access to it"),
    (("RevisionNotFoundError",), "no such branch, tag or commit; see {page}/tree/main"),
    (
        ("RepositoryNotFoundError",),
        "neither a local folder nor a repository{at} that you can see: check the name; if it is private, {credentials}",
    ),
    (("EntryNotFoundError",), "is not in the repository"),
    (("NoSuchBucket",), "there is no bucket {bucket}{at}: check its name, or create it"),
    (
        (
            *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestExpired", "SignatureDoesNotMatch"),
            *("TokenRefreshRequired", "401"),
        ),
        "the credentials were refused ({shown}): {credentials}",
    ),
    (
        ("RequestTimeTooSkewed",),
        "the request was refused ({shown}): the clock of this machine is wrong: set it",
    ),
    (("403", "PermissionError"), "access denied ({shown}): {permission}"),
    (
        (
            *("301", "307", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
            *("PermanentRedirect", "TemporaryRedirect"),
        ),
        "the bucket is in another region ({shown}): set AWS_DEFAULT_REGION to that",
    ),
    (
        (
            *("CredentialRetrievalError", "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"),
            *("ProfileNotFound", "RefreshError"),
        ),
        "no credentials found ({shown}): {credentials}",
    ),
    (("409", "412"), "somebody else has changed it in between ({shown}): run the same command again"),
    (
        ("TooManyRequests", "429"),
        "too many requests: {service}{at} asks to wait{wait} ({shown}): wait{limit} and run the same command again",
    ),
    (_TEMPORARY, "{service}{at} is failing ({shown}): run the same command again later"),
    (("ParamValidationError", "status"), "{service}{at} refuses the request ({shown})"),
    (
        ("Exception",),
        "{service}{at} cannot be reached, or does not answer ({shown}): check the network{settings}, and run the same "
        "command again",
    ),
)

Result = TypeVar("Result")


class Truncated(Exception):
    """A reply has fewer or more bytes than were asked for."""


def repeated(
    request: Callable[[], Result],
    explained: Callable[[Exception], Exception],
    *,
    wanted: Callable[[Exception], float | None] = lambda error: None,
    waiting: Callable[[Exception, float, int], bool] = lambda error, seconds, attempt: True,
    stop: Stop = lambda: False,
) -> Result:
    """Send a request until it succeeds, at most ATTEMPTS times.

    explained: returns what is raised for an error with which it ends
    wanted: returns how many seconds the server asks to wait, if it does
    waiting: called with an error, the seconds until the next attempt, and the number of this one; returns whether to
        wait
    stop: asked while waiting

    Raises what `explained` returns, TransferStopped once `stop` returns True.
    """
    for attempt in itertools.count(1):
        try:
            return request()
        except expected_errors() as error:
            stated = wanted(error)
            seconds = FIRST_WAIT_SECONDS * 2 ** (attempt - 1) if stated is None else stated
            if not _may_pass(error) or attempt >= ATTEMPTS or not waiting(error, seconds, attempt):
                raise explained(error) from None
            end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if stop():
                raise TransferStopped
            time.sleep(min(0.1, left))
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """Whether a request may succeed that is sent again; the clients of object storage have done so themselves."""
    if isinstance(error, Truncated):
        return True
    httpx, (status, _) = sys.modules.get("httpx2"), status_and_code(error)
    if httpx is None or not isinstance(error, httpx.HTTPError):
        return False
    return status in TEMPORARY_STATUSES or (not status and isinstance(error, httpx.TransportError))


def read_range(
    client: Any,
    url: str,
    start: int,
    end: int,
    *,
    shown: str,
    check: Callable[[Any], object],
    headers: Mapping[str, str] = {},
) -> tuple[bytes, FileState]:
    """Return the bytes [start, end) of a file by one request, and what the server says that the file is.

    client: of httpx
    shown: what messages call the file
    check: called with the reply; raises the error of one that is one

    Raises what `check` raises, Truncated for other bytes, SourceError if the server sends whole files alone.
    """
    own = {**headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    data = bytearray()
    with client.stream("GET", url, headers=own, timeout=TIMEOUT_SECONDS) as response:
        check(response)
        unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
        span, _, size = rest.partition("/")
        if response.status_code == 200 and response.headers.get("Content-Length") == str(end) and not start:
            unit, span, size = "bytes", f"0-{end - 1}", str(end)  # all of it is a part, too
        elif response.status_code != 206 or unit != "bytes" or not size.isdecimal():
            raise SourceError(
                f"{shown}: the server ignores requests for a part of a file: fetch the file, and give the local one"
            )
        if span != f"{start}-{end - 1}":
            raise Truncated(f"expected bytes {start}-{end - 1}, found {span[:40]} of {size[:20]}")
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > end - start:
                break
        version = next((response.headers[key] for key in ("ETag", "Last-Modified") if key in response.headers), size)
    if len(data) != end - start:
        raise Truncated(f"expected {end - start} bytes at offset {start}, found {len(data)}")
    return bytes(data), FileState(int(size), version)


def expected_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which the clients that are loaded tell of failed requests."""
    kinds: list[type[Exception]] = [OSError, Truncated]
    for module, names in (
        ("httpx2", ("HTTPError",)),
        ("botocore.exceptions", ("BotoCoreError", "ClientError")),
        ("aiohttp", ("ClientError",)),
        ("fsspec.exceptions", ("FSTimeoutError",)),
        ("gcsfs.retry", ("HttpError", "ChecksumError")),
        ("google.auth.exceptions", ("GoogleAuthError",)),
        ("azure.core.exceptions", ("AzureError",)),
    ):
        loaded = sys.modules.get(module)
        kinds += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(kinds)


def status_and_code(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of a reply and the storage's code for the error; 0 and an empty text if there is none."""
    for raised in (error, error.__cause__):
        response: Any = getattr(raised, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status or (code if code.isdecimal() else 0)), code if _CODE.fullmatch(code) else ""
    # Not of the cause: aiohttp calls a body that was cut a 400.
    for source in (getattr(error, "response", None), error):
        for name in ("status_code", "status", "code"):
            status = getattr(source, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status, ""
    return 0, ""


def reason(error: Exception, *, said: str = "", **fields: str) -> str:
    """Return why a request failed for good, and what to do, in one line.

    said: the message of the error, if it may be shown
    fields: what the lines of _REASONS are about: the service, at (its address), credentials (what to do without them),
        permission (likewise), and whatever else the errors of its client need
    """
    status, code = status_and_code(error)
    shown = code or (str(status) if status else type(error).__name__)
    if isinstance(error, Truncated):
        shown, said = str(error), ""
    elif not status and not code and isinstance(error, OSError) and error.errno is not None:
        shown = errno.errorcode.get(error.errno, shown)
    signs = {
        code,
        str(status),
        "status" if status or code else "",
        *(raised.__name__ for raised in type(error).__mro__),
    }
    text = next(text for names, text in _REASONS if signs.intersection(names))
    return text.format_map(
        {"wait": "", "limit": "", "settings": "", **fields, "shown": f"{shown}: {said}" if said else shown}
    )
