"""MLX: a folder that mlx_lm.load opens, weights as affine integers (w = code * scale + bias) or in mlx's small floats.

What becomes of each tensor is mlx-lm's own doing (mlx_model.py, mlx_trace.py); with its rule for scales and biases the
tensors are those of mlx_lm.convert, byte for byte. mlx is imported when an export is made, not before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import StoredTensor, TensorSpec
from pqweights.checkpoint.master import encoded_specs
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_file
from pqweights.checkpoint.views import MovedTensor, Segment
from pqweights.dtypes import DTYPE_BITS, convert, from_float32, item_bytes
from pqweights.errors import ExportError, MissingDependencyError
from pqweights.exports.bf16 import is_encoded, plain_plan
from pqweights.exports.integers import Outline, Piece, Rounding, Rule, Stays
from pqweights.exports.options import BEST, MINMAX, ExportOptions, one_of
from pqweights.kernels.groups import FloatRule, GroupRule, Groups, pack_bits
from pqweights.planning.roles import classify

if TYPE_CHECKING:
    from pqweights.exports.mlx_model import MlxModel

NAME = "mlx-q4"
# Widths and group sizes of the modes; the first is the default.
BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
GROUP_SIZES = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
# What mlx computes of a checkpoint, norms for the most part, is kept in memory until it is written.
MOST_EVALUATED_BYTES = 256_000_000
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class MlxQ4:
    """The target. asked_group_size: None for the mode's own, where weights that it does not divide stay plain."""

    mode: str
    bits: int
    asked_group_size: int | None
    qparams: str

    @property
    def group_size(self) -> int:
        """Weights that share scale and bias."""
        return self.asked_group_size or GROUP_SIZES[self.mode][0]

    @staticmethod
    def make(options: ExportOptions) -> MlxQ4:
        """From what the user asked for.

        Raises ExportError for what the target does not have.
        """
        options.only(NAME, "mode", "bits", "group_size", "qparams")
        mode = one_of(NAME, "mode", options.mode, tuple(BITS))
        with_mode = NAME if mode == "affine" else f"{NAME} in mode {mode}"
        group_size = one_of(with_mode, "group-size", options.group_size, (None, *GROUP_SIZES[mode]))
        # The floating modes have no rule but mlx's.
        qparams = one_of(with_mode, "qparams", options.qparams, (BEST, MINMAX) if mode == "affine" else (MINMAX,))
        return MlxQ4(mode, one_of(with_mode, "bits", options.bits, BITS[mode]), group_size, qparams)

    def describe(self) -> dict[str, Any]:
        """See integers.Target."""
        return {
            "target": NAME, "mode": self.mode, "bits": self.bits, "group_size": self.group_size, "qparams": self.qparams,
        }  # fmt: skip

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """See integers.Target; names and shapes are mlx-lm's."""
        try:
            from pqweights.exports import mlx_model, mlx_trace
        except ImportError as error:
            if (error.name or "").startswith("pqweights"):
                raise  # a bug of ours is no missing package
            raise MissingDependencyError(
                f"--target {NAME} needs mlx and mlx-lm ({error}): pip install 'pqweights[mlx]'"
            ) from None
        if not isinstance((checkpoint.config or {}).get("model_type"), str):
            raise ExportError(
                f"config.json: --target {NAME} needs a model_type, by which mlx-lm finds the model; found none: fetch the "
                "original's config.json, or use --target bf16"
            )
        model_plain = model_dtype(checkpoint.config, checkpoint.tensors)
        config = edited_config(checkpoint.config, "BF16", model_plain, None)
        config.pop("quantization", None)
        for place in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(place, dict) and key in place:
                    place[key] = "bfloat16"  # mlx-lm would cast to anything else, scales and all
        tensors, specs = {tensor.name: tensor for tensor in checkpoint.tensors}, {}
        for tensor in checkpoint.tensors:
            dtype = plain_plan(tensor, model_plain, "BF16").stored[0].dtype
            if dtype not in mlx_trace.MLX_DTYPES:
                raise ExportError(
                    f"tensor {tensor.name!r}: mlx has no dtype for {dtype}; keep it out of the checkpoint"
                )
            specs[tensor.name] = mlx_trace.Spec(tensor.shape, dtype)
        generation = GENERATION_CONFIG in checkpoint.companions
        model = mlx_model.read_model(
            config,
            read_file(checkpoint.storage, GENERATION_CONFIG) if generation else None,
            specs,
            self.group_size,
            self.bits,
            self.mode,
            lambda names: all(_kept_by_recipe(tensors[name]) for name in names),
        )
        evaluated = {n: o for n, o in model.outputs.items() if isinstance(o, mlx_trace.Evaluated)}
        _check_size(evaluated, model)
        values = _Values(model, evaluated, lambda name: _load(tensors[name], specs[name].dtype))
        outputs: list[LogicalTensor] = []
        used: set[str] = set()
        for name, found in model.outputs.items():
            dtype = model.dtypes[name]
            if isinstance(found, mlx_trace.Evaluated):
                used |= found.sources
                parts = tuple(part for source in sorted(found.sources) for part in tensors[source].parts)
                outputs.append(EvaluatedTensor(name, found.shape, dtype, parts, values))
            else:
                used |= {run.source for run in found.runs}
                segments = tuple(Segment(tensors[r.source], r.first, r.step, r.count) for r in found.runs)
                outputs.append(MovedTensor(name, found.shape, dtype, segments, found.columns, found.transposed))
        decisions: dict[str, Rounding | Stays] = {}
        for module, how in model.quantized.items():
            rule: Rule
            if how.mode == "affine":
                name = "best" if self.qparams == BEST else "mlx"
                rule = GroupRule(how.bits, how.group_size, False, False, name)
            else:
                rule = FloatRule(how.mode, how.bits, how.group_size)
            decisions[f"{module}.weight"] = Rounding(rule, MlxLayout(how.mode == "affine"))
        self._check_group_size(outputs, decisions)
        gone = [name for name in tensors if name not in used]
        reason = f"mlx-lm's model of type {config.get('model_type')!r} does not hold them"
        return Outline(
            tuple(outputs), decisions, dict.fromkeys(gone, reason), {"format": "mlx"}, model.config, plain_dtype=None
        )

    def _check_group_size(self, outputs: list[LogicalTensor], decisions: dict[str, Rounding | Stays]) -> None:
        """Say why weights of the master stay plain; refuse where a size was asked for, or where nothing is quantized."""
        for tensor in outputs:
            columns = tensor.shape[-1] if tensor.shape else 1
            if tensor.name in decisions or not is_encoded(tensor):
                continue
            sizes = GROUP_SIZES[self.mode]
            fitting = ", ".join(str(size) for size in sorted(sizes) if columns % size == 0) or "none"
            if columns % self.group_size and self.asked_group_size is not None:
                raise ExportError(
                    f"tensor {tensor.name!r}: --group-size {self.group_size} does not divide its rows of {columns} weights; of "
                    f"the sizes that {NAME} has these would: {fitting}"
                )
            decisions[tensor.name] = Stays(
                f"groups of {self.group_size} do not divide its rows of {columns} weights (--group-size that would: {fitting})"
                if columns % self.group_size
                else "mlx-lm does not quantize it"
            )
        if not any(isinstance(decision, Rounding) for decision in decisions.values()):
            why = next(
                (d.reason for d in decisions.values() if isinstance(d, Stays)), "mlx-lm quantizes no layer of it"
            )
            raise ExportError(f"no weight of this model can become integers for {NAME}: {why}")


