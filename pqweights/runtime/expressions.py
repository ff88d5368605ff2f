"""The regular expressions in a quantization_config, which runtimes match with the names of all modules.

compressed-tensors and torchao take those behind `re:`, transformers every name of a module that stays as it is. Python
tries all ways in which repetitions can share a name between them: nested ones take more than a lifetime.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # the only parser of what `re` compiles
from typing import Any

PREFIX = "re:"
# Keys whose lists hold expressions without a prefix.
LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
# Repetitions of any letters in a row; a name of 100 letters has 4 million places for four of them.
MOST_REPEATED = 4
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ASSERTS = (_constants.ASSERT, _constants.ASSERT_NOT)
_DIGITS = [(_constants.IN, [(_constants.CATEGORY, _constants.CATEGORY_DIGIT)])]


def slow_expression(settings: Any) -> str | None:
    """Return an expression in a quantization_config that may take forever, or that is none; None without one."""
    return next((text for text in _expressions(settings) if not _is_quick(text)), None)


def _expressions(value: Any, *, of_modules: bool = False) -> Iterator[str]:
    """Yield all expressions in a value of JSON, keys too. of_modules: whether texts are expressions anyway"""
    if isinstance(value, str) and (of_modules or value.startswith(PREFIX)):
        yield value.removeprefix(PREFIX)
    elif isinstance(value, list):
        for item in value:
            yield from _expressions(item, of_modules=of_modules)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _expressions(key)
            yield from _expressions(item, of_modules=key in LISTS)


def _is_quick(expression: str) -> bool:
    try:
        return _repeated(_parser.parse(expression)) <= MOST_REPEATED
    except (re.error, RecursionError, OverflowError):
        return False


def _repeated(parsed: Any) -> float:
    """Return how many repetitions can share the same part of a name; infinity if they are nested."""
    in_row, apart = 0.0, 0.0
    for kind, argument in parsed:
        parts = [*_parts(argument)]
        if kind in _REPEATS and argument[1] != 1:
            if _varies(argument[2]):
                return float("inf")
            in_row += [*argument[2]] != _DIGITS
        elif kind in _ASSERTS:  # once they hold, they are not tried again
            apart = max(apart, *map(_repeated, parts))
        else:
            in_row += max(map(_repeated, parts), default=0)
    return max(in_row, apart)


def _varies(parsed: Any) -> bool:
    """Whether there is more than one way in which a part of an expression can match the same text."""
    return any(
        kind is _constants.BRANCH
        or (kind in _REPEATS and argument[0] != argument[1])
        or any(map(_varies, _parts(argument)))
        for kind, argument in parsed
    )


def _parts(argument: Any) -> Iterator[Any]:
    """Yield the expressions within an argument."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _parts(item)
