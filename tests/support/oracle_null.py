"""What chance gives, by its definition: float64, dense, one pair at a time. Nothing of headscope is imported here.

Every quantity with a null is linear in the weights of a row, so its factor of key j is its value for the row that has
all its weight on key j. Exchanging the n weights at random among the n keys gives a sum of factors of known mean and
variance (sampling without replacement); ``by_all_orders`` goes through all n! orders instead.
"""

from __future__ import annotations

import itertools
import math
import statistics

import torch
from torch import Tensor

from support.oracle_observe import Asked, observe_by_definition, own_key, quantities

NAMES = ("first", "distance", "self", "previous", "next", "window", "streaming", "duplicate", "induction")


def has_null(name: str) -> bool:
    return name.partition("_")[0] in NAMES


def of_row(weights: list[float], factors: list[float]) -> tuple[float, float]:
    """Mean and variance of Σ p a over all orders of the weights."""
    n = len(weights)
    mean_p, mean_a = math.fsum(weights) / n, math.fsum(factors) / n
    uneven = math.fsum((p - mean_p) ** 2 for p in weights) * math.fsum((a - mean_a) ** 2 for a in factors)
    return math.fsum(weights) * mean_a, uneven / (n - 1) if n > 1 else 0.0


def by_all_orders(weights: list[float], factors: list[float]) -> tuple[float, float]:
    """The same, from every order."""
    sums = [math.fsum(p * a for p, a in zip(order, factors, strict=True)) for order in itertools.permutations(weights)]
    return statistics.fmean(sums), statistics.pvariance(sums)


def nulls(asked: Asked) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """name -> mean, standard deviation and scale of each head, [H]; scale bounds what rounding of p can change."""
    seen = observe_by_definition(asked)
    heads, keys_in_all = asked.p.shape[1], asked.p.shape[3]
    result: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, values in seen.rows.items():
        if not has_null(name):
            continue
        sums = torch.zeros(3, heads, dtype=torch.float64)
        for b, h, i in (~values.isnan()).nonzero().tolist():
            keys = [j for j in range(keys_in_all) if asked.seen[b, h, i, j]]
            real = [j for j in range(keys_in_all) if bool(asked.seen[b, :, :, j].any())]
            own = own_key(asked, b, i, real)
            factors = []
            for j in keys:
                row = {each: float(each == j) for each in keys}
                factors.append(quantities(asked, (b, h, i), row, own, real)[name])
            weights = [float(asked.p[b, h, i, j]) for j in keys]
            mean, variance = of_row(weights, factors)
            even = math.fsum(p * p for p in weights) * statistics.pvariance(factors) * len(keys) / max(1, len(keys) - 1)
            sums[:, h] += torch.tensor([mean, variance, even], dtype=torch.float64)
        count = (~values.isnan()).sum((0, 2))
        result[name] = sums[0] / count, sums[1].sqrt() / count, sums[2].sqrt() / count
    return result
