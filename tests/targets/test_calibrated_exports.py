"""Exports of masters of which some weights have ready codes to runtimes with layouts of their own: GGUF and MLX."""

from __future__ import annotations

from pathlib import Path

import column_writer
import families
import gguf
import language_models
import numpy as np
import numpy.typing as npt
import pytest
from calls import quantize
from closeness import ROUNDED_ONCE_MORE, approx
from commands import done
from export_decoders import export_weight

from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.convert.ready import ReadyWeights
from pqweights.planning.recipe import load_recipe
from pqweights.targets.master import Learned

Floats = npt.NDArray[np.float32]
HEAD_SIZE = 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Floats]]:
    """A master, and what its ready codes decode to."""
    folder = tmp_path_factory.mktemp("calibrated")
    source = language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "src"))
    names = [tensor.name for tensor in open_local(source).tensors if tensor.name.endswith("proj.weight")]
    decoded = column_writer.write_codes(source, folder / "ready", names, rate=4.0)
    quantize(source, folder / "master", load_recipe("q6"), learned=Learned(ready=ReadyWeights.open(folder / "ready")))
    return folder / "master", decoded


def test_gguf_holds_what_the_codes_decode_to(made: tuple[Path, dict[str, Floats]], tmp_path: Path) -> None:
    master, decoded = made
    options = ("--type", "f32", "--without-tokenizer", "--name", "model")
    done("export", master, tmp_path / "out", "--target", "gguf", *options)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out/model-F32.gguf").tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, values in decoded.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rows in the order of llama.cpp's
            values = values.reshape(-1, 2, HEAD_SIZE // 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        tensor = found[names.get_name(name, try_suffixes=(".weight",))]
        assert np.array_equal(tensor.data.reshape(values.shape), values), name


def test_mlx_integers_round_what_the_codes_decode_to(made: tuple[Path, dict[str, Floats]], tmp_path: Path) -> None:
    master, decoded = made
    done("export", master, tmp_path / "out", "--target", "mlx")
    records = {record.name: record for record in read_manifest(tmp_path / "out").records}
    weight = export_weight(tmp_path / "out")
    for name, values in decoded.items():
        exact = values.astype(np.float64)
        error = np.square(weight(name) - exact).sum() / np.square(exact).sum()
        assert records[name].relative_mse == approx(error, ROUNDED_ONCE_MORE), name
