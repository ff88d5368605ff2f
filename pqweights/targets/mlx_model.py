"""The model that mlx-lm builds from a configuration, with placeholders for weights: what it holds, how it quantizes.

The steps are those of mlx_lm.convert (0.32): build, sanitize, check names and shapes, cast, quantize. Weights are only
read for what mlx computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import re
import sys
import tempfile
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.views import EvaluatedTensor, made_of
from pqweights.common.dtypes import item_bytes
from pqweights.errors import ExportError
from pqweights.formats.mlx import mlx_format
from pqweights.formats.packing import PackedFormat
from pqweights.models import described, text_model
from pqweights.models.description import (
    AS_PUBLISHED,
    NESTED,
    STACKED,
    TRANSPOSED,
    UNPREFIXED,
    UNWRAPPED,
    MlxDifferences,
    ModelDescription,
)
from pqweights.models.names import predicts_further, tower_of
from pqweights.models.optional_parts import part_defaults
from pqweights.models.settings import OTHER_NAMES
from pqweights.targets.architectures import MLX, check_computed, other_targets
from pqweights.targets.bf16 import is_weight
from pqweights.targets.integers import Assignment
from pqweights.targets.linear import kept_by_recipe
from pqweights.targets.mlx_positions import position_warnings, state_positions
from pqweights.targets.mlx_trace import DTYPE_NAMES, MLX_DTYPES, Output, Sanitize, Weights, placeholder, trace

# Keys of a configuration: the old name, and the name that transformers 5 writes.
RENAMED = {"num_experts": "num_local_experts", "n_ctx": "n_positions"}
# Settings that some of mlx-lm's models require, and that transformers computes where the configuration lacks them.
COMPUTED: dict[str, Callable[[dict[str, Any]], int]] = {
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "intermediate_size": lambda config: int(config["expand"] * config["hidden_size"]),  # Mamba2
}
ROUTER_BIAS = ".e_score_correction_bias"
# What mlx-lm's own code raises for configurations and weights that it does not support, and how much of it is quoted.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
MOST_QUOTED = 240
# What mlx-lm says of it, and the same in words of ours.
IN_WORDS = (
    (r"Model type (\S+) not supported", r"it has no model of type '\1'"),
    (r".* missing \d+ required .* arguments?: (.*)", r"it needs settings that config.json does not have: \1"),
    (r"Received (\d+) parameters? not in model: (.*)", r"its model has no place for \1 tensors: \2"),
    (r"Missing (\d+) parameters?: (.*)", r"its model needs \1 tensors that the checkpoint does not have: \2"),
)
# How a module is quantized, by its name: its bits, group_size and mode, or whether it is, as by default.
Predicate = Callable[[str, nn.Module], bool | dict[str, Any]]
# Formats of weights by name, None for plain ones, given the outputs and the names of those that mlx-lm would quantize.
Choose = Callable[[Mapping[str, Output], Collection[str]], Mapping[str, PackedFormat | None]]
MIXES: tuple[str, ...] = tuple(QUANT_RECIPES)


def read_model(
    config: dict[str, Any],
    *,
    generation_config: bytes | None,
    weights: frozenset[str],
    tensors: Mapping[str, LogicalTensor],
    dtypes: Mapping[str, str],
    default: PackedFormat,
    smaller: Sequence[int],
    mix: str | None = None,
    choose: Choose | None = None,
) -> Assignment:
    """Build the model of a configuration, and return what mlx-lm makes of its tensors.

    These are the parameters before quantization, in the order of sanitize and in the dtypes in which they are kept. The
    decisions are how mlx-lm quantizes weights, the configuration is that of the quantized model as mlx-lm saves it, and
    the warnings say what mlx-lm computes otherwise than transformers.

    config: config.json
    generation_config: the content of generation_config.json, if there is one
    weights: see Checkpoint
    tensors, dtypes: the checkpoint's tensors and the dtypes that mlx-lm gets them in, by name
    default: the format of weights for which mlx-lm has no settings of its own
    smaller: other group sizes, the largest first, for modules of which the master encodes a part, and whose rows that
        of `default` does not divide
    mix: a recipe of mlx-lm's for the bits of each module, one of MIXES
    choose: returns the formats of weights that are quantized otherwise than mlx-lm would, None for plain ones, given
        the outputs and the names of the weights that mlx-lm would quantize

    Raises ExportError if mlx-lm does not support the model.
    """
    checked = functools.partial(_checked, config.get("model_type"), other_targets(MLX, config))
    with checked():
        of_source = config
        config = _loaded(config, generation_config)
        _add_old_names(config)
        known = text_model(config)
        mlx = described(config["model_type"]).mlx
        _arrange(config, mlx)
        build = _builder(config, mlx)
        load = functools.partial(_with_placeholders, config, build, mlx.layout, tensors, dtypes)
        model, outputs = load()
        warnings = position_warnings(model, of_source) + _without_router_biases(tensors, outputs, known)
    kept = {name for name, o in outputs.items() if any(kept_by_recipe(of, known, weights) for of in made_of(o))}
    in_codes = {name for name, o in outputs.items() if any(is_weight(of, weights) for of in made_of(o))}
    predicate = getattr(model, "quant_predicate", None)  # the model's own function for how a module is quantized
    quantize = functools.partial(_quantize_in_sizes, config=config, default=default, smaller=smaller, in_codes=in_codes)
    with checked():
        if mix is not None:
            predicate = mixed_quant_predicate_builder(mix, model, default.rule.group_size)
        model, stated = quantize(model, predicate, kept)
        if choose is not None:
            chosen = choose(outputs, _quantized(model, default))
            plain = kept | {name for name, how in chosen.items() if how is None}
            model, stated = quantize(load()[0], _with_choices(predicate, chosen), plain)
        formats, config = _quantized(model, default), _saved(stated, "vision_tower" in getattr(model, "model", {}))
    return Assignment(tensors=tuple(outputs.values()), decisions=formats, config=config, warnings=warnings)


def _without_router_biases(
    tensors: Mapping[str, LogicalTensor], outputs: Mapping[str, Output], model: ModelDescription
) -> tuple[str, ...]:
    """Return a warning if mlx-lm chooses experts without what transformers adds to their scores, as of ERNIE 4.5."""
    used, layers = {tensor.name for o in outputs.values() for tensor in made_of(o)}, model.layers or sys.maxsize
    names = [name for name in tensors if name.endswith(ROUTER_BIAS) and name not in used]
    left = [name for name in names if not predicts_further(name, layers) and mx.any(_load(tensors[name], "F32")).item()]
    if not left:
        return ()
    return (
        f"mlx-lm chooses experts without {left[0]} and {len(left) - 1} like it, which transformers adds to their "
        "scores: it computes something different from transformers for texts of any length",
    )


def _with_placeholders(
    config: dict[str, Any],
    build: Callable[[], Any],
    layout: str | None,
    tensors: Mapping[str, LogicalTensor],
    dtypes: Mapping[str, str],
) -> tuple[Any, dict[str, Output]]:
    """Return a model with placeholders, and its parameters before quantization. tensors, dtypes: see read_model"""
    model = build()
    outputs: dict[str, Output] = {}
    compute = functools.partial(_computed, outputs, build, layout, tensors, dtypes)
    # With the sanitize of this very model: some models drop parts of themselves in it.
    outputs |= trace(_sanitize(model, layout), tensors, dtypes, compute)
    model.eval()
    model.load_weights([(name, placeholder(o, o.dtype)) for name, o in outputs.items()], strict=True)
    _cast(model, config)
    for name, array in tree_flatten(model.parameters()):
        outputs[name] = replace(outputs[name], dtype=DTYPE_NAMES[array.dtype])
    return model, outputs


def _computed(
    outputs: Mapping[str, Output],
    build: Callable[[], Any],
    layout: str | None,
    tensors: Mapping[str, LogicalTensor],
    dtypes: Mapping[str, str],
) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the bytes of the outputs that mlx computes, in the dtypes in which they are kept."""
    evaluated = {name: output for name, output in outputs.items() if isinstance(output, EvaluatedTensor)}
    needed = {tensor.name for output in evaluated.values() for tensor in output.made_of}
    weights = {n: (_load if n in needed else placeholder)(t, dtypes[n]) for n, t in tensors.items()}
    result = _sanitize(build(), layout)(weights)
    mx.eval([result[name] for name in evaluated])
    return {n: np.array(result[n].astype(MLX_DTYPES[o.dtype]).reshape(-1).view(mx.uint8)) for n, o in evaluated.items()}


