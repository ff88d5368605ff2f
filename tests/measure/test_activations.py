"""Collecting activations: the inputs of every matrix, in every family, under the names of the checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
from helpers import as_float32, read_all

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pqweights.checkpoint.source import open_local
from pqweights.measure.activations import Activations, Place, Sampling, TextWindow, WeightPlace, places, watch
from pqweights.measure.scale_search import Inputs
from pqweights.planning.plan import QUANTIZE
from pqweights.planning.recipe import load_recipe
from pqweights.quantizing import Quantize

Seen = dict[Place, Inputs]
IDS = np.random.default_rng(3).integers(0, 490, (3, 24))
WINDOWS = [TextWindow(ids, held_back) for ids, held_back in zip(IDS, (False, True, False), strict=True)]
TOKENS, TOKENS_HELD_BACK = 48, 24
ALL = (TOKENS, TOKENS_HELD_BACK)  # the sample takes all rows, and so keeps their order
# Weights that checkpoint and model hold as [in, out].
TRANSPOSED = {"gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"), "gpt_oss": ("gate_up_proj", "down_proj")}


def watched(model: Any, wanted: set[Place], descriptor: int) -> Activations:
    found = Activations(Sampling(wanted=wanted, rows=ALL, descriptor=descriptor))
    watch(model, WINDOWS, found, progress=lambda done, total: None)
    return found


def run(
    tmp_path: Path, base: Path, name: str
) -> tuple[Any, dict[str, npt.NDArray[np.float32]], dict[str, WeightPlace], Seen]:
    """Watch a model: return it, the weights that q5 quantizes, their places in the model, and the inputs seen there."""
    folder = families.model(base, name)
    model = families.load(folder, families.FAMILIES[name], experts_implementation="eager")
    planned = Quantize(recipe=load_recipe("q5")).plan(open_local(folder))
    stored = read_all(folder)
    weights = {t.name: as_float32(stored[t.name]) for t in planned if t.action == QUANTIZE}
    where = places(model, list(weights))
    wanted = {(found.place[0], number) for found in where.values() for number in (None, *range(4))}
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        activations = watched(model, wanted, file.fileno())
        seen = {place: found for place in wanted if (found := activations.inputs(place)) is not None}
        assert activations._records.keys() <= wanted
    return model, weights, where, seen


@pytest.mark.parametrize("name", families.FAMILIES)
def test_inputs_of_every_multiplied_weight_are_collected(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, weights, where, seen = run(tmp_path, tmp_path_factory.getbasetemp(), name)
    unseen = set()
    for weight, values in weights.items():
        (parameter, expert), transposed = where[weight]
        numbers = range(len(values)) if values.ndim == 3 else [expert]
        entered = [seen[parameter, number] for number in numbers if (parameter, number) in seen]
        if not entered:
            unseen.add(weight)
        for found in entered:
            along_rows = found.along_rows != transposed
            assert along_rows == (not weight.endswith(TRANSPOSED.get(name, ("-",)))), weight
            assert found.rms.shape == (values.shape[-1 if along_rows else -2],)
            assert set(found.windows.tolist()) <= {1}
            assert found.rows.shape == (found.tokens, len(found.rms))
            assert np.allclose(np.sqrt((found.rows.astype(np.float64) ** 2).mean(axis=0)), found.rms, rtol=1e-5)
            if "expert" not in weight:
                assert (len(found.rows), len(found.held_back)) == ALL
    # Embeddings are looked up, and multiplied only if tied. With few tokens, some experts may get none.
    unused = {weight for weight in unseen if "experts" not in weight}
    tied = name == "gpt2" or model.config.get_text_config().tie_word_embeddings
    assert all("embed_tokens" in weight or "wpe" in weight for weight in unused)
    assert len(unused) == (1 if name == "gpt2" or not tied else 0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3_5", "gpt2"])
def test_collected_rows_are_the_inputs_of_the_layer(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch

    model, weights, where, seen = run(tmp_path, tmp_path_factory.getbasetemp(), name)
    entered: dict[str, list[npt.NDArray[np.float32]]] = {}
    for module_name, module in model.named_modules():
        if hasattr(module, "weight") and module.weight.ndim == 2 and not isinstance(module, torch.nn.Embedding):
            module.register_forward_pre_hook(
                lambda module, args, key=f"{module_name}.weight": entered.setdefault(key, []).append(
                    args[0].reshape(-1, args[0].shape[-1]).numpy()
                )
            )
    with torch.inference_mode():
        for ids in IDS:
            model(torch.from_numpy(ids)[None])
    checked = 0
    for weight in weights:
        place = where[weight].place
        if place[0] in entered:
            checked += 1
            first, held_back, last = entered[place[0]]
            assert np.array_equal(seen[place].rows, np.concatenate([first, last])), weight
            assert np.array_equal(seen[place].held_back, held_back), weight
    assert checked >= 9


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_inputs_of_single_experts_are_attributed_correctly(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The input of an expert's down projection is computed from those of its gate and up projections."""
    _, weights, where, seen = run(tmp_path, tmp_path_factory.getbasetemp(), name)
    gate_name, up_name, down_name = ("gate_proj", "up_proj", "down_proj") if name == "qwen3_moe" else ("w1", "w3", "w2")
    checked = 0
    for weight in weights:
        if ".experts." not in weight or not weight.endswith(f"{gate_name}.weight"):
            continue
        names = [weight.replace(gate_name, other) for other in (gate_name, up_name, down_name)]
        found = [seen.get(where[each].place) for each in names]
        if found[0] is None or not found[0].tokens:
            continue
        gate, up, down = found
        assert gate is up
        assert down is not None
        assert gate.tokens == down.tokens
        x = gate.rows.astype(np.float64)
        of_gate, of_up = (x @ weights[each].T for each in names[:2])
        assert np.allclose(of_gate / (1 + np.exp(-of_gate)) * of_up, down.rows, rtol=1e-3, atol=1e-4)
        checked += 1
    assert checked >= 4


