"""Faults of the loopback Hub, and the layer around its application that records requests and lets faults hit them."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from werkzeug.wsgi import get_input_stream

Environment = dict[str, Any]


@dataclass(frozen=True)
class Status:
    """Answer with this status, and do nothing."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "injected"}'


@dataclass(frozen=True)
class Cut:
    """Send so many bytes of the right reply, then close the connection, with RST if `reset`.

    Of a PUT, so many are read, and nothing is stored.
    """

    bytes: int
    reset: bool = False


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer; with `applied`, after doing what was asked."""

    applied: bool = False


@dataclass(frozen=True)
class Short:
    """Announce and send at most that many bytes; with `consistent`, Content-Range says so too."""

    bytes: int
    consistent: bool = True


@dataclass(frozen=True)
class Corrupt:
    """Flip the lowest bit of the byte at this position of the file."""

    position: int


@dataclass(frozen=True)
class Stall:
    """Wait before the answer or, with `at`, after that many bytes of its body."""

    seconds: float
    at: int = 0


@dataclass(frozen=True)
class Run:
    """Call a function before the answer."""

    call: Callable[[], object]


@dataclass
class Fault:
    """What happens to which requests.

    action: what happens
    method: the method of the requests; None for any
    path: a regular expression that is searched in the decoded path, without the query
    times: how many matching requests are hit
    after: how many matching requests pass before that
    """

    action: Status | Cut | Drop | Short | Corrupt | Stall | Run
    method: str | None = None
    path: str = ""
    _: KW_ONLY
    times: int = 1
    after: int = 0

    def matches(self, method: str, path: str) -> bool:
        return self.method in (None, method) and re.search(self.path, path, re.DOTALL) is not None


@dataclass(kw_only=True)
class Request:
    """A request that was served: its path, decoded and without the query, and whether it had the token and met a fault.

    bytes_sent: how many bytes of the body were sent
    """

    method: str
    path: str
    authorized: bool
    bytes_sent: int = 0
    fault: bool = False


class FaultyApplication:
    """A WSGI application whose requests are recorded, and hit by faults.

    faults: those that are not used up, each with how many matching requests it has met
    """

    def __init__(self, application: Any, token: str) -> None:
        self.application, self.token = application, token
        self.requests: list[Request] = []
        self.faults: list[tuple[Fault, list[Request]]] = []
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, environ: Environment, start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].encode("latin-1").decode()
        record = Request(
            method=method, path=path, authorized=environ.get("HTTP_AUTHORIZATION") == f"Bearer {self.token}"
        )
        action = self._record(record)
        if isinstance(action, Run):
            action.call()
        elif isinstance(action, Stall) and not action.at:
            self.stopping.wait(action.seconds)
        elif isinstance(action, Status):
            get_input_stream(environ).read()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(action.body))}
            start(f"{action.code} Fault", list((headers | dict(action.headers)).items()))
            return [b"" if method == "HEAD" else action.body]
        elif isinstance(action, Cut) and method == "PUT":
            get_input_stream(environ).read(action.bytes)
            hang_up(environ, reset=action.reset)
        elif isinstance(action, Drop) and not action.applied:
            hang_up(environ)
        replied: list[Any] = []
        body = self.application(environ, lambda status, headers, *_: replied.extend((status, dict(headers))))
        if isinstance(action, Drop):
            hang_up(environ)
        status, headers = replied
        first = int((re.match(r"bytes (\d+)-", headers.get("Content-Range", "")) or [0, 0])[1])
        if isinstance(action, Short):
            body = [b"".join(body)[: action.bytes]]
            headers["Content-Length"] = str(len(body[0]))
            if action.consistent and "Content-Range" in headers:
                last = first + len(body[0]) - 1
                headers["Content-Range"] = re.sub(r"-\d+", f"-{last}", headers["Content-Range"])
        start(status, list(headers.items()))
        return self._sent(body, action, record, environ=environ, first=first)

    def _record(self, record: Request) -> object:
        """Note a request, and return what happens to it: by the first fault that let enough requests pass."""
        with self._lock:
            self.requests.append(record)
            for entry in list(self.faults):
                fault, met = entry
                if fault.matches(record.method, record.path):
                    met.append(record)
                    if len(met) > fault.after:
                        record.fault = True
                        if len(met) == fault.after + fault.times:
                            self.faults.remove(entry)
                        return fault.action
        return None

    def _sent(
        self, body: Iterable[bytes], action: object, record: Request, *, environ: Environment, first: int
    ) -> Iterator[bytes]:
        """Yield the pieces of a body, up to where a fault is. first: the position of the body in the file."""
        until = action.bytes if isinstance(action, Cut) else action.at if isinstance(action, Stall) else None
        sent = 0
        for piece in body:
            if isinstance(action, Corrupt) and 0 <= (at := action.position - first - sent) < len(piece):
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            sent += len(piece)
            if until is None or sent < until:
                record.bytes_sent += len(piece)  # first: a test may look as soon as the client has the last byte
                yield piece
                continue
            before = len(piece) - (sent - until)
            record.bytes_sent += before
            yield piece[:before]
            if isinstance(action, Cut):
                hang_up(environ, reset=action.reset)
            elif isinstance(action, Stall) and self.stopping.wait(action.seconds):
                hang_up(environ)
            record.bytes_sent += len(piece) - before
            yield piece[before:]
            until = None


def hang_up(environ: Environment, *, reset: bool = False) -> None:
    """Close the connection of a request, and end its thread with an error that the server expects."""
    connection: socket.socket = environ["werkzeug.socket"]
    if reset:  # closed here, because the server would send FIN first
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(connection.detach())
    else:
        connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError
