"""Modules that attend by hand in ways that are easily recorded wrongly: each is to be right, or refused.

``ATTACKS`` has a function of q, k, v, [B, H, T, D], for each, which notes the weights that it multiplies, and what is
expected of it: "right": recorded as these weights; "refused": not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Note = Callable[[Tensor], Tensor]
"""Notes weights [B, H, Q, K] and returns them unchanged."""
Own = Callable[[Tensor, Tensor, Tensor, Note], Tensor]


class Attack(NamedTuple):
    own: Own
    expected: Literal["right", "refused"]
    train: bool = False


class Attends(nn.Module):
    """Splits heads, attends by ``own``, and joins them."""

    def __init__(self, own: Own, heads: int = 3, width: int = 15) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.own, self.heads = own, heads
        self.weights: list[Tensor] = []

    def note(self, p: Tensor) -> Tensor:
        self.weights.append(p.detach().double())
        return p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.own(q, 2 * k, v, self.note).transpose(1, 2).flatten(-2))


def later(t: int) -> Tensor:
    return torch.ones(t, t).triu(1).bool()


def renormalised(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1).masked_fill(later(q.shape[-2]), 0.0)
    return note(p / p.sum(-1, keepdim=True)) @ v


def powered(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1) ** 2
    return note(p / p.sum(-1, keepdim=True)) @ v


def gated(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    return note((q @ k.mT).softmax(-1) * q.mean(-1, keepdim=True).sigmoid()) @ v


def gated_then_dropped(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    return F.dropout(note((q @ k.mT).softmax(-1) * q.mean(-1, keepdim=True).sigmoid()), 0.1, True) @ v


def masked_then_dropped(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = (q @ k.mT).masked_fill(later(q.shape[-2]), -1e9)
    return F.dropout(note(s.softmax(-1).masked_fill(later(q.shape[-2]), 0.0)), 0.1, True) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1) - 0.3 * (q.flip(-1) @ k.mT).softmax(-1)
    return note(p) @ v


def averaged(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = 0.5 * ((q @ k.mT).softmax(-1) + (q.flip(-1) @ k.mT).softmax(-1))
    return note(p) @ v


def softmax_one(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    e = (q @ k.mT).exp()
    return note(e / (1 + e.sum(-1, keepdim=True))) @ v


def one_row_changed(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    with torch.no_grad():
        p = p.clone()
        p[:, :, 0] *= 0.5
    return note(p) @ v


def scores_overwritten(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = (q @ k.mT).detach()
    p = s.softmax(-1)
    s.mul_(3.0)
    return note(p) @ v


def scores_overwritten_and_dropped(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = (q @ k.mT).detach()
    p = F.dropout(note(s.softmax(-1)), 0.1, True)
    s.zero_()
    return p @ v


def in_place(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = (q @ k.mT).detach()
    s.sub_(s.amax(-1, keepdim=True)).mul_(0.5).exp_()
    s.div_(s.sum(-1, keepdim=True))
    return note(s) @ v


def shifted_by_queries(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = q @ k.mT
    e = (s - s.amax(-2, keepdim=True)).exp()
    return note(e / e.sum(-1, keepdim=True)) @ v


def shifted_the_wrong_way(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    s = q @ k.mT
    return note((s.amax(-1, keepdim=True) - s).softmax(-1)) @ v


def normalised_over_queries(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    e = (q @ k.mT).exp()
    return note(e / e.sum(-2, keepdim=True)) @ v


def large_epsilon(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    e = (q @ k.mT).exp()
    return note(e / (e.sum(-1, keepdim=True) + 0.1)) @ v


def folded_by_cat(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    """As the first Transformer in Keras folds heads."""
    q, k, v = (torch.cat(x.transpose(1, 2).flatten(-2).split(x.shape[-1], -1), 0) for x in (q, k, v))
    p = (q @ k.mT).softmax(-1)
    note(torch.stack(p.chunk(3, 0), 1))
    return torch.stack((p @ v).chunk(3, 0), 1)


def stacked_heads(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    q, k, v = (torch.stack([each.clone() for each in x.unbind(1)]) for x in (q, k, v))
    p = (q @ k.mT).softmax(-1)
    note(p.transpose(0, 1))
    return (p @ v).transpose(0, 1)


def stacked_batch(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    q, k, v = (torch.stack([each.clone() for each in x]) for x in (q, k, v))
    return note((q @ k.mT).softmax(-1)) @ v


def loop_over_batch(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = [(q[b] @ k[b].mT).softmax(-1) for b in range(len(q))]
    note(torch.stack(p))
    return torch.stack([each @ v[b] for b, each in enumerate(p)])


def loop_over_batch_and_heads(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    outs: list[Tensor] = []
    p: list[Tensor] = []
    for b in range(len(q)):
        for h in range(q.shape[1]):
            p.append((q[b, h] @ k[b, h].mT).softmax(-1))
            outs.append(p[-1] @ v[b, h])
    note(torch.stack(p).unflatten(0, q.shape[:2]))
    return torch.stack(outs).unflatten(0, q.shape[:2])


def chunks_of_queries(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = [(each @ k.mT).softmax(-1) for each in q.split(3, -2)]
    note(torch.cat(p, -2))
    return torch.cat([each @ v for each in p], -2)


def equal_chunks_of_queries(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    q, k, v = q[:, :, :6], k[:, :, :6], v[:, :, :6]
    p = [(each @ k.mT).softmax(-1) for each in q.chunk(2, -2)]
    note(torch.cat(p, -2))
    return F.pad(torch.stack([each @ v for each in p], 2).flatten(2, 3), (0, 0, 0, 1))


def sliced(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    """As diffusers slices batch and heads."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, weights = torch.zeros_like(q), torch.zeros(*q.shape[:2], k.shape[1])
    for n in range(0, len(q), 2):
        p = (q[n : n + 2] @ k[n : n + 2].mT).softmax(-1)
        weights[n : n + 2] = p.detach()
        out[n : n + 2] = p @ v[n : n + 2]
    note(weights.view(*shape[:2], *weights.shape[1:]))
    return out.view(shape)


