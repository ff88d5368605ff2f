"""The mlx target: a folder for mlx_lm.load, with affine integers (w = code * scale + bias) or mlx's small floats.

mlx-lm itself decides what becomes of each tensor (mlx_model.py, mlx_trace.py). With its rule for scales and biases, the
tensors are those of mlx_lm.convert, byte for byte. mlx is imported when an export is made, not before.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_file
from pqweights.checkpoint.views import MatrixCache, MovedTensor
from pqweights.common.advice import pip_install
from pqweights.common.dtypes import DTYPE_BITS, convert, item_bytes
from pqweights.common.markdown import fenced
from pqweights.common.threads import ProcessLock
from pqweights.errors import ExportError, MissingDependencyError
from pqweights.exports.architectures import MLX as MLX_TARGET
from pqweights.exports.architectures import other_targets
from pqweights.exports.bf16 import is_encoded, plain_plan
from pqweights.exports.formats import Rounding, Stays
from pqweights.exports.integers import Outline
from pqweights.exports.linear import FUSED_WITH_KEPT, fused_warnings, kept_by_recipe
from pqweights.exports.loading import LoadableModel, shell
from pqweights.exports.original import integer_export
from pqweights.exports.target import (
    BEST,
    INTEGER_OPTIONS,
    MINMAX,
    MLX,
    ExportTarget,
    FormatChoice,
    GroupSize,
    PlannedMaster,
    check_rounding,
    one_of,
)
from pqweights.kernels.groups import FloatRule, GroupRule
from pqweights.options import ExportOptions

if TYPE_CHECKING:
    from pqweights.exports.mlx_model import MlxModel

NAME = "mlx"
# What manifests call the target: the name that it had first.
STATED_NAME = "mlx-q4"
# Bit widths and group sizes of the modes; the first is the default.
BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
GROUP_SIZES = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
# The tensors that mlx computes, for the most part norms, are held in memory until they are written.
MOST_EVALUATED_BYTES = 256_000_000
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class MlxFormat:
    """The format with its options: see ExportOptions."""

    mode: str
    bits: int
    groups: GroupSize
    qparams: str

    compares_master = True

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        stated = {"target": STATED_NAME, "mode": self.mode, "bits": self.bits}
        return stated | {"group_size": self.groups.size, "qparams": self.qparams}

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which weights become integers; names and shapes are those of mlx-lm.

        Raises MissingDependencyError without mlx or mlx-lm, ExportError if mlx-lm cannot take the model.
        """
        _check_packages()
        model = self._model(checkpoint)
        outputs = _outputs(model)
        fused_with = _fused_with_kept(model)
        decisions = self._decisions(model, outputs, {name for names in fused_with.values() for name in names})
        used = {tensor.name for output in model.outputs.values() for tensor in output.sources}
        model_type = (checkpoint.config or {}).get("model_type")
        reason = f"mlx-lm's model of type {model_type!r} does not hold them"
        return Outline(
            tensors=outputs,
            decisions=decisions,
            config=model.config,
            left_out=dict.fromkeys((t.name for t in checkpoint.tensors if t.name not in used), reason),
            metadata={"format": "mlx"},
            plain_dtype=None,
            warnings=fused_warnings({k: [t for t in outputs if t.name in names] for k, names in fused_with.items()}),
        )

    def _model(self, checkpoint: Checkpoint) -> MlxModel:
        """Return the model that mlx-lm makes of the checkpoint."""
        from pqweights.exports import mlx_model, mlx_trace

        model_plain = model_dtype(checkpoint.config, checkpoint.tensors)
        plans = [plain_plan(tensor, model=model_plain, dtype="BF16") for tensor in checkpoint.tensors]
        dtypes = {plan.name: plan.stored[0].dtype for plan in plans}
        for name, dtype in dtypes.items():
            if dtype not in mlx_trace.MLX_DTYPES:
                raise ExportError(f"tensor {name!r}: mlx has no dtype for {dtype}; keep it out of the checkpoint")
        generation = GENERATION_CONFIG in checkpoint.companions
        return mlx_model.read_model(
            _config(checkpoint, model_plain),
            generation_config=read_file(checkpoint.storage, GENERATION_CONFIG) if generation else None,
            tensors={tensor.name: tensor for tensor in checkpoint.tensors},
            dtypes=dtypes,
            default=mlx_model.QuantizedModule(self.bits, self.groups.size, self.mode),
            smaller=self.groups.tried[1:],
        )

    def _rounding(self, bits: int, group_size: int, mode: str) -> Rounding:
        """Return what becomes of a weight that mlx-lm quantizes so."""
        name = BEST if self.qparams == BEST else "mlx"
        if mode != "affine":
            return Rounding(FloatRule(mode, bits, group_size, name), "mlx-floats")
        rule = GroupRule(bits=bits, group_size=group_size, symmetric=False, middle=False, rule=name)
        return Rounding(rule, "mlx-affine")

    def usual(self, columns: int) -> Rounding | None:
        """Return what becomes of most weights with so many columns; None if they stay plain."""
        size = self.groups.fitting([columns])
        return None if size is None else self._rounding(self.bits, size, self.mode)

    def _decisions(
        self, model: MlxModel, outputs: tuple[LogicalTensor, ...], fused: Collection[str]
    ) -> dict[str, Rounding | Stays]:
        """Decide what becomes of each weight. fused: the names of those that stay plain as they are partly kept."""
        decisions: dict[str, Rounding | Stays] = {
            f"{module}.weight": self._rounding(*how) for module, how in model.quantized.items()
        }
        for tensor in outputs:
            if tensor.name in fused:
                decisions[tensor.name] = Stays(FUSED_WITH_KEPT)
            elif tensor.name not in decisions and is_encoded(tensor):
                columns = tensor.shape[-1] if tensor.shape else 1
                self.groups.check(tensor.name, columns)
                decisions[tensor.name] = Stays(self.groups.why_not(columns) or "mlx-lm does not quantize it")
        if not model.quantized:
            reasons = (str(decision.reason) for decision in decisions.values())
            why = next(reasons, "mlx-lm quantizes no layer of it")
            raise ExportError(f"no weight of this model can become integers for {NAME}: {why}")
        return decisions


