"""Random attention calls, drawn by Hypothesis."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headscope import masks
from support import oracle

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


NAMES = ("q", "k", "v", "bias", "sinks")


OPTIONS = ("mask", "bias", "scale", "softcap", "sinks", "v_head_dim", "leads", "NaN")


ALL = st.sets(st.sampled_from(OPTIONS), min_size=4)


INT_DTYPES = st.sampled_from((torch.int64, torch.int32))


@dataclass(repr=False)
class Case:
    """One attention, and what is needed to check it."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    mask: masks.Mask | Tensor | None
    seen: Tensor | None
    scale: float | None
    softcap: float | None
    block: int
    gradients: bool

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what Hypothesis prints
        printer.text(repr(self))

    def __repr__(self) -> str:
        said = [f"{each.name}={self._short(getattr(self, each.name))}" for each in fields(self) if each.name != "seen"]
        return f"Case({', '.join(said)})"

    @staticmethod
    def _short(value: object) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        nan = f" {int(value.isnan().sum())} NaN" if value.isnan().any() else ""
        return f"{value.dtype} {list(value.shape)} strides {value.stride()}{nan}"

    @property
    def numbers(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap}

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name in NAMES if (x := getattr(self, name)) is not None}


def sizes_of(case: Case) -> tuple[tuple[int, ...], int, int, int]:
    """Return leading axes, heads, queries and keys."""
    lead = torch.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3])
    return tuple(lead), case.q.shape[-3], case.q.shape[-2], case.k.shape[-2]