def permuted_groups(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    """Four heads in two groups, in another order: heads are numbered in the order of their features."""
    q, k, v = (x.unflatten(1, (2, 2)).transpose(1, 2) for x in (q, k, v))
    p = (q @ k.mT).softmax(-1)
    note(p.transpose(1, 2).flatten(1, 2))
    return (p @ v).transpose(1, 2).flatten(1, 2)


def heads_changed_one_by_one(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    used = [p[:, h] * (1.0 if h == 0 else 0.5) for h in range(p.shape[1])]
    note(torch.stack(used, 1))
    return torch.stack([each @ v[:, h] for h, each in enumerate(used)], 1)


def talking(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    """Mixes the weights of heads: rows no longer sum to one."""
    mix = nn.Parameter(torch.linspace(0.1, 1.0, 9).view(3, 3))
    return note(((q @ k.mT).softmax(-1).movedim(1, -1) @ mix).movedim(-1, 1)) @ v


def shared_weights(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    return note((q @ k.mT)[:, :1].softmax(-1).repeat(1, 3, 1, 1)) @ v


def own_keys(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    """Local attention: each query has a window of keys of its own."""
    k, v = (F.pad(x, (0, 0, 1, 1)).unfold(-2, 3, 1).mT for x in (k, v))
    p = (q[..., None, :] @ k.mT).softmax(-1)
    return (note(p) @ v).squeeze(-2)


def weights_of_weights(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return note(p @ p) @ v


def normalised_later(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    e = (q @ k.mT).exp()
    note(e / e.sum(-1, keepdim=True))
    return e @ v / e.sum(-1, keepdim=True)


def groups_of_heads(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = [(q[:, at] @ k[:, at].mT).softmax(-1) for at in (slice(2), slice(2, 4))]
    note(torch.cat(p, 1))
    return torch.cat([p[0] @ v[:, :2], p[1] @ v[:, 2:]], 1)


def chunks_of_keys(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    return note(torch.cat([q @ k[..., :3, :].mT, q @ k[..., 3:, :].mT], -1).softmax(-1)) @ v


def two_values(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    p = note((q @ k.mT).softmax(-1))
    return p @ v + p @ (2 * v)


def repeated_batch(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
    q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    return (note((q @ k.mT).softmax(-1)) @ v)[:2]


ATTACKS: dict[str, Attack] = {
    "renormalised": Attack(renormalised, "right"),
    "powered": Attack(powered, "right"),
    "gated": Attack(gated, "refused"),
    "gated, then dropped": Attack(gated_then_dropped, "refused", train=True),
    "masked, then dropped": Attack(masked_then_dropped, "right", train=True),
    "differential": Attack(differential, "refused"),
    "averaged": Attack(averaged, "right"),
    "softmax one": Attack(softmax_one, "refused"),
    "one row changed": Attack(one_row_changed, "refused"),
    "scores overwritten": Attack(scores_overwritten, "right"),
    "scores overwritten, weights dropped": Attack(scores_overwritten_and_dropped, "refused", train=True),
    "in place": Attack(in_place, "right"),
    "shifted by the largest of another axis": Attack(shifted_by_queries, "right"),
    "shifted the wrong way": Attack(shifted_the_wrong_way, "right"),
    "normalised over queries": Attack(normalised_over_queries, "refused"),
    "a large epsilon": Attack(large_epsilon, "refused"),
    "heads folded by cat": Attack(folded_by_cat, "right"),
    "heads stacked": Attack(stacked_heads, "right"),
    "a batch stacked": Attack(stacked_batch, "right"),
    "a loop over the batch": Attack(loop_over_batch, "right"),
    "a loop over batch and heads": Attack(loop_over_batch_and_heads, "refused"),
    "chunks of queries": Attack(chunks_of_queries, "refused"),
    "equal chunks of queries": Attack(equal_chunks_of_queries, "refused"),
    "slices of batch and heads": Attack(sliced, "refused"),
    "heads in permuted groups": Attack(permuted_groups, "right"),
    "heads changed one by one": Attack(heads_changed_one_by_one, "refused"),
    "heads that talk": Attack(talking, "refused"),
    "heads that share weights": Attack(shared_weights, "right"),
    "keys of each query": Attack(own_keys, "refused"),
    "weights of weights": Attack(weights_of_weights, "refused"),
    "normalised after the product": Attack(normalised_later, "refused"),
    "groups of heads": Attack(groups_of_heads, "refused"),
    "chunks of keys": Attack(chunks_of_keys, "right"),
    "two tensors of values": Attack(two_values, "right"),
    "a batch repeated after the projections": Attack(repeated_batch, "refused"),
}


FOUR_HEADS = {"heads in permuted groups", "groups of heads"}


def attack_module(name: str) -> Any:
    """Return the module of an attack, and its input."""
    attack = ATTACKS[name]
    torch.manual_seed(7)
    heads, width = (4, 28) if name in FOUR_HEADS else (3, 15)
    return Attends(attack.own, heads, width).train(attack.train), torch.randn(2, 7, width)
