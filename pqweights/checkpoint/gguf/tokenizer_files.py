"""The files of a tokenizer that the metadata of a GGUF file state: the inverse of vocabulary.py and encoders.py.

Special tokens, what stands around a text, the chat template and where generation ends are read, too.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.contents import MetadataList, MetadataValue
from pqweights.checkpoint.gguf.encoders import CONTINUES
from pqweights.checkpoint.gguf.splits import (
    ALWAYS_BEGINS,
    BEGINS,
    DIGIT,
    GPT2,
    NAMES,
    NORMALIZED,
    OF_CHARACTERS,
    SAME_PRE,
    SEPARATES,
)
from pqweights.checkpoint.gguf.tokens import CONFIG, FAST, SPACE
from pqweights.checkpoint.gguf.vocabulary import ENDS
from pqweights.errors import SourceError

GENERATION = "generation_config.json"
NAMED = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "seperator": "sep",
    "padding": "pad",
    "cls": "cls",
    "mask": "mask",
}
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
TEMPLATE = "tokenizer.chat_template"
PADDING = re.compile(r"\[PAD\d+\]")
ELSEWHERE = "put the tokenizer's files beside it"


class _Metadata:
    """Metadata with whole lists. file: what messages call the file"""

    def __init__(self, file: str, values: Mapping[str, MetadataValue]) -> None:
        self.file, self.values = file, values

    def of(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of tokenizer.ggml. Raises SourceError for one of another kind."""
        value = self.values.get(f"tokenizer.ggml.{key}", default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.refusal(key, f"expected {kind.__name__}, found {value!r:.60}")
        return list(value.first) if isinstance(value, MetadataList) else value

    def items(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return the items of a list; none without it. Raises SourceError for items of another kind."""
        items: list[Any] = self.of(key, MetadataList, [])
        for item in items:
            if not isinstance(item, kind):
                raise self.refusal(key, f"expected other items, found {item!r:.60}")
        return items

    def refusal(self, key: str, why: str) -> SourceError:
        return SourceError(f"{self.file}: tokenizer.ggml.{key}: {why}: {ELSEWHERE}")


def tokenizer_files(file: str, metadata: Mapping[str, MetadataValue], context: int | None) -> dict[str, bytes]:
    """Return the files of a tokenizer by name; none for a file without one.

    metadata: with whole lists
    context: the most tokens of a text

    Raises SourceError, which names the key, for a tokenizer of a kind that is not known.
    """
    values = _Metadata(file, metadata)
    kind = values.of("model", str)
    if kind in (None, "no_vocab", "none"):
        return {}
    if kind not in _MODELS:
        raise values.refusal("model", f"expected {', '.join(_MODELS)}, found {kind!r:.40}")
    tokens, types = values.items("tokens", str), values.items("token_type", int)
    types = types or [_types().NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise values.refusal("token_type", f"expected one for each of {len(tokens)} tokens, found {len(types)}")
    # Those of XLM-RoBERTa are moved by one, and not all numbers are those of the places.
    held = {n: t for n, t in enumerate(tokens) if not (types[n] == _types().UNUSED and PADDING.fullmatch(t))}
    if len({*held.values()}) < len(held):
        raise values.refusal("tokens", "two tokens have the same text")
    named = _named_tokens(values, tokens)
    about = _about(values, metadata, named, context)
    stored = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(held, types),
        **_MODELS[kind](values, held, types), "post_processor": _around(values, tokens),
    }  # fmt: skip
    return {
        name: (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode(errors="replace")
        for name, content in ((FAST, stored), (CONFIG, about), (GENERATION, _generation(values, metadata, tokens)))
        if content
    }


def _types() -> Any:
    return gguf_package().TokenType


def _named_tokens(values: _Metadata, tokens: Sequence[str]) -> dict[str, str]:
    """Return the texts of the special tokens by what transformers calls them."""
    named = {}
    for key, name in NAMED.items():
        number = values.of(f"{key}_token_id", int)
        if number is not None and 0 <= number < len(tokens):
            named[name] = tokens[number]
    if named.get("bos") == named.get("eos") and not values.of("add_bos_token", bool, False):
        named.pop("bos", None)  # llama.cpp wants one; files name the end where there is none
    return named


def _added(held: Mapping[int, str], types: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split."""
    plain = (_types().NORMAL, _types().BYTE)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": text, **flags, "special": types[number] != _types().USER_DEFINED}
        for number, text in held.items()
        if types[number] not in plain
    ]


def _byte_level(values: _Metadata, held: Mapping[int, str], types: Sequence[Any]) -> dict[str, Any]:
    """Byte-level BPE, or of characters."""
    pre = values.of("pre", str)
    if pre in OF_CHARACTERS:
        return _gemma4(values, held, types)
    by_name = {name: rules for rules, name in NAMES.items()}
    rules = by_name.get(SAME_PRE.get(pre, pre))
    if rules is None:
        known = ", ".join(by_name)
        raise values.refusal(
            "pre", f"expected one of the ways to split text that are known ({known}), found {pre!r:.40}"
        )
    expressions, whole_words = rules
    by_regex = expressions[-1:] == (GPT2,)
    steps: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if expression == DIGIT and by_regex
        else {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in (expressions[:-1] if by_regex else expressions)
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_regex})
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole_words,
        "vocab": {text: number for number, text in held.items()}, "merges": _merges(values),
    }  # fmt: skip
    return {
        "normalizer": {"type": "NFC"} if pre in NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _merges(values: _Metadata) -> list[list[str]]:
    merges = [str(merge).split(" ", 1) for merge in values.of("merges", MetadataList, [])]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise values.refusal("merges", "expected pairs of tokens, found none or others")
    return merges


def _scores(values: _Metadata, count: int) -> list[float]:
    scores: list[float] = values.items("scores", (int, float))
    if len(scores) < count:
        raise values.refusal("scores", f"expected one for each of {count} tokens, found {len(scores)}")
    return scores


def _sentencepiece(values: _Metadata, held: Mapping[int, str], types: Sequence[Any]) -> dict[str, Any]:
    """SentencePiece's BPE: any two neighbours whose joint text is a token are joined, the best score first."""
    scores, prefix = _scores(values, len(types)), values.of("add_space_prefix", bool, True)
    ids = {text: number for number, text in held.items()}
    used = {letter for text, number in ids.items() if types[number] == _types().NORMAL for letter in text}
    # A letter that others are made of, and that only the token of its byte stands for, such as Gemma's tabulator.
    letters = {f"<0x{ord(letter):02X}>": letter for letter in used if letter < "\x80" and letter not in ids}
    ids = {letters.get(text, text): number for text, number in ids.items()}
    plain = {text for text, number in ids.items() if types[number] == _types().NORMAL or text in letters.values()}
    pairs = [
        (-scores[ids[text]], ids[text], at, text)
        for text in plain
        for at in range(1, len(text))
        if text[:at] in plain and text[at:] in plain
    ]
    merges = [[text[:at], text[at:]] for _, _, at, text in sorted(pairs)]
    return _of_characters(values, held, ids, merges, prefix=prefix)


def _gemma4(values: _Metadata, held: Mapping[int, str], types: Sequence[Any]) -> dict[str, Any]:
    """The merges of Gemma 4's tokenizer, and its kin."""
    return _of_characters(values, held, {text: n for n, text in held.items()}, _merges(values), prefix=False)


def _of_characters(
    values: _Metadata, held: Mapping[int, str], ids: Mapping[str, int], merges: list[list[str]], *, prefix: bool
) -> dict[str, Any]:
    """BPE of characters, with tokens of bytes for others. prefix: whether text gets a space before it"""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, replaced] if prefix else [replaced]
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    unknown = values.of("unknown_token_id", int, 0)
    model = {
        "type": "BPE", "dropout": None, "unk_token": held.get(unknown), "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": ids, "merges": merges,
    }  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _word_pieces(values: _Metadata, held: Mapping[int, str], types: Sequence[Any]) -> dict[str, Any]:
    """WordPiece; the tokens that begin a word are marked, and not those that go on with one."""

    def unmarked(number: int, text: str) -> str:
        if types[number] != _types().NORMAL or (text.startswith("[") and text.endswith("]")):
            return text
        return text.removeprefix(SPACE) if text.startswith(SPACE) else CONTINUES + text

    lowercase = values.of("normalizer.lowercase", bool, True)
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lowercase,
            "strip_accents": values.of("normalizer.strip_accents", bool, lowercase),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": held.get(values.of("unknown_token_id", int, -1), "[UNK]"),
            "continuing_subword_prefix": CONTINUES, "max_input_chars_per_word": 100,
            "vocab": {unmarked(number, text): number for number, text in held.items()},
        },
    }  # fmt: skip


