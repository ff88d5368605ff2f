"""Train a tiny language model on the Python sources of the running interpreter's standard library.

    python benchmarks/train_tiny.py FOLDER --minutes 15 [--architecture mixture | qwen3]

mixture: a Qwen3-MoE with tied embeddings: 4 M parameters, 5 layers, 8 experts of which 2 are active.
qwen3: a dense Qwen3 with norms of queries and keys, and a head of its own: 5 M parameters, 5 layers.

Both read a byte-level BPE of 2048 tokens. FOLDER gets the checkpoint in BF16, its tokenizer, and eval.txt with every
twentieth file, which was held back.
The purpose is a model that was really trained and whose layers differ in more than size; how good it becomes depends on
the minutes and the machine.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
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

VOCABULARY, CONTEXT, BATCH, PEAK_RATE, SEED = 2048, 256, 16, 2e-3, 0
HELD_BACK = 20
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


def sources() -> tuple[list[str], list[str]]:
    """Texts to train on, and texts that are held back."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
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


def qwen3() -> Qwen3ForCausalLM:
    """An untrained dense model whose rows all divide into groups of 128."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


ARCHITECTURES = {"mixture": mixture, "qwen3": qwen3}


def train(net: PreTrainedModel, ids: np.ndarray, minutes: float) -> None:
    """AdamW with a warm-up and a cosine over the time that is given."""
    random = np.random.default_rng(SEED)
    net.train()
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    start, step, losses = time.monotonic(), 0, []
    while (passed := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = PEAK_RATE * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * (1 + math.cos(math.pi * passed)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        places = random.integers(0, len(ids) - CONTEXT - 1, BATCH)
        batch = torch.from_numpy(np.stack([ids[at : at + CONTEXT] for at in places]))
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {passed:.0%}: loss {np.mean(losses[-50:]):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="mixture")
    options = parser.parse_args()
    texts, held_back = sources()
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    ids = np.array([number for text in texts for number in bpe.encode(text).ids], dtype=np.int64)
    print(f"{len(texts)} files, {len(ids)} tokens", flush=True)
    torch.manual_seed(SEED)
    net = ARCHITECTURES[options.architecture]()
    train(net, ids, options.minutes)
    if options.architecture == "mixture":
        net.config.output_router_logits = False
    net.to(torch.bfloat16).save_pretrained(options.folder)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(options.folder)
    (options.folder / "eval.txt").write_text("\n".join(held_back), encoding="utf-8")


if __name__ == "__main__":
    main()