@st.composite
def mask_trees(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    """A mask and the predicate it should come to."""
    leaf = st.sampled_from((_bands, _prefixes, _key_lengths, _documents, _dense)).flatmap(
        lambda kind: kind(sizes, random)
    )
    pairs = st.recursive(leaf, lambda part: st.tuples(st.sampled_from("&|"), part, part).map(_combine), max_leaves=4)
    return draw(pairs)


def _combine(parts: Any) -> Any:
    sign, (mask, sees), (other, other_sees) = parts
    if sign == "&":
        return mask & other, oracle.both(sees, other_sees)
    return mask | other, oracle.either(sees, other_sees)


@st.composite
def _bands(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    batch, _, queries, keys = sizes
    left, right = draw(st.none() | st.integers(-2, keys + 1)), draw(st.none() | st.integers(-2, keys + 1))
    numbers = draw(st.lists(st.integers(-queries - 1, keys + 1), min_size=batch, max_size=batch))
    kind = draw(st.sampled_from(("default", "number", "each", "tensor", "number tensor")))
    if kind == "default":
        return masks.Band(left, right), oracle.band(left, right, keys - queries)
    if kind in ("number", "number tensor"):
        number = draw(st.integers(-queries - 1, keys + 1))
        offset: Any = number if kind == "number" else torch.tensor(number)
        return masks.Band(left, right, offset), oracle.band(left, right, number)
    offset = numbers if kind == "each" else torch.tensor(numbers, dtype=draw(INT_DTYPES))
    return masks.Band(left, right, offset), oracle.band(left, right, numbers)


@st.composite
def _prefixes(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    n = draw(st.integers(0, sizes[3] + 1))
    return masks.Prefix(n), oracle.prefix(n)


@st.composite
def _key_lengths(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    lengths = draw(st.lists(st.integers(0, sizes[3] + 1), min_size=sizes[0], max_size=sizes[0]))
    return masks.KeyLengths(torch.tensor(lengths, dtype=draw(INT_DTYPES))), oracle.key_lengths(lengths)


@st.composite
def _documents(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    batch, _, queries, keys = sizes
    ids = []
    for length in (queries, keys):
        rows = draw(st.sampled_from((1, batch)))
        tensor = torch.randint(3, (rows, length), generator=random, dtype=draw(INT_DTYPES))
        ids.append(tensor.sort(-1).values if draw(st.booleans()) else tensor)
    if queries == keys and draw(st.booleans()):
        ids[1] = ids[0]
        return masks.Documents(ids[0]), oracle.documents(*(x.expand(batch, -1).tolist() for x in ids))
    return masks.Documents(*ids), oracle.documents(*(x.expand(batch, -1).tolist() for x in ids))


@st.composite
def _dense(draw: st.DrawFn, sizes: tuple[int, int, int, int], random: torch.Generator) -> Any:
    shape = _repeats(draw, sizes)
    tensor = torch.rand(shape, generator=random) < draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    return masks.Dense(tensor), oracle.dense(tensor, sizes)


def _repeats(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to the sizes: some axes are 1, the first ones may be left out."""
    shape = [draw(st.sampled_from((1, size))) for size in sizes]
    return tuple(shape[draw(st.integers(0, len(shape))) :])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    length = st.integers(0, 9) | st.sampled_from((1, 13))
    said = draw(st.sets(st.sampled_from(OPTIONS), max_size=1) | st.sets(st.sampled_from(OPTIONS), max_size=3) | ALL)
    whole = draw(st.sampled_from(((2,), (1,), (3,), (), (2, 3), (1, 2), (0,))))
    leads = [_repeats(draw, whole) if "leads" in said else whole for _ in "qkv"]
    lead = torch.broadcast_shapes(*leads)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(length), draw(length)
    head_dim = draw(st.sampled_from((1, 2, 3, 5, 8)))
    v_head_dim = draw(st.sampled_from((1, 7))) if "v_head_dim" in said else head_dim
    heads = kv_heads * group
    sizes = (math.prod(lead), heads, queries, keys)
    dtype = draw(st.sampled_from(DTYPES))
    loud = draw(st.sampled_from((0.3, 1.0, 3.0)))

    def made(lead: tuple[int, ...], *last: int) -> Tensor:
        return _strided(draw, (loud * torch.randn(*lead, *last, generator=random)).to(dtype))

    q = made(leads[0], heads, queries, head_dim)
    k = made(leads[1], draw(st.sampled_from((kv_heads, kv_heads, 1))), keys, head_dim)
    v = made(leads[2], kv_heads if k.shape[-3] == 1 else draw(st.sampled_from((kv_heads, 1))), keys, v_head_dim)
    mask, seen = _mask(draw, lead, sizes, random) if "mask" in said else (None, None)
    case = Case(
        q, k, v, None, None, mask, seen,
        scale=draw(st.sampled_from((0.0, 1.0, -0.7, 0.25))) if "scale" in said else None,
        softcap=draw(st.sampled_from((0.5, 2.0, 30.0))) if "softcap" in said else None,
        block=draw(st.sampled_from((1 << 19, 1, 10, 64))),
        gradients=draw(st.booleans()),
    )  # fmt: skip
    if "bias" in said:
        case.bias = _bias(draw, (*(lead or (1,)), *sizes[1:]), dtype, random)
    if "sinks" in said:
        case.sinks = torch.randn(heads, generator=random).to(draw(st.sampled_from((dtype, torch.float32))))
        case.sinks[draw(st.integers(0, heads - 1))] = draw(st.sampled_from((0.0, 3.0, -torch.inf)))
    if "NaN" in said:
        _spoil(draw, case)
    return case


def _mask(
    draw: st.DrawFn, lead: tuple[int, ...], sizes: tuple[int, int, int, int], random: torch.Generator
) -> tuple[masks.Mask | Tensor, Tensor]:
    """A mask, or a boolean tensor with the leading axes as they are, and what it lets through."""
    if draw(st.integers(0, 3)):
        mask, sees = draw(mask_trees(sizes, random))
        return mask, oracle.table(sees, sizes)
    whole = (*(lead or (1,)), *sizes[1:])
    tensor = torch.rand(_repeats(draw, whole), generator=random) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    return tensor, tensor.expand(whole)


def _strided(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The same values with other strides."""
    kind = draw(st.sampled_from(("plain", "plain", "swapped", "columns", "padded", "rows")))
    if kind == "swapped":  # as a projection split into heads
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "columns":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if kind == "padded":  # a part of something wider, NaN beside it
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if kind == "rows" and x.shape[-2]:  # one row for all
        return x[..., :1, :].expand_as(x)
    return x


def _bias(draw: st.DrawFn, sizes: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    shape = _repeats(draw, sizes)
    bias = torch.randn(shape, generator=random)
    hidden = torch.rand(shape, generator=random) < draw(st.sampled_from((0.0, 0.4)))
    return bias.masked_fill(hidden, -torch.inf).to(draw(st.sampled_from((dtype, dtype, torch.float32))))


def _spoil(draw: st.DrawFn, case: Case) -> None:
    """Put NaN into a few places of q, k, v, hidden or not."""
    for name in draw(st.sets(st.sampled_from(("q", "k", "v")), min_size=1)):
        x = getattr(case, name).clone()
        if x.numel():
            x[tuple(draw(st.integers(0, size - 1)) for size in x.shape)] = torch.nan
        setattr(case, name, x)
