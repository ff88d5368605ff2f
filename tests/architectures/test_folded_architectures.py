"""Every family of the table: what is folded, and that the folded model computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from building import build, computed, load
from closeness import assert_near
from folding_models import columns_of, folded_values, measured, rewritten, uneven
from helpers import f32, read_all, run_command
from known_architectures import ARCHITECTURES, VOCABULARY

from pqweights.checkpoint.models.description import stated_or_default
from pqweights.checkpoint.models.table import MODELS
from pqweights.inference.runtimes.models import open_model
from pqweights.rewrite.folding import fold as folds

FOLDED = {name for name, model in MODELS.items() if model.flow is not None}
ATTENTION = ("input_layernorm", "self_attn.v_proj")
DENSE = (*ATTENTION, "post_attention_layernorm", "mlp.up_proj")
GEMMA2 = (*ATTENTION, "pre_feedforward_layernorm", "mlp.up_proj")
FUSED = ("input_layernorm", "self_attn.qkv_proj", "post_attention_layernorm", "mlp.gate_up_proj")
EXPERTS = tuple(f"mlp.experts.{number}.up_proj" for number in range(4))
MOE = (*ATTENTION, "post_attention_layernorm", *EXPERTS)
MIXTRAL = (*ATTENTION, "post_attention_layernorm", *(f"block_sparse_moe.experts.{number}.w3" for number in range(4)))
GPT_OSS = (*ATTENTION, "post_attention_layernorm")
# Hybrids: three layers of linear attention, then one of full attention.
LINEAR, SHARED = ("linear_attn.norm",), "mlp.shared_expert.up_proj"
QWEN3_5_DENSE = [(*LINEAR, "post_attention_layernorm", "mlp.up_proj")] * 3 + [DENSE]
QWEN3_5_MOE = [(*LINEAR, *EXPERTS, SHARED)] * 3 + [(*ATTENTION, *EXPERTS, SHARED)]

# For each architecture the links of its layers, the prefix of its layers, and whether the head is folded.
EXPECTED = {
    "llama": ([DENSE] * 2, "model.", True), "llama with a tied head": ([DENSE] * 2, "model.", False),
    "mistral": ([DENSE] * 2, "model.", True), "qwen2": ([DENSE] * 2, "model.", True),
    "qwen3": ([DENSE] * 2, "model.", True), "gemma": ([DENSE] * 2, "model.", False),
    "gemma2": ([GEMMA2] * 2, "model.", False), "gemma3_text": ([GEMMA2] * 6, "model.", False),
    "phi3": ([FUSED] * 2, "model.", True), "qwen3_moe": ([MOE] * 2, "model.", True),
    "mixtral": ([MIXTRAL] * 2, "model.", True), "gpt_oss": ([GPT_OSS] * 2, "model.", True),
    "qwen3_next": (QWEN3_5_MOE, "model.", True), "qwen3_5": (QWEN3_5_DENSE, "model.", True),
    "qwen3_5_moe": (QWEN3_5_MOE, "model.", True),
    "qwen3_5 with images": (QWEN3_5_DENSE, "model.language_model.", True),
    "gemma3": ([GEMMA2] * 6, "language_model.model.", False),
    "mistral3": ([DENSE] * 2, "language_model.model.", True),
}  # fmt: skip
# model_type is that of another class here: qwen3_5_moe has images, and is built as text alone.
OF_ANOTHER_CLASS = {"qwen3_5_moe"}


def test_every_family_is_tried() -> None:
    tried = {ARCHITECTURES[name].config for name in EXPECTED}
    import transformers

    types = {getattr(transformers, config).model_type for config in tried}
    assert types >= FOLDED - OF_ANOTHER_CLASS


@pytest.mark.parametrize("model_type", sorted(FOLDED))
def test_absent_sizes_of_heads_are_those_of_transformers(model_type: str) -> None:
    """Published configurations of Gemma 3 state only what differs from them."""
    import transformers.models.auto.configuration_auto as auto

    config = auto.CONFIG_MAPPING[model_type]().get_text_config()
    found = stated_or_default({}, MODELS[model_type], "head_dim") or config.hidden_size // config.num_attention_heads
    assert found == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    heads = stated_or_default({}, MODELS[model_type], "num_attention_heads")
    assert heads == config.num_attention_heads
    assert (stated_or_default({}, MODELS[model_type], "num_key_value_heads") or heads) == config.num_key_value_heads
    assert stated_or_default({}, MODELS[model_type], "hidden_size") == config.hidden_size


@pytest.mark.parametrize("name", EXPECTED)
def test_folded_model_computes_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "SMALLEST_GAIN", -1.0)  # everything that can be folded is
    about = ARCHITECTURES[name]
    build(about, tmp_path / "built")
    source = uneven(tmp_path / "built", tmp_path / "source")
    fold = measured(source, tmp_path / "work")

    layers, prefix, head = EXPECTED[name]
    expected = {f"{prefix}layers.{n}.{link}" for n, links in enumerate(layers) for link in links}
    assert columns_of(fold).keys() == expected | ({f"{prefix}norm"} if head else set())
    assert len(fold.structure.links) == len(columns_of(fold))

    values, before = folded_values(fold), read_all(source)
    rewritten(source, tmp_path / "folded", {key: f32(value) for key, value in values.items()})
    changed = {key for key, value in values.items() if (value != before[key][1]).any()}
    assert changed == set(fold.structure.notes)
    expected_logits = computed(about, load(about, source))
    logits = computed(about, load(about, tmp_path / "folded"))
    assert_near(logits, expected_logits, "torch, folded")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "vllm") for name in ("qwen2", "qwen3_moe", "phi3")),
        *((name, "mlx") for name in ("mixtral", "gemma2", "gpt_oss")),
    ],
)
def test_folded_exports_compute_closer_to_the_original(
    name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median over tokens, because the choice of experts may change anywhere for a few of them."""
    monkeypatch.setattr(folds, "SMALLEST_GAIN", -1.0)
    build(ARCHITECTURES[name], tmp_path / "built")
    source = uneven(tmp_path / "built", tmp_path / "source", "BF16", seed=2)
    run_command({"quantize": str(source), "recipe": "q8"}, tmp_path / "master")
    work = {"export": str(tmp_path / "master"), "target": target, "bits": 8, "group_size": 32, "original": str(source)}
    run_command(work, tmp_path / "plain")
    run_command({**work, "fold": "equalize"}, tmp_path / "folded")
    ids = np.random.default_rng(1).integers(3, VOCABULARY, 60)
    expected, plain, folded = (
        open_model(tmp_path / folder).logits(ids, len(ids)) for folder in ("source", "plain", "folded")
    )
    errors = [np.median(np.linalg.norm(logits - expected, axis=1)) for logits in (folded, plain)]
    assert errors[0] < errors[1] < 0.1 * np.median(np.linalg.norm(expected, axis=1))
