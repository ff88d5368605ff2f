"""The GPU kernels: they compute the bytes of the CPU's, and their machine code rounds every operation by itself.

Without a GPU they run in Triton's interpreter (tests/conftest.py); they are compiled for a GPU in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import helpers
import numpy as np
import numpy.typing as npt
import pytest
import torch
from blocks import BITS, DTYPES, assert_same_encoding, decode, encode, examples, exponents_for, needs_triton, same_bits
from hypothesis import given
from hypothesis import strategies as st

from pqweights.codecs.lloyd_max import codebook
from pqweights.kernels import BlockCoding, EncodedArrays
from pqweights.kernels.devices import INTERPRETER

pytestmark = needs_triton
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")


def some_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The first and the last blocks of a family, because the interpreter is slow."""
    return values if len(values) <= 16 else np.concatenate([values[:8], values[-8:]])


FAMILIES = {name: some_of(values) for name, values in helpers.block_families().items()}
EVERYTHING = np.concatenate(list(FAMILIES.values()))


@pytest.fixture
def gpu() -> Iterator[ModuleType]:
    """The module itself, for tests of its parts."""
    from pqweights.kernels import gpu

    return gpu


def assert_same_as_cpu(raw: npt.NDArray[np.uint8], dtype: str, bits: int, signed: bool, exponent: int) -> None:
    """Encode with an exponent and decode to the same dtype; of blocks whose norm overflows, only the codes count."""
    ours, truth = (encode(name, raw, dtype, bits, signed, exponent) for name in ("gpu", "cpu"))
    finite = truth[1] & 0x7FFF < 0x7C00
    for what, a, b in zip(("codes", "norms", "energies"), ours[:3], truth[:3], strict=True):
        assert same_bits(a, b), what
    assert same_bits(ours[3][finite], truth[3][finite])
    assert ours[4] == truth[4]
    args = (truth[0][finite], truth[1][finite], dtype, bits, signed, exponent)
    assert same_bits(decode("gpu", *args), decode("cpu", *args))


# --- bytes ---


# Exponents that suit the norms of the largest, of ordinary and of the smallest blocks.
EXPONENTS = (110, -8, -120)
CASES = list(itertools.product(BITS, DTYPES, (False, True)))


def exponent_of_case(bits: int, dtype: str, signed: bool) -> int:
    """One exponent for each case, so chosen that each meets every width, every dtype, and both kinds of rotation."""
    return EXPONENTS[(bits + DTYPES.index(dtype) + signed) % len(EXPONENTS)]


def test_each_exponent_is_tried_with_every_width_dtype_and_rotation() -> None:
    for place, values in enumerate((BITS, DTYPES, (False, True))):
        met = {(case[place], exponent_of_case(*case)) for case in CASES}
        assert met == set(itertools.product(values, EXPONENTS))


@pytest.mark.parametrize(("bits", "dtype", "signed"), CASES)
def test_every_family_has_the_bytes_of_the_cpu(bits: int, dtype: str, signed: bool) -> None:
    """All families in one call."""
    raw = helpers.raw_bytes(EVERYTHING, dtype)
    assert_same_as_cpu(raw, dtype, bits, signed, exponent_of_case(bits, dtype, signed))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_bytes_of_the_reference(name: str) -> None:
    """Each family with exponents of its own, with which no norm overflows."""
    raw = helpers.raw_bytes(FAMILIES[name], "F32")
    for exponent in exponents_for(encode("cpu", raw, "F32", 5, True, 150)[4]):
        ours, truth = (encode(backend, raw, "F32", 5, True, exponent) for backend in ("gpu", "reference"))
        assert_same_encoding(ours, truth, exponent)
        args = (*ours[:2], "F16", 5, True, exponent)
        assert same_bits(decode("gpu", *args), decode("reference", *args)), exponent


