"""watch against the truth, for every kind of model: values of heads to 1e-5 of float64, outputs to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import Observe, Recording, watch
from headscope.watching import register_transformers
from support import oracle_observe as oracle
from support.watched_models import FAMILIES, Case, Layer, in_float64
from support.watched_modules import OTHERS

WINDOWS = (2,)
UNKNOWN = {"lse", "max_logit"}  # where a family's own code does not show its logits

register_transformers()
NAMED: dict[str, Callable[[], Case]] = {
    f"{family}, {implementation}": lambda family=family, implementation=implementation: FAMILIES[family][0](
        implementation
    )
    for family, (_, implementations) in FAMILIES.items()
    for implementation in implementations
} | OTHERS


def definition(layer: Layer) -> oracle.Seen:
    """Everything that should be seen of a layer."""
    B, H, Q, K = layer.p.shape
    p = layer.p.masked_fill(~layer.seen.expand(layer.p.shape), 0.0)
    keys = K - layer.extra
    places = None if layer.kind == "cross" else [[(float(j) if j < keys else math.nan,) for j in range(K)]] * B
    asked = oracle.Asked(
        p=p,
        lse=torch.zeros(B, H, Q) if layer.lse is None else layer.lse,
        seen=layer.seen.expand(layer.p.shape),
        q_at=None if places is None else [row[keys - Q : keys] for row in places],
        k_at=places,
        line=[[*range(keys - Q, keys)]] * B,
        tokens=None if layer.tokens is None else layer.tokens.tolist(),
        values=layer.values,
        windows=WINDOWS,
    )
    return oracle.observe_by_definition(asked)


def output_of(result: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result if isinstance(result, (tuple, list)) else []
    return [tensor for value in values for tensor in output_of(value)]


def watched(case: Case, model: nn.Module) -> tuple[Recording, Any]:
    with torch.no_grad(), watch(model, what=Observe(windows=WINDOWS), **case.options) as seen:
        out = case.run(model)
    return seen, out


def differences(
    seen: Recording, truth: dict[str, Layer], definitions: dict[str, oracle.Seen], tolerance: float
) -> list[str]:
    """Where a recording differs from the truth, and from what should be seen of each layer, in words."""
    found: list[str] = []
    assert seen.layers == tuple(truth)
    assert seen.kinds == {name: layer.kind for name, layer in truth.items()}
    for name, layer in truth.items():
        exact = definitions[name]
        rows = {key: values for key, values in exact.rows.items() if key != "argmax"}
        known = rows.keys() - (UNKNOWN if layer.lse is None else set())
        assert known <= {*seen.stats[name].names}, name
        beside = {quantity for quantity in seen.stats[name].names if seen.stats[name, quantity].count.any()} - known
        assert beside <= (UNKNOWN if layer.lse is None else set()) | ({"value_norm"} if layer.values is None else set())
        for quantity in known:
            column, head = seen.stats[name, quantity], oracle.head(rows[quantity])
            assert column.count.tolist() == head["count"].tolist(), f"{name} {quantity}"
            least = 1.0 if quantity in UNKNOWN else 0.01  # logits have signs: near 0 they are no smaller than they err
            for what in ("mean", "min", "max"):
                got, wanted = getattr(column, what), head[what]
                apart = (got - wanted).abs() / wanted.abs().clamp_min(least)
                if bool((apart > tolerance).any()):
                    found.append(f"{name} {quantity} {what}: {got.tolist()} for {wanted.tolist()}")
        received, eligible = seen.stats[name].received, seen.stats[name].eligible
        assert torch.equal(eligible, exact.eligible), f"{name} eligible"
        if not torch.allclose(received, exact.received, rtol=tolerance, atol=tolerance):
            found.append(f"{name} received")
        peak = float(exact.rows["normalized_entropy"].nanmean())
        assert 0.2 < peak < 0.99, (
            f"{name}: entropy {peak:.3f} of what it could be; flat or on one key, it would show nothing"
        )
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMED)
def test_head_values_are_those_of_float64(name: str) -> None:
    case = NAMED[name]()
    truth = case.truth(in_float64(case.model))
    seen, out = watched(case, case.model)
    with torch.no_grad():
        plain = case.run(case.model)
    for got, wanted in zip(output_of(out), output_of(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True, msg="outputs as without watching")
    with case.around():
        exact, _ = watched(case, in_float64(case.model))
    definitions = {name: definition(layer) for name, layer in truth.items()}
    assert not differences(exact, truth, definitions, 1e-9)
    assert not differences(seen, truth, definitions, 1e-5)
    assert math.isfinite(seen[0, 0, "entropy"].mean)
