"""Adapters of PEFT and mlx-lm, merged into the weights of a checkpoint while these are read: LoRA, and what is with it.

LoRA (Hu et al., 2021, arXiv:2106.09685) adds a product of two thin matrices to a weight, rsLoRA (Kalajdzievski, 2023,
arXiv:2312.03732) scales it by the root of the rank, DoRA (Liu et al., 2024, arXiv:2402.09353) gives the sum norms of
its own. The merged model computes what the model with the adapter does in PEFT or mlx-lm; where head and embeddings
are one weight and only one of them changes, they part, which PEFT's own `merge_and_unload` gets wrong. What cannot be
merged is refused by name. A tensor is merged in the runs in which it is read, so that memory stays bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.promise import is_tied, untied
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.source import Adapter, Checkpoint, read_header
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.checkpoint.wrapped import ADAPTER_CONFIG, ANY_ADAPTER
from pqweights.common.dtypes import FLOAT_DTYPES, from_float32, item_bytes
from pqweights.common.units import first_names
from pqweights.errors import SourceError
from pqweights.kernels.low_rank import add_low_rank
from pqweights.kernels.workers import kept, scratch
from pqweights.models import text_model
from pqweights.models.conventions import EXPERTS_OF_LAYER, HEADS
from pqweights.models.names import is_embedding
from pqweights.models.traits import Trait

# What PEFT writes, and what mlx-lm does.
ADAPTER_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"
PREFIX = "base_model.model."
# Elements of a weight that are looked at together where norms need all of its rows.
BAND_ELEMENTS = 1 << 22
# How a tensor of an adapter is called behind the name of its module.
PARTS = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|"
    r"(?:token_adapter\.)?trainable_tokens_delta)(?:\.default)?(?P<bias>\.bias)?(?:\.weight)?"
)
MLX_PARTS = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
# Settings under which more is computed than a product that is added, and initializations that change the base model.
NOT_MERGED = (
    *("use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    "monteclora_config",
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
# What a name of the adapter begins with, and that of the checkpoint: transformers has renamed what models are made of.
RENAMED = (
    ("", ""),
    ("", "model."),
    ("model.", ""),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("language_model.model.", "model.language_model."),
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
)

# Patterns of names whose matching may take exponential time: a repeated group in which something is repeated.
ENDLESS = re.compile(r"\([^()]*[*+{][^()]*\)[*+{]")
MOST_PATTERN = 500

# The matrices of experts as transformers stacks them, and of what matrices of single experts these consist.
STACKS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}

Floats = npt.NDArray[np.float32]
# Changes rows [first, first + len(rows)) of a weight in place; rows are float32 [rows, columns].
Change = Callable[[Floats, int], None]


def open_adapter(storage: Storage, given: str, name: str, weight: float = 1.0) -> Adapter:
    """Open an adapter in a folder, wherever that is; its headers and its settings are read.

    given: what names it, with its weight
    name: what messages call it
    weight: by how much its changes are multiplied

    Raises SourceError for what is not an adapter of PEFT that can be merged.
    """
    files = storage.files()
    file = MLX_FILE if MLX_FILE in files and ADAPTER_FILE not in files else ADAPTER_FILE
    for needed in (ADAPTER_CONFIG, file):
        if needed not in files:
            raise SourceError(f"adapter {name}: expected {ADAPTER_CONFIG} and {ADAPTER_FILE}, as PEFT writes them, or "
                              f"{MLX_FILE}, as mlx-lm does; found no {needed}")  # fmt: skip
    try:
        settings = read_json_object(storage, ADAPTER_CONFIG)
    except SourceError as error:
        raise SourceError(f"adapter {name}: {error}") from None
    stored = tuple(read_header(storage, file)[0])
    opened = Checkpoint(
        storage=storage,
        stored=stored,
        tensors=tuple(PlainTensor.of(storage, tensor) for tensor in stored),
        weight_files=(file,),
    )
    adapter = Adapter(given=given, name=name, files=opened, settings=settings, weight=weight)
    (_check_mlx_settings if _is_of_mlx(adapter) else _check_settings)(adapter)
    return adapter


def _is_of_mlx(adapter: Adapter) -> bool:
    return adapter.files.weight_files == (MLX_FILE,)


def _check_mlx_settings(adapter: Adapter) -> None:
    """Raise SourceError for settings of mlx-lm under which an adapter cannot be merged."""
    kind, parameters = adapter.settings.get("fine_tune_type", "lora"), adapter.settings.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise adapter.refused(
            f"`fine_tune_type`: expected lora or dora, found {str(kind)[:40]!r}, which has whole weights of "
            "mlx-lm's model; run mlx_lm.fuse, and give its output as the source"
        )
    numbers = [parameters.get(key) if isinstance(parameters, dict) else None for key in ("rank", "scale")]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise adapter.refused("`lora_parameters`: expected the numbers `rank` and `scale`")
    if kind == "dora" and adapter.weight != 1:
        raise adapter.refused(
            f"`fine_tune_type` dora: an adapter with norms of its own cannot be scaled by {adapter.weight}"
        )


def _check_settings(adapter: Adapter) -> None:
    """Raise SourceError for settings under which an adapter cannot be merged."""
    settings = adapter.settings
    method = settings.get("peft_type")
    if method not in ("LORA", "TRAINABLE_TOKENS"):
        stated = method if isinstance(method, str) and method.isprintable() else None
        raise adapter.refused(f"expected LoRA (`peft_type`), found {(stated or 'none')[:40]}, which cannot be merged")
    for key in NOT_MERGED:
        if settings.get(key):
            raise adapter.refused(f"`{key}`: adapters with this setting cannot be merged")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(CHANGES_BASE):
        raise adapter.refused(
            f"`init_lora_weights` {begun[:20]!r}: its base model was changed at the start of the training; save "
            "it with `path_initial_model_for_weight_conversion`, which makes a LoRA of the published model"
        )
    if settings.get("use_dora") and adapter.weight != 1:
        raise adapter.refused(f"`use_dora`: an adapter with norms of its own cannot be scaled by {adapter.weight}")
    numbers = [settings.get("r", 8), settings.get("lora_alpha", 8)]
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(key) or {}
        if not isinstance(pattern, dict):
            raise adapter.refused(f"`{key}`: expected an object")
        numbers += pattern.values()
        if any(len(key) > MOST_PATTERN or ENDLESS.search(key) for key in pattern):
            raise adapter.refused(f"`{key}`: a pattern of it may take too long to match")
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise adapter.refused("`r`, `lora_alpha`, `rank_pattern`, `alpha_pattern`: expected numbers")


class MergedTensor(NamedTuple):
    """A tensor of a checkpoint with changes, which are made to the rows that are read. name: also of a copy of it"""

    name: str
    base: LogicalTensor
    changes: tuple[Change, ...]

    @property
    def width(self) -> int:
        """How many elements a row has: of a stack of experts, one of any of its matrices."""
        products = (change for change in self.changes if isinstance(change, LowRank))
        return next((product.columns for product in products), math.prod(self.shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return self.base.shape

    @property
    def dtype(self) -> str:
        """The dtype in which it is stored plainly: what the source stored has changed."""
        return self.base.plain_dtype

    @property
    def plain_dtype(self) -> str:
        """The same."""
        return self.base.plain_dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Those of the tensor; what an adapter stores is small, and belongs to no place in the source."""
        return self.base.parts

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read whole rows, change them in float32, and return the elements, rounded once."""
        if not self.changes:
            self.base.read(start, count, dtype, out)
            return
        width = self.width
        first, last = start // width, -(-(start + count) // width)
        rows = self.rows(first, last - first)
        values = rows.reshape(-1)[start - first * width :][:count]
        out[: count * item_bytes(dtype)] = from_float32(values, dtype)

    def rows(self, first: int, count: int) -> Floats:
        """Return rows [first, first + count) in float32, [count, columns]; valid until the thread reads again."""
        width = self.width
        raw = scratch(f"merged {len(self.changes)}", count * width * 4)
        self.base.read(first * width, count * width, "F32", raw)
        rows = raw.view(np.float32).reshape(count, width)
        for change in self.changes:
            change(rows, first)
        return rows


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank:
    """scale * (left @ right), added to a weight [rows, columns], or to each matrix of a stack of experts.

    left, right: [rows, rank] and [rank, columns], each stored so, or both transposed (`is_transposed`). PEFT stores
        those of experts as A [experts * rank, inputs], blocks of rows, and B [outputs, rank * experts], where an expert
        has each experts-th column
    height: how many rows the matrix of an expert has, or the weight
    first: the row of the first expert with which the weight begins, which may be a part of a matrix
    """

    adapter: Adapter
    left: StoredTensor
    right: StoredTensor
    is_transposed: bool
    scale: float
    rank: int
    height: int
    experts: int = 1
    first: int = 0

    @property
    def columns(self) -> int:
        """How many columns the weight has."""
        return math.prod(self.right.shape) // (self.rank * self.experts)

    def __call__(self, rows: Floats, first: int) -> None:
        """Add rows of the product."""
        begin = self.first + first
        for expert in range(begin // self.height, -(-(begin + len(rows)) // self.height)):
            top = expert * self.height
            start, end = max(begin, top), min(begin + len(rows), top + self.height)
            key = id(self.adapter), self.right, expert
            right = kept("right of an adapter", key, partial(self._right, expert))
            left = self._left(expert, start - top, end - start)
            add_low_rank(rows[start - begin : end - begin], left, right, self.scale)

    def _left(self, expert: int, first: int, count: int) -> Floats:
        """Return rows of the left matrix of an expert."""
        if self.is_transposed:
            starts = ((expert * self.rank + k) * self.height + first for k in range(self.rank))
            pieces = [self.adapter.values(self.left, start, count) for start in starts]
            return np.ascontiguousarray(np.stack(pieces, axis=1))
        across = self.rank * self.experts
        values = self.adapter.values(self.left, first * across, count * across)
        return np.ascontiguousarray(values.reshape(count, self.rank, self.experts)[:, :, expert])

    def _right(self, expert: int) -> Floats:
        """Return the right matrix of an expert."""
        if self.is_transposed:
            values = self.adapter.values(self.right).reshape(-1, self.rank, self.experts)
            return np.ascontiguousarray(values[:, :, expert].T)
        count = self.rank * self.columns
        return self.adapter.values(self.right, expert * count, count).reshape(self.rank, -1)


def scale_to_norms(
    adapter: Adapter, stored: StoredTensor, before: MergedTensor, of_columns: bool, rows: Floats, first: int
) -> None:
    """DoRA: give rows of a weight, or if it is stored transposed its columns, the norms that an adapter has.

    before: the weight with the low-rank matrix added, of which the norms are taken
    stored: the norms, one for each row or column
    """
    if of_columns:
        factors = partial(_column_factors, adapter, stored, before)
        rows *= kept("factors of columns", (id(adapter), stored), factors)
        return
    rows *= (adapter.values(stored, first, len(rows)) / _root(np.square(rows, dtype=np.float64).sum(axis=1)))[:, None]


def _column_factors(adapter: Adapter, stored: StoredTensor, before: MergedTensor) -> Floats:
    height, width = before.shape[0], math.prod(before.shape[1:])
    band, squares = max(1, BAND_ELEMENTS // width), np.zeros(width)
    for first in range(0, height, band):
        for row in before.rows(first, min(band, height - first)):
            squares += np.square(row, dtype=np.float64)
    return adapter.values(stored) / _root(squares)


def _root(squares: npt.NDArray[np.float64]) -> Floats:
    return np.sqrt(squares).astype(np.float32)


def replace_tokens(adapter: Adapter, stored: StoredTensor, numbers: Sequence[int], rows: Floats, first: int) -> None:
    """Replace the rows of embeddings that were trained. numbers: those of the rows, ascending"""
    width = rows.shape[1]
    for index, number in enumerate(numbers):
        if first <= number < first + len(rows):
            rows[number - first] = adapter.values(stored, index * width, width)


def replace_rows(adapter: Adapter, stored: StoredTensor, rows: Floats, first: int) -> None:
    """Replace rows of a tensor that an adapter has in the place of the model's."""
    rows[...] = adapter.values(stored, first * rows.shape[1], rows.size).reshape(rows.shape)


