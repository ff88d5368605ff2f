"""What a card says of loading a result, and the keys of its front matter that depend on the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.codecs import CODECS
from pqweights.common.markdown import code, fenced
from pqweights.exports import EXPORTS
from pqweights.exports.loading import LoadableModel, by_pqweights, from_pretrained, shell
from pqweights.exports.target import ExportTarget
from pqweights.rewrite.manifest import Manifest

TRANSFORMERS, PQWEIGHTS = "transformers", "pqweights"


def library(target: ExportTarget[Any] | None, model: LoadableModel) -> str | None:
    """Return library_name of the front matter, if there is one; target is None for a master."""
    if target is not None and target.library is not None:
        return target.library
    if model.opens:
        return TRANSFORMERS
    return PQWEIGHTS if target is None else None


def tags(target: ExportTarget[Any] | None, bits: float | None) -> list[str]:
    """Return the tags that pqweights writes.

    target: None for a master. bits: the bit width of most weights, or None if none is quantized.
    """
    width = [] if bits is None else [f"{bits:g}-bit"]
    return ["pqweights", "quantized", *(() if target is None else target.tags), *width]


def load_section(target: ExportTarget[Any] | None, made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    """Return the paragraphs and code blocks of the section on loading; target is None for a master."""
    branch = [] if model.branch is None else [f"It is on the branch {code(model.branch)}, which the commands name."]
    return branch + (_master(model) if target is None else target.load_section(made_by, model))


def needs_version(manifest: Manifest) -> list[str]:
    """Return which codecs of a master the first version of the format lacks; nothing if there are none."""
    if manifest.kind != "master":
        return []
    used = sorted({tensor.codec for tensor in manifest.tensors if tensor.codec in CODECS})
    later = {name: version for name in used if (version := CODECS[name].format_version) > 1}
    if not later:
        return []
    names = " and ".join(code(name) for name in later)
    return [
        f"The master has format version {max(later.values())}, because of {names}. "
        "A pqweights that is too old to know it refuses to read the folder; `pip install -U pqweights` helps."
    ]


def _master(model: LoadableModel) -> list[str]:
    parts = ["config.json names no model type, so only pqweights can read this folder."]
    if model.opens:
        parts = [
            "With pqweights, which decodes the weights while it loads them:",
            shell("pip install 'pqweights[transformers]'"),
            by_pqweights(model, comment="packed=True keeps them packed in memory (inference only)"),
        ]
        if model.auto_class:
            parts += [
                "With transformers, once pqweights is imported:",
                fenced("python", ["import pqweights  # registers the format", *from_pretrained(model)]),
            ]
        parts.append(
            "Without `import pqweights`, transformers stops with an error that says what to do. Other programs cannot "
            "read the format."
        )
    targets = ", ".join(f"`{name}`" for name in EXPORTS if name != "bf16")
    return [
        *parts,
        f"To export it as an ordinary checkpoint, or with another `--target` ({targets}) for a runtime:",
        shell("pip install pqweights", f"pqweights export {model.quoted} OUT --target bf16{model.revision_option}"),
    ]
