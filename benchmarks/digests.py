"""The digest of the bytes that a codec or a format makes of weights that never change.

    python benchmarks/digests.py [NAME...]

Documents of benchmarks state the digests of what they measured, and tests/test_figures.py compares them with those of
the code: a figure that was measured with other bytes is found by them. The digest changes if the codec chooses other
codes, scales or a layout, and for nothing else: it covers tensors alone, and weights are made of integers, so that all
processors and versions of numpy give the same.

Names are those of the command line: `q5`, `trellis` (at several rates, and with all numbers of states), `columns` (the
codec of calibrated masters), `gptq`, `gptq floats` and `gptq blocks` (the rounding of calibrated exports), `lossless`,
`gguf Q4_K`, `vllm w4a16`, `torchao int4`, `mlx q4`. `kv` is what codes of caches stand for: the codes themselves follow
from products, which differ between processors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import pqweights
from pqweights.formats.column_encoding import InputFactors, encode_columns
from pqweights.formats.gguf_blocks import block_format
from pqweights.formats.lloyd_max import codebook
from pqweights.formats.mlx import mlx_format as packed_by_mlx
from pqweights.formats.packing import PackedFormat
from pqweights.kernels import gguf_encoding
from pqweights.kernels.compensation import MomentsFactor, compensate, empty_matrix, factorize, order_of
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, BlockRule
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.kernels.trellis import STATES
from pqweights.runtime.kv.polar_transform import LEVELS
from pqweights.targets import mlx, torchao, vllm

ROWS, COLUMNS = 128, 512
SHAPE = (ROWS, COLUMNS)
NAME = "model.layers.0.mlp.down_proj.weight"
HEX_DIGITS = 16

Pieces = Iterator[bytes]  # whatever a codec stores


def weights() -> np.ndarray:
    """Bell-shaped weights f32 [ROWS, COLUMNS], which BF16 holds exactly; columns differ in scale."""
    raw = np.random.PCG64(50).random_raw(ROWS * COLUMNS).view(np.uint8).reshape(ROWS, COLUMNS, 8)
    bell = raw.sum(axis=-1, dtype=np.int64) - 1020
    return np.ldexp((bell // 8).astype(np.float32), -9 + np.arange(COLUMNS) % 3)


def importance() -> np.ndarray:
    """How much each column counts."""
    return np.ldexp(np.float32(1), np.arange(COLUMNS) % 5 - 2)


def master(**options: Any) -> Pieces:
    """What `quantize` stores of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "source"), Path(folder, "out")
        source.mkdir()
        halves = (weights().view(np.uint32) >> 16).astype("<u2").tobytes()
        header = json.dumps({NAME: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [0, len(halves)]}}).encode()
        (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + halves)
        (source / "config.json").write_text(json.dumps({"model_type": "golden"}))
        pqweights.quantize(source, out, **options)
        for path in sorted(out.glob("*.safetensors")):
            for name, data in sorted(load_file(path).items()):
                yield name.encode() + data.tobytes()


def trellis() -> Pieces:
    """The trellis at rates with one and with several steps, and with all numbers of states."""
    for bits in (1.5, 2.125, 3.125, 4.125, 5.125, 8):
        yield from master(codec="hadamard-trellis", bits=bits)
    for states in STATES[1:]:
        yield from master(codec="hadamard-trellis", bits=3.125, effort=states)


def damped_moments() -> np.ndarray:
    """Second moments [COLUMNS, COLUMNS] with a Cholesky factor whose numbers are exact."""
    mixing = np.eye(COLUMNS) + np.eye(COLUMNS, k=1) / 2 - np.eye(COLUMNS, k=5) / 4
    return mixing @ np.diag(4.0 ** (np.arange(COLUMNS) % 2)) @ mixing.T


def columns() -> Pieces:
    """Columns with the feedback of their errors."""
    damped = damped_moments()
    moments = damped - np.eye(COLUMNS) * np.diagonal(damped).mean() / 2  # to which as much is added again
    for states in STATES:
        inputs = InputFactors.of([moments], damping=1.0)
        codes, _ = encode_columns(weights(), inputs, gradients=np.ones(ROWS), step=0.5, states=states)
        yield from (part.tobytes() for part in (codes.trellis, codes.lengths, codes.row_scales, codes.column_scales))


def gptq(*rules: GroupRule | FloatRule | BlockRule) -> Pieces:
    """Codes with the feedback of their errors, as exports with `--rounding gptq` have them."""
    moments = damped_moments().astype(np.float32)
    order = order_of(np.diagonal(moments))
    ordered, matrix = moments[order][:, order], empty_matrix(COLUMNS)
    matrix[:, :COLUMNS] = np.tril(ordered, -1)
    diagonal = factorize(matrix, np.diagonal(ordered).copy(), 0.01)
    assert diagonal is not None
    factor = MomentsFactor(order=order, matrix=matrix, diagonal=diagonal)
    for rule in rules:
        flat = weights().reshape(-1)
        is_block = isinstance(rule, BlockRule)
        start = rule.quantize_weighted(flat, factor.importance) if is_block else rule.quantize(flat)
        groups, _ = compensate(weights(), start, rule, factor)
        yield from (part.tobytes() for part in (groups.codes, groups.scales, groups.offsets))


def rounded(*formats: PackedFormat) -> Pieces:
    """What exports store of the weights, rounded without data and, where a rule can, by importances."""
    for how in formats:
        rule = how.rule
        if how.has_unit:
            assert isinstance(rule, FloatRule)
            rule = replace(rule, unit=2.0**-7)
        made = [rule.quantize(weights().reshape(-1))]
        if isinstance(rule, BlockRule) or (isinstance(rule, FloatRule) and rule.rows * rule.group_size < COLUMNS):
            made.append(rule.quantize_weighted(weights().reshape(-1), importance()))
        for groups in made:
            pieces = replace(how, rule=rule).pieces(NAME, SHAPE, first_row=0, groups=groups)
            yield from (stored_name.encode() + data.tobytes() for stored_name, _, data in pieces)


def gguf(kind: str) -> Pieces:
    """The blocks of a type."""
    return rounded(block_format(kind))


def vllm_format(kind: str) -> Pieces:
    """A format with its default groups, by every rule."""
    how = vllm.FORMATS[kind]
    return rounded(*(replace(how, qparams=way).format(SHAPE, how.groups.size) for way in how.ways))


def torchao_format(kind: str) -> Pieces:
    """A format of torchao."""
    how = torchao.FORMATS[kind]
    return rounded(*(replace(how, qparams=way).format(SHAPE, 128) for way in how.ways))


def mlx_format(kind: str) -> Pieces:
    """A format of mlx with its default groups."""
    mode, bits = mlx.FORMATS[kind]
    size = mlx.GROUP_SIZES[mode][0]
    for name in ("best", "mlx"):
        yield from rounded(packed_by_mlx(mode, bits, size, name=name))


def kv() -> Pieces:
    """The levels of codes of caches."""
    for bits in range(2, 9):
        yield codebook(bits).levels.astype("<f4").tobytes()
    yield repr(LEVELS).encode()


INTEGERS = [GroupRule(bits=4, group_size=128, symmetric=way, middle=way, rule="best") for way in (True, False)]
FLOATS = (FloatRule("nvfp4", 4, 16, "best", unit=2.0**-7), FloatRule("mxfp4", 4, 32, "best"))
BLOCKS = [rule for kind, rule in BLOCK_TYPES.items() if rule.is_compensated and kind not in gguf_encoding.FLOATS]

CODECS: dict[str, Callable[[], Pieces]] = {
    **{f"q{bits}": functools.partial(master, bits=bits) for bits in range(2, 9)},
    "trellis": trellis,
    "columns": columns,
    "gptq": functools.partial(gptq, *INTEGERS),
    "gptq floats": functools.partial(gptq, *FLOATS),
    "gptq blocks": functools.partial(gptq, *BLOCKS),
    "lossless": functools.partial(master, lossless=True),
    **{f"gguf {kind}": functools.partial(gguf, kind) for kind in BLOCK_TYPES},
    **{f"vllm {kind}": functools.partial(vllm_format, kind) for kind in vllm.FORMATS},
    **{f"torchao {kind}": functools.partial(torchao_format, kind) for kind in torchao.FORMATS},
    **{f"mlx {kind}": functools.partial(mlx_format, kind) for kind in mlx.FORMATS},
    "kv": kv,
}


@functools.cache
def digest(name: str) -> str:
    """The first hexadecimal digits of the SHA-256 of what a codec or a format makes."""
    whole = hashlib.sha256()
    for piece in CODECS[name]():
        whole.update(piece)
    return whole.hexdigest()[:HEX_DIGITS]


if __name__ == "__main__":
    for codec in sys.argv[1:] or CODECS:
        print(f"{codec:20} {digest(codec)}")
