"""The weights of exports, decoded from what their folders hold: by the formulas of the formats, in code of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from helpers import Array, Tensor, as_float32

from pqweights.checkpoint.header import StoredTensor, parse_header
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.storage import Storage, read_bytes, read_file
from pqweights.common.dtypes import to_float32
from pqweights.convert.listed_files import open_result
from pqweights.convert.manifest import find_manifest
from pqweights.errors import SourceError
from pqweights.runtime.folders import refuse_transforms

Floats = Array
Tensors = Mapping[str, Tensor]
# Of compressed-tensors' and torchao's types, as numpy has them.
VIEWS = {"I32": "<i4", "I64": "<i8", "U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "I8": "i1"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # OCP microscaling formats 1.0


def codes_of(words: Array, bits: int) -> Array:
    """Codes [..., n] from words that they fill one after the other, the first in the lowest bits."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:  # which is faster
        codes = raw[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
        return codes.reshape(*raw.shape[:-1], -1).astype(np.int64)
    digits = np.unpackbits(raw, axis=-1, bitorder="little")
    whole = digits.shape[-1] // bits * bits
    return digits[..., :whole].reshape(*digits.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def e2m1(packed: Array) -> Array:
    """Numbers of 4 bits, two of a byte, the first in its low half."""
    nibbles = codes_of(packed, 4)
    return np.where(nibbles & 8, np.float32(-1), np.float32(1)) * E2M1[nibbles & 7]


def spread(numbers: Array, columns: int) -> Array:
    """Numbers [..., groups] for each column."""
    return np.repeat(numbers, columns // numbers.shape[-1], axis=-1)


def from_compressed_tensors(tensors: Tensors, name: str, bits: int = 4) -> Array:
    """A weight in float32: (code - 2**(bits - 1)) * scale."""
    codes = codes_of(tensors[f"{name}_packed"][1], bits).astype(np.float32) - 2 ** (bits - 1)
    assert tensors[f"{name}_shape"][1].tolist() == list(codes.shape)
    return codes * spread(as_float32(tensors[f"{name}_scale"]), codes.shape[1])


def from_compressed_tensors_with_zeros(tensors: Tensors, name: str, bits: int) -> Array:
    """A weight in float32: (code - zero) * scale; the zeros of a group of all rows follow each other in words."""
    codes, scales = codes_of(tensors[f"{name}_packed"][1], bits), as_float32(tensors[f"{name}_scale"])
    zeros = codes_of(tensors[f"{name}_zero_point"][1].T, bits)[:, : len(codes)].T
    return ((codes - spread(zeros, codes.shape[1])) * spread(scales, codes.shape[1])).astype(np.float32)


def awq_codes(words: Array) -> Array:
    """Codes [n, 8 * m] from words [n, m] of AutoAWQ: from the lowest bits on columns 0, 2, 4, 6, 1, 3, 5, 7."""
    codes = np.empty((len(words), 8 * words.shape[1]), dtype=np.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        codes[:, column::8] = words.view("<u4") >> np.uint32(4 * place) & np.uint32(15)
    return codes


def from_awq(tensors: Tensors, module: str) -> Array:
    """A weight of AutoAWQ's GEMM layout in float32: (code - zero) * scale."""
    codes, zeros = awq_codes(tensors[f"{module}.qweight"][1]), awq_codes(tensors[f"{module}.qzeros"][1])
    scales = as_float32(tensors[f"{module}.scales"])
    size = len(codes) // len(scales)
    return ((codes - zeros.repeat(size, axis=0)) * scales.repeat(size, axis=0)).astype(np.float32).T


def gptq_codes(words: Array, bits: int) -> Array:
    """Codes from words [n, m] of AutoGPTQ that follow each other on the last axis: [n, 32 * m / bits].

    Of 3 bits, two codes of 32 are cut: the eleventh has its lowest two bits in the first word, the twenty-second its
    lowest one in the second.
    """
    numbers = words.view("<u4").astype(np.int64)
    if bits != 3:
        shifts = np.arange(0, 32, bits)
        return np.asarray(numbers[..., None] >> shifts & (1 << bits) - 1).reshape(len(words), -1)
    first, second, third = (numbers[:, i::3, None] for i in range(3))
    tens = 3 * np.arange(10)
    eleventh, twenty_second = first >> 30 | (second & 1) << 2, second >> 31 | (third & 3) << 1
    parts = (first >> tens & 7, eleventh, second >> tens + 1 & 7, twenty_second, third >> tens + 2 & 7)
    return np.concatenate(parts, axis=-1).reshape(len(words), -1)


def from_gptq(tensors: Tensors, module: str, bits: int, first_zero: int) -> Array:
    """A weight of AutoGPTQ's layout in float32: (code - zero) * scale. first_zero: the zero that is stored as 0"""
    codes = gptq_codes(np.ascontiguousarray(tensors[f"{module}.qweight"][1].T), bits).T
    group_of = tensors[f"{module}.g_idx"][1]
    zeros = gptq_codes(tensors[f"{module}.qzeros"][1], bits)[group_of] + first_zero
    return ((codes - zeros) * as_float32(tensors[f"{module}.scales"])[group_of]).astype(np.float32).T


def from_vllm_format(tensors: Tensors, name: str, bits: int = 4) -> Array:
    """A weight of any format of the target vllm, in float32, by the specifications of its numbers."""
    import torch

    module = name.removesuffix(".weight")
    if f"{name}_blocks" in tensors:  # of gpt-oss, [experts, out, in / 32, 16]; the model has [experts, in, out]
        scales = np.ldexp(np.float32(1), tensors[f"{name}_scales"][1].astype(np.int32) - 127)
        stack = e2m1(tensors[f"{name}_blocks"][1]) * scales[..., None]
        return stack.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
    if f"{module}.g_idx" in tensors:
        return from_gptq(tensors, module, bits, first_zero=1)
    if f"{module}.qweight" in tensors:
        return from_awq(tensors, module)
    if f"{name}_zero_point" in tensors:
        return from_compressed_tensors_with_zeros(tensors, name, bits)
    if f"{name}_shape" in tensors:
        return from_compressed_tensors(tensors, name, bits)
    dtype, values = tensors[f"{name}_packed" if f"{name}_packed" in tensors else name]
    if dtype == "U8":
        numbers = e2m1(values)
    elif dtype == "F8_E4M3":
        numbers = torch.from_numpy(values.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
    else:
        assert dtype == "I8"
        numbers = values.astype(np.float32)
    scale_dtype, scales = tensors[f"{name}_scale_inv" if f"{name}_scale_inv" in tensors else f"{name}_scale"]
    if scale_dtype == "U8":
        factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    elif scale_dtype == "F8_E4M3":
        factors = torch.from_numpy(scales.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
        if f"{name}_scale_2" in tensors:  # Model-Optimizer
            factors = factors * as_float32(tensors[f"{name}_scale_2"])
        else:
            factors = factors / as_float32(tensors[f"{name}_global_scale"])
    else:
        factors = as_float32((scale_dtype, scales))
    if len(factors) < len(numbers):  # of tiles
        factors = factors.repeat(128, axis=0)[: len(numbers)]
    return np.asarray(numbers * spread(factors, numbers.shape[1]), np.float32)


def untiled(words: Array) -> Array:
    """Codes [8 * m, 128 * n] from PyTorch's tiles [m, n, 32, 4] i32, as matrix_to_m16n8k16_Bint4_layout in int4mm.cu.

    Each word of a lane holds 2 x 4 values of one row, those with even numbers in its low half.
    """
    lane, word, nibble = np.indices((32, 4, 8))
    value = np.array([0, 2, 4, 6, 1, 3, 5, 7])[nibble]
    column = word * 32 + lane % 4 * 2 + value % 2 + value // 2 % 2 * 8 + value // 4 * 16
    tiles = np.empty((*words.shape[:2], 8, 128), dtype=np.uint8)
    tiles[..., lane // 4, column] = codes_of(words[..., None], 4)
    return tiles.transpose(0, 2, 1, 3).reshape(8 * len(words), -1)


def from_tiles(words: Array, pairs: Array) -> Array:
    """Decode tiles to (code - 8) * scale + zero, padding included; pairs [K / g, N, 2] f32."""
    codes = untiled(words).astype(np.float32) - 8
    scales, zeros = (spread(pairs[..., i].T, codes.shape[1]) for i in (0, 1))
    return codes * scales + zeros


def from_nibbles(packed: Array, scales: Array, zeros: Array) -> Array:
    """Decode an Int4Tensor: signed nibbles [N, K / 2] i8, the even column low; scales and zeros [K / g, N] f32."""
    codes = codes_of(packed, 4)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    return codes * spread(scales.T, codes.shape[1]) + spread(zeros.T, codes.shape[1])


def from_torchao(tensors: Tensors, name: str, shape: tuple[int, ...], tile: bool) -> Array:
    """A weight of torchao, without its padding."""
    stem = name.removesuffix("weight") + "_weight"
    qdata = tensors[f"{stem}_qdata"][1]
    if tile:
        return from_tiles(qdata, as_float32(tensors[f"{stem}_scale_and_zero"]))[: shape[0], : shape[1]]
    return from_nibbles(qdata, *(as_float32(tensors[f"{stem}_{part}"]) for part in ("scale", "zero_point")))


def from_mlx(tensors: Tensors, module: str, bits: int = 4) -> Array:
    """A weight or a stack of weights [..., N, K] of mlx's affine integers."""
    codes = codes_of(tensors[f"{module}.weight"][1], bits).astype(np.float32)
    scales, biases = (spread(as_float32(tensors[f"{module}.{part}"]), codes.shape[-1]) for part in ("scales", "biases"))
    return codes * scales + biases


def export_weight(folder: Path) -> Callable[[str], Floats]:
    """Return a function that decodes a weight of an export, given the name that its runtime uses, to f32 in its shape.

    Raises SourceError if config.json declares transforms of inputs, and for a tensor that is missing.
    """
    storage, stored = Storage(folder), Stored(folder)
    config = json.loads(read_file(storage, CONFIG_FILE)) if CONFIG_FILE in storage.files() else {}
    settings, of_mlx = config.get("quantization_config") or {}, config.get("quantization", {})
    if settings.get("quant_method") == "compressed-tensors":
        refuse_transforms(folder, settings)

    def weight(name: str) -> Floats:
        module = name.removesuffix(".weight")
        if name in stored.metadata:
            about = json.loads(stored.metadata[name])
            if about["_type"] in ("Int8Tensor", "Float8Tensor"):
                numbers = f"{module}._weight_qdata"
                values = stored[numbers][1] if about["_type"] == "Int8Tensor" else stored.floats(numbers)
                return values * stored.floats(f"{module}._weight_scale")
            return from_torchao(stored, name, tuple(about["_data"]["shape"]), about["_type"] != "Int4Tensor")
        if f"{name}_packed" in stored.tensors:
            (bits,) = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
            return from_vllm_format(stored, name, bits)
        if f"{module}.biases" in stored.tensors:
            own = of_mlx.get(module)
            return from_mlx(stored, module, (own if isinstance(own, dict) else of_mlx)["bits"])
        return stored.floats(name)

    return weight


def master_weight(folder: Path) -> Callable[[str], Floats]:
    """Return a function that decodes a weight of a master, given its name, and raises MasterError if it is damaged."""
    storage = Storage(folder)
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


class Stored(Mapping[str, Tensor]):
    """The tensors and metadata of all safetensors files in a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._storage = Storage(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        for file, state in self._storage.files().items():
            if file.endswith(".safetensors"):
                read = lambda at, count, file=file: read_bytes(self._storage, file, at, count)  # noqa: E731
                tensors, metadata = parse_header(file, state.byte_count, read)
                self.tensors |= {tensor.name: tensor for tensor in tensors}
                self.metadata |= metadata

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.tensors[name].dtype, self.tensors[name].shape
        return dtype, self.bytes(name).view(VIEWS.get(dtype, "u1")).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def bytes(self, name: str) -> Array:
        """The bytes of a tensor as stored, flat."""
        if name not in self.tensors:
            raise SourceError(f"{self._storage.root}: expected the tensor {name!r}, found none; export it again")
        tensor = self.tensors[name]
        raw = np.empty(tensor.byte_count, dtype=np.uint8)
        self._storage.read_into(tensor.file, tensor.offset, raw)
        return raw

    def rows(self, name: str) -> Array:
        """The bytes of a tensor as stored, the bytes of a row on the last axis."""
        raw = self.bytes(name)
        return raw.reshape(*self.tensors[name].shape[:-1], -1)

    def floats(self, name: str) -> Floats:
        """The values of a plain tensor: f32, in its shape."""
        return to_float32(self.bytes(name), self.tensors[name].dtype).reshape(self.tensors[name].shape)
