"""The files of a tokenizer, the tokens of a vocabulary by id, and the refusal of what llama.cpp has no match for.

Byte-level BPE needs nothing but the tokens and a name for how text is split (vocabulary.py). SentencePiece's BPE joins
the two neighbours whose joint text is the token with the highest score. A tokenizer.json lists the pairs that may be
joined; from these the scores are derived, if they are all pairs. For the vocabularies of encoders see encoders.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.errors import ExportError, SourceError

FAST, CONFIG = "tokenizer.json", "tokenizer_config.json"
NAMED, ADDED = "special_tokens_map.json", "added_tokens.json"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Tokens that are special although the files do not say so: llama.cpp's converter goes by these looks, too.
LOOKS_SPECIAL = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
NAMED_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
SPACE = "▁"
# The parts that process a text, and where each lists its steps if it has several.
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
# Of a token; what is compared to find how tokens are joined grows with the square of it.
MOST_CHARACTERS = 2000
SCHEMES = (None, "first", "always", "never")
# What llama.cpp's converter gives tokens that no merge makes.
NO_SCORE = -1000.0
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# By the scheme of Metaspace.
DIFFERS = {
    "never": "",
    "always": "text that begins with a space (llama.cpp adds another one)",
    "first": "text that begins with a space or follows a special token (llama.cpp adds a space)",
}
INSTEAD = "use --target bf16, and llama.cpp's convert_hf_to_gguf.py on its result"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a model.

    model: the kind of tokenizer: gpt2 (byte-level BPE), llama (SentencePiece), bert (WordPiece) or t5 (unigrams)
    pre: how it splits text
    tokens, types: by id; the types are those of gguf.TokenType
    surrounding_ids: the ids of the tokens before and after a text
    strips: whether special tokens take the spaces that follow them
    differs: on which texts llama.cpp makes other tokens, as far as is known
    scores: by id, for the kinds that have some
    special: the ids of special tokens that the kind names itself, such as unk
    about: what else the file says of it, by its key in tokenizer.ggml
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    surrounding_ids: tuple[tuple[int, ...], tuple[int, ...]]
    strips: bool
    differs: tuple[str, ...] = ()
    scores: list[float] | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, bool | bytes] = field(default_factory=dict)


def unmapped(why: str) -> ExportError:
    """Return the error for a tokenizer that matches none of llama.cpp's."""
    return ExportError(f"the tokenizer cannot be mapped to one of llama.cpp's: {why}; {INSTEAD}")


def placed_tokens(
    vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], rows: int, *, spaced: Collection[str] = ()
) -> tuple[list[str], list[int]]:
    """Return the texts and types of all tokens by id; ids that nothing has become unused tokens.

    vocab: the ids of ordinary tokens
    added: the tokens that were added to it, as tokenizer.json lists them
    rows: the number of tokens of the model
    spaced: the added tokens that also stand for text with spaces; llama.cpp looks for them before it replaces spaces

    Raises ExportError for ids that the model does not have, and for two tokens with the same text.
    """
    token_types = gguf_package().TokenType
    tokens, types = [f"[PAD{token_id}]" for token_id in range(rows)], [int(token_types.UNUSED)] * rows
    for token, token_id in vocab.items():
        _check_id(token, token_id, rows)
        tokens[token_id], types[token_id] = token, int(token_types.NORMAL)
    for entry in added:
        content, token_id = entry["content"], entry.get("id", -1)
        _check_id(content, token_id, rows)
        if entry.get("special") or _looks_special(content):
            tokens[token_id], types[token_id] = content, int(token_types.CONTROL)
        else:
            text = content.replace(SPACE, " ") if content in spaced else content
            tokens[token_id], types[token_id] = text, int(token_types.USER_DEFINED)
    if len(set(tokens)) < rows:
        raise unmapped("several tokens have the same text")
    return tokens, types


def _check_id(token: str, token_id: Any, rows: int) -> None:
    if not isinstance(token_id, int) or not 0 <= token_id < rows:
        raise ExportError(f"{FAST}: token {token!r} has the id {token_id!r}, but the model has {rows} tokens")


