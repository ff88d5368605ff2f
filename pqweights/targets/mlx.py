"""The mlx target: a folder for mlx_lm.load, with affine integers (w = code * scale + bias) or mlx's small floats.

mlx-lm itself decides what becomes of each tensor (mlx_model.py, mlx_trace.py). With its rule for scales and biases, the
tensors are those of mlx_lm.convert, byte for byte. mlx is imported when an export is made, not before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.config import declare_drafts, edited_config, model_dtype
from pqweights.checkpoint.header import byte_count
from pqweights.checkpoint.names import GENERATION_CONFIG
from pqweights.checkpoint.promise import differing_head
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_json_object
from pqweights.checkpoint.structure import unused_tensors
from pqweights.checkpoint.views import EvaluatedTensor, made_of, sources_of
from pqweights.common.advice import pip_install
from pqweights.common.markdown import fenced
from pqweights.common.options import Options
from pqweights.common.strict_json import json_bytes
from pqweights.errors import ExportError, MissingDependencyError, OptionError
from pqweights.formats.mlx import mlx_format
from pqweights.formats.packing import PackedFormat
from pqweights.models import described, text_config, text_model
from pqweights.models.conventions import HEADS
from pqweights.models.description import UNWRAPPED, ModelDescription
from pqweights.models.names import is_leftover
from pqweights.planning.layout import stored_bytes
from pqweights.planning.recipe import Recipe
from pqweights.planning.roles import names_of
from pqweights.targets.architectures import MLX as MLX_TARGET
from pqweights.targets.architectures import check_computed, other_targets
from pqweights.targets.assignment import (
    PLAIN,
    PLAIN_ERROR,
    Candidate,
    Layers,
    chosen_within,
    describe,
    distortion,
    recipe_of,
)
from pqweights.targets.bf16 import is_weight, stored_dtype
from pqweights.targets.carried import plain_beside_codes
from pqweights.targets.integers import Assignment
from pqweights.targets.linear import FUSED_WITH_KEPT, HEADER_BYTES, PLAIN_IN_SOURCE, fused_warnings, kept_by_recipe
from pqweights.targets.loading import LoadableModel, shell
from pqweights.targets.target import (
    BEST,
    INTEGER_OPTIONS,
    MINMAX,
    MLX,
    RECIPE_OPTIONS,
    ExportSettings,
    ExportTarget,
    GroupSize,
    one_of,
    read_rounding,
)

NAME = "mlx"
# Bit widths and group sizes of the modes; the first is the default.
BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
# The formats by name: mode and bits. Formats are chosen for a size from those of integers.
INTEGERS = {f"q{bits}": ("affine", bits) for bits in sorted(BITS["affine"])}
FORMATS = INTEGERS | {mode: (mode, bits[0]) for mode, bits in BITS.items() if mode != "affine"}
# Mixes of mlx-lm: the bits of most weights, and of those that get more.
MIXES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
GROUP_SIZES = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
# The tensors that mlx computes, for the most part norms, are held in memory until they are written.
MOST_EVALUATED_BYTES = 256_000_000


@dataclass(frozen=True, kw_only=True)
class MlxFormat:
    """The format with its options: see Options."""

    mode: str
    bits: int
    groups: GroupSize
    qparams: str
    mix: str | None
    recipe: Recipe

    def assign(self, checkpoint: Checkpoint, called: str | None) -> Assignment:
        """Decide which weights become integers; names and shapes are those of mlx-lm.

        Raises MissingDependencyError without mlx or mlx-lm, ExportError if mlx-lm cannot take the model.
        """
        _check_packages()
        model = self._with_or_without_head(checkpoint)
        outputs, config = model.tensors, model.config or {}
        _check_size(outputs)
        text = text_model(checkpoint.config)
        fused_with = _fused_with_kept(outputs, text, checkpoint.weights)
        stay = self._plain_in_source(checkpoint)
        fused = {name for names in fused_with.values() for name in names}
        decisions = self._decisions(model, text, weights=checkpoint.weights, fused=fused, stay=stay)
        used = {tensor.name for output in outputs for tensor in made_of(output)}
        _check_head(checkpoint, used)
        declare_drafts(config, sorted(used))
        model_type = (checkpoint.config or {}).get("model_type")
        reason = f"mlx-lm's model of type {model_type!r} does not hold them"
        return replace(
            model,
            decisions=decisions,
            left_out=dict.fromkeys((t.name for t in checkpoint.tensors if t.name not in used), reason),
            metadata={"format": "mlx"},
            plain_dtype=None,
            warnings=(
                *model.warnings,
                *fused_warnings({k: [t for t in outputs if t.name in names] for k, names in fused_with.items()}),
            ),
        )

    def _with_or_without_head(self, checkpoint: Checkpoint) -> Assignment:
        """Return the model that mlx-lm makes of the checkpoint; without its head where it has no place for one."""
        try:
            return self._model(checkpoint)
        except ExportError:
            others = tuple(t for t in checkpoint.tensors if t.name not in {f"{head}.weight" for head in HEADS})
            if len(others) < len(checkpoint.tensors):
                with contextlib.suppress(ExportError):
                    return self._model(replace(checkpoint, tensors=others))
            raise

    def _model(self, checkpoint: Checkpoint) -> Assignment:
        """Return the model that mlx-lm makes of the checkpoint."""
        from pqweights.targets import mlx_model, mlx_trace

        unused = unused_tensors([t.name for t in checkpoint.tensors], checkpoint.config or {})
        held = [t for t in checkpoint.tensors if t.name not in unused and not is_leftover(t.name, t.dtype, t.shape)]
        checkpoint = replace(checkpoint, tensors=tuple(held))
        model_plain = model_dtype(checkpoint.config, checkpoint.tensors)
        dtypes = {
            t.name: stored_dtype(t, checkpoint.weights, model=model_plain, dtype="BF16") for t in checkpoint.tensors
        }
        for name, dtype in dtypes.items():
            if dtype not in mlx_trace.MLX_DTYPES:
                raise ExportError(f"tensor {name!r}: mlx has no dtype for {dtype}; keep it out of the checkpoint")
        has_generation, stay = GENERATION_CONFIG in checkpoint.companions, self._plain_in_source(checkpoint)
        generation = json_bytes(read_json_object(checkpoint.storage, GENERATION_CONFIG)) if has_generation else None
        return mlx_model.read_model(
            _config(checkpoint, model_plain),
            generation_config=generation,
            tensors={tensor.name: tensor for tensor in checkpoint.tensors},
            weights=checkpoint.weights,
            dtypes=dtypes,
            default=self._format(self.mode, self.bits, self.groups.size),
            smaller=self.groups.tried[1:],
            mix=self.mix,
            choose=functools.partial(self._choose, checkpoint) if self.recipe.decides or stay else None,
        )

    def _choose(
        self, checkpoint: Checkpoint, outputs: Mapping[str, LogicalTensor], quantized: Collection[str]
    ) -> dict[str, PackedFormat | None]:
        """Return the formats of weights that mlx-lm would quantize otherwise, None for those that stay plain."""
        weights = {name: outputs[name] for name in quantized}
        model = text_model(checkpoint.config)
        rules = {name: self.recipe.rule_for(model, output)[0] for name, output in weights.items()}
        named = [name for tensor in (*weights.values(), *checkpoint.tensors) for name in names_of(tensor)]
        self.recipe.check(model, [*weights.values()], named)
        formats = {name: rule.format or PLAIN for name, rule in rules.items() if rule is not None}
        stay = self._plain_in_source(checkpoint)
        in_source = (n for n, o in weights.items() if made_of(o) and all(of.name in stay for of in made_of(o)))
        formats |= {name: PLAIN for name in in_source if name not in formats}
        if self.recipe.goal is not None:
            formats |= self._within(checkpoint, outputs, weights=weights, ruled=formats)
        return {
            name: None if how == PLAIN else self._fitting(how, weights[name].shape[-1]) for name, how in formats.items()
        }

    def _plain_in_source(self, checkpoint: Checkpoint) -> set[str]:
        """Return the weights that stay plain as in the source, unless a rule, a mix or a size decides."""
        if self.mix is not None or self.recipe.goal is not None:
            return set()
        return plain_beside_codes(checkpoint.tensors, self._format(self.mode, self.bits, self.groups.size).rule)

    def _format(self, mode: str, bits: int, group_size: int) -> PackedFormat:
        """Return the format of a mode."""
        return mlx_format(mode, bits, group_size, name=BEST if self.qparams == BEST else "mlx")

    def _fitting(self, name: str, columns: int) -> PackedFormat | None:
        """Return a format with the largest groups that divide rows of `columns` weights; None if there are none."""
        mode, bits = FORMATS[name]
        groups = self.groups if mode == self.mode else GroupSize.of(NAME, GROUP_SIZES[mode], None)
        size = groups.fitting([columns])
        return None if size is None else self._format(mode, bits, size)

    def _within(
        self,
        checkpoint: Checkpoint,
        outputs: Mapping[str, LogicalTensor],
        *,
        weights: Mapping[str, LogicalTensor],
        ruled: Mapping[str, str],
    ) -> dict[str, str]:
        """Choose formats for the weights about which no rule decides, so that the files have at most a size."""
        overhead = sum(HEADER_BYTES + _stored(o.shape, None) for n, o in outputs.items() if n not in weights)
        for name, how in ruled.items():
            columns = weights[name].shape[-1]
            overhead += _stored(weights[name].shape, None if how == PLAIN else self._fitting(how, columns))
        layers = Layers.of(checkpoint, {name: made_of(o)[0] for name, o in weights.items() if name not in ruled})
        candidates: dict[str, list[Candidate]] = {}
        for layer, names in layers.members.items():
            shapes = [weights[name].shape for name in names]
            candidates[layer] = [Candidate(PLAIN, 2 * sum(map(math.prod, shapes)), PLAIN_ERROR)]
            for name in INTEGERS if self.mode == "affine" else (self.mode, "q8"):
                fitting = [self._fitting(name, shape[-1]) for shape in shapes]
                if (first := fitting[0]) is not None and None not in fitting:
                    cost = sum(HEADER_BYTES + _stored(shape, how) for shape, how in zip(shapes, fitting, strict=True))
                    candidates[layer].append(Candidate(name, cost, distortion(first.rule)))
        chosen = chosen_within(
            self.recipe,
            candidates,
            overhead=overhead,
            weights=layers.weights,
            roles=layers.roles,
            parameters=sum(math.prod(weights[name].shape) for names in layers.members.values() for name in names),
        )
        return {name: chosen[layer] for layer, names in layers.members.items() for name in names}

    def _decisions(
        self,
        model: Assignment,
        text: ModelDescription,
        *,
        weights: frozenset[str],
        fused: Collection[str],
        stay: Collection[str],
    ) -> dict[str, PackedFormat | str]:
        """Decide what becomes of each weight.

        model: what mlx-lm makes of the checkpoint
        weights: see Checkpoint
        fused: the names of those that stay plain as they are partly kept
        stay: the names in the checkpoint of those that stay plain as the source has them
        """
        decisions = dict(model.decisions)
        for tensor in model.tensors:
            if tensor.name in fused:
                decisions[tensor.name] = FUSED_WITH_KEPT
            elif tensor.name not in decisions and is_weight(tensor, weights):
                columns = tensor.shape[-1] if tensor.shape else 1
                self.groups.check(tensor.name, columns)
                as_source = all(source.name in stay for source in sources_of(tensor) or (tensor,))
                why = PLAIN_IN_SOURCE if as_source else self._why_plain(tensor, text)
                decisions[tensor.name] = self.groups.why_not(columns) or why
        if not model.decisions:
            why = next(map(str, decisions.values()), "mlx-lm quantizes no layer of it")
            raise ExportError(f"no weight of this model can become integers for {NAME}: {why}")
        return decisions

    def _why_plain(self, tensor: LogicalTensor, model: ModelDescription) -> str:
        """Return why a weight stays plain whose rows groups divide."""
        rule, why = self.recipe.rule_for(model, tensor)
        if rule is not None and rule.keep:
            return why
        goal = self.recipe.goal
        return "mlx-lm does not quantize it" if goal is None else f"chosen for {goal}"


def _stored(shape: tuple[int, ...], how: PackedFormat | None) -> int:
    """Return the bytes of a weight that is quantized, or of a tensor that is not."""
    return 2 * math.prod(shape) if how is None else stored_bytes(how.specs("", shape))


def _check_head(checkpoint: Checkpoint, used: Set[str]) -> None:
    """Raise ExportError if mlx-lm has the embeddings in place of a head that differs. used: names of tensors"""
    unused = {tensor.name for tensor in checkpoint.tensors} - used
    if unused.isdisjoint(f"{head}.weight" for head in HEADS):
        return
    config = checkpoint.config or {}
    pair = differing_head(checkpoint.tensors, config)
    if pair is not None and pair[0] not in used:
        file = next(tensor.parts[0].file for tensor in checkpoint.tensors if tensor.name == pair[0])
        raise ExportError(
            f"{file}: tensor {pair[0]!r}: mlx-lm's model of type {config.get('model_type')!r} computes with "
            f"{pair[1]!r} in its place, and their values differ; {other_targets(MLX_TARGET, config)}"
        )


def _check_packages() -> None:
    """Raise MissingDependencyError if mlx or mlx-lm is not installed."""
    try:
        from pqweights.targets import mlx_model  # noqa: F401
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
    for settings in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(settings, dict) and key in settings:
                settings[key] = "bfloat16"  # mlx-lm would cast everything to another dtype, scales included
    return config


def _fused_with_kept(
    outputs: Iterable[LogicalTensor], text: ModelDescription, weights: frozenset[str]
) -> dict[str, list[str]]:
    """Return the outputs that stay plain because a part is kept and others are not, by the first part that is kept."""
    result = dict[str, list[str]]()
    for output in outputs:
        kept = sorted(of.name for of in made_of(output) if kept_by_recipe(of, text, weights))
        if kept and any(is_weight(of, weights) for of in made_of(output)):
            result.setdefault(kept[0], []).append(output.name)
    return result


def _check_size(outputs: Iterable[LogicalTensor]) -> None:
    """Raise ExportError if the tensors that mlx computes do not fit into the memory set aside for them."""
    sizes = {of.name: byte_count(of.dtype, of.shape) for of in outputs if isinstance(of, EvaluatedTensor)}
    if sum(sizes.values()) > MOST_EVALUATED_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ExportError(
            f"tensor {largest!r}: mlx-lm computes it from others ({sizes[largest]} bytes), and all tensors that it "
            f"computes take more than the {MOST_EVALUATED_BYTES} bytes that this export holds in memory; use --target "
            "bf16 and mlx_lm.convert"
        )


def read_options(options: Options) -> ExportSettings:
    """Return the target with its options. Raises OptionError for one that it does not have."""
    name = None if options.format is None else one_of(NAME, "format", options.format, allowed=(*FORMATS, *MIXES))
    if name is not None and (options.mode is not None or options.bits is not None):
        raise OptionError("`format`: says the mode and the bits; leave out `mode` and `bits`")
    by_format = FORMATS.get(name or "", ("affine", None)) if name is not None else (options.mode, options.bits)
    mode = one_of(NAME, "mode", by_format[0], allowed=tuple(BITS))
    mix = name if name in MIXES else None
    rounding = read_rounding(NAME, options)
    recipe = recipe_of(options, tuple(FORMATS))
    if mix is not None and recipe.goal is not None:
        raise OptionError(f"`format` {mix}: expected either a mix or a target, which chooses the bits of each layer")
    with_mode = NAME if mode == "affine" else f"{NAME} in mode {mode}"
    how = MlxFormat(
        mode=mode,
        bits=int(mix.split("_")[1]) if mix else one_of(with_mode, "bits", by_format[1], allowed=BITS[mode]),
        groups=GroupSize.of(with_mode, GROUP_SIZES[mode], options.group_size),
        qparams=one_of(with_mode, "qparams", options.qparams, allowed=(BEST, MINMAX)),
        mix=mix,
        recipe=recipe,
    )
    stated = {"target": NAME, "mode": mode, "bits": how.bits, "group_size": how.groups.size, "qparams": how.qparams}
    stated |= {} if mix is None else {"mix": mix}
    return ExportSettings(stated=stated | describe(how.recipe), assign=how.assign, recipe=how.recipe, rounding=rounding)


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


def _check(checkpoint: Checkpoint) -> None:
    """Ask mlx-lm for its models by its files, as to import it takes a second."""
    config = _config(checkpoint, model_dtype(checkpoint.config, checkpoint.tensors))
    mlx = described(config["model_type"]).mlx
    model_type = text_config(config).get("model_type") if mlx.layout == UNWRAPPED else mlx.module
    model_type = model_type or config["model_type"]
    package = importlib.util.find_spec("mlx_lm")
    if importlib.util.find_spec("mlx") is None or package is None or not package.submodule_search_locations:
        raise MissingDependencyError(f"it needs mlx and mlx-lm: {pip_install('mlx')}")
    folder = Path(package.submodule_search_locations[0])
    # Some types are those of another module, by tables of literals that only an import would give.
    is_file = (folder / "models" / f"{model_type}.py").is_file()
    if not is_file and f'"{model_type}"' not in (folder / "utils.py").read_text(encoding="utf-8"):
        advice = other_targets(MLX_TARGET, config)
        raise ExportError(f"mlx-lm does not support this model ({config['model_type']!r}); {advice}")
    check_computed(config)


def _bits(mode: str, bits: int) -> float:
    """Return the bits of a weight: integers have a scale and an offset of 16 bits for each group, floats 8 bits."""
    return bits + (32 if mode == "affine" else 8) / GROUP_SIZES[mode][0]


TARGET = ExportTarget(
    name=NAME,
    runtime=MLX,
    tags=("mlx",),
    options=("mode", *RECIPE_OPTIONS, *INTEGER_OPTIONS),
    stated=("mix", "rules"),
    read_options=read_options,
    check=_check,
    unchecked=lambda checkpoint: "if mlx-lm takes its configuration and tensors",
    load_section=_load_section,
    library="mlx",
    choices={name: (Options(format=name), _bits(*how)) for name, how in FORMATS.items()},
)
