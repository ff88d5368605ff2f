"""A method and its options as a user writes them: NAME, or NAME:OPTION,OPTION..."""

from __future__ import annotations

from collections.abc import Collection

from pqweights.errors import OptionError
from pqweights.kv.schemes import SCHEMES, Scheme
from pqweights.suggestions import instead, nearest


def parse_spec(spec: str) -> Scheme:
    """Return the method that a spec names, such as `hadamard:3` or `polar-rope:m4n2,values=2`.

    Raises OptionError for an unknown name, option or value; the message names the nearest one.
    """
    name, colon, rest = spec.partition(":")
    if name not in SCHEMES:
        raise OptionError(f"KV cache {spec!r}: no method is called {name!r}; {instead(name, SCHEMES)}")
    scheme = SCHEMES[name]
    options: dict[str, float] = {}
    for word in rest.split(",") if colon else []:
        for key, value in _meant(scheme, spec, word.strip()).items():
            if options.setdefault(key, value) != value:
                raise OptionError(f"KV cache {spec!r}: {key} is given twice")
    return scheme(**options)  # type: ignore[arg-type]


def _meant(scheme: type[Scheme], spec: str, word: str) -> dict[str, float]:
    """Return the options that a word sets."""
    if word in scheme.words:
        return dict(scheme.words[word])
    key, equals, value = word.partition("=")
    if not equals and word in scheme.choices:
        raise OptionError(f"KV cache {spec!r}: {word}: expected {word}=N, with N {_listed(scheme.choices[word])}")
    if not equals:
        raise OptionError(f"KV cache {spec!r}: {scheme.name} has no option {word!r}; {_known(scheme, word)}")
    if key not in scheme.choices:
        raise OptionError(f"KV cache {spec!r}: {scheme.name} has no option {key!r}; {_known(scheme, key)}")
    choices = scheme.choices[key]
    number = _number(value)
    if number not in choices:
        raise OptionError(f"KV cache {spec!r}: {key}: expected {_listed(choices)}, found {value!r}")
    return {key: number}


def _number(text: str) -> float:
    """Return a number, an int if it is whole; -1, which no option may be, for anything else."""
    try:
        value = float(text)
    except ValueError:
        return -1
    return int(value) if value.is_integer() else value


def _known(scheme: type[Scheme], word: str) -> str:
    """Return what was expected in place of a word; of many words only the first and the last are named."""
    words = list(scheme.words)
    named = words if len(words) <= 4 else [f"{words[0]} to {words[-1]}"]
    known = [*named, *(f"{key}=N" for key in scheme.choices)]
    near = nearest(word, [*words, *scheme.choices])
    return f"{'' if near is None else f'the nearest is {near!r}; '}expected {', '.join(known) or 'none'}"


def _listed(choices: Collection[float]) -> str:
    numbers = list(choices)
    if len(numbers) > 4 and numbers == list(range(int(numbers[0]), int(numbers[-1]) + 1)):
        return f"a whole number from {numbers[0]} to {numbers[-1]}"
    if len(numbers) > 8:
        return f"a multiple of {numbers[1] - numbers[0]:g} from {numbers[0]:g} to {numbers[-1]:g}"
    return " or ".join(f"{number:g}" for number in numbers)
