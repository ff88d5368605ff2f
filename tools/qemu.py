"""Puts an emulator of aarch64, whose kernels a test runs, into the environment, from a package that is not installed.

    python tools/qemu.py

Neither root nor the system's lists of packages are needed: apt keeps lists of its own beside the download. Nothing is
done where the emulator is known already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "qemu-user-static"
NAMES = ("qemu-aarch64-static", "qemu-aarch64")  # what packages call it


def main() -> None:
    """Download and unpack the package, unless the emulator is there."""
    folder = Path(sys.prefix, "bin")
    if any(shutil.which(name, path=f"{folder}:{os.environ['PATH']}") for name in NAMES):
        return
    if shutil.which("apt-get") is None:
        sys.exit(
            f"error: {NAMES[1]}, which a test runs kernels with, is not installed, and there is no apt to get it from"
        )
    with tempfile.TemporaryDirectory() as work:
        unpacked = download(Path(work)) / "usr" / "bin" / NAMES[0]
        shutil.move(unpacked, folder / NAMES[0])


def download(work: Path) -> Path:
    """Download the package and unpack it; return the folder."""
    for part in ("lists/partial", "archives/partial"):
        (work / part).mkdir(parents=True)
    own = [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache={work}", "-oAPT::Sandbox::User="]
    for step in (["update"], ["download", PACKAGE]):
        subprocess.run(["apt-get", "--quiet=2", *own, *step], cwd=work, check=True)
    (package,) = work.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, work / "unpacked"], check=True)
    return work / "unpacked"


if __name__ == "__main__":
    main()
