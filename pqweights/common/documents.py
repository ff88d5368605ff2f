"""JSON documents as typed structs (msgspec): read whole and strictly, or refused in one clear line.

A document is a msgspec.Struct, which ignores unknown keys, or a ClosedDocument, which refuses them. A field without a
default must be there; one with a default may be missing. Values are never converted: "1" is not a number, 1.0 is not a
whole number, and true is neither. A subclass repeats frozen=True, and kw_only=True for more than three fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from reprlib import Repr
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pqweights.common.advice import instead
from pqweights.common.strict_json import LARGEST_NUMBER, MAX_ELEMENTS, parse_json

# No document of ours is longer: a manifest takes some 400 bytes for each tensor.
MAX_BYTES = 1_000_000_000

Number = Annotated[float, Meta(gt=-LARGEST_NUMBER, lt=LARGEST_NUMBER)]  # finite, whole or not
Count = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]  # of a dimension

Type = TypeVar("Type")
Damaged = Callable[[str], Exception]  # what is wrong, in words -> the error

# msgspec says "Expected `int`, got `str` - at `$.groups[0].alpha`".
_PROBLEM = re.compile(r"(?P<problem>.*?)(, got `?(?P<got>.*?)`?)?( - at `(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
# The types of JSON, in the words of our messages.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys and values",
    "|": "or",
}
# Of a value that may be as large as the file, or larger: YAML can name the same list many times.
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_TYPES = {dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}


class ClosedDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object with the fields of its class, and no other key."""


def read_document(data: bytes, document: type[Type], damaged: Damaged, *, max_bytes: int = MAX_BYTES) -> Type:
    """Parse a JSON text as a value of a type.

    data: the text
    document: a class of documents, or any other type that msgspec knows
    damaged: returns the error for what is wrong
    max_bytes: how long the text may be

    Raises the error of `damaged` for what parse_json refuses strictly, and for values of other types than the fields
    have.
    """
    if len(data) > max_bytes:
        raise damaged(f"expected at most {max_bytes} bytes, found {len(data)}")
    try:
        value = parse_json(data, strict=True)
    except ValueError as error:
        raise damaged(str(error)) from None
    return as_document(value, document, damaged)


def as_document(value: Any, document: type[Type], damaged: Damaged) -> Type:
    """Return a value of JSON or YAML, already parsed, as a value of a type; see read_document.

    The message for an unknown key of a ClosedDocument names the nearest known one.
    """
    if isinstance(value, dict) and isinstance(document, type) and issubclass(document, ClosedDocument):
        for key in value:
            if key not in document.__struct_fields__:
                raise damaged(f"unknown key {key!r}; {instead(str(key), document.__struct_fields__)}")
    try:
        return msgspec.convert(value, document)
    except msgspec.ValidationError as error:
        raise damaged(_in_words(str(error), value)) from None


def as_json(document: object) -> Any:
    """Return a document as the dicts and lists that json_bytes writes."""
    return _with_lists(msgspec.to_builtins(document))


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _in_words(message: str, value: Any) -> str:
    """Return what msgspec found wrong with a value in the words of our messages: which field, expected, found."""
    match = _PROBLEM.fullmatch(message)
    assert match is not None
    problem, path = match["problem"].replace("`", ""), (match["path"] or "").removeprefix("$")
    problem = problem.replace("Object missing required field", "missing key")
    problem = problem.replace("Object contains unknown field", "unknown key")
    if problem.startswith("Expected"):
        problem = " ".join(_WORDS.get(word, word) for word in problem.split()).removesuffix(" or null")
        path, got = _located(value, _STEP.findall(path), match["got"]) or (path, "another value")
        problem = f"{problem}, found {got}"
    field = f"{path.removeprefix('.')}: " if path else ""
    return f"{field}{problem[0].lower()}{problem[1:]}"


def _located(value: Any, steps: list[tuple[str, str]], got: str | None) -> tuple[str, str] | None:
    """Return the path of what msgspec refused, and the value, short enough for a message; None if it is not there.

    msgspec does not say in which item of a mapping (`[...]`), but of which type the value is.
    """
    if not steps:
        return (
            ("", _SHORT.repr(value).encode("ascii", "backslashreplace").decode()[:80])
            if got in (None, _TYPES.get(type(value)))
            else None
        )
    (key, index), *rest = steps
    if index == "..." and got is None:
        return None
    for at in list(value) if index == "..." else [key or int(index)]:
        try:
            located = _located(value[at], rest, got)
        except (IndexError, KeyError, TypeError):
            continue
        if located is not None:
            return f".{key}{located[0]}" if key else f"[{at!r}]{located[0]}", located[1]
    return None
