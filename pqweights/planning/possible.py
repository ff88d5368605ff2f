"""Whether a master can be exported to a target, as far as its configuration and its headers tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PossibleExport:
    """What is known of the export of a master to one target, with the target's defaults.

    target: the name of the target
    possible: whether it can be made; None if that is not known
    reason: why not, or what is still to be found out; None if there is nothing
    """

    target: str
    possible: bool | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the target in the JSON of plan and quantize."""
        return {"target": self.target, "possible": self.possible, "reason": self.reason}