def _kept_by_recipe(tensor: LogicalTensor) -> bool:
    """Whether the master keeps a tensor that the default policy would have encoded: a wish to be respected."""
    if is_encoded(tensor) or tensor.plain_dtype not in ("BF16", "F16", "F32", "F64"):
        return False
    role = classify(tensor.name, tensor.dtype, tensor.shape)
    encoded = sum(spec.byte_count for spec in encoded_specs(tensor.name, tensor.shape, "hadamard-lloyd-max", 5))
    return role.keep is None and encoded < element_count(tensor) * item_bytes(tensor.plain_dtype)


def _check_size(evaluated: Mapping[str, Any], model: MlxModel) -> None:
    sizes = {name: math.prod(found.shape) * DTYPE_BITS[model.dtypes[name]] // 8 for name, found in evaluated.items()}
    if sum(sizes.values()) > MOST_EVALUATED_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ExportError(
            f"tensor {largest!r}: mlx-lm computes it from others ({sizes[largest]} bytes), which takes more memory than this "
            "export allows itself; use --target bf16 and mlx_lm.convert"
        )


def _load(tensor: LogicalTensor, dtype: str) -> Any:
    """The whole tensor as an mlx array."""
    import mlx.core as mx

    from pqweights.exports.mlx_trace import MLX_DTYPES

    count = element_count(tensor)
    raw = np.empty(count * item_bytes(dtype), dtype=np.uint8)
    tensor.read(0, count, dtype, raw)
    return mx.array(raw).view(MLX_DTYPES[dtype]).reshape(tensor.shape)


class _Values:
    """Outputs that mlx computes, all of them when the first is asked for."""

    def __init__(self, model: MlxModel, wanted: Mapping[str, Any], load: Callable[[str], Any]) -> None:
        self._model, self._wanted, self._load = model, wanted, load
        self._lock = threading.Lock()
        self._raw: dict[str, npt.NDArray[np.uint8]] | None = None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of an output, in the dtype in which it is kept."""
        import mlx.core as mx

        from pqweights.exports.mlx_trace import MLX_DTYPES

        with self._lock:
            if self._raw is None:
                found = self._model.evaluate(self._wanted, self._load)
                self._raw = {
                    key: np.array(array.astype(MLX_DTYPES[self._model.dtypes[key]]).reshape(-1).view(mx.uint8))
                    for key, array in found.items()
                }
            return self._raw[name]


@dataclass(frozen=True, eq=False)
class EvaluatedTensor:
    """An output of sanitize that is computed: a norm's weight plus one, say."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    values: _Values

    @property
    def plain_dtype(self) -> str:
        """See LogicalTensor."""
        return self.dtype

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor."""
        size = item_bytes(self.dtype)
        raw = self.values.raw(self.name)[start * size : (start + count) * size]
        out[: count * item_bytes(dtype)] = raw if dtype == self.dtype else convert(raw, self.dtype, dtype)


@dataclass(frozen=True)
class MlxLayout:
    """weight u32 [..., K * bits / 32]; scales and biases [..., K / g], or, of small floats, scales u8 alone."""

    affine: bool
    row_multiple: int = 1

    def specs(self, name: str, shape: tuple[int, ...], rule: Rule) -> tuple[TensorSpec, ...]:
        """See integers.Layout."""
        *rows, columns = shape
        module, groups = name.removesuffix(".weight"), (*rows, columns // rule.group_size)
        weight = TensorSpec(name, "U32", (*rows, columns * rule.bits // 32))
        if not self.affine:
            return weight, TensorSpec(f"{module}.scales", "U8", groups)
        return weight, *(TensorSpec(f"{module}.{part}", "BF16", groups) for part in ("scales", "biases"))

    def pieces(self, name: str, shape: tuple[int, ...], rule: Rule, first_row: int, groups: Groups) -> list[Piece]:
        """See integers.Layout."""
        columns, module = shape[-1], name.removesuffix(".weight")
        first_group = first_row * (columns // rule.group_size)
        codes = Piece(name, first_row * columns * rule.bits // 8, 0, pack_bits(groups.codes, rule.bits)[None])
        if not self.affine:
            return [codes, Piece(f"{module}.scales", first_group, 0, groups.scales.astype(np.uint8)[None])]
        return [
            codes,
            Piece(f"{module}.scales", first_group * 2, 0, from_float32(groups.scales, "BF16")[None]),
            Piece(f"{module}.biases", first_group * 2, 0, from_float32(groups.offsets, "BF16")[None]),
        ]
