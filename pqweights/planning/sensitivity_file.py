"""The file of sensitivities: how much the loss of a model rises with the error of its weights, group by group.

The linearity theorem (Malinovskii et al., HIGGS, arXiv:2411.17525, section 3): for small errors the expected rise of
the loss is a sum over layers of alpha * t^2, where t^2 is the relative squared error of the layer's weights. alpha
comes from a file that `pqweights sensitivity` wrote, or from a rule of thumb, without a forward pass: from role,
module, layer and the number of layers. The rule was derived from measurements of small models, and predicts less well
than measuring. docs/fit.md has the method, a comparison and the format.

A group of weights shares one bit width: those that runtimes fuse into one matrix, or compute with in one kernel. These
are q, k and v of a layer; gate and up; the down-projections into the latents of MLA (DeepSeek-V2, arXiv:2405.04434);
the inputs of linear attention; all experts of a layer; and tied embeddings. For codecs that no runtime computes with
groups are taken apart.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from pqweights.checkpoint.models import text_config, text_model
from pqweights.checkpoint.models.description import UNKNOWN, ModelDescription
from pqweights.checkpoint.models.names import TIED_EMBEDDINGS, fused_layer
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import write_whole
from pqweights.common.documents import Count, Document, Number, as_document
from pqweights.common.strict_json import json_bytes, parse_json, rounded
from pqweights.errors import SourceError

# The alpha of a group in a model with one layer; groups in layers get it divided by the number of layers.
EMBEDDING, HEAD, TIED = 0.5, 1.0, 1.5
# The alpha of a group by its module, in this order: the output of attention, its inputs, what follows an activation,
# and what precedes it.
_MODULES = (
    (re.compile(r".*\.(o_proj|out_proj|wo|dense|attn\.c_proj)$"), 0.15),
    (re.compile(r".*\.(qkv|qkv_a|qkv_proj|c_attn|query_key_value|in_proj\w*|\w*_b_proj)$"), 0.3),
    (re.compile(r".*\.(down_proj|w2|fc2|fc_out|dense_4h_to_h|c_proj)$"), 0.35),
    (re.compile(r".*\.(gate_up|gate_up_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h)$"), 0.5),
)
EXPERTS, OTHER = 0.8, 0.4
# The shares of the weights of a fused layer in its alpha, by the ends of their names, up to a factor; others have 1.
_SHARES = (
    (re.compile(r".*\.(q_proj|k_proj|wq|wk|query|key)$"), 0.5),
    (re.compile(r".*\.(v_proj|wv|value)$"), 1.5),
    (re.compile(r".*\.(gate_proj|w1)$"), 1.2),
    (re.compile(r".*\.(up_proj|w3)$"), 0.8),
)
# Factors for the first layer, which feeds all others, and for the last, which feeds the head: less corrects their
# errors.
FIRST, LAST = 3.0, 1.5
_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|layer)\.)(\d{1,9})\.")


def heuristic_alphas(groups: Mapping[str, Sequence[str]], roles: Mapping[str, str]) -> dict[str, float]:
    """Return the alpha of each group.

    groups: the names of the weights in each group
    roles: the role of each weight
    """
    places = {name: match for name in groups if (match := _LAYER.match(name))}
    layers_of: dict[str, set[int]] = {}
    for layer in places.values():
        layers_of.setdefault(layer[1], set()).add(int(layer[2]))
    result = {}
    for name, names in groups.items():
        alpha = _alpha_of_one_layer(name, {roles[weight] for weight in names})
        if name in places:
            stack, number = places[name][1], int(places[name][2])
            layers = layers_of[stack]
            alpha *= (FIRST if number == min(layers) else LAST if number == max(layers) else 1.0) / len(layers)
        result[name] = alpha
    return result


def taken_apart(
    groups: Mapping[str, Sequence[str]],
    alphas: Mapping[str, float],
    roles: Mapping[str, str],
    known: Sensitivity | None = None,
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return groups of single weights, and their alphas, in place of the groups that a runtime fuses.

    For codecs whose masters no runtime computes with. Experts and tied embeddings stay together. The alpha of a group
    is divided as its weights were measured, if each was; else by a rule of thumb, which like that of the alphas comes
    from measurements of small models.
    """
    alone = {group.weights[0]: group.alpha for group in known.groups if len(group.weights) == 1} if known else {}
    single: dict[str, list[str]] = {}
    divided: dict[str, float] = {}
    for name, names in groups.items():
        if name == TIED_EMBEDDINGS or any(roles[weight] == "expert" for weight in names):
            single[name], divided[name] = list(names), alphas[name]
            continue
        modules = {weight: weight.removesuffix(".weight") for weight in names}
        shares = {
            weight: next((share for pattern, share in _SHARES if pattern.match(module)), 1.0)
            for weight, module in modules.items()
        }
        measured = {weight: alone[weight] for weight in names if weight in alone}
        if len(measured) == len(names) and sum(measured.values()) > 0:
            shares = measured
        for weight, module in modules.items():
            single[module] = [weight]
            divided[module] = alphas[name] * (shares[weight] / math.fsum(shares.values()))
    return single, divided