def _unigrams(values: _Metadata, held: Mapping[int, str], types: Sequence[Any]) -> dict[str, Any]:
    """SentencePiece's unigrams."""
    scores, last = _scores(values, len(types)), max(held, default=-1)
    charsmap = bytes(value & 0xFF for value in values.items("precompiled_charsmap", int))
    if any(number not in held for number in range(last + 1)):
        raise values.refusal("tokens", "expected no unused tokens among unigrams")
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    encoded = base64.b64encode(charsmap).decode()
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded} if charsmap else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": values.of("unknown_token_id", int, 0), "byte_fallback": False,
            "vocab": [[held[number], scores[number]] for number in range(last + 1)],
        },
    }  # fmt: skip


# By tokenizer.ggml.model.
_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_pieces, "t5": _unigrams, "gemma4": _gemma4}


def _around(values: _Metadata, tokens: Sequence[str]) -> dict[str, Any] | None:
    """Return what puts tokens around a text, if any stand there; unless a file says so, as llama.cpp assumes it."""
    kind, pre = values.of("model", str), values.of("pre", str)
    always = kind == "gemma4" or pre in ALWAYS_BEGINS
    begins = kind in ("llama", "bert") or pre in BEGINS
    added = {
        "bos": always or values.of("add_bos_token", bool, begins),
        "eos": values.of("add_eos_token", bool, kind in ("bert", "t5")),
    }
    ids = {name: values.of(f"{name}_token_id", int) for name in added}
    if kind == "bert":
        others = {"bos": values.of("cls_token_id", int, 101), "eos": values.of("seperator_token_id", int, 102)}
        ids = {name: others[name] if number is None else number for name, number in ids.items()}
    texts = {name: tokens[n] for name, n in ids.items() if added[name] and n is not None and 0 <= n < len(tokens)}
    if not texts:
        return None

    def around(of: str, kind: int) -> list[dict[str, Any]]:
        before, behind = (
            [{"SpecialToken": {"id": texts[name], "type_id": kind}}] if name in texts else [] for name in ("bos", "eos")
        )
        return [*before, {"Sequence": {"id": of, "type_id": kind}}, *behind]

    first, second = around("A", 0), around("B", int(kind == "bert"))
    if len(texts) == 2:  # a second text goes on from the end of the first, which may be repeated
        second[:1] = first[2:] if pre != "modern-bert" and values.of("add_sep_token", bool, pre in SEPARATES) else []
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in texts.items()},
    }


