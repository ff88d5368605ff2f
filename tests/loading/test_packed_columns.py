"""Weights of hadamard-trellis-columns in transformers: decoded while they are loaded, or packed until they are used."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import column_writer
import families
import numpy as np
import pytest
from calls import quantize
from closeness import assert_near
from commands import raises
from restated import restate_hashes
from shared import made_once, run_folder

import pqweights
from pqweights.checkpoint.source import open_local
from pqweights.convert.ready import ReadyWeights
from pqweights.errors import MasterError
from pqweights.planning.recipe import load_recipe
from pqweights.targets.master import Learned

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import torch  # noqa: E402

from pqweights.runtime.loading.packed import PackedTensor  # noqa: E402
from pqweights.runtime.loading.packed_rows import PackedColumns  # noqa: E402

IDS = torch.tensor(families.IDS)
MODELS = ("llama", "qwen3_moe", "gpt_oss")
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


@pytest.fixture(scope="module", params=MODELS)
def masters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return master_of_columns(tmp_path_factory.getbasetemp(), request.param)


def master_of_columns(base: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a master whose linear layers have ready codes, made once for all workers, and what those decode to."""
    source = families.model(base, name)

    def make(folder: Path) -> None:
        shapes = {tensor.name: tensor.shape for tensor in open_local(source).tensors}
        stacks = [of for of in shapes if of.endswith(("experts.gate_up_proj", "experts.down_proj"))]  # transposed
        names = stacks or [of for of in shapes if of.endswith("proj.weight") and ".0." in of]
        decoded = column_writer.write_codes(source, folder / "ready", names, rate=4.0, transposed=stacks)
        learned = Learned(ready=ReadyWeights.open(folder / "ready"))
        quantize(source, folder / "master", load_recipe("q6"), learned=learned)
        np.savez(folder / "decoded.npz", **decoded)

    folder = made_once(run_folder(base) / "columns" / name, make)
    with np.load(folder / "decoded.npz") as decoded:
        return folder / "master", dict(decoded)


def output(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


def packed_columns(model: Any) -> list[PackedColumns]:
    packed = [parameter for parameter in model.parameters() if isinstance(parameter, PackedTensor)]
    rows = [piece for parameter in packed for matrix in parameter.matrices for piece in matrix]
    return [piece for piece in rows if isinstance(piece, PackedColumns)]


DTYPES = [(name, dtype) for name in MODELS for dtype in ("bfloat16", "float32")]


@pytest.mark.parametrize(
    ("masters", "dtype"), [*DTYPES, ("llama", "float16"), ("llama", "float64")], indirect=["masters"], scope="module"
)
def test_packed_weights_are_what_is_decoded_when_loading(masters: Any, dtype: str) -> None:
    folder, decoded = masters
    plain = pqweights.load_model(folder, dtype=dtype, **EAGER)
    packed = pqweights.load_model(folder, dtype=dtype, packed=True, **EAGER)
    assert packed.hf_quantizer.decoded_weights == ()
    columns = packed_columns(packed)
    assert {piece.tensor.name for piece in columns} == set(decoded)
    assert sum(piece.byte_count for piece in columns) == sum(
        part.byte_count for tensor in open_local(folder).tensors if tensor.name in decoded for part in tensor.parts
    )
    for (name, one), other in zip(plain.named_parameters(), packed.parameters(), strict=True):
        whole = other.decode() if isinstance(other, PackedTensor) else other
        assert torch.equal(one, whole), name
    if dtype == "float32":
        one, other = output(plain), output(packed)
        assert_near(other, one, "torch")
        by_name = dict(plain.named_parameters())
        for name in decoded.keys() & by_name.keys():
            assert np.array_equal(by_name[name].detach().numpy(), decoded[name])


def test_rows_of_packed_weights_are_those_of_the_whole(masters: Any) -> None:
    packed = pqweights.load_model(masters[0], dtype="float32", packed=True, **EAGER)
    for piece in packed_columns(packed)[:3]:
        whole = torch.empty(piece.rows, piece.columns)
        piece.decode(0, piece.rows, whole)
        for start, stop in [(0, 1), (piece.rows - 1, piece.rows), (piece.rows // 2 - 1, piece.rows // 2 + 2)]:
            some = torch.empty(stop - start, piece.columns)
            piece.decode(start, stop, some)
            assert torch.equal(some, whole[start:stop])


def test_copies_and_pickles_compute_the_same(masters: Any) -> None:
    packed = pqweights.load_model(masters[0], dtype="float32", packed=True, **EAGER)
    expected = output(packed)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(output(other), expected)


def test_damage_is_one_clear_error(masters: Any, tmp_path: Path) -> None:
    folder, decoded = masters
    master = Path(shutil.copytree(folder, tmp_path / "master"))
    stored = next(tensor for tensor in open_local(master).stored if tensor.name == f"{min(decoded)}_lengths")
    path = master / stored.file
    data = bytearray(path.read_bytes())
    data[stored.offset : stored.offset + 4] = b"\x05\0\0\0"
    path.write_bytes(data)
    with raises(MasterError, stored.name):
        pqweights.load_model(master, **EAGER)
    restate_hashes(master)
    for packed in (False, True):
        with raises(MasterError, stored.name):
            pqweights.load_model(master, packed=packed, **EAGER)
