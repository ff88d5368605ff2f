"""Scores tokens in vLLM on the CPU: run by the Python of vLLM's own environment, without pqweights.

stdin: {"folders": {name: folder}, "tokens": [[id, ...], ...]}. The file that is the only argument gets {name: [[log
probability of each token but the first, given those before it, ...], ...]}, and the error in place of the scores for
what vLLM does not load.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch
import vllm
from vllm import _custom_ops

NIBBLES = 8  # in a word
BLOCK = 16  # outputs whose words lie together
ZERO = 8  # the integer that stands for 0
LONGEST = 128


def product(
    input: torch.Tensor,  # [tokens, inputs]
    q_weight: torch.Tensor,  # i32 [outputs / 16, inputs * 2]: for each input the words of 16 outputs
    scales: torch.Tensor,  # [inputs / group, outputs]
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Do what vLLM's cpu_gemm_wna16 does, which its library has only for processors with AVX-512."""
    if zeros is not None or pack_factor != NIBBLES:
        raise ValueError("expected symmetric integers of 4 bits")
    words = q_weight.reshape(q_weight.shape[0], -1, BLOCK // NIBBLES)
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32)
    integers = ((words[..., None] >> shifts) & 15) - ZERO  # [outputs / 16, inputs, 2, 8]
    integers = integers.transpose(0, 1).reshape(words.shape[1], -1)
    weights = integers * scales.float().repeat_interleave(len(integers) // len(scales), 0)
    result = input.float() @ weights
    return (result if bias is None else result + bias.float()).to(input.dtype)


def scores(folder: str, tokens: list[list[int]]) -> list[list[float]]:
    """The log probability of each token but the first."""
    model = vllm.LLM(folder, dtype="bfloat16", max_model_len=LONGEST, enforce_eager=True, skip_tokenizer_init=True)
    parameters = vllm.SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False, temperature=0)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in tokens], parameters, use_tqdm=False)
    return [
        [float(found[token].logprob) for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(tokens, outputs, strict=True)
    ]


def main() -> None:
    """Read the job, and write the result."""
    job, result = json.load(sys.stdin), dict[str, Any]()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        _custom_ops.cpu_gemm_wna16 = product
    for name, folder in job["folders"].items():
        try:
            result[name] = scores(folder, job["tokens"])
        except Exception as error:  # the test says which model it is, and with what error
            result[name] = str(error)
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
