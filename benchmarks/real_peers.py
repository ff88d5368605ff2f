"""Quantize a language model with one other tool, in that tool's own environment.

    ENVIRONMENT/bin/python benchmarks/real_peers.py METHOD MODEL TEXT OUT [--bits 4] [--group-size 128]

benchmarks/real.py runs it. It needs no package of the project. Every method that reads data gets the same tokens: the
first windows of TEXT, by the model's own tokenizer. What a tool does not say itself is left at its default; what is
not, is said here. Linear layers are quantized; the head, embeddings and routers stay as they are. Of MLX everything is
quantized, as its converter does: embeddings and the head in the format of the layers, too, which `mlx_lm.awq` and
`mlx_lm.gptq` would otherwise store in more bits.

OUT gets what the tool saves. torchao's tensors for the CPU and bitsandbytes' are not saved: OUT gets the weights that
they decode to, in float32, and bytes.json with the size that a file would have, other weights in BF16.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
ROUTERS = r"re:.*mlp\.gate$"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a tool is to do.

    windows: the calibration tokens, [windows][tokens].
    bits, group_size: of the integers, and the weights that share a scale
    symmetric: whether zero is the middle of the integers, where a tool has both.
    """

    model: Path
    out: Path
    windows: list[list[int]]
    bits: int
    group_size: int
    symmetric: bool


# llm-compressor: https://github.com/vllm-project/llm-compressor


def llmcompressor(task: Task, scheme: str, *methods: str) -> None:
    """Rounding, AWQ, GPTQ, or AWQ's scales and then GPTQ, stored by compressed-tensors. scheme: w4a16, nvfp4, mxfp4"""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM

    weights = {"num_bits": task.bits, "type": "int", "symmetric": task.symmetric, "strategy": "group"}
    weights["group_size"] = task.group_size
    what: dict[str, Any] = {"scheme": f"{scheme.upper()}A16", "targets": ["Linear"]}
    if scheme == "w4a16":
        what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    how = what | {"ignore": ["lm_head", ROUTERS]}
    # AWQModifier pins its cache for a GPU, and fails if there is none.
    IntermediatesCache.pin_memory = lambda self, index, names=None: None
    recipe = [AWQModifier()] if "awq" in methods else []
    recipe.append(GPTQModifier(**how) if "gptq" in methods else QuantizationModifier(**how))
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype="auto")
    tokens = {"input_ids": task.windows, "attention_mask": [[1] * len(window) for window in task.windows]}
    calibration = {
        "dataset": Dataset.from_dict(tokens),
        "max_seq_length": len(task.windows[0]),
        "num_calibration_samples": len(task.windows),
        "shuffle_calibration_samples": False,
    }
    oneshot(model=model, recipe=recipe, **(calibration if methods else {}))
    model.save_pretrained(task.out, save_compressed=True)


# AutoRound: https://github.com/intel/auto-round


