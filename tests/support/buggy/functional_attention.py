"""Grouped-query attention in functional style, length first, weights as plain tensors, with a bug on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear, scaled_dot_product_attention

MINUS = -3e4  # fits into every floating type


class Setting(NamedTuple):
    """The options of a call."""

    groups: int
    size: int
    autoregressive: bool
    probability: float
    wrong: str


def project(x: Tensor, weights: Mapping[str, Tensor], s: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, B, E] -> q [T, B, G, R, D], k and v [T, B, G, D]: G groups of R query heads."""
    names = {"keys are queries": ("k", "k", "v"), "values are keys": ("q", "k", "k")}.get(s.wrong, ("q", "k", "v"))
    q, k, v = (linear(x, weights[name]) for name in names)
    if s.wrong == "keys are queries":
        q = q.unflatten(-1, (s.groups, 1, s.size)).expand(-1, -1, -1, weights["q"].size(0) // k.size(-1), -1).flatten(2)
    if s.wrong == "values not projected":
        v = x[..., : s.groups * s.size]
    length, batch = x.shape[:2]
    if s.wrong == "view without transpose":
        kt = k.contiguous().view(s.groups, batch, length, s.size).permute(2, 1, 0, 3)
        vt = v.contiguous().view(s.groups, batch, length, s.size).permute(2, 1, 0, 3)
        return q.view(length, batch, s.groups, -1, s.size), kt, vt
    if s.wrong == "heads interleaved":
        q = q.view(length, batch, s.size, s.groups, -1).permute(0, 1, 3, 4, 2)
        return q, *(y.view(length, batch, s.size, s.groups).transpose(2, 3) for y in (k, v))
    q = q.view(length, batch, s.groups, -1, s.size)
    return q, k.view(length, batch, s.groups, s.size), v.view(length, batch, s.groups, s.size)


def scale(s: Setting, q: Tensor) -> float:
    heads = q.size(2) * q.size(3)
    return {
        "no scale": 1.0, "scale after softmax": 1.0, "scale of the model": (heads * s.size) ** -0.5,
        "scale without root": 1 / s.size, "scale multiplied": s.size**0.5, "scale of the length": q.size(0) ** -0.5,
    }.get(s.wrong, s.size**-0.5)  # fmt: skip


def visible(length: int, batch: int, heads: tuple[int, int], pad: Tensor | None, s: Setting) -> Tensor:
    """What may be seen: [B, G, R, Tq, Tk]."""
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    shapes = {
        "one ahead": j <= i + 1, "strict": j < i, "inverted": j > i, "only itself": j == i,
        "causal forgotten": j >= 0, "multiplied": j >= 0, "added as bool": j >= 0, "masked after": j >= 0,
    }  # fmt: skip
    seen = shapes.get(s.wrong, j <= i) if s.autoregressive else j >= 0
    seen = seen.expand(batch, *heads, length, length).clone()
    if s.autoregressive and s.wrong == "first head":
        seen[:, 1:] = True
    if s.autoregressive and s.wrong == "first entry":
        seen[1:] = True
    if pad is not None and s.wrong != "mask ignored":
        keep = pad.to(torch.bool)
        keep = ~keep if s.wrong == "mask inverted" else keep
        seen &= keep[:, None, None, :, None] if s.wrong == "padding on queries" else keep[:, None, None, None, :]
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, s: Setting, training: bool) -> Tensor:
    """[T, B, G, R, D]"""
    length, batch, groups, many, _ = q.shape
    if s.wrong == "scaled twice":
        q = q * s.size**-0.5
    logits = torch.einsum("ibgrd,jbgd->bgrij", q, k) * scale(s, q)
    lower = torch.ones(length, length).tril().to(logits)
    if s.autoregressive and s.wrong == "multiplied":
        logits = logits * lower
    if s.autoregressive and s.wrong == "added as bool":
        logits = logits + lower
    if training and s.wrong == "dropout before softmax":
        logits = drop(logits, s.probability)
    seen = visible(length, batch, (groups, many), pad, s)
    low = {"fill of -1e9": -1e9, "fill of -inf": -torch.inf}.get(s.wrong, MINUS)
    logits = torch.where(seen, logits, torch.tensor(low).to(logits)) if s.wrong != "fill of -1e9" else (
        logits.masked_fill(~seen, low)
    )  # fmt: skip
    if s.wrong == "softmax over heads":
        p = logits.flatten(1, 2).softmax(1).view_as(logits)
    elif s.wrong == "no softmax":
        p = logits * seen
    elif s.wrong == "softmax by hand":
        p = logits.exp()
        p = p / p.sum(-1, True)
    else:
        p = logits.softmax(3 if s.wrong == "softmax over queries" else 4)
    if s.autoregressive and s.wrong == "masked after":
        p = p * lower
    if s.wrong == "scale after softmax":
        p = p * s.size**-0.5
    if s.wrong == "weights of one head":
        p = p[:, :1, :1].expand_as(p)
    if s.wrong == "last head dropped":
        p = torch.cat([p.flatten(1, 2)[:, :-1], torch.zeros_like(p[:, 0, :1])], 1).view_as(p)
    if s.wrong == "heads averaged":
        p.mean((1, 2))
    if s.wrong == "heads summed":
        return torch.einsum("bgrij,jbgd->ibgrd", p, v).mean((2, 3), keepdim=True).expand_as(q)
    late = s.wrong == "dropout before softmax"
    p = drop(p, 0.25, True) if s.wrong == "dropout in eval" else drop(p, s.probability, training and not late)
    return torch.einsum("bgrij,jbgd->ibgrd", p, v)


