"""fsspec's file systems, opened with bounded waiting, requests that their clients send again, and no caches.

Credentials and endpoints are those that fsspec and its clients find themselves.
"""

from __future__ import annotations

from typing import Any

from pqweights.common.advice import pip_install
from pqweights.errors import MissingDependencyError, OptionError, StorageError
from pqweights.storage.addresses import SAME_SCHEMES, Address
from pqweights.storage.requests import expected_errors, reason

# Schemes that fsspec knows, and that cannot list a folder or are not a place for models.
NOT_STORAGE = ("http", "https", "hf", "data", "file", "local", "reference", "zip", "tar", "git", "github")

CONNECT_SECONDS = 10
READ_SECONDS = 60
# Connections to a server at once, of one process and folder.
CONNECTIONS = 16
# How often a request to S3 is sent if it fails in a way that may pass.
ATTEMPTS = 5
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # that install what these schemes need
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


def open_file_system(address: Address) -> Any:
    """Return fsspec's file system for an address, which belongs to the caller alone.

    Raises OptionError for a scheme that nobody knows, MissingDependencyError if its package is not installed,
    StorageError if its configuration is wrong.
    """
    try:
        import fsspec
        from fsspec.registry import known_implementations, registry
    except ImportError:
        raise MissingDependencyError(f"{address}: needs fsspec, which is not installed: pip install fsspec") from None
    scheme = address.scheme
    if scheme in NOT_STORAGE or (scheme not in known_implementations and scheme not in registry):
        raise OptionError(
            f"{address}: expected an address in storage that fsspec can list, such as s3://BUCKET/FOLDER "
            f"({pip_install('s3')}) or gs://BUCKET/FOLDER ({pip_install('gcs')}), found the scheme {scheme!r}"
        )
    try:
        file_system = fsspec.get_filesystem_class(scheme)
    except ImportError:
        extra = EXTRAS.get(scheme)
        install = pip_install(extra) if extra else "install the package of fsspec for this storage"
        raise MissingDependencyError(
            f"{address}: fsspec needs another package for {scheme}://, which is not installed: {install}"
        ) from None
    try:
        opened = file_system(**_options(file_system, address))
        if EXTRAS.get(scheme) == "s3":
            opened.retries = 1  # botocore sends requests again, see _options
            opened.connect()
    except (ValueError, KeyError, TypeError) as error:
        hint = ": check AWS_ENDPOINT_URL and the configuration" if EXTRAS.get(scheme) == "s3" else ""
        raise StorageError(
            f"{address}: the storage cannot be opened with its configuration ({type(error).__name__}){hint}"
        ) from None
    except expected_errors() as error:
        raise failed(error, address, "open") from None
    return opened


def _options(file_system: Any, address: Address) -> dict[str, Any]:
    """Return the arguments of a file system; those of the user's configuration for fsspec are added by fsspec."""
    from fsspec.config import conf

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    options |= file_system._get_kwargs_from_urls(address.url)  # the host and the user, of schemes that have them
    if EXTRAS.get(address.scheme) == "s3":
        ours = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": CONNECTIONS,
            "retries": {"mode": "legacy", "total_max_attempts": ATTEMPTS},  # the one that takes 429 for throttling
        }
        options["config_kwargs"] = ours | conf.get("s3", {}).get("config_kwargs", {})
    return options


def endpoint_of(file_system: Any) -> str:
    """Return the server of a file system without credentials, as far as it is known."""
    endpoint = getattr(getattr(getattr(file_system, "_s3", None), "meta", None), "endpoint_url", None)
    if not isinstance(endpoint, str):
        return ""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


def failed(error: Exception, address: Address, action: str, endpoint: str = "") -> StorageError:
    """Return what to tell the user about a request that failed for good.

    address: what the request was about
    action: a key of PERMISSIONS
    endpoint: the server as far as it is known, without credentials
    """
    family, bucket = SAME_SCHEMES.get(address.scheme, address.scheme), str(Address(address.scheme, address.bucket))
    needed = PERMISSIONS.get(family, {}).get(action, f"permission to {action}")
    why = reason(
        error,
        service="the storage",
        at=f" at {endpoint}" if endpoint else "",
        bucket=bucket,
        credentials=GIVE_CREDENTIALS.get(family, "give those of the storage in its configuration"),
        permission=f"expected credentials with {needed}; ask the owner of {bucket}",
        settings=" and AWS_ENDPOINT_URL" if family == "s3" else "",
    )
    return StorageError(f"{address}: {why}")
