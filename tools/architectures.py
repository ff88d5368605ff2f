"""Find the architectures of transformers that need an entry in pqweights/models/traits.py.

Each model is built on the meta device from its default configuration. For the weights that an export to integers would
round, this compares the names in the file with those in memory, and has transformers prepare for compressed-tensors and
initialize what a checkpoint might not hold.
Run `python tools/architectures.py [MODEL_TYPE...]`; it prints a line for each architecture that differs. Types
that were examined are added to Trait.EXAMINED there.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from pqweights.models import described
from pqweights.models.names import names_in_memory
from pqweights.planning.roles import classify

SECONDS = 40  # for each model
CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForImageClassification",
    "AutoModel",
)
OUTSIDE = r"re:(?!(.*\.)?\d+(\..*)?$)"  # of the numbered layers
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
    """

    name: str
    loaded: str
    is_reshaped: bool


def differences(model_type: str) -> str:
    """Return in words what transformers does with the layers of an architecture; an empty text if nothing."""
    config = transformers.AutoConfig.for_model(model_type)
    classes = [c for c in (getattr(transformers, name) for name in CLASSES) if type(config) in c._model_mapping]
    found: list[str] = []
    for auto in dict.fromkeys([*classes[:1], *classes[-1:]]):
        with torch.device("meta"):
            model = auto.from_config(config)
        found += [*_compressed_tensors_errors(model), *_moved(model, "vision_config" in config.to_dict())]
        found += _used_early(model)  # last, because it packs the weights
    kinds = {text.partition(":")[0]: text for text in reversed(found)}  # the first of each kind
    return "; ".join(kinds.values())


def _moved(model: Any, has_vision: bool) -> list[str]:
    """Return the weights that have other names in memory than in the file, or are cut or joined there."""
    tied = model.all_tied_weights_keys or {}
    stored = revert_weight_conversion(model, {n: v for n, v in model.state_dict().items() if n not in tied})
    rounded = [n for n, v in stored.items() if v.ndim == 2 and n.endswith(".weight") and _is_rounded(n, v)]
    found = []
    for weight in _loaded_weights(model, rounded):
        if weight.is_reshaped:
            found.append(f"reshaped: {weight.name} -> {weight.loaded}")
        elif weight.loaded not in names_in_memory(weight.name, has_vision, described(model.config.model_type)):
            found.append(f"renamed: {weight.name} -> {weight.loaded}")
    return found


def _is_rounded(name: str, value: Any) -> bool:
    """Whether an export to integers would round a weight."""
    return classify(name, "BF16", tuple(value.shape)).name in ("attention", "mlp", "linear", "expert")


def _used_early(model: Any) -> list[str]:
    """Pack the layers of a model; return the error of its own code that initializes them."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = [name for name, layer in layers.items() if not _is_rounded(f"{name}.weight", layer.weight)]
    with torch.device("meta"):
        _compressed_tensors_quantizer(["lm_head", OUTSIDE, *plain])._process_model_before_weight_loading(model)
    for module in model.modules():
        module._is_hf_initialized = False
    try:
        model.initialize_weights()
    except AttributeError as error:
        return [f"used early: {str(error)[:100]}"]
    return []


def _loaded_weights(model: Any, names: Iterable[str]) -> Iterator[LoadedWeight]:
    """Yield where transformers puts weights. names: those in a checkpoint"""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state = model.state_dict()
    for name in names:
        loaded, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        yield LoadedWeight(name, loaded, is_reshaped=converted is not None)


def _compressed_tensors_quantizer(ignore: list[str]) -> Any:
    """Return what transformers loads a compressed-tensors checkpoint of 4-bit integers with."""
    config = transformers.CompressedTensorsConfig(**_PACKED, ignore=ignore)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    quantizer.use_fp8_kernel = False
    return quantizer


def _compressed_tensors_errors(model: Any) -> list[str]:
    """Return the error with which transformers refuses any checkpoint of compressed-tensors for a model."""
    quantizer = _compressed_tensors_quantizer([])
    try:
        quantizer.update_weight_conversions(get_model_conversion_mapping(model, None, quantizer), model)
    except ValueError as error:
        return [f"refused: {str(error)[:100]}"]
    return []


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(model_types: list[str]) -> None:
    """Print the differences of architectures, of all by default; and those that could not be built."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGALRM, _out_of_time)
    for model_type in model_types or list(CONFIG_MAPPING):
        signal.alarm(SECONDS)
        try:
            text = differences(model_type)
        except Exception as error:  # whatever a model's own code raises
            text = f"not built: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        signal.alarm(0)
        if text:
            print(f"{model_type}: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
