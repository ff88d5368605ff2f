"""The official client's one session, used by many: nothing of it stays changed when the last of our calls has ended.

All users of the official client in a process share its HTTP session, its progress bars and its logger. While calls of
ours are under way, one pair of hooks is in the session. The hooks find by the context whose call a request belongs to:
they give it a timeout where the official client sets none, so that a stalled reply is not awaited forever, and count
what came back. Requests of others in the same process have no such context, and are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pqweights.storage.hub.official import OfficialClient

TIMEOUT_SECONDS = 30.0
COMMIT_TIMEOUT_SECONDS = 300.0  # a commit of many files takes long
# What a request has for a timeout that nobody has set.
UNLIMITED: dict[str, float | None] = {"connect": None, "read": None, "write": None, "pool": None}
TIMEOUTS = dict.fromkeys(UNLIMITED, COMMIT_TIMEOUT_SECONDS) | {"connect": TIMEOUT_SECONDS}


@dataclass
class Traffic:
    """What the calls of a Hub have received.

    requests, bytes: how many requests were answered, and how many bytes came back, so far
    """

    requests: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, requests: int = 0, bytes: int = 0) -> None:
        """Count a reply, or bytes of one."""
        with self._lock:
            self.requests += requests
            self.bytes += bytes


_traffic: ContextVar[Traffic | None] = ContextVar("pqweights_hub_traffic", default=None)
_lock = threading.Lock()
# The sessions in which our hooks are, by identity, each with the number of calls under way.
_hooked: dict[int, int] = {}
# What takes back the silence, and how many calls need it.
_silence: list[Callable[[], None]] = []
_silent_calls = 0


@contextlib.contextmanager
def counted_call(official: OfficialClient, traffic: Traffic) -> Iterator[None]:
    """Count what a call of the official client sends and receives in this thread while the context is open."""
    session = official.utils.get_session()
    _begin(official, session)
    token = _traffic.set(traffic)
    try:
        yield
    finally:
        _traffic.reset(token)
        _end(session)


def _begin(official: OfficialClient, session: Any) -> None:
    global _silent_calls
    with _lock:
        if not _hooked.get(id(session)):
            hooks = session.event_hooks
            session.event_hooks = {
                "request": [*hooks["request"], _before_request],
                "response": [*hooks["response"], _after_response],
            }
        _hooked[id(session)] = _hooked.get(id(session), 0) + 1
        if not _silent_calls:
            _silence.append(_silenced(official))
        _silent_calls += 1


def _end(session: Any) -> None:
    global _silent_calls
    with _lock:
        _hooked[id(session)] -= 1
        if not _hooked[id(session)]:
            del _hooked[id(session)]
            ours = (_before_request, _after_response)
            session.event_hooks = {
                kind: [hook for hook in hooks if hook not in ours] for kind, hooks in session.event_hooks.items()
            }
        _silent_calls -= 1
        if not _silent_calls:
            _silence.pop()()


def _silenced(official: OfficialClient) -> Callable[[], None]:
    """Silence the official client, whose remarks repeat what Hub tells the user; return what takes that back."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars = official.progress_bars
    shown = dict(bars)
    bars.clear()
    bars["_global"] = False

    def restore() -> None:
        logger.setLevel(level)
        bars.clear()
        bars.update(shown)

    return restore


def _before_request(request: Any) -> None:
    """Limit how long a request of ours may take, if the official client does not."""
    if _traffic.get() is not None and request.extensions.get("timeout") == UNLIMITED:
        request.extensions["timeout"] = dict(TIMEOUTS)


def _after_response(response: Any) -> None:
    """Count a reply of a call of ours, and its bytes when it is closed."""
    traffic = _traffic.get()
    if traffic is None:
        return
    traffic.add(requests=1)
    close = response.close

    def closed() -> None:
        if not response.is_closed:
            traffic.add(bytes=response.num_bytes_downloaded)
        close()

    response.close = closed
