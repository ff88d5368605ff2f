"""Object storage on localhost: moto's server for S3, with faults where a test asks for them."""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pqweights.storage.addresses import Address, parse_location

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
        keys = [entry["Key"] for entry in listed]
        read = self.client.get_object
        return {key.removeprefix(f"{prefix}/"): read(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


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
            message = f"<Message>{SECRETS[1]} was refused</Message>"
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code>{message}</Error>".encode()
            start(f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]
        if fault == CUT:
            hang_up(environ)
            return []
        reply = b"".join(served(environ, start))
        if fault == LOST:
            hang_up(environ)
            return []
        return [reply[:fault] if isinstance(fault, int) else reply]

    return respond


def address_of(text: str) -> Address:
    """Parse the text of an address in object storage."""
    address = parse_location(text)
    assert isinstance(address, Address)
    return address


@pytest.fixture(scope="session")
def _read_once() -> Iterator[None]:
    """Let each client read neither the descriptions of all services nor all root certificates again."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        patch.setattr("aiobotocore.httpsession.get_cert_path", lambda verify: None)
        yield


@pytest.fixture(scope="session")
def running_server(_read_once: None) -> Iterator[ObjectServer]:
    import boto3
    import moto.moto_server.werkzeug_app as moto_server
    from werkzeug import serving

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    state: dict[str, ObjectServer] = {}
    app = application(moto_server.DomainDispatcherApplication(moto_server.create_backend_app), state)
    http = serving.make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{http.server_port}"
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )

    def mark(request: Any, **_: object) -> None:
        request.headers["X-Direct"] = "1"

    client.meta.events.register("before-send.s3", mark)
    client.create_bucket(Bucket=BUCKET)
    state["server"] = ObjectServer(url, client)
    yield state["server"]
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def server(running_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server, with credentials that can be recognized in the environment."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    for name, value in zip(names, SECRETS, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running_server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("pqweights.storage.requests.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda base, growth_factor, attempts: 0.01)
    running_server.log.clear()
    yield running_server
    running_server.fault = None
    for each in running_server.client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        running_server.client.delete_object(Bucket=BUCKET, Key=each["Key"])
