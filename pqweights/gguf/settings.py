"""The configuration of a model as far as GGUF needs it: the text model's keys, old names and new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pqweights.errors import ExportError
from pqweights.gguf.architectures import ARCHITECTURES, Architecture

# What a model that predicts text is called in `architectures`.
PREDICTS_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OTHERWISE = (
    "use --target bf16, and llama.cpp's convert_hf_to_gguf.py on its result if llama.cpp itself has this architecture"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a text model.

    model_type: that of transformers
    architecture: how llama.cpp runs it
    values: config.json with the keys of its text_config
    """

    model_type: str
    architecture: Architecture
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """Return a value; the architecture's default, or else None, for a key that is absent."""
        found = self.values.get(key)
        return self.architecture.defaults.get(key) if found is None else found

    def number(self, key: str) -> int:
        """Return a positive whole number.

        Raises ExportError if there is none.
        """
        found = self.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.refusal(f"expected a positive number as {key}, found {found!r}")
        return found

    def refusal(self, why: str) -> ExportError:
        """Return the error for a configuration that cannot be written."""
        return ExportError(f"config.json: GGUF cannot hold this model of type {self.model_type}: {why}; {OTHERWISE}")


def read_settings(config: Mapping[str, Any] | None) -> Settings:
    """Return the settings of a model that llama.cpp runs as transformers does.

    Raises ExportError if the architecture is not covered, or a value of the configuration is not.
    """
    config = config or {}
    inner = config.get("text_config")
    values = {**config, **inner} if isinstance(inner, dict) else dict(config)
    # The outer type decides: models of images and text may share the type of their text model.
    model_type = config.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        covered = ", ".join(sorted(ARCHITECTURES))
        raise ExportError(
            f"config.json: GGUF cannot hold a model of type {model_type}; these can be written: {covered}; {OTHERWISE}"
        )
    settings = Settings(model_type=str(model_type), architecture=architecture, values=values)
    _check_values(settings, config)
    heads = settings.number("num_attention_heads")
    if settings.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if settings.get("head_dim") is None:
        values["head_dim"] = settings.number("hidden_size") // heads
    return settings


def _check_values(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise ExportError for a value with which llama.cpp would compute something else."""
    named = config.get("architectures") or []
    if named and not str(named[0]).endswith(PREDICTS_TEXT):
        raise settings.refusal(f"{named[0]} is not a model that predicts text")
    for key, taken in settings.architecture.values.items():
        found = settings.get(key)
        if found not in taken and key in settings.values:
            expected = " or ".join(repr(value) for value in taken)
            raise settings.refusal(f"llama.cpp computes it with {key} {expected} only, found {found!r}")
