"""Sensitivities: how much the loss of a model rises with the error of its weights, group by group.

The linearity theorem (Malinovskii et al., HIGGS, arXiv:2411.17525, section 3): for small errors the expected rise of
the loss is a sum over layers of alpha * t^2, where t^2 is the relative squared error of the layer's weights. alpha
is measured (calibrate/sensitivity.py), or comes from a rule of thumb, without a forward pass: from role, module, layer
and the number of layers. The rule was derived from measurements of small models, and predicts less well than measuring.
docs/fit.md has the method and a comparison.

A group of weights shares one bit width: those that runtimes fuse into one matrix, or compute with in one kernel. These
are q, k and v of a layer; gate and up; the down-projections into the latents of MLA (DeepSeek-V2, arXiv:2405.04434);
the inputs of linear attention; all experts of a layer; and tied embeddings. For codecs that no runtime computes with
groups are taken apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.strict_json import rounded
from pqweights.models import text_config, text_model
from pqweights.models.description import UNKNOWN, ModelDescription
from pqweights.models.names import TIED_EMBEDDINGS, fused_layer


class ModuleAlpha(NamedTuple):
    """What the rule of thumb says of a kind of modules.

    alpha: of those of all layers together, in a model of USUAL_LAYERS layers
    first, last: the factors of the first layer and of the last
    """

    alpha: float
    first: float = 1.0
    last: float = 1.0


EMBEDDING, HEAD, TIED = ModuleAlpha(0.3), ModuleAlpha(1.0), ModuleAlpha(1.2)
EXPERTS, OTHER = ModuleAlpha(1.7, 2.0, 2.5), ModuleAlpha(0.8, 1.5, 1.5)
# Modules by name, in this order: the output of attention, its inputs, what follows an activation, and what precedes it.
_MODULES = (
    (re.compile(r".*\.(o_proj|out_proj|wo|dense|attn\.c_proj)$"), ModuleAlpha(0.3, 2.0)),
    (re.compile(r".*\.(qkv|qkv_a|qkv_proj|c_attn|query_key_value|in_proj\w*|\w*_b_proj)$"), ModuleAlpha(1.06)),
    (re.compile(r".*\.(down_proj|w2|fc2|fc_out|dense_4h_to_h|c_proj)$"), ModuleAlpha(0.8, 2.0, 2.0)),
    (re.compile(r".*\.(gate_up|gate_up_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h)$"), ModuleAlpha(1.0, 1.5, 3.0)),
)
# All layers together have the more of it the more there are, but less than in proportion.
USUAL_LAYERS, OF_LAYERS = 24, 1 / 3
# The shares of the weights of a fused layer in its alpha, by the ends of their names, up to a factor; others have 1.
_SHARES = (
    (re.compile(r".*\.(q_proj|k_proj|wq|wk|query|key)$"), 0.4),
    (re.compile(r".*\.(v_proj|wv|value)$"), 2.2),
    (re.compile(r".*\.(gate_proj|w1)$"), 0.9),
    (re.compile(r".*\.(up_proj|w3)$"), 1.1),
)
_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|layer)\.)(\d{1,9})\.")


def heuristic_alphas(groups: Mapping[str, Sequence[str]], roles: Mapping[str, str]) -> dict[str, float]:
    """Return the alpha of each group.

    groups: the names of the weights in each group
    roles: the role of each weight
    """
    matches = {name: match for name in groups if (match := _LAYER.match(name))}
    layers_of: dict[str, set[int]] = {}
    for match in matches.values():
        layers_of.setdefault(match[1], set()).add(int(match[2]))
    result = {}
    for name, names in groups.items():
        rule, layer = _alpha_of(name, {roles[weight] for weight in names}), matches.get(name)
        result[name] = rule.alpha
        if layer is not None:
            layers, number = layers_of[layer[1]], int(layer[2])
            result[name] *= (len(layers) / USUAL_LAYERS) ** OF_LAYERS / len(layers)
            result[name] *= rule.first if number == min(layers) else rule.last if number == max(layers) else 1.0
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
    alone = {} if known is None else known.alphas
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


def _alpha_of(group: str, roles: set[str]) -> ModuleAlpha:
    """Return what the rule of thumb says of a group, by its name and the roles of its weights."""
    if group == TIED_EMBEDDINGS:
        return TIED
    if roles == {"embedding"}:
        return EMBEDDING
    if roles == {"lm_head"}:
        return HEAD
    if "expert" in roles:
        return EXPERTS
    return next((rule for pattern, rule in _MODULES if pattern.match(group)), OTHER)


def grouped(weights: Iterable[tuple[str, str]], tied: bool, model: ModelDescription = UNKNOWN) -> dict[str, list[str]]:
    """Group weights, given as (name, role); return the names in each group, groups and names in the given order."""
    groups: dict[str, list[str]] = {}
    for name, role in weights:
        groups.setdefault(fused_layer(name, role, tied=tied, in_masters=True, model=model), []).append(name)
    return groups


HEURISTIC = "heuristic"
LEAST_OF_RULE = 1e-3  # an alpha is at least this share of what the rule of thumb gives


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The sensitivities of one checkpoint.

    method: how they were measured, for the user and for manifests
    alphas: of each weight that was measured, in nats per token for a relative squared error of 1
    """

    method: dict[str, Any]
    alphas: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return what manifests say of them."""
        return {**self.method, "alphas": self.alphas}

    def scaled(self, scale: float) -> Sensitivity:
        """Return the same, multiplied by a number, which manifests then state."""
        alphas = {name: rounded(alpha * scale) for name, alpha in self.alphas.items()}
        return Sensitivity(method=self.method | {"scale": rounded(scale)}, alphas=alphas)

    @staticmethod
    def read(stated: Mapping[str, Any]) -> Sensitivity:
        """Return the sensitivities that a manifest states."""
        return Sensitivity(
            method={key: value for key, value in stated.items() if key != "alphas"}, alphas=dict(stated["alphas"])
        )


def alphas_for(
    groups: Mapping[str, Sequence[str]], *, roles: Mapping[str, str], known: Sensitivity | None
) -> tuple[dict[str, float], list[str]]:
    """Return the alpha of each group, and the groups that were not measured, which get that of the rule of thumb.

    groups: the names of the weights in each group
    roles: the role of each weight
    known: what was measured; None for the rule of thumb alone

    The rule is scaled to the measurement by the median ratio over the groups that both have.
    """
    rule = heuristic_alphas(groups, roles)
    if known is None:
        return rule, []
    alphas: dict[str, float] = {}
    for name, names in groups.items():
        if measured := [known.alphas[weight] for weight in names if weight in known.alphas]:
            alphas[name] = math.fsum(measured)  # errors of different weights add up
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
