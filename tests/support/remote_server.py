"""Object storage on localhost: moto's server for S3, with faults where a test asks for them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What no output of any command may hold.
SECRETS = ("MARKERKEYID", "MARKERSECRETKEY", "MARKERTOKEN")
BUCKET = "models"

# In place of a status: the connection is closed without a reply, before the request is carried out or after it.
CUT, LOST = "cut", "lost"
Fault = Callable[[dict[str, Any]], tuple[int, str] | int | str | None]


@dataclass
class ObjectServer:
    """A server of S3, and a client of it that bypasses the faults.

    url: its address
    fault: called with each request of the code under test; returns None to serve it, a status and an error code to
        refuse it, after how many bytes of the reply's body the connection is cut, CUT or LOST
    log: method and path of each request
    """

    url: str
    client: Any
    fault: Fault | None = None
    log: list[str] = field(default_factory=list)

    def put(self, folder: Path, prefix: str) -> str:
        """Copy a folder into the bucket, and return its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.put_object(
                    Bucket=BUCKET, Key=f"{prefix}/{path.relative_to(folder).as_posix()}", Body=path.read_bytes()
                )
        return f"s3://{BUCKET}/{prefix}"

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Return what the bucket has below a prefix, by name."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        return {
            each["Key"].removeprefix(f"{prefix}/"): self.client.get_object(Bucket=BUCKET, Key=each["Key"])[
                "Body"
            ].read()
            for each in listed
        }


def error_xml(code: str) -> bytes:
    return (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{SECRETS[1]} was refused</Message></Error>".encode()
    )


def hang_up(environ: dict[str, Any]) -> None:
    """Close the connection of a request; what is written to it afterwards fails, which the server does not report."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def application(served: Any, state: dict[str, ObjectServer]) -> Any:
    def respond(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        server = state.get("server")
        fault = None
        if server is not None and environ.get("HTTP_X_DIRECT") is None:
            server.log.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            fault = None if server.fault is None else server.fault(environ)
        if isinstance(fault, tuple):
            status, code = fault
            body = error_xml(code)
            start(f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]
        if fault == CUT:
            hang_up(environ)
            return []
        body = served(environ, start)
        if fault == LOST:
            b"".join(body)
            hang_up(environ)
            return []
        return [b"".join(body)[:fault]] if isinstance(fault, int) else body

    return respond
