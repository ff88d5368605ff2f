"""The golden masters of format versions 2 and 3: the bytes that the command writes, and what two decoders make of them.

Damage to their files is refused in one clear line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers
import independent_reader
import numpy as np
import pytest
from calls import export
from commands import invoke, refused
from damage import stored_in
from golden import make_polar, make_trellis
from golden.make import described
from restated import restate_hashes

from pqweights.checkpoint.source import open_local
from pqweights.codecs import CODECS
from pqweights.errors import MasterError
from pqweights.options import ExportOptions
from pqweights.rewrite.results.verify import verify

GOLDEN = {"hadamard-trellis": make_trellis, "polar": make_polar}
golden_master = pytest.mark.parametrize("codec", GOLDEN)


def expected(golden: ModuleType) -> Any:
    return json.loads(golden.EXPECTED.read_text(encoding="utf-8"))


def tensors(golden: ModuleType) -> dict[str, Any]:
    manifest = json.loads((golden.MASTER / "pqweights.json").read_bytes())
    return {tensor["name"]: tensor for tensor in manifest["tensors"]}


@golden_master
@pytest.mark.parametrize("threads", [1, 3])
def test_the_command_writes_the_golden_bytes(tmp_path: Path, codec: str, threads: int) -> None:
    golden = GOLDEN[codec]
    golden.write_master(golden.write_source(tmp_path / "source"), tmp_path / "out", threads)
    written, kept = helpers.folder_bytes(tmp_path / "out"), helpers.folder_bytes(golden.MASTER)
    assert sorted(written) == sorted(kept)
    for name, data in kept.items():
        assert written[name] == data, name


@golden_master
def test_independent_decoder_and_export_read_the_golden_master(tmp_path: Path, codec: str) -> None:
    golden = GOLDEN[codec]
    stated = expected(golden)
    assert {tensor.name: described(tensor) for tensor in golden.read_master(golden.MASTER)} == stated
    export(golden.MASTER, tmp_path / "out", "bf16", ExportOptions(dtype="source"), threads=2)
    exported = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, entry in independent_reader.read_safetensors(path).items():
            exported[name] = described(independent_reader.Tensor(name, entry.dtype, entry.shape, entry.data))
    assert {name: exported[name] for name in stated} == stated


@golden_master
def test_golden_master_verifies_and_covers_the_format(codec: str) -> None:
    golden = GOLDEN[codec]
    assert verify(golden.MASTER, threads=1).problems == ()
    settings = json.loads((golden.MASTER / "config.json").read_bytes())["quantization_config"]
    assert settings["format_version"] == CODECS[codec].format_version
    assert set(settings["levels"]) == {"hadamard-lloyd-max"}
    own = [tensor for tensor in tensors(golden).values() if tensor["codec"] == codec]
    assert {tensor["rotation"] for tensor in own} == {"hadamard", "signed-hadamard"}
    assert {tensor["dtype"] for tensor in own} == {"BF16", "F16", "F32", "F64"}
    if codec == "polar":
        assert {np.sign(tensor["norm_exponent"]) for tensor in own} == {-1, 0, 1}
        assert {tensor["codec"] for tensor in tensors(golden).values()} == {*CODECS, None}
        rows = tensors(golden)["model.layers.rows.weight"]
        assert [stored["shape"] for stored in rows["stored"]] == [[12, 92], [12, 16]]
        assert rows["bytes"] * 8 == 12 * 256 * 3.875
    else:
        assert {tensor["bits"] for tensor in own} == {1.5, 2.125, 4.38, 8}
        superblocks = {tensor["name"]: tensor["stored"][0]["shape"][0] for tensor in own}
        assert superblocks.pop("model.layers.least.weight") == 2 and set(superblocks.values()) == {1}


@golden_master
def test_golden_weights_are_as_near_to_the_source_as_the_manifest_states(codec: str) -> None:
    golden = GOLDEN[codec]
    source, stated = golden.source(), tensors(golden)
    for tensor in golden.read_master(golden.MASTER):
        dtype, values = source[tensor.name]
        if stated[tensor.name]["action"] == "keep":
            assert tensor.data == values.tobytes()
            continue
        stored = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        back = np.frombuffer(tensor.data, stored).reshape(values.shape)
        back, exact = (
            x if dtype == "F64" else helpers.as_float32((dtype, x)).astype(np.float64) for x in (back, values)
        )
        energy = (exact**2).sum()
        assert stated[tensor.name]["energy"] == pytest.approx(energy, rel=1e-6)
        # The tolerance covers rounding to 16 bits, which the manifest does not count.
        error = stated[tensor.name]["relative_mse"] * energy
        assert ((back - exact) ** 2).sum() == pytest.approx(error, rel=0.02, abs=1e-5 * energy)


@golden_master
def test_versions_before_refuse_the_golden_master(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden, version = GOLDEN[codec], CODECS[codec].format_version
    with pytest.raises(ValueError, match="not a pqweights master of version 1"):
        independent_reader.quantization_config(golden.MASTER)
    before = {name: other for name, other in CODECS.items() if other.format_version < version}
    monkeypatch.setattr("pqweights.checkpoint.master.CODECS", before)
    with pytest.raises(MasterError, match=f"format_version: expected 1.*, found {version}; a newer pqweights may"):
        open_local(golden.MASTER)


# --- damaged files ---


def copied(codec: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDEN[codec].MASTER, folder / "master"))


def damage(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the data of a stored tensor."""
    tensor = stored_in(folder)[name]
    data = bytearray((folder / tensor.file).read_bytes())
    place = slice(tensor.offset, tensor.offset + tensor.byte_count)
    data[place] = change(bytes(data[place]))
    (folder / tensor.file).write_bytes(data)


