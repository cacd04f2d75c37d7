"""``context``: within it, attention of headscope is attention over a sequence that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headscope._attend import context as attending
from headscope._observe import Positions
from headscope._support.arguments import check_type, shapes
from headscope.masks import Mask
from headscope.parallel._agreement import check_agreement, is_known_to_all_ranks
from headscope.parallel._context_attention import How, attend_parts, check_how, check_parts, in_group
from headscope.parallel._observe_rows import observe_rows
from headscope.parallel._places import Places
from headscope.stats import HeadStats, Observe


@contextmanager
def context(group: dist.ProcessGroup | None, places: Places, how: How = "gather") -> Generator[None]:
    """Attend over a whole sequence, of which each rank of a group holds a part, within the block.

    ``MultiHeadAttention``, and ``attention`` and ``attend``, then take this rank's part of the sequence, and the mask
    of the whole one; see ``context_attention``. A module rotates queries and keys, and adds a bias by distance, by
    their places in the sequence. ``watch``, ``observe`` and ``observe=`` record this rank's rows against all keys:
    ``recording.stats.gather(group, axis="rows")`` joins the ranks.

    Args:
        group: the process group; None = that of ``places``.
        places: which positions of the sequence each rank holds.
        how: "gather", "ring" or "heads", as for ``context_attention``.

    Not supported, with an error that says so: a context, a cache, ``need_weights``, nested tensors, and torch.compile.

    Raises:
        ValueError: the group is not that of the places, or ``how`` is unknown.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, masks, parallel
        >>> places = parallel.Places.head_tail(6)  # one process holds the whole sequence
        >>> with parallel.context(None, places):
        ...     out = MultiHeadAttention(8, 2)(torch.randn(1, 6, 8), mask=masks.causal())
        >>> out.shape
        torch.Size([1, 6, 8])
    """
    check_type("places", places, Places, "headscope.parallel.Places")
    with attending.within(_Active(in_group(places, group), check_how(how))):
        yield


@dataclass
class _Active:
    """Attention over a sequence that is spread over ranks; a ``headscope._attend.context.Context``."""

    places: Places
    how: How
    entered: bool = False

    def share(self, run: Callable[[], Any]) -> Any:
        self.entered = True
        try:
            return run()
        except (TypeError, ValueError) as error:
            if not is_known_to_all_ranks(error):
                check_agreement("context_attention", error, 0, self.places.group)
            raise
        finally:
            self.entered = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        scale: float | None, softcap: float | None, dropout: float, backend: str | None, /,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        options = (mask, bias, sinks, scale, softcap, dropout, backend)
        out, lse, _ = attend_parts((q, k, v), *options, places=self.places, how=self.how)
        return out, lse

    def measure(
        self, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None,
        sinks: Tensor | None, scale: float | None, softcap: float | None, lse: Tensor | None, what: Observe,
        positions: Positions, /,
    ) -> HeadStats:  # fmt: skip
        placed = (positions.q_pos, positions.k_pos, positions.real, positions.rows_at)
        if positions.kind != "self" or any(x is not None for x in placed):
            raise ValueError(
                'observe: got positions or kind="cross", expected self-attention with default positions under '
                "context parallelism, which places rows and keys itself"
            )
        values = k[..., :1] if v is None else v
        local, options = check_parts((q, k, values), mask, bias, sinks, (scale, softcap, 0.0, None), self.places)
        what = what if what.tokens is None else replace(what, tokens=self._tokens(what.tokens))
        rows = None if lse is None else lse.detach().reshape(*local.q.shape[:3])
        return observe_rows(options, self.places, local, rows, what, has_values=v is not None)

    def _tokens(self, tokens: Tensor) -> Tensor:
        """Return the ids of all tokens, from those of this rank or from all."""
        own, length = self.places.lengths[self.places.rank], self.places.length
        if tokens.shape[-1] == length:
            return tokens
        if tokens.shape[-1] != own:
            raise ValueError(
                f"tokens: axis {tokens.ndim - 1} is {tokens.shape[-1]}, expected {own}, the part of this rank, or "
                f"{length}, the whole sequence; {shapes(tokens=tokens)}"
            )
        return self.places.join(tokens, -1)

    def positions(self, device: torch.device) -> Tensor:
        return self.places.positions(device)

    def positions_of_keys(self, positions: Tensor) -> Tensor:
        return self.places.join(positions, -1)
