"""How a tokenizer splits text before its merges apply: the names that llama.cpp has for the ways it knows.

llama.cpp's converter recognizes a tokenizer by a hash of how it splits a sample text. Here the rules themselves, in
tokenizer.json, are looked up. The names and the expressions behind them are those of src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
TEKKEN = "".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
GPT4O = f"{_CASED[0]}{_CONTRACTIONS}?{_CASED[1]}{_CONTRACTIONS}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
DEEPSEEK3 = _PUNCTUATION + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"

# The expressions by which text is split, one after the other; whether whole words of the vocabulary are taken before
# merges apply -> the name in llama.cpp.
NAMES = {
    ((GPT2,), False): "gpt-2",
    ((DIGIT, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
    ((r"\p{N}{1,3}", CJK, DEEPSEEK3), False): "deepseek-v3",
}
# Where llama.cpp only approximates the expressions, of which its engine lacks some classes of characters.
_ROUGHLY = (
    "words with combining marks, or with capitals beyond ASCII behind small letters: llama.cpp splits them otherwise"
)
DIFFERS = {"tekken": _ROUGHLY, "gpt-4o": _ROUGHLY}
# What the slow tokenizers of transformers do, which have no tokenizer.json.
CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the name of the pre-tokenizer of a byte-level tokenizer.json, or None; and what was found."""
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    expressions = tuple(part for step in steps for part in _expressions(step))
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    return NAMES.get((expressions, whole_words)), f"{expressions}, ignore_merges {whole_words}"


def _expressions(step: Mapping[str, Any]) -> tuple[str, ...]:
    """The expressions by which a step splits; an unknown step stands for itself, so that it is found nowhere."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return (GPT2,) if step.get("use_regex", True) else ()
    if kind == "Digits":
        return (DIGIT if step.get("individual_digits") else DIGITS,)
    pattern = step.get("pattern")
    # Where every character matches, dropping what does not match is the same as cutting there.
    whole = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and whole and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        return (pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n"),)
    return (str(dict(step)),)
