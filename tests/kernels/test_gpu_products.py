"""Products of packed weights on a GPU, beside products with the decoded weight in float64.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py), with the launch parameters of a GPU; they are
compiled for GPUs in any case.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from blocks import BITS
from closeness import each_near, rounding
from torch import Tensor

from pqweights.codecs import get_codec
from pqweights.codecs.lloyd_max import codebook
from pqweights.codecs.scalar import HADAMARD, SIGNED_HADAMARD, ScalarState
from pqweights.inference.loading import packed_products
from pqweights.inference.loading.packed_rows import Factor, PackedRows, decode_rows
from pqweights.kernels import BlockCoding
from pqweights.kernels.reference import decode_blocks

no_gpu = not torch.cuda.is_available()
on_gpu = pytest.mark.skipif(no_gpu, reason="needs an NVIDIA GPU and a CUDA build of torch")
# Triton interprets its kernels or, where there is a GPU, compiles them.
DEVICES = [pytest.param("cuda", marks=on_gpu), *(["cpu"] if no_gpu else [])]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What an output may be off by, as a share of its standard deviation over random codes: inputs and levels were rounded
# to float16, or everything is float32.
HALF_ERROR, FLOAT_ERROR = rounding("F16", 4), rounding("F32", 32)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def products() -> ModuleType:
    from pqweights.kernels import gpu_products

    return gpu_products


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A random packed weight, and what it decodes to in float64."""

    codes: Tensor
    norms: Tensor
    awq: Tensor | None
    coding: BlockCoding
    decoded: Tensor

    def product(self, products: ModuleType) -> object:
        return products.GpuProduct(
            words=self.codes.view(torch.int32),
            norms=self.norms,
            coding=self.coding,
            outputs=len(self.decoded),
            awq=self.awq,
        )


def random_weight(
    coding: BlockCoding, outputs: int, columns: int, device: torch.device, scaled: bool = False
) -> Weight:
    rng = np.random.default_rng(outputs + columns)
    blocks = outputs * columns // 128
    codes = torch.from_numpy(rng.integers(0, 256, (blocks, 16 * coding.codebook.bits), dtype=np.uint8))
    norms = torch.from_numpy(rng.uniform(0, 2, blocks).astype(np.float16))
    decoded = decode_blocks(codes, norms, replace(coding, norm_exponent=0)).double().view(outputs, columns)
    decoded = torch.ldexp(decoded, torch.tensor(coding.norm_exponent))
    awq = torch.from_numpy(rng.uniform(0.25, 4, columns).astype(np.float32)) if scaled else None
    decoded = decoded if awq is None else decoded / awq
    moved = (None if each is None else each.to(device) for each in (codes, norms, awq, decoded))
    codes, norms, awq, decoded = moved  # type: ignore[assignment]
    return Weight(codes=codes, norms=norms, awq=awq, coding=coding, decoded=decoded)


