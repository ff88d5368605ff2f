"""The part of a card that says how to load a result, with commands that work as they are pasted.

Here are the pieces that several targets share; each target composes its own section (ExportTarget.load_section).
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.config import AUTO_CLASSES
from pqweights.checkpoint.names import TOKENIZER_FILES
from pqweights.common.markdown import fenced
from pqweights.models.diffusion import CLASS
from pqweights.storage.addresses import is_repository_id

IMAGES = "AutoModelForImageTextToText"
# How names of GGUF files end behind the type: of one, or of a part of one.
PART = r"(-\d+-of-\d+)?\.gguf$"
# What is copied beside a file that holds everything that its runtime reads of the model.
LEGAL_FILES = ("*license*", "*licence*", "copying*", "copyright*", "notice*", "*policy*", "citation*", "authors*")
NO_TOKENIZER = "tokenizer_config.json"  # matches a pattern of TOKENIZER_FILES, but holds no tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadableModel:
    """A model, as far as the commands that load it depend on it.

    location: a repository's id or a folder
    branch: the branch of a repository; None for main, or for a folder
    auto_class: the class of transformers that loads the model; None if it is not known
    tokenizer: whether a tokenizer lies beside the weights
    opens: whether config.json names a model type
    opens_in_diffusers: whether it names a class of diffusers
    custom: whether config.json names code of its own
    weights: the names of the files that hold tensors
    """

    location: str
    branch: str | None
    auto_class: str | None
    tokenizer: bool
    opens: bool
    custom: bool
    weights: tuple[str, ...] = ()
    opens_in_diffusers: bool = False

    @property
    def quoted(self) -> str:
        """The location, quoted for a shell."""
        return shlex.quote(self.location)

    @property
    def literal(self) -> str:
        """The location, as a string literal of Python."""
        return json.dumps(self.location)

    @property
    def revision(self) -> str:
        """The argument of from_pretrained for the branch, with the comma before it."""
        return "" if self.branch is None else f", revision={json.dumps(self.branch)}"

    @property
    def revision_option(self) -> str:
        """The option of a command for the branch, with the space before it."""
        return "" if self.branch is None else f" --revision {shlex.quote(self.branch)}"

    @property
    def trust(self) -> str:
        """The argument of from_pretrained that allows custom code, with the comma before it."""
        return ", trust_remote_code=True" if self.custom else ""


def read_model(
    location: str, *, branch: str | None, config: Mapping[str, Any], files: Iterable[str], weights: Iterable[str] = ()
) -> LoadableModel:
    """Describe the model of a folder from its config.json, the names of its files of weights, and of the others."""
    here = [name for name in files if "/" not in name and name != NO_TOKENIZER]
    return LoadableModel(
        location=location,
        branch=branch,
        auto_class=auto_class(config),
        tokenizer=any(fnmatch.filter(here, pattern) for pattern in TOKENIZER_FILES),
        opens=isinstance(config.get("model_type"), str),
        custom=bool(config.get("auto_map")),
        weights=tuple(weights),
        opens_in_diffusers=CLASS in config,
    )


def files_of_type(files: Iterable[str], type_name: str) -> list[str]:
    """Return those of some files that are called after a type of GGUF, or lie in the folder of a format."""
    pattern = re.compile(f"^{re.escape(type_name)}/|-{re.escape(type_name)}{PART}")
    return [file for file in files if pattern.search(file)]


def legal_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some files that say who may use the model and how."""
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in LEGAL_FILES))


def auto_class(config: Mapping[str, Any]) -> str | None:
    """Return the auto class of transformers that loads a model; None if the configuration does not tell."""
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str):
        return None
    for end, name in AUTO_CLASSES.items():
        if architecture.endswith(end):
            # Text-to-text models have this ending, too.
            return None if name == IMAGES and not isinstance(config.get("vision_config"), dict) else name
    model_type = str(config.get("model_type")).replace("-", "").replace("_", "")
    return "AutoModel" if architecture.lower() == f"{model_type}model" else None


def by_transformers(model: LoadableModel, packages: str = "torch transformers", options: str = "") -> list[str]:
    """Say how to load a model with transformers.

    packages: what to install
    options: more arguments of from_pretrained, with the comma before them
    """
    if not model.opens:
        return ["Its config.json names no model type, so transformers cannot load it."]
    if model.auto_class is None:
        return [
            "pqweights finds the class that config.json names:",
            shell(" ".join(f"pip install 'pqweights[transformers]' {packages}".split())),
            by_pqweights(model, options),
        ]
    return [shell(f"pip install {packages}"), fenced("python", from_pretrained(model, options))]


def by_pqweights(model: LoadableModel, options: str = "", comment: str = "") -> str:
    """Say how to load a model with pqweights.load_model."""
    call = f"model = pqweights.load_model({model.literal}{model.revision}{options}{model.trust})"
    return fenced("python", ["import pqweights", "", call + (f"  # {comment}" if comment else "")])


def from_pretrained(model: LoadableModel, options: str = "") -> list[str]:
    """Return lines of Python that load a model by its auto class, and its tokenizer if it has one."""
    imported = [str(model.auto_class), *(["AutoTokenizer"] if model.tokenizer else [])]
    of_model = f'{model.literal}{model.revision}, dtype="auto"{options}{model.trust}'
    of_tokenizer = f"{model.literal}{model.revision}{model.trust}"
    lines = [
        f"from transformers import {', '.join(imported)}",
        "",
        f"model = {model.auto_class}.from_pretrained({of_model})",
    ]
    return [*lines, *([f"tokenizer = AutoTokenizer.from_pretrained({of_tokenizer})"] if model.tokenizer else [])]


def into_comfyui(model: LoadableModel) -> str:
    """Say how the first file of an image or video model gets to where ComfyUI looks for it."""
    file, folder = model.weights[0], "ComfyUI/models/diffusion_models"
    if is_repository_id(model.location):
        return shell(f"hf download {model.quoted}{model.revision_option} {file} --local-dir {folder}")
    return shell(f"cp {shlex.quote(f'{model.location}/{file}')} {folder}")


def shell(*lines: str) -> str:
    """Return a Markdown block of shell commands."""
    return fenced("bash", lines)
