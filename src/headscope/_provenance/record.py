"""The record of a forward pass: for each id, the token and the row of weights that a number was made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NONE, MIXED = -1, -2  # in place of a token or a feature: there is none; there are several
SUMMED = -3  # in place of a token: one feature of several tokens, summed with weights, as in Linformer
INPUT, LINEAR, SCORES, HEADS = 1, 2, 3, 4  # kinds of numbers


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
        """``p``, or ``p`` over its sums where the product was divided by the sums instead, as in flash attention."""
        for scale in (torch.ones(1, 1, dtype=torch.float64), *self.scales):
            p = self.p.double() * scale[..., None]
            sums = p.sum(-1)
            rows = sums[sums.isfinite() & (p != 0).any(-1)]
            if len(rows) and bool(((rows - 1).abs() < 1e-4).all()):
                return p
        return self.p.double()


@dataclass(frozen=True)
class Projection:
    """A product of tokens with weights.

    Attributes:
        ids: those of what was multiplied, [N, rows, width].
        factor: by what that was scaled before, in the mean.
        weights: [N, width, features].
        features: a number for each column of the weights, [N, features].
    """

    ids: Tensor
    factor: float
    weights: Tensor
    features: Tensor


@dataclass(frozen=True)
class Operands:
    """The operands of a product of projections.

    Attributes:
        left, right: the ids of both.
        factors: by what each was scaled since it was projected.
        unit: both were brought to length 1 since then.
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
class Provenance:
    """Where the numbers of one forward pass come from.

    Attributes:
        token, other_token: by id, the token a number was made from; of a score, that of the first and second operand.
        feature, other_feature: by id, the row of the weights; of a score, the lowest of each operand's.
        kind: by id, INPUT, LINEAR (projected), SCORES or HEADS (the output of the heads).
        value: of a score, the bare product.
        factor: of a score, by what its operands were scaled between their projections and the product.
        unit: by id, whether the row was brought to length 1; scales from before that no longer count.
        mixings: the products of weights with values, in order.
        projections: the products with weights, in order.
        scales: the last id of scores, and a number that they were multiplied by; in order.
        operands: those of each product of scores, in order.
        fused_calls: how often a fused kernel computed attention.
        averaged_weights: weights, summed or averaged over heads.
        heads_summed: the outputs of the heads were summed over heads, before a projection.
        convolved: a convolution of neighbours was not followed.
        pairs_summed: scores or weights of different pairs of tokens were added.
        tokens_summed: a product was summed over tokens before there were weights.
        out_ids: the ids of the output.
    """

    token: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    other_token: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    feature: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    other_feature: Tensor = field(default_factory=lambda: torch.full((1,), NONE))
    kind: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    value: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    unit: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.bool))
    mixings: list[Mixing] = field(default_factory=list[Mixing])
    projections: list[Projection] = field(default_factory=list[Projection])
    scales: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    operands: list[Operands] = field(default_factory=list[Operands])
    fused_calls: int = 0
    averaged_weights: list[Tensor] = field(default_factory=list[Tensor])
    heads_summed: bool = False
    convolved: bool = False
    pairs_summed: bool = False
    tokens_summed: bool = False
    out_ids: Tensor | None = None

    @property
    def shows_attention(self) -> bool:
        """Whether any product of different tokens was observed: of queries and keys, with values, or a sum."""
        pairs = (self.kind == SCORES) & (self.token != self.other_token)
        return bool(pairs.any()) or bool(self.mixings or self.fused_calls or self.tokens_summed)

    def holds_scores(self, ids: Tensor) -> bool:
        """Whether the latest of these numbers is a score: a product of two projections."""
        return bool(self.kind[ids.max()] == SCORES)

    def holds_heads(self, ids: Tensor) -> bool:
        """Whether all of these numbers are outputs of heads."""
        return bool((self.kind[ids] == HEADS).all())
