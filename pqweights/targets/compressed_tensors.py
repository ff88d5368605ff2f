"""What config.json says to vLLM and transformers of weights in the formats of compressed-tensors.

Format: https://github.com/vllm-project/compressed-tensors (quantization/quant_config.py, quant_scheme.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pqweights.checkpoint.gguf.pooling import MODULES
from pqweights.checkpoint.source import Checkpoint
from pqweights.formats.compressed_tensors import config_group
from pqweights.formats.microscaling import HEAD
from pqweights.models import described, text_model
from pqweights.models.names import renamed, tower_of
from pqweights.targets.architectures import renames_towers, uses_weights_early
from pqweights.targets.bf16 import role_of
from pqweights.targets.linear import Chosen, LinearFormat, module_of, patterns

# The modules of routers, by the names that they have in memory.
ROUTERS = r"re:.*\.(gate|router)$"
MIXED = "mixed-precision"


def quantization_config(
    checkpoint: Checkpoint, chosen: Mapping[str, Chosen], formats: Mapping[str, LinearFormat]
) -> dict[str, Any]:
    """Return the quantization_config: all linear layers but those to be ignored.

    chosen: the formats of the weights that are rounded, keys of `formats`
    """
    layers = linear_layers(checkpoint)
    layouts = dict.fromkeys(formats[choice.format].called for choice in chosen.values())
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": next(iter(layouts)) if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": _group(formats[name], size, targets)
            for number, (name, size, targets) in enumerate(_targets(layers, chosen))
        },
        "ignore": _ignored(checkpoint, layers, chosen),
    }
    if decodes_at_once(checkpoint):
        # Read by transformers alone, which then decodes each weight as it loads it. By default it keeps all of them
        # packed until the first call. Such a model asks for them before, and sentence-transformers calls modules in
        # the model that transformers does not see called.
        quantization["dequantize"] = True
    return quantization


def decodes_at_once(checkpoint: Checkpoint) -> bool:
    """Whether transformers, or sentence-transformers with it, must decode weights as it loads them."""
    return uses_weights_early(checkpoint.config) or MODULES in checkpoint.companions


def linear_layers(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights that may be taken for linear layers, or by vLLM for fused experts."""
    may_be = [t for t in checkpoint.tensors if len(t.shape) in (2, 3)]
    model = text_model(checkpoint.config)
    return [t.name for t in may_be if role_of(t, model) not in ("bias", "buffer")]


def _group(how: LinearFormat, size: int, targets: list[str]) -> dict[str, Any]:
    """Return what config.json says of the layers that have a format in groups of a size."""
    of_layers = how.format((how.rows, size), size)
    return config_group(of_layers, how.called, targets, channel=how.is_channel, activations=how.activations)


def _targets(layers: Sequence[str], chosen: Mapping[str, Chosen]) -> list[tuple[str, int, list[str]]]:
    """Return the formats and group sizes with what matches their layers: one alone is that of all linear layers.

    Of several, each names its layers, and the first takes all others, such as those that a loader
    renames. That of the experts comes first: transformers takes the first one whose expressions contain "experts" for
    theirs, and those of a shared expert do, too.
    """
    by_layer = {name: (choice.format, choice.size) for name, choice in chosen.items()}
    different = sorted(set(by_layer.values()), key=lambda pair: (-pair[1], pair[0]))
    if len(different) == 1:
        heads = [name for name in chosen if _is_head(name)]  # no linear layer in vLLM
        return [(*different[0], [*patterns(heads, [name for name in layers if name not in heads]), "Linear"])]
    result = []
    for pair in different:
        own = [name for name in layers if by_layer.get(name) == pair]
        targets = patterns(own, [name for name in layers if by_layer.get(name) != pair])
        result.append((*pair, [*targets, "Linear"] if pair == different[0] else targets))
    of_experts = next((pair for name, pair in by_layer.items() if ".experts." in name), None)
    return sorted(result, key=lambda group: (group[0], group[1]) != of_experts)


def _ignored(checkpoint: Checkpoint, layers: Sequence[str], chosen: Mapping[str, Chosen]) -> list[str]:
    """Return expressions that match the layers that stay plain, and no others."""
    rounded = [name for name in layers if name in chosen]
    plain = sorted(set(layers) - set(rounded), key=layers.index)
    by_type, model = described((checkpoint.config or {}).get("model_type")), text_model(checkpoint.config)
    numbered, others = [*filter(_is_numbered, plain)], [*rounded]
    for names in (numbered, others):
        names += [other for name in [*names] if (other := renamed(name, by_type)) != name]
    result = [
        *([] if any(module_of(name) == "lm_head" for name in rounded) else ["lm_head"]),
        *patterns(numbered, others),
    ]
    has_routers = any(role_of(tensor, model) == "router" for tensor in checkpoint.tensors)
    if has_routers and not any(re.match(ROUTERS.removeprefix("re:"), module_of(name)) for name in rounded):
        result.append(ROUTERS)  # transformers renames some of them as it loads the checkpoint
    if renames_towers(checkpoint.config):  # all modules of those that stay plain, whatever they are called within
        towers = dict.fromkeys(tower for name in plain if (tower := tower_of(name)) is not None)
        result += [rf"re:(.*\.)?{re.escape(tower)}\..*" for tower in towers if tower not in map(tower_of, rounded)]
    return [*result, _outside(rounded, plain)]


def _is_head(weight: str) -> bool:
    return module_of(weight).rpartition(".")[2] == HEAD


def _outside(rounded: Sequence[str], plain: Sequence[str]) -> str:
    """Return an expression that matches every module outside of the numbered layers, except for those that are rounded.

    A model may have modules there that the file does not name: a head that is tied to the embedding, whose name is
    lm_head in some models only, or a new head.
    """
    outside = [name for name in rounded if not _is_numbered(name)]
    excluded = [r"(.*\.)?\d+(\..*)?$", *(e.removeprefix("re:") for e in patterns(outside, plain))]
    # Not a match of the empty name, which modules of vLLM have that are built without one; and the same whether the
    # expression is searched or matched.
    return f"re:^(?!(?:{'|'.join(excluded)})).+$"


def _is_numbered(weight: str) -> bool:
    """Whether a weight belongs to one of several layers or experts."""
    return any(component.isdigit() for component in module_of(weight).split("."))
