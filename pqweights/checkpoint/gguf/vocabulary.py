"""The vocabulary of a GGUF file: tokens with types and scores, merges, special tokens, chat template.

It is read from tokenizer.json as it is stored, without a tokenizer. Special tokens, merges and the template
are collected by SpecialVocab of the gguf package, which reads a folder; what stands around a text is read here, because
its versions take it from different files. llama.cpp's converter recognizes how a tokenizer splits text by a hash over a
sample; here the rules themselves are looked up.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.gguf import gguf_package, silent
from pqweights.checkpoint.gguf.encoders import ENCODERS
from pqweights.checkpoint.gguf.splits import DIFFERS, DIGIT, DIGITS, GPT2, NAMES
from pqweights.checkpoint.gguf.tokens import (
    CONFIG,
    FAST,
    SPECIAL,
    Vocabulary,
    beside_added,
    check_ids,
    check_merges,
    placed_tokens,
    read_json,
    read_tokenizer,
    sentencepiece,
    special_settings,
    steps_of,
    text_of,
    unmapped,
)
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.errors import SourceError

TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_TEMPLATES = "additional_chat_templates/"
# The tokens that a file can name as ends, and the texts by which llama.cpp knows such tokens, the preferred ones first
# (src/llama-vocab.cpp). It takes any of several for the end of a turn, so that one is named.
ENDS = ("eos", "eot", "eom")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>")
MESSAGE_ENDS = ("<|eom_id|>",)
KNOWN_ENDS = frozenset({*TURN_ENDS, *MESSAGE_ENDS, "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>"})
# Of tokenizers that nothing here reads.
OTHERS = (
    *("tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken"),
    *("tokenizer.tiktoken", "vocab.txt"),
)
NOT_NORMALIZED = "text that is not in Unicode's form NFC (llama.cpp does not normalize it)"
# llama.cpp lets special tokens take the spaces behind them in models of which the name matches, and then needs these
# tokens.
STRIPS = re.compile(r"phi-?3", re.IGNORECASE)
NEVER_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
STRIPPED = ("</s>", *NEVER_STRIPPED)


def read_vocabulary(storage: Storage, *, rows: int) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer that lies beside a model; None if there is none.

    rows: the rows of the embeddings, each of which is a token

    Raises ExportError for a tokenizer that llama.cpp has no equivalent of, SourceError for damaged files.
    """
    files = storage.files()
    if FAST in files:
        tokenizer = read_tokenizer(storage)
        added = tokenizer["added_tokens"]
        # A token of which only the text is stated, and which the model has no embedding for, such as one for padding.
        unheld = [entry for entry in added if entry["named"] and entry["id"] >= rows]
        tokenizer["added_tokens"] = [entry for entry in added if entry not in unheld]
        vocabulary = _with_added(_of_json(tokenizer, rows), tokenizer)
        check_ids(added)
        return _with_named(vocabulary, storage, unheld)
    for name in OTHERS:
        if name in files:
            raise unmapped(
                f"{name} without {FAST}, which AutoTokenizer.from_pretrained(...).save_pretrained(...) makes"
            )
    return None


def _with_added(vocabulary: Vocabulary, tokenizer: Mapping[str, Any]) -> Vocabulary:
    """Return a vocabulary that says what llama.cpp does otherwise beside added tokens."""
    strips = _strips(vocabulary)
    stripping = {
        entry["content"] for entry in tokenizer["added_tokens"] if strips and entry["content"] not in NEVER_STRIPPED
    }
    return replace(vocabulary, differs=vocabulary.differs + beside_added(tokenizer, stripping))


def _with_named(vocabulary: Vocabulary, storage: Storage, unheld: Sequence[Mapping[str, Any]]) -> Vocabulary:
    """Return a vocabulary with the ids of its special tokens, and what is to be said of tokens that it cannot have."""
    about, ids = special_settings(storage), {token: number for number, token in enumerate(vocabulary.tokens)}
    texts = {name: text_of(about.get(f"{name}_token")) for name in SPECIAL}
    special = {name: ids[text] for name, text in texts.items() if text in ids}
    said = tuple(
        f"{entry['content']!r:.80}, which has no embedding in the model (id {entry['id']} of {len(vocabulary.tokens)})"
        for entry in unheld
    )
    return replace(vocabulary, special={**special, **vocabulary.special}, differs=(*vocabulary.differs, *said))


def _strips(vocabulary: Vocabulary) -> bool:
    """Whether llama.cpp can be told that special tokens take the spaces behind them."""
    return vocabulary.strips and set(STRIPPED) <= set(vocabulary.tokens)