def add_bias(adapter: Adapter, stored: StoredTensor, scale: float, rows: Floats, first: int) -> None:
    """Add a vector to elements of a bias."""
    rows[:, 0] += adapter.values(stored, first, len(rows)) * np.float32(scale)


def with_adapters(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> Checkpoint:
    """Return a checkpoint into which adapters are merged, one after the other.

    Raises SourceError for an adapter that does not fit the checkpoint.
    """
    for adapter in adapters:
        checkpoint = _Merging(checkpoint, adapter).merged()
    return checkpoint


class _Merging:
    """One adapter on its way into a checkpoint.

    changes: to each tensor, by its name in the checkpoint
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        self.checkpoint, self.adapter = checkpoint, adapter
        self.config = checkpoint.config or {}
        self.tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self.embeddings = next((name for name in self.tensors if is_embedding(name)), None)
        self.head = next((f"{head}.weight" for head in HEADS if f"{head}.weight" in self.tensors), f"{HEADS[0]}.weight")
        self.is_tied = self.embeddings is not None and is_tied(self.config)
        self.changes: dict[str, list[Change]] = {}
        matches = map(EXPERTS_OF_LAYER.fullmatch, self.tensors)
        experts = {match[1] for match in matches if match}
        # Some files call differently what transformers has in memory.
        self.experts = {name.replace(".block_sparse_moe.", ".mlp."): name for name in experts}
        self.of_mlx = _is_of_mlx(adapter)
        self.is_dora = adapter.settings.get("fine_tune_type") == "dora" or bool(adapter.settings.get("use_dora"))
        if self.of_mlx and text_model(self.config).mlx.folds:
            model_type = self.config.get("model_type")
            raise adapter.refused(
                f"mlx-lm multiplies weights of type {model_type!r} by its settings, so its adapters cannot be merged"
            )

    def merged(self) -> Checkpoint:
        """Return the checkpoint with the adapter. Raises SourceError if it does not fit."""
        modules, saved = self._by_module()
        stacks = {module: modules.pop(module) for module in [*modules] if self._is_of_experts(module)}
        wanted = [*(f"{module}.weight" for module in modules), *map(_stack_of, stacks), *saved]
        old, new = self._renaming(wanted)
        for name, stored in saved.items():
            self._add(_renamed(name, old, new), partial(replace_rows, self.adapter, stored), stored, is_added=False)
        for module, parts in modules.items():
            self._add_module(module, _renamed(module, old, new), parts)
        for module, parts in stacks.items():
            self._add_experts(module, self.experts[_renamed(_stack_of(module), old, new)], parts)
        config = self._with_own_head()
        count = len(self.changes)
        remark = f"adapter {self.adapter.name}: merged into {count} tensors ({first_names(list(self.changes))})"
        tensors = [
            _changed(name, tensor, self.changes[name]) if name in self.changes else tensor
            for name, tensor in self.tensors.items()
        ]
        return replace(
            self.checkpoint,
            config=config if self.checkpoint.config is not None else None,
            tensors=tuple(tensors),
            remarks=(*self.checkpoint.remarks, remark),
            adapters=(*self.checkpoint.adapters, self.adapter),
            unproven=() if config is not self.config else self.checkpoint.unproven,
        )

    def _by_module(self) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
        """Return the tensors of LoRA by module and part, and those that are the model's own, by name."""
        modules: dict[str, dict[str, StoredTensor]] = {}
        saved: dict[str, StoredTensor] = {}
        for stored in self.adapter.files.stored:
            name = stored.name.removeprefix(PREFIX)
            if stored.dtype not in FLOAT_DTYPES:
                raise self.adapter.refused(
                    f"tensor {stored.name!r}: expected a floating-point dtype, found {stored.dtype}"
                )
            if self.of_mlx:
                if (match := MLX_PARTS.fullmatch(name)) is None:
                    raise self.adapter.refused(f"tensor {stored.name!r}: belongs to a method that cannot be merged")
                modules.setdefault(match["module"], {})[_MLX_NAMES[match["part"]]] = stored
                continue
            if match := PARTS.fullmatch(name):
                part = match["part"].removeprefix("token_adapter.") + (match["bias"] or "")
                modules.setdefault(match["module"], {})[part] = stored
                continue
            name = re.sub(r"\.(?:modules_to_save|base_layer)(?=\.)", "", name)
            if ANY_ADAPTER.search(name):
                raise self.adapter.refused(f"tensor {stored.name!r}: belongs to a method that cannot be merged")
            saved[name] = stored
        if not modules and not saved:
            raise self.adapter.refused(f"{ADAPTER_FILE}: expected tensors, found none")
        return modules, saved

    def _renaming(self, wanted: Sequence[str]) -> tuple[str, str]:
        """Return by which beginnings of names, the adapter's and the checkpoint's, all tensors are found."""
        missing = list[str]()
        for old, new in RENAMED:
            absent = [name for name in wanted if not self._is_known(_renamed(name, old, new))]
            if not absent:
                return old, new
            if not missing or len(absent) < len(missing):
                missing = absent
        base = self.adapter.settings.get("base_model_name_or_path")
        of = f" of {base[:200]}" if isinstance(base, str) and base.isprintable() and base else ""
        raise self.adapter.refused(
            f"the model has no tensor {missing[0]!r}, and {len(missing) - 1} more are missing: it is an adapter{of}"
            if len(missing) > 1
            else f"the model has no tensor {missing[0]!r}: it is an adapter{of}"
        )

    def _is_known(self, name: str) -> bool:
        return name in self.tensors or name in self.experts or (self.is_tied and name == self.head)

    def _is_of_experts(self, module: str) -> bool:
        """Whether a module of the adapter changes a parameter of a module with all experts of a layer."""
        return bool(self.adapter.settings.get("target_parameters")) and _stack_of(module).endswith("experts")

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors and name == self.head and self.embeddings is not None:
            return self.tensors[self.embeddings].shape
        return self.tensors[name].shape

    def _add(
        self,
        name: str,
        change: Change,
        stored: StoredTensor,
        expected: tuple[int, ...] | None = None,
        *,
        is_added: bool = True,
    ) -> None:
        """Note a change.

        expected: the shape of the tensor, by default that of what is stored
        is_added: whether it adds to the tensor, in place of the model's own numbers
        """
        shape, expected = self._shape(name), stored.shape if expected is None else expected
        if shape != expected:
            resized = " (adapters for a resized vocabulary cannot be merged)" if is_embedding(name) else ""
            raise self.adapter.refused(
                f"tensor {stored.name!r} is for {name} of shape {list(expected)}, but the model's has {list(shape)}"
                f"{resized}"
            )
        if not is_added and self.adapter.weight != 1:
            raise self.adapter.refused(
                f"tensor {stored.name!r} replaces the model's own, so it cannot be scaled by {self.adapter.weight}"
            )
        self.changes.setdefault(name, []).append(change)

    def _add_module(self, module: str, renamed: str, parts: Mapping[str, StoredTensor]) -> None:
        """Note what an adapter changes in a module. module, renamed: its names in adapter and checkpoint"""
        weight, scale = f"{renamed}.weight", self._scale(module)
        if (tokens := parts.get("trainable_tokens_delta")) is not None:
            numbers, shape = self._tokens(module, tokens), self._shape(weight)
            self._add(weight, partial(replace_tokens, self.adapter, tokens, numbers), tokens, shape, is_added=False)
        sides = next((pair for pair in _SIDES if pair[0] in parts or pair[1] in parts), None)
        if sides is None:
            return
        one, other = (parts.get(side) for side in sides)
        if one is None or other is None:
            raise self.adapter.refused(f"module {module}: expected {' and '.join(sides)}, found only one of them")
        low_rank, expected = self._low_rank(module, weight, one, other, scale, of_embedding=sides is _SIDES[1])
        self._add(weight, low_rank, one, expected)
        if (magnitudes := parts.get("lora_magnitude_vector")) is not None:
            base = self.tensors.get(weight) or self.tensors[str(self.embeddings)]
            of_columns = low_rank.is_transposed and not self.of_mlx
            if math.prod(magnitudes.shape) != (math.prod(base.shape[1:]) if of_columns else base.shape[0]):
                raise self.adapter.refused(f"tensor {magnitudes.name!r}: expected a number for each output of {weight}")
            before = _changed(weight, base, self.changes[weight])
            change = partial(scale_to_norms, self.adapter, magnitudes, before, of_columns)
            self._add(weight, change, magnitudes, expected, is_added=False)
        elif self.is_dora:
            raise self.adapter.refused(f"module {module}: expected lora_magnitude_vector (`use_dora`), found none")
        if (bias := parts.get("lora_B.bias")) is not None:
            name = f"{renamed}.bias"
            if not self._is_known(name):
                raise self.adapter.refused(f"tensor {bias.name!r}: the model has no tensor {name!r} to add it to")
            self._add(name, partial(add_bias, self.adapter, bias, scale), bias)

    def _add_experts(self, module: str, experts: str, parts: Mapping[str, StoredTensor]) -> None:
        """Note what an adapter changes in the experts of a layer, which are stored one by one, or stacked.

        Names do not tell which of the two parameters of a layer it is, and shapes do.
        """
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or len(parts) != 2:
            raise self.adapter.refused(f"module {module}: expected lora_A and lora_B of a parameter")
        inputs, outputs = a.shape[1], b.shape[0]
        for stack, matrices in STACKS.items():
            places, count, turned = self._places(experts, stack, matrices, inputs, outputs)
            if not places:
                continue
            parameter = f"{_stack_of(module)}.{stack}"
            rank, scale = int(self._setting(parameter, "r", "rank_pattern")), self._scale(parameter)
            if a.shape[0] != rank * count or b.shape[1] != rank * count:
                raise self.adapter.refused(
                    f"tensor {a.name!r}: expected the rank of {ADAPTER_CONFIG} for each of {count} experts, "
                    f"found {a.shape[0]} rows"
                )
            left, right, height = (a, b, inputs) if turned else (b, a, outputs)
            for name, first in places.items():
                change = LowRank(
                    adapter=self.adapter, left=left, right=right, is_transposed=turned, scale=scale, rank=rank,
                    height=height, experts=count, first=first,
                )  # fmt: skip
                self._add(name, change, a, self._shape(name))
            return
        raise self.adapter.refused(
            f"module {module}: the model has no experts of {outputs} outputs and {inputs} inputs in {experts}"
        )

    def _places(
        self, experts: str, stack: str, matrices: Sequence[Sequence[str]], inputs: int, outputs: int
    ) -> tuple[dict[str, int], int, bool]:
        """Return where a stack of experts lies: the first row of each tensor, of how many experts, and if transposed.

        There is none if its matrices have other shapes.
        """
        whole = next((name for name in (f"{experts}.{stack}", f"{experts}.{stack}.weight") if name in self.tensors), "")
        if whole:
            count, *sides = self._shape(whole)
            turned = Trait.TRANSPOSED_EXPERTS in text_model(self.config).traits
            fits = sides == ([inputs, outputs] if turned else [outputs, inputs])
            return ({whole: 0} if fits else {}), count, turned
        places: dict[str, int] = {}
        for count in range(len(self.tensors)):
            of_one = f"{experts}.{count}.{{}}.weight".format
            names = [next((n for n in map(of_one, called) if n in self.tensors), "") for called in matrices]
            if not all(names):
                break
            height = outputs // len(names)
            if any(self._shape(name) != (height, inputs) for name in names):
                return {}, 0, False
            places |= {name: count * outputs + part * height for part, name in enumerate(names)}
        return places, count, False

    def _scale(self, module: str) -> float:
        """Return by what the product of a module is multiplied."""
        if self.of_mlx:
            return float(self.adapter.settings["lora_parameters"]["scale"]) * self.adapter.weight
        rank, alpha = (self._setting(module, key, f"{pattern}_pattern") for key, pattern in _NUMBERS)
        if rank <= 0:
            raise self.adapter.refused(f"`r`: expected a positive number, found {rank}")
        return alpha / (math.sqrt(rank) if self.adapter.settings.get("use_rslora") else rank) * self.adapter.weight

    def _setting(self, module: str, key: str, pattern: str) -> float:
        """Return a number that holds for all modules, or that of the first pattern that a module's name ends with."""
        for expression, number in (self.adapter.settings.get(pattern) or {}).items():
            try:
                if re.match(rf"(.*\.)?({expression})$", module):
                    return float(number)
            except re.error:
                raise self.adapter.refused(f"`{pattern}`: {expression[:100]!r} is not a regular expression") from None
        return float(self.adapter.settings.get(key, 8))

    def _low_rank(
        self, module: str, weight: str, a: StoredTensor, b: StoredTensor, scale: float, *, of_embedding: bool
    ) -> tuple[LowRank, tuple[int, ...]]:
        """Return the product of A and B as it is added, and the shape that the weight must have.

        PEFT stores [rank, inputs] and [outputs, rank], mlx-lm [inputs, rank] and [rank, outputs].
        """
        shape, most = self._shape(weight), 2 if self.of_mlx else math.inf
        if (
            not 2 <= len(a.shape) <= most
            or not 2 <= len(b.shape) <= most
            or len(shape) < 2
            or math.prod(b.shape[2:]) != 1
        ):
            raise self.adapter.refused(f"tensor {a.name!r}: expected two matrices for {weight}, found other shapes")
        if self.of_mlx:
            (inputs, rank), (of_b, outputs) = a.shape, b.shape
            stated, of_embedding = self.adapter.settings["lora_parameters"]["rank"], is_embedding(weight)
        else:
            rank, inputs, (outputs, of_b) = a.shape[0], math.prod(a.shape[1:]), b.shape[:2]
            stated = self._setting(module, "r", "rank_pattern")
        if not rank == of_b == stated:
            raise self.adapter.refused(f"tensor {a.name!r}: expected the rank of {ADAPTER_CONFIG}, found {rank}")
        # `fan_in_fan_out` does not tell: PEFT goes by the class of the layer, too.
        is_turned = not self.of_mlx and Trait.TRANSPOSED in text_model(self.config).traits and weight != self.head
        by_inputs = of_embedding or (is_turned and shape == (inputs, outputs))  # rows of the weight are those of A
        expected: tuple[int, ...] = (inputs, outputs) if by_inputs else (outputs, inputs)
        if not self.of_mlx and (shape[0], math.prod(shape[1:])) == expected:
            expected = shape
        left, right = (a, b) if by_inputs else (b, a)
        is_transposed = by_inputs != self.of_mlx
        product = LowRank(
            adapter=self.adapter, left=left, right=right, is_transposed=is_transposed, scale=scale, rank=rank,
            height=expected[0],
        )  # fmt: skip
        return product, expected

    def _tokens(self, module: str, stored: StoredTensor) -> tuple[int, ...]:
        """Return which rows of embeddings an adapter has trained."""
        stated = self.adapter.settings.get("trainable_token_indices") or self.adapter.settings.get("token_indices")
        if isinstance(stated, dict):
            stated = next((stated[name] for name in stated if module == name or module.endswith(f".{name}")), None)
        numbers = stated if isinstance(stated, list) else []
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or len(set(numbers)) != len(numbers):
            numbers = []
        if stored.shape[:1] != (len(numbers),) or len(stored.shape) != 2:
            raise self.adapter.refused(f"tensor {stored.name!r}: expected a row for each of the trained tokens")
        return tuple(numbers)

    def _with_own_head(self) -> dict[str, Any]:
        """Give a head that shares the embeddings weights of its own if one of both changes; return the configuration.

        Trained tokens are those of both, as in PEFT, and so is everything if the adapter keeps them tied, as of mlx-lm.
        """
        if not self.is_tied or not self.changes.keys() & {self.embeddings, self.head}:
            return self.config
        assert self.embeddings is not None
        of_embeddings = self.changes.get(self.embeddings, [])
        stays = all(_replaces_tokens(change) for change in of_embeddings) and self.head not in self.changes
        if stays or self.of_mlx or self.adapter.settings.get("ensure_weight_tying"):
            self.changes.pop(self.head, None)
            if self.head in self.tensors:
                self.changes[self.head] = of_embeddings
            return self.config
        if self.head not in self.tensors:
            self.tensors[self.head] = _changed(self.head, self.tensors[self.embeddings], ())
        return untied(self.config)


def _changed(name: str, tensor: LogicalTensor, changes: Sequence[Change]) -> MergedTensor:
    """Return a tensor with further changes under a name."""
    if isinstance(tensor, MergedTensor):
        return MergedTensor(name, tensor.base, (*tensor.changes, *changes))
    return MergedTensor(name, tensor, tuple(changes))


_SIDES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_NUMBERS = (("r", "rank"), ("lora_alpha", "alpha"))
_MLX_NAMES = {"lora_a": "lora_A", "lora_b": "lora_B", "m": "lora_magnitude_vector"}  # by PEFT's


def _replaces_tokens(change: Change) -> bool:
    return isinstance(change, partial) and change.func is replace_tokens


def _stack_of(module: str) -> str:
    """Return the module whose parameters an adapter changes; PEFT wraps it once for each of them."""
    return re.sub(r"(\.base_layer)+$", "", module)


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
