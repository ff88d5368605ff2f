"""States of packed models through torch.save and torch.load, which by default takes only what is checked."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from commands import raises
from snippets import run_snippet
from test_packed import output
from test_packed_columns import master_of_columns
from test_transformers import scaled_master

import pqweights
from pqweights.errors import MasterError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import torch  # noqa: E402

from pqweights.runtime.loading.packed import PackedTensor, rebuild  # noqa: E402

MASTERS = ["llama", "llama-tied", "qwen3_moe", "gpt2", "scaled", "trellis", "columns of llama", "columns of gpt_oss"]


@pytest.fixture(scope="module")
def folder_of(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Masters with weights of every kind that stays packed."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "master"
            if name == "scaled":
                scaled_master(families.master(base, "llama"), out)
            elif name == "trellis":
                pqweights.quantize(families.model(base, "llama"), out, "t3")
            elif name.startswith("columns of "):
                out = master_of_columns(base, name.removeprefix("columns of "))[0]
            else:
                out = families.master(base, name)
            made[name] = out
        return made[name]

    return folder


def again(value: Any, **options: Any) -> Any:
    """Save and load with torch's defaults."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


@pytest.mark.filterwarnings("ignore::pqweights.errors.PqweightsWarning")
@pytest.mark.parametrize("name", MASTERS)
def test_a_state_goes_through_torch_save_and_load(name: str, folder_of: Callable[[str], Path]) -> None:
    model, other = (pqweights.load_model(folder_of(name), packed=True) for _ in range(2))
    loaded = again(model.state_dict())
    assert any(isinstance(value, PackedTensor) for value in loaded.values())
    for key, value in model.state_dict().items():
        one = loaded[key]
        assert type(one) is type(value) and (one.shape, one.dtype) == (value.shape, value.dtype)
        if isinstance(value, PackedTensor):
            assert one.stored_bytes == value.stored_bytes
            one, value = one.decode(), value.decode()
        assert torch.equal(one, value), key
    for value in other.parameters():
        value.mul_(2) if isinstance(value, PackedTensor) else value.data.zero_()
    other.load_state_dict(loaded)
    assert torch.equal(output(other), output(model))


@pytest.mark.filterwarnings("ignore::pqweights.errors.PqweightsWarning")
def test_parameters_stay_parameters_and_factors_stay(folder_of: Callable[[str], Path]) -> None:
    model = pqweights.load_model(folder_of("scaled"), packed=True)
    model.lm_head.weight.mul_(0.5)
    head = again(dict(model.named_parameters()))["lm_head.weight"]
    assert isinstance(head, torch.nn.Parameter) and head.requires_grad == model.lm_head.weight.requires_grad
    assert torch.equal(head.decode(), model.lm_head.weight.decode())


def test_tied_weights_and_stacks_are_saved_once(folder_of: Callable[[str], Path]) -> None:
    for name in ("llama-tied", "qwen3_moe", "columns of gpt_oss"):
        model, file = pqweights.load_model(folder_of(name), packed=True), io.BytesIO()
        torch.save(model.state_dict(), file)
        stored = {id(p): p.stored_bytes if isinstance(p, PackedTensor) else p.nbytes for p in model.parameters()}
        assert len(file.getvalue()) < 1.1 * sum(stored.values()) + 200_000


