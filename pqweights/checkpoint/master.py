"""The quantization_config of a master: writing it, and reading it back with every claim checked.

It holds all that decoding needs besides the tensors. Defaults stand once, exceptions per tensor; docs/format.md,
section "config.json".
"""

from __future__ import annotations

import difflib
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pqweights.checkpoint.header import StoredTensor, TensorSpec
from pqweights.checkpoint.names import AWQ_SUFFIX, CODES_SUFFIX, NORMS_SUFFIX, awq_name, codes_name, norms_name
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, PlainTensor
from pqweights.checkpoint.scales import scale_shape
from pqweights.checkpoint.storage import Storage
from pqweights.codecs import CODECS, get_codec
from pqweights.codecs.weight import block_count
from pqweights.dtypes import FLOAT_DTYPES
from pqweights.errors import MasterError
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.codebook import Codebook, codebook_from_levels

QUANT_METHOD = "pqweights"
FORMAT_VERSION = 1
DEFAULT_KEYS = {
    "quant_method", "format_version", "block_size", "codec", "bits", "dtype", "rotation", "levels", "overrides", "kept",
}  # fmt: skip
LOGICAL_DTYPES = (*FLOAT_DTYPES, "MXFP4")
OVERRIDE_KEYS = {"codec", "bits", "dtype", "rotation", "norm_exponent", "shape"}


@dataclass(frozen=True)
class Encoding:
    """How one weight of a master is stored. dtype is the logical dtype (BF16, F16, F32, or the source's packed format)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    bits: int
    rotation: str
    norm_exponent: int


def has_whole_rows(shape: tuple[int, ...]) -> bool:
    """Whether blocks divide the last dimension, so that the stored shapes follow the weight's."""
    return bool(shape) and shape[-1] % BLOCK_SIZE == 0 and math.prod(shape) > 0


def encoded_specs(
    name: str, shape: tuple[int, ...], codec: str, bits: int, awq: bool = False
) -> tuple[TensorSpec, ...]:
    """What a weight becomes: codes U8 and norms F16, and with AWQ the scales of its input channels F16.

    [..., K] becomes [..., K / 128 * code bytes] and [..., K / 128]; where 128 does not divide K, the blocks run over
    the flattened weight: [blocks, code bytes] and [blocks].
    """
    codes, norms = _encoded_shapes(shape, codec, bits)
    specs = TensorSpec(name + CODES_SUFFIX, "U8", codes), TensorSpec(name + NORMS_SUFFIX, "F16", norms)
    return (*specs, TensorSpec(name + AWQ_SUFFIX, "F16", scale_shape(shape))) if awq else specs


@functools.lru_cache(maxsize=4096, typed=True)  # typed: a config.json may say 5.0 bits
def _encoded_shapes(shape: tuple[int, ...], codec: str, bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Remembered, as a model has tens of thousands of weights in a dozen shapes."""
    code_bytes = get_codec(codec).code_bytes_per_block(bits)
    if has_whole_rows(shape):
        rows, per_row = shape[:-1], shape[-1] // BLOCK_SIZE
        return (*rows, per_row * code_bytes), (*rows, per_row)
    blocks = block_count(math.prod(shape))
    return (blocks, code_bytes), (blocks,)


def quantization_config(encodings: Sequence[Encoding], kept: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a master with these weights; the most common settings become the defaults."""

    def most_common(values: list[Any]) -> Any:
        return Counter(values).most_common(1)[0][0] if values else None

    defaults = {
        "codec": most_common([e.codec for e in encodings]),
        "bits": most_common([e.bits for e in encodings]),
        "dtype": most_common([e.dtype for e in encodings]),
        "rotation": most_common([get_codec(e.codec).rotations[0] for e in encodings]),
    }
    overrides: dict[str, dict[str, Any]] = {}
    for e in encodings:
        own: dict[str, Any] = {key: getattr(e, key) for key, value in defaults.items() if getattr(e, key) != value}
        if e.norm_exponent:
            own["norm_exponent"] = e.norm_exponent
        if not has_whole_rows(e.shape):
            own["shape"] = list(e.shape)
        if own:
            overrides[e.name] = own
    levels: dict[str, dict[str, list[float]]] = {}
    for codec, bits in sorted({(e.codec, e.bits) for e in encodings}):
        # The shortest decimals that round to the float32 level.
        levels.setdefault(codec, {})[str(bits)] = [float(str(c)) for c in get_codec(codec).codebook(bits).levels]
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "block_size": BLOCK_SIZE,
        **defaults,
        "levels": levels,
        "overrides": overrides,
        "kept": list(kept),
    }


def is_master(config: dict[str, Any] | None) -> bool:
    """Whether a config.json belongs to a master of ours."""
    settings = (config or {}).get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == QUANT_METHOD


