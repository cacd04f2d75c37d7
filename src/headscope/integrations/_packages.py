"""Packages of trainers, loaded when a monitor is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(monitor: str, install: str, *names: str) -> Any:
    """Return the first of these modules that can be imported.

    Args:
        monitor: the class that requires it.
        install: the argument of ``pip install``.
        names: the modules.

    Raises:
        ImportError: none is installed.
    """
    missing: ImportError | None = None
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # it is installed, and requires another package
            missing = error
    raise ImportError(
        f"{monitor}: the package {names[0].partition('.')[0]} is missing; pip install {install}"
    ) from missing
