# ruff: noqa: RUF001 (characters of many scripts)
"""Tokenizers of the kinds that published models have, trained on a little text, and strings that are hard for them."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pqweights.checkpoint.gguf import splits

TEXT = [
    "The quick brown fox jumps over the lazy dog's back, and I've 123 reasons; they're 4567 in all, aren't they?",
    "def main(argument):\n    if argument == 10:\n        return 'I\\'ll see'\n\n\tprint(x)\r\n",
    "Überraschung: größere Äpfel — naïve café, señor!",
    "Привет, как дела? Хорошо. Ελληνικά 一二三 你好，世界。こんにちは 안녕하세요",
    "   leading spaces,  two  spaces,    four    spaces\n\n\n   new lines   \n \t tabs\t\tand\tmore",
    "emoji 😀😁 👩‍👩‍👧‍👦 flags 🇩🇪 1.5 3,14 0x1F 2024-01-31 100000 $5.00 50% #tag @name e-mail@host.org http://a.b/c?d=e&f",
] * 3  # fmt: skip

STRINGS = [
    "Hello, world! I've got 12345 apples; they're YOUR'S, I'LL say, 'tis.",
    " a leading space",
    "   three spaces, trailing   ",
    "tab\tand\t\ttwo\n\nnew lines\n \n  indented\r\nDOS\r\n\r\n",
    "digits 0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 ²³ ½ ٣٤",
    "数字和汉字，你好世界！こんにちは、世界。안녕하세요 세계 ไทย हिन्दी",
    "naïve café ÄÖÜ ß ﬁ Ａ é (e + accent: e\u0301)",
    "emoji 😀 🇩🇪🇫🇷 👩‍👩‍👧‍👦 ❤️ \U0001f9d1\U0001f3fd‍\U0001f680",
    "def f(x):\n    return x**2  # comment\n\n\n\tif x != 3: pass\n",
    "don't DON'T can’t we'd've o'clock '''quotes'''",
    "…—–“quoted” «guillemets» $€£¥ ±×÷ ∑∏√ \\ / | ~ ` ^ _ {}[]<>",
    "\u00a0non-breaking\u2009thin\u200bzero\ufeffbom\u3000wide",
    "a",
    "",
    "\n",
    " ",
    "Ünïcödé mIxEd CaSe HTTPServer camelCase snake_case SCREAMING",
]  # fmt: skip
BEGIN, END, USER, PLAIN = "<s>", "</s>", "<|user|>", "<think>"
WITH_SPECIAL = [
    f"{USER}Hello{END}",
    f"before {USER} after{PLAIN}thinking",
    f"{USER}\n{PLAIN} two {END}{END}  x",
    "<|user |> < |user|> <think",
]


def byte_level(*expressions: str, whole_words: bool = False, digits: bool = False, starts: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer that splits text by expressions, as GPT-2 (none), Llama 3 and Qwen 2 do.

    whole_words: take whole words of the vocabulary before merges apply
    digits: split off each digit first
    starts: put a token before the text
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not expressions))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[BEGIN, END], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    _finish(tokenizer, starts=starts)
    return tokenizer


def sentencepiece(*, prefix: str = "always", gemma: bool = False) -> Tokenizer:
    """A BPE tokenizer of characters with tokens for bytes, as those that are made from SentencePiece models.

    prefix: the scheme of Metaspace by which a space is put before the text
    gemma: as Gemma's, which never puts one there, has tokens of several spaces that are joined first and that are added
        tokens as well, and the tabulator instead of its byte

    All pairs that make up a token may be joined, in the order of their tokens, as in converted models.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if gemma else "always")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator(TEXT, trainer)
    model = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    fixed = ["▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "<h1>"] if gemma else []
    vocab = {token: place for place, token in enumerate(["<unk>", BEGIN, END, *bytes_, "▁", "\n", *fixed])}
    for token in sorted(model["vocab"], key=model["vocab"].get):
        vocab.setdefault(token, len(vocab))
    pairs = [
        (token[:at], token[at:])
        for token in list(vocab)[3 + 256 :]
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    if gemma:
        vocab["\t"] = vocab.pop("<0x09>")
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fixed])
    elif prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", BEGIN, END])
    _finish(tokenizer, starts=True)
    return tokenizer


