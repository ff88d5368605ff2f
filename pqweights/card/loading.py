"""How a result is loaded: the commands of its very repository and target, which work as they are pasted."""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pqweights.card.markdown import code, fenced
from pqweights.exports import EXPORTS
from pqweights.exports.options import ROTATED
from pqweights.exports.torchao_int4 import UNTILED
from pqweights.integrations.transformers import AUTO_CLASSES
from pqweights.runtimes.texts import TOKENIZER_FILES

TRANSFORMERS, MLX, PQWEIGHTS = "transformers", "mlx", "pqweights"
IMAGES = "AutoModelForImageTextToText"
NO_TOKENIZER = "tokenizer_config.json"  # matches one of the patterns, and is none


@dataclass(frozen=True)
class Model:
    """What the commands depend on. place: a repository's id or a folder. branch: None for main, or for a folder.

    auto_class: None where it is not known. opens: whether config.json names a kind of model. custom: whether it names code of its own.
    """

    place: str
    branch: str | None
    auto_class: str | None
    tokenizer: bool
    opens: bool
    custom: bool


def read_model(place: str, branch: str | None, config: Mapping[str, Any], files: Iterable[str]) -> Model:
    """From config.json and the names of the other files."""
    here = [name for name in files if "/" not in name and name != NO_TOKENIZER]
    tokenizer = any(fnmatch.filter(here, pattern) for pattern in TOKENIZER_FILES)
    opens, custom = isinstance(config.get("model_type"), str), bool(config.get("auto_map"))
    return Model(place, branch, auto_class(config), tokenizer, opens, custom)


def auto_class(config: Mapping[str, Any]) -> str | None:
    """The class of transformers that finds the model's own; None where the configuration leaves that open."""
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str):
        return None
    for end, name in AUTO_CLASSES.items():
        if architecture.endswith(end):
            # Models of text to text are called so, too.
            return None if name == IMAGES and not isinstance(config.get("vision_config"), dict) else name
    kind = str(config.get("model_type")).replace("-", "").replace("_", "")
    return "AutoModel" if architecture.lower() == f"{kind}model" else None


def library(target: str | None, model: Model) -> str | None:
    """library_name of the front matter. target: None for a master."""
    if target == "mlx-q4":
        return MLX
    if model.opens:
        return TRANSFORMERS
    return PQWEIGHTS if target is None else None


def tags(target: str | None, bits: int | None) -> list[str]:
    """Ours. bits: of most of the weights, None where none is quantized."""
    of_target = {
        "mlx-q4": ["mlx"], "vllm-int4": ["vllm", "compressed-tensors"], "torchao-int4": ["torchao"], "bf16": ["bf16"],
    }  # fmt: skip
    width = [] if bits is None else [f"{bits}-bit"]
    return ["pqweights", "quantized", *of_target.get(target or "", []), *width]


def load_section(target: str | None, made_by: Mapping[str, Any], model: Model) -> list[str]:
    """Paragraphs and blocks. target: None for a master."""
    where = [] if model.branch is None else [f"It lies on the branch {code(model.branch)}, which the commands name."]
    if target is None:
        return where + _master(model)
    of_target = {"bf16": _bf16, "torchao-int4": _torchao, "mlx-q4": _mlx, "vllm-int4": _vllm}[target]
    return where + of_target(made_by, model)


def _master(model: Model) -> list[str]:
    parts = []
    if model.opens:
        parts += [
            "With pqweights, the weights are decoded while they are loaded:",
            _shell("pip install 'pqweights[transformers]'"),
            _our_loader(model, comment="packed=True: they stay packed in memory (inference alone)"),
        ]
        if model.auto_class:
            parts += [
                "Or by transformers, once pqweights is imported:",
                fenced("python", ["import pqweights  # teaches transformers the format", *_auto(model)]),
            ]
        parts.append(
            "Without `import pqweights` transformers stops with an error that says so; other programs cannot read the format."
        )
    else:
        parts.append("Its config.json names no kind of model, so that only pqweights reads it.")
    targets = ", ".join(f"`{name}`" for name in EXPORTS if name != "bf16")
    return [
        *parts,
        f"As an ordinary checkpoint, or with another `--target` for a runtime ({targets}):",
        _shell("pip install pqweights", f"pqweights export {_quoted(model)} OUT --target bf16{_option(model)}"),
    ]


