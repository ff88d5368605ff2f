"""What docs/memory.md shows is what plan --memory prints."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from commands import done

import pqweights
from pqweights.checkpoint.header import TensorSpec, build_header
from pqweights.checkpoint.source import open_local
from pqweights.formats.packing import PackedFormat
from pqweights.planning.decisions import with_weights
from pqweights.planning.layout import stored_bytes
from pqweights.targets import get_target

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/memory.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", ["gguf", "vllm", "torchao"])
def test_estimated_sizes_of_a_model_of_8b_are_those_of_the_files_or_a_little_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.checkpoint.gguf.model.GgufModel.has_vocabulary", True)
    source = write_headers(
        tmp_path / "MODEL", layers=32, width=4096, inner=14336, heads=32, shared=8, vocabulary=128256
    )
    report, target = pqweights.plan(source, memory="1TB"), get_target(name)
    assert report.memory is not None
    estimated = {p.format: p.weight_bytes for p in report.memory.proposals if p.target == name}
    assert estimated.keys() == {*target.choices}
    whole = with_weights(open_local(source))
    for choice, (options, _) in target.choices.items():
        assignment = target.settings(options).assign(whole, None)
        sizes = [
            stored_bytes(how.specs(tensor.name, tensor.shape))
            if isinstance(how, PackedFormat)
            else 2 * math.prod(tensor.shape)
            for tensor in assignment.tensors
            for how in [assignment.decisions.get(tensor.name)]
        ]
        most = 1.17 if choice.startswith(("q2", "iq2", "iq1")) else 1.06
        assert 0.999 * sum(sizes) < estimated[choice] < most * sum(sizes), choice
