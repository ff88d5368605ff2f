"""Make formats of a language model with one tool that need not be tuned, in that tool's own environment.

    ENVIRONMENT/bin/python benchmarks/format_peers.py TOOL MODEL TEXT WORK NAME...

benchmarks/formats.py runs it, once for all formats of a tool, as tools take long to start. It needs no package of the
project. WORK/NAME gets what the tool stores in the format that it calls NAME; what fails is a line of WORK/failed.txt.
What a tool does not say itself is left at its default. AutoRound's opt_rtn asks for text: it reads 16 windows of 256
tokens of TEXT. ModelOpt's checkpoints want a GPU: stored are the weights that its quantizers give, in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

WINDOWS, WINDOW = 16, 256


def model_free_ptq(model: str, text: Path, out: str, name: str) -> None:
    """llm-compressor: https://github.com/vllm-project/llm-compressor"""
    from llmcompressor import model_free_ptq

    model_free_ptq(model, out, scheme=name, ignore=["lm_head", "re:.*embed_tokens$"], device="cpu")


def autoround(model: str, text: Path, out: str, name: str) -> None:
    """AutoRound without tuning: https://github.com/intel/auto-round"""
    import torch
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, WINDOWS * WINDOW, WINDOW)
    windows = [{"input_ids": torch.tensor([ids[start : start + WINDOW]])} for start in starts]
    form = "auto_round:auto_gptq" if name == "W4A16" else "llm_compressor"
    rounding = AutoRound(
        model, scheme=name, iters=0, device_map="cpu", dataset=windows, seqlen=WINDOW, nsamples=WINDOWS
    )
    rounding.quantize()
    rounding.save_quantized(out, format=form)


def modelopt(model: str, text: Path, out: str, name: str) -> None:
    """Model-Optimizer: https://github.com/NVIDIA/Model-Optimizer"""
    import modelopt.torch.quantization as mtq
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    mtq.quantize(loaded, getattr(mtq, name))
    weights = {}
    for path, module in loaded.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            weights[f"{path}.weight"] = quantizer(module.weight).detach().contiguous()
    Path(out).mkdir()
    save_file(weights, f"{out}/model.safetensors")


def mlx_lm(model: str, text: Path, out: str, name: str) -> None:
    """mlx-lm's converter: https://github.com/ml-explore/mlx-lm"""
    from mlx_lm import convert

    floats = {"q_mode": name} if "fp" in name else {"q_bits": int(name.lstrip("q"))} if name[0] == "q" else {}
    convert(model, out, quantize=True, quant_predicate=name if name.startswith("mixed") else None, **floats)


def torchao(model: str, text: Path, out: str, name: str) -> None:
    """torchao's configurations of weights alone: https://github.com/pytorch/ao"""
    import torch
    import torchao.quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(getattr(torchao.quantization, name)(version=2))
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=config).save_pretrained(out)


TOOLS: dict[str, Callable[[str, Path, str, str], None]] = {
    "llmcompressor": model_free_ptq,
    "autoround": autoround,
    "modelopt": modelopt,
    "mlx": mlx_lm,
    "torchao": torchao,
}


def main() -> None:
    tool, model, text, work, *names = sys.argv[1:]
    for name in names:
        try:
            TOOLS[tool](model, Path(text), f"{work}/{name}", name)
        except Exception as error:
            with open(f"{work}/failed.txt", "a") as lines:
                lines.write(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}\n")


if __name__ == "__main__":
    main()
