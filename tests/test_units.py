"""Sizes in words, and which weights share a width."""

from __future__ import annotations

import pytest

from pqweights.errors import RecipeError
from pqweights.planning.groups import TIED, group_of, grouped
from pqweights.planning.roles import classify
from pqweights.units import parse_size

# ------------------------------------------------------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("9GB", 9 * 10**9),
        ("9GiB", 9 * 2**30),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2.5 MB", 2_500_000),
        ("0.5MiB", 2**19),
        ("3 tib", 3 * 2**40),
        ("1TB", 10**12),
        (" 17 ", 17),
        ("17B", 17),
        ("4.35GB", 4_350_000_000),  # not what a float makes of it
        ("1.0000000001GB", 1_000_000_000),
        (123456, 123456),
    ],
)
def test_a_size_is_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "9 XB", "9GBs", "nine", "-5GB", "+5GB", "1e9", "9,5GB", "9.GB", ".5GB", "5 G B", "5G", "inf", "nan", "0x10"],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"5GB \(10\*\*9 bytes\), 5GiB \(2\*\*30\)") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0.4", "0GB", "9" * 30, "9" * 5000 + "GB"])
def test_what_no_file_can_have_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="at least one byte") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


# ----------------------------------------------------------------------------------------------------------------- fusion


def groups(*names: str, tied: bool = False) -> dict[str, list[str]]:
    """Groups of weights, whose roles are those that the names have in a plan."""
    return grouped([(name, classify(name, "BF16", (64, 128)).name) for name in names], tied)


def of(*parts: str, within: str, end: str = ".weight") -> list[str]:
    return [f"{within}{part}{end}" for part in parts]


def test_llama() -> None:
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


def test_original_llama() -> None:
    """The names of Meta's own checkpoints."""
    layer = "layers.0."
    assert set(
        groups(
            *of("wq", "wk", "wv", "wo", within=layer + "attention."),
            *of("w1", "w2", "w3", within=layer + "feed_forward."),
        )
    ) == {
        layer + each for each in ("attention.qkv", "attention.wo", "feed_forward.gate_up", "feed_forward.w2")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "modules"),
    [
        ("model.layers.3.block_sparse_moe.experts", ("w1", "w2", "w3")),
        ("model.layers.3.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("model.layers.3.mlp.local_experts", ("gate_proj", "up_proj", "down_proj")),
        ("experts", ("w1", "w2", "w3")),
    ],
)
def test_all_experts_of_a_layer_are_one(path: str, modules: tuple[str, ...]) -> None:
    names = [f"{path}.{expert}.{module}.weight" for expert in range(12) for module in modules]
    assert groups(*names) == {path: names}


def test_fused_experts() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{module}" for layer in (0, 1) for module in ("gate_up_proj", "down_proj")
    ]
    assert groups(*names) == {f"model.layers.{layer}.mlp.experts": names[2 * layer :][:2] for layer in (0, 1)}


@pytest.mark.parametrize("shared", ["shared_expert", "shared_experts"])
def test_shared_experts_are_apart(shared: str) -> None:
    mlp = "model.layers.2.mlp."
    modules = ("gate_proj", "up_proj", "down_proj")
    experts = [f"{mlp}experts.{expert}.{module}.weight" for expert in range(3) for module in modules]
    own = f"{mlp}{shared}."
    assert groups(*experts, *of(*modules, within=own)) == {
        mlp + "experts": experts,
        own + "gate_up": of("gate_proj", "up_proj", within=own),
        own + "down_proj": of("down_proj", within=own),
    }


def test_latents() -> None:
    """DeepSeek's MLA; V2-Lite has no latent of the queries."""
    attention = "model.layers.1.self_attn."
    assert groups(
        *of("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", within=attention)
    ) == {
        attention + "qkv_a": of("q_a_proj", "kv_a_proj_with_mqa", within=attention),
        attention + "q_b_proj": of("q_b_proj", within=attention),
        attention + "kv_b_proj": of("kv_b_proj", within=attention),
        attention + "o_proj": of("o_proj", within=attention),
    }  # fmt: skip
    assert list(groups(*of("q_proj", "kv_a_proj_with_mqa", within=attention))) == [
        attention + "qkv",
        attention + "qkv_a",
    ]


def test_gpt2() -> None:
    names = ["wte", "wpe", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"]
    assert groups(*of(*names, within="")) == {name: [f"{name}.weight"] for name in names}


def test_bert() -> None:
    layer = "encoder.layer.0."
    own = layer + "attention.self."
    found = groups(
        *of("query", "key", "value", within=own),
        *of("attention.output.dense", "intermediate.dense", "output.dense", within=layer),
    )
    assert found == {
        own + "qkv": of("query", "key", "value", within=own),
        **{f"{layer}{name}": [f"{layer}{name}.weight"] for name in ("attention.output.dense", "intermediate.dense", "output.dense")},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("in_proj_qkvz", "out_proj"), {"in_proj_qkvz": 1, "out_proj": 1}),  # Qwen3-Next
        (("in_proj_qkv", "in_proj_z", "out_proj"), {"in_proj_qkvz": 2, "out_proj": 1}),  # Qwen3.5
    ],
)
def test_linear_attention(names: tuple[str, ...], found: dict[str, int]) -> None:
    path = "model.layers.0.linear_attn."
    assert {name: len(of) for name, of in groups(*of(*names, within=path)).items()} == {
        path + name: count for name, count in found.items()
    }


def test_other_names_of_q_k_and_v() -> None:
    for names in (("q", "k", "v"), ("q_lin", "k_lin", "v_lin")):
        assert groups(*of(*names, within="a.")) == {"a.qkv": of(*names, within="a.")}
    assert groups("q.weight", "k.weight") == {"qkv": ["q.weight", "k.weight"]}
    # but not what only looks like it
    for name in ("qk", "q_projection", "my_q_proj", "queries", "w12", "gate"):
        assert group_of(f"a.{name}.weight", "linear", False) == f"a.{name}"


def test_embeddings_that_are_tied_are_one() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert groups(*names, tied=True) == {TIED: list(names)}
    assert len(groups(*names)) == 2
    assert groups("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", tied=True) == {
        TIED: ["model.embed_tokens.weight"],
        "model.layers.0.mlp.gate_up": ["model.layers.0.mlp.up_proj.weight"],
    }


def test_no_weight_is_lost() -> None:
    names = [
        f"{a}{b}{c}"
        for a in ("", "m.", "m.experts.0.", "..")
        for b in ("q", "w1", "experts", "")
        for c in ("", ".weight")
    ]
    assert sorted(name for each in groups(*names).values() for name in each) == sorted(names)