def _looks_special(token: str) -> bool:
    return token in NAMED_SPECIAL or any(
        token.startswith(begin) and token.endswith(end) for begin, end in LOOKS_SPECIAL
    )


def beside_added(tokenizer: Mapping[str, Any], stripping: Collection[str]) -> tuple[str, ...]:
    """Return on which texts llama.cpp makes other tokens because of added tokens, or of what stands beside them.

    stripping: the tokens behind which it skips spaces
    """
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    spaces = [
        entry["content"]
        for entry in added
        if entry.get("lstrip") or bool(entry.get("rstrip")) != (entry["content"] in stripping)
    ]
    words = [entry["content"] for entry in added if entry.get("single_word")]
    steps = steps_of(tokenizer, "normalizer")
    prepends, lowers = any(s.get("type") == "Prepend" for s in steps), any(s.get("lowercase") for s in steps)
    normalized = [entry["content"] for entry in added if entry.get("normalized")]
    normalized = [text for text in normalized if prepends or (lowers and text != text.lower())]
    return tuple(
        f"{texts} {', '.join(map(repr, tokens[:3]))}{' and others' if len(tokens) > 3 else ''}"
        for texts, tokens in (
            ("text with spaces beside", spaces),
            ("words that contain", words),
            ("text with tokens that the tokenizer looks for in normalized text:", normalized),
        )
        if tokens
    )


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file. Raises SourceError for anything else."""
    return read_json_object(storage, name) if name in storage.files() else {}


def read_tokenizer(storage: Storage) -> dict[str, Any]:
    """Return a tokenizer.json, with the added tokens of all files among its own.

    Raises SourceError if a part of it is not of the kind that the tokenizers library writes.
    """
    tokenizer = read_json(storage, FAST)
    _expect_object(tokenizer.get("model") or {}, "model")
    _expect_type(tokenizer.get("model") or {}, "its model")
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    longest = max(vocabulary, key=len, default="") if isinstance(vocabulary, dict) else ""
    if len(longest) > MOST_CHARACTERS:
        raise SourceError(
            f"{FAST}: expected tokens of at most {MOST_CHARACTERS} characters, found {longest[:40]!r}... with "
            f"{len(longest)}"
        )
    added = tokenizer.get("added_tokens") or []
    _expect_list(added, "added_tokens")
    for entry in added:
        _expect_object(entry, "each of its added_tokens")
        if not isinstance(entry.get("content"), str):
            raise SourceError(f"{FAST}: expected the text of an added token, found {entry.get('content')!r}")
    for part, steps in STEPS.items():
        _check_steps(tokenizer.get(part) or {}, part, steps)
    tokenizer["added_tokens"] = _all_added(storage, tokenizer)
    return tokenizer


def special_settings(storage: Storage) -> dict[str, Any]:
    """Return tokenizer_config.json, with the special tokens that transformers takes from special_tokens_map.json.

    It reads that file, and added_tokens.json, only where tokenizer_config.json has no added_tokens_decoder.
    """
    about = read_json(storage, CONFIG)
    return about if "added_tokens_decoder" in about else about | read_json(storage, NAMED)


def _named_texts(about: Mapping[str, Any]) -> list[str]:
    """Return the texts of the special tokens that have a name, in the order in which transformers adds new ones."""
    names = dict.fromkeys([*(f"{name}_token" for name in SPECIAL), *(key for key in about if key.endswith("_token"))])
    return [text for text in map(text_of, map(about.get, names)) if text is not None]


def _extra_texts(about: Mapping[str, Any]) -> list[str]:
    """Return the texts of the special tokens without a name."""
    extra = about.get("extra_special_tokens") or about.get("additional_special_tokens") or []
    extra = [*extra.values()] if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    return [text for text in map(text_of, extra) if text is not None]


def text_of(token: Any) -> str | None:
    """Return the text of a special token, which files state alone or with its flags."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _all_added(storage: Storage, tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens of all files, each with its id, the one that transformers gives it, and the file.

    A token of the vocabulary, or one that was added before, keeps its id, and its flags become those of the later file;
    any other one gets the next id. `named` is set for tokens of which no file states the id.
    """
    about, vocab = special_settings(storage), _ids(tokenizer.get("model") or {})
    own = [(FAST, entry["content"], entry.get("id", -1), entry) for entry in tokenizer.get("added_tokens") or []]
    special = dict.fromkeys([*_named_texts(about), *_extra_texts(about)])
    named = [(CONFIG, text, None, {"special": True}) for text in special]
    added: dict[str, dict[str, Any]] = {}
    following = len(vocab)
    for file, text, stated, flags in (*own, *_stated_elsewhere(storage, about), *named):
        given = added[text]["given"] if text in added else vocab.get(text, following)
        following = max(following, 1 + given) if _is_id(given) else following
        before = added.get(text, {"named": stated is None and text not in vocab})
        found = {"file": file, "id": stated} if stated is not None else {"id": before.get("id", given)}
        added[text] = {"file": file, **before, **flags, "content": text, "given": given, **found}
        if before.get("id", given) != given:  # what was found first
            added[text] |= {"file": before["file"], "id": before["id"]}
    return list(added.values())


def check_ids(added: Sequence[Mapping[str, Any]]) -> None:
    """Raise ExportError for an added token that has one id in a file and another one in transformers."""
    for entry in added:
        if entry["id"] != entry["given"]:
            raise ExportError(
                f"{entry['file']}: token {entry['content']!r:.80} has the id {entry['id']!r:.20}, but transformers "
                f"gives it {entry['given']!r:.20}; if the model was trained with the ids of transformers, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes these"
            )


def _stated_elsewhere(storage: Storage, about: Mapping[str, Any]) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """Return the tokens that other files add: the file, the text, the id and the flags of each, by id."""
    tokens: list[tuple[str, str, Any, dict[str, Any]]] = []
    decoder = about.get("added_tokens_decoder")
    if decoder is not None:
        _expect_object(decoder, "added_tokens_decoder", CONFIG)
        for token_id, token in decoder.items():
            text, is_number = text_of(token), isinstance(token_id, str) and token_id.isascii() and token_id.isdigit()
            if not isinstance(token, dict) or text is None or not is_number or len(token_id) > 9:
                raise SourceError(f"{CONFIG}: expected a token by its id in added_tokens_decoder, found {token!r:.80}")
            tokens.append((CONFIG, text, int(token_id), {flag: bool(token.get(flag)) for flag in FLAGS}))
        return sorted(tokens, key=lambda token: token[2])
    special = {
        *_named_texts(about),
        *_extra_texts(read_json(storage, CONFIG)),
        *_extra_texts(read_json(storage, NAMED)),
    }
    for text, token_id in read_json(storage, ADDED).items():
        if not _is_id(token_id):
            raise SourceError(f"{ADDED}: expected the id of the token {text!r:.80}, found {token_id!r:.80}")
        tokens.append((ADDED, text, token_id, {"special": text in special, "normalized": text not in special}))
    return sorted(tokens, key=lambda token: token[2])


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _ids(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ids of the tokens of a model, of whatever kind."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        return {entry[0]: index for index, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    return vocab if isinstance(vocab, dict) else {}


def _check_steps(part: Any, name: str, steps: str) -> None:
    """Raise SourceError unless a part of the pipeline is an object, or holds a list of them."""
    _expect_object(part, name)
    several = part.get(steps, [part])
    _expect_list(several, steps)
    for step in several:
        _expect_object(step, f"each of its {steps}")
        _expect_type(step, f"each of its {steps}")
        _expect_object(step.get("pattern") or {}, "the pattern of a step")
        if step.get("prepend_scheme") not in SCHEMES:
            raise SourceError(f"{FAST}: unknown prepend_scheme {step['prepend_scheme']!r:.80}")


def steps_of(tokenizer: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """Return the steps of a part of the pipeline, a key of STEPS."""
    stated = tokenizer.get(part) or {STEPS[part]: []}
    steps: list[Mapping[str, Any]] = stated.get(STEPS[part], [stated])
    return steps


def check_merges(merges: Any) -> list[tuple[str, str]]:
    """Return the pairs that a model joins, in order.

    Raises SourceError if they are not pairs of texts.
    """
    _expect_list(merges, "merges")
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else pair for pair in merges]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise SourceError(f"{FAST}: expected two texts as each of its merges, found {pair!r:.80}")
    return [(left, right) for left, right in pairs]


def _expect_object(part: Any, name: str, file: str = FAST) -> None:
    if not isinstance(part, Mapping):
        raise SourceError(f"{file}: expected an object as {name}, found {part!r:.80}")


def _expect_type(part: Mapping[str, Any], name: str) -> None:
    if not isinstance(part.get("type"), str | None):
        raise SourceError(f"{FAST}: expected a text as the type of {name}, found {part['type']!r:.80}")


def _expect_list(part: Any, name: str) -> None:
    if not isinstance(part, list):
        raise SourceError(f"{FAST}: expected a list as {name}, found {part!r:.80}")


def sentencepiece(tokenizer: Mapping[str, Any], rows: int, **known: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json that was made from a SentencePiece model.

    known: what it has whatever the kind of tokenizer

    Raises ExportError if it makes other tokens than SentencePiece would.
    """
    prefix, splits, differs = _spaces(tokenizer)
    vocab, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
    merges = check_merges(tokenizer["model"].get("merges") or [])
    _check_all_joined(vocab, merges, {entry["content"] for entry in added}, splits=splits)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    tokens, types = placed_tokens(vocab, added, rows, spaced=ranks)
    _place_bytes(vocab, tokens, types)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=[-float(ranks[token]) if token in ranks else NO_SCORE for token in tokens],
        about={"add_space_prefix": prefix},
        differs=(differs,) if differs else (),
        **known,
    )


