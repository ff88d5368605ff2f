"""Tiny encoders with random weights from a seed, as transformers saves them, and sentence-transformers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_cases import with_gelu_table
from safetensors.torch import save_file

VOCABULARY = 128
IDENTITY = "torch.nn.modules.linear.Identity"
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
T5_SIZES = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model.

    name: of its family, in the names of classes
    head: the end of the name of its class
    settings: beside those of all
    sizes: the keys of its configuration for those of SETTINGS that have other names
    exact: whether it has no gelu, of which ggml looks up values of half precision
    """

    name: str
    head: str = "Model"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False


CASES: dict[str, Case] = {
    "bert": Case(name="Bert"),
    "bert for masks": Case(name="Bert", head="ForMaskedLM"),
    "distilbert": Case(
        name="DistilBert",
        sizes={"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads"},
    ),
    "roberta": Case(name="Roberta"),
    "camembert": Case(name="Camembert"),
    "xlm-roberta": Case(name="XLMRoberta"),
    "jina v3": Case(name="JinaEmbeddingsV3"),
    "nomic": Case(name="NomicBert", exact=True),
    "modernbert": Case(
        name="ModernBert", settings=SPECIAL_IDS | {"num_hidden_layers": 4, "local_attention": 16}
    ),
    "eurobert": Case(name="EuroBert", settings=SPECIAL_IDS, exact=True),
    "gemma embedding": Case(
        name="Gemma3Text", settings=SPECIAL_IDS | {"use_bidirectional_attention": True, "head_dim": 32,
        "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 7},
    ),
    "t5 encoder": Case(name="T5", head="EncoderModel", sizes=T5_SIZES, settings={"d_kv": 24}, exact=True),
    "t5 encoder gated": Case(
        name="T5", head="EncoderModel", sizes=T5_SIZES, settings={"d_kv": 24, "feed_forward_proj": "gated-gelu"}
    ),
    "umt5 encoder": Case(name="UMT5", head="EncoderModel", sizes=T5_SIZES, settings={"d_kv": 24}),
}  # fmt: skip

SCORING = {
    "bert": Case(name="Bert", head="ForSequenceClassification", settings={"num_labels": 1}),
    "bert of three": Case(name="Bert", head="ForSequenceClassification", settings={"num_labels": 3}),
    "xlm-roberta": Case(name="XLMRoberta", head="ForSequenceClassification", settings={"num_labels": 1}),
    "modernbert": Case(
        name="ModernBert", head="ForSequenceClassification",
        settings=SPECIAL_IDS | {"num_labels": 1, "classifier_pooling": "mean"},
    ),
}  # fmt: skip
ANSWERING = {
    "t5": Case(name="T5", head="ForConditionalGeneration", sizes=T5_SIZES, settings={"d_kv": 24}, exact=True),
    "t5 untied": Case(
        name="T5", head="ForConditionalGeneration", sizes=T5_SIZES,
        settings={"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": Case(name="MT5", head="ForConditionalGeneration", sizes=T5_SIZES),
    "umt5": Case(name="UMT5", head="ForConditionalGeneration", sizes=T5_SIZES),
}  # fmt: skip


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
    return with_gelu_table(model)


def token_ids(count: int) -> list[int]:
    """Tokens of which none is special."""
    made: list[int] = torch.randint(5, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return made


def vectors(model: Any, ids: list[int]) -> Any:
    """The vectors of tokens, [tokens, width] f32."""
    with torch.no_grad():
        return model.base_model(torch.tensor([ids])).last_hidden_state[0].float().numpy()


def add_modules(folder: Path, mode: str, *dense: Any, **about: Any) -> None:
    """Write the modules of sentence-transformers.

    mode: the key of the pooling that is chosen
    dense: the matrices of dense layers behind that
    about: the configuration of these layers, beside the usual one
    """
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    kinds += [("Dense", f"{place}_Dense") for place in range(2, 2 + len(dense))]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), False) | {mode: True}
    configs: list[dict[str, Any]] = [{"word_embedding_dimension": 64} | modes]
    for matrix in dense:
        rows, columns = matrix.shape
        usual = {"in_features": columns, "out_features": rows, "bias": False, "activation_function": IDENTITY}
        configs.append(usual | about)
    for (_, path), config in zip(kinds[1:], configs, strict=True):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    for place, matrix in enumerate(dense, 2):
        save_file({"linear.weight": matrix}, folder / f"{place}_Dense" / "model.safetensors")
