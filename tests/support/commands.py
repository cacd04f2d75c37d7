"""The command line in-process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headscope.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run_it(*arguments: str) -> Ran:
        code = main(arguments)
        return Ran(code, *capsys.readouterr())

    return run_it


def answer(ran: Ran) -> Any:
    """What was printed, as JSON that knows no NaN, and that no encoding changes."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert ran.code == 0, ran.err
    assert ran.out.isascii()
    return json.loads(ran.out, parse_constant=refuse)