def _check_packages() -> None:
    """Raise MissingDependencyError if mlx or mlx-lm is not installed."""
    try:
        from pqweights.exports import mlx_model  # noqa: F401
    except ImportError as error:
        if (error.name or "").startswith("pqweights"):
            raise  # a module of pqweights that is missing is a bug
        raise MissingDependencyError(f"`target` {NAME} needs mlx and mlx-lm ({error}): {pip_install('mlx')}") from None


def _config(checkpoint: Checkpoint, model_plain: str) -> dict[str, Any]:
    """Return the configuration to give to mlx-lm. Raises ExportError if it has no model_type."""
    if not isinstance((checkpoint.config or {}).get("model_type"), str):
        raise ExportError(
            f"config.json: `target` {NAME} needs a model_type, by which mlx-lm finds the model; found none: fetch the "
            "original's config.json, or use --target bf16"
        )
    config = edited_config(checkpoint.config, "BF16", old_dtype=model_plain)
    config.pop("quantization", None)
    for settings in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(settings, dict) and key in settings:
                settings[key] = "bfloat16"  # mlx-lm would cast everything to another dtype, scales included
    return config


def _outputs(model: MlxModel) -> tuple[LogicalTensor, ...]:
    """Return the tensors that mlx-lm holds: moved from those of the checkpoint, or computed from them."""
    _check_size(model)
    values, cache = _Values(model.compute), MatrixCache()
    outputs: list[LogicalTensor] = []
    for name, output in model.outputs.items():
        known: dict[str, Any] = {"name": name, "shape": output.shape, "dtype": model.dtypes[name]}
        if output.segments is None:
            parts = tuple(part for source in sorted(output.sources, key=lambda t: t.name) for part in source.parts)
            outputs.append(EvaluatedTensor(**known, parts=parts, values=values))
        else:
            known |= {"segments": output.segments, "columns": output.columns, "transposed": output.transposed}
            outputs.append(MovedTensor(**known, cache=cache))
    return tuple(outputs)


def _fused_with_kept(model: MlxModel) -> dict[str, list[str]]:
    """Return the outputs that stay plain because a part is kept and others are not, by the first part that is kept."""
    result: dict[str, list[str]] = {}
    for name, output in model.outputs.items():
        kept = sorted(source.name for source in output.sources if kept_by_recipe(source))
        if kept and any(map(is_encoded, output.sources)):
            result.setdefault(kept[0], []).append(name)
    return result


