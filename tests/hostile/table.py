"""Print the answer to every bad input as a Markdown table: python tests/hostile/table.py > docs/bad-inputs.md"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # its gguf.py is not the package
sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import generate
from hostile.case import build, run
from typer.testing import Result

HEAD = """# Bad inputs

Several hundred broken and hostile inputs, and the line that each one gets. `make bad-inputs` writes this page; the
inputs are made in `tests/hostile/`. If a command prints several lines (`verify` prints one per problem), the first is
shown. Commands that need not notice an input are left out (`inspect` reads no tensor, for example).

| input | command | exit | answer |
|---|---|---|---|"""


def answer(result: Result) -> str:
    """The first line with a message; a usage error is printed in a box."""
    bare = (line.strip("│╭╮╰╯─ ") for line in (result.stderr or result.stdout).splitlines())
    return next((line for line in bare if line and line != "Error" and not line.startswith(("Usage:", "Try "))), "")


def main() -> None:
    from pqweights_cli import output

    os.environ |= {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    output.STATUS_SECONDS = 3600.0  # a line about a slow step is no answer
    print(HEAD)
    with tempfile.TemporaryDirectory() as temporary:
        for case in generate.CASES:
            for number, command in enumerate(case.commands):
                folder = Path(temporary) / f"{case.name}-{number}"
                build(case, folder)
                with contextlib.chdir(folder), contextlib.redirect_stderr(sys.stdout):
                    result = run(command, own_process=case.own_process)
                if result.exit_code:
                    line = answer(result).encode("ascii", "backslashreplace").decode()
                    escaped = line.replace("|", "\\|").replace("<", "&lt;")
                    print(f"| {case.name} | `{command}` | {result.exit_code} | {escaped} |")


if __name__ == "__main__":
    main()
