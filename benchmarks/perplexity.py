"""Sliding-window perplexity of local language models on a text, each beside the first.

    python benchmarks/perplexity.py --text eval.txt SRC EXPORT...

The first `--windows` windows of `--window` tokens, `--stride` apart, from the first `--characters` characters of the
text; the first window scores all its predictions, later ones the last `--stride`. Float32 arithmetic on the CPU. The
change against the first model is paired over windows, with its standard error in log-perplexity.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from pathlib import Path


def window_losses(folder: Path, text: str, window: int, stride: int, windows: int) -> list[tuple[float, int]]:
    """Per window: the summed negative log-likelihood of the scored tokens, and their number."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise SystemExit(f"error: {folder}: {kind}: {sorted(info[kind])[:5]}")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    losses = []
    with torch.inference_mode():
        for number in range(windows):
            piece = ids[number * stride : number * stride + window]
            if len(piece) < window:
                raise SystemExit(f"error: the text has only {len(ids)} tokens, too few for {windows} windows")
            scored = window - 1 if number == 0 else stride
            logits = model.eval()(piece[None]).logits[0, -scored - 1 : -1].float()
            losses.append((float(torch.nn.functional.cross_entropy(logits, piece[-scored:], reduction="sum")), scored))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=60_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    text = options.text.read_text(encoding="utf-8")[: options.characters]
    rows, first = [], None
    for model in options.models:
        losses = window_losses(model, text, options.window, options.stride, options.windows)
        perplexity = math.exp(sum(loss for loss, _ in losses) / sum(count for _, count in losses))
        first = first or losses
        changes = [(a - b) / count for (a, count), (b, _) in zip(losses, first, strict=True)]
        error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0
        rows.append(
            {
                "model": str(model),
                "perplexity": perplexity,
                "change": statistics.fmean(changes),
                "standard_error": error,
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'perplexity':>10}  {'change of log-perplexity':>26}  model")
    for row in rows:
        print(f"{row['perplexity']:10.4f}  {row['change']:+14.4f} +- {row['standard_error']:.4f}   {row['model']}")


if __name__ == "__main__":
    main()
