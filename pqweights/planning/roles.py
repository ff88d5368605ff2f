"""What a tensor is for, and whether the default policy quantizes it."""

from __future__ import annotations

from dataclasses import dataclass

from pqweights.models.description import UNKNOWN, ModelDescription
from pqweights.models.names import role_name


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
        Role("mtp", keep="predicts further tokens: runtimes have parts of such layers in source precision only"),
        Role("parameter", keep="not recognised as a linear weight; a rule with its name quantizes it"),
        Role("vector", structural=True, keep="scalar or one-dimensional"),
        Role("bias", structural=True, keep="bias"),
        Role("norm", structural=True, keep="normalisation"),
        Role("conv", structural=True, keep="convolution"),
        Role("ssm", structural=True, keep="state-space or linear-attention parameter"),
        Role("buffer", structural=True, keep="not a floating-point weight, or empty"),
    )
}


def classify(name: str, dtype: str, shape: tuple[int, ...], model: ModelDescription = UNKNOWN) -> Role:
    """Return the role of a tensor."""
    return ROLES[role_name(name, dtype, shape, model)]
