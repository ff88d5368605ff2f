"""Train a tiny language model on the Python sources of the running interpreter's standard library.

    python benchmarks/train_tiny.py FOLDER --minutes 15 [--architecture mixture | qwen3 | wide | residual]

mixture: a Qwen3-MoE with tied embeddings: 4 M parameters, 5 layers, 8 experts of which 2 are active.
qwen3: a dense Qwen3 with norms of queries and keys, and a head of its own: 5 M parameters, 5 layers.
wide: the same with matrices of 4096 inputs behind the MLP: 37 M parameters, 5 layers. It wants a GPU.
residual: the same with hidden states of 4096 channels, and a narrow inside: 33 M parameters, 2 layers. It wants a GPU.

All read a byte-level BPE of 2048 tokens. FOLDER gets the checkpoint in BF16, its tokenizer, and eval.txt with every
twentieth file, which was held back. --packages trains on the sources of all installed packages too: 32 M parameters
would know the standard library by heart.
The purpose is a model that was really trained and whose layers differ in more than size; how good it becomes depends on
the minutes and the machine.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, CONTEXT, SEED = 2048, 256, 0
BATCH, PEAK_RATE = {"cpu": 16, "cuda": 256}, {"cpu": 2e-3, "cuda": 1e-3}
HELD_BACK = 20
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
BPE_FILES = 4000  # enough for 2048 tokens


def sources(packages: bool = False) -> tuple[list[str], list[str]]:
    """Texts to train on, and texts that are held back."""
    paths = sysconfig.get_paths()
    files = [
        path
        for root in (Path(paths[name]) for name in ("stdlib", *(["purelib"] if packages else [])))
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    if packages:  # so that the first files, from which the tokenizer is made, are of all of them
        np.random.default_rng(SEED).shuffle(files)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [t for n, t in enumerate(texts) if n % HELD_BACK], [t for n, t in enumerate(texts) if n % HELD_BACK == 0]


def mixture() -> Qwen3MoeForCausalLM:
    """An untrained mixture of experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def dense(**sizes: int) -> Qwen3ForCausalLM:
    """An untrained dense model whose rows all divide into groups of 128."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False, **sizes},
    )
    return Qwen3ForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixture": mixture,
    "qwen3": lambda: dense(hidden_size=256, intermediate_size=768, num_hidden_layers=5),
    "wide": lambda: dense(hidden_size=512, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=8),
    "residual": lambda: dense(
        hidden_size=4096, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True
    ),
}


def train(net: PreTrainedModel, ids: np.ndarray, minutes: float, device: str) -> None:
    """AdamW with a warm-up and a cosine over the time that is given; on a GPU, products in BF16."""
    random = np.random.default_rng(SEED)
    net.train().to(device)
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    start, step, losses = time.monotonic(), 0, []
    while (passed := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = PEAK_RATE[device] * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * (1 + math.cos(math.pi * passed)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        places = random.integers(0, len(ids) - CONTEXT - 1, BATCH[device])
        batch = torch.from_numpy(np.stack([ids[at : at + CONTEXT] for at in places]).astype(np.int64)).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {passed:.0%}: loss {torch.stack(losses[-50:]).mean():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="mixture")
    parser.add_argument("--packages", action="store_true")
    parser.add_argument("--device", choices=BATCH, default="cpu")
    options = parser.parse_args()
    texts, held_back = sources(options.packages)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts[:BPE_FILES], vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    ids = np.concatenate([np.array(it.ids, dtype=np.int32) for it in bpe.encode_batch(texts)])
    print(f"{len(texts)} files, {len(ids)} tokens", flush=True)
    torch.manual_seed(SEED)
    net = ARCHITECTURES[options.architecture]()
    train(net, ids, options.minutes, options.device)
    if options.architecture == "mixture":
        net.config.output_router_logits = False
    net.to("cpu", torch.bfloat16).save_pretrained(options.folder)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(options.folder)
    (options.folder / "eval.txt").write_text("\n".join(held_back), encoding="utf-8")


if __name__ == "__main__":
    main()
