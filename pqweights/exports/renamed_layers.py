"""What transformers does with the names of weights as it loads them: asked of itself, on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import AutoHfQuantizer

_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_PACKED = {
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "weights": _WEIGHTS}},
}


class LoadedWeight(NamedTuple):
    """Where transformers puts a weight of a checkpoint.

    name: that in the checkpoint
    loaded: that in memory
    is_reshaped: whether it is cut, or joined with others
    is_linear: whether a linear layer holds it
    """

    name: str
    loaded: str
    is_reshaped: bool
    is_linear: bool


def build(config: Mapping[str, Any]) -> Any:
    """Build the model of a configuration without weights.

    Raises what transformers raises, LookupError for a model type that it does not know.
    """
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(settings)
    architectures = config.get("architectures") or ["AutoModel"]
    model = getattr(transformers, architectures[0], transformers.AutoModel)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(parsed) if model is transformers.AutoModel else model(parsed)


def loaded_weights(model: Any, names: Iterable[str]) -> Iterator[LoadedWeight]:
    """Yield where transformers puts weights. names: those in a checkpoint"""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state, modules = model.state_dict(), dict(model.named_modules())
    for name in names:
        loaded, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        is_linear = isinstance(modules.get(loaded.rpartition(".")[0]), torch.nn.Linear)
        yield LoadedWeight(name, loaded, is_reshaped=converted is not None, is_linear=is_linear)


def compressed_tensors_quantizer(ignore: list[str]) -> Any:
    """Return what transformers loads a compressed-tensors checkpoint of 4-bit integers with."""
    config = transformers.CompressedTensorsConfig(**_PACKED, ignore=ignore)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    quantizer.use_fp8_kernel = False
    return quantizer


def compressed_tensors_errors(model: Any) -> list[str]:
    """Return the error with which transformers refuses any checkpoint of compressed-tensors for a model."""
    quantizer = compressed_tensors_quantizer([])
    try:
        quantizer.update_weight_conversions(get_model_conversion_mapping(model, None, quantizer), model)
    except ValueError as error:
        return [f"refused: {str(error)[:100]}"]
    return []
