"""How a result is loaded: commands of its very repository that work as they are pasted, for cards.

The parts that several targets share; each target puts together its own (ExportTarget.load_section).
"""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.config import AUTO_CLASSES
from pqweights.checkpoint.names import TOKENIZER_FILES
from pqweights.markdown import fenced

IMAGES = "AutoModelForImageTextToText"
NO_TOKENIZER = "tokenizer_config.json"  # matches one of the patterns, and is none


@dataclass(frozen=True, kw_only=True)
class LoadableModel:
    """What the commands depend on.

    place: a repository's id or a folder. branch: None for main, or for a folder. auto_class: None where it is not known. opens:
    whether config.json names a kind of model. custom: whether it names code of its own.
    """

    place: str
    branch: str | None
    auto_class: str | None
    tokenizer: bool
    opens: bool
    custom: bool

    @property
    def quoted(self) -> str:
        """The place, for a shell."""
        return shlex.quote(self.place)

    @property
    def literal(self) -> str:
        """The place, for Python."""
        return json.dumps(self.place)

    @property
    def revision(self) -> str:
        """An argument of from_pretrained, with the comma before it."""
        return "" if self.branch is None else f", revision={json.dumps(self.branch)}"

    @property
    def revision_option(self) -> str:
        """An option of a command, with the space before it."""
        return "" if self.branch is None else f" --revision {shlex.quote(self.branch)}"

    @property
    def trust(self) -> str:
        """An argument of from_pretrained for custom code, with the comma before it."""
        return ", trust_remote_code=True" if self.custom else ""


def read_model(place: str, branch: str | None, config: Mapping[str, Any], files: Iterable[str]) -> LoadableModel:
    """From config.json and the names of the other files."""
    here = [name for name in files if "/" not in name and name != NO_TOKENIZER]
    return LoadableModel(
        place=place,
        branch=branch,
        auto_class=auto_class(config),
        tokenizer=any(fnmatch.filter(here, pattern) for pattern in TOKENIZER_FILES),
        opens=isinstance(config.get("model_type"), str),
        custom=bool(config.get("auto_map")),
    )


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


def by_transformers(model: LoadableModel, packages: str = "torch transformers", options: str = "") -> list[str]:
    """Loading with transformers. options: more arguments of from_pretrained, with the comma before them."""
    if not model.opens:
        return ["Its config.json names no kind of model, so that transformers cannot open it."]
    if model.auto_class is None:
        return [
            "By the class that config.json names, which pqweights finds:",
            shell(" ".join(f"pip install 'pqweights[transformers]' {packages}".split())),
            by_pqweights(model, options),
        ]
    return [shell(f"pip install {packages}"), fenced("python", from_pretrained(model, options))]


def by_pqweights(model: LoadableModel, options: str = "", comment: str = "") -> str:
    """Loading with pqweights.load_model."""
    call = f"model = pqweights.load_model({model.literal}{model.revision}{options}{model.trust})"
    return fenced("python", ["import pqweights", "", call + (f"  # {comment}" if comment else "")])


def from_pretrained(model: LoadableModel, options: str = "") -> list[str]:
    """Lines of Python that load the model by its auto class, and its tokenizer where it has one."""
    imported = [str(model.auto_class), *(["AutoTokenizer"] if model.tokenizer else [])]
    of_model = f'{model.literal}{model.revision}, dtype="auto"{options}{model.trust}'
    of_tokenizer = f"{model.literal}{model.revision}{model.trust}"
    lines = [
        f"from transformers import {', '.join(imported)}",
        "",
        f"model = {model.auto_class}.from_pretrained({of_model})",
    ]
    return [*lines, *([f"tokenizer = AutoTokenizer.from_pretrained({of_tokenizer})"] if model.tokenizer else [])]


def shell(*lines: str) -> str:
    """A block of commands."""
    return fenced("bash", lines)
