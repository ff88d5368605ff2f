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
import safetensors
import torch
from calls import export, quantize
from golden import make
from scalar import encode_scalar, norm_ties

from pqweights.checkpoint.source import open_local
from pqweights.codecs import get_codec
from pqweights.codecs import lloyd_max as codebook
from pqweights.codecs.protocol import RESCUE_FACTOR
from pqweights.kernels import FIELD_WIDTHS, HADAMARD_SIZE, SIGN_BITS, BlockCoding, load_backend, reference
from pqweights.kernels.codebook import codebook_from_levels
from pqweights.options import ExportOptions
from pqweights.planning.recipe import load_recipe, parse_recipe
from pqweights.rewrite.results.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
CODEC = get_codec("hadamard-lloyd-max")
BITS = range(2, 9)
EXPECTED = json.loads(make.EXPECTED.read_text(encoding="utf-8"))


def between(start, end):
    """The part of the page from one marker to the next."""
    begin = PAGE.index(start)
    return PAGE[begin : PAGE.index(end, begin + 1)]


# (a) the bytes that a writer makes


@pytest.mark.parametrize("threads", [1, 3])
def test_quantizing_the_golden_source_gives_the_golden_bytes(tmp_path, threads):
    source = make.write_source(tmp_path / "source")
    make.write_master(source, tmp_path / "out", threads)
    found, golden = helpers.folder_bytes(tmp_path / "out"), helpers.folder_bytes(make.MASTER)
    assert sorted(found) == sorted(golden)
    for name, data in golden.items():
        assert found[name] == data, name


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


def test_golden_master_verifies_and_covers_the_format():
    assert verify(make.MASTER, threads=1).problems == ()
    settings = independent_reader.quantization_config(make.MASTER)
    overrides = list(settings["overrides"].values())
    assert {o.get("bits", settings["bits"]) for o in overrides} == set(BITS)
    dtypes = {o.get("dtype", settings["dtype"]) for o in overrides}
    assert dtypes == {"BF16", "F16", "F32", "F64", "F8_E4M3", "MXFP4"}
    assert {len(o["shape"]) for o in overrides if "shape" in o} == {1, 2, 3}
    exponents = [o["norm_exponent"] for o in overrides if "norm_exponent" in o]
    assert min(exponents) < -100 and max(exponents) > 0
    assert "signed-hadamard" in {o.get("rotation") for o in overrides}
    assert {EXPECTED[name]["dtype"] for name in settings["kept"]} == {"BF16", "F16", "F32", "I64", "BOOL"}
    assert {tuple(EXPECTED[name]["shape"]) for name in settings["kept"]} >= {(), (0, 4)}
    assert len(set(json.loads((make.MASTER / "model.safetensors.index.json").read_bytes())["weight_map"].values())) > 1
    assert json.loads((make.MASTER / "pqweights.json").read_bytes())["exceeding"] == ["model.layers.aligned.weight"]


