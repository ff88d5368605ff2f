"""Special tokens, merges and the chat template of a vocabulary, collected by SpecialVocab of the gguf package.

It reads a folder; what stands around a text is read here, because its versions take it from different files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pqweights.checkpoint.storage import Storage, read_file
from pqweights.errors import SourceError
from pqweights.gguf.package import gguf_package, silent
from pqweights.gguf.tokens import CONFIG, FAST, Vocabulary, read_json, unmapped

MERGES, NAMED = "merges.txt", "special_tokens_map.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
MORE_TEMPLATES = "additional_chat_templates/"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# The tokens that a file can name as ends, and the texts by which llama.cpp knows such tokens, the preferred ones first
# (src/llama-vocab.cpp). It takes any of several for the end of a turn, so that one is named.
ENDS = ("eos", "eot", "eom")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>")
MESSAGE_ENDS = ("<|eom_id|>",)
KNOWN_ENDS = frozenset({*TURN_ENDS, *MESSAGE_ENDS, "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>"})


def surrounding(tokenizer: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the tokens that a tokenizer.json puts before and after a text.

    rows: the number of tokens of the model

    Raises ExportError if llama.cpp cannot put them there, SourceError if they are not tokens.
    """
    try:
        before, behind = _around(tokenizer)
    except (AttributeError, LookupError, TypeError) as error:
        raise SourceError(f"{FAST}: its post_processor is damaged: {error!r:.100}") from None
    for token in (*before, *behind):
        if not isinstance(token, int) or not 0 <= token < rows:
            raise SourceError(f"{FAST}: its post_processor has the token id {token!r}, and the model has {rows} tokens")
    if len(before) > 1 or len(behind) > 1:
        raise unmapped("it puts more than one token before or after a text")
    return tuple(before), tuple(behind)


def _around(tokenizer: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The ids before and after a text, which are not checked."""
    processor = tokenizer.get("post_processor") or {"type": "Sequence", "processors": []}
    before: list[Any] = []
    behind: list[Any] = []
    for step in processor.get("processors", [processor]):
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


def add_special(storage: Storage, config: Mapping[str, Any], writer: Any, *, vocabulary: Vocabulary) -> tuple[str, ...]:
    """Write the merges, special tokens and chat template of a vocabulary.

    Returns the tokens at which transformers ends what it generates, and llama.cpp does not.

    config: that of the text model
    writer: a GGUFWriter of the gguf package

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
    _settle(special.special_token_ids, special.add_special_token, vocabulary)
    missed = _add_ends(special.special_token_ids, _ends(storage, config), vocabulary.tokens)
    with silent():
        special.add_to_gguf(writer, quiet=True)
    return missed


def _settle(ids: dict[str, int], added: dict[str, bool], vocabulary: Vocabulary) -> None:
    """Decide which tokens begin and end a text.

    ids: by kind; bos and eos are those that llama.cpp puts around a text
    added: by kind, whether it does
    """
    if vocabulary.around is None:
        added["bos"] = "bos" in ids and added.get("bos", vocabulary.starts)
        added["eos"] = "eos" in ids and added.get("eos", False)
    else:
        for kind, special in zip(("bos", "eos"), vocabulary.around, strict=True):
            added[kind] = bool(special)
            if special and ids.get(kind) != special[0]:
                if kind == "eos" and "eos" in ids:
                    ids["eot"] = ids["eos"]  # it still ends what is generated
                ids[kind] = special[0]
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
    for kind, texts in (("eom", MESSAGE_ENDS), ("eot", TURN_ENDS)):
        known = next((by_text[text] for text in texts if text in by_text), None)
        if known is not None:
            ids.setdefault(kind, known)
    named = {ids.get(kind) for kind in ENDS}
    others = [token for text, token in by_text.items() if token not in named and text not in KNOWN_ENDS]
    free = [kind for kind in ("eom", "eot") if kind not in ids]
    ids.update(zip(free, others, strict=False))
    return tuple(tokens[token] for token in others[len(free) :])


def _write_files(storage: Storage, config: Mapping[str, Any], folder: Path) -> None:
    """Write what SpecialVocab reads into a folder."""
    files = storage.files()
    for name in (FAST, MERGES, *TEMPLATES, *(file for file in files if file.startswith(MORE_TEMPLATES))):
        if name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_file(storage, name))
    named = {key: value for key, value in read_json(storage, NAMED).items() if isinstance(value, str | dict)}
    about = read_json(storage, CONFIG)
    if TEMPLATES[0] in files:
        about.pop("chat_template", None)  # as in transformers, the file has precedence
    (folder / CONFIG).write_text(json.dumps(named | about))
    generation = read_json(storage, "generation_config.json")
    ids = {}
    for kind in SPECIAL:
        stated = config.get(f"{kind}_token_id")
        stated = generation.get(f"{kind}_token_id") if stated is None else stated
        ids[f"{kind}_token_id"] = stated[0] if isinstance(stated, list) and stated else stated
    (folder / "config.json").write_text(json.dumps(ids))
