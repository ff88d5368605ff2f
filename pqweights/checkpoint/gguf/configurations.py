"""The configuration that the metadata of a GGUF file state: the inverse of what is written of one.

The hyper-parameters are those of settings.py, read the other way round. What comes out is written again, as for an
export, and compared with the file: so nothing of a file is overlooked, and a key that cannot be turned into the
configuration is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.contents import GgufContents, GgufTensor, MetadataList
from pqweights.checkpoint.gguf.model import add_hyper_parameters, architecture_name
from pqweights.checkpoint.gguf.rope import Factors, add_rope, read_rope, rope_parameters
from pqweights.checkpoint.gguf.settings import settings_of
from pqweights.checkpoint.gguf.tensors import constants
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.errors import ExportError
from pqweights.models import described
from pqweights.models.description import ModelDescription, stated_or_default
from pqweights.models.llama_cpp import (
    FULL,
    LINEAR_ATTENTION,
    RMS,
    SLIDING,
    Architecture,
    Setting,
    Size,
    keys_of,
)
from pqweights.models.rotary import NEW_KEYS_ALONE, WITHOUT
from pqweights.models.settings import MOST_OF_ANY, Settings

# What llama.cpp assumes of keys that a file lacks is put in their place first; these may stay away.
ASSUMED = ("key_length", "value_length", "head_count_kv", "decoder_block_count", "token_type_count")
MAY_BE_MISSING = ("vocab_size", "decoder_block_count", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa")
# Keys of the architecture that say nothing of the computation, or nothing that the tensors do not say.
SAY_NOTHING = (
    *("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.sliding_window_pattern"),
    "classifier.output_labels",
)
# What llama.cpp assumes of other keys that files lack; they also say it of models that have no such key.
TAKEN_AS = {
    "expert_weights_scale": 1.0, "expert_weights_norm": False, "expert_group_count": 1, "expert_group_used_count": 1,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "attention.indexer.types": True,
    "moe_every_n_layers": 1,
}  # fmt: skip
# And of how experts are chosen, by the architecture.
GATING = {"deepseek2": 1, "mistral4": 1, "glm-dsa": 2, "glm4moe": 2, "hy_v3": 2, "step35": 2}
# By how many standard deviations activations have to be above the mean in Gemma 3n: 95% are not.
SPARSITY = ("activation_sparsity_scale", 1.6448536)
MOST_SCORES = 1 << 16
# Tensors that say what kind of layer it is, the first ones first.
KINDS = {
    "ssm_f_a.weight": LINEAR_ATTENTION, "indexer.attn_k.weight": "indexed_attention",
    "indexer.q_proj.weight": "minimax_m3_sparse", "attn_k.weight": FULL, "ssm_out.weight": LINEAR_ATTENTION,
    "shortconv.in_proj.weight": "conv", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp",
}  # fmt: skip
DTYPES = {"F16": "float16", "F32": "float32"}


def read_configuration(contents: GgufContents, model_type: str, factors: Factors) -> dict[str, Any]:
    """Return the config.json of a file, as a model of a type.

    factors: the values of the tensors that follow from the configuration, by name

    Raises ExportError, which names the key, for what no configuration of this type says.
    """
    model = described(model_type)
    architecture, usual = _architectures(contents, model)
    values: dict[str, Any] = {"model_type": model_type}
    if usual.counts_experts and not architecture.counts_experts:
        values["num_experts"] = 0
    values |= _multipliers(architecture)
    for name, by in architecture.constants.items():
        if isinstance(by, str) and (of_channels := factors.get(f"blk.0.{name}")) is not None and of_channels.size:
            values[by] = float(str(of_channels[0]))
    _solve_settings(contents, architecture, values)
    layers = values.get("block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(contents.tensors):
        raise ExportError(
            f"expected a layer for each of at most {len(contents.tensors)} tensors as "
            f"{contents.architecture}.block_count, found {layers!r:.20}"
        )
    drafts = _scalar(contents, "nextn_predict_layers", real=False) or 0
    held = any(".nextn." in tensor.name for tensor in contents.tensors)
    values |= {"num_hidden_layers": layers - drafts, "num_nextn_predict_layers": drafts if drafts and held else None}
    del values["block_count"]
    _assume_sizes(contents, values)
    for key, other in architecture.equal:
        values.setdefault(key, values.get(other))
    _state_windows(contents, architecture, values)
    _state_layers(contents, architecture, values)
    _state_optional(architecture, model, values)
    size = "head_dim" if architecture.rope is None else architecture.rope.rotated
    unstated = [key for key in keys_of(size) if not isinstance(values.get(key), int)]
    if unstated or (rotated := _computed(size, values)) < 1:
        raise _unstated(f"a positive number as {' + '.join(unstated or keys_of(size))}")
    if all(key.startswith("qk_") for key in keys_of(size)):  # of latent attention
        values["head_dim"] = int(rotated)
    if model_type not in WITHOUT:
        values |= read_rope(
            lambda key: (_value if key.endswith("type") else _scalar)(contents, key),
            architecture,
            {**values, "rotated": int(rotated)},
            factors,
        )
    local = "rope_local_base_freq"
    if values.get(local) == values.get("rope_theta") and local not in model.defaults:
        values.pop(local, None)
    for key, taken in architecture.values.items():
        if stated_or_default(values, model, key) not in taken:
            values[key] = next(value for value in taken if value is not None)
    if "head_dim" not in model.defaults and (_is_usual(values) or size != "head_dim"):
        del values["head_dim"]
    return _named(contents, values)


def _architectures(contents: GgufContents, model: ModelDescription) -> tuple[Architecture, Architecture]:
    """Return how llama.cpp runs the model of a file, and how most of its type."""
    usual, has_experts = model.llama_cpp, bool(_value(contents, "expert_count"))
    assert usual is not None
    fitting = [of for of in model.variants if architecture_name(of) == contents.architecture]
    fitting = [of for of in fitting if of.pooling in ("", pooling_of(contents)) and of.counts_experts == has_experts]
    return next(iter(fitting), usual), usual


def pooling_of(contents: GgufContents) -> str | None:
    """Return how a file says that vectors are pooled, of gguf.PoolingType; None if it does not."""
    number = _scalar(contents, "pooling_type", real=False)
    names = {int(kind): kind.name for kind in gguf_package().PoolingType if kind.name != "NONE"}
    if number and number not in names:
        raise ExportError(f"{contents.architecture}.pooling_type is {number}, which is not known")
    return names.get(number or 0)


def _multipliers(architecture: Architecture) -> dict[str, Any]:
    """Return the multipliers of a model whose weights are multiplied already: 1."""
    values: dict[str, Any] = {}

    def read(key: str, index: int | None = None) -> float:
        values[key] = 1.0 if index is None else [1.0] * max(1 + index, len(values.get(key, ())))
        return 1.0

    for factor in (factor for scaled in architecture.scaled.values() for factor in scaled.by):
        read(factor) if isinstance(factor, str) else factor(read)
    return values


def _is_usual(values: Mapping[str, Any]) -> bool:
    """Whether heads are as wide as a configuration that does not say it has them."""
    return bool(values["hidden_size"] == values["head_dim"] * values["num_attention_heads"])


def _value(contents: GgufContents, key: str) -> Any:
    """Return the value of a key of the architecture, a list of one for each layer as a list; None if it is absent."""
    value = contents.metadata.get(key if key.startswith("tokenizer.") else f"{contents.architecture}.{key}")
    if isinstance(value, MetadataList):
        return [*map(shortest, value.first)] if value.length == len(value.first) else None
    return shortest(value)


def _number(contents: GgufContents, key: str, *, real: bool = True) -> Any:
    """Return the number of a key, or a list of one for each layer; None if it is absent.

    Raises ExportError for anything else.
    """
    value = _value(contents, key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    kinds = (int, float) if real else (int,)
    if not all(isinstance(n, kinds) and (isinstance(n, bool) or 0 <= n <= MOST_OF_ANY) for n in numbers):
        raise ExportError(f"{contents.architecture}.{key} is {value!r:.60}, which llama.cpp does not take as a number")
    return value


def _unstated(what: str) -> ExportError:
    return ExportError(f"the file does not say {what}")


def _scalar(contents: GgufContents, key: str, *, real: bool = True) -> Any:
    """Return the number of a key; None if it is absent. Raises ExportError for anything else."""
    value = _number(contents, key, real=real)
    if isinstance(value, list | bool):
        raise ExportError(f"{contents.architecture}.{key}: expected one number, found {value!r:.60}")
    return value


def key_of(setting: Setting, architecture: str) -> str:
    """Return the key under which a file has a hyper-parameter."""
    if setting.parameter.startswith("."):
        return setting.parameter.removeprefix(".")
    package = gguf_package()
    writer = package.GGUFWriter(None, architecture)
    before = {*writer.kv_data[0]}
    one = package.ExpertGatingFuncType(1)  # a number that is a member of an enumeration, too
    getattr(writer, f"add_{setting.parameter}")([one] if setting.listed else one)
    (key,) = {*writer.kv_data[0]} - before
    return str(key).removeprefix(f"{architecture}.")


def _solve_settings(contents: GgufContents, architecture: Architecture, values: dict[str, Any]) -> None:
    """State the keys of the configuration from the hyper-parameters, which are keys or sums of products of keys."""
    keys = [(of, key_of(of, contents.architecture)) for of in settings_of(architecture) if not of.unread]
    read = [(of, key, _value(contents, key) if of.items else _number(contents, key, real=of.real)) for of, key in keys]
    known = [(of, TAKEN_AS.get(key) if value is None else value) for of, key, value in read]
    known = [(of, value) for of, value in known if value is not None]
    for _ in range(3):  # an expression may need keys that a later one states
        for of, value in known:
            if of.truth:
                values[of.name] = bool(value)
            elif of.zero and of.real and not value:
                values[of.name] = None
            elif isinstance(value, list) and not (of.listed or of.items):
                _solve_list(contents, of, value, values)
            elif of.listed or of.items:
                values[of.name] = value
            else:
                solve(of.key, value, values)
    for of, key, value in read:
        if value is not None:
            continue
        if of.parameter == "leading_dense_block_count":
            values[of.name] = _leading_dense(contents)
        elif not (of.optional or of.zero or of.parameter in ASSUMED) and not _are_known(of.key, values):
            raise _unstated(f"{contents.architecture}.{key}")


def _leading_dense(contents: GgufContents) -> int:
    """Return how many layers come before the first one with experts."""
    sparse = {tensor.name for tensor in contents.tensors if tensor.name.endswith(".ffn_gate_inp.weight")}
    return next((n for n in range(len(sparse)) if f"blk.{n}.ffn_gate_inp.weight" in sparse), 0)


def _solve_list(contents: GgufContents, of: Setting, numbers: list[Any], values: dict[str, Any]) -> None:
    """State the keys of a hyper-parameter that layers of two kinds have otherwise."""
    if not of.other:
        own = {*numbers} - ({0} if of.only else set())
        if len(own) == 1:
            solve(of.key, own.pop(), values)
        return
    windows, shared = _value(contents, "attention.sliding_window_pattern"), values.get("num_kv_shared_layers") or 0
    if not isinstance(windows, list) or len(windows) != len(numbers):
        windows = [False] * len(numbers)
    kinds = [
        f"{SLIDING if windowed else FULL}{'' if layer < len(windows) - shared else ' shared'}"
        for layer, windowed in enumerate(windows)
    ]
    # What most layers have is known before what follows from it.
    for key, is_key in ((of.other, False), (of.key, True)):
        own = {n for n, kind in zip(numbers, kinds, strict=True) if bool(re.fullmatch(of.only, kind)) == is_key}
        if len(own) == 1:
            solve(key, own.pop(), values)


def shortest(value: Any) -> Any:
    """Return the shortest number that is the same in float32, as which files hold it."""
    in_range = isinstance(value, float) and abs(value) <= float(np.finfo(np.float32).max)
    return float(str(np.float32(value))) if in_range else value


def _are_known(size: Size, values: Mapping[str, Any]) -> bool:
    """Whether other hyper-parameters say what the keys of a number are."""
    return all(values.get(key) is not None for key in keys_of(size))


def solve(size: Size, result: Any, values: dict[str, Any]) -> None:
    """State the only key of a number that is not known yet; the number is a polynomial of first degree in it."""
    unknown = {key for key in keys_of(size) if key not in values}
    if isinstance(size, str):
        values.setdefault(size, result)
    elif len(unknown) == 1:
        (key,) = unknown
        least, next_one = (_computed(size, {**values, key: number}) for number in (0, 1))
        if next_one != least and (solution := (result - least) / (next_one - least)).denominator == 1:
            values[key] = int(solution)


def _computed(size: Size, values: Mapping[str, Any]) -> Fraction:
    return Fraction(
        values[size] if isinstance(size, str) else size if isinstance(size, int) else size(values.__getitem__)
    )


def _assume_sizes(contents: GgufContents, values: dict[str, Any]) -> None:
    """State what files leave out where it is as llama.cpp assumes."""
    for key in ("hidden_size", "num_attention_heads"):
        if key not in values:
            raise ExportError(f"expected one {key} for all layers, found none or a list")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if "head_dim" not in values:
        values["head_dim"] = values["hidden_size"] // max(values["num_attention_heads"], 1)
    for key in ("hidden_size", "num_attention_heads", "head_dim"):
        if not isinstance(values[key], int) or values[key] < 1:
            raise ExportError(f"expected a positive number as {key}, found {values[key]!r:.40}")


def _state_windows(contents: GgufContents, architecture: Architecture, values: dict[str, Any]) -> None:
    """State the window of attention, and which layers have it."""
    window, layers = _scalar(contents, "attention.sliding_window", real=False), values["num_hidden_layers"]
    if not window:
        if architecture.windows is not None:
            values |= {"sliding_window": None, "layer_types": [FULL] * layers}
        return
    values["sliding_window"] = window
    if (windows := architecture.windows) is not None:
        pattern = _number(contents, "attention.sliding_window_pattern", real=False)
        pattern = pattern or windows.first_period or windows.period
        if not pattern:
            raise _unstated(f"{contents.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, int):
            shift = 0 if windows.first_period else 1
            pattern = [(layer + shift) % pattern != 0 for layer in range(layers)]
        values["layer_types"] = [SLIDING if windowed else FULL for windowed in pattern[:layers]]


def _state_layers(contents: GgufContents, architecture: Architecture, values: dict[str, Any]) -> None:
    """State the kinds of layers of models of which some have no attention, by their tensors."""
    kinds = architecture.layer_types - {FULL, SLIDING}
    if not kinds or "chunked_attention" in kinds:  # which follow from a period
        return
    held: dict[int, set[str]] = {}
    for tensor in contents.tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if block.isdigit() and len(block) < 6:
            held.setdefault(int(block), set()).add(rest)
    values["layer_types"] = [_kind(held.get(n, set()), architecture) for n in range(values["num_hidden_layers"])]


def _kind(held: set[str], architecture: Architecture) -> str:
    """Return the kind of a layer. held: the names of its tensors"""
    attention = next((kind for name, kind in KINDS.items() if name in held and kind in architecture.layer_types), FULL)
    sparse = f"{attention} moe"
    return sparse if sparse in architecture.layer_types and "ffn_gate_inp.weight" in held else attention


def _state_optional(architecture: Architecture, model: ModelDescription, values: dict[str, Any]) -> None:
    """State that the model does without what the file does not have, where the type has it by default."""
    for setting in architecture.settings:
        if setting.optional and setting.name not in values and model.defaults.get(setting.name):
            values[setting.name] = None


def _named(contents: GgufContents, values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration by the names of transformers, with what its tensors and its tokenizer say."""
    model_type, held = values["model_type"], {tensor.name: tensor for tensor in contents.tensors}
    model = described(model_type)
    called, defaults = model.names, model.defaults
    assert called is not None
    config = {called.keys.get(key, key): value for key, value in values.items() if called.keys.get(key, key)}
    config = {
        key: value
        for key, value in config.items()
        if value is not None or key == "sliding_window" or defaults.get(key) is not None
    }
    architecture, usual = _architectures(contents, model)
    if not architecture.encoder:
        config["tie_word_embeddings"] = "output.weight" not in held
    config |= {key: f"blk.0.{name}" in held for key, name in called.present}
    rows = {"token_embd": "vocab_size", "per_layer_token_embd": "vocab_size_per_layer_input"}
    for name, key in (rows | {"token_types": "type_vocab_size"}).items():
        embeddings = held.get(f"{name}.weight")
        if embeddings is not None and embeddings.shape:
            config[key] = embeddings.shape[0]
    for name, key in {"bos": "bos", "eos": "eos", "padding": "pad"}.items():
        number = contents.number(f"tokenizer.ggml.{name}_token_id")
        config[f"{key}_token_id"] = number if number is not None and number < config.get("vocab_size", 0) else None
    if model_type in NEW_KEYS_ALONE and "rope_parameters" not in config:
        config["rope_parameters"] = _by_kind(config)
    model.publish(config, held.keys())
    matrices = {tensor.type for tensor in contents.tensors if len(tensor.shape) > 1}
    config["dtype"] = DTYPES.get(next(iter(matrices)), "bfloat16") if len(matrices) == 1 else "bfloat16"
    named = called.class_name
    if architecture is not usual:
        named = re.sub("(Model|For[A-Z].*)$", architecture.classes[0], named)
    if architecture.pooling:
        config |= _labels(contents, held)
    return {"architectures": [named], **config}


