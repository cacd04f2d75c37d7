"""Attention that a module writes out as products and a softmax, found among its operations and reported as a call.

Operations are followed in the first forward pass in which a module runs. After it, only the modules are followed in
which such an attention was found, so a model of fused attention pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headscope._dataflow import (
    Axis,
    Follower,
    Piece,
    Product,
    Source,
    Tokens,
    WrittenAttention,
    are_of_several_models,
    end_in_others,
    joined_heads,
    same_tokens,
)
from headscope._intercept import frames
from headscope._intercept.frames import Frame
from headscope._intercept.intercepted_call import InterceptedCall, Kind
from headscope._intercept.written_masks import mask_of, with_visible_zeros

MOST_SCORES = 1 << 26  # numbers in scores of single heads that wait for the module around them to end


@dataclass(eq=False)
class PendingAttention:
    """An attention that a module has written out.

    Attributes:
        frame: the module.
        attention: it itself, while it may be one of the heads that a loop computes; None: it has been measured.
        tokens: which tokens its queries are, and its keys.
        heads: the pieces of its axis of heads.
        call: which call of its module it is; 0: not known yet.
        records: functions that record it.
        joint: this attention and the others whose outputs are joined with its own, in their order.
        is_refused: whether it cannot be recorded.
    """

    frame: Frame
    attention: WrittenAttention | None
    tokens: tuple[Tokens, Tokens]
    heads: Axis
    call: int = 0
    records: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    joint: list[PendingAttention] = field(default_factory=list[Any])
    is_refused: bool = False


def is_to_be_followed(frame: Frame) -> bool:
    """Return whether a watcher of this forward pass wants the operations of a module to be followed."""
    for forward, name in frame.forwards.values():  # noqa: SIM110  (a generator takes longer)
        if forward.active and forward.follows(name):
            return True
    return False


@contextmanager
def followed(frame: Frame) -> Generator[None]:
    """Return a context in which the operations of a module are followed, unless it stands for several models."""
    parameters = list(frame.module.parameters())
    if are_of_several_models(parameters):
        yield
        return
    thread = frames.thread
    all_pending: dict[int, PendingAttention] = {}

    def report(attention: WrittenAttention, number: int) -> None:
        inner: Frame = attention.scope[-1]
        # what has changed the order of the tokens may be anywhere around: alone, the module would not show it
        _note_followed(attention.needed_scope[-1] if attention.is_in_order else attention.scope[0])
        tokens = attention.query_tokens, attention.key_tokens
        pending = all_pending[number] = PendingAttention(inner, attention, tokens, attention.heads)
        pending.joint = [pending]
        pending.is_refused = _sources(tokens) in inner.refused
        inner.written.append(pending)
        if attention.heads:
            _measure(pending, attention)

    def join(numbers: list[int], axis: int | None) -> None:
        """Note attentions whose outputs were joined; ``axis``: along which, from the end; None: a new one."""
        if not all(number in all_pending for number in numbers) or axis == -2:  # more queries
            return
        joint: list[PendingAttention] = []
        for number in numbers:
            joint += [each for each in all_pending[number].joint if each not in joint]
        for pending in joint:
            pending.joint = joint

    def is_paused() -> bool:
        stack = thread.stack  # empty in threads of autograd and TorchScript, in which the mode is on, too
        return not stack or stack[-1].quiet

    follower = Follower(
        parameters, lambda: tuple(thread.stack), is_paused, report,
        lambda scope, product: _refuse_product(scope[-1], product), join,
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


def _refuse_product(frame: Frame, product: Product) -> None:
    """Refuse an attention, and with it others of the same tokens in this module: they may be other heads of it."""
    _refuse(frame)
    pairs = [
        _sources((product.row_tokens, product.column_tokens)),
        _sources((product.column_tokens, product.row_tokens)),
    ]
    frame.refused += pairs
    for pending in frame.written:
        pending.is_refused |= pending.frame is frame and _sources(pending.tokens) in pairs


def _measure(pending: PendingAttention, attention: WrittenAttention) -> None:
    """Measure an attention, as a call of its own or as more sequences of one that a loop over a batch computes.

    A loop over something else is refused.
    """
    frame, pending.attention = pending.frame, None
    sources = _sources(pending.tokens)
    others = [each for each in frame.written if each.call and each.frame is frame and _sources(each.tokens) == sources]
    apart = [each for each in others if each.tokens != pending.tokens]
    if apart:
        calls = {each.call for each in others}
        fits = all(_is_loop_of_batch(each, pending) for each in apart)
        if len(apart) < len(others) or len(calls) > 1 or not fits:
            for each in (*others, pending):
                each.is_refused = True
    if pending.is_refused:
        return
    if apart:
        pending.call = apart[0].call
    else:
        frame.calls += 1
        pending.call = frame.calls
    pending.records = frame.measure(partial(as_call, attention), pending.call)


def _sources(tokens: tuple[Tokens, Tokens]) -> tuple[frozenset[Source | None], frozenset[Source | None]]:
    """Return the axes that tokens run along, whichever they are of these."""
    return frozenset(each[0] for each in tokens[0]), frozenset(each[0] for each in tokens[1])


def _is_loop_of_batch(a: PendingAttention, b: PendingAttention) -> bool:
    """Return whether attentions differ in nothing but a selection along an axis that has neither queries nor keys."""
    pieces = [[{each for each in tokens if isinstance(each, Piece)} for tokens in pending.tokens] for pending in (a, b)]
    along = {piece.source for tokens in pieces[0] for piece in tokens}
    moving = {each[0] for x, y in zip(a.tokens, b.tokens, strict=True) for each in x ^ y}
    return pieces[0] == pieces[1] and a.heads == b.heads and not along & moving


def settle(frame: Frame, around: Frame | None) -> None:
    """Record the attentions that a module has written out, at its end.

    Those of one head whose outputs were joined are the heads of one attention. What is not joined yet may be so in the
    module around it, if each head is a module of its own.
    """
    waiting = list(frame.written)
    done: list[PendingAttention] = []
    for pending in waiting:
        if pending in done:
            continue
        group = [each for each in pending.joint if each in waiting]
        done += group
        if len(group) == 1 and pending.attention is not None:
            if pending.frame is frame and around is not None and _has_room(around, pending):
                around.written.append(pending)
                frame.written.remove(pending)
            else:
                _measure(pending, pending.attention)
        elif len(group) > 1:
            _settle_group(group, frame)
    for pending in frame.written:
        if pending.is_refused:
            _refuse(pending.frame)
            continue
        for record in pending.records:
            record()


def _settle_group(group: list[PendingAttention], frame: Frame) -> None:
    """Measure attentions whose outputs were joined: the heads of one, or others, each of its own."""
    first = group[0]
    singles = [each.attention for each in group if each.attention is not None]
    same = [each.tokens == first.tokens for each in group]
    if all(same) and len(singles) == len(group) and _are_heads(group):
        _note_followed(frame)
        if any(each.frame is not first.frame for each in group):
            first.frame = frame
        first.is_refused = any(each.is_refused for each in group)
        for each in group[1:]:
            frame.written.remove(each)
            each.attention = None
        _measure(first, _joined(singles))
        return
    tokens = {each.tokens for each in group}
    if all(each.frame is first.frame for each in group) and len(tokens) < len(group):
        for each in group:  # groups of heads, or heads of several sequences
            each.is_refused = True
    for each in group:
        if each.attention is not None:
            _measure(each, each.attention)


def _are_heads(group: list[PendingAttention]) -> bool:
    """Return whether attentions are of the same size, in one module or in modules of one class."""
    modules = {id(each.frame.module): type(each.frame.module) for each in group}
    if len(set(modules.values())) > 1 or len(modules) != len({id(each.frame) for each in group}):
        return False
    shapes = {each.attention.scores.shape for each in group if each.attention is not None}
    return len(shapes) == 1


def _has_room(around: Frame, pending: PendingAttention) -> bool:
    """Return whether the scores of one more head may wait."""
    waiting = (each.attention.scores.numel() for each in (*around.written, pending) if each.attention is not None)
    return sum(waiting) <= MOST_SCORES


def _joined(attentions: list[WrittenAttention]) -> WrittenAttention:
    """Return one attention with the heads of all."""
    names = ("q", "k", "v", "out", "before")
    return replace(
        attentions[0],
        scores=torch.cat([each.scores for each in attentions], 1),
        sinks=_joined_sinks(attentions),
        has_logits=all(each.has_logits for each in attentions),
        **{name: joined_heads([getattr(each, name) for each in attentions]) for name in names},
    )


def _joined_sinks(attentions: list[WrittenAttention]) -> Tensor | None:
    """Return the logits beside the keys of all heads, [H]; minus infinity for a head without one; None: none has."""
    if all(each.sinks is None for each in attentions):
        return None
    return torch.cat(
        [each.scores.new_full((1,), -math.inf) if each.sinks is None else each.sinks for each in attentions]
    )


def as_call(attention: WrittenAttention) -> InterceptedCall:
    """Return the call of an attention whose scores exist: with no queries and keys, and the scores as its bias."""
    scores = attention.scores.detach()
    is_visibility_known = True
    if attention.from_weights:
        scores, is_visibility_known = with_visible_zeros(scores, attention.before)
    mask, real = mask_of(scores)
    is_shifted = attention.has_logits and attention.has_maximum and scores.numel() > 0 and float(scores.amax()) == 0
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    batch, heads, queries, keys = scores.shape
    kind = _kind(attention)
    return InterceptedCall(
        **(_places(queries, keys, attention.beside, scores.device) if kind == "self" else {}),
        q=scores.new_zeros(batch, heads, queries, 1),
        k=scores.new_zeros(batch, heads, keys, 1),
        v=None if attention.v is None else attention.v.detach().to(scores.dtype),
        mask=mask,
        real=real,
        bias=scores,
        scale=1.0,
        sinks=None if attention.sinks is None else attention.sinks.to(scores.dtype),
        kind=kind,
        out=attention.out,
        has_logits=attention.has_logits and not is_shifted,
        is_visibility_known=is_visibility_known,
        from_exponentials=attention.from_exponentials or is_shifted,
        is_written=True,
        may_be_heads=attention.may_be_heads,
        factors=None if attention.q is None or attention.k is None else (attention.q, attention.k),
    )


def _kind(attention: WrittenAttention) -> Kind | None:
    """Return "self" for the same tokens, "cross" for other parts of them, and None for what may be either.

    Tokens that are not in their order have no positions: "cross", too.
    """
    queries, keys = attention.query_tokens, attention.key_tokens
    if not attention.is_in_order:
        return "cross"
    if same_tokens(queries, keys):
        return "self"
    are_others = end_in_others(keys, attention.scores.shape[-2])
    return "cross" if are_others or (queries and {each[0] for each in queries} == {each[0] for each in keys}) else None


def _places(queries: int, keys: int, beside: int, device: torch.device) -> dict[str, Any]:
    """Return positions for a call some of whose last keys are no tokens: they have none."""
    if not beside:
        return {}
    at = torch.arange(keys - beside, dtype=torch.float64, device=device)
    k_pos = torch.cat([at, at.new_full((beside,), torch.nan)])
    return {"q_pos": at[len(at) - queries :], "k_pos": k_pos, "beside": beside}
