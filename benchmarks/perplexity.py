"""Sliding-window perplexity of local language models on a text, each beside the first; any folder that pqweights writes.

    python benchmarks/perplexity.py --text eval.txt SRC EXPORT...

pqweights/evaluate.py says what is computed: the first `--windows` windows of `--window` tokens, `--stride` apart, from the
first `--characters` characters of the text, in float32 on the CPU. The change against the first model is paired over
windows, with its standard error in log-perplexity. benchmarks/exports.py makes the exports, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pqweights.evaluate import Windows, change, open_model, perplexity, tokenize, window_losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=60_000)
    parser.add_argument("--window", type=int, default=Windows.size)
    parser.add_argument("--stride", type=int, default=Windows.stride)
    parser.add_argument("--windows", type=int, default=Windows.count)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")[: options.characters]
    windows = Windows(options.window, options.stride, options.windows)
    rows, first = [], None
    for folder in options.models:
        model = open_model(folder)
        losses = window_losses(model, tokenize(folder, text), windows)
        first = first or losses
        mean, error = change(losses, first)
        rows.append(
            {
                "model": str(folder),
                "runtime": model.runtime,
                "perplexity": perplexity(losses),
                "change": mean,
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
