"""Whether a model fits into memory, and whether a master runs packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import language_models
import pytest
from calls import export, quantize
from helpers import bf16, gaussian, read_all, run_command, write_checkpoint

from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.errors import GenerationError
from pqweights.inference import packing
from pqweights.inference.packing import Needs, check_fits, choose_packed, free_bytes, read_needs
from pqweights.inference.runtimes.folders import read_folder
from pqweights.planning.recipe import load_recipe


def needs(multiplied: bool | None = False, free: int | None = 64 * 10**9) -> Needs:
    return Needs(decoded=16 * 10**9, packed=5 * 10**9, multiplied=multiplied, free=free)


@pytest.mark.parametrize(
    ("multiplied", "free", "packed"),
    [
        (None, 64, False),  # no master
        (None, 1, False),
        (True, 64, True),
        (True, 1, True),
        (False, 64, False),
        (False, 15, True),
        (False, None, False),
    ],
)
def test_scalar_codes_run_packed_and_others_where_they_must(multiplied, free, packed):
    chosen, why = choose_packed(None, needs(multiplied, None if free is None else free * 10**9))
    assert (chosen, why is not None) == (packed, multiplied is False and packed)
    assert why is None or ("16.00 GB" in why and "15.00 GB are free" in why)
    for asked in (True, False):
        assert choose_packed(asked, needs(multiplied, free=1)) == (asked, None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    language_models.babbler(folder / "source")
    for recipe in ("q4", "t4"):
        quantize(folder / "source", folder / recipe, load_recipe(recipe), threads=2)
    export(folder / "q4", folder / "bf16", "bf16", threads=2)
    return folder


def test_needs_are_read_from_headers(folders, monkeypatch):
    monkeypatch.setattr(packing, "free_bytes", lambda: 123)
    parameters = sum(values.size for _, values in read_all(folders / "source").values())
    source = read_needs(read_folder(folders / "source"), "auto")  # whose dtype is float32
    assert (source.decoded, source.multiplied, source.free) == (4 * parameters, None, 123)
    assert read_needs(read_folder(folders / "source"), "bfloat16").decoded == 2 * parameters
    assert read_needs(read_folder(folders / "bf16"), "auto").decoded == 2 * parameters
    scalar, trellis = (read_needs(read_folder(folders / name), "auto") for name in ("q4", "t4"))
    assert (scalar.multiplied, trellis.multiplied) == (True, False)
    assert scalar.decoded == trellis.decoded == 4 * parameters
    assert scalar.packed == sum(file.stat().st_size for file in (folders / "q4").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "packed", "remedy"),
    [
        ("source", False, "pqweights quantize"),
        ("bf16", False, "pqweights quantize"),
        ("t4", False, "let them stay packed"),
        ("t4", True, "fewer bits"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(name, packed, remedy, folders):
    folder = read_folder(folders / name)
    with pytest.raises(GenerationError, match=remedy) as caught:
        check_fits(folder, needs(free=4 * 10**9), packed=packed)
    needed = "5.00 GB" if packed else "16.00 GB"
    assert needed in str(caught.value) and "4.00 GB are free" in str(caught.value)
    check_fits(folder, needs(free=None), packed=packed)
    check_fits(folder, needs(free=16 * 10**9), packed=packed)


def system(root: Path, available: int, groups: str = "", **files: str) -> Path:
    """A tree with the files of Linux that say how much memory is free. available: in kB"""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999 kB\nMemFree: 1 kB\nMemAvailable:  {available} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


STAT = "anon 5\ninactive_file 300\nactive_file 7\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 8000 * 1024),
        ("0::/\n", {"memory.max": "5000\n", "memory.current": "1000\n", "memory.stat": STAT}, 4300),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "1000\n"}, 8000 * 1024),
        # A limit of a parent group counts, and so does that of a container whose own path is not mounted.
        ("0::/a/b\n", {"a/memory.max": "5000", "a/memory.current": "1000", "a/b/memory.max": "max"}, 4000),
        ("0::/host/x\n", {"memory.max": "700", "memory.current": "1000"}, 0),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_groups(groups, files, expected, tmp_path):
    assert free_bytes(system(tmp_path, 8000, groups, **files)) == expected


def test_free_memory_is_unknown_where_the_system_does_not_say(tmp_path):
    assert free_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("shapes", "model_type", "multiplied"),
    [
        ([(512, 256), (256, 512)], "llama", True),
        ([(512, 576), (256, 576)], "llama", False),  # blocks run across rows
        ([(5120, 256), (8, 100)], "llama", True),  # a few weights hardly count
        ([(768, 256), (256, 768)], "gpt2", False),  # which multiplies with columns
        ([(768, 256), (256, 768)], "gpt_oss", False),  # whose experts do
    ],
)
def test_weights_are_multiplied_as_they_are_in_whole_blocks_of_rows(shapes, model_type, multiplied, tmp_path):
    weights = {f"model.{n}.weight": bf16(gaussian(*shape, seed=n)) for n, shape in enumerate(shapes)}
    source = write_checkpoint(tmp_path / "source", weights)
    run_command({"quantize": str(source)}, tmp_path / "master")
    encoded = [tensor for tensor in open_local(tmp_path / "master").tensors if isinstance(tensor, EncodedTensor)]
    assert len(encoded) == len(shapes)
    folder = replace(read_folder(tmp_path / "master"), config={"model_type": model_type})
    assert read_needs(folder, "float32").multiplied is multiplied