def _check_size(model: MlxModel) -> None:
    """Raise ExportError if the tensors that mlx computes do not fit into the memory set aside for them."""
    computed = {name: output.shape for name, output in model.outputs.items() if output.segments is None}
    sizes = {name: math.prod(shape) * DTYPE_BITS[model.dtypes[name]] // 8 for name, shape in computed.items()}
    if sum(sizes.values()) > MOST_EVALUATED_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ExportError(
            f"tensor {largest!r}: mlx-lm computes it from others ({sizes[largest]} bytes), and all tensors that it "
            f"computes take more than the {MOST_EVALUATED_BYTES} bytes that this export holds in memory; use --target "
            "bf16 and mlx_lm.convert"
        )


class _Values:
    """The outputs that mlx computes, all of them when the first is asked for; another process gets them computed."""

    def __init__(self, compute: Callable[[], dict[str, npt.NDArray[np.uint8]]]) -> None:
        self._compute, self._lock = compute, ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_raw": self._raw, "_lock": self._lock}

    @functools.cached_property
    def _raw(self) -> dict[str, npt.NDArray[np.uint8]]:
        return self._compute()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of an output, in the dtype in which it is kept."""
        with self._lock:
            return self._raw[name]


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluatedTensor:
    """An output of sanitize that is computed, such as a norm's weight plus one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    values: _Values

    @property
    def plain_dtype(self) -> str:
        """The dtype in which mlx keeps it."""
        return self.dtype

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements [start, start + count) as raw bytes of `dtype` into `out`."""
        size = item_bytes(self.dtype)
        raw = self.values.raw(self.name)[start * size : (start + count) * size]
        out[: count * item_bytes(dtype)] = raw if dtype == self.dtype else convert(raw, self.dtype, dtype)


def read_options(options: ExportOptions) -> MlxFormat:
    """Return the format. Raises OptionError for an option that it does not have."""
    mode = one_of(NAME, "mode", options.mode, allowed=tuple(BITS))
    why_not = None if mode == "affine" else f"expected integers (`mode` affine), found the float format {mode}"
    check_rounding(NAME, options, why_not=why_not)
    with_mode = NAME if mode == "affine" else f"{NAME} in mode {mode}"
    return MlxFormat(
        mode=mode,
        bits=one_of(with_mode, "bits", options.bits, allowed=BITS[mode]),
        groups=GroupSize.of(with_mode, GROUP_SIZES[mode], options.group_size),
        qparams=one_of(with_mode, "qparams", options.qparams, allowed=(BEST, MINMAX)),
    )


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    parts = ["For mlx-lm, on Apple Silicon."]
    if not model.tokenizer:
        return [*parts, "mlx-lm needs a tokenizer beside the weights, and there is none here."]
    fetch, folder = [], model.quoted
    if model.branch is not None:  # mlx_lm.generate only loads main
        folder = shlex.quote(f"{model.location.rpartition('/')[2]}-{model.branch.replace('/', '-')}")
        fetch = [f"hf download {model.quoted}{model.revision_option} --local-dir {folder}"]
    python = [
        "from mlx_lm import generate, load",
        "",
        f"model, tokenizer = load({model.literal}{model.revision})",
        'print(generate(model, tokenizer, prompt="Once upon a time", max_tokens=20))',
    ]
    command = f'mlx_lm.generate --model {folder} --prompt "Once upon a time"'
    return [*parts, shell("pip install mlx-lm", *fetch, command), fenced("python", python)]


def _check(master: PlannedMaster, settings: MlxFormat) -> None:
    """See ExportTarget; mlx-lm is asked for its models by its files, as to import it takes a second."""
    source = master.source
    config = _config(source, model_dtype(source.config, source.tensors))
    model_type = config["model_type"]
    package = importlib.util.find_spec("mlx_lm")
    if importlib.util.find_spec("mlx") is None or package is None or not package.submodule_search_locations:
        raise MissingDependencyError(f"it needs mlx and mlx-lm: {pip_install('mlx')}")
    folder = Path(package.submodule_search_locations[0])
    if (folder / "models" / f"{model_type}.py").is_file():
        return
    # Some types are those of another module, by tables of literals that only an import would give.
    if f'"{model_type}"' not in (folder / "utils.py").read_text(encoding="utf-8"):
        advice = other_targets(MLX_TARGET, config)
        raise ExportError(f"mlx-lm does not support this model ({model_type!r}); {advice}")


def _outlines(checkpoint: Checkpoint, settings: Sequence[MlxFormat]) -> list[Outline]:
    """See ExportTarget. mlx-lm is asked once: what it quantizes as it was told, it quantizes in any format."""
    first = settings[0]
    outline = first.outline(checkpoint)
    result = []
    for other in settings:
        decisions = dict(outline.decisions)
        for tensor, rounding in outline.rounded:
            if rounding == first.usual(tensor.shape[-1]):
                decisions[tensor.name] = other.usual(tensor.shape[-1]) or Stays("groups do not divide its rows")
        result.append(replace(outline, decisions=decisions))
    return result


TARGET = ExportTarget(
    name=NAME,
    runtime=MLX,
    tags=("mlx",),
    options=("mode", *INTEGER_OPTIONS),
    read_options=read_options,
    prepare=integer_export,
    check=_check,
    unchecked="if mlx-lm takes its configuration and tensors",
    load_section=_load_section,
    library="mlx",
    choices=tuple(
        FormatChoice(f"{bits} bits", ExportOptions(bits=bits))
        if mode == "affine"
        else FormatChoice(mode, ExportOptions(mode=mode))
        for mode, widths in BITS.items()
        for bits in widths
    ),
    outlines=_outlines,
    by_layer=False,
    estimate=MlxFormat.usual,
)
