"""The file of sensitivities: how much the loss of a model rises with the error of its weights, group by group.

The linearity theorem (Malinovskii et al., HIGGS, arXiv:2411.17525, section 3): for small errors the expected rise of
the loss is a sum over layers of alpha * t^2, where t^2 is the relative squared error of the layer's weights. alpha
comes from a file that `pqweights sensitivity` wrote, or from a rule of thumb (sensitivity_rule.py). docs/fit.md has the
method and the format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import write_whole
from pqweights.common.documents import Count, Document, Number, as_document
from pqweights.common.strict_json import json_bytes, parse_json, rounded
from pqweights.errors import SourceError
from pqweights.planning.groups import grouped
from pqweights.planning.sensitivity_rule import heuristic_alphas

VERSION_KEY, VERSION = "pqweights_sensitivity", 1
HEURISTIC = "heuristic"
LEAST_OF_RULE = 1e-3  # an alpha is at least this share of what the rule of thumb gives
# No measurement gives more, and sums would leave the range of float64.
MOST_ALPHA = 1e30


class Measured(Document, frozen=True, kw_only=True):
    """What was measured of one group of weights.

    name: the name of the group
    alpha: nats per token for a relative squared error of 1
    points: (t^2, KL divergence in nats per token) at each level of noise
    weights: the names of its weights
    """

    name: str
    alpha: Annotated[float, Meta(ge=0, le=MOST_ALPHA)]
    points: tuple[tuple[Number, Number], ...]
    weights: Annotated[tuple[str, ...], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The sensitivities of one checkpoint.

    checkpoint: its fingerprint
    method: how they were measured, for the user and for manifests
    groups: what was measured
    sha256: that of the file that was read, if one was
    """

    checkpoint: str
    method: dict[str, Any]
    groups: tuple[Measured, ...]
    sha256: str | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the file."""
        return {
            VERSION_KEY: VERSION,
            "checkpoint": self.checkpoint,
            "method": self.method,
            "groups": [
                {
                    "name": group.name,
                    "alpha": rounded(group.alpha),
                    "points": [[rounded(t2), rounded(kl)] for t2, kl in group.points],
                    "weights": group.weights,
                }
                for group in self.groups
            ],
        }


class _Method(Document, frozen=True):
    """What every file says of how its sensitivities were measured."""

    kind: Literal["random tokens", "text"]
    tokens: Count


class _File(Document, frozen=True, kw_only=True):
    checkpoint: str
    method: _Method
    groups: Annotated[tuple[Measured, ...], Meta(min_length=1)]


def fitted_alpha(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope through the origin of KL against t^2, by least squares (Algorithm 3 of the paper)."""
    return math.fsum(t2 * kl for t2, kl in points) / math.fsum(t2 * t2 for t2, _ in points)


def alphas_for(
    groups: Mapping[str, Sequence[str]], *, roles: Mapping[str, str], known: Sensitivity | None
) -> tuple[dict[str, float], list[str]]:
    """Return the alpha of each group, and the groups that the file does not have, which get that of the rule of thumb.

    groups: the names of the weights in each group
    roles: the role of each weight
    known: what the file holds; None for the rule of thumb alone

    The rule is scaled to the file by the median ratio over the groups that both have.
    """
    rule = heuristic_alphas(groups, roles)
    if known is None:
        return rule, []
    by_weight = {name: group for group in known.groups for name in group.weights}
    alphas: dict[str, float] = {}
    for name, names in groups.items():
        found = {by_weight[weight].name: by_weight[weight] for weight in names if weight in by_weight}
        if found:
            # The groups may have been others when they were measured: errors of different weights add up.
            alphas[name] = math.fsum(group.alpha for group in found.values())
    ratios = sorted(alphas[name] / rule[name] for name in alphas if rule[name] > 0)
    scale = ratios[len(ratios) // 2] if ratios else 1.0
    missing = [name for name in groups if name not in alphas]
    # A group that was measured to be insensitive would otherwise get no bits at all, whatever is left.
    return {
        name: max(alphas.get(name, rule[name] * scale), LEAST_OF_RULE * rule[name] * scale) for name in groups
    }, missing


def groups_of(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Group the weights of a checkpoint, given as (name, role); return the names in each group."""
    return grouped(weights, is_tied(checkpoint, weights))


def is_tied(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> bool:
    """Whether input and output embeddings are one matrix.

    The configuration tells; if it does not, they are tied if there are no output embeddings.
    """
    config = checkpoint.config or {}
    text = config.get("text_config")
    stated = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return all(role != "lm_head" for _, role in weights) if stated is None else bool(stated)


def write_sensitivity(path: Path, found: Sensitivity) -> None:
    """Write the file, whole or not at all.

    Raises OutputError.
    """
    write_whole(path.absolute().parent, path, [json_bytes(found.to_json())])


def read_sensitivity(path: Path) -> Sensitivity:
    """Read a file that `pqweights sensitivity` wrote.

    Raises SourceError for any other file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}); expected {HEURISTIC!r}, or a file that pqweights sensitivity "
            "wrote"
        ) from None
    try:
        value = parse_json(data, strict=True)
    except ValueError as error:
        raise SourceError(f"{path}: {error}; expected a file that pqweights sensitivity wrote") from None
    if not isinstance(value, dict) or value.get(VERSION_KEY) != VERSION:
        raise SourceError(f"{path}: expected a file that pqweights sensitivity wrote, with {VERSION_KEY} {VERSION}")
    file = as_document(value, _File, lambda problem: SourceError(f"{path}: {problem}; measure it again"))
    names = [name for group in file.groups for name in group.weights]
    if len(set(names)) != len(names) or len({group.name for group in file.groups}) != len(file.groups):
        raise SourceError(f"{path}: a weight or a group is there twice; measure it again")
    return Sensitivity(
        checkpoint=file.checkpoint,
        method=value["method"],
        groups=file.groups,
        sha256=hashlib.sha256(data).hexdigest(),
    )
