"""The golden masters of format versions 1 to 6: the bytes that are written, and what two decoders make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import independent_reader
import pytest
import safetensors
from calls import export
from golden import make, make_codecs

from pqweights.common.options import Options
from pqweights.results.verify import verify

TRELLIS, COLUMNS = make_codecs.TRELLIS, make_codecs.COLUMNS
COLUMN_CODEC = "hadamard-trellis-columns"
GOLDEN: dict[str, Any] = {
    "hadamard-lloyd-max": make,
    "hadamard-trellis": TRELLIS,
    "steps": make_codecs.STEPS,
    COLUMN_CODEC: COLUMNS,
    "native": make_codecs.NATIVE,
    "stacks": make_codecs.STACKS,
}
# Tensors that the source stores, and that the model does not have under these names.
PACKED = [
    *("model.layers.float8.weight", "model.layers.float8.weight_scale_inv"),
    *("model.layers.mlp.experts.down_proj_blocks", "model.layers.mlp.experts.down_proj_scales"),
]


@pytest.mark.parametrize("codec", GOLDEN)
@pytest.mark.parametrize("threads", [1, 3])
def test_quantizing_the_golden_source_gives_the_golden_bytes(tmp_path: Path, codec: str, threads: int) -> None:
    golden = GOLDEN[codec]
    golden.write_master(golden.write_source(tmp_path / "source"), tmp_path / "out", threads)
    written, kept = helpers.folder_bytes(tmp_path / "out"), helpers.folder_bytes(golden.MASTER)
    assert sorted(written) == sorted(kept)
    for name, data in kept.items():
        assert written[name] == data, name


@pytest.mark.parametrize("codec", GOLDEN)
def test_golden_master_verifies_and_is_read_by_an_independent_decoder_and_by_export(tmp_path: Path, codec: str) -> None:
    golden = GOLDEN[codec]
    assert verify(golden.MASTER, threads=1).problems == ()
    expected = json.loads(golden.EXPECTED.read_text(encoding="utf-8"))
    assert {tensor.name: make.described(tensor) for tensor in golden.read_master(golden.MASTER)} == expected
    export(golden.MASTER, tmp_path / "out", "bf16", Options(dtype="source"), threads=2)
    exported = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            tensor = independent_reader.Tensor(name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
            exported[name] = make.described(tensor)
    for name in PACKED if codec == "native" else ():  # what they are decoded to is for kernels/test_lossless.py
        expected.pop(name), exported.pop(name, None)
    assert {name: exported[name] for name in expected} == expected
    assert codec == "native" or exported.keys() == expected.keys()
