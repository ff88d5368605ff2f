"""A plain server of files on localhost, which sends ranges of them, with faults where a test asks for them."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WebServer:
    """Files by their paths.

    url: its address
    fault: called with the number of a request; returns a status to refuse it with, "cut" for half of a reply, "whole"
        for the whole file, "" to serve it
    stamped: whether replies tell versions of files
    log: the path and the range of each request
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.files: dict[str, bytes] = {}
        self.fault: Callable[[int], int | str] = lambda number: ""
        self.stamped = True
        self.log: list[tuple[str, str]] = []

    def put(self, folder: Path) -> None:
        self.files |= {f"/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def web_server() -> Iterator[WebServer]:
    server: Any = _Server(("127.0.0.1", 0), _Handler)
    server.files_of = WebServer(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.files_of
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up, on the standard error of the code under test."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        of: WebServer = self.server.files_of  # type: ignore[attr-defined]
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        of.log.append((self.path, self.headers.get("Range", "")))
        fault, content = of.fault(len(of.log)), of.files.get(path)
        if isinstance(fault, int) or content is None:
            self.send_response(fault if isinstance(fault, int) else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", content.decode())
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        match = None if fault == "whole" else match
        part = content if match is None else content[int(match[1]) : int(match[2]) + 1]
        self.send_response(200 if match is None else 206)
        if match is not None:
            end = int(match[1]) + len(part) - 1
            self.send_header("Content-Range", f"bytes {match[1]}-{end}/{len(content)}")
        if of.stamped:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)
        self.close_connection = fault == "cut"
