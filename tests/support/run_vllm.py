"""Scores tokens in vLLM on the CPU: run by the Python of vLLM's own environment, without pqweights.

stdin: {"folders": {name: folder}, "tokens": [[id, ...], ...]}. The file of the only argument gets {name: [[log
probability of each token but the first, ...], ...], ...}, and under "kernel" what multiplied by packed integers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}

import torch
import vllm
from vllm import _custom_ops as ops

NIBBLES_PER_WORD = 8
OUTPUTS_PER_BLOCK = 16
ZERO = 8  # the integer that stands for 0


def cpu_gemm_wna16(
    input: torch.Tensor,  # [..., inputs]
    q_weight: torch.Tensor,  # i32 [outputs / 16, inputs * 2]: for each input two words of eight outputs
    scales: torch.Tensor,  # [inputs / group, outputs]
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Do what vLLM's function does, which its library only has for processors with AVX-512."""
    assert zeros is None and pack_factor == NIBBLES_PER_WORD
    blocks, outputs = q_weight.shape[0], q_weight.shape[0] * OUTPUTS_PER_BLOCK
    words = q_weight.reshape(blocks, -1, OUTPUTS_PER_BLOCK // NIBBLES_PER_WORD)
    shifts = torch.arange(0, 4 * NIBBLES_PER_WORD, 4, dtype=torch.int32)
    integers = ((words[..., None] >> shifts) & 15) - ZERO  # [blocks, inputs, 2, 8]
    integers = integers.reshape(blocks, -1, OUTPUTS_PER_BLOCK).permute(1, 0, 2).reshape(-1, outputs)
    weights = integers.to(scales.dtype) * scales.repeat_interleave(integers.shape[0] // scales.shape[0], 0)
    product = input @ weights.to(input.dtype)
    return product if bias is None else (product + bias).to(input.dtype)


def scores(folder: str, tokens: list[list[int]], parameters: Any) -> list[list[float]]:
    """The log probability of each token but the first, given those before it."""
    model = vllm.LLM(folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": ids} for ids in tokens]
    found = model.generate(prompts, parameters, use_tqdm=False)
    result = [
        [float(each[token].logprob) for token, each in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(tokens, found, strict=True)
    ]
    del model, found
    gc.collect()
    return result


def main() -> None:
    """Read the job, and write the result."""
    job = json.load(sys.stdin)
    kernel = "vLLM's"
    if job["torch"] or not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        kernel, ops.cpu_gemm_wna16 = "torch's", cpu_gemm_wna16
    parameters = vllm.SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False, temperature=0)
    result: dict[str, Any] = {"kernel": kernel}
    result |= {name: scores(folder, job["tokens"], parameters) for name, folder in job["folders"].items()}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
