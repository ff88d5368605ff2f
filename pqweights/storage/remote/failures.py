"""Failed requests to object storage: what to tell the user, in one line without credentials.

The clients of the storages send requests again that may succeed later. The messages of servers and clients may quote
keys, signatures and whole requests. So nothing of them is shown but the code of the error.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from typing import Any

from pqweights.errors import StorageError
from pqweights.storage.addresses import SAME_SCHEMES, Address

Stop = Callable[[], bool]  # whether to stop

TEMPORARY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
TEMPORARY_CODES = ("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "TooManyRequests")
REFUSED_CREDENTIALS = (
    *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestExpired", "SignatureDoesNotMatch"),
    "TokenRefreshRequired",
)
OTHER_REGION = (
    *("301", "307", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    *("PermanentRedirect", "TemporaryRedirect"),
)
NO_CREDENTIALS = {
    *("CredentialRetrievalError", "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"),
    *("ProfileNotFound", "RefreshError"),
}
GIVE_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in with `aws configure`",
    "gs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
PERMISSIONS = {
    "s3": {
        "list": "s3:ListBucket",
        "read": "s3:GetObject and s3:ListBucket",
        "write": "s3:PutObject",
        "move": "s3:GetObject, s3:PutObject and s3:DeleteObject",
        "remove": "s3:DeleteObject",
    },
    "gs": {
        "list": "storage.objects.list",
        "read": "storage.objects.get and storage.objects.list",
        "write": "storage.objects.create",
        "move": "storage.objects.get, storage.objects.create and storage.objects.delete",
        "remove": "storage.objects.delete",
    },
}
CODE = re.compile(r"[A-Za-z0-9_.]{1,60}")


class TransferStopped(Exception):
    """A transfer was stopped by this program, because something else failed or the user asked for it."""


class Truncated(Exception):
    """A reply has fewer or more bytes than were asked for."""


def expected_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which the clients that are loaded tell of failed requests."""
    found: list[type[Exception]] = [OSError, Truncated]
    for module, names in (
        ("botocore.exceptions", ("BotoCoreError", "ClientError")),
        ("aiohttp", ("ClientError",)),
        ("fsspec.exceptions", ("FSTimeoutError",)),
        ("gcsfs.retry", ("HttpError", "ChecksumError")),
        ("google.auth.exceptions", ("GoogleAuthError",)),
        ("azure.core.exceptions", ("AzureError",)),
    ):
        loaded = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(found)


def status_and_code(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of a reply and the storage's code for the error; 0 and an empty text if there is none."""
    for raised in (error, error.__cause__):
        response: Any = getattr(raised, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status or (code if code.isdecimal() else 0)), code if CODE.fullmatch(code) else ""
    for name in ("status_code", "status", "code"):  # not of the cause: aiohttp calls a body that was cut a 400
        found = getattr(error, name, None)
        if isinstance(found, int) and 100 <= found < 600:
            return found, ""
    return 0, ""


def explained(error: Exception, address: Address, action: str, endpoint: str = "") -> StorageError:
    """Return what to tell the user about a request that failed for good.

    address: what the request was about
    action: a key of PERMISSIONS
    endpoint: the server as far as it is known, without credentials
    """
    family, at = SAME_SCHEMES.get(address.scheme, address.scheme), f" at {endpoint}" if endpoint else ""
    problem = _refusal(error, str(Address(address.scheme, address.bucket)), family=family, action=action, at=at)
    if problem is None:
        status, code = status_and_code(error)
        shown = _shown(error)
        if isinstance(error, Truncated):
            problem = f"{shown}: the file was cut, or the connection fails: run the same command again"
        elif status in TEMPORARY_STATUSES or code in TEMPORARY_CODES:
            problem = f"the storage{at} is failing ({shown}): run the same command again later"
        elif status or code or "ParamValidationError" in _names(error):
            problem = f"the storage{at} refuses to {action} it ({shown})"
        else:
            check = "check the connection and AWS_ENDPOINT_URL" if family == "s3" else "check the connection"
            problem = f"the storage{at} cannot be reached, or does not answer ({shown}): {check}, then run it again"
    return StorageError(f"{address}: {problem}")


def _refusal(error: Exception, bucket: str, *, family: str, action: str, at: str) -> str | None:
    """Return what is wrong with the bucket, the credentials or the permissions; None if it is something else."""
    (status, code), shown = status_and_code(error), _shown(error)
    credentials = GIVE_CREDENTIALS.get(family, "give those of the storage in its configuration")
    if code == "NoSuchBucket":
        return f"there is no bucket {bucket}{at}: check its name, or create it"
    if code in REFUSED_CREDENTIALS or status == 401:
        return f"the credentials were refused ({shown}): {credentials}"
    if code == "RequestTimeTooSkewed":
        return f"the request was refused ({code}): the clock of this machine is wrong: set it"
    if status == 403 or isinstance(error, PermissionError):
        needed = PERMISSIONS.get(family, {}).get(action, f"permission to {action}")
        return f"access denied ({shown}): expected credentials with {needed}; ask the owner of {bucket}"
    if code in OTHER_REGION or status in (301, 307):
        return f"the bucket is in another region ({shown}): set AWS_DEFAULT_REGION to that"
    if _names(error) & NO_CREDENTIALS:
        return f"no credentials found ({shown}): {credentials}"
    return None


def _shown(error: Exception) -> str:
    """Return the storage's code for an error, or its status, or else the kind of the exception: never its message."""
    status, code = status_and_code(error)
    if code or status:
        return code or str(status)
    if isinstance(error, Truncated):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, type(error).__name__)
    return type(error).__name__


def _names(error: Exception) -> set[str]:
    """Return the names of an exception's classes."""
    return {raised.__name__ for raised in type(error).__mro__}
