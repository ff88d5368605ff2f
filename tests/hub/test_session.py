"""The official client's session belongs to the whole process: our hooks in it leave the requests of others alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import huggingface_hub
import pytest
from commands import raises
from hub_cases import Client

from pqweights.errors import HubError
from pqweights.storage.hub import UNLIMITED, Hub
from pqweights.storage.repository import open_repository
from pqweights.storage.requests import ATTEMPTS


@pytest.fixture
def sent(client: Client) -> Iterator[list[Any]]:
    """The requests that reach the network, which answers that every repository is there, or is failing."""
    from huggingface_hub.utils import _http

    requests: list[Any] = []

    def answer(request: Any) -> Any:
        requests.append(request)
        if request.url.path.startswith("/api/models/org/moved"):
            return httpx2.Response(307, headers={"Location": "http://127.0.0.2:9/there"})
        if request.url.path.startswith("/failing"):
            return httpx2.Response(503, json={})
        body: dict[str, Any] = {"name": "somebody", "id": "org/name", "sha": "0" * 40, "siblings": [], "private": False}
        return httpx2.Response(200, json=body)

    def factory() -> Any:
        hooks = {"request": [_http.hf_request_event_hook]}
        transport = httpx2.MockTransport(answer)
        return httpx2.Client(transport=transport, event_hooks=hooks, follow_redirects=True, timeout=None)

    huggingface_hub.set_client_factory(factory)
    yield requests
    huggingface_hub.set_client_factory(_http.default_client_factory)


def test_a_hundred_hubs_in_threads_put_two_hooks_into_the_session(sent: list[Any]) -> None:
    from huggingface_hub.utils import get_session

    def use(number: int) -> None:
        hub = Hub(f"hf_token{number:03}")
        assert hub.call("login", hub.api.whoami)["name"] == "somebody"
        open_repository(hub, "org/name")

    use(0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(1, 100)))
    assert [len(hooks) for hooks in get_session().event_hooks.values()] == [2, 1]
    tokens = [request.headers["authorization"] for request in sent]
    assert sorted(tokens) == sorted(f"Bearer hf_token{number:03}" for number in range(100) for _ in range(2))


def test_requests_of_others_are_neither_limited_nor_refused(sent: list[Any]) -> None:
    """While a call is under way, and afterwards."""
    from huggingface_hub.utils import get_session

    hub, under_way, ended = Hub("hf_token"), threading.Event(), threading.Event()

    def call() -> None:
        under_way.set()
        assert ended.wait(60)

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(hub.call, "org/name", call)
        assert under_way.wait(60)
        statuses = [get_session().get("http://127.0.0.1:9/failing").status_code]
        ended.set()
        calling.result()
    statuses.append(get_session().get("http://127.0.0.1:9/failing").status_code)
    assert statuses == [503, 503] and [request.extensions["timeout"] for request in sent] == [UNLIMITED] * 2
    assert not any("authorization" in request.headers for request in sent)


def test_every_request_of_ours_has_a_timeout(sent: list[Any]) -> None:
    hub = Hub("hf_token")
    hub.call("login", hub.api.whoami)
    hub.call("org/name", lambda: hub.api.repo_exists("org/name"))
    open_repository(hub, "org/name")
    timeouts = [request.extensions["timeout"] for request in sent]
    assert timeouts[0] == timeouts[1] == dict.fromkeys(UNLIMITED, 300.0) | {"connect": 30.0}
    assert timeouts[2] == dict.fromkeys(UNLIMITED, 30.0)


def test_temporary_refusals_are_left_to_our_retries(sent: list[Any]) -> None:
    """The official client would send its request six times for each of ours."""
    from huggingface_hub.utils import http_backoff

    with raises(HubError, "is failing"):
        Hub("hf_token").call("org/name", lambda: http_backoff("GET", "http://127.0.0.1:9/failing"))
    assert len(sent) == ATTEMPTS


def test_a_token_does_not_follow_a_redirect_to_another_server(sent: list[Any]) -> None:
    hub = Hub("hf_token")
    hub.call("org/moved", lambda: hub.api.repo_exists("org/moved"))
    assert [request.url.host for request in sent] == ["127.0.0.1", "127.0.0.2"]
    assert sent[0].headers["authorization"] == "Bearer hf_token" and "authorization" not in sent[1].headers
