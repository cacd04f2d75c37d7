"""Where things are in a checkout."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = TESTS / "support" / "programs"
