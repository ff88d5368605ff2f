"""What docs/memory.md shows is what plan --memory prints, and the expected order is the one that was measured."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from commands import done

import pqweights
from pqweights.checkpoint.header import TensorSpec, build_header

ROOT = Path(__file__).parents[2]
PAGE, GGUF, EXPORTS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("memory", "gguf", "exports")
)


def write_headers(
    folder: Path, *, layers: int, width: int, inner: int, heads: int, shared: int, vocabulary: int
) -> Path:
    """A Llama of which only the headers are written: its weights are a hole in the file."""
    size = width // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, width)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (shared * size, width),
            "self_attn.v_proj": (shared * size, width), "self_attn.o_proj": (width, width), "input_layernorm": (width,),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
            "post_attention_layernorm": (width,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes |= {"model.norm": (width,), "lm_head": (vocabulary, width)}
    folder.mkdir()
    specs = [TensorSpec(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    header, stored = build_header("model.safetensors", specs, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(header)
    os.truncate(folder / "model.safetensors", stored[-1].offset + stored[-1].byte_count)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": shared, "hidden_act": "silu",
        "vocab_size": vocabulary, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_example_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_headers(tmp_path / "MODEL", layers=32, width=4096, inner=14336, heads=32, shared=8, vocabulary=128256)
    monkeypatch.chdir(tmp_path)
    printed = done("plan", "MODEL/", "--memory", "16GB").stdout
    shown = PAGE.partition("<!-- example -->\n")[2].partition("<!-- /example -->")[0]
    assert shown.strip("\n") == re.sub("(?m)^(?=.)", "    ", printed).strip("\n")


@pytest.fixture
def expected(tmp_path: Path) -> dict[tuple[str, str], str]:
    """The expected rise of the small Llama of the pages, by target and options."""
    source = write_headers(tmp_path / "tiny", layers=4, width=256, inner=768, heads=4, shared=2, vocabulary=2048)
    advice = pqweights.plan(source, memory="1TB").memory
    assert advice is not None
    stored = [proposal.stored for proposal in advice.proposals]
    return {(of.target, key): f"{of.expected_rise:.5f}" for of in stored for key in (of.format, str(of.options))}


def test_the_expected_order_is_that_of_the_measured_divergence(expected: dict[tuple[str, str], str]) -> None:
    rows = re.findall(r"(?m)^\| ([\w-]+) \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", PAGE)
    assert len(rows) == 11
    assert [rise for *_, rise, _ in rows] == [expected[target, format] for target, format, *_ in rows]
    measured = [kl for *_, kl in rows]
    assert measured == sorted(measured) and all(kl in GGUF + EXPORTS for kl in measured)


def test_the_table_of_decisions_has_the_expected_and_the_measured_numbers(expected: dict[tuple[str, str], str]) -> None:
    rows = re.findall(
        r"(?m)^\|[^|]*\|[^|]*\| `--target ([\w-]+) ?([^`]*)` \|[^|]*\| ([\d.E]+) \| ?([\d.]*) ?\|$", EXPORTS
    )
    assert len(rows) == 19
    for target, flags, rise, kl in rows:
        name, _, value = flags.removeprefix("--").partition(" ")
        options = {name: int(value) if value.isdigit() else value} if flags else {}
        assert rise == expected[target, str(options)], (target, flags)
        assert (GGUF + EXPORTS).count(kl) > 1
