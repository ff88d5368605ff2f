"""Tiny encoders with random weights from a seed, as transformers saves them, and sentence-transformers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model.

    name: of its family, in the names of classes
    head: the end of the name of its class
    settings: beside those of all
    sizes: the keys of its configuration for those of SETTINGS that have other names
    """

    name: str
    head: str = "Model"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    bound: float = 2e-3  # ggml has gelu by tanh, in a table of half-precision numbers


CASES = {
    "bert": Case(name="Bert"),
    "bert for masks": Case(name="Bert", head="ForMaskedLM"),
}


def build(case: Case) -> Any:
    """The model of a case, with gains and biases that are not those that it starts with."""
    torch.manual_seed(1)
    settings = {case.sizes.get(key, key): value for key, value in SETTINGS.items()} | dict(case.settings)
    config = getattr(transformers, f"{case.name}Config")(**settings)
    model = getattr(transformers, f"{case.name}{case.head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def saved(case: Case, folder: Path) -> Any:
    """The model of a case, which is also written to a folder."""
    model = build(case)
    model.save_pretrained(folder)
    return model


def token_ids(count: int) -> list[int]:
    """Tokens of which none is special."""
    made: list[int] = torch.randint(5, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return made


def vectors(model: Any, ids: list[int]) -> Any:
    """The vectors of tokens, [tokens, width] f32."""
    with torch.no_grad():
        return model.base_model(torch.tensor([ids])).last_hidden_state[0].float().numpy()


def pooling(folder: Path, mode: str) -> None:
    """Write the modules of sentence-transformers. mode: the key of the pooling that is chosen"""
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), False) | {mode: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))