SUPERBLOCKS: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the step": lambda data: bytes([data[0], data[1], data[2], data[3] ^ 0x80, *data[4:]]),
    "the trellis": lambda data: data[:4] + b"\xff" + data[5:],
    "the classes": lambda data: data[:6] + b"\xff" + data[7:],
    "a state": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "a word": lambda data: data[:200] + bytes([data[200] ^ 16]) + data[201:],
    "zeros": lambda data: data[:300] + bytes(len(data) - 300),
    "noise": lambda data: np.random.default_rng(5).bytes(len(data)),
}


@pytest.mark.parametrize("change", SUPERBLOCKS)
def test_damaged_superblock_is_one_clear_line(tmp_path: Path, change: str) -> None:
    folder = copied("hadamard-trellis", tmp_path)
    damage(folder, "model.layers.mixed.weight_trellis", SUPERBLOCKS[change])
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert "model.layers.mixed.weight" in line and "damaged" in line
    assert not list(tmp_path.glob("out/*.safetensors"))
    problems = verify(folder, threads=1).problems
    assert any("model.layers.mixed.weight_trellis" in problem for problem in problems)


@pytest.mark.parametrize(
    "number", [b"\x00\x7c", b"\x01\x7e", b"\x00\xbc", b"\x00\x80"], ids=["infinite", "NaN", "negative", "minus 0"]
)
def test_radius_that_no_encoder_writes_is_one_clear_line(tmp_path: Path, number: bytes) -> None:
    folder = copied("polar", tmp_path)
    damage(folder, "model.layers.rows.weight_radii", lambda data: data[:40] + number + data[42:])
    problems = verify(folder, threads=1).problems
    assert any("model.layers.rows.weight_radii" in problem for problem in problems)
    restate_hashes(folder)
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert "'model.layers.rows.weight': block 2: a radius is negative or not finite; the master is damaged" in line
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_any_angle_codes_are_decoded_and_verify_finds_the_change(tmp_path: Path) -> None:
    folder = copied("polar", tmp_path)
    damage(folder, "model.layers.rows.weight_angles", lambda data: np.random.default_rng(5).bytes(len(data)))
    assert any("model.layers.rows.weight_angles" in problem for problem in verify(folder, threads=1).problems)
    export(restate_hashes(folder), tmp_path / "out", "bf16", ExportOptions(dtype="source"))


@pytest.mark.parametrize("cut", [0, 7, 100, 5000])
def test_truncated_file_is_one_clear_line(tmp_path: Path, cut: int) -> None:
    folder = copied("hadamard-trellis", tmp_path)
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:cut] if cut < 100 else path.read_bytes()[:-cut])
    assert path.name in refused("export", folder, tmp_path / "out", "--target", "bf16")
    result = invoke("verify", folder)
    assert (result.exit_code, result.stdout.count("\n"), result.stderr) == (1, 1, "") and path.name in result.stdout


@pytest.mark.parametrize(
    ("codec", "weight", "key", "value", "message"),
    [
        *(
            ("hadamard-trellis", "model.layers.middle.weight", *damaged)
            for damaged in (
                ("bits", 4.5, "expected U8"),
                ("bits", 1.2, "bits"),
                ("bits", "nan", "bits"),
                ("shape", [18, 130], "expected U8"),
                ("shape", [20, 1300], "expected U8"),
                ("shape", [10**400], "shape"),
                ("shape", [2**50, 2**50], "shape: expected at most"),
                ("rotation", "givens", "hadamard-trellis has no rotation 'givens'"),
                ("norm_exponent", 3, "norm_exponent"),
            )
        ),
        *(
            ("polar", "model.layers.flat.weight", *damaged)
            for damaged in (
                ("bits", 4, "expected 3.875 bits for polar, found 4"),
                ("norm_exponent", 201, "norm_exponent: expected a whole number <= 200, found 201"),
                ("norm_exponent", 1.5, "norm_exponent"),
                ("levels", [1.0], "unknown key 'levels'"),
            )
        ),
        ("hadamard-trellis", None, "format_version", 1, "expected 2 or later for hadamard-trellis, found 1"),
        ("polar", None, "format_version", 2, "expected 3 or later for polar, found 2"),
    ],
)
def test_contradicting_configuration_is_one_clear_line(
    tmp_path: Path, codec: str, weight: str | None, key: str, value: Any, message: str
) -> None:
    folder = copied(codec, tmp_path)
    config = json.loads((folder / "config.json").read_bytes())
    settings = config["quantization_config"]
    (settings if weight is None else settings["overrides"][weight])[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    line = refused("export", folder, tmp_path / "out", "--target", "bf16")
    assert message in line and (weight or key) in line
