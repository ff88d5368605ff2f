"""The golden master of format version 3: the bytes that the command writes, and what two decoders make of it."""

import json
import shutil

import helpers
import independent_reader
import numpy as np
import pytest
from calls import export
from commands import refused
from golden import make_polar
from golden.make import described
from restated import restate_hashes

from pqweights.checkpoint.source import open_local
from pqweights.codecs import CODECS
from pqweights.errors import MasterError
from pqweights.options import ExportOptions
from pqweights.rewrite.results.verify import verify

EXPECTED = json.loads(make_polar.EXPECTED.read_text(encoding="utf-8"))
MANIFEST = json.loads((make_polar.MASTER / "pqweights.json").read_bytes())
TENSORS = {tensor["name"]: tensor for tensor in MANIFEST["tensors"]}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_command_writes_the_golden_bytes(tmp_path, threads):
    source = make_polar.write_source(tmp_path / "source")
    make_polar.write_master(source, tmp_path / "out", threads)
    found, golden = helpers.folder_bytes(tmp_path / "out"), helpers.folder_bytes(make_polar.MASTER)
    assert sorted(found) == sorted(golden)
    for name, data in golden.items():
        assert found[name] == data, name


def test_independent_decoder_reads_the_golden_master():
    assert {tensor.name: described(tensor) for tensor in make_polar.read_polar(make_polar.MASTER)} == EXPECTED


def test_export_decodes_the_golden_master(tmp_path):
    export(make_polar.MASTER, tmp_path / "out", "bf16", ExportOptions(dtype="source"), threads=2)
    found = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, entry in independent_reader.read_safetensors(path).items():
            found[name] = described(independent_reader.Tensor(name, entry.dtype, entry.shape, entry.data))
    assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_golden_master_verifies_and_covers_the_format():
    assert verify(make_polar.MASTER, threads=1).problems == ()
    settings = json.loads((make_polar.MASTER / "config.json").read_bytes())["quantization_config"]
    assert (settings["format_version"], settings["codec"], settings["bits"]) == (3, "polar", 3.875)
    assert set(settings["levels"]) == {"hadamard-lloyd-max"}
    polar = [tensor for tensor in TENSORS.values() if tensor["codec"] == "polar"]
    assert {tensor["rotation"] for tensor in polar} == {"hadamard", "signed-hadamard"}
    assert {tensor["dtype"] for tensor in polar} == {"BF16", "F16", "F32", "F64"}
    assert {np.sign(tensor["norm_exponent"]) for tensor in polar} == {-1, 0, 1}
    assert {tensor["codec"] for tensor in TENSORS.values()} == {"polar", "hadamard-lloyd-max", "hadamard-trellis", None}
    rows = TENSORS["model.layers.rows.weight"]
    assert [stored["shape"] for stored in rows["stored"]] == [[12, 92], [12, 16]]
    assert rows["bytes"] * 8 == 12 * 256 * 3.875


def test_golden_weights_are_as_near_to_the_source_as_the_manifest_states():
    source = make_polar._source()
    for tensor in make_polar.read_polar(make_polar.MASTER):
        dtype, values = source[tensor.name]
        kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        back = np.frombuffer(tensor.data, kind).reshape(values.shape)
        back, exact = (
            x if dtype == "F64" else helpers.as_float32((dtype, x)).astype(np.float64) for x in (back, values)
        )
        energy, stated = (exact**2).sum(), TENSORS[tensor.name]["relative_mse"]
        assert TENSORS[tensor.name]["energy"] == pytest.approx(energy, rel=1e-6)
        # The tolerance covers rounding to 16 bits, which the manifest does not count.
        assert ((back - exact) ** 2).sum() == pytest.approx(stated * energy, rel=0.01)


def test_versions_before_refuse_the_golden_master(monkeypatch):
    with pytest.raises(ValueError, match="not a pqweights master of version 1"):
        independent_reader.quantization_config(make_polar.MASTER)
    before = {name: codec for name, codec in CODECS.items() if codec.format_version < 3}
    monkeypatch.setattr("pqweights.checkpoint.master.CODECS", before)
    with pytest.raises(MasterError, match="format_version: expected 1 to 2, found 3; a newer pqweights may read it"):
        open_local(make_polar.MASTER)


# --- damaged files ---


def damaged(folder, suffix, change):
    """Copy the golden master into a folder, and change the bytes of a part of one weight."""
    shutil.copytree(make_polar.MASTER, folder)
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[f"model.layers.rows.weight{suffix}"]["data_offsets"]
    data[start + begin : start + end] = change(bytes(data[start + begin : start + end]))
    path.write_bytes(data)


RADII = {
    "infinite": lambda data: data[:40] + b"\x00\x7c" + data[42:],
    "NaN": lambda data: data[:40] + b"\x01\x7e" + data[42:],
    "negative": lambda data: data[:41] + bytes([data[41] | 0x80]) + data[42:],
    "minus 0": lambda data: data[:40] + b"\x00\x80" + data[42:],
}


@pytest.mark.parametrize("change", RADII)
def test_radius_that_no_encoder_writes_is_one_clear_line(tmp_path, change):
    damaged(tmp_path / "master", "_radii", RADII[change])
    problems = verify(tmp_path / "master", threads=1).problems
    assert any("model.layers.rows.weight_radii" in problem for problem in problems)
    restate_hashes(tmp_path / "master")
    line = refused("export", tmp_path / "master", tmp_path / "out", "--target", "bf16")
    assert "'model.layers.rows.weight': block 2: a radius is negative or not finite; the master is damaged" in line
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_any_angle_codes_are_decoded_and_verify_finds_the_change(tmp_path):
    damaged(tmp_path / "master", "_angles", lambda data: np.random.default_rng(5).bytes(len(data)))
    problems = verify(tmp_path / "master", threads=1).problems
    assert any("model.layers.rows.weight_angles" in problem for problem in problems)
    export(restate_hashes(tmp_path / "master"), tmp_path / "out", "bf16", ExportOptions(dtype="source"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bits", 4, "expected 3.875 bits for polar, found 4"),
        ("bits", "nan", "bits"),
        ("shape", [18, 130], "expected U8"),
        ("shape", [2**50, 2**50], "shape: expected at most"),
        ("rotation", "none", "polar has no rotation 'none'"),
        ("norm_exponent", 201, "norm_exponent: expected a whole number <= 200, found 201"),
        ("norm_exponent", 1.5, "norm_exponent"),
        ("levels", [1.0], "unknown key 'levels'"),
    ],
)
def test_contradicting_configuration_is_one_clear_line(tmp_path, key, value, expected):
    folder = tmp_path / "master"
    shutil.copytree(make_polar.MASTER, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"]["overrides"]["model.layers.flat.weight"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert expected in line and "model.layers.flat.weight" in line


def test_version_2_with_a_codec_of_version_3_is_one_clear_line(tmp_path):
    folder = tmp_path / "master"
    shutil.copytree(make_polar.MASTER, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"]["format_version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert "format_version: expected 3 or later for polar, found 2" in line
