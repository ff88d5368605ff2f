"""What makes two runs the same: the one place that says so.

An interrupted run is continued, and a finished result left alone, where the run that is asked for has the same identity. The
manifest holds it, so that a result can be told by what it says of itself. What does not change a byte has no part in it:
threads, device, strictness, the places of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.storage import Origin
from pqweights.planning.plan import DEFAULT_METADATA, TensorPlan


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The stated fields.

    kind: master or export. made_by: what the transform says of itself (Transform.describe): a recipe, or a target and its
    options. source_bytes: of the weight files. origin: the Hub repository that is read and its commit, None for a local folder.
    metadata: the __metadata__ of the safetensors files. left_out: tensors that are not carried over, with the reason. model:
    what is known of the original model (model_card.model_facts). master: of an export, what its master's manifest says of itself.
    """

    kind: str
    made_by: dict[str, Any]
    source_bytes: int
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    origin: Origin | None = None
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    left_out: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """sha256 over all fields, and over the version of pqweights, which an interrupted run must share, too."""
        stated = vars(self) | {"tensors": tensors_json(self.tensors), "version": __version__}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def tensors_json(tensors: Sequence[TensorPlan]) -> list[dict[str, Any]]:
    """What a plan says of each tensor."""
    return [tensor.to_json() for tensor in tensors]
