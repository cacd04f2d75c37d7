"""Small models of torch's and headscope's own modules, and what their attention is by definition; see ``watched``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope.masks import KeyLengths, causal
from support.watched_models import Case, Layer, band, real, spread

WIDTH = 24
HALF = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(2))
WHOLE = torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(4))
ENDS = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])  # True = padding, on the right


class Plain(nn.Module):
    """Attention by SDPA, of x to itself or to a context."""

    def __init__(self, heads: int, kv_heads: int | None = None, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads or heads, options
        width = WIDTH // heads
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, self.kv_heads * width) for _ in range(2))

    def heads_of(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        made = (self.q(x), self.k(context), self.v(context))
        q, k, v = (one.unflatten(-1, (n, -1)).transpose(1, 2) for one, n in zip(made, counts, strict=True))
        return q, k, v  # [B, H, length, D] each

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.heads_of(x, x if context is None else context)
        mask = self.options.get("attn_mask")
        options = {**self.options}
        if mask is not None and mask.is_floating_point():
            options["attn_mask"] = mask.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.kv_heads, **options)
        return self.o(out.transpose(1, 2).flatten(-2))

    def layer(self, x: Tensor, context: Tensor, seen: Tensor, bias: Tensor | None = None, kind: str = "self") -> Layer:
        with torch.no_grad():
            q, k, v = (one.double() for one in self.heads_of(x.double(), context.double()))
        return by_definition(q, k, v, seen, bias, self.options.get("scale"), kind)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None, scale: float | None = None,
    kind: str = "self", softcap: float | None = None, sinks: Tensor | None = None,
) -> Layer:  # fmt: skip
    """What q, k, v give, in float64."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    s = s if softcap is None else softcap * (s / softcap).tanh()
    s = (s if bias is None else s + bias).masked_fill(~seen, -math.inf)
    terms = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = terms.softmax(-1).nan_to_num()[..., : k.shape[-2]]
    return Layer(p, seen.expand(p.shape), kind, terms.logsumexp(-1), v.norm(dim=-1).repeat_interleave(group, 1))


