"""What a runtime takes beside weights: its share of the memory, and its buffers beside those that llama.cpp reports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import F64_SUM
from hypothesis import example, given
from hypothesis import strategies as st

from pqweights.planning.context_memory import context_memory, text_sizes
from pqweights.planning.options import RUNTIMES
from pqweights.planning.runtime_memory import GIB, RUNTIME_MEMORY

# Loads a file with a context of so many tokens; llama.cpp then says on stderr what it takes.
SCRIPT = """
import sys
from llama_cpp import llama_cpp as C
model = C.llama_model_load_from_file(sys.argv[1].encode(), C.llama_model_default_params())
parameters = C.llama_context_default_params()
parameters.n_ctx = int(sys.argv[2])
assert C.llama_init_from_model(model, parameters)
"""
# Width, width within layers, heads, heads of keys and values, vocabulary, tokens of context
SHAPES = [
    (1024, 4096, 16, 4, 32000, 8192), (1024, 16384, 16, 4, 32000, 8192), (2048, 8192, 16, 16, 512, 32768),
    (4096, 14336, 32, 8, 128256, 4096),
]  # fmt: skip


def test_every_runtime_that_can_be_asked_for_is_known() -> None:
    assert tuple(RUNTIME_MEMORY) == RUNTIMES


def share_of(name: str, memory: int) -> float:
    """What docs/memory.md says of the share that a runtime uses."""
    if name == "mlx":
        return 2 / 3 if memory <= 32 * GIB else 3 / 4
    return 0.92 if name == "vllm" else 1.0


@example("mlx", 22_906_492_246)  # a byte more than two thirds of 32 GiB, where the share changes
@given(st.sampled_from(RUNTIMES), st.integers(1, 1 << 45))
def test_memory_for_a_size_is_the_least_of_which_the_runtime_uses_so_much(name: str, used: int) -> None:
    needed = RUNTIME_MEMORY[name].memory_for(used)
    assert share_of(name, needed) * needed >= used * (1 - F64_SUM)
    assert share_of(name, needed - 1) * (needed - 1) <= used * (1 + F64_SUM)


def test_a_runtime_that_reads_in_steps_takes_no_more_for_long_contexts_but_for_the_mask() -> None:
    sizes = text_sizes({"hidden_size": 64, "intermediate_size": 256, "vocab_size": 100})
    by_name = {name: runtime.overhead_bytes(sizes, 8192) for name, runtime in RUNTIME_MEMORY.items()}
    longer = {name: runtime.overhead_bytes(sizes, 16384) - by_name[name] for name, runtime in RUNTIME_MEMORY.items()}
    inner = 3 * 256 + 8 * 64
    assert longer == {"llama.cpp": 2 * 512 * 8192, "mlx": 0, "vllm": 0, "transformers": 8192 * inner * 2}


def write_zeros(path: Path, width: int, inner: int, heads: int, shared: int, vocabulary: int) -> dict[str, Any]:
    """Write a Llama of two layers, without a tokenizer and with weights of 0; return what its config.json would say."""
    import gguf

    writer, size = gguf.GGUFWriter(path, "llama"), width // heads
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(2)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("none")
    shapes = {"token_embd": (vocabulary, width), "output": (vocabulary, width), "output_norm": (width,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": (width, width) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (shared * size, width) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{name}": (inner, width) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (width, inner)}
    for name, (*rows, columns) in shapes.items():
        if rows:
            blocks = np.zeros((*rows, columns // 32 * 18), np.uint8)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(f"{name}.weight", np.ones(columns, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": 2,
        "num_key_value_heads": shared, "vocab_size": vocabulary,
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_buffers_of_llama_cpp_are_at_most_what_is_counted_and_hardly_less(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    config = write_zeros(tmp_path / "zeros.gguf", *shape[:-1])
    context, runtime = shape[-1], RUNTIME_MEMORY["llama.cpp"]
    command = [sys.executable, "-c", SCRIPT, tmp_path / "zeros.gguf", str(context)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr

    def buffers(kind: str) -> float:
        return sum(float(size) for size in re.findall(rf"{kind} buffer size = +([\d.]+) MiB", said)) * 2**20

    assert buffers("KV") == runtime.context_bytes(context_memory(config), context)
    counted = runtime.overhead_bytes(text_sizes(config), context) - runtime.base_bytes
    assert 0.6 * counted < buffers("compute") <= counted
