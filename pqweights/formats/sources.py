"""Which format the weights of a source have, by its quantization_config: a row for each tool.

A row has the functions that find the weights of a format by their stored tensors, each in the file of the format, and
one that says what of the tool's settings is not read. What none of them takes is tried as FP8 and MXFP4, which also
configurations of others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pqweights.formats import compressed_tensors, fp8, integer_groups, microscaling, mlx, tables, torchao
from pqweights.formats.integer_groups import AUTO_ROUND
from pqweights.formats.packed import Finder, QuantizedTensor, Source

MODELOPT_ALGORITHMS = ("FP8", "NVFP4")


def _modelopt_why_not(settings: Mapping[str, Any]) -> str | None:
    nested = settings.get("quantization")
    algorithm = settings.get("quant_algo") or (nested.get("quant_algo") if isinstance(nested, dict) else None)
    return None if algorithm in MODELOPT_ALGORITHMS else f"ModelOpt {algorithm}"


class Tool(NamedTuple):
    """Whose weights they are: how they are found, and what of its settings is not read."""

    finders: tuple[Finder, ...]
    why_not: Callable[[Mapping[str, Any]], str | None] = lambda settings: None


# By quant_method.
TOOLS: dict[str, Tool] = {
    "compressed-tensors": Tool(
        (microscaling.find_packed, integer_groups.find_pack_quantized, integer_groups.find_int_quantized),
        compressed_tensors.why_not,
    ),
    "modelopt": Tool((microscaling.find_modelopt,), _modelopt_why_not),
    "fp8": Tool((microscaling.find_deepseek,)),
    "gptq": Tool((integer_groups.find_gptq,), integer_groups.gptq_why_not),
    "awq": Tool((integer_groups.find_gptq,), integer_groups.awq_why_not),
    "mlx": Tool((mlx.find,)),
    "torchao": Tool((torchao.find,)),
    "bitsandbytes": Tool((integer_groups.find_llm_int8, tables.find_table)),
    # In a layout that is not one of GPTQ's or AWQ's; see plain_settings.
    **dict.fromkeys(AUTO_ROUND, Tool((), integer_groups.auto_round_why_not)),
}
OF_ANY_TOOL: tuple[Finder, ...] = (microscaling.find_gpt_oss, fp8.find_scaled)


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the quant_method of a configuration."""
    return str(settings.get("quant_method", "")).lower()


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of AutoRound as those of the tool whose layout it packed weights in; others as they are."""
    return integer_groups.of_auto_round(settings) if method_of(settings) in AUTO_ROUND else settings


def why_not(settings: Mapping[str, Any]) -> str | None:
    """Return what a source of one of TOOLS has that is not decoded; None if all is."""
    return TOOLS[method_of(settings)].why_not(settings)


def found_by(finders: tuple[Finder, ...], source: Source) -> Iterator[QuantizedTensor]:
    """Yield the weights that are packed.

    Raises SourceError, which names the stored tensor, for parts that are missing or do not fit.
    """
    for name, codes in source.stored.items():
        tensors = (find(source, name, codes) for find in finders)
        weight = next((tensor for tensor in tensors if tensor is not None), None)
        if weight is not None:
            yield weight


def tool_finders(settings: Mapping[str, Any]) -> tuple[Finder, ...]:
    """Return the finders of the tool that a configuration names."""
    tool = TOOLS.get(method_of(settings))
    return () if tool is None else tool.finders