def _about(
    values: _Metadata, metadata: Mapping[str, MetadataValue], named: Mapping[str, str], context: int | None
) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    about |= {f"{name}_token": text for name, text in named.items()}
    types = values.of("token_type_count", int, 2 if values.of("model", str) == "bert" else 1)
    about["model_input_names"] = ["input_ids", *["token_type_ids"] * (types > 1), "attention_mask"]
    if context:
        about["model_max_length"] = context
    template, others = metadata.get(TEMPLATE), metadata.get(f"{TEMPLATE}s")
    if isinstance(template, str):
        about["chat_template"] = template
    if isinstance(others, MetadataList):
        templates = {"default": template} | {str(name): metadata.get(f"{TEMPLATE}.{name}") for name in others.first}
        about["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)
        ]
    return about


def _generation(values: _Metadata, metadata: Mapping[str, MetadataValue], tokens: Sequence[str]) -> dict[str, Any]:
    """Return generation_config.json."""
    ends = dict.fromkeys(values.of(f"{name}_token_id", int) for name in ENDS)
    ids: list[int] = [number for number in ends if number is not None and 0 <= number < len(tokens)]
    stated: dict[str, Any] = {"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {}
    first = metadata.get(f"{metadata.get('general.architecture')}.decoder_start_token_id")
    if isinstance(first, int):
        stated["decoder_start_token_id"] = first
    for key, name in (("bos", "bos"), ("padding", "pad")):
        if (number := values.of(f"{key}_token_id", int)) is not None and 0 <= number < len(tokens):
            stated[f"{name}_token_id"] = number
    sampling = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    sampling = {name: value for name, value in sampling.items() if isinstance(value, int | float)}
    return stated | ({"do_sample": True} | sampling if sampling else {})
