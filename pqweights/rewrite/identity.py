"""The identity of a run: the stated fields that decide, together with the source, every byte of its result.

Three places ask whether two runs are the same, and all of them ask here:

- an interrupted run is continued only by a run of the same identity, whose digest is in its journal (workspace.py);
- a finished result is left alone if its manifest states the identity of the run that is asked for (driver.py);
- the manifest states the identity, so that a result tells what made it (manifest.py).

The content of the source is compared beside it: by the size and time of its files while a run is under way, and by its
fingerprint when the run is finished. Whatever changes no byte is not part of the identity: threads, progress,
strictness, where files lie, and every text that is written for people: why a tensor is treated as it is, what a recipe
is for. Nor is the choice of files that are copied as they are: an interrupted run is continued
with another choice (journal.py), and a finished result with another one is not the result that is asked for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

from pqweights.checkpoint.storage import Origin
from pqweights.planning.plan import DEFAULT_METADATA, TensorPlan

# The first version that makes the same bytes as this one: a run is continued, and a finished result left alone, only by
# a version that agrees. To be raised with every change of what a codec, a recipe or an export writes.
SAME_BYTES_SINCE = "0.2.0"
# That of results whose manifest states none.
UNSTATED_VERSION = "0.2.0"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What makes two runs over the same source the same run, and the prose that goes with it into the manifest.

    kind: "master" or "export"
    made_by: the transform's account of itself (Transform.describe): a recipe, or a target with its options
    source_bytes: size of the weight files that are read
    max_shard_bytes: data bytes after which a new output file begins
    tensors: what becomes of each tensor
    origin: the Hub repository that is read, with its commit; None for a local folder
    metadata: the `__metadata__` of the safetensors files
    container: what there is to say of another format of the files (Container.to_json)
    left_out: tensors that are not carried over, each with the reason
    model: what is known of the original model (checkpoint.config.model_facts)
    master: for an export, what the master's manifest states about the master
    same_bytes_since: the first version that makes the same bytes
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
    same_bytes_since: str = field(default_factory=lambda: SAME_BYTES_SINCE)

    @property
    def decisive(self) -> RunIdentity:
        """The same without prose: two runs are the same if this is equal."""
        return replace(
            self,
            tensors=tuple([tensor._replace(reason="") for tensor in self.tensors]),
            left_out=dict.fromkeys(self.left_out, ""),
            made_by=_without_prose(self.made_by),
            master=_without_prose(self.master),
        )

    def digest(self) -> str:
        """Return the sha256 over all that is decisive."""
        # In JSON, tensors and origin are the lists of their fields.
        stated = dict(vars(self.decisive))
        stated["version"] = stated.pop("same_bytes_since")
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _without_prose(account: dict[str, Any]) -> dict[str, Any]:
    """Return an account of a transform, or of a master, without what a recipe says for people."""
    recipe = account.get("recipe")
    if not isinstance(recipe, dict):
        return account
    stated = {key: value for key, value in recipe.items() if key != "description"}
    if isinstance(rules := recipe.get("rules"), list):
        stated["rules"] = [_without_reason(rule) for rule in rules]
    return account | {"recipe": stated}


def _without_reason(rule: Any) -> Any:
    return {key: value for key, value in rule.items() if key != "reason"} if isinstance(rule, dict) else rule
