"""The targets of ``headscope check``: a file, with or without a name in it, several files, or folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope._support.text import visible
from headscope.cli._check.conventions import FILE_NAME, Conventions, combine_conventions
from headscope.cli._shared.console import say
from headscope.cli._shared.mistakes import Mistake

SKIPPED = {"__pycache__", "__MACOSX", "site-packages", "node_modules"}  # folders; hidden ones are skipped, too


@dataclass(frozen=True)
class Submission:
    """One file to check.

    Attributes:
        label: its path below the folder that was given, or as it was given.
        path: the file.
        name: what to check in it; None = by the conventions.
        conventions: those of its target.
    """

    label: str
    path: Path
    name: str | None
    conventions: Conventions


def is_one_file(targets: Sequence[str]) -> bool:
    """Return whether the targets are a single file, of which a report is shown."""
    return len(targets) == 1 and not os.path.isdir(targets[0])


def list_submissions(targets: Sequence[str], config: str | None, options: Mapping[str, Any]) -> list[Submission]:
    """Return the files of all targets, each once, in the order of their labels.

    Args:
        targets: folders, files, or ``FILE.py:NAME``.
        config: the file with the conventions; None = the check.toml of the folder, or of the one above it.
        options: those of the command line, as ``combine_conventions`` takes them.

    Raises:
        Mistake: there is no such file, or a folder has no file to check.
    """
    submissions: dict[tuple[str, str | None], Submission] = {}
    known: dict[Path | None, Conventions] = {}
    for target in targets:
        folder = (
            Path(target) if os.path.isdir(target) else None
        )  # False where Path.is_dir raises: a name can be too long
        path, name = (folder, None) if folder is not None else _parse_file(target)
        source = Path(config) if config else _find_config(path if folder is not None else path.parent)
        if source not in known:
            known[source] = combine_conventions(source, options)
            if source is not None:
                say(f"conventions of {source}")
        conventions = known[source]
        files = [path] if folder is None else _list_files(folder, conventions.pattern)
        for file in files:
            below = file.relative_to(folder) if folder is not None and len(targets) == 1 else file
            label = visible(below.as_posix()) + (f":{name}" if name else "")
            submissions.setdefault((os.path.realpath(file), name), Submission(label, file, name, conventions))
    return sorted(submissions.values(), key=lambda each: (each.label.casefold(), each.label))


def _find_config(folder: Path) -> Path | None:
    """Return the file with the conventions: in the folder, or in the one above, which has a folder for each student."""
    above = folder.parent if folder.parts else Path("..")
    return next((path for path in (folder / FILE_NAME, above / FILE_NAME) if path.is_file()), None)


def _list_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match, also those in its folders."""

    def is_submission(path: Path) -> bool:
        folders = path.relative_to(folder).parts[:-1]
        hidden = any(part.startswith(".") for part in (*folders, path.name))
        return path.is_file() and not hidden and SKIPPED.isdisjoint(folders) and path.name != "__init__.py"

    files = [path for path in folder.rglob(pattern) if is_submission(path)]
    notebooks = sum(1 for path in folder.rglob("*.ipynb") if is_submission(path))
    remedy = (
        f"{notebooks} notebook{'s are' if notebooks > 1 else ' is'} not checked; "
        "jupyter nbconvert --to python writes Python files"
    )
    if not files:
        raise Mistake(f"{folder}: has no file {pattern} to check" + (f": {remedy}" if notebooks else ""))
    if notebooks:
        say(f"headscope check: {folder}: {remedy}")
    return files


def _parse_file(target: str) -> tuple[Path, str | None]:
    if os.path.isfile(target):
        return Path(target), None
    file, colon, name = target.rpartition(":")
    expected = f"expected FILE.py:NAME, FILE.py or a folder; for example {_example(target)}"
    if not colon and not os.path.exists(target):
        raise Mistake(f"{target}: no such file or folder, {expected}")
    if not file or not name.isidentifier():
        raise Mistake(f"target: got {target}, {expected}")
    if os.path.isdir(file):
        raise Mistake(f"{file}: is a directory, expected a Python file; --class {name} names a class for all its files")
    if not os.path.isfile(file):
        problem = "is not a regular file" if os.path.exists(file) else "no such file"
        raise Mistake(f"{file}: {problem}, expected a Python file")
    return Path(file), name


def _example(target: str) -> str:
    """Return a target that follows FILE.py:NAME, with the file of this one if it has one."""
    file = target.partition(":")[0]
    return f"{file if file.endswith('.py') else 'homework.py'}:MultiHeadAttention"
