"""The weights of an export, decoded from what its folder holds by the rules and layouts of exports/formats.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, parse_header
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.storage import LocalStorage, read_bytes, read_file
from pqweights.common.dtypes import to_float32
from pqweights.errors import SourceError
from pqweights.exports.formats import decoded, unpack_stream
from pqweights.exports.formats import unpack_nibbles as unpack_nibbles
from pqweights.exports.formats import unpack_tiles as unpack_tiles
from pqweights.inference.runtimes.folders import refuse_transforms
from pqweights.kernels.groups import BEST, FloatRule, GroupRule
from pqweights.rewrite.listed_files import open_result
from pqweights.rewrite.manifest import find_manifest

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def export_weight(folder: Path) -> Callable[[str], Floats]:
    """Return a function that decodes a weight of an export, given the name that its runtime uses.

    The function returns the weight as f32, in its shape. Raises SourceError if the folder does not have the form of an
    export of its kind, or if config.json declares transforms of inputs.
    """
    storage = LocalStorage(folder)
    config = json.loads(read_file(storage, CONFIG_FILE)) if CONFIG_FILE in storage.files() else {}
    stored = Stored(folder)
    settings = config.get("quantization_config") or {}
    if settings.get("quant_method") == "torchao":
        return lambda name: _torchao_weight(stored, name)
    if settings.get("quant_method") == "compressed-tensors":
        refuse_transforms(folder, settings)
        return lambda name: _compressed_weight(stored, settings, name)
    if "quantization" in config:
        return lambda name: _mlx_weight(stored, config["quantization"], name)
    return stored.floats


def _torchao_weight(stored: Stored, name: str) -> Floats:
    """Decode Int4Tensor or Int4TilePackedTo4dTensor of torchao 0.18."""
    if name not in stored.metadata:
        return stored.floats(name)
    about = json.loads(stored.metadata[name])
    rows, columns = about["_data"]["shape"]
    size, part = about["_data"]["block_size"][-1], stored_parts(stored, name)[0].removesuffix("qdata")
    if about["_type"] == "Int4Tensor":
        codes = unpack_nibbles(stored.rows(part + "qdata") ^ np.uint8(0x88))
        scales, zeros = stored.floats(part + "scale"), stored.floats(part + "zero_point")
    else:
        words = stored.tensors[part + "qdata"].shape
        codes = unpack_tiles(stored.bytes(part + "qdata").view("<i4").reshape(words))[:rows, :columns]
        scales, zeros = np.moveaxis(stored.floats(part + "scale_and_zero")[: columns // size, :rows], -1, 0)
    rule = GroupRule(bits=4, group_size=size, symmetric=False, middle=True, rule=BEST)
    return decoded(rule, codes, scales.T, zeros.T)


def stored_parts(stored: Stored, name: str) -> list[str]:
    """The names of the stored tensors that make up a weight in torchao: qdata, then its scales."""
    module, _, parameter = name.rpartition(".")
    return [f"{module}._{parameter}_{part}" for part in json.loads(stored.metadata[name])["_tensor_data_names"]]


def _compressed_weight(stored: Stored, settings: Mapping[str, Any], name: str) -> Floats:
    """Decode a symmetric pack-quantized weight of compressed-tensors."""
    if f"{name}_packed" not in stored.tensors:
        return stored.floats(name)
    (bits,) = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
    columns = int(stored.bytes(f"{name}_shape").view("<i8")[-1])
    codes, scales = unpack_stream(stored.rows(f"{name}_packed"), bits)[:, :columns], stored.floats(f"{name}_scale")
    rule = GroupRule(bits=bits, group_size=columns // scales.shape[1], symmetric=True, middle=True, rule=BEST)
    return decoded(rule, codes, scales, np.zeros_like(scales))


def _mlx_weight(stored: Stored, settings: Mapping[str, Any], name: str) -> Floats:
    """Decode a weight of mlx.core.quantize."""
    module = name.removesuffix(".weight")
    if f"{module}.scales" not in stored.tensors:
        return stored.floats(name)
    own = settings.get(module)
    about = {**settings, **(own if isinstance(own, dict) else {})}
    bits, size, mode = about["bits"], about["group_size"], about.get("mode", "affine")
    codes = unpack_stream(stored.rows(name), bits)
    if mode == "affine":
        rule = GroupRule(bits=bits, group_size=size, symmetric=False, middle=False, rule=BEST)
        return decoded(rule, codes, stored.floats(f"{module}.scales"), stored.floats(f"{module}.biases"))
    scales = stored.rows(f"{module}.scales").astype(np.float32)
    return decoded(FloatRule(mode, bits, size), codes, scales, np.zeros_like(scales))


def master_weight(folder: Path) -> Callable[[str], Floats]:
    """Return a function that decodes a weight of a master, given its name, and raises MasterError if it is damaged.

    Raises SourceError, MasterError.
    """
    storage = LocalStorage(folder)
    master = open_result(storage, find_manifest(storage))
    tensors = {tensor.name: tensor for tensor in master.tensors}

    def weight(name: str) -> Floats:
        values = values_of(tensors[name])
        master.finish_checks(tensors[name].parts)
        return values

    return weight


def values_of(tensor: LogicalTensor) -> Floats:
    """The values of a tensor of a checkpoint: f32, in its shape."""
    raw = np.empty(element_count(tensor) * 4, dtype=np.uint8)
    tensor.read(0, element_count(tensor), "F32", raw)
    return raw.view(np.float32).reshape(tensor.shape)


class Stored:
    """The tensors and metadata of all safetensors files in a folder, whatever the files are called."""

    def __init__(self, folder: Path) -> None:
        self._storage = LocalStorage(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        for file, state in self._storage.files().items():
            if file.endswith(".safetensors"):
                read = lambda at, count, file=file: read_bytes(self._storage, file, at, count)  # noqa: E731
                tensors, metadata = parse_header(file, state.byte_count, read)
                self.tensors |= {tensor.name: tensor for tensor in tensors}
                self.metadata |= metadata

    def bytes(self, name: str) -> Codes:
        """The bytes of a tensor as stored, flat."""
        if name not in self.tensors:
            raise SourceError(f"{self._storage.root}: expected the tensor {name!r}, found none; export it again")
        tensor = self.tensors[name]
        raw = np.empty(tensor.byte_count, dtype=np.uint8)
        self._storage.read_into(tensor.file, tensor.offset, raw)
        return raw

    def rows(self, name: str) -> Codes:
        """The bytes of a tensor as stored, the bytes of a row on the last axis."""
        raw = self.bytes(name)
        return raw.reshape(*self.tensors[name].shape[:-1], -1)

    def floats(self, name: str) -> Floats:
        """The values of a plain tensor: f32, in its shape."""
        raw = self.bytes(name)
        return to_float32(raw, self.tensors[name].dtype).reshape(self.tensors[name].shape)
