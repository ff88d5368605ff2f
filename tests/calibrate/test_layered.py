"""Models that are run one layer at a time compute what whole ones do, and what is recorded of them is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from closeness import ALIKE, approx
from commands import raises
from helpers import as_float32, read_all, write_checkpoint

from pqweights.calibrate.layer_statistics import InputMoments, expected_squares
from pqweights.calibrate.layered import OUTSIDE, LayeredModel
from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError

IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 490, (3, 24)))
# Those whose text model is a causal language model of transformers.
CAUSAL = [name for name, family in families.FAMILIES.items() if family.model.endswith("ForCausalLM")]


def opened(folder: Path) -> LayeredModel:
    return LayeredModel(open_local(folder), folder, remedy="leave it")


def whole(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", [*CAUSAL, "qwen3_5", "qwen3_5_moe"])
def test_layers_one_after_the_other_compute_what_the_model_does(name: str, tmp_path_factory: Any) -> None:
    folder = families.model(tmp_path_factory.getbasetemp(), name)
    model = opened(folder)
    with torch.no_grad():
        with model.loaded(OUTSIDE):
            hidden, calls = model.begin(IDS)
        for layer, call in enumerate(calls):
            with model.loaded(layer):
                hidden = model.run(layer, hidden, call)
        with model.loaded(OUTSIDE):
            logits = model.end(IDS, hidden)
        assert torch.equal(logits, whole(folder)(IDS).logits)
    assert all(parameter.is_meta for parameter in model.model.parameters())


@pytest.mark.parametrize(("rank", "expected"), [(96, {0.1, 0.3, 1.0}), (8, {1e-4, 3e-4, 0.001, 0.003})])
def test_the_damping_suits_what_the_sample_shows(rank: int, expected: set[float]) -> None:
    """Few inputs without correlations show some by chance; those that lie in few directions show theirs at once."""
    random = torch.Generator().manual_seed(7)
    directions = torch.linalg.qr(torch.randn(96, 96, generator=random))[0][:rank]
    moments = InputMoments([slice(0, 96)])
    for _ in range(3):
        rows = torch.randn(64, rank, generator=random) @ directions
        moments.add(rows + 0.01 * torch.randn(64, 96, generator=random), torch.ones(64))
    assert moments.damping() in expected


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_squares_of_gradients_at_logits_are_those_of_all_labels(scale: float) -> None:
    """Also of tokens that no label of a small sample is; of models that scale their logits, the same in proportion."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 50, generator=random)
    probabilities = torch.softmax(logits, -1)
    labels = torch.multinomial(probabilities, 1, generator=random)
    gradients = scale * (probabilities - torch.zeros_like(logits).scatter_(1, labels, 1))
    found, exact = expected_squares(gradients), probabilities * (1 - probabilities)
    assert float(found.sum()) == approx(float(gradients.square().sum()), ALIKE)
    drawn = gradients.square().sum(0)
    error, error_of_drawn = ((of / of.sum() - exact.sum(0) / exact.sum()).square().sum() for of in (found, drawn))
    assert error < error_of_drawn / 4


def test_stacks_that_transformers_transposes_if_they_need_it_are_those_of_the_model(tmp_path: Path) -> None:
    """Published Qwen3-VL-MoE has [E, in, out], and what transformers writes has [E, out, in]."""
    settings = families.EXPERTS | {"moe_intermediate_size": 384, "hidden_size": 128, "num_hidden_layers": 1}
    own = families.build(families.seeing("Qwen3VLMoe", (), sees=True, **settings), tmp_path / "own")
    tensors = read_all(own)
    stacks = [name for name, (_, values) in tensors.items() if ".experts." in name and values.ndim == 3]
    published = {
        name: (dtype, values.swapaxes(1, 2)) if name in stacks else (dtype, values)
        for name, (dtype, values) in tensors.items()
    }
    shutil.copytree(own, tmp_path / "published", ignore=shutil.ignore_patterns("*.safetensors"))
    write_checkpoint(tmp_path / "published", published)
    assert len(stacks) == 2
    for folder, stored in ((own, tensors), (tmp_path / "published", published)):
        model = opened(folder)
        with model.loaded(0):
            for name in stacks:
                assert model.matrices_of(name).transposed is (folder != own)
                parameter = model.parameter_of(name)
                assert parameter is not None
                np.testing.assert_array_equal(model.part_of(name, parameter).detach().numpy(), as_float32(stored[name]))


def test_a_configuration_without_sizes_is_refused_before_anything_is_computed(
    tmp_path: Path, tmp_path_factory: Any
) -> None:
    """transformers' defaults are those of a model of 7 G weights."""
    folder = families.model(tmp_path_factory.getbasetemp(), "llama")
    write_checkpoint(tmp_path / "bare", read_all(folder))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    with raises(SourceError, "config.json"):
        opened(tmp_path / "bare")
