"""The inputs of weights, layer by layer: they are those that hooks record, in every family."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from closeness import F32_MATRIX, F32_SOLVED, ROUNDED_ONCE_MORE, each_near
from helpers import Array, as_float32, folder_bytes, read_all

import pqweights
from pqweights.calibrate import layer_passes, layer_statistics
from pqweights.calibrate.collecting import RowSample, VectorInputs
from pqweights.calibrate.layer_passes import LayerPasses
from pqweights.calibrate.layer_statistics import LayerStatistics
from pqweights.calibrate.layered import ModelMatrix
from pqweights.calibrate.sample import SampleOf
from pqweights.calibrate.sampled_inputs import SampledInputs, inputs_of
from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.planning.decisions import rate_planner
from pqweights.planning.inputs import importance_of, read_by
from pqweights.planning.layout import QUANTIZE
from pqweights.planning.recipe import load_recipe
from pqweights.storage import open_store

WINDOW, WINDOWS = 64, 16
IDS = np.random.default_rng(11).integers(0, 490, (WINDOWS, WINDOW))
NARROW = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
SMALL = {
    name: replace(
        families.FAMILIES[name],
        settings={**families.FAMILIES[name].settings, **NARROW, "num_key_value_heads": 1, **experts},
    )
    for name, experts in (("llama", {}), ("mixtral", EXPERTS), ("gpt_oss", EXPERTS))
}
# Weights that checkpoint and model hold as [in, out].
TRANSPOSED = {
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    **dict.fromkeys(("gpt_oss", "llama4"), ("gate_up_proj", "down_proj")),
}


@pytest.fixture(autouse=True, scope="module")
def sample() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleOf, "ids", lambda *_: torch.from_numpy(IDS))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: families.build(each, tmp_path_factory.mktemp(name) / "model") for name, each in SMALL.items()}


@contextlib.contextmanager
def run(source: Path, out: Path) -> Iterator[SampledInputs]:
    with inputs_of(source, open_local(source), open_store(out), Options(calibrate="self"), 1) as known:
        known.prepare(lambda *_: None)
        yield known


READ_TOGETHER = {"q_proj": ("q_proj", "k_proj", "v_proj"), "up_proj": ("gate_proj", "up_proj")}


def readers(name: str) -> list[str]:
    stem, dot, last = name.rpartition(".")
    return [f"{stem}{dot}{reader}" for reader in READ_TOGETHER.get(last, (last,))]


def hooked(model: Any, layers: list[str]) -> dict[str, tuple[Array, Array]]:
    """The inputs of linear layers in every window, [windows, rows, K], and the squares of the gradients of the loss at
    the outputs of each layer that reads them, its own first, [layers, windows, rows]; recorded by hooks. The labels are
    the tokens themselves.
    """
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    counts: dict[str, list[list[Any]]] = {name: [[] for _ in readers(name)] for name in layers}

    def add(own: Array, gradient: torch.Tensor) -> None:
        own += gradient[0].square().sum(-1).numpy()

    def record(module: Any, args: Any, output: Any, *, name: str, reader: int) -> None:
        if not reader:
            rows[name].append(args[0].detach()[0].numpy().copy())
        own = np.zeros(args[0].shape[1])
        counts[name][reader].append(own)
        output.register_hook(partial(add, own))

    for name in layers:
        for number, reader in enumerate(readers(name)):
            model.get_submodule(reader).register_forward_hook(partial(record, name=name, reader=number))
    for window in map(torch.from_numpy, IDS):
        logits = model(window[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits, window, reduction="sum").backward()
    return {name: (np.stack(rows[name]), np.array(counts[name])) for name in layers}


def test_moments_are_those_of_the_inputs_by_the_gradients_that_hooks_record(models, tmp_path, monkeypatch):
    """Hidden states and gradients on the disk are rounded to bfloat16."""
    labels = iter(map(torch.from_numpy, IDS))
    monkeypatch.setattr(layer_passes, "drawn", lambda probabilities, random: next(labels))
    stem = "model.layers.0."
    layers = [stem + name for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")]
    truth = hooked(families.load(models["llama"], SMALL["llama"]), [*layers, "lm_head"])
    with run(models["llama"], tmp_path / "out") as found:
        for name, (rows, of_each) in truth.items():
            counts, flat = of_each.sum(0), rows.reshape(-1, rows.shape[-1]).astype(np.float64)
            (vector,) = found.weights[f"{name}.weight"].vectors
            assert vector is not None
            moments, held_back = found.moments(vector)
            assert np.array_equal(found.moments(vector)[0], moments)
            counted = rows * np.sqrt(counts)[..., None]
            learned = np.delete(counted, np.s_[3::4], axis=0).reshape(-1, rows.shape[-1]).astype(np.float64)
            wanted = learned.T @ learned / np.delete(counts, np.s_[3::4], axis=0).sum()
            assert np.abs(moments - wanted).max() < ROUNDED_ONCE_MORE * np.abs(wanted).max()
            for reader, own in zip(readers(name), of_each, strict=True):
                importance = own.reshape(-1) @ flat**2 / own.sum()
                assert each_near(found.mean_squares(f"{reader}.weight", 0), importance, ROUNDED_ONCE_MORE)
            about = found.vectors[vector]
            assert (about.tokens, about.windows, about.held_back) == (len(learned), WINDOWS // 4, len(held_back))
            distances = np.abs(held_back[:, None] - counted[3::4].reshape(1, -1, rows.shape[-1])).max(axis=2)
            assert distances.min(axis=1).max() < ROUNDED_ONCE_MORE * np.abs(counted).max()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_reads_the_gradients_at_its_rows_and_what_a_head_that_is_tied_to_it_reads(
    tied, tmp_path, monkeypatch
):
    labels = [torch.from_numpy(ids) for ids in IDS]
    monkeypatch.setattr(layer_passes, "drawn", lambda probabilities, random: labels[drawn.pop(0)])
    drawn = [*range(WINDOWS)]
    family = replace(SMALL["llama"], settings=SMALL["llama"].settings | {"tie_word_embeddings": tied})
    folder = families.build(family, tmp_path / "model")
    model = families.load(folder, family)
    read, counts = [], []

    def look_up(module: Any, args: Any, output: Any) -> Any:
        def add(gradient: torch.Tensor) -> None:
            read[-1].append(gradient[0].double())

        rows = output.detach().requires_grad_()
        rows.register_hook(add)
        return rows

    model.get_input_embeddings().register_forward_hook(look_up)
    model.lm_head.register_forward_pre_hook(lambda module, args: read.append([args[0][0].detach().double()]))
    for window in labels:
        logits = model(window[None], use_cache=False).logits[0]
        logits.register_hook(lambda gradient: counts.append(gradient.square().sum(-1).double()))
        torch.nn.functional.cross_entropy(logits, window, reduction="sum").backward()
    rows, counts = torch.stack([torch.stack(of) for of in read]), torch.stack(counts)
    rows[:, 0] *= counts.sqrt()[..., None]
    used = rows if tied else rows[:, 1:]
    total = counts.numel() + (counts.sum() if tied else 0)
    learned = torch.from_numpy(np.delete(used.numpy(), np.s_[3::4], axis=0)).flatten(0, 2)
    of_learned = 3 * WINDOWS // 4 * WINDOW + (np.delete(counts.numpy(), np.s_[3::4], axis=0).sum() if tied else 0)
    with run(folder, tmp_path / "out") as found:
        name = "model.embed_tokens.weight"
        (vector,) = found.weights[name].vectors
        moments, held_back = found.moments(vector)
        wanted = learned.T @ learned / of_learned
        assert np.abs(moments - wanted.numpy()).max() < ROUNDED_ONCE_MORE * wanted.abs().max()
        importance = used.flatten(0, 2).square().sum(0) / total
        assert each_near(found.mean_squares(name, 0), importance, ROUNDED_ONCE_MORE)
        distances = np.abs(held_back[:, None] - used[3::4].reshape(1, -1, rows.shape[-1]).numpy()).max(axis=2)
        assert distances.min(axis=1).max() < ROUNDED_ONCE_MORE * used.abs().max()
        assert len(held_back) == used[3::4].numel() // rows.shape[-1]
        assert found.weights.keys() >= ({name} if tied else {name, "lm_head.weight"})


def test_moments_do_not_depend_on_what_was_asked_before(tmp_path_factory, tmp_path):
    """GPT-2 looks up positions beside its embedding, which is also the head: one pass shows only part of the latter."""
    folder = families.model(tmp_path_factory.getbasetemp(), "gpt2")
    found = []
    for order in (("wte", "wpe"), ("wpe", "wte")):
        with run(folder, tmp_path / "out") as known:
            names = [next(name for name in known.weights if f"{part}." in name) for part in order]
            asked = {name: known.moments(known.weights[name].vectors[0])[0].copy() for name in names}
        found.append(asked)
    assert len(found[0]) == 2
    for name, moments in found[0].items():
        assert np.array_equal(found[1][name], moments), name


def test_matrices_that_read_the_same_share_a_vector(models, tmp_path):
    by_vector: dict[Any, set[str]] = {}
    with run(models["llama"], tmp_path / "out") as found:
        for name, weight in found.weights.items():
            by_vector.setdefault(weight.vectors, set()).add(name.split(".")[-2])
        assert len(found.vectors) == len(by_vector) == 6
    shared = {frozenset(names) for names in by_vector.values()}
    assert {frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})} <= shared


def test_experts_have_the_moments_of_their_own_tokens(models, tmp_path, monkeypatch):
    """The input of an expert's down projection is computed from those of its gate and up projections."""
    monkeypatch.setattr(layer_statistics, "counts_of", lambda gradients: torch.ones(len(gradients)))
    stored = read_all(models["mixtral"])
    with run(models["mixtral"], tmp_path / "out") as found:
        tokens = []
        for expert in range(3):
            names = [f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")]
            (first,), (other,), (down,) = (found.weights[name].vectors for name in names)
            assert first == other != down and first is not None and down is not None
            tokens.append(found.vectors[first].tokens + found.vectors[first].held_back)
            x, read = found.moments(first)[1].astype(np.float64), found.moments(down)[1]
            gate, up = (x @ as_float32(stored[name]).T for name in names[:2])
            assert each_near(gate / (1 + np.exp(-gate)) * up, read, F32_SOLVED, F32_MATRIX)
        assert sum(tokens) == 2 * IDS.size and len(set(tokens)) > 1


def test_an_export_that_was_interrupted_goes_on_and_a_finished_one_runs_no_model(models, tmp_path, monkeypatch):
    master, whole, broken = (tmp_path / name for name in ("master", "whole", "broken"))
    pqweights.quantize(models["llama"], master, "q8")
    asked: dict[str, Any] = {"target": "vllm", "calibrate": "self", "threads": 1, "max_shard_size": "100kB"}
    pqweights.export(master, whole, **asked)
    forward, computed = LayerPasses.forward, []

    def interrupted(self: LayerPasses, layer: int, *arguments: Any) -> None:
        if computed:  # the moments of the layer, after its mean squares
            raise KeyboardInterrupt
        counted(self, layer, *arguments)

    def counted(self: LayerPasses, layer: int, *arguments: Any) -> None:
        computed.append(layer)
        forward(self, layer, *arguments)

    monkeypatch.setattr(LayerPasses, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pqweights.export(master, broken, **asked)
    assert computed == [0] and (tmp_path / ".broken.calibration").exists()
    monkeypatch.setattr(LayerPasses, "forward", counted)
    pqweights.export(master, broken, **asked)
    assert computed == [0, 0] and folder_bytes(broken) == folder_bytes(whole)
    assert pqweights.export(master, broken, **asked).already_done and computed == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "master", "whole"]


def test_inputs_at_whose_outputs_no_gradient_arrives_count_for_nothing():
    """If none arrives at any, mean squares and moments are zeros, which weigh nothing; without gradients all count."""
    rows = torch.randn(8, 4)
    some, none, all_alike = (VectorInputs(4, held_back=0, with_moments=True) for _ in range(3))
    for inputs, counts in ((some, torch.eye(8)[0] * 1e-30), (none, torch.zeros(8)), (all_alike, torch.ones(8))):
        inputs.add(rows, counts)
    assert each_near(some.mean_squares(), rows[0].square(), F32_MATRIX)
    assert each_near(some.moments(), torch.outer(rows[0], rows[0]), F32_MATRIX)
    assert not none.mean_squares().any() and not none.moments().any()
    assert each_near(all_alike.mean_squares(), rows.square().mean(0), F32_MATRIX)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_inputs_of_every_multiplied_weight_are_seen(name, tmp_path_factory, tmp_path):
    """Of what an embedding looks up, the gradients are."""
    folder = families.model(tmp_path_factory.getbasetemp(), name)
    checkpoint = open_local(folder)
    planned = [t for t in rate_planner(checkpoint, load_recipe("q5")).planned({}) if t.action == QUANTIZE]
    with run(folder, tmp_path / "out") as found:
        for tensor in planned:
            reads = found.weights[tensor.name]
            assert reads.transposed == tensor.name.endswith(TRANSPOSED.get(name, ("-",))), tensor.name
            assert len(reads.vectors) == (tensor.shape[0] if len(tensor.shape) == 3 else 1)
            size = tensor.shape[-2 if reads.transposed else -1]
            assert {found.vectors[vector].size for vector in reads.vectors if vector is not None} == {size}


def test_every_row_is_sampled_with_the_same_probability():
    kept = np.zeros(1000)
    for seed in range(200):
        sample = RowSample(50, 3)
        sample._random = np.random.default_rng(seed)
        rows = np.repeat(np.arange(1000, dtype=np.float32)[:, None], 3, axis=1)
        for at in range(0, 1000, 170):
            sample.add(rows[at : at + 170], at)
        assert (sample.rows == sample.rows[:, :1]).all()
        kept[sample.rows[:, 0].astype(int)] += 1
        assert np.array_equal(sample.windows, sample.rows[:, 0].astype(int) // 170 * 170)
    assert kept.sum() == 200 * 50
    for part in np.split(kept, 10):
        assert 0.85 < part.mean() / 10 < 1.15


class Kept:
    """All inputs of a vector."""

    def __init__(self, size: int) -> None:
        self.rows: list[Array] = []
        self.counts: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        self.counts.append(counts)
        self.rows.append(rows.detach().numpy().copy())


def test_every_kind_of_product_is_recognised_with_the_gradients_at_its_outputs():
    """Positional and keyword arguments, matrices and stacks, plain and transposed; of a view of a stack, one matrix."""
    torch.manual_seed(0)
    named = {name: torch.nn.Parameter(torch.randn(8, 8)) for name in "abcde"}
    named |= {"stack": torch.nn.Parameter(torch.randn(3, 8, 4)), "single": torch.nn.Parameter(torch.randn(3, 4, 8))}
    x = torch.randn(6, 8, requires_grad=True)
    with LayerStatistics(named, Kept) as seen:
        products = {
            ("a", 0): torch.nn.functional.linear(input=x, weight=named["a"]),
            ("b", 0): x @ named["b"],
            ("c", 0): torch.matmul(x, other=named["c"].T),
            ("d", 0): torch.addmm(torch.zeros(8), x, named["d"]),
            ("e", 0): torch.addmm(input=torch.zeros(8), mat1=x, mat2=named["e"]),
            ("single", 2): torch.nn.functional.linear(x, named["single"][torch.tensor(2)]),
        }
        stacked = torch.bmm(x.expand(3, *x.shape), named["stack"])
        outputs = [*products.values(), stacked]
        weights = [torch.randn_like(output) for output in outputs]
        sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
        seen.next_batch()
    gradients = dict(zip(products, weights, strict=False)) | {("stack", n): weights[-1][n] for n in range(3)}
    assert seen.products.keys() == {ModelMatrix(*matrix) for matrix in gradients}
    for matrix, gradient in gradients.items():
        product = seen.products[ModelMatrix(*matrix)]
        assert product.along_rows == (matrix[0] in ("a", "c", "single"))
        assert each_near(product.squares.float(), gradient.square().sum(0), F32_MATRIX)
        assert np.array_equal(np.concatenate(seen.collected[product.vector].rows), x.detach().numpy())


def test_a_token_that_goes_to_another_expert_when_moments_are_computed_changes_the_counts_of_these_experts_only():
    """Rounding may do that. Their inputs count alike then, and those of an expert that had none before for nothing."""
    named = {name: torch.nn.Parameter(torch.randn(4, 4)) for name in ("shared", "first", "second", "third")}
    rows = torch.randn(6, 4, requires_grad=True)

    def computed(seen: LayerStatistics[Any], **rows_of: slice) -> dict[str, list[float]]:
        with seen:
            for _ in range(2):
                products = [torch.nn.functional.linear(rows[own].clone(), named[name]) for name, own in rows_of.items()]
                torch.cat([product * n for n, product in enumerate(products, 1)]).sum().backward()
                seen.next_batch()
        read = {name: seen.collected_of(ModelMatrix(name, 0)) for name in rows_of}
        return {name: torch.cat(kept.counts).tolist() for name, kept in read.items() if kept is not None}

    before = LayerStatistics(named, Kept)
    known = computed(before, shared=slice(6), first=slice(3), second=slice(3, 6))
    assert known == {"shared": [4.0] * 12, "first": [16.0] * 6, "second": [36.0] * 6}
    again = LayerStatistics(named, Kept, known_counts=before.counts)
    moved = computed(again, third=slice(1), second=slice(2, 6), shared=slice(6), first=slice(1, 2))
    assert moved == {"third": [0.0] * 2, "second": [36.0] * 8, "shared": [4.0] * 12, "first": [16.0] * 2}


def test_the_importance_of_a_matrix_with_rows_of_several_weights_is_their_mean():
    """Each has its own, although all read the same inputs."""

    @dataclass
    class Weight:
        name: str
        shape: tuple[int, ...] = (4, 8)

    @dataclass
    class Fused:
        sources: tuple[Any, ...]
        name: str = "fused"
        transposed: bool = False

        def runs_of_matrix(self, number: int) -> list[Any]:
            return [(source, range(4)) for source in self.sources]

    class Inputs:
        def mean_squares(self, name: str, matrix: int) -> Array:
            return np.full(8, {"q": 1, "k": 3}[name] + matrix, dtype=np.float32)

    query, key = Weight("q"), Weight("k")
    assert read_by(Fused((query, key)), 0) == [("q", 0), ("k", 0)]
    assert importance_of(Fused((query, key)), 0, Inputs()).tolist() == [2.0] * 8
    assert importance_of(query, 1, Inputs()).tolist() == [2.0] * 8
