"""Integer exports and the modules of transformers: exactly the linear layers that are not ignored are rounded."""

from __future__ import annotations

from typing import Any

import pytest

from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.exports.integers import Rounding
from pqweights.exports.layer_patterns import patterns
from pqweights.exports.vllm import read_options
from pqweights.options import ExportOptions
from pqweights.planning.roles import classify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
is_match = pytest.importorskip("compressed_tensors.utils").is_match

# Model types that differ in the names or kinds of their layers.
MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
    "gemma3",
    "qwen3_5",
    "qwen3_vl",
    "lfm2_vl",
    "mamba2",
    "falcon_h1",
    "bart",
    "t5",
    "bert",
    "roberta",
    "modernbert",
    "whisper",
    "electra",
    "blt",
    "rembert",
)


def test_expression_of_fused_experts_matches_only_them() -> None:
    fused = ["mtp.layers.0.mlp.experts.gate_up_proj"]
    (expression,) = patterns(fused, ["model.layers.0.mlp.experts.0.down_proj.weight"])
    assert is_match("mtp.layers.0.mlp.experts", torch.nn.Module(), expression)
    assert not is_match("model.layers.0.mlp.experts.0.down_proj", torch.nn.Linear(1, 1), expression)


def test_experts_of_some_layers_get_one_expression_per_layer() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(4) for e in range(64)]
    found = patterns(names[:128], names[128:])
    assert found == [rf"re:(.*\.)?layers\.{layer}\.mlp\.experts\.\d+\.up_proj$" for layer in range(2)]


def encoded(name: str, shape: tuple[int, ...]) -> EncodedTensor:
    nothing: Any = None
    coder = get_codec("hadamard-lloyd-max").coder(5)
    return EncodedTensor(
        storage=nothing, name=name, shape=shape, dtype="BF16", coder=coder, state=coder.first_state(), encoded=()
    )


class Kept:
    """A tensor that the master keeps."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype, self.plain_dtype, self.parts = name, shape, dtype, dtype, ()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ignore_list_covers_the_linear_layers_that_stay_plain(model_type: str) -> None:
    """Models have the sizes of their default configurations, on the meta device."""
    config = transformers.AutoConfig.for_model(model_type)
    auto = next(
        a
        for a in (
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForImageTextToText,
            transformers.AutoModelForSeq2SeqLM,
            transformers.AutoModelForSpeechSeq2Seq,
            transformers.AutoModelForMaskedLM,
        )
        if type(config) in a._model_mapping
    )
    with torch.device("meta"):
        model = auto.from_config(config)
    tensors: list[Any] = []
    tied = model.all_tied_weights_keys or {}  # which no file names
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in tied:
            continue
        dtype = "BF16" if parameter.is_floating_point() else "I64"
        shape = tuple(parameter.shape)
        encode = dtype == "BF16" and classify(name, dtype, shape).keep is None
        tensors.append(encoded(name, shape) if encode else Kept(name, shape, dtype))
    nothing: Any = None
    checkpoint = Checkpoint(
        storage=nothing,
        config={"model_type": model_type},
        stored=(),
        tensors=tuple(tensors),
        weight_files=(),
        companions=(),
        left_out={},
        is_master=True,
    )
    outline = read_options(ExportOptions()).outline(checkpoint)
    rounded = {name.removesuffix(".weight") for name, found in outline.decisions.items() if isinstance(found, Rounding)}
    ignored = outline.config["quantization_config"]["ignore"]
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert rounded <= linear.keys()
    assert {name for name, module in linear.items() if not is_match(name, module, ignored)} == rounded
