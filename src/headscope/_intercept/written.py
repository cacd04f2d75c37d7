"""Attention that a module writes out as products and a softmax, found among its operations and reported as a call.

Operations are followed in the first forward pass. After it, only the modules are followed in which such an attention
was found, so a model of fused attention pays nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headscope._dataflow import Follower, WrittenAttention
from headscope._intercept import frames
from headscope._intercept.frames import Frame
from headscope._intercept.intercepted_call import InterceptedCall
from headscope._intercept.masks import HIDDEN, to_rule
from headscope.masks import Mask

IS_ON = False
"""Whether operations are followed. Not yet: some code is recorded wrongly, for example weights that are changed before
dropout, batches that are stacked, and chunks of queries.
"""
MOST_SCORES = 1 << 26  # numbers in scores of single heads that wait for the module around them to end
ROUNDING = 0.9
"""A mask of -1e9 added to a score may be rounded to a little more."""


@dataclass
class SingleHead:
    """An attention of one head, which may be one of several that a loop computes.

    Attributes:
        numbers: those of this attention and of the others whose outputs are concatenated with its own, in their order.
    """

    frame: Frame
    number: int
    attention: WrittenAttention
    numbers: list[int]


def is_to_be_followed(frame: Frame) -> bool:
    """Return whether a watcher of this forward pass wants the operations of a module to be followed."""
    return IS_ON and any(forward.active and forward.follows(name) for forward, name in frame.forwards.values())


@contextmanager
def followed(frame: Frame) -> Generator[None]:
    """Return a context in which the operations of a module are followed."""
    thread = frames.thread
    singles: dict[int, SingleHead] = {}

    def report(attention: WrittenAttention, number: int) -> None:
        inner: Frame = attention.scope[-1]
        for frame in attention.needed_scope[-1:]:
            _note_followed(frame)
        if attention.has_heads:
            inner.see(partial(as_call, attention))
        else:
            single = singles[number] = SingleHead(inner, number, attention, [number])
            inner.single_heads.append(single)

    def join(numbers: list[int]) -> None:
        if not all(number in singles for number in numbers):
            return
        joint = [each for number in numbers for each in singles[number].numbers]
        joint = list(dict.fromkeys(joint))
        for number in joint:
            singles[number].numbers = joint

    follower = Follower(
        list(frame.module.parameters()), lambda: tuple(thread.stack), lambda: thread.stack[-1].quiet, report, join
    )
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


def report_single_heads(frame: Frame, around: Frame | None) -> None:
    """Report the attentions of one head that a module has written out, at its end.

    Those whose outputs were concatenated are the heads of one attention. What is not joined yet may be so in the module
    around it, if each head is a module of its own.
    """
    if not frame.single_heads:
        return
    waiting, frame.single_heads = frame.single_heads, []
    by_number = {single.number: single for single in waiting}
    done: set[int] = set()
    for single in waiting:
        if single.number in done:
            continue
        group = [by_number[number] for number in single.numbers if number in by_number]
        done |= {each.number for each in group}
        if len(group) == 1 and single.frame is frame and around is not None and _has_room(around, single):
            around.single_heads.append(single)
            continue
        where = frame if len(group) > 1 else single.frame
        if len(group) > 1:
            _note_followed(frame)
        for attention in _joined([each.attention for each in group]):
            where.see(partial(as_call, attention))


def _has_room(around: Frame, single: SingleHead) -> bool:
    """Return whether the scores of one more head may wait."""
    return sum(each.attention.scores.numel() for each in (*around.single_heads, single)) <= MOST_SCORES


def _joined(attentions: list[WrittenAttention]) -> list[WrittenAttention]:
    """Return one attention with the heads of all, or all of them if their sizes differ."""
    first = attentions[0]
    if len(attentions) == 1 or any(each.scores.shape != first.scores.shape for each in attentions):
        return attentions
    v, out = (_concatenated(parts) for parts in ([each.v for each in attentions], [each.out for each in attentions]))
    return [replace(first, scores=torch.cat([each.scores for each in attentions], 1), v=v, out=out)]


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
        kind="self" if attention.same_tokens else None,
        out=attention.out,
    )


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
