"""Which weights share a bit width, by the names of many architectures."""

from __future__ import annotations

import pytest

from pqweights.planning.roles import classify
from pqweights.planning.sensitivity_file import TIED_EMBEDDINGS, grouped


def groups(*names: str, tied: bool = False) -> dict[str, list[str]]:
    """Group weights by name, with the roles that the names have in a plan."""
    return grouped([(name, classify(name, "BF16", (64, 128)).name) for name in names], tied)


ALONE = ""
# A module, the modules in it, and the name of their group within it; ALONE for a group of each.
MODULES: list[tuple[str, tuple[str, ...], str]] = [
    # Llama, and the names in Meta's own checkpoints
    ("model.layers.7.self_attn.", ("k_proj", "q_proj", "v_proj"), "qkv"),
    ("model.layers.7.mlp.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.7.", ("self_attn.o_proj", "mlp.down_proj"), ALONE),
    ("layers.0.attention.", ("wq", "wk", "wv"), "qkv"),
    ("layers.0.feed_forward.", ("w1", "w3"), "gate_up"),
    ("layers.0.", ("attention.wo", "feed_forward.w2"), ALONE),
    # shared experts, which are not those of a mixture
    ("model.layers.2.mlp.shared_expert.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.2.mlp.shared_experts.", ("gate_proj", "up_proj"), "gate_up"),
    ("model.layers.2.mlp.shared_experts.", ("down_proj",), ALONE),
    # MLA of DeepSeek; V2-Lite has no latent for the queries
    ("model.layers.1.self_attn.", ("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
    ("model.layers.1.self_attn.", ("q_b_proj", "kv_b_proj", "o_proj"), ALONE),
    # GPT-2 and BERT
    ("", ("wte", "wpe", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"), ALONE),
    ("encoder.layer.0.attention.self.", ("query", "key", "value"), "qkv"),
    ("encoder.layer.0.", ("attention.output.dense", "intermediate.dense", "output.dense"), ALONE),
    # linear attention of Qwen3-Next and Qwen3.5
    ("model.layers.0.linear_attn.", ("in_proj_qkvz",), "in_proj_qkvz"),
    ("model.layers.0.linear_attn.", ("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    # other names of q, k and v, and some that are only similar
    ("a.", ("q", "k", "v"), "qkv"),
    ("a.", ("q_lin", "k_lin", "v_lin"), "qkv"),
    ("", ("q", "k"), "qkv"),
    ("a.", ("qk", "q_projection", "my_q_proj", "queries", "w12", "gate"), ALONE),
]


@pytest.mark.parametrize(("path", "modules", "group"), MODULES)
def test_modules_that_runtimes_fuse_are_one_group(path: str, modules: tuple[str, ...], group: str) -> None:
    names = [f"{path}{module}.weight" for module in modules]
    alone = {path + module: [f"{path}{module}.weight"] for module in modules}
    assert groups(*names) == (alone if group == ALONE else {path + group: names})
    other = f"x.layers.8.{names[0]}"
    assert other not in groups(*names, other)[path + (group or modules[0])]


@pytest.mark.parametrize(
    ("path", "modules"),
    [
        ("model.layers.3.block_sparse_moe.experts", ("w1", "w2", "w3")),
        ("model.layers.3.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("model.layers.3.mlp.local_experts", ("gate_proj", "up_proj", "down_proj")),
        ("experts", ("w1", "w2", "w3")),
    ],
)
def test_all_experts_of_a_layer_are_one_group(path: str, modules: tuple[str, ...]) -> None:
    names = [f"{path}.{expert}.{module}.weight" for expert in range(12) for module in modules]
    assert groups(*names) == {path: names}
    fused = [f"{path}.{module}" for module in ("gate_up_proj", "down_proj")]
    assert groups(*fused) == {path: fused}


def test_tied_embeddings_are_one_group() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert groups(*names, tied=True) == {TIED_EMBEDDINGS: list(names)}
    assert len(groups(*names)) == 2
    assert groups("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", tied=True) == {
        TIED_EMBEDDINGS: ["model.embed_tokens.weight"],
        "model.layers.0.mlp.gate_up": ["model.layers.0.mlp.up_proj.weight"],
    }


def test_every_weight_is_in_one_group() -> None:
    starts, middles = ("", "m.", "m.experts.0.", ".."), ("q", "w1", "experts", "")
    names = [f"{start}{middle}{end}" for start in starts for middle in middles for end in ("", ".weight")]
    assert sorted(name for members in groups(*names).values() for name in members) == sorted(names)
