"""Imports go down the layers, importing is light, and only the command line prints or exits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pqweights_cli
import pytest

import pqweights
from pqweights.common.advice import PACKAGES, pip_install

LIBRARY = Path(pqweights.__file__).parent
COMMANDS = Path(pqweights_cli.__file__).parent

# The layers, lowest first; modules of one line may import each other's, the later the earlier. A package stands for all
# of its modules, unless one of them is listed itself.
LAYERS = (
    (
        "pqweights.runtime.loading.autoload",
        "pqweights",
        "pqweights.errors",
        "pqweights.kernels.workers",
        "pqweights.common.advice",
        "pqweights.common.documents",
        "pqweights.common.dtypes",
        "pqweights.common.markdown",
        "pqweights.common.strict_json",
        "pqweights.common.threads",
        "pqweights.common.units",
        "pqweights.common.options",
    ),
    ("pqweights.models",),
    ("pqweights.kernels",),
    ("pqweights.checkpoint.header",),
    ("pqweights.formats",),
    ("pqweights.checkpoint",),
    ("pqweights.checkpoint.gguf",),
    ("pqweights.storage",),
    ("pqweights.planning",),
    ("pqweights.convert",),
    ("pqweights.targets",),
    ("pqweights.runtime.loading", "pqweights.results", "pqweights.runtime.kv"),
    ("pqweights.convert.distributed",),
    ("pqweights.calibrate", "pqweights.runtime"),
    ("pqweights.publish", "pqweights.api"),
    ("pqweights_cli",),
)
# Modules that import no other module of the library.
LEAVES = ("pqweights.runtime.loading.autoload", "pqweights.errors")
# The modules that may import an optional package, below `pqweights`.
OPTIONAL = {
    "torch": """
        checkpoint.weight_files formats.column_encoding formats.lloyd_max formats.master
        formats.trellis runtime.kv.bases runtime.kv.cache runtime.kv.codes
        runtime.kv.klt runtime.kv.on_codes runtime.kv.polar_rope
        runtime.kv.polar_transform runtime.kv.rotated runtime.kv.states
        runtime.loading.conversion runtime.loading.packed runtime.loading.packed_products
        runtime.loading.packed_rows runtime.loading.packed_states kernels.attention
        kernels.reference kernels.transform_codes calibrate.calibrated calibrate.calibrated_weights
        calibrate.calibrated_master calibrate.collecting calibrate.divergence calibrate.layer_passes
        calibrate.layer_statistics
        calibrate.drawing calibrate.layered calibrate.sample calibrate.scale_finding calibrate.sensitivity
        calibrate.work_folder
    """,
    "yaml": "planning.recipe checkpoint.config publish.card.old_card",
    "fsspec": "storage.bucket",
    "huggingface_hub": "storage.hub",
    "matplotlib": "",
    "transformers": """
        runtime.kv.cache runtime.kv.on_codes runtime.kv.schemes runtime.loading.conversion
        runtime.loading.packed runtime.loading.quantizer runtime.loading.transformers
        calibrate.drawing calibrate.layered
    """,
}
HEAVY = {*OPTIONAL, "numpy", "rich"} - {"yaml"}
# What options there are is needed for the help of commands.
LIGHT = {"pqweights.common.units", "pqweights.common.options"}
BAR = "pqweights_cli.bar"  # it imports rich, and is itself imported where a bar is shown


def modules() -> dict[str, ast.Module]:
    """Every module of the library and of the command line, parsed."""
    result = {}
    for package, folder in (("pqweights", LIBRARY), ("pqweights_cli", COMMANDS)):
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            result[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    facade = result["pqweights"]  # offers the functions of pqweights.api, which it imports on first use
    facade.body = [node for node in facade.body if not is_for_type_checkers(node)]
    return result


def is_for_type_checkers(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING: ...`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


MODULES = modules()


def imports(name: str, module: ast.AST) -> set[str]:
    """The modules that a module imports, anywhere in it; of `from package import x`, x where that is a module."""
    package = name if name in {m.rpartition(".")[0] for m in MODULES} else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in MODULES else base)
    return found - {name}


def layer(name: str) -> int:
    """The place of a module in LAYERS; its own entry comes before that of its package."""
    places = {listed: number for number, names in enumerate(LAYERS) for listed in names}
    packages = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    if name != "pqweights":
        packages = [package for package in packages if package != "pqweights"]
    known = [places[package] for package in packages if package in places]
    assert known, f"{name} stands in no layer"
    return known[0]


def test_imports_go_down_the_layers() -> None:
    # Masters are read through the codecs, so `checkpoint` is a layer above them.
    for name, module in MODULES.items():
        for imported in imports(name, module) & MODULES.keys():
            assert layer(imported) <= layer(name), f"{name} imports {imported}, of a later layer"
            assert name not in LEAVES, f"{name} imports {imported}"


def test_there_are_no_import_cycles() -> None:
    """Cycles within a layer are found, too."""
    edges = {name: imports(name, module) & MODULES.keys() for name, module in MODULES.items()}
    # The __init__ of a package may import its modules, because these do not import the package itself.
    finished: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in finished:
            for imported in edges[name]:
                visit(imported, (*above, name))
            finished.add(name)

    for name in MODULES:
        visit(name, ())


def test_commands_import_the_library_only_when_they_run() -> None:
    """Otherwise `pqweights --help` would be slow."""
    for name in (name for name in MODULES if name.startswith("pqweights_cli") and name != BAR):
        for node in (node for node in MODULES[name].body if isinstance(node, ast.Import | ast.ImportFrom)):
            at_import = imports(name, ast.Module([node], [])) - LIGHT
            assert not {m for m in at_import if m == BAR or m.partition(".")[0] in ("pqweights", *HEAVY)}, name


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_are_imported_only_in_the_listed_modules(package: str) -> None:
    found = {
        name
        for name, module in MODULES.items()
        if any(imported.partition(".")[0] == package for imported in imports(name, module))
    }
    assert found <= {f"pqweights.{name}" for name in OPTIONAL[package].split()}


PRINTS = {"print", "exit", "quit", "input", "breakpoint", "sys.exit", "os._exit", "os.abort", "logging.basicConfig"}


def test_the_library_neither_prints_nor_exits() -> None:
    for name in (name for name in MODULES if not name.startswith("pqweights_cli")):
        for node in ast.walk(MODULES[name]):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in PRINTS, f"{name}, line {node.lineno}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("sys.stdout", "sys.stderr"), f"{name}, line {node.lineno}"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "SystemExit" not in ast.unparse(node.exc), f"{name}, line {node.lineno}"


def test_no_bare_exception_is_caught() -> None:
    for name, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                assert caught not in ("everything", "Exception", "BaseException"), f"{name}, line {node.lineno}"


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in sys.modules after a statement in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_imports_load_no_heavy_package() -> None:
    assert not loaded_after("import pqweights") & {"torch", "triton", "transformers", "numpy", "typer"}
    modules = "import pqweights.targets.master, pqweights.targets.exporting, pqweights.results.verify"
    assert not loaded_after(modules) & {"torch", "triton", "transformers"}


def extras() -> dict[str, set[str]]:
    """Return the packages that each extra of the project installs on this system."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = {}
    for extra, packages in project["optional-dependencies"].items():
        other = "linux" if sys.platform == "darwin" else "darwin"
        here = [package.partition(";")[0] for package in packages if other not in package]
        found[extra] = {package for package in here if not package.startswith("pqweights[")}
    found["eval"] |= found["transformers"]
    return found


def test_pip_commands_in_messages_install_what_the_extras_do() -> None:
    assert {extra: set(packages) for extra, packages in PACKAGES.items()} == {e: extras()[e] for e in PACKAGES}
    assert pip_install("gguf") == "pip install 'gguf>=0.18'"


def test_messages_name_extras_only_to_those_who_install_pqweights_as_well() -> None:
    """A card and config.json are read by others; the user of a command has installed pqweights, from wherever."""
    named = {
        module
        for module, tree in MODULES.items()
        for extra in re.findall(r"pip install '?pqweights\[(\w+)\]|'pqweights\[(\w+)\]", ast.unparse(tree))
        if any(extra)
    }
    assert named == {"pqweights.publish.card.text", "pqweights.checkpoint.config", "pqweights.targets.loading"}
    asked = {
        call.args[1].value
        for tree in MODULES.values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "package" and isinstance(call.args[1], ast.Constant)
    }
    assert asked and asked <= PACKAGES.keys()
