"""Statistics of this rank's rows against the keys of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headscope._observe import Positions, measure_call, sample
from headscope.masks import Mask
from headscope.parallel._pairs import Options, cut_bias
from headscope.parallel._places import Places
from headscope.parallel._whole_rows import Local, rows_of, whole_keys
from headscope.stats import HeadStats, Observe, merge


def observe_rows(
    options: Options, places: Places, local: Local, lse: Tensor | None, what: Observe, *, has_values: bool = True
) -> HeadStats:
    """Return the statistics of this rank's rows; they merge over ranks to those of the whole sequence.

    Every rank calls it, because keys and values are gathered. Without values there is no ``value_norm``.

    Raises:
        ValueError: an option whose rows cannot be placed, or that does not fit.
    """
    if what.selected is not None and not callable(what.selected):
        raise ValueError(
            "observe: got selected=, whose rows are those of the whole sequence; expected a function of layer, q and "
            "k, or none under context parallelism"
        )
    with torch.no_grad():
        k, v = (whole_keys(places, x.detach()) for x in (local.k, local.v))
        runs = list(rows_of(places)) or [(slice(0, 0), slice(0, 0))]
        parts = [_observe_run(options, local, (k, v if has_values else None), lse, what, run) for run in runs]
    return merge(*parts)


def _observe_run(
    options: Options, local: Local, keys: tuple[Tensor, Tensor | None], lse: Tensor | None, what: Observe,
    run: tuple[slice, slice],
) -> HeadStats:  # fmt: skip
    rows, i = run
    everything = slice(0, options.length)
    mask: Mask | None = None if options.mask is None else options.mask.block(i, everything)
    return measure_call(
        local.q[:, :, rows].detach(), *keys, mask, cut_bias(local.bias, rows, everything), local.sinks,
        options.scale, options.softcap, 0.0, None if lse is None else lse[:, :, rows],
        replace(what, rows=_rows_within(what.rows, i, options.length)),
        Positions(rows_at=(i.start, options.length)),
    )  # fmt: skip


def _rows_within(rows: int | Tensor | None, i: slice, length: int) -> Tensor | None:
    """Return which rows of a run count, from the rows of the whole sequence that do."""
    if rows is None:
        return None
    if isinstance(rows, Tensor):
        return rows if rows.shape[-1] == 1 else rows[..., i]
    counted = torch.zeros(length, dtype=torch.bool)
    counted[list(sample(rows, length))] = True
    return counted[i]
