"""A reader of master folders, written from docs/format.md (sections 1 to 4) alone: numpy and the standard library.

It shares no code with the package, so it shows that the page is enough to read a master.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 128
SETTINGS = ("codec", "bits", "dtype", "rotation")
KEYS = {*SETTINGS, "quant_method", "format_version", "block_size", "levels", "overrides", "kept"}
OVERRIDE_KEYS = {*SETTINGS, "norm_exponent", "shape"}
FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
SIGN_HEX = "243F6A8885A308D313198A2E03707344"
SIGNS = np.array([int(SIGN_HEX, 16) >> (127 - j) & 1 for j in range(BLOCK)], dtype=bool)


class Tensor(NamedTuple):
    """One tensor as a user sees it: a weight decoded, anything else as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Stored(NamedTuple):
    """One entry of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_safetensors(path: Path) -> dict[str, Stored]:
    """All tensors of one file: 8 bytes of header length, the JSON header, then the data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return tensors


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of shape (blocks, 128) from bytes of shape (blocks, 16 * bits)."""
    codes = np.zeros((packed.shape[0], BLOCK), dtype=np.int64)
    start = shift = 0
    for width in FIELDS[bits]:
        count = 16 * width
        field = packed[:, start : start + count].astype(np.int64)
        for m in range(8 // width):
            values = field >> (m * width) & ((1 << width) - 1)
            codes[:, m * count : (m + 1) * count] |= values << shift
        start += count
        shift += width
    return codes


def hadamard(x: np.ndarray) -> np.ndarray:
    """The unnormalised Walsh-Hadamard transform of every row, in float32 and in the order of the page."""
    x = x.astype(np.float32)
    for h in (1, 2, 4, 8, 16, 32, 64):
        pairs = x.reshape(x.shape[0], BLOCK // (2 * h), 2, h)
        low, high = pairs[:, :, 0, :].copy(), pairs[:, :, 1, :].copy()
        pairs[:, :, 0, :] = low + high
        pairs[:, :, 1, :] = low - high
    return x


def decode_blocks(
    packed: np.ndarray, norms: np.ndarray, level: np.ndarray, bits: int, rotation: str, norm_exponent: int
) -> np.ndarray:
    """The float32 values of all blocks, before they are rounded to the output's dtype."""
    with np.errstate(over="ignore", under="ignore"):
        x = level[unpack(packed, bits)]
        scale = np.ldexp(norms.astype(np.float64), norm_exponent - 7).astype(np.float32)
        y = hadamard(x) * scale[:, None]
    if rotation == "signed-hadamard":
        y = np.where(SIGNS, -y, y)
    elif rotation != "hadamard":
        raise ValueError(f"unknown rotation {rotation!r}")
    return y


def to_bytes(y: np.ndarray, dtype: str) -> bytes:
    """Clamp to the largest finite values, round to nearest even, little-endian."""
    if dtype in ("F32", "F64"):
        limit = np.finfo(np.float32).max
        return np.clip(y, -limit, limit).astype("<f4" if dtype == "F32" else "<f8").tobytes()
    if dtype == "F16":
        return np.clip(y, np.float32(-65504), np.float32(65504)).astype("<f2").tobytes()
    if dtype == "BF16":
        limit = np.array([0x7F7F0000], dtype=np.uint32).view(np.float32)[0]
        pattern = np.clip(y, -limit, limit).astype(np.float32).view(np.uint32).astype(np.uint64)
        upper = pattern >> 16
        rest = pattern & 0xFFFF
        upper += (rest > 0x8000) | ((rest == 0x8000) & (upper & 1 == 1))
        return upper.astype("<u2").tobytes()
    raise ValueError(f"not an output dtype: {dtype}")


def quantization_config(folder: Path) -> dict:
    """The checked `quantization_config` of a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    if config["quant_method"] != "pqweights" or config["format_version"] != 1 or config["block_size"] != BLOCK:
        raise ValueError("not a pqweights master of version 1")
    if unknown := (set(config) ^ KEYS) | set().union(*config["overrides"].values()) - OVERRIDE_KEYS:
        raise ValueError(f"unknown or missing keys {sorted(unknown)}")
    return config


def decode_weight(name: str, codes: Stored, norms: Stored, scales: Stored | None, config: dict) -> Tensor:
    """One weight in its own dtype."""
    override = config["overrides"].get(name, {})
    setting = {key: override.get(key, config[key]) for key in SETTINGS}
    bits = setting["bits"]
    level = np.array(config["levels"][setting["codec"]][str(bits)], dtype=np.float64).astype(np.float32)
    if codes.dtype != "U8" or norms.dtype != "F16" or len(level) != 2**bits:
        raise ValueError(f"malformed weight {name}")
    size = 16 * bits
    shape = tuple(override["shape"]) if "shape" in override else (*codes.shape[:-1], codes.shape[-1] // size * BLOCK)
    elements = 1
    for dimension in shape:
        elements *= dimension
    packed = np.frombuffer(codes.data, dtype=np.uint8).reshape(-1, size)
    norm = np.frombuffer(norms.data, dtype="<f2")
    if not len(packed) == len(norm) == -(-elements // BLOCK):
        raise ValueError(f"wrong number of blocks in {name}")
    y = decode_blocks(packed, norm, level, bits, setting["rotation"], override.get("norm_exponent", 0))
    dtype = {"BF16": "BF16", "F16": "F16", "F32": "F32", "F64": "F64"}.get(setting["dtype"], "BF16")
    y = y.reshape(-1)[:elements]
    if scales is not None:
        if scales.dtype != "F16" or tuple(scales.shape) != (*shape[:-2], shape[-1]):
            raise ValueError(f"malformed scales of {name}")
        factor = np.frombuffer(scales.data, dtype="<f2").astype(np.float32).reshape(*shape[:-2], 1, shape[-1])
        y = (y.reshape(shape) / factor).reshape(-1)
    return Tensor(name, dtype, shape, to_bytes(y, dtype))


def read_master(folder: Path) -> Iterator[Tensor]:
    """Every tensor of the folder: weights decoded in their own dtype, the others byte for byte."""
    config = quantization_config(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    weight_map = index["weight_map"]
    kept = set(config["kept"])
    for file in sorted(set(weight_map.values())):
        stored = read_safetensors(folder / file)
        for name, entry in stored.items():
            if name in kept:
                yield Tensor(name, entry.dtype, entry.shape, entry.data)
            elif name.endswith("_codes"):
                weight = name.removesuffix("_codes")
                yield decode_weight(weight, entry, stored[weight + "_norms"], stored.get(weight + "_awq_scale"), config)
            elif not name.endswith(("_norms", "_awq_scale")):
                raise ValueError(f"{name} is neither kept nor part of a weight")
