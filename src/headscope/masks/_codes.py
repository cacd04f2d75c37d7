"""What masks are written in, parts before what joins them: codes for operators, and rules for the native kernels.

``Mask.encode`` writes codes, which ``_from_codes.py`` makes masks of again. ``Mask.write_rules`` writes rules, which
cannot be read back: they hold what spans cannot say.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from torch import Tensor


class Code:
    """The codes of a mask that crosses into an operator; some are followed by numbers, some take tensors."""

    BAND, PREFIX, LENGTHS, DOCUMENTS, DENSE, BOTH, EITHER = range(7)
    NO_OFFSET, ONE_OFFSET, OFFSETS, OFFSET_TENSOR = range(4)  # of a band


def unknown_code(code: int) -> ValueError:
    """Return the error for a code that this version does not have, as in a program that a later version exported."""
    return ValueError(
        f"mask: got the code {int(code)}, expected one of those of this version of headscope; export the program again "
        "with this version"
    )


class RuleKind(IntEnum):
    """The rules of the native kernels, as ``Rule::Kind`` in ``csrc/interface/attention.h`` numbers them."""

    SPANS = 0
    SAME_ID = 1
    BYTES = 2
    BOTH = 3
    EITHER = 4


class RuleWriter(Protocol):
    """Take the rules of a mask, parts before what joins them."""

    def add_spans(self, spans: Tensor) -> None:
        """Add a rule that shows the keys of spans [B or 1, Q or 1, n, 2]."""
        ...

    def add_ids(self, q_ids: Tensor, k_ids: Tensor) -> None:
        """Add a rule that shows keys of the query's own id: [B or 1, Q] and [B or 1, K]."""
        ...

    def add_table(self, table: Tensor) -> None:
        """Add a boolean tensor that broadcasts to [B, H, Q, K]."""
        ...

    def join(self, kind: RuleKind) -> None:
        """Join the last two rules by ``BOTH`` or ``EITHER``."""
        ...