def word_pieces(*, lowercase: bool) -> Tokenizer:
    """A WordPiece tokenizer, as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["<pad>", "<unk>", BEGIN, END, "<mask>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _between(tokenizer)


def unigrams() -> Tokenizer:
    """A tokenizer of SentencePiece's unigrams, with its replacements of characters, as XLM-RoBERTa's."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXT for line in text.splitlines()]), model_writer=model,
        vocab_size=260, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    vocab = [("<pad>", 0.0), *((piece.piece, piece.score) for piece in proto.pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=1, byte_fallback=False))
    tokenizer.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.add_special_tokens(["<pad>", "<unk>", BEGIN, END])
    return _between(tokenizer)


def _between(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a token before each text and one behind it, and with added tokens."""
    _finish(tokenizer, starts=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", pair=f"{BEGIN} $A {END} $B:1 {END}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)],
    )  # fmt: skip
    return tokenizer


def _finish(tokenizer: Tokenizer, *, starts: bool) -> None:
    """Add tokens, and put one before the text."""
    tokenizer.add_special_tokens([USER])
    tokenizer.add_tokens([AddedToken(PLAIN, normalized=False)])
    if starts:
        place = tokenizer.token_to_id(BEGIN)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, place)]
        )


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> None:
    """Write the files of a tokenizer as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


_MADE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level, "digits": lambda: byte_level(digits=True),
    "llama3": lambda: byte_level(splits.LLAMA3, whole_words=True, starts=True),
    "llama3 with merges": lambda: byte_level(splits.LLAMA3), "qwen2": lambda: byte_level(splits.QWEN2),
    "qwen3.5": lambda: byte_level(splits.QWEN35),
    "exaone moe": lambda: byte_level(splits.EXAONE_MOE),
    "seed": lambda: byte_level(splits.SEED),
    "tekken": lambda: byte_level(splits.TEKKEN, whole_words=True, starts=True),
    "gpt-4o": lambda: byte_level(splits.GPT4O),
    "deepseek3": lambda: byte_level(r"\p{N}{1,3}", splits.CJK, splits.DEEPSEEK3),
    "llama2": lambda: sentencepiece(prefix="legacy"), "metaspace": sentencepiece,
    "gemma": lambda: sentencepiece(gemma=True),
    "bert": lambda: word_pieces(lowercase=True), "bert cased": lambda: word_pieces(lowercase=False),
    "unigrams": unigrams,
}  # fmt: skip
# Those above, by the name of what splits text in the same way.
_SPLIT_ALIKE = {
    "gpt-2": "gpt2", "smollm": "digits", "llama-bpe": "llama3", "smaug-bpe": "llama3 with merges", "qwen2": "qwen2",
    "qwen35": "qwen3.5", "seed-coder": "seed", "exaone-moe": "exaone moe", "tekken": "tekken", "gpt-4o": "gpt-4o",
    "deepseek-v3": "deepseek3",
}  # fmt: skip
for (expressions, whole_words), name in splits.NAMES.items():
    if name not in _SPLIT_ALIKE:
        _MADE[name] = functools.partial(byte_level, *expressions, whole_words=whole_words)
# What splits text as llama.cpp does by each name.
SPLITS = {name: _SPLIT_ALIKE.get(name, name) for name in splits.NAMES.values()}


@functools.cache
def _trained(kind: str) -> str:
    return str(_MADE[kind]().to_str())


# Each call returns another tokenizer, which a test may change; training takes longer than most tests.
KINDS = {kind: (lambda kind=kind: Tokenizer.from_str(_trained(kind))) for kind in _MADE}
