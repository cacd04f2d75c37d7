"""The five notebooks that the project began with: watch, trace and check of each class, as its notebook has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headscope
from support import seed_modules
from support.html_pages import Page

WIDTH, HEADS, TOKENS = 35, 5, 11


def _true_entropies(module: nn.Module, x: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the mean entropy of each head in float64, from the projections, by definition."""
    names = {"SixSteps": ("q_linear", "k_linear"), "FoldedHeads": ("toqueries", "tokeys"), "OneText": ("q", "k"),
             "Patches": ("query", "key"), "Enforced": ("w_q", "w_k")}[type(module).__name__]  # fmt: skip
    rows = x.double()[None] if x.ndim == 2 else x.double()
    q, k = (
        nn.functional.linear(rows, layer.weight.double(), None if layer.bias is None else layer.bias.double())
        for layer in (module.get_submodule(name) for name in names)
    )
    q, k = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k))
    s = scale * q @ k.mT
    if causal:
        s = s.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    p = s.softmax(-1)
    return -torch.where(p > 0, p * p.log(), 0).sum(-1).mean((0, 2)).detach()


@pytest.mark.parametrize(
    ("build", "batch", "scale", "causal", "findings"),
    [
        (seed_modules.SixSteps, (3,), (WIDTH // HEADS) ** -0.5, False, ()),
        (seed_modules.FoldedHeads, (3,), WIDTH**-0.5, False, ("scale-sqrt-embed-dim",)),
        (seed_modules.OneText, (), (WIDTH // HEADS) ** -0.5, False, ()),
        (seed_modules.Patches, (3,), (WIDTH // HEADS) ** -0.5, False, ()),
        (lambda width, heads: seed_modules.Enforced(width, heads, True), (3,), (WIDTH // HEADS) ** -0.5, True, ()),
    ],
    ids=["000", "001", "002", "003", "004"],
)
def test_a_notebook_is_watched_traced_and_checked(
    build: Callable[[int, int], nn.Module], batch: tuple[int, ...], scale: float, causal: bool,
    findings: tuple[str, ...], tmp_path: Path,
) -> None:  # fmt: skip
    torch.manual_seed(11)
    module, x = build(WIDTH, HEADS), torch.randn(*batch, TOKENS, WIDTH)
    expected = module(x)

    with headscope.watch(module, what=headscope.Observe(map=TOKENS), verify=4) as recording:
        assert torch.equal(module(x), expected)
    assert list(recording.stats.parts) == [type(module).__name__]
    assert recording.about.other_layers == {}
    assert all(errors.fits for errors in recording.about.verified.values())
    truth = _true_entropies(module, x, scale, causal)
    torch.testing.assert_close(recording["entropy"].mean[0], truth, rtol=1e-5, atol=0)
    assert recording["mass"].count[0].tolist() == [math.prod(batch) * TOKENS] * HEADS

    steps = headscope.trace(module, x)
    assert steps.held
    assert steps.missing == {}
    assert torch.equal(steps.output, expected)

    call = None if batch else lambda module, x, _mask: torch.stack([module(text) for text in x])
    found = headscope.check(module, causal=causal or None, call=call)
    assert found.names == findings
    assert {finding.severity for finding in found} <= {"unusual"}

    page = Page(recording.save_html(tmp_path / "heads.html", trace=steps).read_text(encoding="utf-8"))
    assert len(page.data["layers"]) == 1
    assert sum(len(stage["steps"]) for stage in page.data["trace"]["stages"]) == len(steps.rows)
