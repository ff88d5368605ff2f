"""The default policy over real parameter names: what each tensor is for, and whether it is quantized or kept."""

from __future__ import annotations

import re

import pytest

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import PlainTensor
from pqweights.models import conventions, text_model
from pqweights.models.names import without_numbers
from pqweights.models.table import MODELS
from pqweights.planning.decisions import decide
from pqweights.planning.recipe import Recipe, parse_recipe
from pqweights.planning.roles import ROLES, classify

Shape = tuple[int, ...]

RECIPE = Recipe(name="r", description="", codec="hadamard-lloyd-max", bits=5)

# Parameters as transformers 5.23 names them, with shapes of small or real configurations.
QUANTIZED: list[tuple[str, Shape, str]] = [
    # llama and similar models
    ("model.embed_tokens.weight", (32000, 4096), "embedding"),
    ("model.layers.0.self_attn.q_proj.weight", (4096, 4096), "attention"),
    ("model.layers.0.self_attn.o_proj.weight", (4096, 4096), "attention"),
    ("model.layers.0.mlp.gate_proj.weight", (11008, 4096), "mlp"),
    ("model.layers.0.mlp.down_proj.weight", (4096, 11008), "mlp"),
    ("lm_head.weight", (32000, 4096), "lm_head"),
    # a last dimension that 128 does not divide
    ("model.layers.0.mlp.down_proj.weight", (896, 4864 + 32), "mlp"),
    # mixtures of experts: per expert, fused, shared
    ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (14336, 4096), "expert"),
    ("model.layers.0.mlp.experts.gate_up_proj", (128, 1536, 2048), "expert"),
    ("model.layers.0.mlp.shared_expert.gate_proj.weight", (512, 2048), "mlp"),
    ("model.layers.0.block_sparse_moe.input_linear.weight", (32, 1024, 1536), "linear"),
    # latent attention
    ("model.layers.0.self_attn.q_a_proj.weight", (1536, 7168), "attention"),
    ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "attention"),
    ("model.layers.0.self_attn.embed_q.weight", (64, 512, 128), "attention"),  # these two: the same in mlx-lm
    ("model.layers.0.self_attn.unembed_out.weight", (64, 128, 512), "attention"),
    # linear attention and state spaces
    ("model.layers.0.linear_attn.in_proj_qkvz.weight", (384, 256), "attention"),
    ("backbone.layers.0.mixer.in_proj.weight", (4384, 1024), "attention"),
    ("model.layers.0.mamba.in_proj.weight", (8192, 2048), "linear"),
    ("model.layers.0.conv.in_proj.weight", (3072, 1024), "linear"),
    ("rwkv.blocks.0.attention.key.weight", (768, 768), "attention"),
    # the language part of vision-language models
    ("model.language_model.layers.0.self_attn.q_proj.weight", (512, 256), "attention"),
    # older ones
    ("transformer.wte.weight", (50257, 768), "embedding"),
    ("transformer.h.0.attn.c_attn.weight", (768, 2304), "attention"),
    ("transformer.h.0.mlp.c_fc.weight", (768, 3072), "mlp"),
    ("bert.embeddings.word_embeddings.weight", (30522, 768), "embedding"),
    ("bert.encoder.layer.0.attention.self.query.weight", (768, 768), "attention"),
    ("bert.encoder.layer.0.intermediate.dense.weight", (3072, 768), "mlp"),
    ("shared.weight", (32128, 512), "embedding"),
    ("decoder.block.0.layer.2.DenseReluDense.wi.weight", (2048, 512), "linear"),
]

KEPT: list[tuple[str, Shape, str]] = [
    # norms, whatever they are called
    ("model.layers.0.input_layernorm.weight", (4096,), "norm"),
    ("model.layers.0.self_attn.q_norm.weight", (128,), "norm"),
    ("bert.embeddings.LayerNorm.weight", (768,), "norm"),
    ("model.layers.0.self_attn.q_norm.weight", (32, 128), "norm"),  # per head: two dimensions
    # one dimension
    ("bert.embeddings.LayerNorm.gamma", (768,), "vector"),
    ("logit_scale", (), "vector"),
    # biases
    ("model.layers.0.self_attn.q_proj.bias", (4096,), "bias"),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (32, 5760), "bias"),
    ("encoder.layers.0.blocks.0.attention.self.relative_position_bias_table", (225, 3), "bias"),
    # routers
    ("model.layers.0.mlp.gate.weight", (128, 2048), "router"),
    ("model.layers.0.block_sparse_moe.router.layer.weight", (32, 1536), "router"),
    ("model.layers.0.mlp.gate.wg.weight", (64, 4096), "router"),
    ("model.layers.0.mlp.shared_expert_gate.weight", (1, 2048), "router"),
    # linear attention and state spaces
    ("model.layers.0.linear_attn.conv1d.weight", (256, 1, 4), "conv"),
    ("model.layers.0.linear_attn.in_proj_ba.weight", (8, 256), "ssm"),
    ("backbone.layers.0.mixer.A_log", (512, 16), "ssm"),
    ("backbone.layers.0.mixer.x_proj.weight", (48, 512), "ssm"),
    ("backbone.layers.0.mixer.dt_proj.weight", (512, 16), "ssm"),
    ("model.layers.0.conv.conv.weight", (1024, 1, 3), "conv"),
    ("rwkv.blocks.0.attention.time_mix_key", (1, 1, 768), "ssm"),
    ("model.encoder.conv1.weight", (384, 80, 3), "conv"),
    # heads and towers that runtimes expect as they are
    ("mtp.fc.weight", (4096, 8192), "mtp"),
    ("model.visual.blocks.0.attn.qkv.weight", (3456, 1152), "vision"),
    ("visual.patch_embed.proj.weight", (1152, 3, 2, 16, 16), "conv"),
    ("multi_modal_projector.linear_1.weight", (4096, 1024), "vision"),
    ("audio_tower.layers.0.fc1.weight", (5120, 1280), "vision"),
    # parameters of no known kind
    ("embeddings.cls_token", (1, 1, 768), "parameter"),
    ("model.layers.0.temporal_block.rg_lru.input_gate_weight", (10, 256, 256), "parameter"),
]


