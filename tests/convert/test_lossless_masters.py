"""Masters without loss: every bit of the source comes back, by every way of reading, for every format of sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import gguf
import helpers
import numpy as np
import pytest
import torch
from calls import export
from commands import done, raises, refused
from native_decoder import decode
from packed_cases import (
    FLOATS,
    INTEGERS,
    UP,
    awq,
    compress,
    gptq,
    save,
    settings_of,
    source_of,
    tensor_of,
    transposed_source,
    values,
)
from safetensors.torch import load_file

from pqweights.checkpoint.native import NativeTensor
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.convert.listed_files import open_result
from pqweights.convert.manifest import read_manifest
from pqweights.errors import MasterError
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, encode_blocks
from pqweights.kernels.recovery import recover_blocks
from pqweights.results.verify import verify
from pqweights.targets import lossless
from pqweights.targets.carried import stored_dtype


def plain_source(folder: Path) -> Path:
    """A source in BF16, F16 and F32 with every bit pattern of the 16-bit dtypes."""
    everything = np.arange(1 << 16, dtype=np.uint16)
    return helpers.write_checkpoint(
        folder,
        {
            "model.embed_tokens.weight": helpers.bf16(helpers.gaussian(300, 64, seed=1)),
            "model.layers.0.mlp.up_proj.weight": (
                "BF16",
                np.concatenate([everything, everything % 9 + 16256]).reshape(-1, 256),
            ),
            "model.layers.0.mlp.gate_proj.weight": (
                "F16",
                np.concatenate([everything, everything % 9]).reshape(256, -1),
            ),
            "model.layers.0.mlp.down_proj.weight": helpers.f32(helpers.gaussian(310, 257, seed=2)),
            "model.layers.0.input_layernorm.weight": helpers.bf16(helpers.gaussian(2000, seed=3)),
            "model.layers.0.mlp.small.weight": helpers.bf16(helpers.gaussian(5, 7, seed=4)),
            "model.position_ids": ("I64", np.arange(700)),
        },
        config={"model_type": "llama", "dtype": "bfloat16"},
    )


FLOATS_OF_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Types of blocks, and the dtypes of weights that are decoded from them.
GRIDS = {"Q4_0": "BF16", "Q4_1": "F16", "Q5_0": "BF16", "Q8_0": "F32", "Q3_K": "BF16", "Q4_K": "BF16", "Q6_K": "BF16"}


def decoded_from(kind: str, *, seed: int) -> Any:
    """Numbers that the gguf package decodes from blocks; some are zeros, of either sign."""
    values = helpers.gaussian(20, 512, seed=seed)
    values[3:9, ::3] = 0
    blocks = encode_blocks(kind, values, None).codes
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(values.shape)


def on_grids(folder: Path) -> Path:
    """A source whose weights were decoded from blocks of GGUF; of one, the last row was not."""
    weights = {kind: decoded_from(kind, seed=number) for number, kind in enumerate(GRIDS)}
    make = {"BF16": helpers.bf16, "F16": helpers.f16, "F32": helpers.f32}
    tensors = {
        f"model.layers.{number}.mlp.up_proj.weight": make[GRIDS[kind]](weights[kind])
        for number, kind in enumerate(GRIDS)
    }
    weights["Q4_1"][-1] = helpers.gaussian(512, seed=9)
    tensors["model.layers.0.mlp.down_proj.weight"] = helpers.bf16(weights["Q4_1"])
    return helpers.write_checkpoint(folder, tensors, config={"model_type": "llama", "dtype": "bfloat16"})


def block_fp8(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(300, 260, generator=generator) * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=generator)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return save(folder, {UP: weight, f"{UP}_scale_inv": scales, "model.norm.weight": torch.ones(9)}, settings)


def gpt_oss(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, 40, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 122, (2, 40, 3), generator=generator).to(torch.uint8)
    return save(folder, {f"{UP}_blocks": blocks, f"{UP}_scales": scales}, {"quant_method": "mxfp4"})


def compressed(group: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda folder: source_of(folder, compress((256, 256), group)[0], settings_of(group))


def transposed(made: tuple[dict[str, Any], dict[str, Any], Any]) -> Callable[[Path], Path]:
    return lambda folder: transposed_source(folder, made[0], made[1])


SOURCES = {
    "plain": plain_source,
    "on grids": on_grids,
    "block FP8": block_fp8,
    "MXFP4 of gpt-oss": gpt_oss,
    **{
        f"{group['format']} {group['weights']['num_bits']}": compressed(group)
        for group, _ in (INTEGERS[2], INTEGERS[6])
    },
    "int-quantized": compressed(INTEGERS[-1][0]),
    **{group["format"]: compressed(group) for group, _ in FLOATS},
    "GPTQ": transposed(gptq(4, "gptq", order=True, shape=(256, 256))),
    "AWQ": transposed(awq((256, 256))),
}


def made(tmp_path: Path, source: Path) -> Path:
    done("quantize", source, tmp_path / "master", "--lossless")
    return tmp_path / "master"


def raw(tensor: LogicalTensor, dtype: str, start: int, count: int) -> bytes:
    out = np.zeros(count * {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}[dtype], dtype=np.uint8)
    tensor.read(start, count, dtype, out)
    return out.tobytes()


@pytest.mark.parametrize("name", SOURCES)
def test_any_range_of_a_master_is_that_of_its_source(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    master = made(tmp_path, source)
    assert verify(master, threads=2).problems == ()
    opened = open_result(open_local(master).storage, read_manifest(master))
    originals, generator = open_local(source).tensors, np.random.default_rng(5)
    assert {t.name for t in opened.tensors} == {t.name for t in originals}
    by_name = {tensor.name: tensor for tensor in opened.tensors}
    assert any(isinstance(tensor, NativeTensor) for tensor in opened.tensors)
    for original in originals:
        tensor, count = by_name[original.name], element_count(original)
        assert (tensor.shape, tensor.dtype, tensor.plain_dtype) == (
            original.shape, original.dtype, original.plain_dtype,
        )  # fmt: skip
        for _ in range(8):
            start = int(generator.integers(count))
            length = int(generator.integers(1, count - start + 1))
            for dtype in {tensor.plain_dtype, tensor.plain_dtype if tensor.dtype == "I64" else "F32"}:
                assert raw(tensor, dtype, start, length) == raw(original, dtype, start, length)
    opened.finish_checks()


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {"plain"}))  # of which a master keeps F16 beside BF16
def test_what_is_decoded_of_a_master_is_what_is_decoded_of_its_source(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    for of, out in ((source, "direct"), (made(tmp_path, source), "of-master")):
        done("export", of, tmp_path / out, "--target", "bf16")
    held = [helpers.read_all(tmp_path / out) for out in ("direct", "of-master")]
    assert held[0].keys() == held[1].keys()
    for stored, (dtype, array) in held[0].items():
        assert (dtype, array.tobytes()) == (held[1][stored][0], held[1][stored][1].tobytes()), stored


def stored_bytes(file: Path) -> dict[str, Any]:
    return {name: tensor.view(torch.uint8) if tensor.ndim else tensor for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", SOURCES)
def test_independent_decoder_finds_every_stored_byte_of_the_source(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    master = made(tmp_path, source)
    config = json.loads((master / "config.json").read_bytes())["quantization_config"]
    held = helpers.read_safetensors(master / "model-00001-of-00001.safetensors")
    found = {}
    for stored, (_, array) in held.items():
        whole = stored.removesuffix("_coded")
        if whole != stored and f"{whole}_lengths" in held:
            own = config["coded"].get(whole) or {"dtype": config["dtype"], **config["overrides"][whole]}
            lengths = held[f"{whole}_lengths"][1].tobytes()
            found[whole] = decode(array.tobytes(), lengths, own["dtype"], tuple(own["shape"]))
        elif not stored.endswith("_lengths"):
            found[stored] = array.tobytes()
    for stored in [*found]:
        weight, kind = next(((stored[: -len(k) - 1], k) for k in GRIDS if stored.endswith(f"_{k.lower()}")), ("", ""))
        if weight in config["overrides"]:
            own = {"dtype": config["dtype"], **config["overrides"][weight]}
            blocks = np.frombuffer(found.pop(stored), np.uint8).reshape(own["shape"][0], -1)
            decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
            found[weight] = (
                torch.from_numpy(decoded).to(FLOATS_OF_TORCH[own["dtype"]]).view(torch.uint8).numpy().tobytes()
            )
    expected = helpers.read_safetensors(source / "model.safetensors")
    assert found == {stored: array.tobytes() for stored, (_, array) in expected.items()}


def test_weights_of_no_and_of_one_number_are_kept_or_coded(tmp_path: Path) -> None:
    """Of one number with a scale in F64 72 bits are stored."""
    weights = {UP: torch.zeros(0, 64, dtype=torch.float8_e4m3fn), f"{UP}_scale_inv": torch.ones(0, 1)}
    gate = UP.replace("up", "gate")
    weights |= {gate: torch.ones(1, 1).to(torch.float8_e4m3fn), f"{gate}_scale_inv": torch.full((1, 1), 2.0).double()}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = save(tmp_path / "source", weights, settings)
    opened = {tensor.name: tensor for tensor in open_local(made(tmp_path, source)).tensors}
    assert opened[UP].shape == (0, 64)
    assert raw(opened[gate], "F32", 0, 1) == np.float32(2).tobytes()


@pytest.mark.parametrize("dtype", ["source", "bf16"])
def test_export_gives_the_bytes_of_the_source(dtype: str, tmp_path: Path) -> None:
    """What is not in the dtype of the model keeps its own."""
    source = plain_source(tmp_path / "source")
    export(made(tmp_path, source), tmp_path / "out", "bf16", Options(dtype=dtype))
    exported = helpers.read_safetensors(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for name, (dtype, array) in helpers.read_safetensors(source / "model.safetensors").items():
        assert (exported[name][0], exported[name][1].tobytes()) == (dtype, array.tobytes()), name


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_do_not_depend_on_threads(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain_source(tmp_path / "source")
    expected = helpers.folder_bytes(made(tmp_path, source))
    monkeypatch.setattr(lossless, "RUN_CHUNKS", 1)
    done("quantize", source, tmp_path / "again", "--lossless", "--threads", threads)
    assert helpers.folder_bytes(tmp_path / "again") == expected


def test_plan_states_the_bytes_that_the_run_writes(tmp_path: Path) -> None:
    source = plain_source(tmp_path / "source")
    planned = json.loads(done("plan", source, "--lossless", "--json").stdout)
    written = json.loads(done("quantize", source, tmp_path / "master", "--lossless", "--json").stdout)
    assert planned["totals"]["output_bytes"] == written["totals"]["output_bytes"]
    assert (
        planned["totals"]["output_bytes"] == (tmp_path / "master" / "model-00001-of-00001.safetensors").stat().st_size
    )
    actions = {tensor["name"]: tensor["codec"] for tensor in planned["tensors"]}
    assert actions.pop("model.layers.0.mlp.small.weight") is None
    assert actions.pop("model.layers.0.input_layernorm.weight") is None
    assert actions.pop("model.position_ids") is None
    assert set(actions.values()) == {"native"}


def test_advice_and_cards_know_that_loading_decodes_a_master_without_loss(tmp_path: Path) -> None:
    source = families.model(tmp_path, "llama")
    master = made(tmp_path, source)
    done("card", master)
    card = (master / "README.md").read_text()
    assert "bit for bit" in card and "packed=True" not in card
    planned = json.loads(done("plan", source, "--lossless", "--memory", "1GB", "--json").stdout)
    assert not any("packed" in str(proposal) for proposal in planned["memory"]["proposals"])


def test_second_run_of_the_same_command_finds_its_result(tmp_path: Path) -> None:
    source = plain_source(tmp_path / "source")
    made(tmp_path, source)
    assert f"{tmp_path / 'master'}: " in done("quantize", source, tmp_path / "master", "--lossless").stderr


def test_source_that_changes_between_the_readings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain_source(tmp_path / "source")
    measured = lossless.measure

    def other(*arguments: Any) -> Any:
        kinds, lengths = measured(*arguments)
        lengths["model.embed_tokens.weight"][0] += 1
        return kinds, lengths

    monkeypatch.setattr("pqweights.targets.lossless.measure", other)
    line = refused("quantize", source, tmp_path / "out", "--lossless")
    assert "'model.embed_tokens.weight'" in line


@pytest.mark.parametrize("part", ["coded", "lengths"])
def test_damage_is_noticed_without_a_manifest(part: str, tmp_path: Path) -> None:
    master = made(tmp_path, plain_source(tmp_path / "source"))
    (master / "pqweights.json").unlink()
    file = master / "model-00001-of-00001.safetensors"
    (stored,) = [t for t in open_local(master).stored if t.name == f"model.embed_tokens.weight_{part}"]
    data = bytearray(file.read_bytes())
    data[stored.offset] ^= 2
    file.write_bytes(data)
    tensor = tensor_of(master, "model.embed_tokens.weight")
    with raises(MasterError, f"model.embed_tokens.weight_{part}'"):
        values(tensor, "F32")


def test_weights_that_were_decoded_from_blocks_are_stored_as_these(tmp_path: Path) -> None:
    source = on_grids(tmp_path / "source")
    master = made(tmp_path, source)
    stored = {tensor.name.removesuffix("_coded"): tensor for tensor in open_local(master).stored}
    for number, kind in enumerate(GRIDS):
        of_kind = stored[f"model.layers.{number}.mlp.up_proj.weight_{kind.lower()}"]
        assert of_kind.byte_count <= 20 * 512 * BLOCK_TYPES[kind].bits_per_weight / 8
    assert "model.layers.0.mlp.down_proj.weight" in stored  # its last row is on no grid
    assert "on the grid of Q6_K" in done("inspect", master, "--json").stdout


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_gguf_of_a_master_has_the_blocks_of_its_source(kind: str, tmp_path: Path) -> None:
    """As the numbers are those of the source, so are the codes that are found in them."""
    source = on_grids(tmp_path / "source")
    number = list(GRIDS).index(kind)
    name = f"model.layers.{number}.mlp.up_proj.weight"
    tensors = [tensor_of(folder, name) for folder in (source, made(tmp_path, source))]
    assert [stored_dtype(tensor) for tensor in tensors] == [GRIDS[kind]] * 2
    found = [
        recover_blocks(kind, np.frombuffer(raw(tensor, "F32", 0, 20 * 512), np.float32), GRIDS[kind])
        for tensor in tensors
    ]
    assert all(of.all() for _, of in found)
    assert found[0][0].tobytes() == found[1][0].tobytes()


def test_a_configuration_that_contradicts_blocks_is_refused(tmp_path: Path) -> None:
    master = made(tmp_path, on_grids(tmp_path / "source"))
    config = json.loads((master / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    for key, other in (("shape", [20, 511]), ("shape", [21, 512]), ("dtype", "I32")):
        edited = json.loads(json.dumps(config))
        edited["quantization_config"]["overrides"][name][key] = other
        (master / "config.json").write_text(json.dumps(edited))
        with raises(MasterError, name):
            open_local(master)


LEFT_OUT = [("--recipe", "q5"), ("--bits", "4"), ("--strict",)]


@pytest.mark.parametrize("option", LEFT_OUT)
def test_options_that_have_no_meaning_without_loss_are_refused(option: tuple[str, ...], tmp_path: Path) -> None:
    line = refused("quantize", plain_source(tmp_path / "source"), tmp_path / "out", "--lossless", *option, code=2)
    assert f"leave out --lossless or {option[0]}" in line


def test_the_first_of_several_options_that_have_no_meaning_is_named(tmp_path: Path) -> None:
    """In whatever order they are given, and sets have them."""
    source = plain_source(tmp_path / "source")
    asked = ("--strict", "--keep", "x", "--codec", "trellis", "--bits", "4")
    line = refused("quantize", source, tmp_path / "out", "--lossless", *asked, code=2)
    assert "--codec" in line and "--strict" not in line


def test_a_master_without_loss_is_no_result_of_a_recipe(tmp_path: Path) -> None:
    source = plain_source(tmp_path / "source")
    line = refused("quantize", source, made(tmp_path, source))
    assert "(lossless)" in line
