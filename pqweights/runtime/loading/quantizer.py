"""Masters in transformers: the quantizer that decodes weights while a model is loaded, or keeps them packed.

transformers calls the methods below during from_pretrained. conversion.py turns stored tensors into parameters.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pqweights.checkpoint.config import GUARD_KEY
from pqweights.checkpoint.names import QUANT_METHOD
from pqweights.convert.listed_files import UNCHECKED, check_weight_files
from pqweights.errors import OutputError, PqweightsWarning, SourceError

PACKED = "packed"


def register() -> None:
    """Register the quantizer with transformers. It may be called repeatedly."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = PqweightsConfig
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = PqweightsQuantizer
    if not hasattr(PreTrainedConfig, PACKED):
        setattr(PreTrainedConfig, PACKED, _PackedOption())


class _PackedOption:
    """The option `packed` of from_pretrained, which sets the attributes of a configuration that it knows.

    It is kept among the settings of the master, where PqweightsConfig finds it. Other configurations may have an
    attribute of this name for something else.
    """

    def __get__(self, config: Any, owner: type) -> Any:
        if config is None or PACKED in vars(config):
            return False if config is None else vars(config)[PACKED]
        settings = getattr(config, "quantization_config", None)
        return isinstance(settings, dict) and bool(settings.get(PACKED))

    def __set__(self, config: Any, value: bool) -> None:
        settings = getattr(config, "quantization_config", None)
        if isinstance(settings, dict) and settings.get("quant_method") == QUANT_METHOD:
            config.quantization_config = {**settings, PACKED: value}
        else:
            vars(config)[PACKED] = value


class PqweightsConfig(QuantizationConfigMixin):
    """The quantization_config of a master as it is in config.json; it is checked when the weights are opened.

    dequantize: whether the result is an ordinary model, from which transformers then removes this configuration
    """

    def __init__(self, packed: bool = False, **settings: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.settings = settings
        self.dequantize = not packed

    def to_dict(self) -> dict[str, Any]:
        """Return the quantization_config as it is in config.json."""
        return dict(self.settings)


class PqweightsQuantizer(HfQuantizer):
    """The quantizer of masters.

    decoded_weights: parameters that should have stayed packed and could not
    """

    requires_calibration = True  # so that transformers refuses to quantize a model while it is loaded

    def __init__(self, quantization_config: PqweightsConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.packed = not quantization_config.dequantize
        self.decoded_weights: tuple[str, ...] = ()

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the guard from the configuration before files are looked for; if packed, use experts one by one."""
        remove_guard(config)
        if self.packed:
            config._experts_implementation = "eager"
        return config

    def update_device_map(self, device_map: Any) -> Any:
        """Raise SourceError for a device map with a disk, where transformers would look for decoded weights."""
        if isinstance(device_map, dict):
            _refuse_disk(device_map)
        return device_map

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        from pqweights.runtime.loading.conversion import Master

        files = options.get("checkpoint_files")
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise SourceError(f"expected the safetensors files of a master, found {files}")
        manifest = check_weight_files(Path(files[0]).parent)
        if getattr(model.config, "distributed_config", None) is not None:
            raise SourceError(
                "a master cannot be loaded in tensor-parallel parts; export it first: pqweights export MASTER OUT "
                "--target bf16"
            )
        paths = [os.fspath(file) for file in files]
        self._master = Master(
            paths, self.quantization_config.settings, manifest=manifest, model=model, packed=self.packed
        )
        return model

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Return the dtype to which a stored tensor is cast, and tell it to the converter if that is one of ours."""
        from pqweights.runtime.loading.conversion import WeightDecoder

        if isinstance(converter, WeightDecoder):
            converter.dtype = dtype
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the conversions of the model, made to read encoded weights."""
        self._conversions = self._master.conversions(weight_conversions)
        return self._conversions

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Return the bytes per weight in memory, for device maps."""
        size = self._master.packed_bytes_per_weight(param) if self.packed else None
        return float(param.element_size()) if size is None else size

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        _refuse_disk(getattr(model, "hf_device_map", None) or {})
        # A model is saved through the inverse of its own conversions. transformers 5.24 has forgotten them by now where
        # weights are decoded.
        used = getattr(model, "_weight_conversions", None)
        if used is None:
            used = [conversion for conversion in self._conversions if conversion.was_used()]
        model._weight_conversions = self._master.originals(used)
        if self._master.is_checked:
            self._master.check_plain()
        else:
            warnings.warn(f"{self._master.folder}: {UNCHECKED}", PqweightsWarning, stacklevel=2)
        if self.packed:
            from pqweights.runtime.loading.packed import name_packed_modules

            model.requires_grad_(False)
            name_packed_modules(model)
            self.decoded_weights = tuple(sorted(self._master.decoded_weights))
        self._master.close()
        del self._master, self._conversions
        return model

    def is_serializable(self) -> bool:
        """Whether save_pretrained may write the model.

        Raises OutputError for a packed model, because the message of transformers would not say what to do.
        """
        if self.packed:
            raise OutputError(
                "save_pretrained cannot save a packed model; copy the master, or load it without packed=True and save "
                "that"
            )
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model may be trained; a decoded one is an ordinary model."""
        return not self.packed


def remove_guard(config: Any) -> None:
    """Remove the key that stops transformers without pqweights, from a configuration and from those nested in it."""
    values = config if isinstance(config, dict) else vars(config)
    values.pop(GUARD_KEY, None)
    for key, value in values.items():
        if key.endswith("_config") and (isinstance(value, dict) or hasattr(value, "sub_configs")):
            remove_guard(value)


def _refuse_disk(device_map: dict[str, Any]) -> None:
    """Raise SourceError if a device map offloads weights to disk."""
    if "disk" in device_map.values():
        raise SourceError(
            "device_map: the weights of a master cannot be offloaded to disk; export it first: pqweights export MASTER "
            "OUT --target bf16"
        )