def tensor(name: str, shape: Shape, dtype: str = "BF16") -> PlainTensor:
    stored = StoredTensor(name=name, dtype=dtype, shape=shape, file="model.safetensors", offset=0, byte_count=0)
    return PlainTensor.of(None, stored)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape", "role"), QUANTIZED)
def test_default_policy_quantizes(name: str, shape: Shape, role: str) -> None:
    assert classify(name, "BF16", shape).name == role
    (decision,) = decide(RECIPE, [tensor(name, shape)])
    assert (decision.codec, decision.bits, decision.role) == ("hadamard-lloyd-max", 5, role)
    assert role in decision.reason


@pytest.mark.parametrize(("name", "shape", "role"), KEPT)
def test_default_policy_keeps_and_says_why(name: str, shape: Shape, role: str) -> None:
    assert classify(name, "BF16", shape).name == role
    (decision,) = decide(RECIPE, [tensor(name, shape)])
    assert (decision.codec, decision.bits, decision.role) == (None, None, role)
    assert decision.reason == ROLES[role].keep
    assert len(decision.reason) >= 4


@pytest.mark.parametrize("dtype", ["I64", "I32", "U8", "BOOL", "C64", "F8_E8M0", "F4", "F6_E2M3"])
def test_tensor_without_floating_dtype_is_a_buffer(dtype: str) -> None:
    assert classify("model.layers.0.mlp.up_proj.weight", dtype, (64, 128)).name == "buffer"


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "MXFP4"])
def test_tensor_with_floating_dtype_is_a_weight(dtype: str) -> None:
    assert classify("model.layers.0.mlp.up_proj.weight", dtype, (64, 128)).name == "mlp"


@pytest.mark.parametrize("shape", [(0,), (0, 128), (64, 0)])
def test_empty_tensor_is_a_buffer(shape: Shape) -> None:
    assert classify("model.layers.0.mlp.up_proj.weight", "BF16", shape).name == "buffer"


def test_weight_that_encoding_does_not_make_smaller_is_kept() -> None:
    """One block of padding costs more than three numbers."""
    small, large = tensor("mlp.up_proj.weight", (1, 41)), tensor("mlp.down_proj.weight", (1, 42))  # 5 bits: 82 bytes
    kept, quantized = decide(RECIPE, [small, large])
    assert kept.codec is None
    assert "82 against 82 bytes" in kept.reason
    assert quantized.bits == 5


def test_role_does_not_depend_on_numbers_in_the_name() -> None:
    """No pattern matches a component that is a number, so tensors that differ only in numbers share a decision."""
    patterns = [value for value in vars(conventions).values() if isinstance(value, re.Pattern)]
    patterns += [re.compile(expression) for model in MODELS.values() for expression in model.roles]
    assert len(patterns) > 10
    for pattern in patterns:
        assert not any(pattern.fullmatch(number) for number in ("0", "1", "17", "255")), pattern
    for name, shape, role in QUANTIZED + KEPT:
        assert classify(without_numbers(name), "BF16", shape).name == role
    assert without_numbers("model.layers.61.experts.255.w2.weight") == "model.layers.0.experts.0.w2.weight"
    assert without_numbers("a.1.2.3.b") == "a.0.0.0.b"
    for name in ("fc1.weight", "h.w2", "layers.12", "12.weight", "a..b", "mlp.1_000.weight", "ln_1.b"):
        assert without_numbers(name) == name


BEHIND = [
    "model.layers.46.mlp.experts.3.up_proj.weight", "model.layers.46.eh_proj.weight",
    "model.layers.46.shared_head.head.weight", "model.language_model.layers.47.self_attn.q_proj.weight",
    "mtp.layers.0.mlp.up_proj.weight", "mtp.fc.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_layers_that_predict_further_tokens_have_one_role_under_all_names(name: str) -> None:
    """Whether they are numbered behind the last one (DeepSeek, GLM) or lie below `mtp` (Qwen); one rule changes it."""
    model = text_model({"model_type": "glm4_moe", "num_hidden_layers": 46})
    alone, last = tensor(name, (512, 512)), tensor("model.layers.45.mlp.experts.3.up_proj.weight", (512, 512))
    decided, other = decide(RECIPE, [alone, last], model)
    assert (decided.role, decided.codec, other.role, other.bits) == ("mtp", None, "expert", 5)
    recipe = parse_recipe("bits: 5\nrules: [{role: mtp, bits: 6}]", "recipe")
    assert decide(recipe, [alone], model)[0].bits == 6


def test_decisions_are_the_same_together_and_alone() -> None:
    tensors = [
        tensor(name, other, dtype)
        for name, shape, _ in QUANTIZED + KEPT
        for other in (shape, (1, 41), (64, 128), (128,))
        for dtype in ("BF16", "F32", "I64")
    ]
    assert decide(RECIPE, tensors) == [decide(RECIPE, [one])[0] for one in tensors]


def test_every_role_is_tested_and_structural_roles_are_kept() -> None:
    met = {role for _, _, role in QUANTIZED + KEPT} | {"buffer"}
    assert met == set(ROLES)
    assert all(role.name == key for key, role in ROLES.items())
    assert all(role.keep for role in ROLES.values() if role.structural)
    assert {name for name, role in ROLES.items() if role.keep is None} == {role for _, _, role in QUANTIZED}
