"""Packs codes with vLLM's own functions: run by the Python of vLLM's own environment, without pqweights.

stdin: {"codes": [[code, ...], ...]}, 4-bit codes [K, N]. The file that is the only argument gets {"awq": words, "gptq":
words}, signed words of AutoAWQ and of AutoGPTQ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack


def main() -> None:
    """Read the codes, and write the words."""
    codes = torch.tensor(json.load(sys.stdin)["codes"], dtype=torch.int32)
    packed = {"awq": awq_pack(codes, 4, *codes.shape), "gptq": gptq_pack(codes, 4, *codes.shape)}
    Path(sys.argv[1]).write_text(json.dumps({name: words.tolist() for name, words in packed.items()}))


if __name__ == "__main__":
    main()
