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
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import PqweightsError, SourceError
from pqweights.planning.groups import grouped
from pqweights.planning.sensitivity_rule import heuristic_alphas
from pqweights.strict_json import Fields, Wrong, is_number, json_bytes, parse_json, rounded

VERSION_KEY, VERSION = "pqweights_sensitivity", 1
HEURISTIC = "heuristic"
LEAST_OF_RULE = 1e-3  # an alpha is at least this share of what the rule of thumb gives
KINDS = ("random tokens", "text")
# No measurement gives more, and sums would leave the range of float64.
MOST_ALPHA = 1e30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one group of weights.

    name: the name of the group
    weights: the names of its weights
    alpha: nats per token for a relative squared error of 1
    points: (t^2, KL divergence in nats per token) at each level of noise
    """

    name: str
    weights: tuple[str, ...]
    alpha: float
    points: tuple[tuple[float, float], ...]


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
                    "weights": list(group.weights),
                }
                for group in self.groups
            ],
        }


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
        value = parse_json(data)
    except ValueError as error:
        raise SourceError(f"{path}: {error}; expected a file that pqweights sensitivity wrote") from None
    if not isinstance(value, dict) or value.get(VERSION_KEY) != VERSION:
        raise SourceError(f"{path}: expected a file that pqweights sensitivity wrote, with {VERSION_KEY} {VERSION}")
    wrong = _wrong(path)
    fields = Fields(value, wrong)
    groups = tuple(_parse_group(path, entry) for entry in fields.items("groups"))
    if not groups:
        raise wrong("groups", "at least one group", [])
    names = [name for group in groups for name in group.weights]
    if len(set(names)) != len(names) or len({group.name for group in groups}) != len(groups):
        raise SourceError(f"{path}: a weight or a group is there twice; measure it again")
    return Sensitivity(
        checkpoint=fields.text("checkpoint"),
        method=_checked_method(fields.fields("method"), fields.mapping("method"), wrong),
        groups=groups,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _checked_method(fields: Fields, method: dict[str, Any], wrong: Wrong) -> dict[str, Any]:
    """Return a method whose kind is known."""
    if fields.text("kind") not in KINDS:
        raise wrong("kind", " or ".join(map(repr, KINDS)), fields.raw("kind"))
    fields.count("tokens")
    return method


def _parse_group(path: Path, entry: Any) -> Measured:
    name = Fields(entry, _wrong(path, "groups: "), "group").text("name")
    wrong = _wrong(path, f"group {name[:80]!r}: ")
    fields = Fields(entry, wrong)
    alpha, weights = fields.number("alpha"), fields.texts("weights")
    if not 0 <= alpha <= MOST_ALPHA:
        raise wrong("alpha", f"a number from 0 to {MOST_ALPHA:g}", alpha)
    if not weights:
        raise wrong("weights", "at least one weight", weights)
    points = []
    for point in fields.items("points"):
        if not isinstance(point, list) or len(point) != 2 or not all(map(is_number, point)):
            raise wrong("points", "pairs of numbers", point)
        points.append((float(point[0]), float(point[1])))
    return Measured(name=name, weights=tuple(weights), alpha=alpha, points=tuple(points))


def _wrong(path: Path, where: str = "") -> Wrong:
    """Return the errors for fields of the file; `where` precedes the key."""

    def wrong(key: str, expected: str, found: Any) -> PqweightsError:
        return SourceError(f"{path}: {where}{key}: expected {expected}, found {str(found)[:80]!r}; measure it again")

    return wrong
