"""Scores of patterns from means beside those of the dense weights, for every family that watch is tested on."""

from __future__ import annotations

import math

import pytest
import torch

from headscope import Observe, watch
from headscope.decisions import kv_budget, near_duplicates, patterns, streaming_heads
from headscope.stats import pattern_scores
from headscope.watching import register_transformers
from support.watched_models import FAMILIES, in_float64

register_transformers()
ESTIMATED = {"uniform": 0.25, "local": 0.15, "duplicate": 0.15, "induction": 0.15}  # how far an estimate may be off


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_marked_exact_are_those_of_the_weights(family: str) -> None:
    make, implementations = FAMILIES[family]
    case = make(implementations[0])
    with torch.no_grad(), watch(case.model, what=Observe(windows=(3,), map=5), **case.options) as seen:
        case.run(case.model)
    told = patterns(seen)
    compared = 0
    for name, layer in case.truth(in_float64(case.model)).items():
        if layer.extra:
            continue  # room of a cache that no key has taken: the dense scores know none
        visible = layer.seen.expand(layer.p.shape)
        dense = pattern_scores(
            layer.p.masked_fill(~visible, 0.0), seen=visible, kind=layer.kind, tokens=layer.tokens
        ).score
        for head in range(layer.p.shape[1]):
            for pattern, score in told.of(name, head).items():
                wanted = float(dense[pattern][head]) if pattern in dense else math.nan
                off = 1e-4 if score.exact else ESTIMATED.get(pattern, 1.0)
                assert math.isnan(wanted) or abs(score.score - wanted) <= off, f"{pattern} of {name}, head {head}"
                compared += not math.isnan(wanted)
    assert compared > 0 or any(each.extra for each in case.truth(in_float64(case.model)).values())
    for decide in (streaming_heads, kv_budget, near_duplicates):
        assert decide(seen).basis.forwards >= 1
