"""Expressions with which configurations name layers: those of compressed-tensors, which torchao's matches read, too."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence


def module_of(weight: str) -> str:
    """Return the name of the module that holds a weight; for fused experts, that of all experts."""
    return re.sub(r"\.experts\.[a-z_]+$", ".experts", weight.removesuffix(".weight"))


def patterns(weights: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return expressions of compressed-tensors that match the modules of some weights, and none of the others.

    Each is as general as it can be without matching another module. It leaves open the prefix before the layers, which
    loaders add or remove, and the numbers of layers and experts.
    """
    excluded = sorted({module_of(other) for other in others})

    @functools.cache
    def takes_in_others(expression: str) -> bool:
        compiled = re.compile(f"{expression}$")
        return any(compiled.match(module) for module in excluded)

    result: dict[str, None] = {}  # a set that keeps its order
    for module in map(module_of, weights):
        for expression in _expressions(module):
            if expression in result or not takes_in_others(expression):
                break
        result[expression] = None
    return [f"re:{expression}$" for expression in result]


def _expressions(module: str) -> Iterator[str]:
    """Yield expressions that match a module, the most general first: each later one includes more of the prefix."""
    components = module.split(".")
    numbers = [place for place, component in enumerate(components) if component.isdigit()]
    end = r"(\..*)?" if components[-1] == "experts" else ""
    for first in range(max(numbers[0] - 1, 0) if numbers else 0, -1, -1):
        tail = re.escape(".".join(components[first:])) + end
        yield r"(.*\.)?" + _NUMBER.sub(r"\\d+", tail)
        if len(numbers) > 1:  # all experts of this layer
            start = _NUMBER.search(tail)
            assert start is not None
            yield r"(.*\.)?" + tail[: start.end()] + _NUMBER.sub(r"\\d+", tail[start.end() :])
        yield r"(.*\.)?" + tail
    yield re.escape(module) + end


_NUMBER = re.compile(r"(?<![^.])\d+(?![^\\.])")
