"""Attention that a module writes out as products and a softmax, found among its operations and reported as a call.

Operations are followed in the first forward pass in which a module runs. After it, only the modules are followed in
which such an attention was found, so a model of fused attention pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from headscope._dataflow import Follower, Piece, Source, Tokens, WrittenAttention, same_tokens
from headscope._intercept import frames
from headscope._intercept.frames import Frame
from headscope._intercept.intercepted_call import InterceptedCall, Kind
from headscope._intercept.masks import HIDDEN, to_rule
from headscope.masks import Mask

MOST_SCORES = 1 << 26  # numbers in scores of single heads that wait for the module around them to end
ROUNDING = 0.9
"""A mask of -1e9 added to a score may be rounded to a little more."""


@dataclass
class Found:
    """An attention that a module has written out.

    Attributes:
        frame: the module.
        number: that of the attention, among those of this pass.
        attention: it itself, while it may be one of the heads that a loop computes; None: it has been measured.
        tokens: which tokens its queries are, and its keys.
        call: which call of its module it is; 0: not known yet.
        records: functions that record it.
        joint: the numbers of this attention and of the others whose outputs are joined with its own, in their order.
        is_refused: whether it cannot be recorded.
    """

    frame: Frame
    number: int
    attention: WrittenAttention | None
    tokens: tuple[Tokens, Tokens]
    call: int = 0
    records: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    joint: list[int] = field(default_factory=list[int])
    is_refused: bool = False


def is_to_be_followed(frame: Frame) -> bool:
    """Return whether a watcher of this forward pass wants the operations of a module to be followed."""
    return any(forward.active and forward.follows(name) for forward, name in frame.forwards.values())


@contextmanager
def followed(frame: Frame) -> Generator[None]:
    """Return a context in which the operations of a module are followed."""
    thread = frames.thread
    all_found: dict[int, Found] = {}

    def report(attention: WrittenAttention, number: int) -> None:
        inner: Frame = attention.scope[-1]
        _note_followed(attention.needed_scope[-1])
        found = Found(inner, number, attention, (attention.query_tokens, attention.key_tokens), joint=[number])
        all_found[number] = found
        if attention.has_heads:
            _measure(found, attention)
        inner.written.append(found)

    def join(numbers: list[int], axis: int | None) -> None:
        """Note attentions whose outputs were joined; ``axis``: along which, from the end; None: a new one."""
        if not all(number in all_found for number in numbers) or axis not in (-1, None):
            return
        joint = list(dict.fromkeys(each for number in numbers for each in all_found[number].joint))
        for number in joint:
            all_found[number].joint = joint

    follower = Follower(
        list(frame.module.parameters()), lambda: tuple(thread.stack), lambda: thread.stack[-1].quiet, report,
        lambda scope: _refuse(scope[-1]), join,
    )  # fmt: skip
    thread.follower = follower
    try:
        with follower:
            yield
    finally:
        thread.follower = None
        follower.drop()


def _note_followed(frame: Frame) -> None:
    for forward, name in frame.forwards.values():
        if forward.active:
            forward.note_followed(name)


def _refuse(frame: Frame) -> None:
    """Note that a module has written out an attention that is not recorded."""
    for forward, name in frame.forwards.values():
        if forward.active:
            forward.note_refused(name)


def _measure(found: Found, attention: WrittenAttention, frame: Frame | None = None) -> None:
    """Measure an attention, as a call of its own or as more sequences of one that a loop over a batch computes."""
    frame = found.frame if frame is None else frame
    found.attention = None
    for other in frame.written:
        if other is not found and other.call and _is_loop(other, found):
            found.call = other.call
            if other.is_refused or not _is_loop_of_batch(other, found):
                other.is_refused = found.is_refused = True
                return
    if not found.call:
        frame.calls += 1
        found.call = frame.calls
    found.records = frame.measure(partial(as_call, attention), found.call)


def _is_loop(a: Found, b: Found) -> bool:
    """Return whether two attentions are of other parts of the same tokens."""
    return a.tokens != b.tokens and _sources(a) == _sources(b)


def _sources(found: Found) -> list[set[Source | None]]:
    return [{each[0] for each in tokens} for tokens in found.tokens]


def _is_loop_of_batch(a: Found, b: Found) -> bool:
    """Return whether two attentions differ in what was selected along an axis that has neither queries nor keys."""
    pieces = [[{each for each in tokens if isinstance(each, Piece)} for tokens in found.tokens] for found in (a, b)]
    along = {piece.source for piece in (*pieces[0][0], *pieces[0][1])}
    moving = {source for x, y in zip(a.tokens, b.tokens, strict=True) for source, *_ in x ^ y}
    return pieces[0] == pieces[1] and not along & moving


def settle(frame: Frame, around: Frame | None) -> None:
    """Record the attentions that a module has written out, at its end.

    Those of one head whose outputs were joined are the heads of one attention. What is not joined yet may be so in the
    module around it, if each head is a module of its own.
    """
    waiting = list(frame.written)
    by_number = {found.number: found for found in waiting}
    done: set[int] = set()
    for found in waiting:
        if found.number in done:
            continue
        group = [by_number[number] for number in found.joint if number in by_number]
        done |= {each.number for each in group}
        if len(group) == 1 and found.attention is not None:
            if found.frame is frame and around is not None and _has_room(around, found):
                around.written.append(found)
                frame.written.remove(found)
            else:
                _measure(found, found.attention)
        elif len(group) > 1:
            _settle_group(group, frame)
    for found in frame.written:
        if found.is_refused:
            _refuse(found.frame)
            continue
        for record in found.records:
            record()


def _settle_group(group: list[Found], frame: Frame) -> None:
    """Measure attentions whose outputs were joined."""
    first = group[0]
    same = all(each.tokens == first.tokens for each in group)
    singles = [each.attention for each in group if each.attention is not None]
    if len(singles) < len(group) and same and all(each.frame is first.frame for each in group):
        for each in group:  # groups of heads
            each.is_refused = True
    elif len(singles) == len(group) and same and _are_heads(group):
        _note_followed(frame)
        own = first.frame if all(each.frame is first.frame for each in group) else frame
        for each in group[1:]:
            frame.written.remove(each)
        first.frame = own
        _measure(first, _joined(singles))
        return
    for each in group:
        if each.attention is not None:
            _measure(each, each.attention)


def _are_heads(group: list[Found]) -> bool:
    """Return whether attentions are of the same size, in one module or in modules of one class."""
    first = group[0]
    if any(type(each.frame.module) is not type(first.frame.module) for each in group):
        return False
    shapes = {each.attention.scores.shape for each in group if each.attention is not None}
    return len(shapes) == 1


def _has_room(around: Frame, found: Found) -> bool:
    """Return whether the scores of one more head may wait."""
    waiting = (each.attention.scores.numel() for each in (*around.written, found) if each.attention is not None)
    return sum(waiting) <= MOST_SCORES


def _joined(attentions: list[WrittenAttention]) -> WrittenAttention:
    """Return one attention with the heads of all."""
    first = attentions[0]
    v, out = (_concatenated(parts) for parts in ([each.v for each in attentions], [each.out for each in attentions]))
    return replace(first, scores=torch.cat([each.scores for each in attentions], 1), v=v, out=out)


def _concatenated(parts: list[Tensor | None]) -> Tensor | None:
    """Return tensors [B, 1, …] of several heads as one; None if one is missing, or their sizes differ."""
    tensors = [part for part in parts if part is not None]
    same = len(tensors) == len(parts) and all(part.shape == tensors[0].shape for part in tensors)
    return torch.cat(tensors, 1) if same else None


def as_call(attention: WrittenAttention) -> InterceptedCall:
    """Return the call of an attention whose scores exist: with no queries and keys, and the scores as its bias."""
    scores = attention.scores.detach()
    mask = _mask(scores)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    batch, heads, queries, keys = scores.shape
    return InterceptedCall(
        q=scores.new_zeros(batch, heads, queries, 1),
        k=scores.new_zeros(batch, heads, keys, 1),
        v=None if attention.v is None else attention.v.detach().to(scores.dtype),
        mask=mask,
        bias=scores,
        scale=1.0,
        sinks=None if attention.sinks is None else attention.sinks.to(scores.dtype),
        kind=_kind(attention),
        out=attention.out,
        has_logits=attention.has_logits,
    )


def _kind(attention: WrittenAttention) -> Kind | None:
    """Return "self" for the same tokens, "cross" for other parts of them, and None for what may be either."""
    queries, keys = attention.query_tokens, attention.key_tokens
    if same_tokens(queries, keys):
        return "self"
    return "cross" if queries and {each[0] for each in queries} == {each[0] for each in keys} else None


def _mask(scores: Tensor) -> Mask | None:
    """Return the mask that scores show: what is at or below -1e9, or below half of the dtype's least number."""
    limit = max(ROUNDING * HIDDEN, torch.finfo(scores.dtype).min / 2)
    if 0 in scores.shape or float(scores.amin()) > limit:
        return None
    visible = scores > limit
    if torch.equal(visible, visible[:, :1].expand_as(visible)):
        visible = visible[:, :1]
    known = frames.thread.written_masks.get(visible.shape)  # most layers have the mask of the one before
    if known is None or not torch.equal(known[0], visible):
        known = frames.thread.written_masks[visible.shape] = (visible, to_rule(visible))
    return known[1]