@examples(15)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=128),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(-150, 127),
)
def test_property_any_blocks_have_the_bytes_of_the_cpu(
    blocks: list[list[float]], bits: int, signed: bool, dtype: str, exponent: int
) -> None:
    """Short lists are repeated, because few different values make Walsh functions and ties likely."""
    values = np.array([list(itertools.islice(itertools.cycle(few), 128)) for few in blocks], dtype=np.float32)
    assert_same_as_cpu(helpers.raw_bytes(values, dtype), dtype, bits, signed, exponent)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_finite_16_bit_value_is_encoded_alike(dtype: str) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    exponents = np.uint16(0x7F80 if dtype == "BF16" else 0x7C00)
    words[words & exponents == exponents] = 0
    assert_same_as_cpu(words.view(np.uint8), dtype, 5, False, 110 if dtype == "BF16" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_norms_and_codes_are_decoded_alike(dtype: str) -> None:
    """A sample of the finite float16 of both signs, with random codes."""
    norms = np.append(np.arange(0, 2**16, 131, dtype=np.uint16), np.uint16([0x7BFF, 0xFBFF, 0x8000, 1, 0x8001]))
    norms = norms[norms & 0x7FFF < 0x7C00]
    for bits, exponent in ((3, 0), (7, -20), (8, 115)):
        codes = np.random.default_rng(bits).integers(0, 256, (len(norms), 16 * bits)).astype(np.uint8)
        args = (codes, norms, dtype, bits, True, exponent)
        assert same_bits(decode("gpu", *args), decode("cpu", *args)), bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_rotated_coordinates_are_decoded_alike(bits: int, dtype: str) -> None:
    """Random codes, with norms of every size and sign."""
    norms = np.append(np.arange(0, 2**16, 997, dtype=np.uint16), np.uint16([0x7BFF, 0xFBFF, 0x8000, 1, 0x8001]))
    norms = norms[norms & 0x7FFF < 0x7C00]
    codes = np.random.default_rng(bits).integers(0, 256, (len(norms), 16 * bits)).astype(np.uint8)
    for exponent in ((0, -20), (-130, 115))[(bits + DTYPES.index(dtype)) % 2]:
        args = (codes, norms, dtype, bits, False, exponent)
        truth = decode("cpu", *args, rotate=False)
        assert same_bits(decode("gpu", *args, rotate=False), truth), exponent
        assert not same_bits(decode("gpu", *args), truth)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33])
