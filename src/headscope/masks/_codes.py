"""Encodings of masks in postfix order: codes for operators, and rules for the native kernels.

``Mask.encode`` writes codes, which ``_from_codes.py`` converts back to masks. ``Mask.write_rules`` writes rules, which
cannot be read back: they hold the part that spans cannot express.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from torch import Tensor


class Code:
    """The codes of a mask that is passed to an operator; some are followed by numbers, some use tensors."""

    BAND, PREFIX, LENGTHS, DOCUMENTS, DENSE, BOTH, EITHER, PACKED = range(8)
    NO_OFFSET, ONE_OFFSET, OFFSETS, OFFSET_TENSOR = range(4)  # of a band


def unknown_code(code: int) -> ValueError:
    """Return the error for an unknown code, as in a program that a later version exported."""
    return ValueError(
        f"mask: got the code {int(code)}, which this version of headscope does not define; export the program again "
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
    """A receiver of the rules of a mask, in postfix order."""

    def add_spans(self, spans: Tensor) -> None:
        """Add a rule that makes the keys of spans visible, [B or 1, Q or 1, n, 2]."""
        ...

    def add_ids(self, q_ids: Tensor, k_ids: Tensor) -> None:
        """Add a rule that makes keys with the query's id visible: [B or 1, Q] and [B or 1, K]."""
        ...

    def add_table(self, table: Tensor) -> None:
        """Add a boolean tensor that broadcasts to [B, H, Q, K]."""
        ...

    def join(self, kind: RuleKind) -> None:
        """Join the last two rules by ``BOTH`` or ``EITHER``."""
        ...
