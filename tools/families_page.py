"""Print docs/families.md: the types of models, and what each target was seen to make of them.

    python tools/families_page.py > docs/families.md

Rows are those of the tests that build the models tiny (tests/architectures, tests/support/gguf_cases.py and
encoder_cases.py) and of the table of models; a test compares the page with them.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

from pqweights.models.table import MODELS
from pqweights.models.towers import TOWERS
from pqweights.models.traits import TYPES_WITH, Trait

ROOT = Path(__file__).parents[1]

TARGETS = ("gguf", "vllm", "torchao", "mlx")
RUN, WRITTEN, REFUSED, UNSEEN = "run", "written", "no", ""
HEAD = """# Families of models

This page is generated from the tests and the table of models by `make docs-families`. Types are those of `model_type`
in config.json. Models of any type can be quantized, decoded to BF16 and verified; a target refuses what its runtime
would compute differently, before a weight is quantized.

- **run**: the export of a tiny random model was compared with the original in transformers: for gguf the logits, or the
  vectors of an encoder, in llama.cpp (llama-cpp-python 0.3.36); for vllm and torchao the outputs after loading with
  transformers, compressed-tensors and torchao; for mlx the logits of mlx-lm.
- **written**: the export has the names and shapes that the runtime expects, but was not run.
- **images**: for gguf, the image tower is written into a second file (`mmproj`). The vectors that llama.cpp makes of an
  image were compared, except for types with the tower of another: qwen3_vl_moe, qwen3_5, qwen3_5_moe (that of qwen3_vl)
  and smolvlm (that of idefics3).
- **no**: refused, with the reason.
- blank: not examined; the export warns, or refuses the type.

"""
FOOT = """
In GGUF, some models of images and text are written as the type of their text model: {wrappers}.

Draft layers (`mtp.*`, or layers after the last one) are in the GGUF files of {drafting}, but not in those of other
types. For hy_v4, llama.cpp and vLLM rotate neighbouring channels, but transformers pairs the halves of a head; with
llama.cpp's rotation, transformers computes the same logits. EmbeddingGemma, a gemma3 with bidirectional attention, is
refused by mlx.
"""


def type_of(config: str) -> str:
    """Return the type of a class of configurations; that of the whole model for one of its text model."""
    return str(getattr(importlib.import_module("transformers"), config).model_type).removesuffix("_text")


def text_type(config: str) -> str:
    """Return the type of the text model of a class of configurations of images and text."""
    known = importlib.import_module("transformers")
    return str(getattr(known, config)().text_config.model_type).removesuffix("_text")


def outcomes() -> dict[str, dict[str, str]]:
    """Return the cells of each type of model, by target."""
    sys.path[:0] = [str(ROOT / "tests" / "architectures"), str(ROOT / "tests" / "support")]
    built, known = importlib.import_module("gguf_cases"), importlib.import_module("known_architectures")
    encoders = importlib.import_module("encoder_cases")
    rows: dict[str, dict[str, str]] = {}
    for name, model in MODELS.items():
        if model.llama_cpp_differs:
            rows.setdefault(name, {})["gguf"] = REFUSED
        if model.llama_cpp is not None:
            rows.setdefault(name.removesuffix("_text"), {})["gguf"] = WRITTEN
    ran = [case.published.get("model_type") or type_of(f"{case.name}{'Text' if case.text else ''}Config")
            for case in built.CASES.values()]  # fmt: skip
    ran += [text_type(f"{case.name}Config") for case in built.CASES.values() if case.vision is not None]
    ran += [type_of(f"{case.name}Config") for case in (*encoders.CASES.values(), *encoders.ANSWERING.values())]
    for name in ran:
        rows.setdefault(name, {})["gguf"] = RUN
    for name in (key for key in TOWERS if " " not in key):
        text = rows.setdefault(name, {})
        text["gguf"] = f"{text.get('gguf') or WRITTEN}, images"
    for name in known.OF_THE_HUB:
        rows.setdefault(name, {}).update(vllm=WRITTEN, mlx=RUN)
    for name in known.OF_MLX_LM:
        rows.setdefault(name, {})["mlx"] = RUN
    for about in known.ARCHITECTURES.values():
        row = rows.setdefault(type_of(about.config), {})
        for target in TARGETS[1:]:
            kinds = {known.LOADS: RUN, known.IN_VLLM: WRITTEN, known.ON_METAL: WRITTEN}
            found = kinds.get(about.expected[target], REFUSED)
            row[target] = min(found, row.get(target) or found, key=(RUN, WRITTEN, REFUSED).index)
    return rows


def page() -> str:
    """Return the page."""
    lines = ["| type | " + " | ".join(TARGETS) + " |", "|---|" + "---|" * len(TARGETS)]
    rows: dict[str, Any] = dict(sorted(outcomes().items()))
    lines += [f"| {name} | " + " | ".join(row.get(of, UNSEEN) for of in TARGETS) + " |" for name, row in rows.items()]
    wrappers = ", ".join(sorted(TYPES_WITH[Trait.WRAPS_TEXT].split()))
    drafting = ", ".join(
        sorted(
            name.removesuffix("_text")
            for name, row in MODELS.items()
            if row.llama_cpp and row.llama_cpp.drafts is not None
        )
    )
    paragraphs = FOOT.format(wrappers=wrappers, drafting=drafting).strip().split("\n\n")
    foot = [textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
    return HEAD + "\n\n".join(["\n".join(lines), *foot]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