class Functional(nn.Module):
    """x [T, B, E], pad [B, T] with True = a real token."""

    def __init__(
        self, width: int, groups: int, repeats: int, autoregressive: bool = False, p: float = 0.0, wrong: str = ""
    ) -> None:
        super().__init__()
        size = width // (groups * repeats)
        self.setting = Setting(groups, size, autoregressive, p, wrong)
        rows = {"q": width, "k": groups * size, "v": groups * size, "o": width}
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(n, width) / width**0.5) for name, n in rows.items()}
        )
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, pad: Tensor | None = None) -> Tensor:
        s, wrong = self.setting, self.setting.wrong
        if wrong == "input in place":
            x.add_(1.0)
        if wrong == "batch and length swapped":
            return self.whole(x.swapaxes(0, 1), None, s).swapaxes(0, 1)
        if wrong == "squeeze":
            x = x.squeeze()
        if wrong == "one head":
            s = s._replace(groups=1, size=x.size(-1))
        out = self.whole(x, pad, s)
        if wrong == "state":
            out = out + sum(0.1 * one.mean() for one in self.kept)
            self.kept.append(x.detach())
        return out

    def whole(self, x: Tensor, pad: Tensor | None, s: Setting) -> Tensor:
        weights = dict(self.weights)
        if s.wrong == "one head":
            times = len(weights["q"]) // len(weights["k"])
            weights["k"], weights["v"] = (torch.cat([weights[name]] * times) for name in "kv")
        if s.wrong == "detached":
            weights["v"] = weights["v"].detach()
        q, k, v = project(x, weights, s)
        if s.wrong == "batches mixed":
            k, v = k.flip(1), v.flip(1)
        out = attend(q, k, v, pad, s, self.training)
        length, batch = x.shape[:2]
        if s.wrong == "merge without transpose":
            joined = out.permute(2, 3, 0, 1, 4).reshape(length, batch, -1)
        else:
            joined = out.reshape(length, batch, -1)
        return joined if s.wrong == "no output projection" else linear(joined, weights["o"])

    def step_by_step(self, x: Tensor) -> Tensor:
        """x [B, T, E] token by token, with a cache written place by place."""
        batch, length, _ = x.shape
        s = self.setting._replace(autoregressive=False)
        cache = torch.zeros(2, length, batch, s.groups, s.size, dtype=x.dtype)
        made = []
        for t in range(length):
            q, k, v = project(x[:, t][None], self.weights, s)
            cache[0, t], cache[1, t] = k[0], v[0]
            if s.wrong == "cache in front":
                cache[0, t] = 0 * k[0]
            keys, values = cache[:, : t + 1].permute(0, 2, 3, 1, 4)  # [B, G, T, D] each
            heads = q[0].flatten(1, 2)[:, :, None]  # [B, H, 1, D]
            out = scaled_dot_product_attention(heads, keys, values, enable_gqa=True)
            made.append(linear(out.flatten(1), self.weights["o"]))
        return torch.stack(made, 1)
