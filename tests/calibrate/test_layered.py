"""Models that are run one layer at a time compute what whole ones do, and what is recorded of them is right."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from closeness import F32_MATRIX, F32_SOLVED, F32_SUM, each_near
from helpers import as_float32, read_all, write_checkpoint

from pqweights.calibrate.layer_statistics import InputMoments, LayerStatistics, moments_of_inputs
from pqweights.calibrate.layered import OUTSIDE, LayerCall, LayeredModel, MatrixPlace, ModelMatrix
from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError
from pqweights.formats.column_encoding import DAMPINGS

IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 490, (3, 24)))
# Those whose text model is a causal language model of transformers.
CAUSAL = [name for name, family in families.FAMILIES.items() if family.model.endswith("ForCausalLM")]


def opened(folder: Path) -> LayeredModel:
    return LayeredModel(open_local(folder), folder, remedy="leave it")


def shrunk(moments: torch.Tensor, count: int) -> torch.Tensor:
    """Moments of `count` inputs, and where these are fewer than channels, 64 more without correlations."""
    if count >= len(moments):
        return moments
    uncorrelated = torch.diag(moments.diagonal())
    return (count * moments + 64 * uncorrelated) / (count + 64)


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
    with model.loaded(layer), LayerStatistics(model.parameters_of(layer), moments_of_inputs) as statistics:
        inputs = states.hidden_states[layer].detach().requires_grad_()
        # The last of the hidden states comes after the norm: its gradient is found through what is outside.
        after = model.run(layer, inputs, calls[layer])
        with torch.no_grad():
            last = full.model.layers[layer](states.hidden_states[layer], *calls[layer].args, **calls[layer].kwargs)
        assert torch.equal(after.detach(), last)
        leaf = after.detach().requires_grad_()
        (full.lm_head(full.model.norm(leaf)) * direction).sum().backward()
        after.backward(leaf.grad)
    assert each_near(inputs.grad, states.hidden_states[layer].grad, F32_SOLVED, F32_SUM)
    names = [name for name in expected if f".{layer}." in name]
    assert sorted(matrix.parameter for matrix in statistics.products) == sorted(names) and len(names) == 7
    shared = {
        statistics.products[ModelMatrix(f"model.layers.1.self_attn.{which}_proj.weight")].vector for which in "qkv"
    }
    assert len(shared) == 1 and len(statistics.collected) == 4
    for matrices, read in statistics.inputs():
        count, (found,) = read.count, read.mean()
        assert count == IDS.numel()
        for matrix in matrices:
            moments, squares = expected[matrix.parameter]
            assert each_near(found.double(), shrunk(moments, count), F32_MATRIX, F32_SUM)
            g = statistics.mean_squares(matrix, IDS.numel())
            assert g is not None
            assert each_near(g, squares.numpy(), F32_SOLVED)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_statistics_of_experts_are_those_of_their_tokens(name: str, tmp_path_factory: Any) -> None:
    model, layer = opened(families.model(tmp_path_factory.getbasetemp(), name)), 1
    with model.loaded(OUTSIDE), torch.no_grad():
        hidden, calls = model.begin(IDS)
    hidden = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    with model.loaded(layer):
        experts = next(module for path, module in model.model.named_modules() if path.endswith(f"{layer}.mlp.experts"))
        seen: list[Any] = []
        hook = experts.register_forward_pre_hook(lambda module, given: seen.append(given))
        with LayerStatistics(model.parameters_of(layer), moments_of_inputs) as statistics:
            for batch in (slice(0, 2), slice(2, 3)):
                model.run(layer, hidden[batch].requires_grad_(), _cut(calls[layer], batch)).sum().backward()
                statistics.next_batch()
        hook.remove()
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        found = {
            matrix: (read.count, moments)
            for matrices, read in statistics.inputs()
            for moments in read.mean()
            for matrix in matrices
        }
        for expert in range(4):
            rows = torch.cat([x[(chosen == expert).any(1)] for x, chosen, _ in seen]).detach().double()
            count, moments = found[ModelMatrix(name, expert)]
            assert count == len(rows) > 0
            assert each_near(moments.double(), shrunk(rows.T @ rows / count, count), F32_MATRIX, F32_SUM)
            g = statistics.mean_squares(ModelMatrix(name, expert), IDS.numel())
            assert g is not None and g.shape == (256,)


def test_statistics_of_experts_that_get_rows_of_zeros_are_those_of_their_tokens(tmp_path_factory: Any) -> None:
    """Llama 4 multiplies all tokens with all experts, and those that an expert does not get are zeros."""
    model, layer = opened(families.model(tmp_path_factory.getbasetemp(), "llama4")), 1
    with model.loaded(OUTSIDE), torch.no_grad():
        hidden, calls = model.begin(IDS)
    hidden, seen = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).requires_grad_(), list[Any]()

    def look(module: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: seen.append((given[0].detach(), gradient)))

    with model.loaded(layer):
        experts = next(
            module for path, module in model.model.named_modules() if path.endswith(f"{layer}.feed_forward.experts")
        )
        hook = experts.register_forward_hook(look)
        with LayerStatistics(model.parameters_of(layer), moments_of_inputs) as statistics:
            model.run(layer, hidden, calls[layer]).square().sum().backward()
        hook.remove()
        ((inputs, gradients),) = seen
        name, found = f"model.layers.{layer}.feed_forward.experts", dict[ModelMatrix, InputMoments]()
        for matrices, read in statistics.inputs():
            found |= dict.fromkeys(matrices, read)
        assert not statistics.along_rows(f"{name}.gate_up_proj")
        counts = []
        for expert, (rows, of_rows) in enumerate(
            zip(inputs.chunk(4), gradients.reshape(inputs.shape).chunk(4), strict=True)
        ):
            used = rows.any(1)
            counts.append(int(used.sum()))
            read = found[ModelMatrix(f"{name}.gate_up_proj", expert)]
            assert read.count == counts[-1] == found[ModelMatrix(f"{name}.down_proj", expert)].count
            expected = shrunk(rows.T.double() @ rows.double() / max(1, read.count), read.count)
            assert each_near(read.mean()[0].double(), expected, F32_MATRIX, F32_SUM)
            g = statistics.mean_squares(ModelMatrix(f"{name}.down_proj", expert), IDS.numel())
            assert g is not None
            assert each_near(g, of_rows[used].square().sum(0).double().numpy() / IDS.numel(), F32_MATRIX)
        assert sum(counts) == IDS.numel() and min(counts) > 0


def test_inputs_of_a_stack_are_those_of_all_its_experts() -> None:
    rows, parts = torch.randn(60, 9, generator=torch.Generator().manual_seed(5)), [slice(0, 6), slice(6, 9)]
    whole, pooled = InputMoments(parts), InputMoments(parts)
    whole.add(rows)
    for some in rows.split([20, 3, 37]):
        moments = InputMoments(parts)
        moments.add(some)
        pooled.include(moments)
    assert pooled.count == whole.count == 60
    for found, expected in zip(pooled.mean(), whole.mean(), strict=True):
        assert each_near(found, expected, F32_SUM)


def _cut(call: LayerCall, batch: slice) -> LayerCall:
    """The call of a layer for fewer windows."""
    windows = len(IDS)

    def of(value: Any) -> Any:
        return value[batch] if isinstance(value, torch.Tensor) and value.shape[0] == windows else value

    return LayerCall(tuple(map(of, call.args)), {name: of(value) for name, value in call.kwargs.items()})


def test_moments_of_many_inputs_are_blocks_of_the_whole() -> None:
    parts = [slice(0, 4), slice(4, 8), slice(8, 9)]
    for count in (50, 6):
        rows = torch.randn(count, 9, generator=torch.Generator().manual_seed(4))
        moments = InputMoments(parts)
        for batch in rows.split([1, 3, count - 4]):
            moments.add(batch)
        expected = shrunk(rows.T.double() @ rows.double() / count, count)
        for part, block in zip(parts, moments.mean(), strict=True):
            assert each_near(block.double(), expected[part, part], F32_SUM)


@pytest.mark.parametrize(("rank", "expected"), [(96, {0.1, 0.3, 1.0}), (8, {1e-4, 3e-4, 0.001, 0.003})])
def test_the_damping_suits_what_the_sample_shows(rank: int, expected: set[float]) -> None:
    """Few inputs without correlations show some by chance; those that lie in few directions show theirs at once."""
    random = torch.Generator().manual_seed(7)
    directions = torch.linalg.qr(torch.randn(96, 96, generator=random))[0][:rank]
    moments = InputMoments([slice(0, 96)])
    for _ in range(3):
        rows = torch.randn(64, rank, generator=random) @ directions
        moments.add(rows + 0.01 * torch.randn(64, 96, generator=random))
    assert moments.damping() in expected


@pytest.mark.parametrize(("noise", "sharpened"), [(0.0, True), (0.3, False)])
def test_the_damping_is_chosen_by_inputs_that_are_left_out(noise: float, sharpened: bool) -> None:
    """A dense reference: the cost of the third batch by the moments of the others, in float64."""
    random = torch.Generator().manual_seed(8)
    rows = torch.randn(200, 3, generator=random) @ torch.randn(3, 24, generator=random)
    rows += (noise or 0.01) * torch.randn(200, 24, generator=random)
    moments = InputMoments([slice(0, 24)])
    for batch in rows.split(40):
        moments.add(batch)
    seen, others = torch.cat([rows[:80], rows[120:]]).double(), rows[80:120].double()
    known, costs = seen.T @ seen / 160, {}
    for share in DAMPINGS:
        added = float(share * known.diagonal().mean())
        damped = known + added * torch.eye(24)
        if share >= 0.01 or damped.det() ** (1 / 24) <= 16 * added:
            costs[share] = float(damped.logdet() / 24 + (others @ damped.inverse() * others).sum().log())
    best = min(costs, key=costs.__getitem__)
    assert moments.damping() == (best if costs[best] < costs[0.01] - math.log(1.15) else 0.01)
    assert (moments.damping() < 0.01) is sharpened


def test_what_is_tied_and_what_is_changed_is_known(tmp_path_factory: Any) -> None:
    base = tmp_path_factory.getbasetemp()
    assert opened(families.model(base, "llama-tied")).tied == "model.embed_tokens.weight"
    assert opened(families.model(base, "llama")).tied is None
    mixtral = opened(families.model(base, "mixtral"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mixtral.places_of(name) == (MatrixPlace(ModelMatrix(name), slice(None)),)
    assert mixtral.places_of("model.layers.0.input_layernorm.weight") == ()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_matrices_of_experts_are_where_the_model_says(name: str, tmp_path_factory: Any) -> None:
    folder = families.model(tmp_path_factory.getbasetemp(), name)
    model, tensors = opened(folder), read_all(folder)
    for layer in range(model.layers):
        with model.loaded(layer):
            parameters = model.parameters_of(layer)
            experts = [tensor.name for tensor in model.tensors_of(layer) if ".experts." in tensor.name]
            assert len(experts) == 12
            for expert in experts:
                (place,) = model.places_of(expert)
                assert place is not None
                found = place.of(parameters[place.matrix.parameter])
                np.testing.assert_array_equal(found.numpy(), as_float32(tensors[expert]))


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
    with pytest.raises(SourceError, match=r"config.json describes \d{10} weights, and the checkpoint has \d+; "):
        opened(tmp_path / "bare")


def test_models_without_a_list_of_decoder_layers_are_refused(tmp_path: Path, tmp_path_factory: Any) -> None:
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(SourceError, match="is not a causal language model"):
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