def _labels(contents: GgufContents, held: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the names of the scores."""
    matrix, named = held.get("cls.output.weight"), _value(contents, "classifier.output_labels")
    rows = matrix.shape[0] if matrix is not None and matrix.shape else 0
    if rows > MOST_SCORES:
        raise ExportError(f"tensor 'cls.output.weight': expected at most {MOST_SCORES} rows, found {rows}")
    whole = isinstance(named, list) and len(named) == rows and all(isinstance(name, str) for name in named)
    labels = named if whole else [f"LABEL_{number}" for number in range(rows)]
    ids = {label: number for number, label in enumerate(labels)}
    return {"id2label": {str(number): label for number, label in enumerate(labels)}, "label2id": ids}


def _by_kind(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary embeddings of layers with and without a window, of which the two kinds have other bases."""
    base, share = config.pop("rope_theta"), config.pop("partial_rotary_factor", 1.0)
    bases = {FULL: base, SLIDING: config.pop("rope_local_base_freq", base)}
    return {
        kind: {"rope_type": "default", "rope_theta": of, "partial_rotary_factor": share} for kind, of in bases.items()
    }


def check_configuration(
    contents: GgufContents,
    settings: Settings,
    tensors: Sequence[LogicalTensor],
    values_of: Callable[[str], Any],
) -> None:
    """Raise ExportError, which names the key, if a file of these settings would not have the metadata of this one.

    tensors: those that the file would hold
    values_of: returns the values of a tensor of the file, by name
    """
    writer = gguf_package().GGUFWriter(None, architecture_name(settings.architecture))
    add_hyper_parameters(settings, writer, tuple(tensors))
    factors = add_rope(settings, writer) | constants(settings)
    prefix = f"{contents.architecture}."
    written = {key.removeprefix(prefix): value.value for key, value in writer.kv_data[0].items() if prefix in key}
    keys = [key.removeprefix(prefix) for key in contents.metadata if key.startswith(prefix)]
    layers = settings.number("block_count")
    for key in dict.fromkeys((*written, *keys)):
        in_file, expected = None if (value := _value(contents, key)) == "none" else value, written.get(key)
        if isinstance(expected, list) and isinstance(in_file, list) and len(expected) == layers:
            in_file = in_file[:layers]  # some list layers that predict further tokens, and have none
        if (
            key in SAY_NOTHING
            or _is_unread(key, in_file, settings, contents)
            or same_value(*(TAKEN_AS.get(key) if value is None else value for value in (expected, in_file)))
            or (in_file is None and _assumed(key, expected, settings, contents))
        ):
            continue
        raise ExportError(
            f"{prefix}{key} is {in_file!r:.80}, but a model of this architecture has {written.get(key)!r:.80}"
        )
    for name, values in factors.items():
        if name in {tensor.name for tensor in contents.tensors} and not np.allclose(values_of(name), values, rtol=1e-5):
            raise ExportError(f"tensor {name!r} differs from what the settings of the model imply")


def same_value(written: Any, stated: Any) -> bool:
    """Whether a file that has one value has the other as far as float32 and the absence of nothing tell."""
    if isinstance(written, list) or isinstance(stated, list):
        count = len(written if isinstance(written, list) else stated)
        if not count:
            return not (written or stated)  # an empty list says nothing of a size
        pairs = [value if isinstance(value, list) else [value] * count for value in (written, stated)]
        return len(pairs[0]) == len(pairs[1]) and all(map(same_value, *pairs))
    if isinstance(written, float) and isinstance(stated, float | int):
        return bool(np.isclose(np.float32(written), np.float32(stated), rtol=1e-6, atol=0))
    return bool(written == stated) or not (written or stated)


def _is_unread(key: str, stated: Any, settings: Settings, contents: GgufContents) -> bool:
    """Whether llama.cpp does not read a key for an architecture, or it says what llama.cpp computes anyway."""
    architecture, layers = settings.architecture, settings.number("num_hidden_layers")
    if key in (key_of(of, contents.architecture) for of in architecture.settings if of.unread):
        return True
    if key.startswith("rope.") and settings.model_type in WITHOUT:
        return True
    if key == "attention.layer_norm_epsilon":
        return architecture.norm is RMS
    if key in ("block_count", "nextn_predict_layers") and not settings.draft_layers:  # whose layers are in another file
        drafts = _value(contents, "nextn_predict_layers") or 0
        return bool(_value(contents, "block_count") == layers + drafts)
    if key == "rope.scaling.original_context_length":
        return bool(rope_parameters(settings)["rope_type"] == "default")
    if key == SPARSITY[0] and settings.get("sparse_layers"):
        sparse = settings.number("sparse_layers")
        return same_value([SPARSITY[1]] * sparse + [-math.inf] * (layers - sparse), stated)
    if key == "hidden_act":
        return bool(stated == settings.get("hidden_activation"))
    return key.startswith("expert_") and not contents.number(f"{contents.architecture}.expert_count")


def _assumed(key: str, said: Any, settings: Settings, contents: GgufContents) -> bool:
    """Whether llama.cpp assumes of a missing key what the configuration says, or other keys say it."""
    if key == "expert_gating_func":
        biased = any(".exp_probs_b" in tensor.name for tensor in contents.tensors)
        return GATING.get(contents.architecture) == said and not (biased and said == 1)
    if key in ("attention.key_length", "attention.value_length"):
        return settings.number("hidden_size") == settings.number("head_dim") * settings.number("num_attention_heads")
    if key == "attention.head_count_kv":
        return settings.number("num_key_value_heads") == settings.number("num_attention_heads")
    if key == "rope.scaling.type":
        return bool(said == "longrope")  # as its factors say
    own = (of for of in settings_of(settings.architecture) if not (of.optional or of.zero or isinstance(of.key, int)))
    return (
        key in MAY_BE_MISSING
        or key == "leading_dense_block_count"
        or key in {key_of(of, contents.architecture) for of in own}
    )
