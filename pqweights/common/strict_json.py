"""JSON as pqweights writes it, and JSON from outside, parsed strictly; documents.py has what it may hold."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from typing import Any, TypeGuard

MAX_DEPTH = 100
# No measure is larger, and sums of such numbers stay finite.
LARGEST_NUMBER = 1e300
# No tensor has more elements: its bytes can be counted in 64 bits and in float64.
MAX_ELEMENTS = 2**60
# What comes before an item of a list that is a value of the outermost object.
LIST_ITEM = "\n    "
# UTF-8 has no surrogates, so JSON can only hold half of a surrogate pair as an escape.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonText(str):
    """A value that is JSON already, indented for its place; json_text leaves it as it is."""

    __slots__ = ()


def json_bytes(value: Any) -> bytes:
    """Return the content of a JSON file: UTF-8, indented by 2, with a newline at the end."""
    return f"{json_text(value)}\n".encode()


def json_pieces(value: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield what json_bytes returns for an object, so that the whole of a long file is never in memory.

    A value that is an iterator is written as a list, an item at a time, each with LIST_ITEM before it.
    """
    before = "{"
    for key, item in value.items():
        yield f"{before}\n  {encode_basestring(key)}: ".encode()
        before = ","
        if isinstance(item, Iterator):
            yield from _list_pieces(item)
        else:
            yield json_text(item, "\n  ").encode()
    yield b"\n}\n" if value else b"{}\n"


def _list_pieces(items: Iterator[Any]) -> Iterator[bytes]:
    """Yield the text of a list that is a value of the outermost object."""
    before = "["
    for item in items:
        yield f"{before}{LIST_ITEM}{json_text(item, LIST_ITEM)}".encode()
        before = ","
    yield b"[]" if before == "[" else b"\n  ]"


def json_text(value: Any, newline: str = "\n") -> str:
    """Return what json.dumps returns with indent=2 and ensure_ascii=False, in 40 % of the time.

    newline: a line feed and the indentation of the line on which the value begins

    Raises TypeError for what JSON does not have, and for keys that are not strings.
    """
    if type(value) is str:
        return encode_basestring(value)
    if type(value) is int:
        return int.__repr__(value)
    inner = f"{newline}  "
    if isinstance(value, dict) and value:
        # Strings are the most frequent values, and a call would take as long as they do.
        pairs = [
            f"{encode_basestring(key)}: {encode_basestring(item) if type(item) is str else json_text(item, inner)}"
            for key, item in value.items()
        ]
        return f"{{{inner}{f',{inner}'.join(pairs)}{newline}}}"
    if isinstance(value, list | tuple) and value:
        return f"[{inner}{f',{inner}'.join([json_text(item, inner) for item in value])}{newline}]"
    if isinstance(value, JsonText):
        return value
    return json.dumps(value, ensure_ascii=False)


def rounded(value: float) -> float:
    """Round a measure to the seven significant digits that files hold."""
    return float(f"{value:.6e}")


def parse_json(data: bytes, *, strict: bool = False) -> Any:
    """Parse a JSON text.

    strict: whether keys that are there twice, NaN and infinities are refused, as in all files that pqweights writes

    Raises ValueError, with what was expected and found, for anything else, for more than MAX_DEPTH levels of nesting,
    and for strings that UTF-8 cannot hold.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": unique_keys, "parse_constant": _refuse} if strict else {}
    try:
        value = json.loads(data.decode("utf-8"), **hooks)
    except RecursionError:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting, found more") from None
    except ValueError as error:
        raise ValueError(f"expected JSON, found {str(error)[:120]!r}") from None
    # The cheap test comes first, because an index has a line for every tensor: there is no nesting without brackets.
    if data.count(b"{") + data.count(b"[") >= MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting, found more")
    if _SURROGATE_ESCAPE.search(data) and not is_utf8(json.dumps(value, ensure_ascii=False)):
        raise ValueError("expected UTF-8 text, found half of a surrogate pair")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raises ValueError for a key that is there twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return result


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def is_utf8(text: str) -> bool:
    """Whether a string can be written as UTF-8; halves of surrogate pairs in file names and JSON cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _depth(value: object) -> int:
    """Return the levels of nesting, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        children = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for group in children for child in group]
    return depth


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number below LARGEST_NUMBER; true and false are not numbers."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER
