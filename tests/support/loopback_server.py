"""The HTTP server of the loopback Hub: reads requests, and sends answers with the faults that hit them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, unquote_plus

from loopback_endpoints import ROUTES, USER, Call, Refused, Reply, json_reply
from loopback_faults import Action, Corrupt, Cut, Drop, Run, Short, Stall, Status
from loopback_repositories import PIECE_BYTES, pieces

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub


@dataclass(kw_only=True)
class Request:
    """A request that was served.

    path: its path, decoded, without the query
    query: its query, as it was sent
    range: its header Range
    authorized: whether it had the token
    status: the status of the reply; 0 if the connection was closed without one
    bytes_sent: how many bytes of the body were sent
    fault: whether a fault hit it
    """

    method: str
    path: str
    query: str
    range: str | None
    authorized: bool
    status: int = 0
    bytes_sent: int = 0
    fault: bool = False


class Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, and closes the connections with the Hub."""

    request_queue_size = 128
    block_on_close = False

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def close_connections(self) -> None:
        with self.hub.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients may leave at any time
            super().handle_error(request, client_address)


class Body:
    """What a client sends with a request: a known number of bytes, or chunks."""

    def __init__(self, file: BufferedIOBase, length: int, chunked: bool) -> None:
        self._file = file
        self._left = length
        self._chunked = chunked

    def pieces(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the rest, or at most `max_bytes` of it."""
        while max_bytes is None or max_bytes > 0:
            if self._left == 0 and self._chunked:
                self._left = int(self._file.readline().split(b";")[0], 16)
                if self._left == 0:
                    self._chunked = False
                    self._file.readline()
                else:
                    self._left += 2  # the line break behind it
            if self._left == 0:
                return
            framing = 2 if self._chunked else 0
            want = min(self._left - framing, PIECE_BYTES)
            if max_bytes is not None:
                want = min(want, max_bytes)
            piece = self._file.read(want)
            if len(piece) < want:
                raise ConnectionAbortedError("the client left in the middle of a request")
            self._left -= want
            if framing and self._left == framing:
                self._file.readline()
                self._left = 0
            if max_bytes is not None:
                max_bytes -= want
            yield piece

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def drain(self) -> None:
        for _ in self.pieces():
            pass


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, finds their endpoints, and sends the answers, with faults."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.hub
        with self.hub.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.hub.lock:
            self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        raw, _, query = self.path.partition("?")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path, wanted = unquote(raw), self.headers.get("Range")
        authorized = token == self.hub.token
        record = Request(method=self.command, path=path, query=query, range=wanted, authorized=authorized)
        body = Body(
            self.rfile,
            int(self.headers.get("Content-Length", 0)),
            "chunked" in self.headers.get("Transfer-Encoding", ""),
        )
        fault = self.hub.pending.take(self.command, path)
        action = None if fault is None else fault.action
        record.fault = fault is not None
        with self.hub.lock:
            self.hub.requests.append(record)
        match action:
            case Drop(applied=False):
                return self._close(action.reset)
            case Cut() if self.command == "PUT":
                for _ in body.pieces(action.bytes):
                    pass
                return self._close(action.reset)
            case Stall(seconds, None):
                if self.hub.stopping.wait(seconds):
                    return self._close(reset=False)
            case Run(call):
                call()
        if isinstance(action, Status):
            reply = Reply(status=action.code, headers=dict(action.headers), content=action.body, stop=len(action.body))
        else:
            reply = self._answer(raw, query, body, token=token)
        body.drain()
        if isinstance(action, Drop):
            return self._close(action.reset)
        return self._send(reply, action, record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, raw: str, query: str, body: Body, *, token: str) -> Reply:
        method = "GET" if self.command == "HEAD" else self.command
        signed = raw.startswith(("/uploads/", "/cdn/"))
        try:
            if token and token != self.hub.token and not signed:
                raise Refused(401, "Invalid credentials in Authorization header")
            for verb, pattern, function in ROUTES:
                match = re.fullmatch(pattern, raw) if verb == method else None
                if match is not None:
                    pairs = (pair.partition("=") for pair in query.split("&") if pair)
                    return function(
                        Call(
                            hub=self.hub,
                            method=method,
                            names={
                                key: unquote(value) for key, value in match.groupdict().items() if value is not None
                            },
                            query={unquote_plus(key): unquote_plus(value) for key, _, value in pairs},
                            range=self.headers.get("Range"),
                            user=USER if token else None,
                            body=body,
                        )
                    )
            raise Refused(404, "Sorry, we can't find the page you are looking for.")
        except Refused as refused:
            return refused.reply
        except OSError:
            raise
        except Exception:  # a bug in the loopback Hub, or a request that makes no sense: tests must see it
            traceback.print_exc()
            return json_reply({"error": traceback.format_exc()}, 500)

    def _send(self, reply: Reply, action: Action | None, record: Request) -> None:
        start, stop = reply.start, reply.stop
        headers = dict(reply.headers)
        if isinstance(action, Short):
            stop = min(stop, start + action.bytes)
            if action.consistent and "Content-Range" in headers:
                headers["Content-Range"] = re.sub(r"-\d+", f"-{stop - 1}", headers["Content-Range"])
        record.status = reply.status
        self.send_response(reply.status)
        for name, value in headers.items():
            # File names may be anything; headers are Latin-1, on one line.
            self.send_header(name, quote(value, safe=" !\"#$%&'()*+,/:;<=>?@[]{}|"))
        self.send_header("X-Request-Id", f"Root=1-{id(record):x}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = min(stop, start + action.bytes) if isinstance(action, Cut) else stop
        if isinstance(action, Stall) and action.at is not None:
            pause = min(start + action.at, end)
            self._send_pieces(replace(reply, stop=pause), action, record)
            if self.hub.stopping.wait(action.seconds):
                self._close(reset=False)
                return
            start = pause
        self._send_pieces(replace(reply, start=start, stop=end), action, record)
        if isinstance(action, Cut):
            self._close(action.reset)

    def _send_pieces(self, reply: Reply, action: Action | None, record: Request) -> None:
        start, stop = reply.start, reply.stop
        for piece in pieces(reply.content, start, stop):
            if isinstance(action, Corrupt) and start <= action.position < start + len(piece):
                piece = bytearray(piece)
                piece[action.position - start] ^= 1
            # Counted first: a test may look at the record as soon as the client has the last byte.
            record.bytes_sent += len(piece)
            try:
                self.connection.sendall(piece)
            except OSError:
                record.bytes_sent -= len(piece)
                raise
            start += len(piece)
        if start < stop:
            self._close(reset=False)  # the file on disk has become shorter

    def _close(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # Closed here, because the base class would send FIN first.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with self.hub.lock:
                self.server.connections.discard(self.connection)
            os.close(self.connection.detach())