def random_inputs(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(device)


def check_products(y: Tensor, x: Tensor, decoded: Tensor, bias: Tensor | None = None) -> None:
    """Check a float32 product of inputs of any dtype with [outputs, columns] f64."""
    expected = x.double() @ decoded.T
    deviation = x.double().norm(dim=1)[:, None] * decoded.norm(dim=1)[None, :] / x.shape[1] ** 0.5
    share = HALF_ERROR if len(x) > 4 and x.dtype != torch.float32 else FLOAT_ERROR
    allowed = share * deviation
    if bias is not None:
        expected = expected + bias.double()
        allowed = allowed + FLOAT_ERROR * bias.double().abs()
    assert ((y.double() - expected).abs() <= allowed).all()


# Outputs and columns that fill the last programs in part.
SHAPES = ((37, 128), (20, 640), (5, 1152))
# Every width meets every number of rows and every dtype, and these each other; what else varies is random.
CASES = [(bits, DTYPES[(i + j) % 3], rows) for i, bits in enumerate(BITS) for j, rows in enumerate((1, 2, 7, 16, 17))]


@pytest.mark.parametrize(("bits", "dtype", "rows"), CASES)
def test_products_match_the_decoded_weight(
    bits: int, dtype: torch.dtype, rows: int, device: torch.device, products: ModuleType
) -> None:
    choose = random.Random(100 * bits + rows).choice
    outputs, columns = choose(SHAPES)
    coding = BlockCoding(codebook=codebook(bits), signed=choose((False, True)), norm_exponent=choose((0, -11, 14)))
    weight = random_weight(coding, outputs, columns, device, scaled=choose((False, True)))
    x = random_inputs(rows, columns, dtype, device)
    bias = random_inputs(1, outputs, dtype, device)[0] if choose((False, True)) else None
    product = weight.product(products)
    inputs = products.prepare(x, product.basis, product.awq)
    guarded = torch.full((rows, outputs + 2), 77.0, device=device)
    product.multiply(inputs, out=guarded[:, 1:-1], bias=bias, factor=0.25)
    assert (guarded[:, [0, -1]] == 77).all()
    check_products(guarded[:, 1:-1], x, weight.decoded * 0.25, bias)
    # Outputs of the model's dtype are these, rounded; the interpreter cuts BF16 off instead.
    rounded = torch.empty(rows, outputs, dtype=dtype, device=device)
    product.multiply(inputs, out=rounded, bias=bias, factor=0.25)
    nearest = guarded[:, 1:-1].to(dtype)
    if dtype == torch.bfloat16 and device.type == "cpu":
        assert each_near(rounded, nearest, rounding("BF16", 2))
    else:
        assert torch.equal(rounded, nearest)


@pytest.mark.parametrize("exponent", [-150, 140])
def test_norm_exponents_beyond_float32(exponent: int, device: torch.device, products: ModuleType) -> None:
    """The power of two that they amount to is no float32 either, but the outputs are."""
    coding = BlockCoding(codebook=codebook(4), norm_exponent=exponent)
    weight = random_weight(coding, 9, 256, device)
    for rows in (1, 3):
        x = random_inputs(rows, 256, torch.float32, device) * 2.0 ** (60 if exponent < 0 else -60)
        product = weight.product(products)
        y = torch.empty(rows, 9, device=device)
        product.multiply(products.prepare(x, product.basis, None), out=y, bias=None, factor=1.0)
        check_products(y, x, weight.decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_every_size(dtype: torch.dtype, device: torch.device, products: ModuleType) -> None:
    """Rows are scaled by themselves: a large one does not take digits from a small one, and zeros give zeros."""
    weight = random_weight(BlockCoding(codebook=codebook(5)), 16, 384, device)
    sizes = torch.tensor([60000.0, 2.0**-10, 0.0, 1.0], device=device)[:, None]
    x = (sizes * torch.sign(random_inputs(4, 384, torch.float32, device))).to(dtype)
    product = weight.product(products)
    y = torch.empty(4, 16, device=device)
    product.multiply(products.prepare(x, product.basis, None), out=y, bias=None, factor=1.0)
    check_products(y, x, weight.decoded)
    assert (y[2] == 0).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_spoil_their_row_alone(
    bad: float, rows: int, device: torch.device, products: ModuleType
) -> None:
    weight = random_weight(BlockCoding(codebook=codebook(3)), 16, 256, device)
    x = random_inputs(rows, 256, torch.bfloat16, device)
    x[0, 5] = bad
    product = weight.product(products)
    y = torch.empty(rows, 16, device=device)
    product.multiply(products.prepare(x, product.basis, None), out=y, bias=None, factor=1.0)
    assert not y[0].isfinite().any()
    if rows > 1:
        check_products(y[1:], x[1:], weight.decoded)


# --- packed weights of models ---


def packed_rows(rows: int, columns: int, *, bits: int, rotation: str, device: torch.device, scaled: bool) -> PackedRows:
    coder = get_codec("hadamard-lloyd-max").coder(bits)
    state = ScalarState(rotation, -3)
    weight = random_weight(coder.coding(state), rows, columns, device, scaled)  # type: ignore[attr-defined]
    return PackedRows(
        place="test",
        weights=rows * columns,
        rows=rows,
        columns=columns,
        coder=coder,
        state=state,
        parts=(weight.codes, weight.norms.view(torch.uint8).view(-1, 2)),
        offset=0,
        first_block=0,
        awq=weight.awq,
        factor=Factor(2.0),
    )


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_rows_are_multiplied_like_the_decoded_matrix(
    rows: int, dtype: torch.dtype, device: torch.device, products: ModuleType
) -> None:
    """Rows that were encoded apart, as those of q, k and v may be, with a basis for each."""
    matrix = (
        packed_rows(20, 384, bits=4, rotation=HADAMARD, device=device, scaled=False),
        packed_rows(7, 384, bits=5, rotation=SIGNED_HADAMARD, device=device, scaled=False),
        packed_rows(12, 384, bits=3, rotation=HADAMARD, device=device, scaled=True),
    )
    decoded = torch.empty(39, 384, device=device)
    decode_rows(matrix, 0, 39, out=decoded)
    x = random_inputs(rows, 384, dtype, device)
    bias = random_inputs(1, 39, dtype, device)[0]
    assert packed_products.multiplies_on_gpu(matrix, x)
    y = packed_products.multiply_on_gpu(matrix, x, bias)
    assert (y.shape, y.dtype, y.device) == ((rows, 39), dtype, x.device)
    expected = x.double() @ decoded.double().T + bias.double()
    assert ((y.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * (expected.abs() + 2)).all()


def test_other_rows_and_many_inputs_are_decoded(device: torch.device) -> None:
    rows = packed_rows(20, 384, bits=4, rotation=HADAMARD, device=device, scaled=False)
    few = random_inputs(3, 384, torch.float32, device)
    assert packed_products.multiplies_on_gpu((rows,), few)
    assert not packed_products.multiplies_on_gpu((rows,), few.double())
    assert not packed_products.multiplies_on_gpu((rows,), few.repeat(30, 1))
    assert not packed_products.multiplies_on_gpu((rows,), few.to("meta"))
    assert not packed_products.multiplies_on_gpu((rows, replace(rows, offset=64)), few)
    assert not packed_products.multiplies_on_gpu((replace(rows, columns=64),), few)


def test_without_triton_rows_are_decoded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed_rows(20, 384, bits=4, rotation=HADAMARD, device=device, scaled=False)
    monkeypatch.setattr(packed_products, "_runs_triton", lambda device: False)
    assert not packed_products.multiplies_on_gpu((rows,), random_inputs(3, 384, torch.float32, device))


@on_gpu
def test_a_cuda_graph_prepares_its_inputs_itself() -> None:
    matrix = (packed_rows(64, 512, bits=5, rotation=HADAMARD, device=torch.device("cuda"), scaled=False),)
    x = random_inputs(1, 512, torch.bfloat16, torch.device("cuda"))
    with torch.no_grad():
        packed_products.multiply_on_gpu(matrix, x, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = packed_products.multiply_on_gpu(matrix, x, None)
        x.copy_(random_inputs(1, 512, torch.bfloat16, torch.device("cuda")) * 3)
        graph.replay()
        assert torch.equal(y, packed_products.multiply_on_gpu(matrix, x, None))


# --- machine code ---

COMPILE = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pqweights.kernels import gpu_products as products

POINTERS = {"words": "*i32", "norms": "*fp16", "bias": "*bf16", "out": "*bf16", "signs": "*fp32", "awq": "*fp32",
            "scales": "*fp32", "values": "*bf16"}

def ptx(kernel, processor, pointers, constants, options):
    pointers = POINTERS | pointers
    signature = {name: "constexpr" if name.isupper() else pointers.get(name, "i32") for name in kernel.arg_names}
    places = [k for k, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants,
                       attrs={(k,): [["tt.divisibility", 16]] for k in places})
    return triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options).asm["ptx"]

folder = Path(sys.argv[1])
for processor in (80, 90):
    for kind, half in (("fp16", True), ("fp32", False)):
        constants = {"SCALED": not half, "SIGNED": True, "HALF": half}
        code = ptx(products._prepare, processor, {"out": "*" + kind}, constants, products.PREPARE_OPTIONS)
        (folder / f"prepare-{kind}-{processor}").write_text(code)
    for bits in (4, 8):
        constants = {"BITS": bits, "HAS_BIAS": True, "PICKING": products._picking(bits) if bits == 4 else ""}
        few = (products.FEW_PICKED if bits == 4 else products.FEW) | {"ROWS": products.FEW_ROWS}
        for kernel, kind, sizes in (("few", "fp32", few), ("some", "fp16", products.SOME),
                                    ("some", "fp32", products.SOME)):
            multiply, pointers = getattr(products, "_multiply_" + kernel), {"levels": "*fp32", "inputs": "*" + kind}
            options = {name: value for name, value in sizes.items() if name.islower()}
            own = {name: value for name, value in sizes.items() if name.isupper()}
            code = ptx(multiply, processor, pointers, constants | own, options)
            (folder / f"{kernel}-{kind}-{bits}-{processor}").write_text(code)
"""


def test_kernels_are_compiled_for_gpus(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Many rows use the tensor cores. Levels of 4 bits are picked, for few rows without a barrier."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("gpu"))  # later runs find it again
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(found) == 2 * (2 + 2 * 3)
    for name, code in found.items():
        assert ("mma.sync" in code) is name.startswith("some"), name
        assert ("prmt.b32 p3" in code) is ("-4-" in name), name
        if name.startswith("few") and "-4-" in name:
            assert "bar.sync" not in code, name
