"""The tap: what a forward pass computes with which token, whoever wrote it.

Beside every tensor there lies a shadow of the same storage: for each number, the id of the number it was made from, and
the factor by which it was scaled since. Views share a storage and so a shadow, which is why a wrong ``view`` shows:
nothing follows the names or the shapes that the code believes in. Three kinds of operations make new ids: a product
with weights (a projection: which token, which row of the weights), a product of projections (scores: which pair of
tokens), and a product of such pairs with projections (what the heads give).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headscope._attend import hook
from headscope._attend.run import run

NONE, MIXED = -1, -2  # instead of a token or a feature: there is none; there are several
LARGEST = 1 << 24  # numbers with an id: beyond that a forward pass is not followed


@dataclass(frozen=True)
class Mixing:
    """A product of weights with values.

    Attributes:
        p: the weights, [N, Q, K]; ``ids`` are theirs, those of scores.
        values: the ids of the values, [N, K, Dv].
        out: the ids of the product, from the first on.
        scales: numbers for each query that the product was multiplied by later, [N, Q] each.
    """

    p: Tensor
    ids: Tensor
    values: Tensor
    out: range
    scales: list[Tensor] = field(default_factory=list[Tensor])

    @property
    def weights(self) -> Tensor:
        """``p``; where what they gave was divided by their sums instead, as in flash attention, ``p`` over these."""
        for scale in (torch.ones(1, 1, dtype=torch.float64), *self.scales):
            p = self.p.double() * scale[..., None]
            sums = p.sum(-1)
            rows = sums[sums.isfinite() & (p != 0).any(-1)]
            if len(rows) and bool(((rows - 1).abs() < 1e-4).all()):
                return p
        return self.p.double()


@dataclass(frozen=True)
class Operands:
    """Of a product of projections: the ids of both, and by what they were scaled since they were projected.

    ``unit``: since they were brought to length 1, both.
    """

    left: Tensor
    right: Tensor
    factors: tuple[float, float]
    unit: bool

    @property
    def width(self) -> int:
        """D"""
        return self.left.shape[-1]


@dataclass
class Seen:
    """What was seen of one forward pass.

    Attributes:
        token, other: by id, the token a number was made from; of a score, that of the first and the second operand.
        feature, second: by id, the row of the weights; of a score, the lowest of its operands'.
        kind: by id, INPUT, LINEAR (projected), SCORES or HEADS (what the heads give).
        value: of a score, the bare product.
        factor: of a score, by what its operands were scaled between their projections and the product.
        unit: by id, whether the row was brought to length 1; what it was scaled by before counts no more.
        scaled: the last id of scores, and a number that they were multiplied by; in order.
        projections: the ids of what was multiplied by weights, [N, rows, width] each.
        fused: how often attention was left to a kernel.
        averaged: weights, summed or averaged over heads.
        summed: what the heads give was summed over heads, before a projection.
        over_tokens: a product summed over tokens before there were weights.
        out_ids: the ids of the output.
    """

    token: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    other: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    feature: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    second: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    kind: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    value: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    unit: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.bool))
    mixings: list[Mixing] = field(default_factory=list[Mixing])
    projections: list[Tensor] = field(default_factory=list[Tensor])
    scaled: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    operands: list[Operands] = field(default_factory=list[Operands])
    fused: int = 0
    averaged: list[Tensor] = field(default_factory=list[Tensor])
    summed: bool = False
    over_tokens: bool = False
    out_ids: Tensor | None = None


INPUT, LINEAR, SCORES, HEADS = 1, 2, 3, 4


class Tap(TorchDispatchMode):
    """Keeps the shadows while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self._shadows: dict[int, tuple[Tensor, Tensor, Any]] = {}
        self._features: dict[Any, int] = {}
        self._next_feature = 0
        self._count = 1

    # ------------------------------------------------------------ shadows

    def ids(self, x: Tensor) -> Tensor | None:
        """The ids of the numbers of a tensor, in its shape; None where nothing is known of it."""
        found = self._shadow(x)
        return None if found is None else found[0]

    def knows_token(self, x: Tensor) -> bool:
        """Whether a tensor is of something that belongs to one token: queries, keys, values, outputs."""
        ids = self.ids(x)
        return ids is not None and bool(ids.any()) and not self._pairs(ids)

    def _shadow(self, x: Tensor, part: int = 0) -> tuple[Tensor, Tensor] | None:
        """Ids and factors; of complex numbers those of the real part, or the imaginary one (part 1)."""
        if not _followed(x):
            return None
        found = self._shadows.get(x.untyped_storage()._cdata)
        if found is None:
            return None
        ids, factors, _ = found
        each = 2 if x.is_complex() else 1  # as many numbers for each
        where = (x.size(), [each * step for step in x.stride()], each * x.storage_offset() + part)
        return ids.as_strided(*where), factors.as_strided(*where)

    def _create(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """A shadow for a tensor that has none; views of it have one then, too."""
        if not _followed(x):
            return None
        storage = x.untyped_storage()
        size = storage.nbytes() // x.element_size() * (2 if x.is_complex() else 1)
        if storage._cdata not in self._shadows:
            if size > LARGEST:
                return None
            ids = torch.zeros(size, dtype=torch.long)
            # the storage is kept, so that no other gets its place in memory
            self._shadows[storage._cdata] = (ids, torch.ones(size, dtype=torch.float64), storage)
        return self._shadow(x)

    def mark(self, x: Tensor, ids: Tensor, factors: Tensor | float = 1.0) -> None:
        """Say what the numbers of a tensor were made from."""
        self._create(x)
        for part in range(2 if x.is_complex() else 1):
            shadow = self._shadow(x, part)
            if shadow is not None:
                shadow[0].copy_(ids)
                shadow[1].copy_(torch.as_tensor(factors, dtype=torch.float64))

    def root(
        self, x: Tensor, kind: int, token: Tensor, feature: Tensor, other: Tensor | None = None,
        second: Tensor | None = None, value: Tensor | None = None, factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """New ids for all numbers of a tensor, with what is known of each."""
        seen, n, first = self.seen, x.numel(), self._count
        if first + n > LARGEST:
            return

        def add(old: Tensor, new: Tensor | None, default: float) -> Tensor:
            more = torch.full((n,), default, dtype=old.dtype) if new is None else new.expand(x.shape).reshape(-1)
            return torch.cat([old, more.to(old.dtype)])

        seen.token, seen.other = add(seen.token, token, NONE), add(seen.other, other, NONE)
        seen.feature, seen.second = add(seen.feature, feature, NONE), add(seen.second, second, NONE)
        seen.kind = add(seen.kind, None, kind)
        seen.value, seen.factor = add(seen.value, value, 0), add(seen.factor, factor, 1)
        seen.unit = add(seen.unit, None, False)
        self._count += n
        self.mark(x, torch.arange(first, first + n).view(x.shape))

    def input(self, x: Tensor, tokens: Tensor) -> None:
        """An input: tokens as x, without the last axis."""
        if self.ids(x) is None:
            self.root(x, INPUT, tokens[..., None], self._numbers("input", x.shape[-1]))

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == _FUSED:
            return self._spelled(func, args, kwargs)
        if _composite(func):  # beneath autograd, where a composed operation comes as it was called
            with self:
                return func.decompose(*args, **kwargs)
        inputs = _tensors(args, kwargs)
        known = [x for x in inputs if x.untyped_storage()._cdata in self._shadows] if inputs else []
        before = None
        if known and name in _PRODUCTS:
            a, b = _PRODUCTS[name](args)
            before = (self._operand(a), self._operand(b))
        out = func(*args, **kwargs)
        if before is not None:
            self._product(out, *before)
        elif name.endswith("_") and not name.startswith("_") and isinstance(out, Tensor):
            self._in_place(name, out, args)
        elif known:
            self._follow(name, func, out, args, kwargs, known)
        elif name in _FACTORIES and isinstance(out, Tensor):
            self._create(out)
        return out

    def _operand(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A copy, with copies of its shadows, all with three axes."""
        shadow = self._shadow(x)
        values = x.detach().clone()
        ids, factors = (None, None) if shadow is None or not shadow[0].any() else (s.clone() for s in shadow)
        three = [None if t is None else t if t.ndim == 3 else t[None] for t in (values, ids, factors)]
        assert three[0] is not None
        return three[0], three[1], three[2]

    def _follow(
        self, name: str, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: list[Tensor]
    ) -> None:
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor) or not _followed(first):
            return
        if first.untyped_storage()._cdata in self._shadows:
            return  # a view
        if name in _MOVES:
            self._moved(func, first, args, kwargs)
        elif name not in _REDUCTIONS:
            self._elementwise(name, first, args, known)
        elif name in ("mean", "sum"):
            self._reduced(first, args)

    def _reduced(self, out: Tensor, args: tuple[Any, ...]) -> None:
        """Weights, or what the heads give, summed over heads."""
        ids = self.ids(args[0])
        if ids is None or not ids.numel() or len(args) < 2 or args[1] is None:
            return
        seen, axes = self.seen, [axis % ids.ndim for axis in (args[1] if isinstance(args[1], list) else [args[1]])]
        if self._pairs(ids):
            if out.ndim >= 2 and out.shape[-2:] == ids.shape[-2:]:
                seen.averaged.append(out)
        elif bool((seen.kind[ids] == HEADS).all()) and ids.ndim - 1 not in axes:
            token, feature = seen.token[ids], seen.feature[ids]
            kept = bool((token.amax(axes) == token.amin(axes)).all())
            seen.summed = seen.summed or (kept and bool((feature.amax(axes) > feature.amin(axes)).any()))

    def _moved(self, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Numbers at other places: the shadows are moved alike."""
        for which, default in ((0, 0), (1, 1)):
            moved = func(*_replaced(args, lambda x, w=which, d=default: self._part(x, w, d)), **kwargs)
            shadow = self._create(out)
            if shadow is not None:
                shadow[which].copy_(moved)

    def _part(self, x: Tensor, which: int, default: int) -> Tensor:
        if not _followed(x):
            return x
        shadow = self._shadow(x)
        kind = torch.long if which == 0 else torch.float64
        return torch.full(x.shape, default, dtype=kind) if shadow is None else shadow[which]

    def _elementwise(self, name: str, out: Tensor, args: tuple[Any, ...], known: list[Tensor]) -> None:
        """Numbers made of those at the same place: of several, what was projected last counts."""
        ids = factors = None
        for x in known:
            shadow = self._shadow(x)
            if shadow is None or not _spreads(x, out):
                continue
            one, scale = (part.expand(out.shape) for part in shadow)
            if ids is None or factors is None:
                ids, factors = one, scale
            else:
                factors = torch.where(one > ids, scale, factors)
                ids = torch.maximum(ids, one)
        if ids is None or factors is None:
            return
        if name == "_safe_softmax":  # torch's attention does without a kernel here, for want of one
            self.seen.fused += 1
        by = _scalar(name, args)
        if by is not None:
            self._note_scale(ids, by)
            factors = factors * by
        self.mark(out, ids, factors)
        if by is None and name in ("mul", "div"):
            self._note_unit(out)
            self._note_rows(name, args)

    def _note_rows(self, name: str, args: tuple[Any, ...]) -> None:
        """What heads give, times or over a number for each query."""
        for x, y in ((args[0], args[1]), (args[1], args[0])) if name == "mul" else ((args[0], args[1]),):
            ids = self.ids(x) if isinstance(x, Tensor) and isinstance(y, Tensor) else None
            if ids is None or not ids.numel() or not _spreads(y, x) or not bool((self.seen.kind[ids] == HEADS).all()):
                continue
            by = y.detach().double().expand(x.shape).reshape(-1)
            by = 1 / by if name == "div" else by
            for mixing in self.seen.mixings:
                first, flat = mixing.out.start, ids.reshape(-1)
                own = (flat >= first) & (flat < mixing.out.stop)
                if not bool(own.any()):
                    continue
                rows, shape = (flat[own] - first) // mixing.values.shape[-1], mixing.p.shape[:2]
                low, high = (
                    torch.full((shape.numel(),), math.nan, dtype=torch.float64).scatter_reduce(
                        0, rows, by[own], way, include_self=False
                    )
                    for way in ("amin", "amax")
                )
                if bool((low == high).any()):
                    mixing.scales.append(torch.where(low == high, low, 1.0).view(shape))

    def _note_unit(self, out: Tensor) -> None:
        """Rows that were brought to length 1, or to that and what they were scaled by before."""
        shadow = self._shadow(out)
        if shadow is None or not out.is_floating_point() or out.ndim < 2:
            return
        ids, factors = shadow
        length = out.detach().double().norm(dim=-1, keepdim=True)
        for scaled in (torch.ones_like(factors), factors.clone()):
            if bool(((length - scaled).abs() < 1e-5 * scaled).all()):
                self.seen.unit[ids] = True
                factors.copy_(scaled)
                return

    def _note_scale(self, ids: Tensor, by: float) -> None:
        last = int(ids.max()) if ids.numel() else 0
        if last and by != 1.0 and self.seen.kind[last] == SCORES:
            self.seen.scaled.append((last, by))

    def _in_place(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        """The shadow of a tensor that was written to."""
        by = _scalar(name[:-1], args)
        others = [x for x in _tensors(args[1:], {}) if self.ids(x) is not None]
        shadow = self._shadow(out)
        if shadow is None:
            if not others:
                return
            shadow = self._create(out)
        if shadow is None:
            return
        if by is not None:
            self._note_scale(shadow[0], by)
            shadow[1].mul_(by)
        elif name in ("mul_", "div_") and not others:
            self._note_unit(out)
            self._note_rows(name[:-1], args)
        elif name in ("zero_", "normal_", "uniform_"):
            shadow[0].zero_()
        elif name == "copy_":
            source = self._shadow(args[1])
            shadow[0].copy_(torch.zeros(1, dtype=torch.long) if source is None else source[0])
            shadow[1].copy_(torch.ones(1, dtype=torch.float64) if source is None else source[1])
        elif name == "index_put_" and others:
            source = self._shadow(args[2])
            if source is not None:
                for part, new in zip(shadow, source, strict=True):
                    part.index_put_(list(args[1]), new)
        elif name not in ("masked_fill_", "fill_", "index_put_"):
            for x in others:
                if _spreads(x, out):
                    shadow[0].copy_(torch.maximum(shadow[0], self._part(x, 0, 0).expand(out.shape)))

    def _spelled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's fused attention: its results, and its steps by definition, so that they are seen."""
        self.seen.fused += 1
        _, *rest = func(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False))
        with self:
            return (_attend(**given, **kwargs), *rest)

    # ------------------------------------------------------------ products

    def _product(self, out: Tensor, left: Any, right: Any) -> None:
        (a, a_ids, a_by), (b, b_ids, b_by) = left, right
        three = out if out.ndim == 3 else out[None]
        if a_ids is None or b_ids is None:
            if a_ids is not None:
                self._project(three, a_ids, b)
            elif b_ids is not None:  # weights @ xᵀ
                self._project(three.transpose(1, 2), b_ids.transpose(1, 2), a.transpose(1, 2))
            return
        pair_a, pair_b = self._pairs(a_ids), self._pairs(b_ids)
        if pair_a and not pair_b:
            self._mix(three, a, a_ids, b_ids)
        elif pair_b and not pair_a:
            turned = (x.transpose(1, 2) for x in (three, b, b_ids, a_ids))
            self._mix(*turned)
        elif not pair_a:
            self._score(three, (a, a_ids, a_by), (b, b_ids, b_by))

    def _pairs(self, ids: Tensor) -> bool:
        return bool(self.seen.kind[ids.max()] == SCORES)

    def _project(self, out: Tensor, ids: Tensor, weights: Tensor) -> None:
        """A product with weights, [N, rows, width] @ [N, width, features]."""
        if self._pairs(ids):
            return
        token = _uniform(self.seen.token[ids], -1)[..., None]  # [N, rows, 1]
        self.root(out, LINEAR, token, self._features_of(weights)[:, None])
        self.seen.projections.append(ids)

    def _features_of(self, weights: Tensor) -> Tensor:
        """A number for each column of each weights [N, width, features]: equal columns have equal numbers."""
        n, width, features = weights.shape
        probe = torch.linspace(1, 2, width, dtype=weights.dtype).cos()
        prints = (probe @ weights).double()  # [N, features]
        numbers = torch.empty(n, features, dtype=torch.long)
        for i in range(n):
            numbers[i] = self._numbers((width, tuple(round(x, 7) for x in prints[i, :64].tolist())), features)
        return numbers

    def _numbers(self, key: Any, count: int) -> Tensor:
        """So many numbers in a row that nothing else has; the same for the same key."""
        if (key, count) not in self._features:
            self._features[key, count] = self._next_feature
            self._next_feature += count
        return self._features[key, count] + torch.arange(count)

    def _score(self, out: Tensor, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
        """A product of what was made of tokens, [N, rows, D] @ [N, D, columns]."""
        seen = self.seen
        (a, a_ids, a_by), (b, b_ids, b_by) = left, right
        u, w = _uniform(seen.token[a_ids], -1), _uniform(seen.token[b_ids], 1)  # [N, rows], [N, columns]
        if bool((u == MIXED).all()) and bool((w == MIXED).all()):
            seen.over_tokens = True  # summed over tokens, not over features: linear attention, say
            return
        fu, fw = seen.feature[a_ids].amin(-1), seen.feature[b_ids].amin(1)
        by = a_by.amax(-1)[..., None] * b_by.amax(1)[:, None]
        raw = a.double() @ b.double()
        spread = (u[..., None], fu[..., None], w[:, None], fw[:, None])
        self.root(out, SCORES, spread[0], spread[1], spread[2], spread[3], raw, by)
        unit = bool(seen.unit[a_ids].all()) and bool(seen.unit[b_ids].all())
        seen.operands.append(Operands(a_ids, b_ids, (float(a_by.amax()), float(b_by.amax())), unit))

    def _mix(self, out: Tensor, p: Tensor, p_ids: Tensor, v_ids: Tensor) -> None:
        """A product of weights with values, [N, Q, K] @ [N, K, Dv]."""
        seen = self.seen
        seen.mixings.append(Mixing(p, p_ids, v_ids, range(self._count, self._count + out.numel())))
        along = seen.token[p_ids]
        token = _uniform(along, -1)
        if bool((token == MIXED).any()):  # the second operand of the scores was the queries'
            token = _uniform(seen.other[p_ids], -1)
        feature = _uniform(seen.feature[v_ids], 1)
        self.root(out, HEADS, token[..., None], feature[:, None])


# ---------------------------------------------------------------- helpers


def _followed(x: Tensor) -> bool:
    return x.layout is torch.strided and (x.is_floating_point() or x.is_complex())


@functools.cache
def _composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, Tensor)]
    return found


def _replaced(args: Any, part: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(args, Tensor):
        return part(args)
    if isinstance(args, (list, tuple)):
        return type(args)(_replaced(x, part) for x in args)
    return args


def _spreads(x: Tensor, out: Tensor) -> bool:
    """Whether x has a number for each number of out, or one for several along an axis."""
    if x.ndim > out.ndim:
        return False
    return all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(out.shape), strict=False))


def _uniform(x: Tensor, axis: int) -> Tensor:
    """The value that is everywhere the same along an axis; MIXED where there are several."""
    low = x.amin(axis)
    return torch.where(low == x.amax(axis), low, MIXED)


def _scalar(name: str, args: tuple[Any, ...]) -> float | None:
    """By what a product or quotient with one number scales."""
    if name not in ("mul", "div", "multiply", "divide", "true_divide") or len(args) < 2:
        return None
    first, second = args[0], args[1]
    if name == "mul" and isinstance(first, Tensor) and first.numel() == 1 and isinstance(second, Tensor):
        first, second = second, first
    alone = isinstance(second, (int, float)) or (isinstance(second, Tensor) and second.numel() == 1)
    by = float(second) if alone else 0.0
    if not by or not math.isfinite(by):
        return None
    return by if name in ("mul", "multiply") else 1 / by


_PRODUCTS: dict[str, Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]] = {
    "mm": lambda args: (args[0], args[1]),
    "bmm": lambda args: (args[0], args[1]),
    "addmm": lambda args: (args[1], args[2]),
    "baddbmm": lambda args: (args[1], args[2]),
}
_MOVES = {
    *("clone", "_to_copy", "cat", "stack", "index_select", "index", "gather", "repeat", "flip", "roll", "copy"),
    *("constant_pad_nd", "_reshape_copy", "contiguous", "expand_copy", "slice_copy", "select_copy"),
}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "logsumexp", "norm", "linalg_vector_norm", "var", "std", "argmax"),
    *("prod", "any", "all", "mv", "dot", "addmv", "convolution", "cumsum", "sort", "topk", "embedding"),
}
_FUSED = "_scaled_dot_product_flash_attention_for_cpu"
_FACTORIES = {"empty", "zeros", "full", "new_zeros", "new_empty", "zeros_like", "empty_like", "new_full", "ones"}


# ---------------------------------------------------------------- torch's attention, spelled out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.scaled_dot_product_attention``, a row that sees nothing being zero, as there."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (key, value))  # [B, H, K, D]
    s = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = None
    if is_causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    p = torch.softmax(s, -1)
    p = p.masked_fill((s == -math.inf).all(-1, keepdim=True), 0)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ value


@contextmanager
def headscope_spelled() -> Generator[list[int]]:
    """Our own attention by its definition while this is open; the list gets an entry for each call."""
    calls = list[int]()

    def attend(
        q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any,
        scale: Any, softcap: Any, dropout: Any, lse: Any, backend: Any, /,
    ) -> Any:  # fmt: skip
        calls.append(1)
        return run(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, "reference")

    with hook.intercepting(attend):
        yield calls
