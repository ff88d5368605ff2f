"""Collecting activations: the inputs of every matrix, in every family, under the names of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
from helpers import as_float32, gaussian, read_all

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pqweights.checkpoint.source import open_local
from pqweights.planning.plan import QUANTIZE
from pqweights.planning.recipe import load_recipe
from pqweights.quality.activations import MatrixId, TextWindow, WeightLocation, locate, watch
from pqweights.quality.collecting import Collector, Sample, VectorInputs
from pqweights.rewrite.quantizing import Quantize

IDS = np.random.default_rng(3).integers(0, 490, (3, 24))
WINDOWS = [TextWindow(ids, held_back) for ids, held_back in zip(IDS, (False, True, False), strict=True)]
TOKENS, TOKENS_HELD_BACK = 48, 24
# Weights that checkpoint and model hold as [in, out].
TRANSPOSED = {
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    **dict.fromkeys(("gpt_oss", "llama4"), ("gate_up_proj", "down_proj")),
}


class RecordedRows:
    """along_rows: by matrix, whether the model stores the matrix as [N, K]."""

    def __init__(self) -> None:
        self.along_rows: dict[MatrixId, bool] = {}
        self._rows: dict[tuple[MatrixId, bool], list[npt.NDArray[np.float32]]] = {}

    def add(self, matrix_id: MatrixId, values: Any, *, along_rows: bool, window: int, held_back: bool) -> None:
        self.along_rows[matrix_id] = along_rows
        rows = values.detach().reshape(-1, values.shape[-1]).float().numpy().copy()
        self._rows.setdefault((matrix_id, held_back), []).append(rows)

    def rows(self, matrix_id: MatrixId, *, held_back: bool) -> npt.NDArray[np.float32]:
        """All rows of a matrix, [rows, K]."""
        return np.concatenate(self._rows[matrix_id, held_back])


def watched(model: Any) -> RecordedRows:
    seen = RecordedRows()
    watch(model, WINDOWS, seen, source=Path("model"))
    return seen


def run(
    base: Path, name: str
) -> tuple[Any, dict[str, npt.NDArray[np.float32]], dict[str, WeightLocation], RecordedRows]:
    """Watch a model: return it, the weights that q5 quantizes, where it has them, and the inputs seen there."""
    folder = families.model(base, name)
    model = families.load(folder, families.FAMILIES[name], experts_implementation="eager")
    planned = Quantize(recipe=load_recipe("q5")).plan(open_local(folder))
    stored = read_all(folder)
    weights = {t.name: as_float32(stored[t.name]) for t in planned if t.action == QUANTIZE}
    return model, weights, locate(model, list(weights)), watched(model)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_inputs_of_every_multiplied_weight_are_seen(name, tmp_path_factory):
    model, weights, where, seen = run(tmp_path_factory.getbasetemp(), name)
    unseen = set()
    for weight, values in weights.items():
        (parameter, expert), transposed = where[weight]
        numbers = range(len(values)) if values.ndim == 3 else [expert]
        entered = [(parameter, number) for number in numbers if (parameter, number) in seen.along_rows]
        if not entered:
            unseen.add(weight)
        for matrix_id in entered:
            along_rows = seen.along_rows[matrix_id] != transposed
            assert along_rows == (not weight.endswith(TRANSPOSED.get(name, ("-",)))), weight
            if "expert" not in weight:
                rows = [seen.rows(matrix_id, held_back=held_back) for held_back in (False, True)]
                size = values.shape[-1 if along_rows else -2]
                assert [found.shape for found in rows] == [(TOKENS, size), (TOKENS_HELD_BACK, size)]
    # Embeddings are looked up, and multiplied only if tied. With few tokens, some experts may get none.
    unused = {weight for weight in unseen if "experts" not in weight}
    tied = name == "gpt2" or model.config.get_text_config().tie_word_embeddings
    assert all("embed_tokens" in weight or "wpe" in weight for weight in unused)
    assert len(unused) == (1 if name == "gpt2" or not tied else 0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3_5", "gpt2"])
def test_collected_rows_are_the_inputs_of_the_layer(name, tmp_path_factory):
    import torch

    model, weights, where, seen = run(tmp_path_factory.getbasetemp(), name)
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
        matrix_id = where[weight].matrix_id
        if matrix_id[0] in entered:
            checked += 1
            first, held_back, last = entered[matrix_id[0]]
            assert np.array_equal(seen.rows(matrix_id, held_back=False), np.concatenate([first, last])), weight
            assert np.array_equal(seen.rows(matrix_id, held_back=True), held_back), weight
    assert checked >= 9


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_inputs_of_single_experts_are_attributed_correctly(name, tmp_path_factory):
    """The input of an expert's down projection is computed from those of its gate and up projections."""
    _, weights, where, seen = run(tmp_path_factory.getbasetemp(), name)
    gate_name, up_name, down_name = ("gate_proj", "up_proj", "down_proj") if name == "qwen3_moe" else ("w1", "w3", "w2")
    checked = 0
    for weight in weights:
        if ".experts." not in weight or not weight.endswith(f"{gate_name}.weight"):
            continue
        names = [weight.replace(gate_name, other) for other in (gate_name, up_name, down_name)]
        at = [where[part].matrix_id for part in names]
        if at[0] not in seen.along_rows:
            continue
        x, down = (seen.rows(matrix_id, held_back=False).astype(np.float64) for matrix_id in (at[0], at[2]))
        assert at[0] == at[1]
        of_gate, of_up = (x @ weights[part].T for part in names[:2])
        assert np.allclose(of_gate / (1 + np.exp(-of_gate)) * of_up, down, rtol=1e-3, atol=1e-4)
        checked += 1
    assert checked >= 4


