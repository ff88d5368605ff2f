"""What a tensor is for, told by its name and shape, and whether the default policy quantizes it.

The names are those that transformers gives to the parameters of the architectures it knows (checked on the hybrids,
mixtures of experts and vision-language models listed in docs/method.md).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pqweights.dtypes import FLOAT_DTYPES


@dataclass(frozen=True)
class Role:
    """structural: no rule quantizes such a tensor unless it names this role. keep: why the default policy keeps it."""

    name: str
    structural: bool = False
    keep: str | None = None


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role("attention"),
        Role("mlp"),
        Role("expert"),
        Role("linear"),
        Role("embedding"),
        Role("lm_head"),
        Role("router", keep="router: small, and a wrong choice of expert costs more than its bytes"),
        Role("vision", keep="vision or audio tower: exports and runtimes expect it in source precision"),
        Role("mtp", keep="multi-token prediction head: runtimes expect it in source precision"),
        Role("parameter", keep="not recognised as a linear weight; a rule with its name quantizes it"),
        Role("vector", structural=True, keep="scalar or one-dimensional"),
        Role("bias", structural=True, keep="bias"),
        Role("norm", structural=True, keep="normalisation"),
        Role("conv", structural=True, keep="convolution"),
        Role("ssm", structural=True, keep="state-space or linear-attention parameter"),
        Role("buffer", structural=True, keep="not a floating-point weight, or empty"),
    )
}

# Whole components of the dotted name, tried in this order; the first pattern that matches any component decides.
_PATH_PATTERNS = (
    ("mtp", re.compile(r"mtp|mtp_\w+|nextn\w*")),
    ("vision", re.compile(
        r"visual|vision\w*|image_\w+|audio\w*|speech\w*|multi_modal_projector|mm_projector|embed_vision|embed_audio"
    )),
)  # fmt: skip
_SSM_PARAMETERS = re.compile(r"A_log|A|D|dt_bias|dt_proj|in_proj_(a|b|ba)|time_(decay|first|mix\w*|maa\w*)")
_MAMBA_PATH = re.compile(r"mamba\w*|mixer|ssm\w*")
_NORM = re.compile(r"\w*norm(s|\d+|_\w+)?|\w*normali[sz]ation|ln|ln_\w+|ln\d+", re.IGNORECASE)
_CONV = re.compile(r"\w*conv\w*|patch_embed\w*")
_ROUTER = re.compile(r"gate|router|\w*_router|shared_expert_gate|gate_weight|wg")
_LM_HEAD = re.compile(r"lm_head|embed_out|output|output_projection")
_EMBEDDING = re.compile(r"\w*embed\w*|wte|wpe|emb|\w+_emb|shared")
_EXPERTS = re.compile(r"experts|\w*_experts(?<!shared_experts)")
_ATTENTION = re.compile(r"\w*attn\w*|\w*attention\w*|mixer", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|\w*mlp|ffn|feed_?forward|intermediate|shared_experts?|(gate|up|down|gate_up)_proj|fc\d|c_fc|w[123]"
)
# A component that is a number. None of the patterns matches one, so that it has no part in the role.
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")


def classify(name: str, dtype: str, shape: tuple[int, ...]) -> Role:
    """The role of a tensor."""
    return ROLES[_role_name(name, dtype, shape)]


def without_numbers(name: str) -> str:
    """The name with 0 for the number of its layer, its expert and so on: what roles are told by."""
    return _NUMBER.sub(".0", name)


def _role_name(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    components = name.split(".")
    is_weight = components[-1] == "weight"
    path = components[:-1] if is_weight else components
    module = path[-1] if path else ""
    if (dtype not in FLOAT_DTYPES and dtype != "MXFP4") or math.prod(shape) == 0:
        return "buffer"
    structural = _structural_role(components, path, module, is_weight, shape)
    if structural:
        return structural
    for role, pattern in _PATH_PATTERNS:
        if any(pattern.fullmatch(component) for component in path):
            return role
    if _ROUTER.fullmatch(module) or "router" in path:
        return "router"
    if _LM_HEAD.fullmatch(module) and len(path) <= 2:  # deeper down, "output" is the end of a layer
        return "lm_head"
    if _EMBEDDING.fullmatch(module):
        return "embedding"
    if any(_EXPERTS.fullmatch(component) for component in path):
        return "expert"
    if not is_weight and (len(shape) > 2 or min(shape) < 64):
        return "parameter"
    if any(_ATTENTION.fullmatch(component) for component in path):
        return "attention"
    if any(_MLP.fullmatch(component) for component in path):
        return "mlp"
    return "linear"


def _structural_role(
    components: list[str], path: list[str], module: str, is_weight: bool, shape: tuple[int, ...]
) -> str | None:
    if components[-1].endswith(("bias", "_bias_table")) or module.endswith("_bias"):
        return "bias"
    if _SSM_PARAMETERS.fullmatch(module) or (module == "x_proj" and any(_MAMBA_PATH.fullmatch(c) for c in path)):
        return "ssm"
    if _NORM.fullmatch(module):
        return "norm"
    if len(shape) < 2:
        return "vector"
    if _CONV.fullmatch(module) or len(shape) >= 4 or (is_weight and len(shape) == 3 and shape[-1] < 32):
        return "conv"
    return None
