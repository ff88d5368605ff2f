"""What a tensor is for, and whether the default policy quantizes it."""

from __future__ import annotations

from dataclasses import dataclass

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import made_of, sources_of
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


def role_of(tensor: LogicalTensor, model: ModelDescription) -> str:
    """Return the role of a tensor of a model; one that is put together from others has that of the first of them."""
    return role_name((*sources_of(tensor), tensor)[0].name, tensor.dtype, tensor.shape, model)


def names_of(tensor: LogicalTensor) -> tuple[str, ...]:
    """Return the names by which rules know a tensor: its own, and those of what it is made of."""
    return (tensor.name, *(of.name for of in made_of(tensor)))
