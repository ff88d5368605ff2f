"""Models that are run one layer at a time compute what whole ones do, and what is recorded of them is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from helpers import read_all, write_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError
from pqweights.quality.layer_statistics import LayerStatistics
from pqweights.quality.layered import OUTSIDE, LayeredModel

IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 490, (3, 24)))
# Those whose text model is a causal language model of transformers.
CAUSAL = [name for name, family in families.FAMILIES.items() if family.model.endswith("ForCausalLM")]


def opened(folder: Path) -> LayeredModel:
    return LayeredModel(open_local(folder), folder)


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


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biased", "qwen3"])
def test_statistics_of_a_layer_are_those_of_the_whole_model(name: str, tmp_path_factory: Any) -> None:
    folder = families.model(tmp_path_factory.getbasetemp(), name)
    expected: dict[str, tuple[Any, Any]] = {}
    full, hooks = whole(folder), []

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            rows = inputs[0].detach().flatten(0, -2).double()

            def backward(gradient: Any) -> None:
                expected[f"{name}.weight"] = (
                    rows.T @ rows / len(rows),
                    gradient.flatten(0, -2).double().square().mean(0),
                )

            output.register_hook(backward)

        return hook

    for path, module in full.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_hook(watch(f"model.layers.{path}")))
    direction = torch.randn(3, 24, families.VOCABULARY, generator=torch.Generator().manual_seed(1))
    states = full(IDS, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    for state in states.hidden_states:
        state.retain_grad()
    (states.logits * direction).sum().backward()

    model, layer = opened(folder), 1
    with model.loaded(OUTSIDE), torch.no_grad():
        _, calls = model.begin(IDS)
    with model.loaded(layer), LayerStatistics(model.parameters_of(layer)) as statistics:
        inputs = states.hidden_states[layer].detach().requires_grad_()
        # The last of the hidden states comes after the norm: its gradient is found through what is outside.
        after = model.run(layer, inputs, calls[layer])
        with torch.no_grad():
            last = full.model.layers[layer](states.hidden_states[layer], *calls[layer].args, **calls[layer].kwargs)
        assert torch.equal(after.detach(), last)
        leaf = after.detach().requires_grad_()
        (full.lm_head(full.model.norm(leaf)) * direction).sum().backward()
        after.backward(leaf.grad)
    assert torch.allclose(inputs.grad, states.hidden_states[layer].grad, rtol=1e-3, atol=1e-5)
    names = [name for name in expected if f".{layer}." in name]
    assert sorted(statistics.products) == sorted(names) and len(names) == 7
    for name in names:
        moments, squares = expected[name]
        assert torch.allclose(statistics.mean_moments(name).double(), moments, rtol=1e-4, atol=1e-5)
        found = statistics.mean_squares(name)
        assert found is not None
        np.testing.assert_allclose(found, squares.numpy(), rtol=1e-3)
    shared = {statistics.products[f"model.layers.1.self_attn.{which}_proj.weight"].vector for which in "qkv"}
    assert len(shared) == 1 and len(statistics.moments) == 4


def test_what_is_tied_and_what_is_changed_is_known(tmp_path_factory: Any) -> None:
    base = tmp_path_factory.getbasetemp()
    assert opened(families.model(base, "llama-tied")).tied == "model.embed_tokens.weight"
    assert opened(families.model(base, "llama")).tied is None
    mixtral = opened(families.model(base, "mixtral"))
    assert mixtral.parameter_of("model.layers.0.block_sparse_moe.experts.0.w1.weight") is None  # fused in the model
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mixtral.parameter_of(name) == name


def test_models_without_a_list_of_decoder_layers_are_refused(tmp_path: Path, tmp_path_factory: Any) -> None:
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(SourceError, match="transformers cannot run this model"):
        opened(tmp_path / "t5")
    folder = families.model(tmp_path_factory.getbasetemp(), "llama")
    tensors = read_all(folder)
    left_out = "model.layers.1.mlp.up_proj.weight"
    config = (folder / "config.json").read_text()
    tensors.pop(left_out)
    write_checkpoint(tmp_path / "lacks", tensors)
    (tmp_path / "lacks" / "config.json").write_text(config)
    model = opened(tmp_path / "lacks")
    with pytest.raises(SourceError, match=f"no tensor for {left_out}"), model.loaded(1):
        pass