def model_name(name: str | None, vocabulary: Vocabulary | None) -> str | None:
    """Return the name that the file gives the model.

    llama.cpp goes by this name when special tokens are to take the spaces behind them.
    """
    if vocabulary is None:
        return name
    if _strips(vocabulary):
        return name if name and STRIPS.search(name) else f"{name or 'model'} (phi-3)"
    return name and STRIPS.sub("phi 3", name)


def add_vocabulary(
    storage: Storage, config: Mapping[str, Any], writer: Any, *, vocabulary: Vocabulary | None
) -> tuple[str, ...]:
    """Write a vocabulary, special tokens and the chat template.

    config: that of the text model
    writer: a GGUFWriter of the gguf package

    Returns the tokens at which transformers ends what it generates, and llama.cpp does not.
    """
    if vocabulary is None:
        writer.add_tokenizer_model(gguf_package().NoVocab.tokenizer_model)
        return ()
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    for key, value in vocabulary.about.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_array)(f"tokenizer.ggml.{key}", value)
    return _add_special(storage, config, writer, vocabulary)


def _of_json(tokenizer: dict[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer.json."""
    model = tokenizer.get("model") or {}
    if (encoder := ENCODERS.get(model.get("type"))) is not None:
        return encoder(tokenizer, rows, _surrounding(tokenizer, rows))
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise unmapped(f"{FAST} has a model of type {model.get('type')}, expected BPE, WordPiece or Unigram")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise unmapped(f"{FAST} has {key} {model[key]!r}")
    added = tokenizer.get("added_tokens") or []
    known: dict[str, Any] = {
        "surrounding_ids": _surrounding(tokenizer, rows),
        "strips": any(entry.get("rstrip") and entry.get("special") for entry in added),
    }
    if model.get("byte_fallback"):  # characters that it lacks become tokens of bytes, as in SentencePiece
        return sentencepiece(tokenizer, rows, **known)
    pre = _pre_tokenizer(tokenizer)
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise unmapped(f"{FAST} changes text by {tokenizer['normalizer']}")
    tokens, types = placed_tokens(model["vocab"], added, rows)
    differs = DIFFERS.get(pre, "") if normalizer is None else NOT_NORMALIZED
    return Vocabulary(model="gpt2", pre=pre, tokens=tokens, types=types, differs=(differs,) if differs else (), **known)


def _surrounding(tokenizer: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the tokens that a tokenizer.json puts before and after a text, of `rows` that there are."""
    try:
        before, behind = _around(tokenizer)
    except (AttributeError, LookupError, TypeError) as error:
        raise SourceError(f"{FAST}: its post_processor is damaged: {error!r:.100}") from None
    for token in (*before, *behind):
        if not isinstance(token, int) or not 0 <= token < rows:
            raise SourceError(f"{FAST}: its post_processor has the token id {token!r}, but the model has {rows} tokens")
    if len(before) > 1 or len(behind) > 1:
        raise unmapped("it puts more than one token before or after a text")
    return tuple(before), tuple(behind)


def _around(tokenizer: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The ids before and after a text, which are not checked."""
    before: list[Any] = []
    behind: list[Any] = []
    for step in steps_of(tokenizer, "post_processor"):
        if step.get("type") == "TemplateProcessing":
            side = before
            for part in step.get("single") or []:
                if "Sequence" in part:
                    side = behind
                else:
                    side += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
        elif step.get("type") in ("RobertaProcessing", "BertProcessing"):
            before.append(step["cls"][1])
            behind.append(step["sep"][1])
        elif step.get("type") != "ByteLevel":
            raise unmapped(f"it processes tokens by {step}")
    return before, behind


def _pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer of a byte-level tokenizer.json."""
    expressions = tuple(part for step in steps_of(tokenizer, "pre_tokenizer") for part in _expressions(step))
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    if (expressions, whole_words) not in NAMES:
        raise unmapped(f"{FAST} splits text by {expressions}, ignore_merges {whole_words}")
    return NAMES[expressions, whole_words]


def _expressions(step: Mapping[str, Any]) -> tuple[str, ...]:
    """The expressions by which a step splits; an unknown step stands for itself, so that it is found nowhere."""
    step_type = step.get("type")
    if step_type == "ByteLevel" and not step.get("add_prefix_space"):
        return (GPT2,) if step.get("use_regex", True) else ()
    if step_type == "Digits":
        return (DIGIT if step.get("individual_digits") else DIGITS,)
    pattern = step.get("pattern")
    # Where every character matches, dropping what does not match is the same as cutting there.
    whole = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    if step_type == "Split" and whole and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        return (pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n"),)
    return (str(dict(step)),)


def _add_special(storage: Storage, config: Mapping[str, Any], writer: Any, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Write the merges, special tokens and chat template; see add_vocabulary.

    Raises ExportError for byte-level BPE without merges, SourceError for damaged files.
    """
    merged = vocabulary.model == "gpt2"
    with tempfile.TemporaryDirectory() as name, silent():
        _write_files(storage, config, Path(name))
        try:
            special = gguf_package().SpecialVocab(
                name, load_merges=merged, special_token_types=SPECIAL, n_vocab=len(vocabulary.tokens)
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SourceError(f"{FAST} or {CONFIG}: gguf cannot read it: {error!r:.200}") from error
    if merged and not special.merges:
        raise unmapped("it has no merges")
    check_merges(special.merges)
    _check_template(special.chat_template)
    _settle(special.special_token_ids, special.add_special_token, vocabulary)
    missed = _add_ends(special.special_token_ids, _ends(storage, config), vocabulary.tokens)
    with silent():
        special.add_to_gguf(writer, quiet=True)
    return missed


def _check_template(template: Any) -> None:
    """Raise SourceError for a chat template that is neither a text nor a list of names with texts."""
    several = template if isinstance(template, list) else []
    whole = all(
        isinstance(one, dict) and {*map(type, (one.get("name"), one.get("template")))} == {str} for one in several
    )
    if not whole or not isinstance(template, str | list | None):
        raise SourceError(
            f"{CONFIG} or {TEMPLATES[1]}: chat_template: expected a text, or a list of names with templates, found "
            f"{template!r:.80}"
        )


def _settle(ids: dict[str, int], added: dict[str, bool], vocabulary: Vocabulary) -> None:
    """Decide which tokens begin and end a text.

    ids: by name, such as bos; bos and eos are those that llama.cpp puts around a text
    added: by name, whether it does
    """
    ids |= vocabulary.special
    for name, special in zip(("bos", "eos"), vocabulary.surrounding_ids, strict=True):
        added[name] = bool(special)
        if special and ids.get(name) != special[0]:
            if name == "eos" and "eos" in ids:
                ids["eot"] = ids["eos"]  # it still ends what is generated
            ids[name] = special[0]
    if "eos" in ids:
        ids.setdefault("bos", ids["eos"])  # llama.cpp would take token 11


def _ends(storage: Storage, config: Mapping[str, Any]) -> list[Any]:
    """The ids of the tokens at which transformers ends what it generates."""
    ends = read_json(storage, "generation_config.json").get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    return ends if isinstance(ends, list) else [ends]


def _add_ends(ids: dict[str, int], ends: list[Any], tokens: Sequence[str]) -> tuple[str, ...]:
    """Name further tokens at which generation ends, and return those that can neither be named nor are known.

    The end of a message comes first: llama.cpp finds the end of a turn by its text, and also writes it.
    """
    ids_of_ends = dict.fromkeys(token for token in ends if isinstance(token, int) and 0 <= token < len(tokens))
    by_text = {tokens[token]: token for token in ids_of_ends}
    for name, texts in (("eom", MESSAGE_ENDS), ("eot", TURN_ENDS)):
        known = next((by_text[text] for text in texts if text in by_text), None)
        if known is not None:
            ids.setdefault(name, known)
    named = {ids.get(name) for name in ENDS}
    others = [token for text, token in by_text.items() if token not in named and text not in KNOWN_ENDS]
    free = [name for name in ("eom", "eot") if name not in ids]
    ids.update(zip(free, others, strict=False))
    return tuple(tokens[token] for token in others[len(free) :])


def _write_files(storage: Storage, config: Mapping[str, Any], folder: Path) -> None:
    """Write what SpecialVocab reads into a folder."""
    files = storage.files()
    read_json(storage, TEMPLATES[1])  # which refuses another thing than an object
    for name in (FAST, *TEMPLATES, *(file for file in files if file.startswith(MORE_TEMPLATES))):
        if name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_file(storage, name))
    about = special_settings(storage)
    if TEMPLATES[0] in files:
        about.pop("chat_template", None)  # as in transformers, the file has precedence
    (folder / CONFIG).write_text(json.dumps(about))
    generation = read_json(storage, "generation_config.json")
    ids = {}
    for name in SPECIAL:
        stated = config.get(f"{name}_token_id")
        stated = generation.get(f"{name}_token_id") if stated is None else stated
        ids[f"{name}_token_id"] = stated[0] if isinstance(stated, list) and stated else stated
    (folder / "config.json").write_text(json.dumps(ids))
