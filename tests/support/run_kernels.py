"""The CPU kernels in a process of their own, every width and dtype once: what they computed, and what was imported.

    python tests/support/run_kernels.py [--without PACKAGE] [--hide FEATURES] KERNEL...

--without: its import fails. --hide: the processor is not told to have features whose names begin like this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys

import numpy as np

from pqweights.codecs.lloyd_max import codebook
from pqweights.kernels import BlockCoding, EncodedArrays, load_backend

BLOCKS = 37  # two groups of 16, and some more
DTYPES = {"BF16": 2, "F16": 2, "F32": 4}


def encode_digest(backend: str) -> str:
    """Of blocks that need no prescaling, of such that do, and of zeros."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((BLOCKS, 128)).astype(np.float32)
    values[5:9] *= np.float32(1e-25)
    values[20:23] *= np.float32(1e25)
    values[16] = 0
    digest = hashlib.sha256()
    for dtype in DTYPES:
        halves = np.clip(values, -60000, 60000).astype(np.float16)
        words = {"BF16": (values.view(np.uint32) >> 16).astype(np.uint16), "F16": halves, "F32": values}[dtype]
        raw = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        for bits in range(2, 9):
            codes, norms = np.empty((BLOCKS, 16 * bits), np.uint8), np.empty(BLOCKS, np.uint16)
            energies, errors = np.empty(BLOCKS), np.empty(BLOCKS)
            coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=90)
            out = EncodedArrays(codes, norms, energies, errors)
            stats = load_backend(backend).encode(raw, dtype, coding, out)
            for array in (codes, norms, energies, errors):
                digest.update(array.tobytes())
            digest.update(repr(stats).encode())
    return digest.hexdigest()


def decode_digest(backend: str) -> str:
    """Of random codes with norms of every size."""
    rng = np.random.default_rng(2)
    norms = (10.0 ** rng.uniform(-8, 4.5, BLOCKS)).astype(np.float16).view(np.uint16)
    norms[3] = 0
    digest = hashlib.sha256()
    for dtype, item_bytes in DTYPES.items():
        for bits in range(2, 9):
            codes = rng.integers(0, 256, (BLOCKS, 16 * bits)).astype(np.uint8)
            values = np.empty(BLOCKS * 128 * item_bytes, np.uint8)
            coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=2)
            load_backend(backend).decode((codes, norms), coding, dtype, values)
            digest.update(values.tobytes())
    return digest.hexdigest()


DIGESTS = {"encode": encode_digest, "decode": decode_digest}


def _hide_features(prefix: str) -> None:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    features.update({name: False for name in features if name.startswith(prefix)})
    llvm.get_host_cpu_features = lambda: features


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="+", choices=DIGESTS)
    parser.add_argument("--without")
    parser.add_argument("--hide")
    arguments = parser.parse_args()
    if arguments.without:
        sys.modules[arguments.without] = None  # type: ignore[assignment]
    if arguments.hide:
        _hide_features(arguments.hide)
    answer = {
        "digests": {kernel: DIGESTS[kernel]("cpu") for kernel in arguments.kernels},
        "imported": sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None}),
    }
    if "pqweights.kernels.vector" in sys.modules:
        from pqweights.kernels import vector

        answer["permutes"], answer["fuses"] = vector._HAS_PERMUTE, vector._HAS_FMA
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
