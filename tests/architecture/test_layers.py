"""The layers of the package and the size of its files. ``docs/development/architecture.md`` describes both.

Every import counts: at the top of a file, inside a function, and under ``TYPE_CHECKING``. The known exceptions
below may only shrink. A test fails where one is missing, and where one is no longer needed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import headscope

# From the highest to the lowest. A module imports from its own package and from lower layers.
LAYERS = [
    "cli",
    "learn",
    "checking survey integrations",
    "watching heads tracing",
    "_intercept report layouts",
    "nn_compat examples parallel",
    "module onnx",
    "functional decisions comparing _layouts",
    "_observe _analysis _linear",
    "_attend stats cache",
    "masks positions _provenance _dataflow",
    "_support",
]
MOST_LINES = 450  # of a file
MOST_FUNCTION_LINES = 60  # of a function, without its docstring, comments and blank lines
MOST_PRIVATE_FILES = 2  # directly in src/headscope

UPWARD_IMPORTS: set[str] = set()
IN_CIRCLES: set[str] = set()  # within one package
LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
MOST_PRIVATE_IMPORTS = 41  # of another package's private modules; those of packages for all others are free

ROOT = Path(headscope.__file__).parent


@cache
def files() -> dict[str, Path]:
    """Return the path of every module, by its name below ``headscope``."""
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in paths.items() if name not in ("", "__main__")}  # they import by string


def imported_names(module: str) -> Iterator[str]:
    """Yield the name that each import of a module mentions, as an absolute dotted name."""
    path = files()[module]
    package = ["headscope", *module.split(".")]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + (path.name == "__init__.py")] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of this package that each module imports."""
    arrows: dict[str, set[str]] = {}
    for module in files():
        names = [name.removeprefix("headscope.") for name in imported_names(module) if name.startswith("headscope.")]
        homes = [headscope._HOME.get(name, name) for name in names]  # pyright: ignore[reportPrivateUsage]
        named = {name if name in files() else name.rpartition(".")[0] for name in homes}  # a module, or a name in one
        arrows[module] = named & set(files()) - {module}
    return arrows


def package(module: str) -> str:
    return module.split(".")[0]


def level(module: str) -> int:
    return next(place for place, names in enumerate(reversed(LAYERS)) if package(module) in names.split())


def reachable(module: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = arrows[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def code_lines(function: ast.AST) -> int:
    """Count the lines of a function that hold code: without the docstring, comments and blank lines."""
    nodes = [node for node in ast.walk(function) if isinstance(node, (ast.stmt, ast.expr, ast.arg))]
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    code = set(nodes) - {*texts, *(text.value for text in texts)}
    return len({line for node in code for line in (node.lineno, node.end_lineno)})


def test_every_package_has_one_layer_and_there_are_at_most_twelve() -> None:
    places = Counter(name for names in LAYERS for name in names.split())
    assert set(places.values()) == {1}
    assert {package(module) for module in files()} <= set(places)
    assert len(LAYERS) <= 12


def test_a_module_imports_from_its_own_package_and_from_lower_layers() -> None:
    upward = {
        f"{module} -> {other}"
        for module, others in imports().items()
        for other in others
        if package(other) != package(module) and level(other) >= level(module)
    }
    assert sorted(upward) == sorted(UPWARD_IMPORTS)


def test_no_module_imports_itself_through_others() -> None:
    arrows = {m: {o for o in others if f"{m} -> {o}" not in UPWARD_IMPORTS} for m, others in imports().items()}
    reached = {module: reachable(module, arrows) for module in arrows}
    circles = {
        " ".join(sorted(other for other in reached[module] if module in reached[other]))
        for module in arrows
        if module in reached[module]
    }
    assert sorted(circles) == sorted(IN_CIRCLES)


def test_a_private_module_is_imported_from_its_package() -> None:
    private = [
        f"{module} -> {other}"
        for module, others in imports().items()
        for other in others
        if package(other) not in (package(module), "_support", "_attend", "_analysis")
        if ("." in other and other.startswith("_")) or "._" in other
    ]
    assert len(private) == MOST_PRIVATE_IMPORTS, private


def test_files_and_functions_are_short() -> None:
    assert len(list(ROOT.glob("_[!_]*.py"))) <= MOST_PRIVATE_FILES
    sizes = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in files().items()}
    assert {module for module, size in sizes.items() if size > MOST_LINES} == LONG_FILES
    long = {
        f"{module}.{node.name}"
        for module, path in files().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and code_lines(node) > MOST_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS
