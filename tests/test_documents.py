"""JSON: the text is that of json.dumps; documents are read as typed structs, or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from commands import raises
from hypothesis import given
from hypothesis import strategies as st

from pqweights.common.documents import ClosedDocument, Count, Number, Size, as_document, as_json, read_document
from pqweights.common.strict_json import LIST_ITEM, JsonText, json_bytes, json_pieces, json_text
from pqweights.errors import MasterError


class Entry(msgspec.Struct, frozen=True):
    weight: Number
    shape: tuple[Size, ...] = ()


class Whole(ClosedDocument, frozen=True, kw_only=True):
    name: str
    steps: Count
    note: str | None
    entries: tuple[Entry, ...] = ()
    by_name: dict[str, Entry] = {}


GOOD: dict[str, Any] = {"name": "a", "steps": 3, "note": None}


def read(data: bytes) -> Whole:
    return read_document(data, Whole, lambda problem: MasterError(f"file: {problem}"), max_bytes=5000)


def test_document_is_read_and_written() -> None:
    value = GOOD | {"entries": [{"weight": 1, "more": 2}], "by_name": {"b": {"weight": 0.5, "shape": [2, 3]}}}
    whole = read(json_bytes(value))
    assert whole.entries == (Entry(weight=1.0),)
    assert whole.by_name["b"].shape == (2, 3)
    assert read(json_bytes(as_json(whole))) == whole
    assert as_document(value, Whole, MasterError) == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": -1}, "steps 0 -1"),
        ({"note": []}, "note []"),
        ({"more": 1}, "'more' name, steps, note, entries, by_name"),
        ({"entries": [{}]}, "entries[0] weight"),
        ({"entries": [{"weight": 1}, {"weight": "\u00e91"}]}, r"entries[1].weight '\xe91'"),
        ({"entries": [{"weight": 1e300}]}, "entries[0].weight 1e+300"),
        ({"entries": [{"weight": 10**400}]}, "entries[0].weight"),
        ({"entries": [{"weight": 1, "shape": [1, 2**61]}]}, f"entries[0].shape[1] {2**60}"),
        ({"by_name": {"b": {"weight": 1, "shape": [-1]}}}, "by_name[...].shape[0]"),
        ({"name": float("nan")}, "NaN"),
        ({"name": "\ud800"}, "surrogate"),
        ({"name": "a" * 5000}, "5000 5038"),
    ],
)
def test_damage_is_named(change: dict[str, Any], named: str) -> None:
    with raises(MasterError, "file", *named.split()):
        read(json.dumps(GOOD | change).encode())


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "JSON"),
        (b"null", "None"),
        (b'{"name": "a", "name": "b"}', "'name' twice"),
        (b'{"name": "a", "note": {"b": [{"c": 1, "c": 2}]}}', "'c' twice"),
        (b"[" * 101 + b"]" * 101, "100"),
        (b'{"name": 1e999}', "name inf"),
    ],
)
def test_text_that_is_no_document_is_refused(data: bytes, named: str) -> None:
    with raises(MasterError, *named.split()):
        read(data)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES)
def test_text_is_that_of_json_dumps(value: Any) -> None:
    assert json_text(value) == json.dumps(value, indent=2, ensure_ascii=False)


@pytest.mark.parametrize("value", [{1: 2}, {None: 2}, [object()], {"a": {b"b": 1}}, {"a": b"b"}])
def test_keys_are_strings_and_values_are_those_of_json(value: Any) -> None:
    with pytest.raises(TypeError):
        json_text(value)


@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=3))
def test_pieces_are_the_bytes(value: dict[str, Any]) -> None:
    lazy = {key: iter(item) if isinstance(item, list) else item for key, item in value.items()}
    expected = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    assert b"".join(json_pieces(value)) == b"".join(json_pieces(lazy)) == json_bytes(value) == expected


@given(st.lists(VALUES, max_size=4))
def test_text_of_items_is_written_as_it_is(items: list[Any]) -> None:
    texts = (JsonText(json_text(item, LIST_ITEM)) for item in items)
    assert b"".join(json_pieces({"items": texts})) == json_bytes({"items": items})
