"""What the quantization_config of compressed-tensors says of some weights each, read and written.

Format: https://github.com/vllm-project/compressed-tensors (quantization/quant_config.py, quant_scheme.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pqweights.formats.packing import PackedFormat
from pqweights.kernels.groups import FloatRule, GroupRule

# The layouts that are read.
LAYOUTS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)


def config_group(
    how: PackedFormat, layout: str, targets: Sequence[str], *, channel: bool, activations: bool
) -> dict[str, Any]:
    """Return what a configuration says of the layers that have a format.

    layout: what compressed-tensors calls it
    targets: what matches the layers
    channel: whether each row has one scale, whatever its length
    activations: whether the runtime also rounds what layers read, by what it finds there
    """
    rule = how.rule
    codes: dict[str, Any] = {
        "num_bits": rule.bits,
        "type": "int" if isinstance(rule, GroupRule) else "float",
        "symmetric": not (isinstance(rule, GroupRule) and rule.zeros),
    }
    weights: dict[str, Any] = {"strategy": "group", "group_size": rule.group_size}
    inputs: dict[str, Any] = {**weights, "dynamic": True}
    if rule.rows > 1:
        weights = {"strategy": "block", "block_structure": [rule.rows, rule.group_size]}
    elif channel:
        weights, inputs = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
    elif rule.kind == "nvfp4":
        codes |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
        weights = {"strategy": "tensor_group", "group_size": rule.group_size}
        inputs = {**weights, "dynamic": "local"}
    elif isinstance(rule, FloatRule):
        codes |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.uint8")
    return {
        "targets": list(targets),
        "format": layout,
        "input_activations": codes | inputs if activations else None,
        "output_activations": None,
        "weights": codes | weights | {"dynamic": False},
    }


def config_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what compressed-tensors says of some weights each."""
    groups = settings.get("config_groups")
    members = groups.values() if isinstance(groups, dict) else ()
    return [group if isinstance(group, dict) else {} for group in members]


def schemes(settings: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """Return the widths of codes of compressed-tensors with the sizes of groups, None for a whole row, each once."""
    widths = []
    for weights in (group["weights"] for group in config_groups(settings)):
        size = weights.get("group_size")
        if weights.get("type", "int") == "int":
            widths.append((weights["num_bits"], size if isinstance(size, int) and size > 0 else None))
    return list(dict.fromkeys(widths))


def float_tiles(settings: Mapping[str, Any]) -> list[Any]:
    """Return how many rows and columns share a scale of weights in FP8, as far as they are not whole rows."""
    said: list[Any] = []
    for group in config_groups(settings):
        weights = group.get("weights")
        if isinstance(weights, dict) and (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            block = weights.get("block_structure")
            if isinstance(block, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", block):  # as older versions write it
                block = [int(number) for number in block.split("x")]
            if weights.get("strategy") == "block" and block is not None:
                said.append(block)
            elif weights.get("strategy") == "group":
                said.append([1, weights.get("group_size")])
    return said


def why_not(settings: Mapping[str, Any]) -> str | None:
    """Return what a source has that is not read; None if all is."""
    groups = config_groups(settings)
    for layout in (settings.get("format"), *(group.get("format") for group in groups)):
        if layout is not None and layout not in LAYOUTS:
            return f"compressed-tensors ({layout})"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"compressed-tensors (sparsity_config: {sparsity['format']})"
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        return "compressed-tensors (transform_config: weights in another basis)"
    weights = [group.get("weights") for group in groups]
    if not weights or not all(isinstance(w, dict) and isinstance(w.get("num_bits"), int) for w in weights):
        return f"compressed-tensors ({settings.get('format', 'unknown format')}, config_groups without num_bits)"
    return None