def test_the_last_program_writes_only_its_blocks(count: int, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take 16 blocks, as on a GPU, and the last one is partly filled."""
    monkeypatch.setattr(gpu, "BLOCKS_PER_PROGRAM", 16)
    bits, guard = 7, 64

    def guarded(byte_count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        whole = np.full(byte_count + 2 * guard, 0xA5, np.uint8)
        return whole, whole[guard : guard + byte_count]

    raw = helpers.raw_bytes(EVERYTHING[-count:] if count else EVERYTHING[:0], "F32")
    wholes, inner = zip(*(guarded(n * count) for n in (16 * bits, 2, 8, 8, 512)), strict=True)
    codes, norms = inner[0].reshape(count, 16 * bits), inner[1].view(np.uint16)
    coding = BlockCoding(codebook=codebook(bits), signed=True, norm_exponent=-8)
    out = EncodedArrays(codes, norms, inner[2].view(np.float64), inner[3].view(np.float64))
    stats = gpu.encode(raw, "F32", coding, out)
    gpu.decode((codes, norms), coding, "F32", inner[4])
    truth = encode("cpu", raw, "F32", bits, True, -8)
    ours = (codes, norms, inner[2].view(np.float64), inner[3].view(np.float64), stats)
    assert_same_encoding(ours, truth)
    assert same_bits(inner[4], decode("cpu", *truth[:2], "F32", bits, True, -8))
    for whole in wholes:
        assert (whole[:guard] == 0xA5).all() and (whole[-guard:] == 0xA5).all()


def test_threads_encode_concurrently() -> None:
    """Each with its own width and dtype, so that several kernels are compiled, or first interpreted, at once."""
    rounds = list(itertools.product(BITS, DTYPES))[::3]

    def both(case: tuple[int, str]) -> None:
        bits, dtype = case
        assert_same_as_cpu(helpers.raw_bytes(FAMILIES["gaussian"], dtype), dtype, bits, bits % 2 == 0, -8)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(both, rounds))


# --- machine code ---

COMPILE = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pqweights.kernels import gpu

assert not gpu.INTERPRETED
POINTERS = {
    "values": None, "thresholds": "*fp32", "levels": "*fp32", "signs": "*fp32", "codes": "*u8", "norms": "*i16",
    "energies": "*fp64", "errors": "*fp64", "exact_norms": "*fp64",
}

def ptx(kernel, dtype, bits, processor, options, rotate=True):
    signature = {}
    for name in kernel.arg_names:
        if name in POINTERS:
            signature[name] = POINTERS[name] or ("*i32" if dtype == 2 else "*i16")
        else:
            signature[name] = "constexpr" if name.isupper() else "i32"
    constants = {"DTYPE": dtype, "BITS": bits, "BLOCKS": gpu.BLOCKS_PER_PROGRAM}
    constants |= {"ROTATE": rotate} if "ROTATE" in signature else {}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options).asm["ptx"]

folder = Path(sys.argv[1])
for case in sys.argv[2:]:
    name, dtype, bits, processor = case.split("-")
    kernel = gpu._encode if name == "encode" else gpu._decode
    code = ptx(kernel, int(dtype), int(bits), int(processor), gpu.COMPILE_OPTIONS, name != "decode_rotated")
    (folder / case).write_text(code)
(folder / "fused").write_text(ptx(gpu._encode, 0, 5, 80, gpu.COMPILE_OPTIONS | {"enable_fp_fusion": True}))
"""
# Kernel (decode_rotated leaves blocks rotated), dtype, bits, compute capability: each of the last three in every kind.
PTX_CASES = (
    "encode-0-5-80",
    "encode-1-8-90",
    "encode-2-7-90",
    "decode-0-5-90",
    "decode-1-7-80",
    "decode-2-8-90",
    "decode_rotated-2-5-90",
)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait for other workers that do the same."""
    with open(lock, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory, lasting_folder: Path) -> dict[str, str]:
    """Assembly by case, and under "fused" the assembly of a kernel for which fusing was allowed.

    Triton keeps what it has compiled, and recognises sources that have changed.
    """
    folder = tmp_path_factory.mktemp("ptx")
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    environment["TRITON_CACHE_DIR"] = str(lasting_folder / "triton")
    command = [sys.executable, "-c", COMPILE, str(folder), *PTX_CASES]
    with alone(lasting_folder / "triton.lock"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in folder.iterdir()}


def arithmetic(code: str) -> set[str]:
    """The operations on floats that round their result."""
    kinds = r"add|sub|mul|fma|mad|div|sqrt|rsqrt|rcp|ex2|lg2|sin|cos|tanh"
    return set(re.findall(rf"\b((?:{kinds})\.(?:\w+\.)*b?f(?:16|32|64)\w*)\b", code))


@pytest.mark.parametrize("case", PTX_CASES)
def test_machine_code_rounds_every_operation_by_itself(case: str, ptx: dict[str, str]) -> None:
    """Every operation says .rn, so that nothing later may fuse it; none flushes subnormals or approximates."""
    found = arithmetic(ptx[case])
    allowed = {f"{kind}.rn.{width}" for kind in ("add", "sub", "mul", "div", "sqrt") for width in ("f32", "f64")}
    assert found <= allowed
    assert {"mul.rn.f32", "mul.rn.f64"} <= found
    assert ({"add.rn.f32", "sub.rn.f32"} <= found) is (not case.startswith("decode_rotated"))
    if case.startswith("encode"):
        assert {"sqrt.rn.f32", "div.rn.f32", "div.rn.f64", "add.rn.f64", "sub.rn.f64"} <= found
    assert not re.search(r"\.ftz|\.approx|\.full|\bcall\b", ptx[case])


def test_fused_multiply_add_changes_the_result(ptx: dict[str, str]) -> None:
    """Where fusing is allowed, some operations are fused, and those that are left may be fused later."""
    found = arithmetic(ptx["fused"])
    assert "fma.rn.f32" in found
    assert "mul.f32" in found or "add.f32" in found


@pytest.mark.parametrize("case", PTX_CASES)
def test_machine_code_converts_to_the_nearest_float(case: str, ptx: dict[str, str]) -> None:
    """Conversions to shorter floats; those to longer ones have nothing to round."""
    narrowing = set(re.findall(r"\bcvt\.\S*f16\.f32|\bcvt\.\S*f32\.f64|\bcvt\.\S*bf16\S*", ptx[case]))
    assert narrowing <= {"cvt.rn.f16.f32", "cvt.rn.f32.f64"}
    assert narrowing


# --- with a GPU ---


@on_gpu
def test_gpu_is_used_if_there_is_one(gpu: ModuleType) -> None:
    assert not gpu.INTERPRETED
    assert gpu._device().type == "cuda"


@on_gpu
def test_buffers_are_page_locked(gpu: ModuleType) -> None:
    for byte_count in (1, 4096, 3 << 20):
        buffer = gpu.empty(byte_count)
        assert (buffer.dtype, buffer.shape) == (np.uint8, (byte_count,))
        assert torch.from_numpy(buffer).is_pinned()


@on_gpu
def test_random_data_from_several_threads_has_the_bytes_of_the_cpu(gpu: ModuleType) -> None:
    """Whole chunks of any finite bit patterns, in page-locked and in ordinary memory."""

    def both(seed: int) -> None:
        rng = np.random.default_rng(seed)
        bits, dtype, signed = int(rng.integers(2, 9)), DTYPES[seed % 3], bool(seed & 1)
        words = rng.integers(0, 2**32, 1 << 20, dtype=np.uint32)
        if seed % 4 < 2:  # ordinary weights; the others have every exponent
            words = rng.standard_normal(1 << 20, dtype=np.float32).view(np.uint32)
        values = words.view(np.float32)
        values = np.where(np.isfinite(values), values, np.float32(0)).reshape(-1, 128)
        raw = helpers.raw_bytes(values, dtype)
        if seed & 2:
            locked = gpu.empty(len(raw))
            locked[:] = raw
            raw = locked
        for exponent in (0, 110):
            assert_same_as_cpu(raw, dtype, bits, signed, exponent)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(both, range(48)))


@on_gpu
def test_a_whole_command_on_a_gpu_writes_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    """Tensors of several chunks; test_devices.py has tiny checkpoints."""
    source = helpers.write_checkpoint(
        tmp_path / "model",
        {f"model.layers.{i}.mlp.up_proj.weight": helpers.bf16(helpers.gaussian(1500, 2048, seed=i)) for i in range(6)}
        | {"model.layers.6.mlp.up_proj.weight": helpers.f32(helpers.gaussian(1501, 1000, seed=6))},
        config={"model_type": "llama"},
    )
    for device in ("cpu", "cuda"):
        helpers.run_command({"quantize": source, "device": device}, tmp_path / f"master-{device}", threads=4)
        work = {"export": tmp_path / "master-cpu", "target": "bf16", "device": device}
        helpers.run_command(work, tmp_path / f"exported-{device}", threads=4)
    for made in ("master", "exported"):
        assert helpers.folder_bytes(tmp_path / f"{made}-cuda") == helpers.folder_bytes(tmp_path / f"{made}-cpu")