def _quantize_in_sizes(
    model: Any,
    predicate: Predicate | None,
    plain: Collection[str],
    *,
    config: dict[str, Any],
    default: PackedFormat,
    smaller: Sequence[int],
    in_codes: Set[str],
) -> tuple[Any, dict[str, Any]]:
    """Have weights quantized but for the plain ones; of those in codes, what is left in groups of smaller sizes."""
    rule = default.rule
    quantized, described = _quantize(model, config, default, predicate, lambda name: name not in plain)
    for size in smaller:
        if left := in_codes - set(plain) - set(_quantized(quantized, default)):
            how = mlx_format(rule.kind, rule.bits, size)
            quantized, described = _quantize(quantized, described, how, predicate, left.__contains__, only_size=True)
    return quantized, described


def _load(tensor: LogicalTensor, dtype: str) -> mx.array:
    """Read a whole tensor as an mlx array."""
    count = element_count(tensor)
    raw = np.empty(count * item_bytes(dtype), dtype=np.uint8)
    tensor.read(0, count, dtype, raw)
    return mx.array(raw).view(MLX_DTYPES[dtype]).reshape(tensor.shape)


@contextlib.contextmanager
def _checked(model_type: object, advice: str) -> Iterator[None]:
    """Turn an error of mlx-lm into an ExportError that ends with `advice`; what mlx-lm prints is dropped.

    Where mlx-lm does not say itself what it lacks, the line of its code tells about which setting it stumbled.
    """
    what = f"mlx-lm does not support this model ({model_type!r})"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit as error:  # mlx-lm's OLMo
        raise ExportError(f"{what}: a package that it needs is not installed; {advice}") from error
    except REFUSALS as error:
        text = str(error).rstrip(". ")
        lines = traceback.extract_tb(error.__traceback__)
        line = next(
            (f" in {Path(f.filename).name}, line {f.lineno}" for f in lines[::-1] if "mlx_lm" in f.filename), ""
        )
        said = f"its code fails ({type(error).__name__}{line}): {text}"
        for pattern, words in IN_WORDS:
            if match := re.fullmatch(pattern, text, re.DOTALL):
                said = match.expand(words)
                if words.startswith("its model has no place"):
                    advice = f"if the model computes nothing with them, leave them out (`leave_out`), or {advice}"
        raise ExportError(f"{what}: {textwrap.shorten(said, MOST_QUOTED, placeholder=' ...')}; {advice}") from error


