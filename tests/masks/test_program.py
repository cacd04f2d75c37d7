"""The rules of masks that the native kernels run."""

from __future__ import annotations

import re
from pathlib import Path

from headscope.masks import RuleKind

HEADER = Path(__file__).parents[2] / "csrc" / "interface" / "attention.h"


def test_the_kinds_of_rules_are_those_of_the_kernels() -> None:
    text = HEADER.read_text(encoding="utf-8")
    [kinds] = re.findall(r"enum Kind : std::int32_t \{ (.*?) \} kind;", text)
    numbers = {name.upper(): int(number) for name, number in re.findall(r"(\w+) = (\d+)", kinds)}
    assert numbers == {kind.name: int(kind) for kind in RuleKind}