def _place_bytes(vocab: Mapping[str, int], tokens: list[str], types: list[int]) -> None:
    """Give the tokens of single bytes their names and type; llama.cpp needs all 256.

    In a tokenizer.json of Gemma, the tabulator has taken the name of its byte.
    """
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        token_id = vocab.get(name, vocab.get(chr(byte)) if byte < 128 else None)
        if token_id is None:
            raise unmapped(f"it has no token {name}")
        tokens[token_id], types[token_id] = name, int(gguf_package().TokenType.BYTE)


def _spaces(tokenizer: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Return whether text gets a space before it, whether it is split at spaces, and what llama.cpp does otherwise.

    Spaces must become the character that stands for them, and nothing else may happen to the text.
    """
    prefix = escapes = splits = False
    differs = ""
    for step in (*steps_of(tokenizer, "normalizer"), *steps_of(tokenizer, "pre_tokenizer")):
        step_type, pattern = step.get("type"), (step.get("pattern") or {})
        if step_type == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step_type == "Replace" and pattern.get("String") == " " and step.get("content") == SPACE:
            escapes = True
        elif step_type == "Metaspace" and step.get("replacement") == SPACE:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            prefix, escapes, splits = scheme != "never", True, bool(step.get("split", True))
            differs = DIFFERS[scheme]
        elif step_type != "Split" or pattern.get("String") != " " or not escapes:
            raise unmapped(f"it changes or splits text by {step}")
    if not escapes:
        raise unmapped("it has byte tokens, but no character that stands for spaces")
    return prefix, splits, differs


def _check_all_joined(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], fixed: set[str], *, splits: bool
) -> None:
    """Raise ExportError unless any two tokens whose joint text is a token may be joined.

    fixed: tokens that are found in the text before anything is joined
    """
    listed = {(left, right) for left, right in merges}
    for token in vocab:
        if token in fixed or BYTE.fullmatch(token):
            continue
        if splits and SPACE in token[1:]:
            raise unmapped(f"it splits text at spaces, but has the token {token!r}")
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab and (left, right) not in listed and not fixed & {left, right}:
                raise unmapped(f"it does not join {left!r} and {right!r} into {token!r}, as SentencePiece would")
