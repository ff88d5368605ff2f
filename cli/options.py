"""The options of commands: made from the parameters of the library (planning/options.py), or of commands alone."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pqweights.common import parameters as checks
from pqweights.common.parameters import Check, Options, Parameter, in_order, parameters

from . import output

if TYPE_CHECKING:
    from pqweights.storage.sources import Access, Fetched

Asked = TypeVar("Asked")

# What Typer parses for each check, if not a text; the library's own checks follow.
TYPES: dict[Check, Any] = {
    checks.flag: bool,
    checks.number: float,
    checks.whole: int,
    checks.path: Path,
    checks.patterns: list[str],
    checks.bits_by_pattern: list[str],
    checks.formats_by_pattern: list[str],
}
NUMBERS = {"temperature", "top_p"}
QUIET = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress, notes or summary; errors and warnings stay.")
]


def taking(
    options: Callable[..., Asked], continues: Callable[[Asked], bool | Path | None] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that it has the flags of a class of options, of which it gets an instance.

    continues: whether an interrupted run left something from which the same command continues, or where; None, or its
        answer, if there is nothing to continue
    """
    known = parameters(options)
    named = [name for name in in_order(options) if known[name].flags != ()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        also = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            rest = {p.name: given[p.name] for p in also}
            asked: list[Asked] = []
            kept = None if continues is None else lambda: continues(asked[0]) if asked else False
            with output.errors(kept=kept, quiet=given.pop("quiet")):
                taken = {name: given[name] for name in named if given[name] not in (None, [])}
                asked.append(options(**taken, **({"tell": output.note} if "token" in named else {})))
                command(asked[0], **rest)

        flags = [_parameter(options, name) for name in named]
        keyword = inspect.Parameter.KEYWORD_ONLY
        quiet = inspect.Parameter("quiet", keyword, default=False, annotation=QUIET)
        run.__signature__ = inspect.Signature([*flags, *also, quiet])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def option(options: Any, name: str) -> Any:
    """Return what Typer calls the option of a parameter, without its default."""
    parameter = parameters(options)[name]
    text = _spoken(parameter.help, options)
    if parameter.argument:
        return typer.Argument(metavar=parameter.metavar, help=text)
    shown = None if parameter.default_text is None else _spoken(parameter.default_text, options)
    return typer.Option(
        *(parameter.flags or (flag_of(name, parameter),)),
        metavar=parameter.metavar or "|".join(parameter.choices) or None,
        help=text,
        show_default=shown or TYPES.get(parameter.check) != list[str],
    )


def flag_of(name: str, parameter: Parameter) -> str:
    """Return the flag of a parameter, its long form."""
    return parameter.flags[0].partition("/")[0] if parameter.flags else f"--{name.replace('_', '-')}"


def spelled(asked: Options, names: Iterable[str]) -> list[str]:
    """Return those of some options that were given as words of a command line. names: of the options"""
    words: list[str] = []
    known, wanted = parameters(type(asked)), asked.given & {*names}
    for name in (name for name in in_order(type(asked)) if name in wanted and known[name].flags != ()):
        value, flag = getattr(asked, name), flag_of(name, known[name])
        for one in value if isinstance(value, tuple) else (value,):
            parts = one if isinstance(one, tuple) else (one,)
            text = "=".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
            words += [flag] if one is True else [flag, shlex.quote(text)]
    return words


def _spoken(text: str, options: Any) -> str:
    return output.with_flags(text, {name: flag_of(name, known) for name, known in parameters(options).items()})


def _parameter(options: Any, name: str) -> inspect.Parameter:
    """Return the parameter of the function that Typer calls."""
    made = inspect.signature(options).parameters[name]
    typed = float if name in NUMBERS else TYPES.get(parameters(options)[name].check, str)
    required = made.default is made.empty
    optional: Any = typed | None if not required and made.default in (None, ()) else typed
    default = None if made.default == () else made.default
    annotation: Any = Annotated[optional, option(options, name)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def run_continues(source: str, out: str, calibrates: bool) -> bool | Path:
    """Whether an interrupted run left something: in its folder or files of a repository, or where it calibrated."""
    from pqweights.errors import PqweightsError
    from pqweights.quality.work_folder import folder_beside
    from pqweights.rewrite.identity import is_under_way
    from pqweights.storage import open_store

    try:
        store = open_store(out)
        if calibrates and (work := folder_beside(store)).exists():
            return work
        under_way = is_under_way(store)
    except PqweightsError:  # an address that does not answer, or cannot be one
        under_way = False
    return under_way or _is_fetched(source)


def work_beside(out: Path) -> Path | None:
    """Return where an interrupted measurement left its work; None if it left nothing."""
    from pqweights.quality.work_folder import folder_beside_file

    work = folder_beside_file(out)
    return work if work.exists() else None


def _is_fetched(source: str) -> bool:
    """Whether files of a source are fetched to this machine: those of a repository."""
    from pqweights.storage.addresses import repository_id

    return repository_id(source) is not None


def fetched(source: str, access: Access) -> Fetched:
    """Return a local folder, or a repository on the Hub as a folder in the cache."""
    from pqweights.storage.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access, progress=progress)


SummaryOption = Annotated[
    bool | None,
    typer.Option(
        "--summary/--no-summary",
        show_default="a summary on a terminal, above 200 tensors",
        help="Show a line for each role, codec and bit width in place of one for each tensor.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