def _alpha_of_one_layer(group: str, roles: set[str]) -> float:
    """Return the alpha of a group in a model with one layer, by the group's name and the roles of its weights."""
    if group == TIED_EMBEDDINGS:
        return TIED
    if roles == {"embedding"}:
        return EMBEDDING
    if roles == {"lm_head"}:
        return HEAD
    if "expert" in roles:
        return EXPERTS
    return next((value for pattern, value in _MODULES if pattern.match(group)), OTHER)


def grouped(weights: Iterable[tuple[str, str]], tied: bool, model: ModelDescription = UNKNOWN) -> dict[str, list[str]]:
    """Group weights, given as (name, role); return the names in each group, groups and names in the given order."""
    groups: dict[str, list[str]] = {}
    for name, role in weights:
        groups.setdefault(fused_layer(name, role, tied=tied, in_masters=True, model=model), []).append(name)
    return groups


VERSION_KEY, VERSION = "pqweights_sensitivity", 1
HEURISTIC = "heuristic"
LEAST_OF_RULE = 1e-3  # an alpha is at least this share of what the rule of thumb gives
# No measurement gives more, and sums would leave the range of float64.
MOST_ALPHA = 1e30


class Measured(Document, frozen=True, kw_only=True):
    """What was measured of one group of weights.

    name: the name of the group
    alpha: nats per token for a relative squared error of 1
    points: in files of earlier versions, (t^2, KL divergence in nats per token) at each level of noise
    weights: the names of its weights
    """

    name: str
    alpha: Annotated[float, Meta(ge=0, le=MOST_ALPHA)]
    points: tuple[tuple[Number, Number], ...] = ()
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
                    **({"points": [list(map(rounded, point)) for point in group.points]} if group.points else {}),
                    "weights": group.weights,
                }
                for group in self.groups
            ],
        }


class _Method(Document, frozen=True):
    """What every file says of how its sensitivities were measured."""

    kind: Literal["random tokens", "text", "sample"]
    tokens: Count


class _SensitivityFile(Document, frozen=True, kw_only=True):
    checkpoint: str
    method: _Method
    groups: Annotated[tuple[Measured, ...], Meta(min_length=1)]


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
        known_groups = {by_weight[weight].name: by_weight[weight] for weight in names if weight in by_weight}
        if known_groups:
            # The groups may have been others when they were measured: errors of different weights add up.
            alphas[name] = math.fsum(group.alpha for group in known_groups.values())
    ratios = sorted(alphas[name] / rule[name] for name in alphas if rule[name] > 0)
    scale = ratios[len(ratios) // 2] if ratios else 1.0
    missing = [name for name in groups if name not in alphas]
    # A group that was measured to be insensitive would otherwise get no bits at all, whatever is left.
    return {
        name: max(alphas.get(name, rule[name] * scale), LEAST_OF_RULE * rule[name] * scale) for name in groups
    }, missing


def groups_of(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Group the weights of a checkpoint, given as (name, role); return the names in each group."""
    return grouped(weights, is_tied(checkpoint, weights), text_model(checkpoint.config))


def is_tied(checkpoint: Checkpoint, weights: Sequence[tuple[str, str]]) -> bool:
    """Whether input and output embeddings are one matrix.

    The configuration tells; if it does not, they are tied if there are no output embeddings.
    """
    key = "tie_word_embeddings"
    stated = (checkpoint.config or {}).get(key, text_config(checkpoint.config).get(key))
    return all(role != "lm_head" for _, role in weights) if stated is None else bool(stated)


def write_sensitivity(path: Path, sensitivity: Sensitivity) -> None:
    """Write the file, whole or not at all.

    Raises OutputError.
    """
    write_whole(path.absolute().parent, path, [json_bytes(sensitivity.to_json())])


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
    file = as_document(value, _SensitivityFile, lambda problem: SourceError(f"{path}: {problem}; measure it again"))
    names = [name for group in file.groups for name in group.weights]
    if len(set(names)) != len(names) or len({group.name for group in file.groups}) != len(file.groups):
        raise SourceError(f"{path}: a weight or a group is there twice; measure it again")
    return Sensitivity(
        checkpoint=file.checkpoint, method=value["method"], groups=file.groups, sha256=hashlib.sha256(data).hexdigest()
    )
