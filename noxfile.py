"""The tasks of the project. CI runs the same ones: ``nox --list`` describes them, ``nox -s check tests`` runs two.

Every task has its own virtual environment, which later runs use again. ``TORCH=oldest`` or ``TORCH=newest`` selects
the oldest torch that is supported or the newest release, in the place of the one in constraints.txt.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["check", "tests"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = ("scikit-build-core", "nanobind", "cmake", "ninja")


def install(session: nox.Session, *extras: str, tools: tuple[str, ...] = ()) -> None:
    """Install the package with extras and tools, in the versions of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    torch = os.environ.get("TORCH", "")
    requirements = ["-e", f".[{','.join(extras)}]" if extras else ".", *tools]
    if torch:
        lines = constraints.read_text(encoding="utf-8").splitlines(keepends=True)
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
        requirements.append(torch_requirement(torch))
    session.install("-c", str(constraints), *requirements)


def torch_requirement(which: str) -> str:
    """Return the requirement of ``oldest``, as pyproject.toml has it, ``newest``, or a version."""
    supported = next(name for name in PROJECT["dependencies"] if name.startswith("torch>="))
    if which == "newest":
        return supported
    return f"torch=={supported.removeprefix('torch>=') if which == 'oldest' else which}.*"


def use_openmp_of_torch(session: nox.Session) -> None:
    """On macOS, let the extension load the OpenMP runtime of torch: two runtimes in one process end it."""
    if sys.platform == "darwin":
        code = "from importlib.util import find_spec as f; print(f('headscope._native').origin, f('torch').origin)"
        found = session.run("python", "-c", code, silent=True)
        extension, torch = str(found).split()
        session.run("scripts/macos_openmp", extension, str(Path(torch).parent / "lib"), external=True)


@nox.session
def check(session: nox.Session) -> None:
    """Check format, lint, spelling, prose and types."""
    install(session, "dev")
    session.run("scripts/check", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments after ``--`` go to pytest."""
    install(session, "test", tools=("cmake", "ninja"))
    use_openmp_of_torch(session)
    session.run("pytest", *session.posargs)
    session.run("pytest", "-m", "long", "-n0", "tests/docs/test_notebook.py")


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests and print which branches they take; this takes longer than ``tests``."""
    install(session, "test", tools=("cmake", "ninja", "pytest-cov"))
    report = ("--cov", "--cov-branch", "--cov-report=term:skip-covered", "--cov-report=xml:build/coverage.xml")
    session.run("pytest", *report, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages of docs with the reference into build/site."""
    install(session, "docs")
    session.run("scripts/docs", *session.posargs, external=True)


@nox.session
def viewer(session: nox.Session) -> None:
    """Check that the page's script is what viewer/ builds. Needs node 20 and npm."""
    session.run("scripts/viewer", "--check", external=True)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer. Needs g++."""
    install(session, "test", tools=BUILD)
    session.run("scripts/sanitize", *session.posargs, external=True)


@nox.session
def aarch64(session: nox.Session) -> None:
    """Run the native kernels on AArch64 under qemu. Needs a cross compiler and qemu-user."""
    install(session, "test", tools=("cmake", "ninja"))
    session.run("scripts/aarch64", external=True)


@nox.session
def cross(session: nox.Session) -> None:
    """Build the native kernels with Clang, and with Zig for other systems. Needs clang++ and its OpenMP."""
    session.install("-c", "constraints.txt", *BUILD, "ziglang")
    session.run("scripts/cross", *session.posargs, external=True)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Run a benchmark: ``nox -s benchmarks -- module`` runs benchmarks/module.py."""
    if not session.posargs:
        session.error(f"name one of {', '.join(sorted(path.stem for path in (ROOT / 'benchmarks').glob('*.py')))}")
    name, *arguments = session.posargs
    install(session, "hf")
    session.run("python", f"benchmarks/{name}.py", *arguments)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel into dist."""
    session.install("-c", "constraints.txt", "build", *BUILD)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", ".")
