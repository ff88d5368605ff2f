"""Sensitivities by a rule of thumb, without a forward pass: from role, module, layer and the number of layers.

The rule was derived from measurements of small models, and predicts less well than measuring; docs/fit.md compares
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pqweights.planning.groups import TIED as TIED_EMBEDDINGS

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
# Factors for the first layer, which feeds all others, and for the last, which feeds the head: less corrects their
# errors.
FIRST, LAST = 3.0, 1.5
_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|layer)\.)(\d{1,9})\.")


def heuristic_alphas(groups: Mapping[str, Sequence[str]], roles: Mapping[str, str]) -> dict[str, float]:
    """Return the alpha of each group.

    groups: the names of the weights in each group
    roles: the role of each weight
    """
    places = {name: found for name in groups if (found := _LAYER.match(name))}
    layers_of: dict[str, set[int]] = {}
    for found in places.values():
        layers_of.setdefault(found[1], set()).add(int(found[2]))
    result = {}
    for name, names in groups.items():
        alpha = _alpha_of_one_layer(name, {roles[weight] for weight in names})
        if name in places:
            stack, number = places[name][1], int(places[name][2])
            layers = layers_of[stack]
            alpha *= (FIRST if number == min(layers) else LAST if number == max(layers) else 1.0) / len(layers)
        result[name] = alpha
    return result


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
