"""The identity of a run: the stated fields that decide, together with the source, every byte of its result.

Three places ask whether two runs are the same, and all of them ask here:

- an interrupted run is continued only by a run of the same identity, whose digest is in its journal (workspace.py);
- a finished result is left alone if its manifest states the identity of the run that is asked for (driver.py);
- the manifest states the identity, so that a result tells what made it (manifest.py).

The content of the source is compared beside it: by the size and time of its files while a run is under way, and by its
fingerprint when the run is finished. Whatever changes no byte is not part of the identity: threads, device, progress,
strictness, and where files lie. Nor is the choice of files that are copied as they are: an interrupted run is continued
with another choice (journal.py), and a finished result with another one is not the result that is asked for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from pqweights.checkpoint.storage import Origin
from pqweights.planning.plan import DEFAULT_METADATA, TensorPlan

# The first version that makes the same bytes as this one: a run is continued only by a version that agrees. To be
# raised with every change of what a codec, a recipe or an export writes.
SAME_BYTES_SINCE = "0.2.0"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What makes two runs over the same source the same run.

    kind: "master" or "export"
    made_by: the transform's account of itself (Transform.describe): a recipe, or a target with its options
    source_bytes: size of the weight files that are read
    max_shard_bytes: data bytes after which a new output file begins
    tensors: what becomes of each tensor
    origin: the Hub repository that is read, with its commit; None for a local folder
    metadata: the `__metadata__` of the safetensors files
    container: what there is to say of another format of the files (Container.to_json)
    left_out: tensors that are not carried over, each with the reason
    model: what is known of the original model (model_card.model_facts)
    master: for an export, what the master's manifest states about the master
    """

    kind: str
    made_by: dict[str, Any]
    source_bytes: int
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    origin: Origin | None = None
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    container: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Return the sha256 over all fields and SAME_BYTES_SINCE."""
        # In JSON, tensors and origin are the lists of their fields.
        stated = {**vars(self), "version": SAME_BYTES_SINCE}
        if not self.container:  # it came later than journals that may still be continued
            del stated["container"]
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
