"""Which type each tensor of a GGUF file gets: types alone, and llama.cpp's mixes, which store some tensors wider.

The mixes are those of llama.cpp (src/llama-quant.cpp), so that a file of that name has the size that users expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pqweights.checkpoint.gguf.contents import FILE_TYPES
from pqweights.common.advice import instead
from pqweights.errors import OptionError
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.models import diffusion

# Types without blocks, by the names that GGUF and safetensors share.
PLAIN_TYPES = ("F32", "F16", "BF16")
# Of tables of whole numbers.
INTEGERS = "I32"
# What llama.cpp stores where a type's blocks do not divide the rows of a tensor; and where its fallback's do not.
FALLBACKS = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    # For these it has none.
    "Q2_0": "Q4_0", "Q1_0": "Q4_0", "NVFP4": "MXFP4",
}  # fmt: skip
LAST_FALLBACK = "F16"
# Types that llama.cpp's quantizer refuses to make without importances.
WANT_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")

# Roles of tensors, told by their names.
OUTPUT, EMBEDDING, VALUES, KEYS, QUERIES = "output", "embedding", "values", "keys", "queries"
ATTENTION_OUTPUT, DOWN, GATE, UP = "attn_output", "down", "gate", "up"
_ROLES = (
    (OUTPUT, re.compile(r"output\.weight")),
    (EMBEDDING, re.compile(r"(per_layer_)?token_embd\.weight")),
    (VALUES, re.compile(r".*attn_(v|qkv|kv_b)\.weight")),
    (KEYS, re.compile(r".*attn_k\.weight")),
    (QUERIES, re.compile(r".*attn_q\.weight")),
    (ATTENTION_OUTPUT, re.compile(r".*attn_output\.weight")),
    (DOWN, re.compile(r".*ffn_down.*")),
    (GATE, re.compile(r".*ffn_gate.*")),
    (UP, re.compile(r".*ffn_up.*")),
)
# Matrices that llama.cpp never quantizes: they are small, or nothing is multiplied by them.
_NEVER = re.compile(
    r".*(_norm\.weight|ffn_gate_inp(_shexp)?\.weight|ffn_gate_tid2eid\.weight|indexer\.[kq]_proj\.weight|altup.*|laurel.*|per_layer_model_proj.*|ssm_conv1d.*|shortconv\.conv\.weight"
    r"|attn_rel_b\.weight|position_embd.*|token_types\.weight|time_mix_(first|decay_w[12]|lerp_fused|[wva][012]|g[12])\.weight)"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


class Shape(NamedTuple):
    """What of a model the mixes depend on.

    layers: how many there are
    shared: how many heads share keys and values
    experts: how many there are; 0 without
    tied: whether the output has no weights of its own
    large: whether it has 80 layers and shared keys and values, where llama.cpp stores values wider
    imatrix: whether importances are known
    with_values: the layers that have values, if not all have: of these, llama.cpp counts those alone
    """

    layers: int
    shared: int
    experts: int
    tied: bool
    large: bool
    imatrix: bool
    with_values: tuple[int, ...] = ()


def _is_more(layer: int, shape: Shape) -> bool:
    """Whether llama.cpp gives a layer more bits: in the first and last eighths, and every third between."""
    eighth = shape.layers // 8
    return layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2


# In which layers a tensor gets another type, by names that can be sent to other processes.
LAYERS: Mapping[str, Callable[[int, Shape], bool]] = {
    "all": lambda layer, shape: True,
    "all, if heads share values": lambda layer, shape: shape.shared >= 4,
    "all, if heads share values, or with experts": lambda layer, shape: shape.shared >= 4 or shape.experts >= 4,
    "all, without imatrix": lambda layer, shape: not shape.imatrix,
    "first 2": lambda layer, shape: layer < 2,
    "first 4": lambda layer, shape: layer < 4,
    "first eighth": lambda layer, shape: layer < shape.layers // 8,
    "first sixteenth": lambda layer, shape: layer < shape.layers // 16,
    "first eighth, with imatrix": lambda layer, shape: layer < shape.layers // 8 and shape.imatrix,
    "first eighth, without imatrix": lambda layer, shape: layer < shape.layers // 8 and not shape.imatrix,
    "first eighth, and more of eight experts": lambda layer, shape: (
        layer < shape.layers // 8 or (shape.experts == 8 and _is_more(layer, shape))
    ),
    "all but the first and last eighths": lambda layer, shape: shape.layers // 8 <= layer < 7 * shape.layers // 8,
    "first and last eighths, and every third between": _is_more,
}


_WIDE_OUTPUT_OF_EIGHT = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS"
)  # fmt: skip


_MORE = "first and last eighths, and every third between"
_IQ4 = ((VALUES, "all, if heads share values", "Q5_K"), (DOWN, "first eighth, without imatrix", "Q5_K"))
_M = ((VALUES, _MORE, "Q6_K"), (DOWN, _MORE, "Q6_K"))
_SHARED, _MIDDLE = "all, if heads share values", "all but the first and last eighths"
_Q4_VALUES = (VALUES, "all, if heads share values, or with experts", "Q4_K")
_IQ1 = (_Q4_VALUES, (VALUES, "all", "Q2_K"), (DOWN, "first eighth", "Q2_K"), (ATTENTION_OUTPUT, "all", "IQ2_XXS"))
_IQ2_X = (_Q4_VALUES, (VALUES, "all", "Q2_K"), (DOWN, "first eighth", "Q2_K"))
_IQ2 = (_Q4_VALUES, (VALUES, "all", "IQ3_S"), (DOWN, "first eighth", "IQ3_S"), (ATTENTION_OUTPUT, "all", "IQ3_S"))
_TERNARY = ((EMBEDDING, "all", "Q4_K"),)
# By the name of a mix: the type of most tensors, and others, of which the first that holds decides: a role, in which
# layers (a key of LAYERS), and the type.
MIXES: Mapping[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "F32": ("F32", ()),
    "F16": ("F16", ()),
    "BF16": ("BF16", ()),
    "Q8_0": ("Q8_0", ()),
    "Q6_K": ("Q6_K", ()),
    "Q5_K_M": ("Q5_K", _M),
    "Q5_K_S": ("Q5_K", ()),
    "Q5_1": ("Q5_1", ()),
    "Q5_0": ("Q5_0", ((DOWN, "first eighth, with imatrix", "Q5_1"),)),
    "Q4_K_M": ("Q4_K", _M),
    "Q4_K_S": ("Q4_K", ((VALUES, "first 4", "Q5_K"), (DOWN, "first eighth", "Q5_K"))),
    "Q4_1": ("Q4_1", ()),
    "Q4_0": ("Q4_0", ((DOWN, "first eighth, with imatrix", "Q4_1"),)),
    "IQ4_NL": ("IQ4_NL", _IQ4),
    "NVFP4": ("NVFP4", ()),
    "MXFP4_MOE": ("MXFP4", ()),
    "IQ4_XS": ("IQ4_XS", _IQ4),
    "Q3_K_L": ("Q3_K", tuple((role, "all", "Q5_K") for role in (VALUES, DOWN, ATTENTION_OUTPUT))),
    "Q3_K_M": ("Q3_K", (
        (VALUES, "first 2", "Q5_K"), (VALUES, "all", "Q4_K"), (DOWN, "first sixteenth", "Q5_K"), (DOWN, "all", "Q4_K"),
        (ATTENTION_OUTPUT, "all", "Q4_K"),
    )),
    "IQ3_M": ("IQ3_S", (
        (VALUES, "all", "Q4_K"), (DOWN, "first eighth, and more of eight experts", "Q4_K"),
        (ATTENTION_OUTPUT, "all", "Q4_K"),
    )),
    "Q3_K_S": ("Q3_K", ()),
    "IQ3_S": ("IQ3_S", ((VALUES, _SHARED, "Q4_K"),)),
    "IQ3_XS": ("IQ3_S", (
        (VALUES, _SHARED, "Q4_K"), (KEYS, "all", "IQ3_XXS"), (QUERIES, "all", "IQ3_XXS"), (GATE, _MIDDLE, "IQ3_XXS"),
        (UP, _MIDDLE, "IQ3_XXS"),
    )),
    "IQ3_XXS": ("IQ3_XXS", (
        (EMBEDDING, "all", "IQ3_S"), (VALUES, _SHARED, "Q4_K"), (VALUES, "all, without imatrix", "IQ3_S"),
        (KEYS, "all", "IQ2_S"), (QUERIES, "all", "IQ2_S"), (DOWN, "first eighth, without imatrix", "Q4_K"),
        (DOWN, "all, without imatrix", "Q3_K"), (ATTENTION_OUTPUT, "all", "IQ3_S"),
    )),
    "Q2_K": ("Q2_K", (
        (VALUES, _SHARED, "Q4_K"), *((role, "all", "Q3_K") for role in (VALUES, DOWN, ATTENTION_OUTPUT)),
    )),
    "Q2_K_S": ("Q2_K", ((VALUES, _SHARED, "Q4_K"), (DOWN, "first eighth", "Q4_K"))),
    "IQ2_M": ("IQ2_S", ((EMBEDDING, "all", "IQ3_S"), *_IQ2)),
    "IQ2_S": ("IQ2_XS", ((EMBEDDING, "all", "IQ3_S"), *_IQ2)),
    "IQ2_XS": ("IQ2_XS", ((EMBEDDING, "all", "Q2_K"), *_IQ2_X)),
    "TQ2_0": ("TQ2_0", _TERNARY),
    "IQ2_XXS": ("IQ2_XXS", ((EMBEDDING, "all", "Q2_K"), *_IQ2_X)),
    "IQ1_M": ("IQ1_M", ((EMBEDDING, "all", "Q2_K"), *_IQ1)),
    "TQ1_0": ("TQ1_0", _TERNARY),
    "IQ1_S": ("IQ1_S", ((EMBEDDING, "all", "Q2_K"), *_IQ1)),
    "Q2_0": ("Q2_0", ((EMBEDDING, "all", "Q4_K"),)),
    "Q1_0": ("Q1_0", ()),
}  # fmt: skip
# The type of the output.
OUTPUTS: Mapping[str, str] = {
    **dict.fromkeys(MIXES, "Q6_K"),
    **dict.fromkeys(("Q8_0", "MXFP4_MOE"), "Q8_0"),
    **dict.fromkeys(("IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"), "Q5_K"),
}
# Names of types that are not those of mixes: as in llama.cpp, they stand for the mix of middle size.
ALIASES: Mapping[str, str] = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


# The types of image and video models that are not those of most tensors (ComfyUI-GGUF, tools/lcpp.patch). Layers are
# the blocks that names number.
_OF_DIFFUSION: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "Q5_K_M": tuple((role, "all", "Q6_K") for role in (diffusion.VALUES, diffusion.JOINED, diffusion.DOWN)),
    "Q5_0": ((diffusion.DOWN, "all", "Q5_1"),),
    "Q4_K_M": (
        (diffusion.VALUES, "all", "Q6_K"), (diffusion.JOINED, "all", "Q5_K"), (diffusion.DOWN, "all", "Q6_K"),
    ),
    "Q4_K_S": ((diffusion.VALUES, "first 4", "Q5_K"), (diffusion.DOWN, "all", "Q5_K")),
    "Q4_0": ((diffusion.DOWN, "all", "Q4_1"),),
    "Q3_K_L": (
        (diffusion.VALUES, "all", "Q5_K"), (diffusion.JOINED, "all", "Q4_K"), (diffusion.DOWN, "all", "Q5_K"),
    ),
    "Q3_K_M": (
        (diffusion.VALUES, "first 2", "Q5_K"),
        *((role, "all", "Q4_K") for role in (diffusion.VALUES, diffusion.JOINED, diffusion.DOWN)),
    ),
    "Q2_K": ((diffusion.VALUES, "all", "Q3_K"),),
}  # fmt: skip
_NO_SHAPE = Shape(layers=0, shared=0, experts=0, tied=False, large=False, imatrix=False)


def find_mix(given: str) -> str:
    """Return the name of a mix, given in whatever case. Raises OptionError for an unknown one; it names the nearest."""
    name = given.upper()
    if name not in MIXES and name not in ALIASES:
        raise OptionError(f"`type` {given}: {instead(name, [*MIXES, *ALIASES])}")
    return ALIASES.get(name, name)


def file_type(mix: str) -> int:
    """Return the number that GGUF has for a mix."""
    return next(number for number, name in FILE_TYPES.items() if name == mix)


def type_of(mix: str, name: str, shape: tuple[int, ...], model: Shape, *, pure: bool = False) -> str:
    """Return the type that a tensor should get in a mix, before it is known whether its rows fit.

    pure: whether all matrices get the one type
    """
    most, _ = MIXES[mix]
    if not may_be_quantized(name, shape):
        return "F32"
    if pure or most in PLAIN_TYPES:
        return most
    role = role_of(name)
    if role == OUTPUT or (role == EMBEDDING and model.tied):
        whole = shape[-1] % BLOCK_TYPES[most].group_size == 0
        return OUTPUTS[mix] if whole else "Q8_0"
    if mix == "MXFP4_MOE":
        return most if len(shape) > 2 else "Q8_0"
    return _type_in_layer(mix, role, name, model)


def _type_in_layer(mix: str, role: str | None, name: str, model: Shape) -> str:
    most, others = MIXES[mix]
    block = _LAYER.match(name)
    layer = int(block[1]) if block else 0
    least = mix.startswith(("IQ1", "IQ2"))
    if model.experts == 8 and role in (VALUES, KEYS):
        return "Q4_K" if least else "Q8_0"
    if model.experts == 8 and role == ATTENTION_OUTPUT:
        return "Q5_K" if least or mix in _WIDE_OUTPUT_OF_EIGHT else most
    if role == VALUES and layer in model.with_values:
        layer, model = model.with_values.index(layer), model._replace(layers=len(model.with_values))
    chosen = next((type_ for of, layers, type_ in others if of == role and LAYERS[layers](layer, model)), most)
    large = model.large and role == VALUES and not least
    return "Q5_K" if large and chosen in ("Q3_K", "Q4_K") else chosen


def diffusion_type(mix: str, name: str, *, pure: bool) -> str:
    """Return the type that a matrix in a block of an image or video model should get."""
    role, block = diffusion.role_of(name), diffusion.block_of(name)
    others = () if pure else _OF_DIFFUSION.get(mix, ())
    most, _ = MIXES[mix]
    return next((type_ for of, layers, type_ in others if of == role and LAYERS[layers](block, _NO_SHAPE)), most)


def role_of(name: str) -> str | None:
    """Return the kind of a tensor, by its name in the file; None for one that the mixes do not tell apart."""
    return next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None)


def layers_with_values(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the layers that have values, in order, from the names of all tensors in the file."""
    matches = (_LAYER.match(name) for name in names if role_of(name) == VALUES)
    return tuple(sorted({int(match[1]) for match in matches if match is not None}))


def may_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp would quantize a tensor; what it would not is stored as F32."""
    return len(shape) >= 2 and name.endswith("weight") and _NEVER.fullmatch(name) is None


def fitting_type(wanted: str, columns: int) -> str:
    """Return the type that a tensor with rows of `columns` weights gets: the wanted one, or llama.cpp's fallback."""
    for name in (wanted, FALLBACKS.get(wanted, LAST_FALLBACK)):
        if name in PLAIN_TYPES or columns % BLOCK_TYPES[name].group_size == 0:
            return name
    return LAST_FALLBACK
