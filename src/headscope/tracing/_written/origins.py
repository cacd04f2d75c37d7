"""What each number of a tape is: of which token and feature, and on which way from queries and keys to an output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from headscope._support.torch_operations import PRODUCTS
from headscope.tracing._written.operations import WRITES, keeps_places
from headscope.tracing._written.tape import At, Event, Tape

NONE, MIXED = -1, -2  # in place of a token or a feature: there is none; there are several
SOFTMAXES = ("_softmax", "_safe_softmax", "softmax")  # the last one with out=
CHANNELS_FIRST = ("conv", "pool", "upsample", "batch_norm", "group_norm")
SUM_TOLERANCE = 1e-3


class Field(IntEnum):
    """What is recorded of each number."""

    PARENT = 0  # the number that an elementwise operation made it from
    TOKEN = 1  # of a score, that of the left operand
    FEATURE = 2
    OTHER_TOKEN = 3  # of a score, those of the right operand
    OTHER_FEATURE = 4
    PRODUCT = 5  # the event of the product of queries and keys
    EXPONENTIAL = 6  # 1 after an exponential of scores
    WEIGHTS = 7  # the number of the softmax
    MIXED_BY = 8  # the event of the product with values


@dataclass(frozen=True)
class Softmax:
    """Weights that sum to one.

    Attributes:
        event: the operation that made them.
        axis: along which they sum to one.
        before: the number of the softmax whose weights it took; None: it took scores.
    """

    event: Event
    axis: int
    before: int | None = None


@dataclass(frozen=True, eq=False)
class Mixing:
    """A product of weights with values.

    Attributes:
        event: the product.
        p: the ids of the weights, [N, Q, K].
        v: those of the values, [N, K, Dv].
        out: those of the result, [N, Q, Dv].
        is_left: whether the weights are the left operand.
    """

    event: Event
    p: Tensor
    v: Tensor
    out: Tensor
    is_left: bool


class Origins:
    """The origins of all numbers of a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.table = torch.full((len(Field), tape.count), NONE)
        self.learned: dict[tuple[int, int], int] = {}
        self.claimed = torch.zeros(tape.count, dtype=torch.bool)
        self.softmaxes: list[Softmax] = []
        self.mixings: list[Mixing] = []
        self.projections: dict[int, Projection] = {}
        self.ancestors: dict[int, frozenset[int]] = {}
        for event in tape.events:
            self._read(event)
            self._note_ancestors(event)

    def of(self, field: Field, ids: Tensor) -> Tensor:
        """Return what is recorded of these numbers."""
        return self.table[field, ids]

    def first(self, field: Field, ids: Tensor) -> int:
        """Return what is recorded of the first of these numbers of which anything is."""
        values = self.table[field, ids].flatten()
        known = values[values >= 0]
        return int(known[0]) if len(known) else NONE

    # ---------------------------------------------------------------- one operation

    def _read(self, event: Event) -> None:
        if event.is_move:
            return
        if event.name in ("input", "outside"):
            self._start_anew(event, event.out)
        elif event.name in PRODUCTS:
            self._read_product(event)
        elif event.name in SOFTMAXES:
            self._read_softmax(event)
        elif event.name == "convolution" and self._read_convolution(event):
            return
        elif self._is_condition(event):
            return  # the result of a comparison continues neither side
        elif keeps_places(event.name) and (main := self._find_main(event)) is not None:
            self._inherit(event, main)
            self._read_exponential(event)
        elif event.depends and event.values.is_floating_point():
            self._start_anew(event, event.out)

    def _is_condition(self, event: Event) -> bool:
        """Return whether numbers are the result of a comparison, or a copy of one as numbers."""
        sources = [event] if event.name != "_to_copy" else self.tape.makers(event.inputs[0])
        return bool(sources) and all(source.values.dtype == torch.bool for source in sources)

    def _start_anew(self, event: Event, ids: Tensor) -> None:
        """Give numbers tokens of their own: the last axis has features, or axis 1 after operations of images."""
        if ids.ndim < 2 or not event.values.is_floating_point():
            return
        axis = 1 if any(part in event.name for part in CHANNELS_FIRST) and ids.ndim > 2 else ids.ndim - 1
        self.table[Field.TOKEN, ids] = ids.narrow(axis, 0, 1).expand(ids.shape)
        other = [slice(None) if at == axis else slice(0, 1) for at in range(ids.ndim)]
        self.table[Field.FEATURE, ids] = ids[tuple(other)].expand(ids.shape)

    def _inherit(self, event: Event, main: Tensor) -> None:
        """Give the numbers of an event what is recorded of those at the same places of an argument."""
        flat, own = main.reshape(-1), slice(event.start, event.start + event.size)
        self.table[:, own] = self.table[:, span_of(flat)]
        self.table[Field.PARENT, own] = flat

    def _find_main(self, event: Event) -> Tensor | None:
        """Return the argument that an elementwise operation continues, in the shape of its result."""
        if event.name in WRITES:
            return self._find_written(event)
        best: tuple[tuple[bool, ...], Tensor] | None = None
        equal: list[Tensor] = []
        for ids in event.inputs:
            spread = _spread(ids, event.out)
            if spread is None or not spread.numel():
                continue
            one = ids.flatten()
            if not bool((self.table[1:, one] >= 0).any()):
                continue
            on_the_way = [bool((self.table[f, one] >= 0).any()) for f in (Field.WEIGHTS, Field.PRODUCT, Field.MIXED_BY)]
            whole = ids.numel() == event.out.numel()
            scored = whole and any(on_the_way[:2])
            rank = (
                scored,
                scored and on_the_way[1] and self._is_of_input(one),
                whole and on_the_way[2],
                whole,
                bool((self.of(Field.TOKEN, one) >= 0).any()),
            )
            if best is None or rank > best[0]:
                best, equal = (rank, spread), []
            if rank == best[0]:
                equal.append(spread)
        if event.name == "where" and len(equal) > 1:
            return min(equal, key=lambda ids: int(ids.max()))  # the earlier one: the other is made from it
        if len(equal) == 2 and event.name in ("add", "sub"):
            return self._find_unclaimed(equal)
        return None if best is None else best[1]

    def _find_unclaimed(self, terms: list[Tensor]) -> Tensor:
        """Return the term that a sum of two numbers of one product continues: a rotation makes two sums of two."""
        roots = [self.roots(ids) for ids in terms]
        makers = [self.tape.makers(ids) for ids in roots]
        if makers[0] != makers[1] or len(makers[0]) != 1 or torch.equal(roots[0], roots[1]):
            return terms[0]
        place = 1 if bool(self.claimed[roots[0]].all()) and not bool(self.claimed[roots[1]].any()) else 0
        self.claimed[roots[place]] = True
        return terms[place]

    def roots(self, ids: Tensor) -> Tensor:
        """Return the numbers that elementwise operations made these from, back to products."""
        while bool(((parents := self.table[Field.PARENT, ids]) > 0).any()):
            ids = torch.where(parents > 0, parents, ids)
        return ids

    def _find_written(self, event: Event) -> Tensor | None:
        """Return the argument that constants are written into; the scores of which a scatter writes a selection."""
        own, *others = event.inputs
        put = [x for x in others if any(maker.values.is_floating_point() for maker in self.tape.makers(x))]
        if not any(self._is_known(x) for x in put):
            return own if self._is_known(own) else None
        if event.name != "scatter" or self._is_known(own) or len(others) != 2:
            return None
        for earlier in reversed(self.tape.events[: event.index]):
            whole = earlier.out
            if whole.shape != own.shape or not earlier.depends or not self._is_scored(whole):
                continue
            if torch.equal(whole.gather(event.arguments[1], event.operands[0]), others[1]):
                return whole
        return None

    def _is_known(self, ids: Tensor) -> bool:
        return bool((self.table[1:, ids] >= 0).any())

    def _is_scored(self, ids: Tensor) -> bool:
        return bool((self.of(Field.PRODUCT, ids) >= 0).all())

    def _read_exponential(self, event: Event) -> None:
        """Note exponentials of scores, and weights: exponentials that sum to one along an axis."""
        out = event.out
        if not bool((self.of(Field.PRODUCT, out) >= 0).all()) or bool((self.of(Field.WEIGHTS, out) >= 0).any()):
            return
        if event.name in ("exp", "exp2"):
            self.table[Field.EXPONENTIAL, out] = 1
        if event.name in ("exp", "exp2", "div", "mul") and bool((self.of(Field.EXPONENTIAL, out) >= 0).all()):
            axis = _axis_of_sums(event.values)
            if axis is not None:
                self._add_softmax(event, axis, None)

    def _read_softmax(self, event: Event) -> None:
        axes = [x for x in event.arguments[1:] if isinstance(x, int) and not isinstance(x, bool)]
        main = event.inputs[0]
        self._inherit(event, main)
        scored = self.of(Field.PRODUCT, main) >= 0
        others = (self.of(Field.TOKEN, main) >= 0) & ~scored  # a sink has no token
        if not bool(scored.any()) or bool(others.any()) or not axes:
            return
        before = self.of(Field.WEIGHTS, main)
        self._add_softmax(event, axes[0] % max(main.ndim, 1), int(before.max()) if bool((before >= 0).all()) else None)

    def _add_softmax(self, event: Event, axis: int, before: int | None) -> None:
        self.table[Field.WEIGHTS, event.out] = len(self.softmaxes)
        self.softmaxes.append(Softmax(event, axis, before))

    # ---------------------------------------------------------------- products

    def _read_product(self, event: Event) -> None:
        places = [at for at in PRODUCTS[event.name](event.arguments) if isinstance(at, At)]
        if len(places) != 2 or event.values.is_complex():
            return
        left, right = (event.inputs[at.number] for at in places)
        left, right, out = (x if x.ndim == 3 else x[None] for x in (left, right, event.out))
        depends = [self._depends(left), self._depends(right)]
        if all(depends):
            self._read_inner_product(event, left, right, out)
        elif depends[0]:
            self._project(event, left, right.transpose(1, 2), out)
        elif depends[1]:
            self._project(event, right.transpose(1, 2), left, out.transpose(1, 2))
        else:  # learned queries, say: from here on like those of an input
            self._project(event, left, right.transpose(1, 2), out)

    def _depends(self, ids: Tensor) -> bool:
        """Return whether numbers depend on the input, or are projections of parameters, as learned queries are."""
        return bool((self.of(Field.TOKEN, ids) >= 0).any()) or any(event.depends for event in self.tape.makers(ids))

    def _is_of_input(self, ids: Tensor) -> bool:
        """Return whether scores are products of two operands that depend on the input."""
        product = self.tape.events[self.first(Field.PRODUCT, ids)]
        operands = product.inputs[-2:]
        return all(any(event.depends for event in self.tape.makers(each)) for each in operands)

    def _project(self, event: Event, rows: Tensor, weights: Tensor, out: Tensor) -> None:
        """Note a product of rows, [N, R, W], with weights, [N, F, W]."""
        token, feature = self._token_of_rows(rows), weights.amin(-1)  # [N, R], [N, F]
        self.table[Field.TOKEN, out] = token[:, :, None].expand(out.shape)
        self.table[Field.FEATURE, out] = feature[:, None].expand(out.shape)
        self.projections[event.index] = Projection(event, rows, weights, out)

    def _token_of_rows(self, rows: Tensor) -> Tensor:
        """Return the token of each row; a row whose numbers are of several is one by itself."""
        token = _common(self.of(Field.TOKEN, rows))
        own = torch.where(token >= 0, token, rows.amin(-1))
        learned = (token < 0) & self._is_constant(rows).all(-1)
        if bool(learned.any()) and not bool(learned.all()):
            own[learned] = self._number_learned(own[learned].tolist())
        return own

    def _number_learned(self, rows: list[int]) -> Tensor:
        """Return tokens of learned or padded rows beside others: the same in each projection, others in each entry."""
        times: dict[int, int] = {}
        tokens: list[int] = []
        for row in rows:
            times[row] = times.get(row, 0) + 1
            tokens.append(self.learned.setdefault((row, times[row]), self.tape.count + len(self.learned)))
        return torch.tensor(tokens)

    def _read_convolution(self, event: Event) -> bool:
        """Note a convolution with kernels of size 1 as a projection; return whether it is one."""
        x, weight = event.inputs[0], event.inputs[1]
        if weight[0, 0].numel() != 1 or event.out[0, 0].numel() != x[0, 0].numel() or weight.shape[1] != x.shape[1]:
            return False
        if not self._depends(x) or self._depends(weight):
            return False
        rows, out = x.flatten(2).transpose(1, 2), event.out.flatten(2).transpose(1, 2)
        self._project(event, rows, weight.flatten(1)[None].expand(len(rows), -1, -1), out)
        return True

    def _read_inner_product(self, event: Event, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Note a product of two operands that depend on the input: of queries with keys, or of weights with values."""
        for is_left, p, v in ((True, left, right), (False, right, left)):
            weights = self.of(Field.WEIGHTS, p)
            is_scored = bool(((self.of(Field.PRODUCT, p) >= 0) | (p == 0)).all()) and self._is_sound(p)
            is_scored = is_scored and not bool((self.of(Field.PRODUCT, v) >= 0).any())
            if (bool((weights >= 0).any()) and bool(((weights >= 0) | self._is_constant(p)).all())) or is_scored:
                p, v, o = (p, v, out) if is_left else (x.transpose(1, 2) for x in (p, v, out))
                self.table[Field.TOKEN, o] = self.query_tokens(p)[:, :, None].expand(o.shape)
                self.table[Field.FEATURE, o] = _common(self.of(Field.FEATURE, v).transpose(1, 2))[:, None].expand(
                    o.shape
                )
                self.table[Field.MIXED_BY, o] = event.index
                self.mixings.append(Mixing(event, p, v, o, is_left))
                return
        q, k = left, right.transpose(1, 2)
        if self._compares_features(q) and self._compares_features(k):
            return  # attention between features, over all positions
        shape = out.shape
        self.table[Field.TOKEN, out] = _common(self.of(Field.TOKEN, q))[:, :, None].expand(shape)
        self.table[Field.FEATURE, out] = self.of(Field.FEATURE, q).amin(-1)[:, :, None].expand(shape)
        self.table[Field.OTHER_TOKEN, out] = _common(self.of(Field.TOKEN, k))[:, None].expand(shape)
        self.table[Field.OTHER_FEATURE, out] = self.of(Field.FEATURE, k).amin(-1)[:, None].expand(shape)
        self.table[Field.PRODUCT, out] = event.index

    def _compares_features(self, rows: Tensor) -> bool:
        """Return whether each row of an operand holds one feature of several tokens."""
        tokens, features = self.of(Field.TOKEN, rows), self.of(Field.FEATURE, rows)
        return bool((features == features[..., :1]).all()) and bool((tokens != tokens[..., :1]).any())

    def _is_constant(self, ids: Tensor) -> Tensor:
        """Return which numbers do not depend on the input."""
        constant = ids == 0
        for event in self.tape.makers(ids):
            if not event.depends:
                constant |= (ids >= event.start) & (ids < event.start + event.size)
        return constant

    def _is_sound(self, p: Tensor) -> bool:
        """Return whether scores are of one token of each operand, so that a product with them mixes values."""
        known = p != 0
        tokens = torch.stack([self.of(Field.TOKEN, p)[known], self.of(Field.OTHER_TOKEN, p)[known]])
        return bool((tokens >= 0).all()) and tokens.numel() > 0

    def query_tokens(self, p: Tensor) -> Tensor:
        """Return the token of each query of weights, [N, Q]; MIXED where there are several."""
        first, second = self.of(Field.TOKEN, p), self.of(Field.OTHER_TOKEN, p)
        return _common(second) if self.is_transposed(p) else _common(first)

    def is_transposed(self, p: Tensor) -> bool:
        """Return whether the queries of weights, [N, Q, K], were the right operand of the product."""
        first, second = _varies(self.of(Field.TOKEN, p)), _varies(self.of(Field.OTHER_TOKEN, p))
        if first == second:  # one key, or an operand with numbers of several tokens: the axes of the product decide
            product = self.first(Field.PRODUCT, p)
            line = [int(x) for x in p[0, 0, :2]] if p.shape[2] > 1 else []
            columns = self.tape.events[product].out.shape[-1]
            roots = [self._root(number) for number in line]
            return len(roots) == 2 and columns > 0 and roots[1] - roots[0] == columns
        return first

    def _root(self, number: int) -> int:
        """Return the score, or other product, that a number was made from."""
        while (parent := int(self.table[Field.PARENT, number])) > 0:
            number = parent
        return number

    # ---------------------------------------------------------------- ancestors

    def _note_ancestors(self, event: Event) -> None:
        """Note the products with values that an event depends on."""
        reached: set[int] = set()
        if event.depends:
            for ids in event.inputs:
                for maker in self.tape.makers(ids):
                    reached |= self.ancestors.get(maker.index, frozenset())
        if self.mixings and self.mixings[-1].event is event:
            reached.add(event.index)
        self.ancestors[event.index] = frozenset(reached)


@dataclass(frozen=True, eq=False)
class Projection:
    """A product of rows with weights of the module.

    Attributes:
        event: the product.
        rows: the ids of what was multiplied, [N, R, W].
        weights: those of the weights, [N, F, W].
        out: those of the result, [N, R, F].
    """

    event: Event
    rows: Tensor
    weights: Tensor
    out: Tensor


def span_of(ids: Tensor) -> Tensor | slice:
    """Return ids that follow each other as a slice, which is much faster to read and write; others as they are."""
    flat = ids.reshape(-1)
    if flat.numel() < 2 or int(flat[-1]) - int(flat[0]) != flat.numel() - 1:
        return flat
    first = int(flat[0])
    return slice(first, first + flat.numel()) if bool((flat.diff() == 1).all()) else flat


def _spread(ids: Tensor, out: Tensor) -> Tensor | None:
    """Return ids in the shape of a result; None if they do not broadcast to it."""
    if ids.ndim == out.ndim - 1 and out.shape[-1] == 2 and ids.shape == out.shape[:-1]:
        ids = ids[..., None]  # real numbers, and complex ones of two parts
    if ids.ndim > out.ndim or any(
        n not in (1, m) for n, m in zip(reversed(ids.shape), reversed(out.shape), strict=False)
    ):
        return None
    return ids.expand(out.shape)


def _common(x: Tensor) -> Tensor:
    """Return the value that is everywhere the same along the last axis; MIXED where there are several."""
    low, high = x.amin(-1), x.amax(-1)
    return torch.where(low == high, low, MIXED)


def _varies(x: Tensor) -> bool:
    """Return whether known values differ along the last axis."""
    known = x >= 0
    high = torch.where(known, x, -1).amax(-1)
    low = torch.where(known, x, torch.iinfo(x.dtype).max).amin(-1)
    return bool(((high > low) & (high >= 0)).any())


def _axis_of_sums(values: Tensor) -> int | None:
    """Return the last axis along which numbers sum to one, or are all 0; None if there is none."""
    x = values.detach().double()
    if not x.numel() or bool((x < 0).any()):
        return None
    for axis in reversed(range(x.ndim)):
        sums = x.sum(axis)
        if bool((((sums - 1).abs() < SUM_TOLERANCE) | (sums == 0) | sums.isnan()).all()) and bool((sums > 0).any()):
            return axis
    return None
