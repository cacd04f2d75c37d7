"""torch.nn.attention.bias.CausalBias, whose memory holds no numbers: refused as an argument, translated by watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import headscope
from headscope import Observe, nn_compat, watch
from headscope._intercept import intercepted_call
from headscope._intercept.masks import split
from headscope.functional import weights
from headscope.masks import Band, Mask, causal
from headscope.watching import WatchError
from support.forking import run_program

T = 6
VARIANTS: dict[str, tuple[Callable[..., CausalBias], Mask]] = {
    "upper left": (causal_upper_left, Band(None, 0, offset=0)),
    "lower right": (causal_lower_right, causal()),
}
REMEDY = r"CausalBias.*mask=causal\(\).*lower_right.*mask=Band\(None, 0, offset=0\).*upper_left"


def arguments(keys: int = T, lead: tuple[int, ...] = (2,)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, 3, n, 8, generator=generator) for n in (T, keys, keys))
    return q, k, v


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("backend", [None, "cpu", "sdpa", "blocked", "reference"])
def test_attention_refuses_a_causal_bias_on_every_backend(backend: str | None, name: str, variant: str) -> None:
    given: dict[str, Any] = {name: VARIANTS[variant][0](T, T)}
    for function in (headscope.attention, headscope.attend):
        for _ in range(2):
            with pytest.raises(TypeError, match=rf"^{name}: got .*{REMEDY}"):
                function(*arguments(), backend=backend, **given)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("function", [headscope.observe, weights])
@pytest.mark.parametrize("lead", [(2,), (2, 1)])
def test_observing_and_weights_refuse_a_causal_bias(lead: tuple[int, ...], function: Any, name: str) -> None:
    q, k, _ = arguments(lead=lead)
    given: dict[str, Any] = {name: causal_upper_left(T, T)}
    with pytest.raises(TypeError, match=rf"^{name}: got .*{REMEDY}"):
        function(q, k, **given)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("options", [{}, {"position_bias": headscope.positions.ALiBi(2)}, {"bias_kv": True}])
def test_the_module_refuses_a_causal_bias(options: dict[str, Any], name: str) -> None:
    module = headscope.MultiHeadAttention(8, 2, **options)
    given: dict[str, Any] = {name: causal_lower_right(T, T)}
    with pytest.raises(TypeError, match=REMEDY):
        module(torch.zeros(1, T, 8), **given)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_compatible_module_refuses_a_causal_bias(need_weights: bool) -> None:
    module, x = nn_compat.MultiheadAttention(8, 2), torch.zeros(T, 1, 8)
    with pytest.raises(
        TypeError,
        match=r"^attn_mask: got .*CausalBias.*boolean tensor \(True = masked\)",
    ):
        module(x, x, x, attn_mask=causal_upper_left(T, T), need_weights=need_weights)


def test_headscope_does_not_import_the_module_of_causal_bias() -> None:
    lines = (
        "import sys, torch, headscope",
        "q = torch.zeros(1, 1, 4, 8)",
        "headscope.observe(q, q, q, bias=torch.zeros(4, 4).as_subclass(type('Own', (torch.Tensor,), {})))",
        "assert 'torch.nn.attention.bias' not in sys.modules",
    )
    done = run_program("\n".join(lines))
    assert done.returncode == 0, done.stderr


class Attends(nn.Module):
    """One call of torch's attention with a mask."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask)


WHAT = Observe(map=4, edges=4)


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("lead", [(2,), (2, 2)])
@pytest.mark.parametrize("keys", [T, T + 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_watch_records_the_mask_that_a_causal_bias_stands_for(
    variant: str, keys: int, lead: tuple[int, ...], accelerate: bool
) -> None:
    make, mask = VARIANTS[variant]
    q, k, v = arguments(keys, lead)
    model = Attends(make(T, keys))
    expected = headscope.observe(q, k, v, mask=mask, what=WHAT)
    out = model(q, k, v)
    with torch.no_grad(), watch(model, what=WHAT, accelerate=accelerate) as seen:
        out_watched = model(q, k, v)
    torch.testing.assert_close(out_watched, out)
    assert seen.stats.names == expected.names
    for name in expected.names:
        torch.testing.assert_close(seen.stats[0, name].mean, expected[0, name].mean, equal_nan=True)


def test_watch_refuses_a_lower_right_causal_bias_of_other_sizes() -> None:
    q, k, v = arguments(T + 3)
    model = Attends(causal_lower_right(1, T + 3))
    with pytest.raises(WatchError, match=r"attn_mask: CausalBias does not fit .* \[6, 9\], got \[1, 9\]"), watch(model):
        model(q, k, v)


class Own(Tensor):
    """A mask that only its own attention understands."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return func(*args[:3], is_causal=True)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("accelerate", [False, True])
def test_watch_refuses_a_mask_whose_class_changes_attention(accelerate: bool) -> None:
    model = Attends(torch.zeros(T, T).as_subclass(Own))
    refused = pytest.raises((WatchError, TypeError), match=r"attn_mask: got Own, .*expected a boolean or float tensor")
    with refused, watch(model, accelerate=accelerate):
        model(*arguments())


def test_watch_refuses_a_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    with pytest.raises(TypeError, match="attn_mask: got BlockMask, "):
        intercepted_call.sdpa((*arguments(), mask), {}, split)


def test_watch_refuses_a_causal_bias_of_torchs_module() -> None:
    """With one head and weights, torch adds the memory of the bias to the logits; otherwise it raises."""
    module, x = nn.MultiheadAttention(8, 1), torch.zeros(T, 1, 8)
    with pytest.raises(WatchError, match="attn_mask: got CausalBias, "), watch(module):
        module(x, x, x, attn_mask=causal_upper_left(T, T))
