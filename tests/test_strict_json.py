"""JSON as files and commands hold it: the text is that of json.dumps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqweights.common.strict_json import LIST_ITEM, JsonText, json_bytes, json_pieces, json_text

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


def test_files_end_with_a_newline() -> None:
    assert json_bytes({"a": ["é", 1]}) == '{\n  "a": [\n    "é",\n    1\n  ]\n}\n'.encode()


@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=3))
def test_pieces_are_the_bytes(value: dict[str, Any]) -> None:
    lazy = {key: iter(item) if isinstance(item, list) else item for key, item in value.items()}
    assert b"".join(json_pieces(value)) == b"".join(json_pieces(lazy)) == json_bytes(value)


@given(st.lists(VALUES, max_size=4))
def test_text_of_items_is_written_as_it_is(items: list[Any]) -> None:
    texts = (JsonText(json_text(item, LIST_ITEM)) for item in items)
    assert b"".join(json_pieces({"items": texts})) == json_bytes({"items": items})
