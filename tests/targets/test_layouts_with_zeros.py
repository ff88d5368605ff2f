"""Layouts with integer zeros: what is stored in pieces is decoded by the formats' own descriptions, and by packages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from export_decoders import VIEWS, from_awq, from_compressed_tensors_with_zeros, from_gptq
from hard_weights import families
from helpers import Array, Tensor

from pqweights.formats.integer_groups import AWQ, GPTQ, PACK_QUANTIZED_ZEROS
from pqweights.formats.packing import PackedFormat
from pqweights.kernels.groups import BEST, GroupRule, Groups

LAYOUTS = {"pack-quantized-asym": PACK_QUANTIZED_ZEROS, "awq": AWQ, "gptq": GPTQ["gptq"], "gptq-v2": GPTQ["gptq_v2"]}
NAME, SIZE, COLUMNS = "layer.weight", 32, 96


def rounding(layout: str, bits: int, *, symmetric: bool = False) -> PackedFormat:
    rule = GroupRule(
        bits=bits,
        group_size=SIZE,
        symmetric=symmetric,
        middle=symmetric,
        zeros=not symmetric,
        rule=BEST,
        scale_dtype="BF16" if layout == "pack-quantized-asym" else "F16",
    )
    return PackedFormat(rule, LAYOUTS[layout])


def weights(rows: int) -> Array:
    """Ordinary weights, and rows whose zeros are the first and the last code."""
    of = families(COLUMNS)
    return np.resize(np.concatenate([of["gaussian"], of["positive"], of["negative"]]), (rows, COLUMNS))


def stored(how: PackedFormat, values: Array) -> tuple[dict[str, Tensor], Array]:
    """The tensors of a weight that is packed in pieces, the last rows first, and what the rule decodes."""
    shape, rule = values.shape, how.rule
    specs = {spec.name: spec for spec in how.specs(NAME, shape)}
    raw = {name: np.full(spec.byte_count, 0xAB, dtype=np.uint8) for name, spec in specs.items()}
    decoded = np.empty(shape, dtype=np.float32)
    for first in range(0, len(values), how.row_multiple)[::-1]:
        rows = np.ascontiguousarray(values[first : first + how.row_multiple])
        groups = rule.quantize(rows.reshape(-1))
        assert isinstance(groups, Groups)
        decoded[first : first + len(rows)] = rule.decode(groups).reshape(rows.shape)
        for stored_name, offset, data in how.pieces(NAME, shape, first_row=first, groups=groups):
            assert data.flags.c_contiguous
            tensor = raw[stored_name]
            if data.ndim == 2:
                tensor = tensor.reshape(len(data), -1)
            tensor[..., offset : offset + data.shape[-1]] = data
    views = {name: raw[name].view(VIEWS[spec.dtype]).reshape(spec.shape) for name, spec in specs.items()}
    return {name: (spec.dtype, views[name]) for name, spec in specs.items()}, decoded


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [64, 77, 200])
def test_packed_zeros_are_those_of_the_rule(rows: int, bits: int) -> None:
    tensors, decoded = stored(rounding("pack-quantized-asym", bits), weights(rows))
    assert np.array_equal(from_compressed_tensors_with_zeros(tensors, NAME, bits), decoded)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_decodes_the_same_numbers(bits: int) -> None:
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=SIZE)
    tensors, decoded = stored(rounding("pack-quantized-asym", bits), weights(77))
    state: dict[str, Any] = {}
    for name, (dtype, values) in tensors.items():
        signed = torch.from_numpy(values.view(np.int16) if dtype == "BF16" else values.copy())
        state[name.removeprefix("layer.")] = signed.view(torch.bfloat16) if dtype == "BF16" else signed
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(theirs, torch.from_numpy(decoded).bfloat16())


@pytest.mark.parametrize("rows", [64, 72, 200])
def test_awq_is_decoded_as_the_rule_does(rows: int) -> None:
    tensors, decoded = stored(rounding("awq", 4), weights(rows))
    assert np.array_equal(from_awq(tensors, "layer"), decoded)


def test_compressed_tensors_converts_awq_to_the_same_codes() -> None:
    import torch
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    tensors, decoded = stored(rounding("awq", 4), weights(72))
    given = [torch.from_numpy(tensors[f"layer.{part}"][1].copy()) for part in ("qweight", "qzeros")]
    scales = torch.from_numpy(tensors["layer.scales"][1].view(np.float16))
    codes, scales, zeros = AutoAWQConverter(group_size=SIZE)._convert_gemm_module(given[0], scales, given[1])
    steps = (codes - zeros.repeat_interleave(SIZE, dim=1)).numpy()
    assert np.array_equal(steps * scales.float().repeat_interleave(SIZE, dim=1).numpy(), decoded)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq-v2"])
def test_gptq_is_decoded_as_the_rule_does(layout: str, bits: int) -> None:
    """The first format is for symmetric rules, the second one for both. Rows fill words, of 3 bits three at a time."""
    rows = 160 if bits == 3 else 144
    for symmetric in (True,) if layout == "gptq" else (True, False):
        tensors, decoded = stored(rounding(layout, bits, symmetric=symmetric), weights(rows))
        found = from_gptq(tensors, "layer", bits, first_zero=int(layout == "gptq"))
        assert np.array_equal(found, decoded)


@pytest.mark.parametrize("layout", ["awq", "gptq", "pack-quantized-asym"])
def test_bytes_that_wait_on_the_disk_are_those_that_come_by_columns(layout: str) -> None:
    how, values = rounding(layout, 4, symmetric=layout == "gptq"), weights(96)
    groups = how.rule.quantize(values.reshape(-1))
    pieces = how.pieces(NAME, values.shape, first_row=0, groups=groups)
    assert how.column_bytes(values.shape) == sum(data.size for _, _, data in pieces if data.ndim == 2)
