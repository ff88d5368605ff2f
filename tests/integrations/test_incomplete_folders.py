"""Masters whose files are missing or of another size, and folders of interrupted runs, are not loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest

import pqweights
from pqweights.errors import MasterError, PqweightsWarning

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import transformers  # noqa: E402

Load = Callable[[Path], Any]
LOADERS = [pqweights.load_model, transformers.AutoModelForCausalLM.from_pretrained]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def copied(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(families.master(base, "llama"), tmp_path / "master"))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


@pytest.mark.parametrize("load", LOADERS, ids=["load_model", "from_pretrained"])
@pytest.mark.parametrize("change", [-8, 8])
def test_weight_file_of_another_size_is_refused(change: int, load: Load, copied: Path) -> None:
    size = shard(copied).stat().st_size
    os.truncate(shard(copied), size + change)
    with pytest.raises(MasterError, match=rf"{shard(copied).name}: expected {size} bytes, .*found {size + change}"):
        load(copied)


def test_missing_weight_file_is_refused(copied: Path) -> None:
    name = shard(copied).name
    shard(copied).unlink()
    with pytest.raises(MasterError, match=rf"{name} is missing \(pqweights.json lists it with \d+ bytes\); fetch"):
        pqweights.load_model(copied)


def test_missing_index_is_refused(copied: Path) -> None:
    (copied / "model.safetensors.index.json").unlink()
    with pytest.raises(MasterError, match=r"model\.safetensors\.index\.json is missing"):
        pqweights.load_model(copied)


@pytest.mark.parametrize("content", [None, "damaged"])
def test_master_without_a_readable_manifest_is_loaded(content: str | None, copied: Path) -> None:
    (copied / "pqweights.json").unlink()
    if content is not None:
        (copied / "pqweights.json").write_text(content)
    with pytest.warns(PqweightsWarning, match="no pqweights.json that can be read, .*cannot be checked"):
        assert pqweights.load_model(copied).num_parameters() > 0


def test_small_files_may_be_missing_or_edited(copied: Path) -> None:
    (copied / "generation_config.json").unlink(missing_ok=True)
    config = copied / "config.json"
    config.write_text(config.read_text() + "\n")
    assert pqweights.load_model(copied).num_parameters() > 0


def test_interrupted_run_is_named(tmp_path: Path) -> None:
    (tmp_path / ".pqweights").mkdir()
    (tmp_path / ".pqweights/journal.jsonl").write_text('{"kind": "master"}\n')
    with pytest.raises(MasterError, match="unfinished run of pqweights quantize: run the same command again"):
        pqweights.load_model(tmp_path)
