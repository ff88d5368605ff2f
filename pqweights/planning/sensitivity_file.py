"""How much the loss of a model rises with the error of its weights, group by group: reading, checking, and the file.

The linearity theorem (Malinovskii et al., HIGGS, arXiv:2411.17525, section 3): for small errors the expected rise of the loss
is a sum over layers of alpha * t^2, where t^2 is the relative squared error of the layer's weights. alpha comes from a file that
`pqweights sensitivity` wrote, or from a rule of thumb (heuristic.py). docs/fit.md has the method and the format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import OutputError, SourceError
from pqweights.planning.groups import grouped
from pqweights.planning.sensitivity_rule import heuristic_alphas
from pqweights.strict_json import json_bytes, rounded

VERSION_KEY, VERSION = "pqweights_sensitivity", 1
HEURISTIC = "heuristic"
LEAST_OF_RULE = 1e-3  # an alpha is at least this share of what the rule of thumb says
KINDS = ("random tokens", "text")
# More is no measurement, and would leave the range of float64 in sums.
MOST_ALPHA = 1e30


@dataclass(frozen=True)
class Measured:
    """Of one group of weights. alpha: nats per token for a relative squared error of 1.

    points: (t^2, KL divergence in nats per token) at the levels of noise that were tried.
    """

    name: str
    weights: tuple[str, ...]
    alpha: float
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Sensitivity:
    """Of one checkpoint. method: how it was measured, for the user and for manifests. sha256: of the file it came from."""

    checkpoint: str
    method: dict[str, Any]
    groups: tuple[Measured, ...]
    sha256: str | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The file."""
        return {
            VERSION_KEY: VERSION,
            "checkpoint": self.checkpoint,
            "method": self.method,
            "groups": [
                {
                    "name": g.name,
                    "alpha": rounded(g.alpha),
                    "points": [[rounded(t2), rounded(kl)] for t2, kl in g.points],
                    "weights": list(g.weights),
                }
                for g in self.groups
            ],
        }


def fitted_alpha(points: Sequence[tuple[float, float]]) -> float:
    """The slope through the origin of KL against t^2, by least squares (Algorithm 3 of the paper)."""
    return math.fsum(t2 * kl for t2, kl in points) / math.fsum(t2 * t2 for t2, _ in points)


def alphas_for(
    groups: Mapping[str, Sequence[str]],
    roles: Mapping[str, str],
    weights: Mapping[str, int],
    known: Sensitivity | None,
) -> tuple[dict[str, float], list[str]]:
    """alpha of each group, and the groups of which the file knows nothing: those get what the rule of thumb says.

    groups: name -> names of weights. roles, weights: role and number of weights, by name. known: None for the rule of thumb
    alone. The rule is scaled to the file by the median ratio of what both know.
    """
    rule = heuristic_alphas(groups, roles, weights)
    if known is None:
        return rule, []
    by_weight = {name: group for group in known.groups for name in group.weights}
    alphas: dict[str, float] = {}
    for name, names in groups.items():
        found = {by_weight[weight].name: by_weight[weight] for weight in names if weight in by_weight}
        if found:
            # Groups may have been cut otherwise when they were measured: errors of different weights add up.
            alphas[name] = math.fsum(group.alpha for group in found.values())
    ratios = sorted(alphas[name] / rule[name] for name in alphas if rule[name] > 0)
    scale = ratios[len(ratios) // 2] if ratios else 1.0
    missing = [name for name in groups if name not in alphas]
    # Measured to be nothing, a group would be given nothing, whatever is left.
    return {
        name: max(alphas.get(name, rule[name] * scale), LEAST_OF_RULE * rule[name] * scale) for name in groups
    }, missing


def groups_of(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """The groups of a checkpoint's weights, given as (name, role)."""
    return grouped(weights, is_tied(checkpoint, weights))


def is_tied(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> bool:
    """Whether input and output embeddings are one matrix: by the configuration, else because the latter are not there."""
    config = checkpoint.config or {}
    text = config.get("text_config")
    stated = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return all(role != "lm_head" for _, role in weights) if stated is None else bool(stated)


def write_sensitivity(path: Path, found: Sensitivity) -> None:
    """Write the file, whole or not at all.

    Raises OutputError.
    """
    write_whole(path.absolute().parent, path, [json_bytes(found.to_json())])


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path where something else lies, or whose folder is not there."""
    if path.is_dir() or (path.exists() and not overwrite):
        raise OutputError(f"{path}: is there already; pass --overwrite to replace it, or choose another file")
    if path.exists():
        try:
            read_sensitivity(path)
        except SourceError as error:
            raise OutputError(f"--overwrite replaces a file of sensitivities alone: {error}") from None
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: its folder is not there; make it first")


def read_sensitivity(path: Path) -> Sensitivity:
    """A file that `pqweights sensitivity` wrote.

    Raises SourceError.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}); expected {HEURISTIC!r}, or a file that pqweights sensitivity wrote"
        ) from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: expected JSON that pqweights sensitivity wrote, found {str(error)[:80]!r}"
        ) from None
    if not isinstance(value, dict) or value.get(VERSION_KEY) != VERSION:
        raise SourceError(f"{path}: expected a file that pqweights sensitivity wrote, with {VERSION_KEY} {VERSION}")
    groups = value.get("groups")
    if not isinstance(groups, list) or not groups:
        raise SourceError(f"{path}: groups: expected a list of groups, found {str(groups)[:40]!r}")
    checkpoint, method = value.get("checkpoint"), value.get("method")
    known = isinstance(method, dict) and method.get("kind") in KINDS and isinstance(method.get("tokens"), int)
    if not isinstance(checkpoint, str) or not isinstance(method, dict) or not known:
        raise SourceError(f"{path}: expected a checkpoint and a method in it; measure it again")
    measured = tuple(_group(path, entry) for entry in groups)
    names = [name for group in measured for name in group.weights]
    if len(set(names)) != len(names) or len({group.name for group in measured}) != len(measured):
        raise SourceError(f"{path}: a weight or a group stands there twice; measure it again")
    return Sensitivity(checkpoint, method, measured, hashlib.sha256(data).hexdigest())


def _group(path: Path, entry: Any) -> Measured:
    try:
        name, alpha, weights = entry["name"], float(entry["alpha"]), entry["weights"]
        points = tuple((float(t2), float(kl)) for t2, kl in entry["points"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SourceError(f"{path}: groups: found {str(entry)[:80]!r}, which is none; measure it again") from None
    named = isinstance(weights, list) and bool(weights) and all(isinstance(weight, str) for weight in weights)
    if not isinstance(name, str) or not named or not 0 <= alpha <= MOST_ALPHA:
        raise SourceError(f"{path}: group {str(name)[:80]!r}: expected weights and an alpha from 0 on, found {alpha}")
    return Measured(name, tuple(weights), alpha, points)