def logical_tensors(storage: Storage, stored: dict[str, StoredTensor], config: dict[str, Any]) -> list[LogicalTensor]:
    """The weights (to be decoded) and the kept tensors of a master.

    Raises MasterError where the configuration and the headers do not fit each other.
    """
    settings = config["quantization_config"]
    version = settings.get("format_version")
    if version != FORMAT_VERSION:
        raise MasterError(
            f"config.json: format_version: expected {FORMAT_VERSION}, found {version!r}; a newer pqweights may read it"
        )
    _check_keys("quantization_config", settings, DEFAULT_KEYS)
    if settings.get("block_size") != BLOCK_SIZE:
        raise MasterError(f"config.json: block_size: expected {BLOCK_SIZE}, found {settings.get('block_size')!r}")
    overrides = _object(settings, "overrides")
    codebooks: dict[tuple[str, int], Codebook] = {}
    tensors: list[LogicalTensor] = []
    taken: set[str] = set()
    kept = set(_strings(settings, "kept"))
    for name in [n[: -len(CODES_SUFFIX)] for n in stored if n.endswith(CODES_SUFFIX) and n not in kept]:
        if norms_name(name) not in stored:
            raise MasterError(
                f"tensor {codes_name(name)!r} has no {norms_name(name)!r} beside it; the master is damaged"
            )
        awq = stored.get(awq_name(name)) if awq_name(name) not in kept else None
        tensors.append(_encoded(storage, stored, name, awq, settings, overrides.get(name, {}), codebooks))
        taken |= {codes_name(name), norms_name(name)} | ({awq_name(name)} & stored.keys() - kept)
    unknown = [name for name in overrides if codes_name(name) not in taken]
    if unknown:
        raise MasterError(f"config.json: overrides: {unknown[0]!r} is no quantized weight of this checkpoint")
    tensors += [PlainTensor(storage, tensor) for name, tensor in stored.items() if name not in taken]
    return tensors


def _encoded(
    storage: Storage,
    stored: dict[str, StoredTensor],
    name: str,
    awq: StoredTensor | None,
    settings: dict[str, Any],
    own: dict[str, Any],
    codebooks: dict[tuple[str, int], Codebook],
) -> EncodedTensor:
    codes, norms = stored[codes_name(name)], stored[norms_name(name)]
    if not isinstance(own, dict):
        raise MasterError(f"config.json: overrides: {name!r}: expected an object, found {own!r}")
    _check_keys(f"overrides of {name!r}", own, OVERRIDE_KEYS)
    merged = {**{key: settings.get(key) for key in OVERRIDE_KEYS}, "norm_exponent": 0, "shape": None, **own}
    codec_name, bits, rotation, exponent = (merged[k] for k in ("codec", "bits", "rotation", "norm_exponent"))
    if not isinstance(codec_name, str) or codec_name not in CODECS:
        raise MasterError(f"config.json: {name!r}: codec: expected one of {', '.join(CODECS)}, found {codec_name!r}")
    codec = CODECS[codec_name]
    if bits not in codec.widths or rotation not in codec.rotations:
        raise MasterError(f"config.json: {name!r}: {codec_name} has no {bits!r} bits with rotation {rotation!r}")
    if not isinstance(exponent, int) or not -200 <= exponent <= 200:
        raise MasterError(f"config.json: {name!r}: norm_exponent: expected -200 to 200, found {exponent!r}")
    if merged["dtype"] not in LOGICAL_DTYPES:
        raise MasterError(
            f"config.json: {name!r}: dtype: expected one of {', '.join(LOGICAL_DTYPES)}, found {merged['dtype']!r}"
        )
    shape = merged["shape"]
    if shape is None:
        per_row, rest = divmod(codes.shape[-1] if codes.shape else 1, codec.code_bytes_per_block(bits))
        if rest:
            raise MasterError(
                f"{codes.file}: {codes.name!r}: expected a last dimension that {codec.code_bytes_per_block(bits)} divides "
                f"({bits} bits), found shape {list(codes.shape)}"
            )
        shape = (*codes.shape[:-1], per_row * BLOCK_SIZE)
    elif not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise MasterError(f"config.json: {name!r}: shape: expected a list of sizes, found {shape!r}")
    if awq is not None and len(shape) < 2:
        raise MasterError(
            f"{awq.file}: {awq.name!r}: expected no scales for a weight {list(shape)}; the master is damaged"
        )
    expected = encoded_specs(name, tuple(shape), codec_name, bits, awq is not None)
    for spec, found in zip(expected, (codes, norms) if awq is None else (codes, norms, awq), strict=True):
        if (spec.dtype, spec.shape) != (found.dtype, found.shape):
            raise MasterError(
                f"{found.file}: {found.name!r}: expected {spec.dtype} {list(spec.shape)} for a weight {list(shape)} at "
                f"{bits} bits, found {found.dtype} {list(found.shape)}"
            )
    if (codec_name, bits) not in codebooks:
        codebooks[codec_name, bits] = _codebook(settings, codec_name, bits)
    codebook = codebooks[codec_name, bits]
    return EncodedTensor(
        storage, name, tuple(shape), merged["dtype"], codec_name, bits, rotation, exponent, codebook, codes, norms, awq
    )


def _codebook(settings: dict[str, Any], codec: str, bits: int) -> Codebook:
    """The levels as the checkpoint itself gives them."""
    table = _object(_object(settings, "levels"), codec).get(str(bits))
    numbers = [c for c in table if isinstance(c, float | int)] if isinstance(table, list) else []
    try:
        with np.errstate(over="ignore"):
            levels = np.array(numbers, dtype=np.float64).astype(np.float32)
    except OverflowError:
        levels = np.array([np.inf], dtype=np.float32)
    whole = isinstance(table, list) and len(table) == len(numbers) == 2**bits
    if not whole or not np.isfinite(levels).all() or not (levels[1:] > levels[:-1]).all():
        raise MasterError(
            f"config.json: levels of {codec}: expected {2**bits} ascending float32 numbers for {bits} bits"
        )
    return codebook_from_levels(bits, levels)


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise MasterError(f"config.json: {key}: expected an object, found {type(value).__name__}")
    return value


def _strings(parent: dict[str, Any], key: str) -> list[str]:
    value = parent.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise MasterError(f"config.json: {key}: expected a list of names, found {str(value)[:80]}")
    return value


def _check_keys(where: str, found: dict[str, Any], known: set[str]) -> None:
    """A key that this version does not know may change how the bytes are meant, so it is an error."""
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise MasterError(f"config.json: {where}: unknown key {key!r}; the nearest known one is {near!r}")
