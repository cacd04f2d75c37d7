"""Random observations of random calls, with every option."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headscope.stats import Observe, Segments
from support.attention_fuzz import Case, cases, sizes_of
from support.selections import Drawn, selections


@dataclass(repr=False)
class Observed:
    """One observation, and what the oracle has to be told of it."""

    case: Case
    kind: str
    q_pos: Tensor | None
    k_pos: Tensor | None
    what: Observe
    lse: str
    values: bool
    block: int
    selection: Drawn | None

    def __repr__(self) -> str:
        return f"Observed({vars(self)})"

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the tensors of the call; without values, q has their leading axes."""
        given = self.case.tensors()
        if self.values:
            return {**given}
        return {**given, "v": None, "q": self.case.q.expand(*sizes_of(self.case)[0], *self.case.q.shape[-3:])}


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    case = draw(cases())
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    lead, heads, queries, keys = sizes_of(case)
    batch = math.prod(lead)
    q_pos, k_pos = _positions(draw, batch, queries, keys, random)
    tokens = None
    if draw(st.booleans()):
        tokens = torch.randint(3, draw(st.sampled_from(((keys,), (batch, keys)))), generator=random)
    rows: Any = draw(st.sampled_from((None, None, "sample", "mask")))
    if rows == "sample":
        rows = draw(st.integers(1, queries + 2))
    elif rows == "mask":
        shape = draw(st.sampled_from(((queries,), (heads, queries), (*lead, heads, queries), (*lead, 1, queries))))
        rows = torch.rand(shape, generator=random) < 0.6
    kind = draw(st.sampled_from(("self", "self", "cross")))
    selection = draw(st.none() | selections(case))
    what = Observe(
        rows=rows,
        map=draw(st.none() | st.integers(1, 6)),
        edges=draw(st.sampled_from((0, 1, 4, 200))),
        top=draw(st.sampled_from((0, 1, 3, 20))),
        windows=draw(st.sampled_from(((), (0,), (1, 2.5)))),
        first=draw(st.sampled_from((1, 1, 2, 30))),
        tokens=tokens,
        keep_rows=True,
        keep_qk=draw(st.booleans()),
        segments=_segments(draw, batch, queries, keys, kind, random),
        received_max=draw(st.booleans()),
        selected=None if selection is None else selection.selected,
    )
    return Observed(
        case,
        kind,
        q_pos,
        k_pos,
        what,
        draw(st.sampled_from(("none", "own", "other"))),
        draw(st.booleans()),
        draw(st.sampled_from((1 << 19, 1, 10, 64))),
        selection,
    )


def _segments(
    draw: st.DrawFn, batch: int, queries: int, keys: int, kind: str, random: torch.Generator
) -> Segments | None:
    size = draw(st.sampled_from((0, 1, 3, 64)))
    if not size:
        return None

    def ids(length: int) -> Tensor:
        runs = torch.randint(1, 4, (length,), generator=random)  # of equal ids, or none
        shape = draw(st.sampled_from(((length,), (batch, length))))
        drawn = torch.randint(-1, size, shape, generator=random)
        return drawn.repeat_interleave(runs, -1)[..., :length] if draw(st.booleans()) else drawn

    asks = kind == "cross" or draw(st.integers(0, 3)) == 0
    return Segments([f"s{n}" for n in range(size)], ids(keys), ids(queries) if asks else None)


def _positions(
    draw: st.DrawFn, batch: int, queries: int, keys: int, random: torch.Generator
) -> tuple[Tensor | None, Tensor | None]:
    kind = draw(st.sampled_from(("default", "default", "keys", "both", "grid", "each", "queries")))
    if kind == "default":
        return None, None
    if kind == "queries":
        return torch.randint(-1, keys + 2, (queries,), generator=random), None
    if kind == "keys" and queries <= keys:
        return None, torch.randperm(keys + 2, generator=random)[:keys]
    made = []
    for length in (queries, keys):
        shape = {"both": (length,), "keys": (length,), "grid": (length, 2), "each": (batch, length, 1)}[kind]
        at = torch.randint(4, shape, generator=random).double()
        lost = torch.rand(length, generator=random) < draw(st.sampled_from((0.0, 0.3)))
        at[(slice(None), lost) if kind == "each" else lost] = math.nan
        made.append(at)
    return made[0], made[1]
