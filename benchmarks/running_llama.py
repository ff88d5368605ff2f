"""llama.cpp's part of running.py, for a Python with llama-cpp-python and gguf, which needs neither torch nor pqweights.

    PYTHON benchmarks/running_llama.py convert CHECKPOINT GGUF
    PYTHON benchmarks/running_llama.py quantize GGUF OUT Q4_K_M
    PYTHON benchmarks/running_llama.py run GGUF TOKENS PROMPT THREADS

`convert` writes a synthetic checkpoint (synthetic.py) as BF16, without a tokenizer. `quantize` is llama.cpp's own
quantization, without an importance matrix. `run` loads, evaluates and prints JSON; what it measures is what `child` of
running.py measures of transformers. Batches go to llama_decode, and the next token is numpy's argmax of the logits:
neither a tokenizer nor a sampler takes part.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import memory

BATCH = 512
CONTEXT = 1024
# What llama.cpp calls the file types.
FILE_TYPES = {"Q4_K_M": 15, "Q5_K_M": 17}


# --- files ---


def bf16_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a BF16 checkpoint as u16, mapped into memory."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        values = np.memmap(path, np.uint8, "r", offset=8 + size)
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                result[name] = values[begin:end].view(np.uint16).reshape(about["shape"])
    return result


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: it rotates neighbours, transformers the halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(folder: Path, out: Path) -> None:
    """Write the checkpoint of a Llama as BF16."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in bf16_tensors(folder).items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if values.ndim == 1:
            writer.add_tensor(stored, (values.astype(np.uint32) << np.uint32(16)).view(np.float32))
            continue
        if (projection := name.split(".")[-2]) in heads:
            values = interleaved(values, heads[projection])
        writer.add_tensor(stored, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, kind: str) -> None:
    """Quantize a BF16 file with llama.cpp's defaults."""
    from llama_cpp import llama_cpp as library

    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    if library.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(parameters)):
        raise SystemExit(f"error: llama.cpp could not quantize {source} to {kind}")


# --- running ---


class Log:
    """What llama.cpp says, instead of on stderr."""

    def __init__(self, library: Any) -> None:
        self.text = ""
        self._callback = library.llama_log_callback(self._add)  # kept, because the library does not own it
        library.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _add(self, level: int, text: bytes, data: Any) -> None:
        self.text += text.decode(errors="replace")

    def buffers(self) -> dict[str, float]:
        """Where the weights are, in MiB: CPU_REPACK is memory in the order of the fast kernels, CPU_Mapped the file."""
        return {name: float(size) for name, size in re.findall(r"(\S+) model buffer size =\s+([\d.]+) MiB", self.text)}


class Model:
    """A model that evaluates tokens, one sequence at a time."""

    def __init__(self, library: Any, file: Path, threads: int) -> None:
        self.library = library
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(os.fsencode(file), library.llama_model_default_params())
        parameters = library.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = CONTEXT, BATCH, BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = library.llama_init_from_model(self.model, parameters)
        if not self.model or not self.context:
            raise SystemExit(f"error: llama.cpp could not load {file}")
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def weights(self) -> int:
        """How many there are."""
        return int(self.library.llama_model_n_params(self.model))

    def clear(self) -> None:
        """Forget the sequence."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), False)

    def evaluate(self, tokens: list[int]) -> int:
        """Append tokens, at most a batch; the most likely next one."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("error: llama_decode failed")
        return int(np.argmax(self.logits()))

    def logits(self) -> np.ndarray:
        """Those of the last token, [vocabulary] f32."""
        return np.ctypeslib.as_array(self.library.llama_get_logits_ith(self.context, -1), (self.vocabulary,))

    def generate(self, prompt: list[int], count: int) -> float:
        """How long it takes to make that many tokens, greedily."""
        self.clear()
        begin = time.perf_counter()
        token = self.evaluate(prompt)
        for _ in range(count - 1):
            token = self.evaluate([token])
        return time.perf_counter() - begin


def run(file: Path, *, tokens: int, prompt: int, threads: int) -> dict[str, Any]:
    """What running.py reports of a process."""
    from llama_cpp import __version__
    from llama_cpp import llama_cpp as library

    log, imported = Log(library), memory()
    start = time.perf_counter()
    model = Model(library, file, threads)
    loaded = time.perf_counter() - start
    model.generate([1], 1)
    first = time.perf_counter() - start
    model.generate([1], 8)
    seconds = model.generate([1], tokens)
    generated = memory()
    long = [1 + place % 1000 for place in range(prompt)]
    prompts = [model.generate(long, 1) for _ in range(2)]
    return {
        "seconds": loaded,
        "first_token_seconds": first,
        "tokens_per_second": tokens / seconds,
        "prompt_seconds": prompts,
        "imported_bytes": imported["VmHWM"],
        "generated_peak_bytes": generated["VmHWM"],
        "peak_bytes": memory()["VmHWM"],
        "anonymous_bytes": memory()["RssAnon"],
        "weights": model.weights(),
        "threads": threads,
        "version": __version__,
        "system": library.llama_print_system_info().decode().strip(),
        "buffers": log.buffers(),
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what C code prints on stderr."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nothing)
        os.close(kept)


def main() -> None:
    command, file, *rest = sys.argv[1:]
    if command == "convert":
        convert(Path(file), Path(rest[0]))
    elif command == "quantize":
        with quiet():
            quantize(Path(file), Path(rest[0]), rest[1])
    else:
        tokens, prompt, threads = map(int, rest)
        print(json.dumps(run(Path(file), tokens=tokens, prompt=prompt, threads=threads)))


if __name__ == "__main__":
    main()
