"""What the name of a tensor tells: its role, the layer that it is fused into, and its names elsewhere."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

from pqweights.common.dtypes import FLOAT_DTYPES, PACKED_DTYPES
from pqweights.models import conventions
from pqweights.models.description import UNKNOWN, ModelDescription

TIED_EMBEDDINGS = "embeddings"
# These match components of the dotted name, and are tried in this order: the first that matches one decides.
_PATH_PATTERNS = (("mtp", conventions.MTP), ("vision", conventions.VISION))
# A component that is a number. No expression matches a number, so the role does not depend on it.
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")


def role_name(name: str, dtype: str, shape: tuple[int, ...], model: ModelDescription = UNKNOWN) -> str:
    """Return the role of a tensor, one of planning.roles.ROLES."""
    return _role(without_numbers(name), dtype, shape, tuple(model.roles.items()), is_behind(name, model.layers))


@functools.lru_cache(maxsize=4096)  # thousands of experts have a role in common
def _role(name: str, dtype: str, shape: tuple[int, ...], roles: tuple[tuple[str, str], ...], behind: bool) -> str:
    """Return the role of the tensors of a name without numbers. behind: whether they are of layers behind the last"""
    *before, last = name.split(".")
    is_weight = last == "weight"
    path = before if is_weight else [*before, last]  # of its module, or its own
    module = path[-1] if path else ""
    if (dtype not in FLOAT_DTYPES and dtype not in PACKED_DTYPES) or math.prod(shape) == 0:
        return "buffer"
    for expression, role in roles:
        if re.fullmatch(expression, module):
            return role
    structural = _structural_role(path, shape, is_weight=is_weight)
    if structural:
        return structural
    if behind:
        return "mtp"
    for role, pattern in _PATH_PATTERNS:
        if _has(path, pattern):
            return role
    if conventions.ROUTER.fullmatch(module) or "router" in path:
        return "router"
    # Deeper down, "output" is the end of a layer.
    if conventions.LM_HEAD.fullmatch(module) and len(path) <= 2:
        return "lm_head"
    if conventions.EMBEDDING.fullmatch(module):
        return "embedding"
    if _has(path, conventions.EXPERTS):
        return "expert"
    if not is_weight and (len(shape) > 2 or min(shape) < 64):
        return "parameter"
    if _has(path, conventions.ATTENTION):
        return "attention"
    return "mlp" if _has(path, conventions.MLP) else "linear"


def is_leftover(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is left from how a model was trained or run, and no model class has a place for it.

    These are scales of activations and of caches beside plain weights, masks, and what follows from the configuration.
    """
    last = name.rpartition(".")[2]
    if conventions.SEEN_LARGEST.fullmatch(last) or (conventions.RUN_SCALE.fullmatch(last) and math.prod(shape) <= 1):
        return True
    if last == "bias" and len(shape) == 4 and shape[:2] == (1, 1):  # the causal mask of GPT-2 and its kin
        return True
    whole = dtype not in FLOAT_DTYPES and dtype not in PACKED_DTYPES
    return last in ("masked_bias", "inv_freq") or (last == "position_ids" and whole)


def is_behind(name: str, layers: int | None) -> bool:
    """Whether a tensor is of a layer behind the last of a text model, which predicts further tokens."""
    match = conventions.LAYER.fullmatch(name) if layers else None
    return match is not None and layers is not None and int(match[2]) >= layers


