"""The loopback Hub, and the command line that talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_cases import Client
from loopback_hub import LoopbackHub


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of the Hub's cache."""
    return tmp_path / "home"


@pytest.fixture
def client(hub: LoopbackHub, home: Path) -> Iterator[Client]:
    from huggingface_hub.utils import close_session

    with pytest.MonkeyPatch.context() as patch:
        yield Client(url=hub.url, home=home, token=hub.token, patch=patch).set_up()
        close_session()
