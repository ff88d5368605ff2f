"""What is expected of models, compared with the classes of transformers on the meta device.

Every type is tried of which the parts of layers are known, with the default configuration of its class, and 16 experts
where there are more.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from pqweights.checkpoint.structure import EXPERTS, LAYERS, differences
from pqweights.models import text_config
from pqweights.models.conventions import DRAFTS, TEXT_LAYERS
from pqweights.models.names import is_embedding
from pqweights.models.table import MODELS

Shapes = dict[str, tuple[int, ...]]
# What the layers of some types always hold.
IN_LAYERS = {name: model.always.split() for name, model in MODELS.items() if model.always}


@functools.cache
def promised(model_type: str) -> tuple[Shapes, dict[str, Any]]:
    """The tensors that transformers stores of a model, and its configuration. It stores no layers for drafts."""
    config = transformers.AutoConfig.for_model(model_type)
    for key in EXPERTS:
        if getattr(config, key, None):
            setattr(config, key, 16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = model.all_tied_weights_keys or {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    said = config.to_dict() | {"architectures": [type(model).__name__]} | dict.fromkeys(DRAFTS, 0)
    return shapes, said


@pytest.mark.parametrize("model_type", IN_LAYERS)
def test_nothing_is_said_of_what_transformers_makes(model_type: str) -> None:
    shapes, config = promised(model_type)
    assert [*differences(shapes, config)] == []


@pytest.mark.parametrize("model_type", IN_LAYERS)
def test_what_is_missing_or_has_another_shape_is_said(model_type: str) -> None:
    shapes, config = promised(model_type)
    count = next(n for key in LAYERS if (n := text_config(config).get(key)))
    in_layers = [name for name in shapes if TEXT_LAYERS.match(name)]
    last = [name for name in in_layers if f".{count - 1}." in name[:20]]
    assert said(shapes, config, without=last)
    assert said(shapes, config, without=[last[0]])
    assert said(shapes, config, without=[name for name in shapes if is_embedding(name)])
    assert said(shapes, config, without=["model.norm.weight"])
    matrix = next(name for name in last if name.endswith("o_proj.weight"))
    assert [*differences(shapes | {matrix: (shapes[matrix][0] + 8, shapes[matrix][1])}, config)]
    for part in IN_LAYERS[model_type]:
        lost = [name for name in in_layers if f".{part}." in name]
        assert lost, part
        (found,) = said(shapes, config, without=lost)
        assert part in found


def said(shapes: Shapes, config: dict[str, Any], *, without: list[str]) -> list[str]:
    lost = set(without)
    assert lost <= shapes.keys()
    return [*differences({name: shape for name, shape in shapes.items() if name not in lost}, config)]
