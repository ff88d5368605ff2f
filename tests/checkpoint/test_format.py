"""docs/format.md against the package: golden files, an independent reader and writer, and the figures on the page."""

import json
import re
from pathlib import Path

import helpers
import independent_reader
import independent_writer
import mpmath
import numpy as np
import pytest
import torch
from calls import export, quantize
from golden import make
from hard_weights import norm_ties

from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.formats import get_codec
from pqweights.formats import lloyd_max as codebook
from pqweights.formats.master import RESCUE_FACTOR
from pqweights.formats.weight import decode_weight, encode_weight
from pqweights.kernels import (
    BLOCK_SIZE,
    FIELD_WIDTHS,
    SIGN_BITS,
    BlockCoding,
    codebook_from_levels,
    load_backend,
    reference,
)
from pqweights.planning.recipe import load_recipe, parse_recipe
from pqweights.results.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
CODEC = get_codec("hadamard-lloyd-max")
BITS = range(2, 9)


def between(start, end):
    """The part of the page from one marker to the next."""
    begin = PAGE.index(start)
    return PAGE[begin : PAGE.index(end, begin + 1)]


# (a) the bytes that a writer makes


def test_master_whose_most_common_codec_and_bits_belong_to_different_weights_opens(tmp_path):
    """Each default of config.json is the most common value by itself, so no weight need have them together."""
    weights = {f"model.layers.{n}.mlp.up_proj.weight": helpers.bf16(helpers.gaussian(4, 128, seed=n)) for n in range(6)}
    source = helpers.write_checkpoint(tmp_path / "source", weights)
    rules = [{"name": f"*.{n}.*", "bits": bits} for n, bits in enumerate((2, 3, 4, 5))]
    rules += [{"name": f"*.{n}.*", "codec": "hadamard-trellis", "bits": 8} for n in (4, 5)]
    recipe = parse_recipe(json.dumps({"codec": "hadamard-lloyd-max", "rules": rules}), "mixed")
    quantize(source, tmp_path / "master", recipe)
    settings = json.loads((tmp_path / "master" / "config.json").read_text())["quantization_config"]
    assert (settings["codec"], settings["bits"]) == ("hadamard-lloyd-max", 8)
    assert "8" not in settings["levels"]["hadamard-lloyd-max"]
    assert verify(tmp_path / "master", threads=1).problems == ()
    assert len(open_local(tmp_path / "master").tensors) == 6


# (b) what a reader decodes


def test_kept_tensor_may_be_named_like_codes(tmp_path):
    """`kept` lists it, so both readers must take it as it is."""
    tensors = {
        "audio.vq_codes": ("I64", np.arange(5, dtype=np.int64)),
        "model.layers.linear.weight": helpers.bf16(helpers.gaussian(4, 128)),
    }
    source = helpers.write_checkpoint(tmp_path / "source", tensors, config={})
    quantize(source, tmp_path / "master", load_recipe("q5"), threads=1)
    read = {tensor.name: tensor for tensor in independent_reader.read_master(tmp_path / "master")}
    assert set(read) == set(tensors)
    assert read["audio.vq_codes"].data == tensors["audio.vq_codes"][1].tobytes()
    export(tmp_path / "master", tmp_path / "out", "bf16", Options(dtype="source"), threads=1)
    exported = helpers.read_all(tmp_path / "out")
    assert np.array_equal(exported["audio.vq_codes"][1], tensors["audio.vq_codes"][1])


# (c) the worked example


def test_worked_example_of_the_page():
    example = between("*Worked example.*", "**Levels.**")
    stated = {int(place): int(value, 16) for place, value in re.findall(r"Byte (\d+)[^`]*`0x([0-9A-F]{2})`", example)}
    assert stated == {0: 0x00, 5: 0x55, 17: 0x11, 64: 0xAA} and "so are bytes 65 to 79" in example
    codes = (np.arange(128) % 32).astype(np.uint8)[None]
    packed = reference.pack(torch.from_numpy(codes), 5).numpy()
    assert {place: int(packed[0, place]) for place in stated} == stated
    assert (packed[0, 64:] == 0xAA).all()
    assert np.array_equal(independent_writer.pack(codes.astype(np.int64), 5), packed)
    assert np.array_equal(independent_reader.unpack(packed, 5)[0], codes[0])
    # The cpu backend through the level of each code: decode, then rotate back.
    book = codebook_from_levels(5, np.arange(32, dtype=np.float32))
    values = np.empty(512, np.uint8)
    one = np.array([1.0], np.float16).view(np.uint16)
    load_backend().decode((packed, one), BlockCoding(codebook=book, norm_exponent=7), "F32", values)
    assert np.array_equal(values.view(np.float32) @ helpers.sylvester() / 128, codes[0])


# (d) figures of the page


def test_sign_bits_of_the_page_are_those_of_the_code_and_of_pi():
    (stated,) = re.findall(r"^    ((?:[0-9A-F]{8} ){3}[0-9A-F]{8})", PAGE, re.MULTILINE)
    assert int(stated.replace(" ", ""), 16) == SIGN_BITS
    with mpmath.workdps(60):
        assert int(mpmath.floor((mpmath.pi - 3) * mpmath.mpf(2) ** 128)) == SIGN_BITS


