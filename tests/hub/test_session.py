"""The official client's session belongs to the whole process: calls of ours leave it, and others' requests, alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_cases import Client
from loopback_hub import LoopbackHub

from pqweights.errors import HubError
from pqweights.storage.hub import session
from pqweights.storage.hub.client import Hub

huggingface_hub = pytest.importorskip("huggingface_hub")
httpx2 = pytest.importorskip("httpx2")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Settings of the official client, which sends nothing to anywhere else."""
    from huggingface_hub.utils import close_session

    with LoopbackHub() as hub, pytest.MonkeyPatch.context() as patch:
        yield Client(url=hub.url, home=tmp_path / "home", token=None, patch=patch).set_up()
        close_session()


@pytest.fixture
def sent(client: Client) -> Iterator[list[Any]]:
    """The requests that reach the network, which answers that every repository is there."""
    from huggingface_hub.utils import _http
    from huggingface_hub.utils.tqdm import progress_bar_states

    requests: list[Any] = []

    def answer(request: Any) -> Any:
        requests.append(request)
        if request.url.path.startswith("/api/models/org/moved"):
            return httpx2.Response(307, headers={"Location": "http://127.0.0.2:9/there"})
        body: dict[str, Any] = {"name": "somebody", "id": "org/name", "sha": "0" * 40, "siblings": [], "private": False}
        return httpx2.Response(200, json=body)

    def factory() -> Any:
        hooks = {"request": [_http.hf_request_event_hook]}
        return httpx2.Client(
            transport=httpx2.MockTransport(answer), event_hooks=hooks, follow_redirects=True, timeout=None
        )

    logger, bars = logging.getLogger("huggingface_hub"), dict(progress_bar_states)
    level = logger.level
    huggingface_hub.set_client_factory(factory)
    yield requests
    huggingface_hub.set_client_factory(_http.default_client_factory)
    logger.setLevel(level)
    progress_bar_states.clear()
    progress_bar_states.update(bars)


def state() -> dict[str, Any]:
    """Return what a process shares of the official client."""
    from huggingface_hub.utils import get_session
    from huggingface_hub.utils.tqdm import progress_bar_states

    shared = get_session()
    return {
        "session": id(shared),
        "hooks": {kind: list(hooks) for kind, hooks in shared.event_hooks.items()},
        "timeout": shared.timeout,
        "headers": dict(shared.headers),
        "level": logging.getLogger("huggingface_hub").level,
        "bars": dict(progress_bar_states),
    }


def test_a_hundred_hubs_in_threads_leave_the_session_as_it_was(sent: list[Any]) -> None:
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars("huggingface_hub.upload")
    logging.getLogger("huggingface_hub").setLevel(logging.INFO)
    before = state()

    def use(number: int) -> Hub:
        hub = Hub(f"hf_token{number:03}")
        assert hub.log_in() == "somebody"
        hub.repository("org/name")
        return hub

    with ThreadPoolExecutor(8) as pool:
        hubs = list(pool.map(use, range(100)))
    assert state() == before
    assert [hub.requests for hub in hubs] == [2] * 100
    tokens = [request.headers["authorization"] for request in sent]
    assert sorted(tokens) == sorted(f"Bearer hf_token{number:03}" for number in range(100) for _ in range(2))
    assert not session._hooked and not session._silence


def test_failed_calls_leave_the_session_as_it_was(sent: list[Any]) -> None:
    before = state()
    hub = Hub("hf_token")

    def fail() -> None:
        huggingface_hub.utils.get_session().get("http://127.0.0.1:9/")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hub.call("org/name", fail)
    with pytest.raises(HubError):
        hub.repository("no/such/repository")
    assert state() == before and hub.requests == 1


def test_requests_of_others_are_neither_limited_nor_counted(sent: list[Any]) -> None:
    """While a call is under way, and afterwards."""
    from huggingface_hub.utils import get_session

    hub, under_way, ended = Hub("hf_token"), threading.Event(), threading.Event()

    def call() -> None:
        under_way.set()
        assert ended.wait(60)

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(hub.call, "org/name", call)
        assert under_way.wait(60)
        get_session().get("http://127.0.0.1:9/of/others")
        ended.set()
        calling.result()
    get_session().get("http://127.0.0.1:9/of/others")
    assert hub.requests == hub.bytes == 0
    assert len(sent) == 2
    for request in sent:
        assert request.extensions["timeout"] == session.UNLIMITED
        assert "authorization" not in request.headers


def test_every_request_of_ours_has_a_timeout(sent: list[Any]) -> None:
    hub = Hub("hf_token")
    hub.log_in()
    hub.exists("org/name")
    hub.repository("org/name")
    timeouts = [request.extensions["timeout"] for request in sent]
    assert timeouts[0] == timeouts[1] == {"connect": 30.0, "read": 300.0, "write": 300.0, "pool": 300.0}
    assert timeouts[2] == dict.fromkeys(("connect", "read", "write", "pool"), 30.0)


def test_a_token_does_not_follow_a_redirect_to_another_server(sent: list[Any]) -> None:
    Hub("hf_token").exists("org/moved")
    assert [request.url.host for request in sent] == ["127.0.0.1", "127.0.0.2"]
    assert sent[0].headers["authorization"] == "Bearer hf_token" and "authorization" not in sent[1].headers


def test_a_session_that_is_replaced_meanwhile_is_left_alone(sent: list[Any]) -> None:
    from huggingface_hub.utils import close_session, get_session

    hub = Hub("hf_token")

    def replace() -> None:
        close_session()
        get_session().get("http://127.0.0.1:9/")

    hub.call("org/name", replace)
    hub.log_in()
    assert all(len(hooks) == (kind == "request") for kind, hooks in get_session().event_hooks.items())
    assert not session._hooked
