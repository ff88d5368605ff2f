"""Flags and arguments of commands, made from the parameters of the library (pqweights/options.py)."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pqweights import parameters as kinds
from pqweights.parameters import Parameter, parameters

from . import output

Asked = TypeVar("Asked")

# What Typer parses for each kind of value; the library's own checks follow.
TYPES: dict[Callable[[str, Any], Any], Any] = {
    kinds.flag: bool,
    kinds.number: float,
    kinds.whole: int,
    kinds.path: Path,
    kinds.patterns: list[str],
    kinds.bits_by_pattern: list[str],
    kinds.types_by_pattern: list[str],
}
NUMBERS = {"temperature", "top_p"}


def taking(
    options: Callable[..., Asked],
    continues: Callable[[Asked], bool] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that it has the flags of a dataclass of options, of which it gets an instance.

    continues: whether an interrupted run left something from which the same command continues; None if it never does
    """
    named = {name: p for name, p in parameters(options).items() if p.flags != ()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            rest = {p.name: given[p.name] for p in own}
            asked: list[Asked] = []
            kept = None if continues is None else lambda: bool(asked) and continues(asked[0])
            with output.errors(kept=kept, quiet=given.pop("quiet")):
                taken = {name: _value(parameter, given[name]) for name, parameter in named.items()}
                asked.append(options(**taken, **({"tell": output.note} if "token" in named else {})))
                command(asked[0], **rest)

        flags = [_parameter(options, name) for name in inspect.signature(options).parameters if name in named]
        keyword = inspect.Parameter.KEYWORD_ONLY
        quiet = inspect.Parameter("quiet", keyword, default=False, annotation=QUIET)
        run.__signature__ = inspect.Signature([*flags, *own, quiet])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def option(options: Any, name: str) -> Any:
    """Return what Typer calls the option of a parameter, without its default."""
    parameter = parameters(options)[name]
    text = _spoken(parameter.help, options)
    if parameter.argument:
        return typer.Argument(metavar=parameter.metavar, help=text)
    shown = None if parameter.default is None else _spoken(parameter.default, options)
    repeated = parameter.kind in (kinds.patterns, kinds.bits_by_pattern, kinds.types_by_pattern)
    return typer.Option(
        *(parameter.flags or (flag_of(name, parameter),)),
        metavar=parameter.metavar or "|".join(parameter.choices) or None,
        help=text,
        show_default=shown or not repeated,
    )


def flag_of(name: str, parameter: Parameter) -> str:
    """Return the flag of a parameter, its long form."""
    return parameter.flags[0].partition("/")[0] if parameter.flags else f"--{name.replace('_', '-')}"


def _spoken(text: str, options: Any) -> str:
    return output.with_flags(text, {name: flag_of(name, known) for name, known in parameters(options).items()})


def _parameter(options: Any, name: str) -> inspect.Parameter:
    """Return the parameter of the function that Typer calls."""
    made = inspect.signature(options).parameters[name]
    parameter = parameters(options)[name]
    kind = float if name in NUMBERS else TYPES.get(parameter.kind, str)
    required = made.default is made.empty
    optional: Any = kind | None if not required and made.default in (None, ()) else kind
    default = None if made.default == () else made.default
    annotation: Any = Annotated[optional, option(options, name)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(parameter: Parameter, given: Any) -> Any:
    """Return what the library takes for what Typer parsed."""
    if parameter.kind is kinds.bits_by_pattern and given:
        return tuple(map(_bits, given))
    if parameter.kind is kinds.types_by_pattern and given:
        return tuple(map(_type, given))
    return given or () if parameter.kind is kinds.patterns else given


def bits_by_pattern(texts: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """Return pattern and bit width from each "PATTERN=BITS" that --set was given."""
    return tuple(map(_bits, texts or ()))


def _bits(text: str) -> tuple[str, float]:
    pattern, equals, width = text.rpartition("=")
    try:
        bits = float(width)
    except ValueError:
        bits = math.nan
    if not pattern or not equals or not math.isfinite(bits):
        raise typer.BadParameter(f"--set: expected PATTERN=BITS, such as *.down_proj.weight=6, found {text!r}")
    return pattern, bits


def _type(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not (pattern and equals and kind):
        raise typer.BadParameter(f"--set-type {text}: expected PATTERN=TYPE, such as '*.attn_v.weight=q6_k'")
    return pattern, kind


QUIET = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress, notes or summary; errors and warnings stay.")
]
