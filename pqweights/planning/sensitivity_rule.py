"""Sensitivities by a rule of thumb, without a forward pass: from role, place and number of layers.

The rule was made from what was measured on small models, and is weaker than measuring; docs/fit.md has both side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pqweights.planning import groups as fusion

# alpha of a group in a model of one layer; those of layers are shared by all of them.
EMBEDDING, HEAD, TIED = 0.5, 1.0, 1.5
# By module: what feeds the residual stream, what is behind an activation or a softmax.
_MODULES = (
    (re.compile(r".*\.(o_proj|out_proj|wo|dense|attn\.c_proj)$"), 0.15),
    (re.compile(r".*\.(qkv|qkv_a|qkv_proj|c_attn|query_key_value|in_proj\w*|\w*_b_proj)$"), 0.3),
    (re.compile(r".*\.(down_proj|w2|fc2|fc_out|dense_4h_to_h|c_proj)$"), 0.35),
    (re.compile(r".*\.(gate_up|gate_up_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h)$"), 0.5),
)
EXPERTS, OTHER = 0.8, 0.4
# The first layer feeds all others, and the last one the head, with less to correct it.
FIRST, LAST = 3.0, 1.5
_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|layer)\.)(\d{1,9})\.")


def heuristic_alphas(
    groups: Mapping[str, Sequence[str]], roles: Mapping[str, str], weights: Mapping[str, int]
) -> dict[str, float]:
    """alpha of each group: name -> names of its weights. roles, weights: role and number of weights, by name."""
    places = {name: found for name in groups if (found := _LAYER.match(name))}
    depths: dict[str, set[int]] = {}
    for found in places.values():
        depths.setdefault(found[1], set()).add(int(found[2]))
    result = {}
    for name, names in groups.items():
        kinds = {roles[weight] for weight in names}
        if name == fusion.TIED:
            alpha = TIED
        elif kinds == {"embedding"}:
            alpha = EMBEDDING
        elif kinds == {"lm_head"}:
            alpha = HEAD
        elif "expert" in kinds:
            alpha = EXPERTS
        else:
            alpha = next((value for pattern, value in _MODULES if pattern.match(name)), OTHER)
        if name in places:
            stack, number = places[name][1], int(places[name][2])
            layers = depths[stack]
            alpha *= (FIRST if number == min(layers) else LAST if number == max(layers) else 1.0) / len(layers)
        result[name] = alpha
    return result