def test_every_row_is_sampled_with_the_same_probability():
    kept = np.zeros(1000)
    for seed in range(200):
        sample = Sample(np.empty((50, 3), np.float32), seed)
        rows = np.repeat(np.arange(1000, dtype=np.float32)[:, None], 3, axis=1)
        for at in range(0, 1000, 170):
            sample.add(rows[at : at + 170], at)
        assert (sample.rows == sample.rows[:, :1]).all()
        kept[sample.rows[:, 0].astype(int)] += 1
        assert np.array_equal(sample.windows, sample.rows[:, 0].astype(int) // 170 * 170)
    assert kept.sum() == 200 * 50
    for part in np.split(kept, 10):
        assert 0.85 < part.mean() / 10 < 1.15


def test_everything_is_collected_in_one_pass():
    """Moments, mean squares and rows, for searching and held back, of the vector of one matrix."""
    import torch

    vector = VectorInputs(3, np.empty((80, 8), np.float32), np.empty((80, 8), np.float32), with_moments=True)
    collected = Collector({("w", None): vector})
    values = gaussian(4, 20, 8, scale=1)
    for window, rows in enumerate(values):
        for matrix_id in (("w", None), ("other", None)):
            given = torch.from_numpy(rows)
            collected.add(matrix_id, given, along_rows=True, window=window, held_back=window == 3)
    searched, inputs = values[:3].reshape(-1, 8), vector.inputs()
    assert inputs is not None and inputs.tokens == 60 and vector.about.windows == 1
    assert np.array_equal(inputs.rows, searched) and np.array_equal(inputs.held_back, values[3])
    assert np.allclose(inputs.rms, np.sqrt((searched.astype(np.float64) ** 2).mean(axis=0)))
    assert np.allclose(vector.moments()[0], searched.T @ searched / 60, atol=1e-5)


def test_every_kind_of_product_is_recognised():
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
    seen = watched(model)
    wanted = {(name, None) for name in "abcde"} | {("stack", n) for n in range(3)} | {("single", 2)}
    assert seen.along_rows.keys() == wanted
    entered = model.embed(torch.from_numpy(IDS[[0, 2]].reshape(-1))).detach().numpy()
    for matrix_id, along_rows in seen.along_rows.items():
        assert np.array_equal(seen.rows(matrix_id, held_back=False), entered), matrix_id
        assert along_rows == (matrix_id[0] in ("a", "c", "single")), matrix_id
