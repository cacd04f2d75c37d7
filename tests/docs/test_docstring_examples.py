"""Every public name has an example in its docstring, and the examples print what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_ON_THE_PAGE = {"headscope.cli"}  # its names are commands, which docs/reference/command_line.md describes


def public_names() -> dict[str, Any]:
    """Every class and function that a public module lists, by the first of its names."""
    names: dict[int, tuple[str, Any]] = {}
    modules = ["headscope"] + [
        module.name
        for module in pkgutil.walk_packages(headscope.__path__, "headscope.")
        if not any(part.startswith("_") for part in module.name.split(".")) and module.name not in NOT_ON_THE_PAGE
    ]
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", ()):
            try:
                thing = getattr(module, name)
            except ImportError:
                if module.__name__ != "headscope.integrations":  # each of its names requires a package of its own
                    raise
                continue
            if inspect.isclass(thing) or inspect.isfunction(thing):
                names.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return dict(names.values())


NAMES = public_names()


def examples(thing: Any) -> list[doctest.DocTest]:
    """Of its docstring, and of the public methods that a class defines."""
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, thing.__name__, globs={})
    return [test for test in found if test.examples]


def test_public_names_are_found() -> None:
    assert {"headscope.attention", "headscope.masks.Band", "headscope.HeadStats"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tests = examples(NAMES[name])
    assert any(test.name == NAMES[name].__name__ for test in tests), f"{name}: its docstring has no example (>>>)"
    for test in tests:
        torch.manual_seed(0)
        report: list[str] = []
        results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
        assert results.failed == 0, "".join(report)