def test_golden_files_have_the_layout_of_the_page():
    """Section 1: falling element sizes, headers padded to 8 bytes, both tensors of a weight in one file, total_size."""
    index = json.loads((make.MASTER / "model.safetensors.index.json").read_bytes())
    sizes = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
    total, weight_map = 0, index["weight_map"]
    for file in sorted(set(weight_map.values())):
        data = (make.MASTER / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        entries = sorted(header.values(), key=lambda entry: entry["data_offsets"])
        assert [sizes[e["dtype"]] for e in entries] == sorted((sizes[e["dtype"]] for e in entries), reverse=True)
        end = 0
        for entry in entries:
            assert entry["data_offsets"][0] == end and (8 + length + end) % sizes[entry["dtype"]] == 0
            end = entry["data_offsets"][1]
        assert 8 + length + end == len(data)
        assert {name for name, place in weight_map.items() if place == file} == set(header)
        total += end
    assert index["metadata"] == {"total_size": total}
    for name in weight_map:
        if name.endswith("_codes"):
            assert weight_map[name] == weight_map[name.removesuffix("_codes") + "_norms"]


def test_stored_shapes_are_those_of_the_page():
    """Section 2: shapes follow those of the weight if 128 divides its last dimension, else they are of blocks."""
    stored = {}
    for path in make.MASTER.glob("*.safetensors"):
        stored |= {name: entry.shape for name, entry in independent_reader.read_safetensors(path).items()}
    for name, shape in {
        "three.weight_codes": (1, 2 * 48),
        "three.weight_norms": (1, 2),
        "mlp.experts.gate_up_proj_codes": (2, 1, 80),
        "mlp.experts.gate_up_proj_norms": (2, 1, 1),
        "mlp.experts.down_proj_codes": (3, 80),
        "mlp.experts.down_proj_norms": (3,),
    }.items():
        assert stored[f"model.layers.{name}"] == shape, name
    assert stored["model.positions_codes"] == (3, 64)
    overrides = independent_reader.quantization_config(make.MASTER)["overrides"]
    assert overrides["model.layers.mlp.experts.down_proj"]["shape"] == [2, 3, 50]
    assert "shape" not in overrides["model.layers.three.weight"]


# (b) what a reader decodes


def test_independent_reader_decodes_the_golden_master():
    found = {tensor.name: make.described(tensor) for tensor in independent_reader.read_master(make.MASTER)}
    assert found == EXPECTED


def test_export_decodes_the_golden_master(tmp_path):
    """The result of `export --dtype source` is read by the safetensors library."""
    export(make.MASTER, tmp_path / "out", "bf16", ExportOptions(dtype="source"), threads=2)
    found = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            tensor = independent_reader.Tensor(name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
            found[name] = make.described(tensor)
    assert found == EXPECTED


def golden_values():
    """The tensors of the golden source: name -> decoded dtype, shape, float64 values or None, stored bytes."""
    source = {name: tensor for shard in make.shards() for name, tensor in shard.items()}
    result = {}
    for name, (dtype, stored) in source.items():
        if dtype in ("BF16", "F16", "F32"):
            values = helpers.as_float32((dtype, stored)).astype(np.float64)
            result[name] = (dtype, stored.shape, values, stored.tobytes())
        else:
            result[name] = (dtype, stored.shape, None, stored.tobytes())
    wide = source["model.layers.double.weight"][1]
    result["model.layers.double.weight"] = ("F64", wide.shape, wide, b"")
    _, _, scale, _ = result.pop("model.layers.float8.weight_scale")
    float8 = torch.from_numpy(source["model.layers.float8.weight"][1]).view(torch.float8_e4m3fn).double().numpy()
    result["model.layers.float8.weight"] = ("BF16", float8.shape, float8 * scale, b"")
    blocks, scales = (result.pop(f"model.layers.mlp.experts.other_proj_{part}") for part in ("blocks", "scales"))
    codes = np.frombuffer(blocks[3], np.uint8).reshape(2, 3, 2, 16)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([magnitudes, -magnitudes])
    values = table[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(2, 3, 2, 32)
    values = values * 2.0 ** (np.frombuffer(scales[3], np.uint8).reshape(2, 3, 2, 1).astype(float) - 127)
    values = values.reshape(2, 3, 64).transpose(0, 2, 1)
    result["model.layers.mlp.experts.other_proj"] = ("BF16", (2, 64, 3), values, b"")
    return result


def test_golden_weights_are_as_near_to_the_source_as_the_manifest_states():
    """The expected bytes are not merely reproducible: each weight has the error that the manifest states."""
    manifest = {t["name"]: t for t in json.loads((make.MASTER / "pqweights.json").read_bytes())["tensors"]}
    source = golden_values()
    quantized = 0
    for tensor in independent_reader.read_master(make.MASTER):
        dtype, shape, exact, data = source.pop(tensor.name)
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        if manifest[tensor.name]["action"] == "keep":
            assert tensor.data == data
            continue
        quantized += 1
        kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        back = helpers.as_float32((dtype, np.frombuffer(tensor.data, kind).reshape(shape)))
        # The tolerance covers rounding to 16 bits, which the manifest does not count.
        error, energy = ((back - exact) ** 2).sum(), (exact**2).sum()
        assert error <= (manifest[tensor.name]["relative_mse"] * 1.05 + 2e-5) * energy
        assert manifest[tensor.name]["energy"] == pytest.approx(energy, rel=1e-6)
    assert not source and quantized == 20


def test_independent_reader_refuses_unknown_keys(tmp_path):
    config = json.loads((make.MASTER / "config.json").read_bytes())
    for change in ({"format_version": 2}, {"block_size": 64}, {"something": 1}, {"overrides": {"x": {"else": 1}}}):
        changed = {**config, "quantization_config": {**config["quantization_config"], **change}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError):
            independent_reader.quantization_config(tmp_path)


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
    export(tmp_path / "master", tmp_path / "out", "bf16", ExportOptions(dtype="source"), threads=1)
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
    load_backend("cpu").decode((packed, one), BlockCoding(codebook=book, norm_exponent=7), "F32", values)
    assert np.array_equal(values.view(np.float32) @ helpers.sylvester() / 128, codes[0])


def test_formulas_for_three_and_five_bits():
    p5, p3 = (np.random.default_rng(bits).integers(0, 256, (1, 16 * bits)).astype(np.uint8) for bits in (5, 3))
    five, three = [], []
    for j in range(128):
        p = p5[0].tolist()
        low = p[j] & 15 if j < 64 else p[j - 64] >> 4
        five.append(low + 16 * ((p[64 + j % 16] >> (j // 16)) & 1))
        p = p3[0].tolist()
        three.append(((p[j % 32] >> (2 * (j // 32))) & 3) + 4 * ((p[32 + j % 16] >> (j // 16)) & 1))
    for bits, packed, codes in ((5, p5, five), (3, p3, three)):
        assert reference.unpack(torch.from_numpy(packed), bits)[0].tolist() == codes
        assert independent_reader.unpack(packed, bits)[0].tolist() == codes


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
    assert CODEC.coder(5).block_size == HADAMARD_SIZE == independent_reader.BLOCK == 128


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


def test_levels_of_the_configuration_are_the_tables():
    settings = independent_reader.quantization_config(make.MASTER)
    assert set(settings["levels"]) == {CODEC.name} and set(settings["levels"][CODEC.name]) == {str(b) for b in BITS}
    for bits in BITS:
        upper = codebook.HALF_LEVELS[bits]
        assert settings["levels"][CODEC.name][str(bits)] == [*(-c for c in reversed(upper)), *upper]


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
        ours, measured = encode_scalar(raw, dtype, values.shape, CODEC, bits)
        theirs = independent_writer.encode(exact, codebook.codebook(bits).levels, bits, CODEC.distortion(bits))
        assert (ours.rotation, ours.norm_exponent) == (theirs.rotation, theirs.norm_exponent), name
        assert np.array_equal(ours.codes, theirs.codes), name
        assert np.array_equal(ours.norms, theirs.norms), name
        assert (measured.energy, measured.error) == (theirs.energy, theirs.squared_error), name
        assert measured.relative_mse == theirs.relative_mse, name
        rotations.add(ours.rotation)
        exponents.add(np.sign(ours.norm_exponent))
        # The independent reader decodes what the package wrote to the bytes that the package decodes.
        decoded = independent_reader.decode_blocks(
            ours.codes, ours.norms.view(np.float16), ours.codebook.levels, bits, ours.rotation, ours.norm_exponent
        )
        assert independent_reader.to_bytes(decoded, dtype) == ours.decode().tobytes(), name
    assert rotations == {"hadamard", "signed-hadamard"}
    assert exponents == ({0, 1} if dtype == "F16" else {-1, 0, 1})  # the smallest F16 weights have normal norms


@pytest.mark.parametrize("bits", BITS)
def test_independent_writer_pads_in_the_same_way(bits):
    values = helpers.gaussian(7, 91, seed=bits)
    ours, measured = encode_scalar(values.reshape(-1).view(np.uint8), "F32", values.shape, CODEC, bits)
    theirs = independent_writer.encode(values, codebook.codebook(bits).levels, bits, CODEC.distortion(bits))
    assert ours.codes.shape == (5, 16 * bits)
    assert np.array_equal(ours.codes, theirs.codes) and np.array_equal(ours.norms, theirs.norms)
    assert (measured.energy, measured.error) == (theirs.energy, theirs.squared_error)
