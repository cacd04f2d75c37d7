"""Check that a tag may be released: python scripts/release_check.py v1.2.3

The package, CITATION.cff and a section of CHANGELOG.md with a date must have the tag's version. Only the standard
library is needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def problems(tag: str) -> list[str]:
    """Return why the tag may not be released, one reason an entry."""
    version = tag.removeprefix("v")
    patterns = {  # a file -> what it must contain
        "src/headscope/__init__.py": rf'^__version__ = "{re.escape(version)}"$',
        "CITATION.cff": rf"^version: {re.escape(version)}$",
        "CHANGELOG.md": rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$",
    }
    reasons = [
        f"{name}: nothing matches {p}" for name, p in patterns.items() if not re.search(p, read(name), re.MULTILINE)
    ]
    if not re.fullmatch(r"v\d+\.\d+\.\d+(?:rc\d+)?", tag):
        reasons.append(f"tag: got {tag}; expected v1.2.3 or v1.2.3rc1")
    return reasons


if __name__ == "__main__":
    raise SystemExit("\n".join(problems(sys.argv[1])))
