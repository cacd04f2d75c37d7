"""The weights of one run from its q, k and lse, piece by piece: the tiles of a recording and of its server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope._support.fingerprint import Fingerprint
from headscope._support.logits import cap_logits, scaled_products

_ROUNDING = 1e-3  # the largest excess of a weight, or of the sum of a row, over 1
_MOST_ROUNDING = 0.01  # of a weight, from the rounding of lse
_ROWS_CHECKED = 8  # of each head
MOST_REST = 2**28
"""The largest number of pairs of a saved mask that spans cannot express."""


class NoWeightsError(ValueError):
    """The weights of a run with retained q and k are not available; the message states why."""


class DamagedFileError(NoWeightsError):
    """A file differs from what was saved; the message names the file and the tensor."""


class Tiles(Protocol):
    """Exact weights p[i0:i1, j0:j1] of a run, [*lead, H, i, j], computed from tensors only."""

    def __call__(self, i0: int, i1: int, j0: int, j1: int, /) -> Tensor: ...

    def to_weights(self) -> KeptWeights: ...


def chosen_run(tiles: Mapping[int, Tiles], runs: int, run: int | None) -> Tiles:
    """Return access to the weights of one of so many runs; None = the last whose q and k were retained.

    Raises:
        ValueError: there is none, or not of this run.
    """
    if not tiles:
        raise ValueError("tile: q and k were not retained; observe with Observe(keep_qk=True)")
    if run is None:
        run = max(tiles)
    if not -runs <= run < runs:
        raise ValueError(f"run: got {run}, expected {-runs} to {runs - 1}")
    if run % runs not in tiles:
        raise ValueError(
            f"run: got {run}, whose q and k were not retained; expected one of {', '.join(map(str, tiles))}"
        )
    return tiles[run % runs]


def weights_of(tiles: Tiles | None) -> KeptWeights:
    """Return the inputs of a layer's ``tiles``.

    Raises:
        NoWeightsError: q and k were not retained; the bias, sinks or mask were overwritten; or the mask is too large.
    """
    if tiles is None:
        raise NoWeightsError("tile: q and k were not retained; observe with Observe(keep_qk=True)")
    return tiles.to_weights()


def weights_if_any(tiles: Tiles | None) -> KeptWeights | None:
    """Return the same, or None instead of the error: a page of many layers continues without this one."""
    try:
        return weights_of(tiles)
    except NoWeightsError:
        return None


def written_to(name: str, shape: Sequence[int]) -> NoWeightsError:
    """Return the error for a tensor that was overwritten after the weights that read it were observed."""
    return NoWeightsError(
        f"tile: {name} [{', '.join(map(str, shape))}] was overwritten after it was observed, so these weights are "
        "gone; read tiles earlier, pass a copy, or save without qk"
    )


def check_within(i: tuple[int, int], j: tuple[int, int], queries: int, keys: int) -> None:
    """Raise unless p[i0:i1, j0:j1] is a piece of the weights.

    Raises:
        ValueError: it is not.
    """
    for names, (start, stop), letter, size in (("i0, i1", i, "Q", queries), ("j0, j1", j, "K", keys)):
        if not 0 <= start <= stop <= size:
            raise ValueError(f"{names}: got {start}, {stop}, expected 0 <= start <= stop <= {size} ({letter})")


@dataclass(frozen=True, eq=False)
class KeptWeights:
    """p[i0:i1, j0:j1] on demand.

    Attributes:
        parts: tensors, or slices of a file that return one when indexed: q [B, H, Q, D], k [B, Hkv, K, D], lse [B, H,
            Q] (inf in rows without visible keys, NaN in rows where a NaN or infinity is visible; float64 if any is
            large), and, if present, spans [B or 1, Q or 1, n, 2], rest and bias [B or 1, H or 1, Q or 1, K or 1]; see
            ``masks.Plan``.
        sizes: of the parts.
        lead: the leading axes, whose product is B.
        scale, softcap: of the logits.
        wide: whether to compute in float64.
        offset: the position of query 0 among the keys; None: the queries are the last ones, at K - Q.
        shared: parts that share memory with the caller's tensors, and their fingerprints.
        unverified: the file and the run, if the parts are, or once were, those of a file without checksums.
    """

    parts: Mapping[str, Any]
    sizes: Mapping[str, tuple[int, ...]]
    lead: tuple[int, ...]
    scale: float
    softcap: float | None
    wide: bool
    offset: int | None = None
    shared: Mapping[str, Fingerprint] = field(default_factory=dict[str, Fingerprint])
    unverified: str | None = None

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor],
        lead: tuple[int, ...],
        scale: float,
        softcap: float | None,
        offset: int | None = None,
    ) -> KeptWeights:
        """Build from tensors."""
        sizes = {name: tuple(x.shape) for name, x in tensors.items()}
        return KeptWeights(tensors, sizes, lead, scale, softcap, tensors["q"].dtype == torch.float64, offset)

    def to_weights(self) -> KeptWeights:
        """Return itself."""
        return self

    @property
    def queries(self) -> int:
        """Q."""
        return self.sizes["q"][2]

    @property
    def keys(self) -> int:
        """K."""
        return self.sizes["k"][2]

    def metadata(self) -> dict[str, Any]:
        """Return all but the tensors, ready for JSON."""
        numbers = {"scale": self.scale, "softcap": self.softcap, "offset": self.offset}
        unverified = {} if self.unverified is None else {"unverified": True}
        return {"parts": [*self.parts], "lead": [*self.lead], **numbers, **unverified}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with whole parts: slices of a file cannot be copied."""
        return {**self.__dict__, "parts": self.tensors()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole parts."""
        return {name: x if isinstance(x, Tensor) else x[:] for name, x in self.parts.items()}

    def __call__(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Return the weights of every batch entry and head, [*lead, H, i, j].

        Raises:
            NoWeightsError: a part that the caller owns was overwritten, or the file that holds the parts is damaged or
                has changed.
        """
        check_within((i0, i1), (j0, j1), self.queries, self.keys)
        batch, heads = self.sizes["q"][:2]
        every = [self._weights_and_hidden(b, h, (i0, i1), (j0, j1)) for b in range(batch) for h in range(heads)]
        pieces = [p.masked_fill(hidden, 0.0) for p, hidden in every]
        p = torch.stack(pieces) if pieces else torch.zeros(0, i1 - i0, j1 - j0, device="cpu")
        return p.reshape(*self.lead, heads, i1 - i0, j1 - j0)  # [*lead, H, i, j]

    def piece(self, b: int, head: int, i: tuple[int, int], j: tuple[int, int]) -> Tensor:
        """Return the weights of one batch entry and head, [i, j]; NaN for masked keys, too."""
        p, hidden = self._weights_and_hidden(b, head, i, j)
        return p.masked_fill(hidden, torch.nan)

    def precise_lse(self, b: int, head: int) -> Tensor:
        """Return lse of one batch entry and head, [Q]; NaN where its rounding would change weights too much."""
        lse = self._part("lse", b, head, slice(None))
        return lse.masked_fill(_is_too_large(lse), torch.nan)

    def checked(self) -> KeptWeights:
        """Return the same with whole parts, for saving; some rows of every head of unverified ones are checked.

        Raises:
            DamagedFileError: a row sums to more than 1.
        """
        whole = replace(self, parts=self.tensors())
        if whole.unverified is None or 0 in (self.queries, self.keys):
            return whole
        rows = {round(n * (self.queries - 1) / (_ROWS_CHECKED - 1)) for n in range(_ROWS_CHECKED)}
        for b, head, i in product(*map(range, self.sizes["q"][:2]), sorted(rows)):
            p = whole.piece(b, head, (i, i + 1), (0, self.keys))
            lse = whole._part("lse", b, head, slice(i, i + 1))[:, None]
            _check_largest(whole.unverified, p.nansum(-1, keepdim=True).log(), lse)
        return whole

    def _weights_and_hidden(self, b: int, head: int, i: tuple[int, int], j: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return weights of one batch entry and head, and the masked keys, whose weights are undefined; both [i, j]."""
        lse = self._part("lse", b, head, slice(*i))[:, None]
        dtype = torch.float64 if self.wide or lse.dtype == torch.float64 else torch.float32
        heads, groups = self.sizes["q"][1], self.sizes["k"][1]
        q = self._part("q", b, head, slice(*i)).to(dtype)
        k = self._part("k", b, head * groups // heads, slice(*j)).to(dtype)
        s = cap_logits(scaled_products(q, k, self.scale, self.softcap), self.softcap)  # [i, j]
        hidden = torch.zeros_like(s, dtype=torch.bool)
        if "bias" in self.parts:
            bias = self._block("bias", b, head, i, j).to(dtype)
            s, hidden = s + bias, hidden | (bias == -torch.inf)
        if "rest" in self.parts:
            hidden = hidden | ~self._block("rest", b, head, i, j)
        if "spans" in self.parts:
            size = self.sizes["spans"]
            rows = slice(*i) if size[1] > 1 else slice(0, 1)
            spans = self.parts["spans"][min(b, size[0] - 1), rows][..., None]  # [i or 1, n, 2, 1]
            at = torch.arange(*j, device=spans.device)
            hidden = hidden | ~((at >= spans[:, :, 0]) & (at < spans[:, :, 1])).any(1)
        log_p = s - lse.to(dtype)
        if self.unverified is not None:
            _check_largest(self.unverified, log_p.masked_fill(hidden, -torch.inf), lse)
        log_p = log_p.masked_fill(_is_too_large(lse), torch.nan)
        return log_p.exp().to(torch.float64 if self.wide else torch.float32), hidden

    def _part(self, name: str, b: int, h: int, at: slice) -> Tensor:
        return self.parts[name][b, h, at]

    def _block(self, name: str, b: int, head: int, i: tuple[int, int], j: tuple[int, int]) -> Tensor:
        """Return a block of a tensor that broadcasts to [B, H, Q, K]."""
        size = self.sizes[name]
        rows, columns = (slice(*at) if n > 1 else slice(0, 1) for at, n in zip((i, j), size[2:], strict=True))
        at = (min(b, size[0] - 1), min(head, size[1] - 1), rows)
        if name in self.shared and not self.shared[name].matches(self.parts[name], at):
            raise written_to("mask" if name == "rest" else name, size)
        return self.parts[name][*at, columns]


def _is_too_large(lse: Tensor) -> Tensor:
    """Return whether the rounding of lse would change weights by more than ``_MOST_ROUNDING``; half precision stays."""
    return lse.isfinite() & (4 * torch.finfo(lse.dtype).eps * lse.abs() > _MOST_ROUNDING) & (lse.dtype.itemsize >= 4)


def _check_largest(origin: str, log_p: Tensor, lse: Tensor) -> None:
    """Raise DamagedFileError if a weight exceeds 1 by more than the rounding of its logit."""
    rounding = (16 * torch.finfo(lse.dtype).eps * lse.abs()).nan_to_num(0.0, posinf=0.0)
    if bool((wrong := log_p > _ROUNDING + rounding).any()):
        raise DamagedFileError(
            f"{origin}: expected weights of at most 1, got {float(log_p[wrong][0].exp()):g}; the file was "
            "changed or damaged since it was saved"
        )
