"""Many small cases in one test: as tests of their own each would cost more than it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Run one case with the seed that a test starts with; what it raises names the case."""
    torch.default_generator.manual_seed(0)
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, values))}")
        raise
