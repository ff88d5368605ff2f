"""Which weights share a bit width, by the names of many architectures."""

from __future__ import annotations

import pytest

from pqweights.planning.roles import classify
from pqweights.planning.sensitivity_file import TIED_EMBEDDINGS, group_of, grouped


def groups(*names: str, tied: bool = False) -> dict[str, list[str]]:
    """Group weights by name, with the roles that the names have in a plan."""
    return grouped([(name, classify(name, "BF16", (64, 128)).name) for name in names], tied)


def of(*parts: str, within: str, end: str = ".weight") -> list[str]:
    return [f"{within}{part}{end}" for part in parts]


def test_groups_of_llama() -> None:
    attention, mlp = "model.layers.7.self_attn.", "model.layers.7.mlp."
    assert groups(
        "model.embed_tokens.weight",
        *of("k_proj", "o_proj", "q_proj", "v_proj", within=attention),
        *of("down_proj", "gate_proj", "up_proj", within=mlp),
        *of("q_proj", within="model.layers.8.self_attn."),
        "lm_head.weight",
    ) == {
        "model.embed_tokens": ["model.embed_tokens.weight"],
        attention + "qkv": of("k_proj", "q_proj", "v_proj", within=attention),
        attention + "o_proj": of("o_proj", within=attention),
        mlp + "down_proj": of("down_proj", within=mlp),
        mlp + "gate_up": of("gate_proj", "up_proj", within=mlp),
        "model.layers.8.self_attn.qkv": of("q_proj", within="model.layers.8.self_attn."),
        "lm_head": ["lm_head.weight"],
    }


def test_groups_of_original_llama() -> None:
    """The names are those of Meta's own checkpoints."""
    layer = "layers.0."
    assert set(
        groups(
            *of("wq", "wk", "wv", "wo", within=layer + "attention."),
            *of("w1", "w2", "w3", within=layer + "feed_forward."),
        )
    ) == {layer + each for each in ("attention.qkv", "attention.wo", "feed_forward.gate_up", "feed_forward.w2")}


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


def test_fused_experts_of_a_layer_are_one_group() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{module}" for layer in (0, 1) for module in ("gate_up_proj", "down_proj")
    ]
    assert groups(*names) == {f"model.layers.{layer}.mlp.experts": names[2 * layer :][:2] for layer in (0, 1)}


@pytest.mark.parametrize("shared", ["shared_expert", "shared_experts"])
def test_shared_experts_are_groups_of_their_own(shared: str) -> None:
    mlp = "model.layers.2.mlp."
    modules = ("gate_proj", "up_proj", "down_proj")
    experts = [f"{mlp}experts.{expert}.{module}.weight" for expert in range(3) for module in modules]
    own = f"{mlp}{shared}."
    assert groups(*experts, *of(*modules, within=own)) == {
        mlp + "experts": experts,
        own + "gate_up": of("gate_proj", "up_proj", within=own),
        own + "down_proj": of("down_proj", within=own),
    }


def test_groups_of_latent_attention() -> None:
    """MLA of DeepSeek; V2-Lite has no latent for the queries."""
    attention = "model.layers.1.self_attn."
    assert groups(*of("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", within=attention)) == {
        attention + "qkv_a": of("q_a_proj", "kv_a_proj_with_mqa", within=attention),
        attention + "q_b_proj": of("q_b_proj", within=attention),
        attention + "kv_b_proj": of("kv_b_proj", within=attention),
        attention + "o_proj": of("o_proj", within=attention),
    }
    assert list(groups(*of("q_proj", "kv_a_proj_with_mqa", within=attention))) == [
        attention + "qkv",
        attention + "qkv_a",
    ]


def test_groups_of_gpt2() -> None:
    names = ["wte", "wpe", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"]
    assert groups(*of(*names, within="")) == {name: [f"{name}.weight"] for name in names}


def test_groups_of_bert() -> None:
    layer = "encoder.layer.0."
    own = layer + "attention.self."
    found = groups(
        *of("query", "key", "value", within=own),
        *of("attention.output.dense", "intermediate.dense", "output.dense", within=layer),
    )
    assert found == {
        own + "qkv": of("query", "key", "value", within=own),
        **{
            f"{layer}{name}": [f"{layer}{name}.weight"]
            for name in ("attention.output.dense", "intermediate.dense", "output.dense")
        },
    }


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("in_proj_qkvz", "out_proj"), {"in_proj_qkvz": 1, "out_proj": 1}),  # Qwen3-Next
        (("in_proj_qkv", "in_proj_z", "out_proj"), {"in_proj_qkvz": 2, "out_proj": 1}),  # Qwen3.5
    ],
)
def test_groups_of_linear_attention(names: tuple[str, ...], found: dict[str, int]) -> None:
    path = "model.layers.0.linear_attn."
    assert {name: len(of) for name, of in groups(*of(*names, within=path)).items()} == {
        path + name: count for name, count in found.items()
    }


def test_other_names_of_q_k_and_v() -> None:
    for names in (("q", "k", "v"), ("q_lin", "k_lin", "v_lin")):
        assert groups(*of(*names, within="a.")) == {"a.qkv": of(*names, within="a.")}
    assert groups("q.weight", "k.weight") == {"qkv": ["q.weight", "k.weight"]}
    # but not names that are only similar
    for name in ("qk", "q_projection", "my_q_proj", "queries", "w12", "gate"):
        assert group_of(f"a.{name}.weight", "linear", False) == f"a.{name}"


def test_tied_embeddings_are_one_group() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert groups(*names, tied=True) == {TIED_EMBEDDINGS: list(names)}
    assert len(groups(*names)) == 2
    assert groups("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", tied=True) == {
        TIED_EMBEDDINGS: ["model.embed_tokens.weight"],
        "model.layers.0.mlp.gate_up": ["model.layers.0.mlp.up_proj.weight"],
    }


def test_every_weight_is_in_one_group() -> None:
    names = [
        f"{a}{b}{c}"
        for a in ("", "m.", "m.experts.0.", "..")
        for b in ("q", "w1", "experts", "")
        for c in ("", ".weight")
    ]
    assert sorted(name for each in groups(*names).values() for name in each) == sorted(names)
