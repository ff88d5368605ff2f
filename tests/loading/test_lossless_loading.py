"""Masters without loss in transformers: parameters are those of the source, whether they are to stay packed or not."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from commands import done

import pqweights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import torch  # noqa: E402


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its master."""
    source, out = families.model(tmp_path_factory.getbasetemp(), request.param), tmp_path_factory.mktemp("lossless")
    done("quantize", source, out / "master", "--lossless")
    return source, out / "master"


@pytest.mark.parametrize("packed", [False, True])
def test_parameters_are_those_of_the_source(folders: tuple[Path, Path], packed: bool) -> None:
    from transformers import AutoModelForCausalLM

    source, master = folders
    expected = dict(AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16").named_parameters())
    loaded = dict(pqweights.load_model(master, dtype="bfloat16", packed=packed).named_parameters())
    assert loaded.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(loaded[name].view(torch.int16), parameter.view(torch.int16)), name
