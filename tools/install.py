"""Install packages into an environment, and make that if need be: with uv, or with pip where uv is not to be had.

    python tools/install.py ENVIRONMENT [--torch-index URL] ARGUMENT...

ARGUMENT: as for `pip install`. --torch-index: an index to consult as well, if it can be reached

uv takes an eighth of pip's processor time, and keeps on the disk once what several environments have. It does not read
pip's configuration, which says where packages are on a machine without PyPI, so its options are made from that here.
It is looked for beside the interpreter that runs this.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

# uv's options for those of pip's settings that say what is installed from where.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
    "cert": "--cert",
}
PIP = (sys.executable, "-m", "pip")
UV = Path(sys.executable).with_name("uv")


def pip_settings() -> dict[str, str]:
    """What pip is configured to, by configuration files and the environment."""
    lines = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, str] = {}
    for scope in ("global.", "install.", ":env:."):  # the later wins
        pairs = (line.removeprefix(scope).split("=", 1) for line in lines if line.startswith(scope))
        found |= {name: ast.literal_eval(value) for name, value in pairs}
    return found


def uv_install(python: Path, arguments: list[str], index: str) -> bool:
    """Install with uv, and return whether that worked. As to pip, an index may be of use for any package."""
    settings = pip_settings()
    options = [part for name, option in OPTIONS.items() for v in settings.get(name, "").split() for part in (option, v)]
    command: list[str | Path] = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--index-strategy",
        "unsafe-best-match",
        *options,
        "--python",
        python,
    ]
    if index and _succeeds([*command, "--index", index, *arguments], UV_HTTP_RETRIES="1"):
        return True
    return _succeeds([*command, *arguments])


def pip_install(python: Path, arguments: list[str], index: str) -> bool:
    """Install with the environment's pip, of which old ones do not know groups."""
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    options = ["--retries", "1", "--extra-index-url", index] if index else []
    return _succeeds([*pip, "--upgrade", "pip"]) and _succeeds([*pip, *options, *arguments])


def _succeeds(command: list[str | Path], **variables: str) -> bool:
    return subprocess.run(command, env=os.environ | variables, check=False).returncode == 0


def main(folder: str, arguments: list[str]) -> int:
    """Install, and return the exit status."""
    index = ""
    if arguments[0] == "--torch-index":
        index, arguments = arguments[1], arguments[2:]
    python = Path(folder, "bin", "python")
    if UV.exists():
        made = python.exists() or _succeeds([UV, "venv", "--quiet", folder])
        if made and uv_install(python, arguments, index):
            return 0
        print("uv cannot install this: pip tries", file=sys.stderr)
    if not python.with_name("pip").exists():
        venv.create(folder, with_pip=True, symlinks=True)
    return 0 if pip_install(python, arguments, index) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
