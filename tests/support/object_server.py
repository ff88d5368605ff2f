"""A server of S3 in a process of its own, and a proxy before it that injects faults and counts requests.

    python tests/support/object_server.py --port 9000 --bucket models

The server is moto's. It has one process, so that workers of a cluster reach it as the tests do, and forgets everything
when it ends. Tests use the fixture `object_server`; benchmarks `running_object_server`.

Faults are those of the loopback Hub (loopback_faults), and match the path and the query of a request as they are sent:
`/models/a%20b?partNumber=1&uploadId=...`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from loopback_faults import Corrupt, Cut, Drop, Fault, FaultQueue, Run, Short, Stall, Status
from loopback_server import Body

# What no output of any command may hold.
ACCESS_KEY, SECRET_KEY, SESSION_TOKEN = "AKIAMARKEROFTESTS", "marker-of-the-secret-key", "marker-of-the-session-token"
SECRETS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN)
REGION = "us-east-1"
START_SECONDS = 60.0
PIECE_BYTES = 1 << 16
# Headers of one connection, which the proxy does not pass on.
HOP_HEADERS = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


def credentials(url: str) -> dict[str, str]:
    """Return the environment variables with which S3 clients use the server at a URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",  # asked for credentials otherwise, for seconds
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def refusal(status: int, code: str) -> Status:
    """Return an error of S3, such as 503 and SlowDown, 403 and AccessDenied, or 500 and InternalError."""
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    return Status(status, {"Content-Type": "application/xml"}, body.encode())


@dataclass(kw_only=True)
class ObjectRequest:
    """A request that reached the proxy.

    number: which one, from 0
    path: its path and query, as they were sent
    range: its header Range
    status: the status of the reply; 0 if the connection was closed without one
    received, sent: bytes of the bodies of the request and the reply
    fault: the name of the fault that hit it
    """

    number: int
    method: str
    path: str
    range: str | None
    status: int = 0
    received: int = 0
    sent: int = 0
    fault: str | None = None


class FaultProxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for those that a fault hits.

    faults: those that wait for their requests
    log: the requests, in the order in which they came
    """

    request_queue_size = 128
    block_on_close = False
    daemon_threads = True

    def __init__(self, port: int) -> None:
        """Listen. port: that of the server."""
        self.faults, self.log = FaultQueue(), list[ObjectRequest]()
        self.upstream, self.lock, self.stopping = port, threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def inject(self, *faults: Fault) -> None:
        """Let faults hit the next requests that match, see Fault: times, after, method, path."""
        self.faults.add(*faults)

    def requests(self, method: str | None = None, path: str = "") -> list[ObjectRequest]:
        """Return the requests so far of a method, whose path and query match a regular expression."""
        wanted = Fault(Drop(), method, path)
        with self.lock:
            return [each for each in self.log if wanted.matches(each.method, each.path)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients may leave at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultProxy

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        with self.server.lock:
            record = ObjectRequest(
                number=len(self.server.log), method=self.command, path=self.path, range=self.headers.get("Range")
            )
            self.server.log.append(record)
        fault = self.server.faults.take(self.command, self.path)
        action = None if fault is None else fault.action
        record.fault = None if fault is None else fault.name
        length = int(self.headers.get("Content-Length", 0))
        body = Body(self.rfile, length, "chunked" in self.headers.get("Transfer-Encoding", ""))
        match action:
            case Drop(applied=False):
                return self._close(action.reset)
            case Cut() if self.command in ("PUT", "POST"):
                for piece in body.pieces(action.bytes):
                    record.received += len(piece)
                return self._close(action.reset)
            case Stall(seconds, None):
                if self.server.stopping.wait(seconds):
                    return self._close(reset=False)
            case Run(call):
                call()
        if isinstance(action, Status):
            body.drain()
            return self._reply(action.code, action.headers, action.body, record=record)
        return self._pass_on(body, action, record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _pass_on(self, body: Body, action: object, record: ObjectRequest) -> None:
        """Send the request to the server, and its reply to the client."""
        content = body.read()
        record.received = len(content)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            upstream.request(self.command, self.path, content, headers | {"Content-Length": str(len(content))})
            reply = upstream.getresponse()
            sent = {name: value for name, value in reply.getheaders() if name.lower() not in HOP_HEADERS}
            data = reply.read()
            if self.command == "HEAD":
                sent["Content-Length"] = reply.getheader("Content-Length", "0")
        finally:
            upstream.close()
        if isinstance(action, Drop):
            self._close(action.reset)
            return
        self._reply(reply.status, sent, data, action=action, record=record)

    def _reply(
        self, status: int, headers: Mapping[str, str], data: bytes, *, record: ObjectRequest, action: object = None
    ) -> None:
        """Send a reply, as far as a fault lets it pass."""
        match action:
            case Short(most):
                data = data[:most]
            case Corrupt(position) if position < len(data):
                data = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        record.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(action, Stall) and action.at is not None:
            self._send(data[: action.at], record)
            data = data[action.at :]
            if self.server.stopping.wait(action.seconds):
                self._close(reset=False)
                return
        self._send(data[: action.bytes] if isinstance(action, Cut) else data, record)
        if isinstance(action, Cut):
            self._close(action.reset)

    def _send(self, data: bytes, record: ObjectRequest) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self.connection.sendall(piece)
            record.sent += len(piece)

    def _close(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def running_object_server() -> Iterator[int]:
    """Run a server until the context ends, and yield its port on the loopback."""
    command = [sys.executable, str(Path(__file__)), "--until-input-ends"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("moto's server did not start")
        yield int(url.rpartition(":")[2])
    finally:
        process.kill()  # it has nothing to lose
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def fault_proxy(port: int) -> Iterator[FaultProxy]:
    """Run a proxy before the server on a port until the context ends."""
    proxy = FaultProxy(port)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def direct_client(port: int) -> Any:
    """Return a client of boto3 that bypasses the proxy."""
    import boto3
    from botocore.config import Config

    names = {"aws_access_key_id": "direct", "aws_secret_access_key": "direct", "region_name": REGION}
    config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=config, **names)


@dataclass(kw_only=True)
class ObjectStore:
    """A bucket of a test.

    bucket: its name
    proxy: what the code under test talks to; faults and the log are there
    client: a client of boto3 that bypasses the proxy
    """

    bucket: str
    proxy: FaultProxy
    client: Any = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which clients use it."""
        return credentials(self.proxy.url)

    def address(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def put_folder(self, folder: Path, name: str) -> str:
        """Copy the files of a folder into the bucket, and return the address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), self.bucket, f"{name}/{path.relative_to(folder).as_posix()}")
        return self.address(name)

    def sizes(self, name: str = "") -> dict[str, int]:
        """Return what the bucket has below a prefix: sizes by key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=name)
        return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", [])}

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content

    def uploads(self) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])]


@contextlib.contextmanager
def object_store(port: int, bucket: str) -> Iterator[ObjectStore]:
    """Make a bucket with a proxy on the server of a port, and delete it when the context ends."""
    client = direct_client(port)
    client.create_bucket(Bucket=bucket)
    with fault_proxy(port) as proxy:
        store = ObjectStore(bucket=bucket, proxy=proxy, client=client)
        yield store
    for key in store.sizes():
        client.delete_object(Bucket=bucket, Key=key)
    client.close()


_BUCKETS = count()


@pytest.fixture(scope="session")
def object_server_port() -> Iterator[int]:
    pytest.importorskip("moto.server")
    pytest.importorskip("boto3")
    with running_object_server() as port:
        yield port


@pytest.fixture
def object_server(object_server_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """An empty bucket, with the environment that leads every S3 client to it."""
    with object_store(object_server_port, f"bucket-{next(_BUCKETS)}") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="by default one that is free")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket that is made")
    parser.add_argument("--until-input-ends", action="store_true", help="end when the process that started this ends")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", options.port, DomainDispatcherApplication(create_backend_app), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for bucket in options.bucket:
        direct_client(server.server_port).create_bucket(Bucket=bucket)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    if options.until_input_ends:
        sys.stdin.read()
    else:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