class Two(nn.Module):
    """Self-attention and cross-attention, both called in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Plain(3), Plain(3)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for part, context in ((self.first, x), (self.second, WHOLE.to(x.dtype))):
            q, k, v = part.heads_of(x, context)
            out.append(F.scaled_dot_product_attention(q, k, v))
        return torch.stack(out)


class Functional(nn.Module):
    """``torch.nn.functional.multi_head_attention_forward`` with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.MultiheadAttention(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, held = x.transpose(0, 1), self.held
        return F.multi_head_attention_forward(
            x, x, x, WIDTH, 3, held.in_proj_weight, held.in_proj_bias, None, None, False, 0.0, held.out_proj.weight,
            held.out_proj.bias, training=False, key_padding_mask=ENDS, need_weights=False,
        )[0]  # fmt: skip


class Attending(Plain):
    """The same by ``headscope.attend``."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.heads_of(x, x)
        return self.o(headscope.attend(q, k, v, mask=causal()).out.transpose(1, 2).flatten(-2))


class Ours(nn.Module):
    """``headscope.MultiHeadAttention`` with every option, and ``headscope.attend``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = headscope.MultiHeadAttention(WIDTH, 6, kv_heads=2, softcap=2.0, sinks=True)
        self.plain = Attending(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, mask=causal() & KeyLengths((~ENDS).sum(-1))) + self.plain(x)


def sdpa(model: Plain, seen: Tensor, bias: Tensor | None = None, context: Tensor | None = None) -> Callable[[], Case]:
    """One module that calls SDPA, in a model."""
    kind = "self" if context is None else "cross"

    def run(net: Any) -> Any:
        x = HALF.to(net.attn.q.weight.dtype)
        return net.attn(x, None if context is None else context.to(x.dtype))

    def truth(doubled: Any) -> dict[str, Layer]:
        return {"attn": doubled.attn.layer(HALF, HALF if context is None else context, seen, bias, kind)}

    return lambda: Case(spread(nn.ModuleDict({"attn": copy.deepcopy(model)})), run, truth)


def theirs(
    seen: Tensor, arguments: Mapping[str, Any], context: Tensor | None = None, **options: Any
) -> Callable[[], Case]:
    """One ``nn.MultiheadAttention``."""
    first = options.get("batch_first", False)

    def called(net: Any, **more: Any) -> Any:
        like = next(net.parameters()).dtype
        x, y = (
            one.to(like) if first else one.to(like).transpose(0, 1)
            for one in (HALF, HALF if context is None else context)
        )
        y = x if context is None else y
        said = {name: one.to(like) if isinstance(one, Tensor) and one.is_floating_point() else one
                for name, one in arguments.items()}  # fmt: skip
        return net.attn(x, y, y, **{**said, **more})

    def truth(doubled: Any) -> dict[str, Layer]:
        p = called(doubled, need_weights=True, average_attn_weights=False)[1].detach()  # with gradients: no fast path
        extra = p.shape[-1] - (HALF if context is None else context).shape[1]
        all_seen = F.pad(seen.expand(len(p), 1, p.shape[2], p.shape[3] - extra), (0, extra), value=True)
        return {
            "attn": Layer(p.nan_to_num(), all_seen.expand(p.shape), "self" if context is None else "cross", extra=extra)
        }

    def case() -> Case:
        sizes = {"embed_dim": WIDTH, "num_heads": 2, **options}
        return Case(spread(nn.ModuleDict({"attn": nn.MultiheadAttention(**sizes)})), called, truth)

    return case


def stack(seen: Tensor, arguments: Mapping[str, Any], training: bool = False, **options: Any) -> Callable[[], Case]:
    """An ``nn.TransformerEncoder`` of two layers."""

    def called(net: Any) -> Any:
        like = next(net.parameters()).dtype
        said = {name: one.to(like) if isinstance(one, Tensor) and one.is_floating_point() else one
                for name, one in arguments.items()}  # fmt: skip
        return net(HALF.to(like), **said)

    def truth(doubled: Any) -> dict[str, Layer]:
        found: dict[str, Layer] = {}
        x = HALF.double()
        hidden = ~seen.expand(2, 1, 7, 7).repeat_interleave(2, 1).flatten(0, 1)  # [B * H, Q, K]
        hidden = hidden & ~hidden.all(-1, keepdim=True)  # rows that may see nothing would be NaN
        for n, layer in enumerate(doubled.layers):
            y = layer.norm1(x) if layer.norm_first else x
            p = layer.self_attn(y, y, y, attn_mask=hidden, need_weights=True, average_attn_weights=False)[1]
            found[f"layers.{n}.self_attn"] = Layer(p.detach(), seen.expand(p.shape))
            x = layer(x, src_mask=hidden)
        return found

    def case() -> Case:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 20, dropout=0.0, batch_first=True, **options)
        nested = not options.get("norm_first", False)
        return Case(spread(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).train(training), called, truth)

    return case


def encoder_and_decoder() -> Case:
    """``nn.Transformer``, with one layer each."""
    model = nn.Transformer(WIDTH, 2, 1, 1, 20, 0.0, batch_first=True)
    hidden = ~band(7, 7)

    def run(net: Any) -> Any:
        like = next(net.parameters()).dtype
        return net(WHOLE.to(like), HALF.to(like), tgt_mask=hidden)

    def truth(doubled: Any) -> dict[str, Layer]:
        x, y = WHOLE.double(), HALF.double()
        one, two = doubled.encoder.layers[0], doubled.decoder.layers[0]
        seen, memory = torch.ones(1, 1, 11, 11, dtype=torch.bool), doubled.encoder(x)
        told = {"need_weights": True, "average_attn_weights": False}
        between = two.norm1(y + two.self_attn(y, y, y, attn_mask=hidden)[0])
        weights = [
            one.self_attn(x, x, x, **told)[1],
            two.self_attn(y, y, y, attn_mask=hidden, **told)[1],
            two.multihead_attn(between, memory, memory, **told)[1],
        ]
        kinds = [("self", seen), ("self", ~hidden), ("cross", seen[:, :, :7])]
        names = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")
        return {name: Layer(p.detach(), seen.expand(p.shape), kind)
                for name, p, (kind, seen) in zip(names, weights, kinds, strict=True)}  # fmt: skip

    return Case(spread(model), run, truth)


