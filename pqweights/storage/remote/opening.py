"""Opening fsspec's file systems: with bounded waiting, requests that are sent again, and no caches.

Credentials and endpoints are those that fsspec and its clients find themselves.
"""

from __future__ import annotations

from typing import Any

from pqweights.common.advice import pip_install
from pqweights.errors import MissingDependencyError, OptionError, StorageError
from pqweights.storage.remote.addresses import NOT_STORAGE, Address
from pqweights.storage.remote.failures import expected_errors, explained

CONNECT_SECONDS = 10
READ_SECONDS = 60
# Connections to a server at once, of one process and folder.
CONNECTIONS = 16
# How often a request to S3 is sent if it fails in a way that may pass.
ATTEMPTS = 5
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


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
        raise explained(error, address, "open") from None
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
            "retries": {
                "mode": "legacy",
                "total_max_attempts": ATTEMPTS,
            },  # the only mode that takes 429 for throttling
        }
        options["config_kwargs"] = ours | conf.get("s3", {}).get("config_kwargs", {})
    return options


def path_of(file_system: Any, address: Address) -> str:
    """Return the path under which a file system knows an address."""
    return str(file_system._strip_protocol(address.url)).rstrip("/")


def endpoint_of(file_system: Any) -> str:
    """Return the server of a file system without credentials, as far as it is known."""
    endpoint = getattr(getattr(getattr(file_system, "_s3", None), "meta", None), "endpoint_url", None)
    if not isinstance(endpoint, str):
        return ""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"
