"""What pyproject.toml cannot say: how kernels are compiled, and the README for package indexes, without links to files.

The environment variables PQWEIGHTS_TARGET and PQWEIGHTS_LEVELS choose what the kernels are compiled for; by default the
level of this processor (tools/build_kernels.py has the names). `make wheels` sets them.
"""

import importlib.util
import os
import re
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("pqweights", "kernels", "native")
# [text](target) with a relative target
RELATIVE_LINK = re.compile(r"!?\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")

spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "tools" / "build_kernels.py")
assert spec is not None and spec.loader is not None
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

TARGET = os.environ.get("PQWEIGHTS_TARGET") or kernels.own_target()
LEVELS = os.environ.get("PQWEIGHTS_LEVELS") or "own"


def readme() -> str:
    """README.md, with relative links made absolute by `Source` in project.urls, or shown as text without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project.get("urls", {}).get("Source")
    replacement = r"\1" if source is None else rf"[\1]({source}/blob/main/\2)"
    return RELATIVE_LINK.sub(replacement, (ROOT / "README.md").read_text(encoding="utf-8"))


class WithKernels(Distribution):
    """A package with machine code in it; on a system without kernels, one without."""

    def has_ext_modules(self) -> bool:
        """Whether there is anything to compile."""
        return TARGET in kernels.TARGETS


class BuildKernels(build_ext):
    """Compile the kernels into the package, in the checkout itself if it is installed as editable."""

    def run(self) -> None:
        """Build a library for each level."""
        kernels.build(TARGET, kernels.levels_of(TARGET, LEVELS), self._folder())

    def get_outputs(self) -> list[str]:
        """The libraries."""
        return [str(self._folder() / f"{level}.so") for level in kernels.levels_of(TARGET, LEVELS)]

    def _folder(self) -> Path:
        return ROOT / NATIVE / "lib" if self.inplace else Path(self.build_lib) / NATIVE / "lib"


class KernelsWheel(bdist_wheel):
    """A wheel for any Python on one system: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of the wheel's name."""
        if TARGET not in kernels.TARGETS:
            return super().get_tag()
        return "py3", "none", kernels.TARGETS[TARGET].wheel_tag


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    distclass=WithKernels,
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelsWheel},
)