def _bf16(made_by: Mapping[str, Any], model: Model) -> list[str]:
    return ["An ordinary checkpoint: whatever opens the base model opens it.", *_by_transformers(model)]


def _torchao(made_by: Mapping[str, Any], model: Model) -> list[str]:
    needs = "PyTorch on CUDA, on a GPU of compute capability 8.0 or newer"
    packages = "torch transformers accelerate torchao"
    if made_by.get("packing") == UNTILED:
        needs += ", with the package mslk"
        packages += " mslk"
    return [f"For {needs}.", *_by_transformers(model, packages, ', device_map="cuda"')]


def _mlx(made_by: Mapping[str, Any], model: Model) -> list[str]:
    parts = ["For mlx-lm, on Apple Silicon."]
    if not model.tokenizer:
        return [*parts, "It needs a tokenizer beside the weights, which is not here."]
    fetch, place = [], _quoted(model)
    if model.branch is not None:  # mlx_lm.generate knows main alone
        place = shlex.quote(f"{model.place.rpartition('/')[2]}-{model.branch.replace('/', '-')}")
        fetch = [f"hf download {_quoted(model)}{_option(model)} --local-dir {place}"]
    return [
        *parts,
        _shell("pip install mlx-lm", *fetch, f'mlx_lm.generate --model {place} --prompt "Once upon a time"'),
        fenced("python", [
            "from mlx_lm import generate, load", "",
            f"model, tokenizer = load({_literal(model)}{_revision(model)})",
            'print(generate(model, tokenizer, prompt="Once upon a time", max_tokens=20))',
        ]),
    ]  # fmt: skip


def _vllm(made_by: Mapping[str, Any], model: Model) -> list[str]:
    trust = " --trust-remote-code" if model.custom else ""
    serve = _shell("pip install vllm", f"vllm serve {_quoted(model)}{_option(model)}{trust}")
    if made_by.get("basis") == ROTATED:
        return [
            "For vLLM alone, on a single GPU: the integers are of rotated weights, and vLLM rotates the inputs to match "
            "(`transform_config` in config.json). Plain transformers passes over that, and computes nonsense.",
            serve,
        ]
    return [
        "For vLLM:",
        serve,
        "Or by transformers:",
        *_by_transformers(model, "torch transformers compressed-tensors"),
    ]


def _by_transformers(model: Model, packages: str = "torch transformers", options: str = "") -> list[str]:
    if not model.opens:
        return ["Its config.json names no kind of model, so that transformers cannot open it."]
    if model.auto_class is None:
        return [
            "By the class that config.json names, which pqweights finds:",
            _shell(" ".join(f"pip install 'pqweights[transformers]' {packages}".split())),
            _our_loader(model, options),
        ]
    return [_shell(f"pip install {packages}"), fenced("python", _auto(model, options))]


def _our_loader(model: Model, options: str = "", comment: str = "") -> str:
    call = f"model = pqweights.load_model({_literal(model)}{_revision(model)}{options}{_trust(model)})"
    return fenced("python", ["import pqweights", "", call + (f"  # {comment}" if comment else "")])


def _auto(model: Model, options: str = "") -> list[str]:
    imported = [str(model.auto_class), *(["AutoTokenizer"] if model.tokenizer else [])]
    trust, revision = _trust(model), _revision(model)
    lines = [
        f"from transformers import {', '.join(imported)}", "",
        f'model = {model.auto_class}.from_pretrained({_literal(model)}{revision}, dtype="auto"{options}{trust})',
    ]  # fmt: skip
    if model.tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_literal(model)}{revision}{trust})")
    return lines


def _trust(model: Model) -> str:
    return ", trust_remote_code=True" if model.custom else ""


def _revision(model: Model) -> str:
    return "" if model.branch is None else f", revision={json.dumps(model.branch)}"


def _option(model: Model) -> str:
    return "" if model.branch is None else f" --revision {shlex.quote(model.branch)}"


def _literal(model: Model) -> str:
    return json.dumps(model.place)


def _quoted(model: Model) -> str:
    return shlex.quote(model.place)


def _shell(*lines: str) -> str:
    return fenced("bash", lines)