def functional() -> Case:
    def truth(doubled: Any) -> dict[str, Layer]:
        x = HALF.double().transpose(0, 1)
        p = doubled.held(x, x, x, key_padding_mask=ENDS, average_attn_weights=False)[1].detach()
        return {"Functional": Layer(p, real(~ENDS).expand(p.shape))}

    return Case(spread(Functional()), lambda net: net(HALF.to(net.held.in_proj_weight.dtype)), truth)


def two_calls() -> Case:
    def truth(doubled: Any) -> dict[str, Layer]:
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return {
            "Two": doubled.first.layer(HALF, HALF, every),
            "Two#2": doubled.second.layer(HALF, WHOLE, every, kind="cross"),
        }

    return Case(spread(Two()), lambda net: net(HALF.to(net.first.q.weight.dtype)), truth)


def ours() -> Case:
    def truth(doubled: Any) -> dict[str, Layer]:
        with torch.no_grad():
            q, k, v = doubled.module.project(HALF.double())
        seen = band(7, 7) & real(~ENDS)
        first = by_definition(q, k, v, seen, softcap=2.0, sinks=doubled.module.sinks.detach())
        return {"module": first, "plain": doubled.plain.layer(HALF, HALF, band(7, 7))}

    def run(net: Any) -> Any:
        return net(HALF.to(net.plain.q.weight.dtype))

    return Case(spread(Ours()), run, truth)


ALL = torch.ones(1, 1, 1, 1, dtype=torch.bool)
STARTS = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])[:, None, None]  # the second is padded on the left
TILT = torch.linspace(-1, 1, 7 * 7).view(1, 1, 7, 7)
TILTED = torch.where(band(7, 7), TILT, -1e9)
SQUARE = nn.Transformer.generate_square_subsequent_mask(7)

OTHERS: dict[str, Callable[[], Case]] = {
    "sdpa, is_causal": sdpa(Plain(3, is_causal=True), band(7, 7)),
    "sdpa, grouped, boolean mask, left padding": sdpa(Plain(6, 2, attn_mask=band(7, 7) & STARTS), band(7, 7) & STARTS),
    "sdpa, float mask, scale": sdpa(Plain(3, attn_mask=TILTED, scale=0.5), band(7, 7), TILT.double()),
    "sdpa, cross": sdpa(Plain(3), ALL, context=WHOLE),
    "sdpa, two calls": two_calls,
    "nn.MultiheadAttention, fast": theirs(ALL, {}, batch_first=True),
    "nn.MultiheadAttention, fast, masks": theirs(
        band(7, 7) & real(~ENDS), {"attn_mask": ~band(7, 7), "key_padding_mask": ENDS}, batch_first=True
    ),
    "nn.MultiheadAttention, slow, need_weights": theirs(real(~ENDS), {"key_padding_mask": ENDS}, num_heads=3),
    "nn.MultiheadAttention, is_causal": theirs(
        band(7, 7), {"attn_mask": SQUARE, "is_causal": True, "need_weights": False}, num_heads=3
    ),
    "nn.MultiheadAttention, float mask of each head": theirs(
        ALL, {"attn_mask": TILT.expand(2, 3, 7, 7).reshape(6, 7, 7)}, num_heads=3, batch_first=True
    ),
    "nn.MultiheadAttention, more keys": theirs(
        band(7, 7), {"attn_mask": ~band(7, 7)}, num_heads=3, add_bias_kv=True, add_zero_attn=True
    ),
    "nn.MultiheadAttention, cross": theirs(ALL, {}, WHOLE, kdim=WIDTH, vdim=WIDTH, batch_first=True),
    "functional.multi_head_attention_forward": functional,
    "nn.TransformerEncoder, fast": stack(ALL, {}),
    "nn.TransformerEncoder, fast, float mask": stack(band(7, 7), {"mask": SQUARE}),
    "nn.TransformerEncoder, nested": stack(real(~ENDS), {"src_key_padding_mask": ENDS}),
    "nn.TransformerEncoder, norm first": stack(real(~ENDS), {"src_key_padding_mask": ENDS}, norm_first=True),
    "nn.TransformerEncoder, training": stack(band(7, 7), {"mask": SQUARE}, training=True),
    "nn.Transformer": encoder_and_decoder,
    "headscope": ours,
}
