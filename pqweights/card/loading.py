"""How a result is loaded: what a card says of it, by its target, or of a master."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.exports import EXPORTS
from pqweights.exports.loading import LoadableModel, by_pqweights, from_pretrained, shell
from pqweights.exports.target import ExportTarget
from pqweights.markdown import code, fenced

TRANSFORMERS, PQWEIGHTS = "transformers", "pqweights"


def library(target: ExportTarget[Any] | None, model: LoadableModel) -> str | None:
    """library_name of the front matter. target: None for a master."""
    if target is not None and target.library is not None:
        return target.library
    if model.opens:
        return TRANSFORMERS
    return PQWEIGHTS if target is None else None


def tags(target: ExportTarget[Any] | None, bits: float | None) -> list[str]:
    """Those that pqweights writes. bits: of most of the weights, None where none is quantized."""
    width = [] if bits is None else [f"{bits}-bit"]
    return ["pqweights", "quantized", *(() if target is None else target.tags), *width]


def load_section(target: ExportTarget[Any] | None, made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    """Paragraphs and blocks. target: None for a master."""
    where = [] if model.branch is None else [f"It lies on the branch {code(model.branch)}, which the commands name."]
    return where + (_master(model) if target is None else target.load_section(made_by, model))


def _master(model: LoadableModel) -> list[str]:
    parts = ["Its config.json names no kind of model, so that only pqweights reads it."]
    if model.opens:
        parts = [
            "With pqweights, the weights are decoded while they are loaded:",
            shell("pip install 'pqweights[transformers]'"),
            by_pqweights(model, comment="packed=True: they stay packed in memory (inference alone)"),
        ]
        if model.auto_class:
            parts += [
                "Or by transformers, once pqweights is imported:",
                fenced("python", ["import pqweights  # teaches transformers the format", *from_pretrained(model)]),
            ]
        parts.append(
            "Without `import pqweights` transformers stops with an error that says so; other programs cannot read the format."
        )
    targets = ", ".join(f"`{name}`" for name in EXPORTS if name != "bf16")
    return [
        *parts,
        f"As an ordinary checkpoint, or with another `--target` for a runtime ({targets}):",
        shell("pip install pqweights", f"pqweights export {model.quoted} OUT --target bf16{model.revision_option}"),
    ]