def autoround(task: Task, **how: Any) -> None:
    """AutoRound with its default settings, or with others, such as those of its recipes "best" and "light"."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    rounding = AutoRound(
        str(task.model),
        AutoTokenizer.from_pretrained(task.model),
        scheme=f"W{task.bits}A16",
        bits=task.bits,
        group_size=task.group_size,
        sym=task.symmetric,
        dataset=[{"input_ids": torch.tensor([window])} for window in task.windows],
        seqlen=len(task.windows[0]),
        nsamples=len(task.windows),
        device_map="cpu",
        **how,
    )
    rounding.quantize()
    rounding.save_quantized(str(task.out), format="auto_round:auto_gptq")


# torchao: https://github.com/pytorch/ao


def torchao(task: Task, method: str) -> None:
    """torchao's INT4 for the CPU, by its own rule, by HQQ, or with the scales of its AWQ."""
    import torch
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16)
    rule = "hqq" if method == "hqq" else "tinygemm"
    config = PrototypeInt4WeightOnlyConfig(group_size=task.group_size, int4_choose_qparams_algorithm=rule)

    def is_quantized(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and name != "lm_head"

    names = [name for name, module in model.named_modules() if is_quantized(module, name)]
    if method == "awq":
        from torchao.prototype.awq import AWQConfig

        quantize_(model, AWQConfig(config, step="prepare"), is_quantized)
        with torch.no_grad():
            for window in task.windows:
                model(torch.tensor([window]))
        quantize_(model, AWQConfig(config, step="convert"), is_quantized)
    else:
        quantize_(model, config, is_quantized)

    def decoded(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows, columns = weight.shape
        scales = 16 * columns if method == "awq" else 0
        # Rows of the identity in BF16 give the weights as the kernel sees them; it accumulates in float32.
        values = model.get_submodule(name)(torch.eye(columns, dtype=torch.bfloat16)).T
        return values, rows * columns * task.bits + rows * columns // task.group_size * 32 + scales

    save_decoded(task, names, decoded)


# bitsandbytes: https://github.com/bitsandbytes-foundation/bitsandbytes


def bitsandbytes(task: Task) -> None:
    """NF4 in blocks of 64, with double quantization, as transformers stores it of linear layers."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16)

    def decoded(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        stored = model.get_submodule(name).weight.data
        packed, state = quantize_4bit(stored, quant_type="nf4", compress_statistics=True)
        bits = 8 * (packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes) + 32
        return dequantize_4bit(packed, state), bits

    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    save_decoded(task, names, decoded)


def save_decoded(task: Task, names: list[str], decoded: Callable[[str, Any], tuple[Any, int]]) -> None:
    """Store what the linear layers of these names decode to. decoded: takes a weight; returns its values and bits"""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    bits = 16 * sum(parameter.numel() for parameter in plain.parameters())
    with torch.no_grad():
        for name in names:
            weight = plain.get_submodule(name).weight
            values, stored = decoded(name, weight)
            weight.copy_(values.float())
            bits += stored - 16 * weight.numel()
    plain.save_pretrained(task.out)
    (task.out / "bytes.json").write_text(json.dumps(bits // 8))


# mlx-lm: https://github.com/ml-explore/mlx-lm


def mlx(task: Task, method: str, **how: Any) -> None:
    """mlx-lm's converter, AWQ, GPTQ, or DWQ, with the calls that its own commands make.

    What is calibrated is computed in float32; scales are stored in BF16.
    """
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.quant import awq, dwq, gptq
    from mlx_lm.utils import load, quantize_model, save

    mx.random.seed(SEED)
    model, tokenizer, config = load(
        str(task.model), lazy=True, return_config=True, model_config=former_names(task.model)
    )
    data, form = mx.array(task.windows), {"group_size": task.group_size, "bits": task.bits}
    if method != "rounding":
        model.set_dtype(mx.float32)
    if method == "awq":
        if config["model_type"] not in awq.AWQ_MODEL_CONFIGS:
            raise NotImplementedError(f"mlx-lm has no AWQ for models of type {config['model_type']}")
        through_numpy()
        about = awq.AWQ_MODEL_CONFIGS[config["model_type"]]
        awq.awq_quantize(model, data, about, **form, embed_bits=task.bits, embed_group_size=task.group_size)
        config = awq.update_config(model, config)
    elif method == "gptq":
        through_numpy()
        fallback = {"fallback_bits": task.bits, "fallback_group_size": task.group_size}
        model, config["quantization"] = gptq.gptq_quantize(model, data, task.bits, task.group_size, **fallback)
    else:
        teacher = copy.deepcopy(model)
        model, config = quantize_model(model, config, **form)
        if method == "dwq":
            examples = [(window, 0) for window in task.windows] * how.get("passes", 1)
            dwq.dwq_quantize(
                model,
                lambda batch, index, split: teacher(batch),
                optimizers.Adam(learning_rate=how.get("rate", 1e-6), bias_correction=True),
                examples,
                examples[:4],  # it is only told how well it does on them
                batch_size=4,
                max_seq_length=1025,
                seed=SEED,
                dtype=mx.float32,
            )
    model.set_dtype(mx.bfloat16)
    save(str(task.out), str(task.model), model, tokenizer, config)


def former_names(model: Path) -> dict[str, Any]:
    """Settings under the names that mlx-lm looks for; transformers 5 writes others."""
    config = json.loads((model / "config.json").read_text())
    found = {
        "rope_theta": config.get("rope_parameters", {}).get("rope_theta"),
        "num_experts": config.get("num_local_experts"),
    }
    return {name: value for name, value in found.items() if value is not None and name not in config}


def through_numpy() -> None:
    """Let numpy compute products, attention and moments of inputs in float32: on a CPU, MLX takes ten times as long."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx_lm.quant import gptq

    def linear(self: Any, x: Any) -> Any:
        product = np.asarray(x) @ np.asarray(self.weight).T
        return mx.array(product) + self.bias if "bias" in self else mx.array(product)

    def attention(queries: Any, keys: Any, values: Any, *, scale: float, mask: Any = None, **_: Any) -> Any:
        if not (mask is None or isinstance(mask, str)):
            raise NotImplementedError(f"a mask of type {type(mask).__name__}")
        q, k, v = (np.asarray(each) for each in (queries, keys, values))
        shared = q.shape[1] // k.shape[1]
        scores = scale * (q @ np.repeat(k, shared, axis=1).swapaxes(-1, -2))
        if mask == "causal":
            scores[..., np.triu(np.ones(scores.shape[-2:], dtype=bool), 1)] = -np.inf
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return mx.array(likely / likely.sum(axis=-1, keepdims=True) @ np.repeat(v, shared, axis=1))

    def observed(self: Any, x: Any, *rest: Any, **options: Any) -> Any:
        rows = np.asarray(x).reshape(-1, x.shape[-1])
        self.H = self.H + mx.array(rows.T @ rows)
        return self.module(x, *rest, **options)

    fast: Any = mx.fast
    nn.Linear.__call__, fast.scaled_dot_product_attention, gptq.Catcher.__call__ = linear, attention, observed


# GPTQModel: https://github.com/ModelCloud/GPTQModel


def gptqmodel(task: Task) -> None:
    """GPTQModel with its default settings."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # with fewer than three cores it would take one, and refuse that
    from gptqmodel import GPTQModel, QuantizeConfig

    how = QuantizeConfig(bits=task.bits, group_size=task.group_size, sym=task.symmetric)
    with tempfile.TemporaryDirectory() as folder:
        model = GPTQModel.load(str(with_padding(task.model, Path(folder))), how)
        model.quantize([{"input_ids": window, "attention_mask": [1] * len(window)} for window in task.windows])
        model.save(str(task.out))


def with_padding(model: Path, folder: Path) -> Path:
    """A copy of a model with a token for padding, without which GPTQModel refuses a tokenizer; no window is padded."""
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    if not settings.keys() & {"pad_token", "eos_token"}:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        settings["pad_token"] = min(vocabulary, key=vocabulary.__getitem__)
        (folder / "tokenizer_config.json").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


METHODS: dict[str, Callable[[Task], None]] = {
    "llmcompressor-w4a16": lambda task: llmcompressor(task, "w4a16"),
    "llmcompressor-nvfp4": lambda task: llmcompressor(task, "nvfp4"),
    "llmcompressor-mxfp4": lambda task: llmcompressor(task, "mxfp4"),
    "llmcompressor-w4a16-awq": lambda task: llmcompressor(task, "w4a16", "awq"),
    "llmcompressor-w4a16-gptq": lambda task: llmcompressor(task, "w4a16", "gptq"),
    "llmcompressor-nvfp4-gptq": lambda task: llmcompressor(task, "nvfp4", "gptq"),
    "llmcompressor-mxfp4-gptq": lambda task: llmcompressor(task, "mxfp4", "gptq"),
    "llmcompressor-w4a16-awq-gptq": lambda task: llmcompressor(task, "w4a16", "awq", "gptq"),
    "autoround": autoround,
    "autoround-best": lambda task: autoround(task, iters=1000),
    "autoround-light": lambda task: autoround(task, iters=50, lr=5e-3),
    "gptqmodel": gptqmodel,
    "torchao": lambda task: torchao(task, "tinygemm"),
    "torchao-hqq": lambda task: torchao(task, "hqq"),
    "torchao-awq": lambda task: torchao(task, "awq"),
    "bitsandbytes": bitsandbytes,
    "mlx": lambda task: mlx(task, "rounding"),
    "mlx-awq": lambda task: mlx(task, "awq"),
    "mlx-gptq": lambda task: mlx(task, "gptq"),
    "mlx-dwq": lambda task: mlx(task, "dwq"),
    "mlx-dwq-longer": lambda task: mlx(task, "dwq", rate=1e-4, passes=4),
}


def read_windows(model: Path, text: Path, count: int, size: int) -> list[list[int]]:
    """The first windows of the text. Raises SystemExit if it is too short."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text.read_text(encoding="utf-8")).ids
    if len(ids) < count * size:
        raise SystemExit(f"{text}: expected {count * size} tokens, found {len(ids)}")
    return [ids[at : at + size] for at in range(0, count * size, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    task = Task(
        model=options.model,
        out=options.out,
        windows=read_windows(options.model, options.text, options.windows, options.window),
        bits=options.bits,
        group_size=options.group_size,
        symmetric=not options.asymmetric,
    )
    METHODS[options.method](task)


if __name__ == "__main__":
    main()