def test_fields_of_each_bit_width():
    text = re.sub(r"\s+", " ", between("The width is the sum of its binary digits", "A code is cut"))
    stated = {int(bits): tuple(map(int, parts.split(" + "))) for bits, parts in re.findall(r"(\d) = ([\d +]*\d)", text)}
    assert stated == {bits: FIELD_WIDTHS[bits] for bits in BITS}
    assert CODEC.at(5).block_size == BLOCK_SIZE == independent_reader.BLOCK == 128


def test_distortions_and_the_rescue_factor():
    text = re.sub(r"\s+", " ", PAGE[PAGE.index("Their distortions:") :])
    stated = {int(bits): float(value) for bits, value in re.findall(r"(\d) bits (0\.\d+)", text)}
    assert stated == codebook.DISTORTION
    assert re.search(r"exceeds ([\d.]+) times the codec's distortion", PAGE)[1] == str(RESCUE_FACTOR)


def test_page_names_the_keys_of_configuration_and_manifest():
    config = re.findall(r"^\| `(\w+)` \|", between("## 3.", "Each default is"), re.MULTILINE)
    written = json.loads((make.MASTER / "config.json").read_bytes())["quantization_config"]
    assert config == list(written)
    manifest = json.loads((make.MASTER / "pqweights.json").read_bytes())
    stated = {name.split(".")[0] for name in re.findall(r"`([\w.]+)`(?=[^|]*\|)", between("## 6.", "## 7."))}
    assert set(manifest) <= stated
    assert set(manifest["tensors"][0]) | set(manifest["tensors"][0]["stored"][0]) <= stated


# (e) the bytes that the page asks of a writer


def families():
    """Weights [blocks, 128] by name; those of `block_families` and mixtures that no single norm exponent suits."""
    blocks = helpers.block_families()
    blocks["all kinds in one weight"] = np.concatenate([values[:3] for values in blocks.values()])
    blocks["signed Walsh"] = np.where(independent_reader.SIGNS, -1, 1) * blocks["Walsh-aligned"]
    blocks["Walsh and signed Walsh"] = np.concatenate([blocks["Walsh-aligned"][:40], blocks["signed Walsh"][40:100]])
    return {name: values.astype(np.float32) for name, values in blocks.items()}


FAMILIES = families()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", BITS)
def test_independent_writer_gives_the_same_weight(bits, dtype):
    """Codes, norms, exponent, rotation, and measures to the last bit."""
    rotations, exponents = set(), set()
    ties = np.zeros((3, 128), np.float32)
    ties[:, 40] = norm_ties(codebook.codebook(bits))[:3]
    for name, values in (FAMILIES | {"ties of norms in F32": ties}).items():
        raw = helpers.raw_bytes(values, dtype)
        exact = helpers.values_of(raw, dtype)
        parts, measured = encode_weight(raw, dtype=dtype, shape=values.shape, format=CODEC.at(bits))
        format, norms = measured.format, parts[1].view(np.float16).reshape(-1)
        theirs = independent_writer.encode(exact, codebook.codebook(bits).levels, bits, codebook.DISTORTION[bits])
        assert (format.rotation, format.norm_exponent) == (theirs.rotation, theirs.norm_exponent), name
        assert np.array_equal(parts[0], theirs.codes), name
        assert np.array_equal(norms.view(np.uint16), theirs.norms), name
        assert (measured.energy, measured.error) == (theirs.energy, theirs.squared_error), name
        assert measured.relative_mse == theirs.relative_mse, name
        rotations.add(format.rotation)
        exponents.add(np.sign(format.norm_exponent))
        # The independent reader decodes what the package wrote to the bytes that the package decodes.
        decoded = independent_reader.decode_blocks(
            parts[0], norms, codebook.codebook(bits).levels, bits, format.rotation, format.norm_exponent
        )
        assert (
            independent_reader.to_bytes(decoded, dtype) == decode_weight(format, parts, values.size, dtype).tobytes()
        ), name
    assert rotations == {"hadamard", "signed-hadamard"}
    assert exponents == ({0, 1} if dtype == "F16" else {-1, 0, 1})  # the smallest F16 weights have normal norms


@pytest.mark.parametrize("bits", BITS)
def test_independent_writer_pads_in_the_same_way(bits):
    values = helpers.gaussian(7, 91, seed=bits)
    raw = values.reshape(-1).view(np.uint8)
    parts, measured = encode_weight(raw, dtype="F32", shape=values.shape, format=CODEC.at(bits))
    theirs = independent_writer.encode(values, codebook.codebook(bits).levels, bits, codebook.DISTORTION[bits])
    assert parts[0].shape == (5, 16 * bits) and np.array_equal(parts[0], theirs.codes)
    assert np.array_equal(parts[1].view(np.uint16).reshape(-1), theirs.norms)
    assert (measured.energy, measured.error) == (theirs.energy, theirs.squared_error)
