"""What a tensor is for, judged by its name and shape, and whether the default policy quantizes it.

The names are those that transformers gives to the parameters of the architectures that it supports (checked on the
hybrids, mixtures of experts and vision-language models listed in docs/method.md).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pqweights.common.dtypes import FLOAT_DTYPES


@dataclass(frozen=True)
class Role:
    """What a tensor is for.

    structural: a rule only quantizes such a tensor if it names this role
    keep: why the default policy keeps such a tensor; None if it quantizes it
    """

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

_VISION = re.compile(
    r"visual|vision\w*|image_\w+|audio\w*|speech\w*|multi_modal_projector|mm_projector|embed_vision|embed_audio"
)
# These match whole components of the dotted name, and are tried in this order: the first that matches a component
# decides.
_PATH_PATTERNS = (("mtp", re.compile(r"mtp|mtp_\w+|nextn\w*")), ("vision", _VISION))
_SSM_PARAMETERS = re.compile(r"A_log|A|D|dt_bias|dt_proj|in_proj_(a|b|ba)|time_(decay|first|mix\w*|maa\w*)")
_MAMBA_PATH = re.compile(r"mamba\w*|mixer|ssm\w*")
_NORM = re.compile(r"\w*norm(s|\d+|_\w+)?|\w*normali[sz]ation|ln|ln_\w+|ln\d+", re.IGNORECASE)
_CONV = re.compile(r"\w*conv\w*|patch_embed\w*")
_ROUTER = re.compile(r"gate|router|\w*_router|shared_expert_gate|gate_weight|wg")
_LM_HEAD = re.compile(r"lm_head|embed_out|output|output_projection")
# embed_q and unembed_out are mlx-lm's names for the two halves of kv_b_proj in multi-head latent attention.
_EMBEDDING = re.compile(r"(?!(embed_q|unembed_out)$)\w*embed\w*|wte|wpe|emb|\w+_emb|shared")
_EXPERTS = re.compile(r"experts|\w*_experts(?<!shared_experts)")
_ATTENTION = re.compile(r"\w*attn\w*|\w*attention\w*|mixer", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|\w*mlp|ffn|feed_?forward|intermediate|shared_experts?|(gate|up|down|gate_up)_proj|fc\d|c_fc|w[123]"
)
# A component that is a number. No pattern matches a number, so the role does not depend on it.
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")


def classify(name: str, dtype: str, shape: tuple[int, ...]) -> Role:
    """Return the role of a tensor."""
    return ROLES[_role_name(_Path.of(name), dtype, shape)]


def is_of_other_senses(name: str) -> bool:
    """Return whether a tensor belongs to a vision or audio tower, or to what projects its output."""
    return tower_of(name) is not None


def tower_of(name: str) -> str | None:
    """Return the component of a name that begins a vision or audio tower; None if there is none."""
    return next((component for component in name.split(".") if _VISION.fullmatch(component)), None)


def without_numbers(name: str) -> str:
    """Return the name with 0 for the numbers of layers, experts and so on: all that a role depends on."""
    return _NUMBER.sub(".0", name)


@dataclass(frozen=True)
class _Path:
    """The name of a tensor, taken apart.

    components: those of its module, or its own if the last one is not "weight"
    last: its own last component
    """

    components: tuple[str, ...]
    last: str

    @staticmethod
    def of(name: str) -> _Path:
        *before, last = name.split(".")
        return _Path(tuple(before) if last == "weight" else (*before, last), last)

    @property
    def module(self) -> str:
        return self.components[-1] if self.components else ""

    @property
    def is_weight(self) -> bool:
        return self.last == "weight"

    def has(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.fullmatch(component) for component in self.components)


def _role_name(path: _Path, dtype: str, shape: tuple[int, ...]) -> str:
    if (dtype not in FLOAT_DTYPES and dtype != "MXFP4") or math.prod(shape) == 0:
        return "buffer"
    structural = _structural_role(path, shape)
    if structural:
        return structural
    for role, pattern in _PATH_PATTERNS:
        if path.has(pattern):
            return role
    if _ROUTER.fullmatch(path.module) or "router" in path.components:
        return "router"
    if _LM_HEAD.fullmatch(path.module) and len(path.components) <= 2:  # deeper down, "output" is the end of a layer
        return "lm_head"
    if _EMBEDDING.fullmatch(path.module):
        return "embedding"
    if path.has(_EXPERTS):
        return "expert"
    if not path.is_weight and (len(shape) > 2 or min(shape) < 64):
        return "parameter"
    if path.has(_ATTENTION):
        return "attention"
    return "mlp" if path.has(_MLP) else "linear"


def _structural_role(path: _Path, shape: tuple[int, ...]) -> str | None:
    module = path.module
    if path.last.endswith(("bias", "_bias_table")) or module.endswith("_bias"):
        return "bias"
    if _SSM_PARAMETERS.fullmatch(module) or (module == "x_proj" and path.has(_MAMBA_PATH)):
        return "ssm"
    if _NORM.fullmatch(module):
        return "norm"
    if len(shape) < 2:
        return "vector"
    if _CONV.fullmatch(module) or len(shape) >= 4 or (path.is_weight and len(shape) == 3 and shape[-1] < 32):
        return "conv"
    return None
