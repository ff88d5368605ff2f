"""The official client of the Hub (huggingface_hub 2.4), imported when the Hub is first used.

Most commands never need it, and importing it takes half as long as they run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OfficialClient:
    """The modules of the official client, which have no types here.

    library: huggingface_hub itself
    utils, errors, constants: its modules of these names
    http: the HTTP library that it uses
    """

    library: Any
    utils: Any
    errors: Any
    constants: Any
    http: Any

    @property
    def progress_bars(self) -> dict[str, bool]:
        """Whether it shows progress bars: of all kinds as "_global", and of single kinds."""
        states: dict[str, bool] = importlib.import_module("huggingface_hub.utils.tqdm").progress_bar_states
        return states

    @property
    def file_download(self) -> Any:
        """Its module of this name, which not every command needs."""
        return importlib.import_module("huggingface_hub.file_download")


def load_official_client() -> OfficialClient:
    """Import the official client."""
    return OfficialClient(
        library=importlib.import_module("huggingface_hub"),
        utils=importlib.import_module("huggingface_hub.utils"),
        errors=importlib.import_module("huggingface_hub.errors"),
        constants=importlib.import_module("huggingface_hub.constants"),
        http=importlib.import_module("httpx2"),
    )
