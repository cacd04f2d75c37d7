"""What a peer hands to its worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention_peers.exact import Result


class RefusedError(Exception):
    """A peer cannot run a case, or not as what it is; the text says why."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way of a peer to run a case.

    Attributes:
        name: of the kernel or operator.
        run: one repetition, complete when it returns.
        read: what the last ``run`` returned, as numpy arrays.
    """

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Result]
