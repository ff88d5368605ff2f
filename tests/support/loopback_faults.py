"""Faults that the loopback Hub injects into its answers, and the queue in which they wait for their requests."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field


@dataclass(frozen=True)
class Status:
    """Answer with this status, and do nothing."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "injected"}'


@dataclass(frozen=True)
class Cut:
    """Send the right headers and some bytes of the body, then close the connection.

    bytes: how many bytes of the body are sent. Of a PUT, so many are read, and nothing is stored
    reset: close with RST instead of FIN, which may also destroy what is still under way
    """

    bytes: int
    reset: bool = False


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer.

    applied: do what was asked first, as if the reply were lost
    reset: see Cut
    """

    applied: bool = False
    reset: bool = False


@dataclass(frozen=True)
class Short:
    """Announce and send fewer bytes than were asked for.

    bytes: how many at most
    consistent: whether Content-Range says so too
    """

    bytes: int
    consistent: bool = True


@dataclass(frozen=True)
class Corrupt:
    """Flip the lowest bit of the byte at this position of the file, or of the body if that is not a file's."""

    position: int


@dataclass(frozen=True)
class Stall:
    """Wait before the answer or, with `at`, after that many bytes of its body."""

    seconds: float
    at: int | None = None


@dataclass(frozen=True)
class Run:
    """Call a function in the server's thread before the answer."""

    call: Callable[[], object]


Action = Status | Cut | Drop | Short | Corrupt | Stall | Run


@dataclass(frozen=True)
class Fault:
    """What happens to which requests.

    action: what happens
    method: the method of the requests; None for any
    path: a regular expression that is searched in the decoded path, without the query
    times: how many matching requests are hit
    after: how many matching requests pass before that
    """

    action: Action
    method: str | None = None
    path: str = ""
    _: KW_ONLY
    times: int = 1
    after: int = 0

    def matches(self, method: str, path: str) -> bool:
        return self.method in (None, method) and re.search(self.path, path, re.DOTALL) is not None


@dataclass
class _Pending:
    """A fault, how many matching requests it let pass, and how many it hit."""

    fault: Fault
    passed: int = 0
    hits: int = 0


class FaultQueue:
    """Faults that are not used up, in the order in which they were added."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._lock = threading.Lock()

    @property
    def waiting(self) -> list[Fault]:
        with self._lock:
            return [pending.fault for pending in self._pending]

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._pending += [_Pending(fault) for fault in faults if fault.times > 0]

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """Return the fault that hits a request: of those that match, the first that let enough requests pass."""
        with self._lock:
            for pending in self._pending:
                if not pending.fault.matches(method, path):
                    continue
                if pending.passed < pending.fault.after:
                    pending.passed += 1
                    continue
                pending.hits += 1
                if pending.hits == pending.fault.times:
                    self._pending.remove(pending)
                return pending.fault
        return None
