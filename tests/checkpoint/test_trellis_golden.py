"""The golden master of format version 2: the bytes that the command writes, and what two decoders make of it."""

import json
import re
import shutil

import helpers
import independent_reader
import numpy as np
import pytest
from calls import export
from commands import invoke, refused
from golden import make_trellis
from golden.make import described

from pqweights.options import ExportOptions
from pqweights.rewrite.results.verify import verify

EXPECTED = json.loads(make_trellis.EXPECTED.read_text(encoding="utf-8"))
MANIFEST = json.loads((make_trellis.MASTER / "pqweights.json").read_bytes())
TENSORS = {tensor["name"]: tensor for tensor in MANIFEST["tensors"]}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_command_writes_the_golden_bytes(tmp_path, threads):
    source = make_trellis.write_source(tmp_path / "source")
    make_trellis.write_master(source, tmp_path / "out", threads)
    found, golden = helpers.folder_bytes(tmp_path / "out"), helpers.folder_bytes(make_trellis.MASTER)
    assert sorted(found) == sorted(golden)
    for name, data in golden.items():
        assert found[name] == data, name


def test_independent_decoders_read_the_golden_master():
    assert {tensor.name: described(tensor) for tensor in make_trellis.read_master(make_trellis.MASTER)} == EXPECTED


def test_export_decodes_the_golden_master(tmp_path):
    export(make_trellis.MASTER, tmp_path / "out", "bf16", ExportOptions(dtype="source"), threads=2)
    found = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, entry in independent_reader.read_safetensors(path).items():
            found[name] = described(independent_reader.Tensor(name, entry.dtype, entry.shape, entry.data))
    assert found == EXPECTED


def test_golden_master_verifies_and_covers_the_format():
    assert verify(make_trellis.MASTER, threads=1).problems == ()
    settings = json.loads((make_trellis.MASTER / "config.json").read_bytes())["quantization_config"]
    assert settings["format_version"] == 2 and set(settings["levels"]) == {"hadamard-lloyd-max"}
    trellis = [tensor for tensor in TENSORS.values() if tensor["codec"] == "hadamard-trellis"]
    assert {tensor["bits"] for tensor in trellis} == {1.5, 2.125, 4.38, 8}
    assert {tensor["rotation"] for tensor in trellis} == {"hadamard", "signed-hadamard"}
    assert {tensor["dtype"] for tensor in trellis} == {"BF16", "F16", "F32", "F64"}
    superblocks = {tensor["name"]: tensor["stored"][0]["shape"][0] for tensor in trellis}
    assert superblocks.pop("model.layers.least.weight") == 2 and set(superblocks.values()) == {1}


def test_golden_weights_are_as_near_to_the_source_as_the_manifest_states():
    source = make_trellis._source()
    for tensor in make_trellis.read_master(make_trellis.MASTER):
        dtype, values = source[tensor.name]
        if TENSORS[tensor.name]["action"] == "keep":
            assert tensor.data == values.tobytes()
            continue
        kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        back = np.frombuffer(tensor.data, kind).reshape(values.shape)
        back, exact = (
            x if dtype == "F64" else helpers.as_float32((dtype, x)).astype(np.float64) for x in (back, values)
        )
        energy, stated = (exact**2).sum(), TENSORS[tensor.name]["relative_mse"]
        assert TENSORS[tensor.name]["energy"] == pytest.approx(energy, rel=1e-6)
        # The tolerance covers rounding to 16 bits, which the manifest does not count.
        assert ((back - exact) ** 2).sum() == pytest.approx(stated * energy, rel=0.02, abs=1e-5 * energy)


def test_readers_of_version_1_refuse_the_golden_master():
    with pytest.raises(ValueError, match="not a pqweights master of version 1"):
        independent_reader.quantization_config(make_trellis.MASTER)


# --- damaged files ---


def damage(folder, name, change):
    """Change the data of a stored tensor, and return the file that holds it."""
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    data[start + begin : start + end] = change(bytes(data[start + begin : start + end]))
    path.write_bytes(data)
    return path


CHANGES = {
    "a bit of the step": lambda data: bytes([data[0], data[1], data[2], data[3] ^ 0x80, *data[4:]]),
    "the trellis": lambda data: data[:4] + b"\xff" + data[5:],
    "the classes": lambda data: data[:6] + b"\xff" + data[7:],
    "a state": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "a word": lambda data: data[:200] + bytes([data[200] ^ 16]) + data[201:],
    "zeros": lambda data: data[:300] + bytes(len(data) - 300),
    "noise": lambda data: np.random.default_rng(5).bytes(len(data)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_superblock_is_one_clear_line(tmp_path, change):
    folder = tmp_path / "master"
    shutil.copytree(make_trellis.MASTER, folder)
    damage(folder, "model.layers.mixed.weight_trellis", CHANGES[change])
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert "model.layers.mixed.weight" in line and "damaged" in line
    assert not list(tmp_path.glob("out/*.safetensors"))
    result = verify(folder, threads=1)
    assert any("model.layers.mixed.weight_trellis" in problem for problem in result.problems)


@pytest.mark.parametrize("cut", [0, 1, 7, 100, 5000])
def test_truncated_file_is_one_clear_line(tmp_path, cut):
    folder = tmp_path / "master"
    shutil.copytree(make_trellis.MASTER, folder)
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:cut] if cut < 100 else path.read_bytes()[:-cut])
    assert path.name in refused("export", folder, tmp_path / "out", "--target", "bf16")
    found = invoke("verify", folder)
    assert (found.exit_code, found.stdout.count("\n"), found.stderr) == (1, 1, "") and path.name in found.stdout


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bits", 4.5, "expected U8"),
        ("bits", 1.2, "bits"),
        ("bits", "nan", "bits"),
        ("shape", [18, 130], "expected U8"),
        ("shape", [20, 1300], "expected U8"),
        ("shape", [10**400], "shape"),
        ("shape", [2**50, 2**50], "shape: expected at most"),
        ("rotation", "givens", "rotation"),
        ("norm_exponent", 3, "norm_exponent"),
    ],
)
def test_contradicting_configuration_is_one_clear_line(tmp_path, key, value, expected):
    folder = tmp_path / "master"
    shutil.copytree(make_trellis.MASTER, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"]["overrides"]["model.layers.middle.weight"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert re.search(expected, line) and "model.layers.middle.weight" in line


def test_version_1_with_a_codec_of_version_2_is_one_clear_line(tmp_path):
    folder = tmp_path / "master"
    shutil.copytree(make_trellis.MASTER, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"]["format_version"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert "format_version: expected 2 or later for hadamard-trellis, found 1" in line
