"""What vLLM computes on the CPU: run by the Python of vLLM's own environment, without pqweights.

stdin: {"folders": {name: folder}, "tokens": [[id, ...], ...], "codes": [[code, ...], ...]}, the codes of 4 bits [K, N].
The file that is the only argument gets
"scores": {name: [[log probability of each token but the first, given those before it, ...], ...]}, and the error in
place of the scores for what vLLM does not load;
"words": {"awq": words, "gptq": words}, the codes in signed words, as vLLM's own functions pack them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch
import vllm
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as int4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

NIBBLES = 8  # in a word
BLOCK = 16  # outputs whose words lie together
ZERO = 8  # the integer that stands for 0
LONGEST = 128
CACHE_BYTES = 1 << 26


def product(
    input: torch.Tensor,  # [tokens, inputs]
    q_weight: torch.Tensor,  # i32 [outputs / 16, inputs * 2]: for each input the words of 16 outputs
    scales: torch.Tensor,  # [inputs / group, outputs]
    zeros: torch.Tensor | None,  # i32 [inputs / group, outputs / 8]
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Do what vLLM's cpu_gemm_wna16 does, which its library has only for processors with AVX-512."""
    if pack_factor != NIBBLES:
        raise ValueError("expected integers of 4 bits")
    words = q_weight.reshape(q_weight.shape[0], -1, BLOCK // NIBBLES)
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32)
    integers = (words[..., None] >> shifts) & 15  # [outputs / 16, inputs, 2, 8]
    integers = integers.transpose(0, 1).reshape(words.shape[1], -1)
    no_zeros = torch.full(scales.shape, ZERO)
    of_groups = no_zeros if zeros is None else ((zeros[..., None] >> shifts) & 15).reshape(scales.shape)
    size = len(integers) // len(scales)
    weights = (integers - of_groups.repeat_interleave(size, 0)) * scales.float().repeat_interleave(size, 0)
    result = input.float() @ weights
    return (result if bias is None else result + bias.float()).to(input.dtype)


class Tiles(linear.Fp8BlockScaledMMLinearKernel):
    """FP8 in tiles as vLLM loads it, times BF16 inputs: what its kernel for CPUs does on processors with AMX alone."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Anywhere."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Multiply by the decoded weights."""
        parameters = self._get_layer_params(layer)
        weight, scales = parameters.weight.float(), parameters.block_scale.float()
        for axis, size in enumerate((self.weight_group_shape.row, self.weight_group_shape.col)):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
        return torch.nn.functional.linear(x.float(), weight * scales, None if bias is None else bias.float()).to(
            x.dtype
        )

    def apply_block_scaled_mm(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Not called."""
        raise NotImplementedError


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Mxfp4Experts(UnquantizedFusedMoEMethod):
    """Experts of gpt-oss as vLLM loads them, decoded to BF16: its kernel for CPUs needs AMX."""

    weight_dtype = "gpt_oss_mxfp4"
    create_weights = mxfp4.GptOssMxfp4MoEMethod.create_weights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weights [experts, out, in], two a byte, the first in the low half."""
        for name in ("w13_weight", "w2_weight"):
            codes, exponents = getattr(layer, name).long(), getattr(layer, f"{name}_scale").float() - 127
            values = E2M1[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
            values = values * exponents.exp2().repeat_interleave(32, -1)
            replace_parameter(layer, name, values.to(torch.bfloat16))
        super().process_weights_after_loading(layer)


class Int4Experts(UnquantizedFusedMoEMethod):
    """The same of symmetric integers of 4 bits."""

    create_weights = int4.CompressedTensorsWNA16MoEMethod.create_weights
    get_weight_shape = int4.CompressedTensorsWNA16MoEMethod.get_weight_shape
    packed_factor, symmetric, actorder = NIBBLES, True, None

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any, layer_name: str | None = None) -> None:
        """Take what the method of vLLM takes."""
        super().__init__(moe)
        self.weight_quant, self.group_size, self.strategy = weight_quant, weight_quant.group_size, weight_quant.strategy

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the words [experts, out, in / 8]."""
        shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32)
        for name in ("w13_weight", "w2_weight"):
            words, scales = getattr(layer, f"{name}_packed"), getattr(layer, f"{name}_scale").float()
            integers = ((words[..., None] >> shifts) & 15).flatten(-2) - ZERO
            values = integers * scales.repeat_interleave(self.group_size, -1)
            layer.register_parameter(name, torch.nn.Parameter(values.to(torch.bfloat16), requires_grad=False))
        super().process_weights_after_loading(layer)


def allow_emulation() -> None:
    """Let vLLM's own emulations run on a CPU, for which it does not offer them; MXFP4's needs another package."""
    if not torch.cpu._is_amx_tile_supported():
        mxfp4.GptOssMxfp4Config._make_moe_method = lambda self, moe: Mxfp4Experts(moe)
        int4.CompressedTensorsWNA16MoEMethod = Int4Experts
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    if not torch.cpu._is_amx_tile_supported():
        linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Tiles]


def scores(folder: str, tokens: list[list[int]]) -> list[list[float]]:
    """The log probability of each token but the first."""
    size = {"max_model_len": LONGEST, "kv_cache_memory_bytes": CACHE_BYTES}
    model = vllm.LLM(folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, **size)
    parameters = vllm.SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False, temperature=0)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in tokens], parameters, use_tqdm=False)
    return [
        [float(found[token].logprob) for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(tokens, outputs, strict=True)
    ]


def main() -> None:
    """Read the job, and write the result."""
    job, found = json.load(sys.stdin), dict[str, Any]()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        _custom_ops.cpu_gemm_wna16 = product
    allow_emulation()
    # vLLM collects garbage seven times for each model: without what the modules hold, in 2 seconds less.
    gc.freeze()
    gc.unfreeze = lambda: None
    for name, folder in job["folders"].items():
        try:
            found[name] = scores(folder, job["tokens"][name])
        except Exception as error:  # the test says which model it is, and with what error
            found[name] = str(error)
    codes = torch.tensor(job["codes"], dtype=torch.int32)
    words = {"awq": awq_pack(codes, 4, *codes.shape).tolist(), "gptq": gptq_pack(codes, 4, *codes.shape).tolist()}
    Path(sys.argv[1]).write_text(json.dumps({"scores": found, "words": words}))


if __name__ == "__main__":
    main()