def _with_choices(predicate: Predicate | None, chosen: Mapping[str, PackedFormat | None]) -> Predicate:
    """Return a function for how modules are quantized whose weights some formats were chosen for."""

    def decided(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if (how := chosen.get(f"{path}.weight")) is None:
            return predicate is None or predicate(path, module)
        return {"bits": how.rule.bits, "group_size": how.rule.group_size, "mode": how.rule.kind}

    return decided


def _quantize(
    model: Any,
    config: dict[str, Any],
    how: PackedFormat,
    predicate: Predicate | None,
    wanted: Callable[[str], bool],
    only_size: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Have mlx-lm quantize some modules of placeholders, as far as groups divide their rows.

    It names each module in the configuration that is quantized otherwise than the first ones.

    wanted: whether a weight is to be quantized, by its name
    only_size: the model's own settings for a module get this group size
    """
    size = how.rule.group_size

    def quantizes(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not wanted(f"{path}.weight"):
            return False
        decided = predicate is None or predicate(path, module)
        return {**decided, "group_size": size} if only_size and isinstance(decided, dict) else decided

    with contextlib.redirect_stdout(io.StringIO()):
        result: tuple[Any, dict[str, Any]] = mlx_lm_utils.quantize_model(
            model, config, size, how.rule.bits, mode=how.rule.kind, quant_predicate=quantizes
        )
    return result


def _quantized(model: Any, default: PackedFormat) -> dict[str, PackedFormat]:
    """Return the formats of the weights that mlx-lm quantized. default: has the name of the rule for scales"""
    names = {name for name, _ in tree_flatten(model.parameters())}
    return {
        f"{path}.weight": mlx_format(
            getattr(module, "mode", "affine"), module.bits, module.group_size, name=default.rule.name
        )
        for path, module in model.named_modules()
        if f"{path}.scales" in names
    }


def _sanitize(model: Any, layout: str | None) -> Sanitize:
    """Return the model's own sanitize, if it has one, behind what converts the layout of transformers to its own."""
    own: Sanitize = getattr(model, "sanitize", lambda weights: weights)
    if layout is None:
        return own
    convert = CONVERTERS[layout]
    return lambda weights: own(convert(weights))


def _loaded(config: dict[str, Any], generation_config: bytes | None) -> dict[str, Any]:
    """The configuration as mlx-lm reads it from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if generation_config is not None:
            (Path(folder) / "generation_config.json").write_bytes(generation_config)
        loaded: dict[str, Any] = mlx_lm_utils.load_config(Path(folder))
    return loaded


def _saved(config: dict[str, Any], keep_vision_config: bool) -> dict[str, Any]:
    """The configuration as mlx-lm writes it to a folder."""
    with tempfile.NamedTemporaryFile() as file:
        mlx_lm_utils.save_config(config, file.name, keep_vision_config=keep_vision_config)
        saved: dict[str, Any] = json.loads(Path(file.name).read_bytes())
    return saved


def _builder(config: dict[str, Any], mlx: MlxDifferences) -> Callable[[], Any]:
    """Return a function that makes the model, without memory for its parameters."""
    model_class, arguments_class = mlx_lm_utils._get_classes(config)
    check_computed(config)
    _check_activation(config, arguments_class)
    _add_computed(config, arguments_class, mlx)
    arguments = arguments_class.from_dict(config)
    return lambda: model_class(arguments)


def _add_old_names(config: dict[str, Any]) -> None:
    """Add the old names of keys that transformers 5 writes under new names.

    Most of mlx-lm's models only know the old names, and many silently take a default for a missing one, such as a wrong
    base of the rotary embedding.
    """
    state_positions(config)
    _add_defaults(config)
    for settings in (config, config.get("text_config")):
        if not isinstance(settings, dict):
            continue
        mlx = described(settings.get("model_type")).mlx
        with contextlib.suppress(KeyError):
            settings.update(mlx.computed(settings))
        for key, value in mlx.constants.items():
            settings.setdefault(key, value)
        for old, new in RENAMED.items():
            if new in settings:
                settings.setdefault(old, settings[new])


def _check_activation(config: dict[str, Any], arguments_class: Any) -> None:
    """Raise ExportError for an activation that mlx-lm does not read: it computes with the usual one of the type."""
    usual, stated = text_model(config).defaults.get("hidden_act"), config.get("hidden_act")
    read = {field.name for field in dataclasses.fields(arguments_class)} & {"hidden_act", "text_config"}
    if usual == "silu" and stated not in (None, "silu", "swish") and not read:
        raise ExportError(
            f"config.json: mlx-lm computes this model ({config['model_type']}) only with hidden_act silu, found "
            f"{stated!r}; {other_targets(MLX, config)}"
        )


def _add_defaults(config: dict[str, Any]) -> None:
    """State what transformers takes for keys that are absent: mlx-lm takes something else, or refuses the model."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    model = text_model(config)
    defaults = {**model.defaults, **part_defaults(str(text.get("model_type")))}
    for key, value in defaults.items():
        is_absent = not any(name in text for name in (key, *OTHER_NAMES.get(key, ())))
        if value is not None and is_absent and (key != "tie_word_embeddings" or text is config):
            text[key] = value
    if defaults and text.get("num_key_value_heads") is None and "num_attention_heads" in text:
        text["num_key_value_heads"] = text["num_attention_heads"]


def _arrange(config: dict[str, Any], mlx: MlxDifferences) -> None:
    """Put the settings of the text model where mlx-lm looks for them; name the type under which it has the model."""
    if mlx.layout == NESTED:
        config["text_config"] = {**config}
    elif mlx.layout == UNWRAPPED:
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config |= config.pop("text_config", {}) | outer
    config["model_type"] = mlx.module or config["model_type"]


def _add_computed(config: dict[str, Any], arguments_class: Any, mlx: MlxDifferences) -> None:
    """Add settings that mlx-lm reads, and that transformers computes from others or has in another place.

    Those are added without which mlx-lm refuses the model, and of types that are known also those for which it takes a
    number of its own.
    """
    text, is_known = config.get("text_config") or {}, bool(described(config["model_type"]).defaults)
    for field in dataclasses.fields(arguments_class):
        compute = COMPUTED.get(field.name)
        takes_own = field.default is not None and is_known
        if compute is None or field.name in config or not (takes_own or field.default is dataclasses.MISSING):
            continue
        with contextlib.suppress(KeyError):  # mlx-lm will say what is missing
            value = compute(config)
            if value != field.default:
                config[field.name] = value
    if mlx.vocabulary is not None and text.get("vocab_size", mlx.vocabulary) != mlx.vocabulary:
        config.setdefault("vocab_size", text["vocab_size"])
    tied = config.get("tie_word_embeddings")
    if mlx.head_in_text and tied is not None and tied != mlx.tied:
        text.setdefault("tie_word_embeddings", tied)


def _cast(model: Any, config: dict[str, Any]) -> None:
    """Cast as mlx_lm.convert does: to the dtype that the configuration names in one of the two places where it looks.

    The key `dtype` of the top level is not one of them.
    """
    name = config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    if name not in ("float16", "bfloat16", "float32"):
        return
    dtype, applies = getattr(mx, name), getattr(model, "cast_predicate", lambda _: True)
    model.update(
        tree_map_with_path(
            lambda path, array: (
                array.astype(dtype) if applies(path) and mx.issubdtype(array.dtype, mx.floating) else array
            ),
            model.parameters(),
        )
    )


def _unfused_gpt_oss(weights: Weights) -> Weights:
    """Convert gpt-oss with plain experts: mlx-lm expects packed experts, whose rows run along the input."""
    result: Weights = {}
    for name, weight in weights.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            name, weight = f"{name}.weight", weight.swapaxes(-1, -2)
        result[name] = weight
    return result


def _stacked_experts(weights: Weights) -> Weights:
    """Convert Qwen3.5 with single experts, as transformers saves it: mlx-lm expects stacked experts, as published."""
    single = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    rest: Weights = {}
    layers: dict[str, dict[tuple[str, int], mx.array]] = defaultdict(dict)
    for name, weight in weights.items():
        match = single.fullmatch(name)
        if match:
            layers[match[1]][match[3], int(match[2])] = weight
        else:
            rest[name] = weight
    for experts, parts in layers.items():
        count = sum(matrix == "down" for matrix, _ in parts)
        pairs = [mx.concatenate([parts["gate", e], parts["up", e]]) for e in range(count)]
        rest[f"{experts}.gate_up_proj"] = mx.stack(pairs)
        rest[f"{experts}.down_proj"] = mx.stack([parts["down", e] for e in range(count)])
    return rest


def _experts_as_published(weights: Weights) -> Weights:
    """Turn the stacks of experts of Qwen3 VL that transformers 5 saved, [experts, out, in], to those as published."""
    result = dict(weights)
    for name, up in weights.items():
        down_name = name.replace("gate_up_proj", "down_proj")
        if name.endswith(".experts.gate_up_proj") and up.shape[-1] != 2 * weights[down_name].shape[-2]:
            result |= {stack: weights[stack].swapaxes(-1, -2) for stack in (name, down_name)}
    return result


def _nested(weights: Weights) -> Weights:
    """Name a text model alone as within its model of images and text."""
    return {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}


def _unwrapped(weights: Weights) -> Weights:
    """Name the text model of one of images and text as it is named alone, and leave the rest out."""
    text = {name: weight for name, weight in weights.items() if tower_of(name) is None}
    return {re.sub("(language|text)_model[.]", "", name, count=1): weight for name, weight in text.items()}


def _unprefixed_gpt2(weights: Weights) -> Weights:
    """Convert GPT-2 as transformers saves it with its head: mlx-lm expects the names of the model without one."""
    return {name.removeprefix("transformer."): w for name, w in weights.items()}


# By the layouts that mlx-lm's sanitize expects: what makes them of what transformers writes.
CONVERTERS: dict[str, Callable[[Weights], Weights]] = {
    UNPREFIXED: _unprefixed_gpt2,
    TRANSPOSED: _unfused_gpt_oss,
    STACKED: _stacked_experts,
    AS_PUBLISHED: _experts_as_published,
    NESTED: _nested,
    UNWRAPPED: _unwrapped,
}