def test_it_is_enough_to_import_the_module_that_loads(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = pqweights.load_model(folder_of("llama"), packed=True)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    code = f"""
import torch, pqweights.runtime.loading.packed
assert len(torch.load("state.pt", mmap=True)) == {len(model.state_dict())}
"""
    assert run_snippet(code, tmp_path, tmp_path / "log") == 0, (tmp_path / "log").read_text()


Change = Callable[[dict[str, Any]], object]


def resized(size: int) -> Change:
    """Cut, or enlarge with zeros, the first stored tensor of some rows."""

    def change(rows: dict[str, Any]) -> None:
        part = rows["parts"][0]
        new = torch.zeros(len(part) + size, *part.shape[1:], dtype=part.dtype)
        new[: len(part)] = part[: len(new)]
        rows["parts"][0] = new

    return change


def set_part(number: int, make: Callable[[Any], Any]) -> Change:
    def change(rows: dict[str, Any]) -> None:
        rows["parts"][number] = make(rows["parts"][number])

    return change


BLOCKS: dict[str, Change] = {
    "codec: expected": lambda rows: rows.update(codec="native"),
    "codec": lambda rows: rows.update(codec="hadamard-trellis", bits=3),
    "bits": lambda rows: rows.update(bits=1e9),
    "bits: expected a number": lambda rows: rows.update(bits=float("nan")),
    "expected a plain tensor": lambda rows: rows.update(bits=rows["bits"] - 1),
    "state": lambda rows: rows.update(state={"rotation": "none"}),
    "state: expected": lambda rows: rows.update(state={"levels": 3}),
    "norm_exponent": lambda rows: rows.update(state={"norm_exponent": 10**6}),
    "rows": lambda rows: rows.update(rows=rows["rows"] + 1),
    "rows: expected": lambda rows: rows.update(rows=-1),
    "columns": lambda rows: rows.update(columns=0),
    "expected a plain": lambda rows: rows.update(columns=2**59),
    "weights": lambda rows: rows.update(weights=2**70),
    "offset": lambda rows: rows.update(offset=128),
    "first_block": lambda rows: rows.update(first_block="0"),
    "power of two": lambda rows: rows.update(factor=3),
    "factor": lambda rows: rows.update(factor=float("inf")),
    "a few bytes fewer": resized(-1),
    "more bytes": resized(1),
    "expected 2 tensors": lambda rows: rows["parts"].pop(),
    "without gaps": set_part(0, lambda part: part[:1].expand(part.shape)),
    "torch.float32": set_part(1, lambda part: part.float()),
    "on meta": set_part(1, lambda part: part.to("meta")),
    "parts[1]": set_part(1, lambda part: 3),
    "block 0: its norm": set_part(1, lambda part: torch.full_like(part, 255)),
    "scales": lambda rows: rows.update(awq=torch.zeros(rows["columns"])),
    "[3]": lambda rows: rows.update(awq=torch.ones(3)),
    "unknown": lambda rows: rows.update(levels=[1]),
    "missing key place": lambda rows: rows.pop("place"),
}


def refused(weight: PackedTensor, change: Callable[[dict[str, Any]], object], **arguments: Any) -> str:
    """Save a weight with other fields, which loading refuses in a line; return the line."""
    _, (state, *rest) = weight.__reduce_ex__(2)
    given = dict(zip(("stacked", "dtype", "is_parameter", "requires_grad"), rest, strict=True)) | arguments
    again({"it": weight})
    change(state)

    class Edited:
        def __reduce__(self) -> Any:
            return rebuild, (state, *given.values())

    with raises(MasterError) as caught:
        again({"it": Edited()})
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("said", BLOCKS)
def test_rows_with_other_fields_are_refused(said: str, folder_of: Callable[[str], Path]) -> None:
    weight = pqweights.load_model(folder_of("llama"), packed=True).model.layers[0].mlp.up_proj.weight
    line = refused(weight, lambda state: BLOCKS[said](state["matrices"][0][0]))
    assert said in line or said in ("a few bytes fewer", "more bytes", "rows", "columns", "codec", "state", "weights")


def lengths_of(values: Any) -> Any:
    return torch.full_like(values.view(torch.int32), 5).view(torch.uint8)


COLUMNS: dict[str, Change] = {
    "shape": lambda weight: weight.update(shape=[weight["shape"][0] * weight["shape"][1]]),
    "shape: expected": lambda weight: weight.update(shape=[1, 2**40]),
    "expected a plain tensor": lambda weight: weight.update(shape=[weight["shape"][0] + 128, weight["shape"][1]]),
    "dtype": lambda weight: weight.update(dtype="U8"),
    "state": lambda weight: weight.update(state={"rotation": "hadamard"}),
    "transposed": lambda weight: weight.update(state={"transposed": False}),
    "expected 7 to": set_part(1, lengths_of),
    "sum": set_part(0, lambda part: torch.cat([part, part[:1]])),
    "expected 4 tensors": lambda weight: weight["parts"].clear(),
    "[5]": set_part(2, lambda part: part[:5].clone()),
}


@pytest.mark.parametrize("said", COLUMNS)
def test_weights_of_columns_with_other_fields_are_refused(said: str, folder_of: Callable[[str], Path]) -> None:
    weight = pqweights.load_model(folder_of("columns of llama"), packed=True).model.layers[0].mlp.up_proj.weight
    assert said in refused(weight, lambda state: COLUMNS[said](state["column_weights"][0]))


def test_matrices_that_do_not_fit_together_are_refused(folder_of: Callable[[str], Path]) -> None:
    model = pqweights.load_model(folder_of("llama"), packed=True)
    up, down = (getattr(model.model.layers[0].mlp, name).weight for name in ("up_proj", "down_proj"))
    columns = pqweights.load_model(folder_of("columns of llama"), packed=True).model.layers[0].mlp.up_proj.weight
    other = down.__reduce_ex__(2)[1][0]["matrices"][0]
    for change in (
        lambda state: state["matrices"].append(other),
        lambda state: state["matrices"][0].append(other[0]),
        lambda state: state["matrices"].clear(),
        lambda state: state["matrices"][0].clear(),
        lambda state: state["matrices"].append(state["matrices"][0] * 2),
    ):
        refused(up, change, stacked=True)
    for changed in ({"matrix": 1}, {"weight": 7}, {"weight": -1}, {"factor": 0.3}, {"type": "rows"}):
        refused(columns, lambda state, changed=changed: state["matrices"][0][0].update(changed))  # type: ignore[misc]
    refused(up, lambda state: state["matrices"].extend(state["matrices"] * 2))
    refused(up, lambda state: None, dtype=torch.int8)
    refused(up, lambda state: None, dtype="float32")