def test_every_row_is_sampled_with_the_same_probability(tmp_path: Path) -> None:
    from pqweights.measure.activations import _Sample

    kept = np.zeros(1000)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        for seed in range(200):
            sample = _Sample(file.fileno(), offset=40, capacity=50, columns=3, seed=seed)
            rows = np.repeat(np.arange(1000, dtype=np.float32)[:, None], 3, axis=1)
            for at in range(0, 1000, 170):
                sample.add(rows[at : at + 170], at)
            found = sample.read()
            assert found.shape == (50, 3)
            assert (found == found[:, :1]).all()
            kept[found[:, 0].astype(int)] += 1
            assert np.array_equal(sample.windows, found[:, 0].astype(int) // 170 * 170)
    assert kept.sum() == 200 * 50
    for part in np.split(kept, 10):
        assert 0.85 < part.mean() / 10 < 1.15


def test_every_kind_of_product_is_recognised(tmp_path: Path) -> None:
    """Positional and keyword arguments, matrices and stacks, plain and transposed."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(500, 8)
            for name in "abcde":
                setattr(self, name, torch.nn.Parameter(torch.randn(8, 8)))
            self.stack = torch.nn.Parameter(torch.randn(3, 8, 4))
            self.single = torch.nn.Parameter(torch.randn(3, 4, 8))
            self.config: dict[str, object] = {}

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return self.embed

        def can_generate(self) -> bool:
            return False

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)[0]
            torch.nn.functional.linear(input=x, weight=self.a)
            x @ self.b
            torch.matmul(x, other=self.c.T)
            torch.addmm(torch.zeros(8), x, self.d)
            torch.addmm(input=torch.zeros(8), mat1=x, mat2=self.e)
            torch.bmm(x.expand(3, *x.shape), self.stack)
            return torch.nn.functional.linear(x, self.single[torch.tensor(2)])

    model = Layer()
    wanted = {(name, None) for name in "abcde"} | {(name, n) for name in ("stack", "single") for n in range(3)}
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        seen = watched(model, wanted, file.fileno())
        found = {place: seen.inputs(place) for place in wanted}
    entered = model.embed(torch.from_numpy(IDS[[0, 2]].reshape(-1))).detach().numpy()
    for place, inputs in found.items():
        if place in (("single", 0), ("single", 1)):
            assert inputs is None
            continue
        assert inputs is not None, place
        assert np.array_equal(inputs.rows, entered), place
        assert inputs.along_rows == (place[0] in ("a", "c", "single")), place