def predicts_further(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, wherever it lies. layers: those of the text model"""
    return is_behind(name, layers) or _component(without_numbers(name), conventions.MTP) is not None


def draft_layers(names: Iterable[str], layers: int | None) -> int:
    """Return how many layers predict further tokens. layers: those of the text model, if it says"""
    numbers = [0]
    for name in names:
        if match := conventions.LAYER.fullmatch(name):
            numbers.append(int(match[2]) - (layers or int(match[2]) + 1) + 1)
        elif match := conventions.BELOW_MTP.fullmatch(name):
            numbers.append(int(match[1] or 0) + 1)
    return max(numbers)


def _structural_role(path: Sequence[str], shape: tuple[int, ...], *, is_weight: bool) -> str | None:
    module = path[-1] if path else ""
    if module.endswith("_bias") or (not is_weight and module.endswith(("bias", "_bias_table"))):
        return "bias"
    if conventions.SSM_PARAMETERS.fullmatch(module) or (module == "x_proj" and _has(path, conventions.MAMBA_PATH)):
        return "ssm"
    if conventions.NORM.fullmatch(module):
        return "norm"
    if len(shape) < 2:
        return "vector"
    if conventions.CONV.fullmatch(module) or len(shape) >= 4 or (is_weight and len(shape) == 3 and shape[-1] < 32):
        return "conv"
    return None


def _has(path: Sequence[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(component) for component in path)


def tower_of(name: str) -> str | None:
    """Return the component of a name that begins a vision or audio tower, or its projection; None if there is none."""
    return _component(without_numbers(name), conventions.VISION)


@functools.lru_cache(maxsize=4096)
def _component(name: str, pattern: re.Pattern[str]) -> str | None:
    """Return the first component of a name without numbers that a pattern matches."""
    return next((component for component in name.split(".") if pattern.fullmatch(component)), None)


def is_embedding(name: str) -> bool:
    """Whether a weight has a row for each token of the text model."""
    *_, module, last = ("", *name.split("."))
    is_input = last == "weight" and conventions.INPUT_EMBEDDING.fullmatch(module) is not None
    return is_input and tower_of(name) is None


@functools.lru_cache(maxsize=1 << 17)  # each check of a plan asks for the names of all tensors
def without_numbers(name: str) -> str:
    """Return the name with 0 for the numbers of layers, experts and so on.

    A role depends on nothing else, but for layers behind the last one.
    """
    return _NUMBER.sub(".0", name)


def fused_layer(name: str, role: str, *, tied: bool, in_masters: bool, model: ModelDescription = UNKNOWN) -> str:
    """Return the name of the layer that a weight is fused into; its own module if with no other.

    role: its role
    tied: whether the embeddings of the model are tied
    in_masters: whether only what masters store with one bit width counts
    """
    module = name.removesuffix(".weight")
    path, _, last = module.rpartition(".")
    is_input = role == "embedding" and conventions.INPUT_EMBEDDING.fullmatch(last)
    if tied and (role == "lm_head" or is_input):
        return TIED_EMBEDDINGS
    if role == "expert" and (experts := conventions.EXPERTS_OF_LAYER.fullmatch(module)):
        return experts[1]
    fused = _whole(last, model.fused, in_masters)
    return f"{path}.{fused}" if path else fused


@functools.lru_cache(maxsize=1024)  # a model has a dozen names for thousands of modules
def _whole(part: str, layers: tuple[conventions.FusedLayer, ...], in_masters: bool) -> str:
    fitting = (layer for layer in layers if layer.in_masters or not in_masters)
    return next((layer.whole for layer in fitting if re.fullmatch(layer.parts, part)), part)


def renamed(weight: str, model: ModelDescription) -> str:
    """Return the name that transformers gives a weight as it loads a model of a type, but for prefixes."""
    for expression, replacement in model.in_memory.items():
        weight = re.sub(expression, replacement, weight)
    return weight


def names_in_memory(weight: str, has_vision: bool, model: ModelDescription = UNKNOWN) -> list[str]:
    """Return the names under which transformers may look for a weight, first that in the file.

    They are names of parameters, which are not always those in the file. A text model may be loaded from the checkpoint
    of a model with vision, and older checkpoints have other prefixes.
    """
    name = renamed(weight, model)
    names = [weight, name]
    if name.startswith("backbone."):
        names.append("model." + name.removeprefix("backbone."))
    elif has_vision and name.startswith("model.layers."):
        names.append("model.language_model." + name.removeprefix("model."))
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            names += [f"model.language_model.{rest}", f"model.{rest}"]
    return list(dict.fromkeys(names))
