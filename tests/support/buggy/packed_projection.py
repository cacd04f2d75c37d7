"""Multi-head attention in the manner of nanoGPT, one packed projection and views, with a bug on demand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Packed(nn.Module):
    """x [B, T, E], mask True = may be seen; gives the output and its keys and values."""

    def __init__(self, width: int, heads: int, causal: bool = False, dropout: float = 0.0, bug: str = "") -> None:
        super().__init__()
        self.heads, self.causal, self.rate, self.bug = heads, causal, dropout, bug
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.calls = 0
        self.memory: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        if self.bug == "input in place":
            x *= 0.5
        if self.bug == "batch and length swapped":
            return self.attend(x.transpose(0, 1), mask, past)[0].transpose(0, 1), None
        if self.bug == "squeeze":
            x = x.squeeze()
        return self.attend(x, mask, past)

    def split(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        h = self.heads
        if self.bug == "view without transpose":
            return x.reshape(b, h, t, e // h)
        if self.bug == "heads interleaved":
            return x.view(b, t, e // h, h).permute(0, 3, 1, 2)
        if self.bug == "one head":
            return x.view(b, t, 1, e).transpose(1, 2)
        return x.view(b, t, h, e // h).transpose(1, 2)  # [B, H, T, D]

    def attend(self, x: Tensor, mask: Tensor | None, past: Any) -> tuple[Tensor, Any]:
        bug = self.bug
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if bug == "keys are queries":
            k = q
        if bug == "values are keys":
            v = k
        if bug == "values not projected":
            v = x
        q, k, v = self.split(q), self.split(k), self.split(v)
        if bug == "batches mixed":
            k, v = k.roll(1, 0), v.roll(1, 0)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            if bug == "cache in front":
                k = torch.cat([k[:, :, -1:], k[:, :, :-1]], 2)
        if bug == "detached":
            k = k.detach()
        p = self.weights(q, k, mask)
        if bug == "weights of one head":
            p = p[:, :1].expand_as(p)
        out = p @ v  # [B, H, T, D]
        if bug == "last head dropped":
            out = torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], 1)
        if bug == "heads averaged":
            _ = p.mean(1)
        b, h, t, d = out.shape
        if bug == "heads summed":
            out = out.sum(dim=1, keepdim=True).expand(b, h, t, d)
        out = out if bug == "merge without transpose" else out.transpose(1, 2)
        merged = out.reshape(b, t, h * d)
        if bug == "state":
            self.calls += 1
            merged = merged + 0.01 * self.calls
        return (merged if bug == "no output projection" else self.out(merged)), (k, v)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        bug, d, e = self.bug, q.size(-1), q.size(-1) * self.heads
        s = q @ k.transpose(-2, -1)  # [B, H, T, T]
        if bug in ("no scale", "scale after softmax"):
            return s
        if bug == "scale of the model":
            return s / math.sqrt(e)
        if bug == "scale without root":
            return s / d
        if bug == "scaled twice":
            return (s / math.sqrt(d)) / math.sqrt(d)
        if bug == "scale multiplied":
            return s * math.sqrt(d)
        if bug == "scale of the length":
            return s / math.sqrt(q.size(-2))
        return s / math.sqrt(d)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        bug = self.bug
        s = self.scores(q, k)
        t, n = s.shape[-2:]
        lowest = torch.finfo(s.dtype).min
        if bug == "fill of -1e9":
            lowest = -1e9
        if bug == "fill of -inf":
            lowest = -math.inf
        seen = torch.ones(t, n, dtype=torch.bool)
        if self.causal and bug != "causal forgotten":
            seen = seen.tril(n - t)
        late: Tensor | None = None
        if self.causal:
            if bug == "one ahead":
                seen = torch.ones(t, n, dtype=torch.bool).tril(1)
            if bug == "strict":
                seen = torch.ones(t, n, dtype=torch.bool).tril(-1)
            if bug == "inverted":
                seen = ~torch.ones(t, n, dtype=torch.bool).tril()
            if bug == "only itself":
                seen = torch.eye(n, dtype=torch.bool)[n - t :]
            if bug == "multiplied":
                s, seen = s * seen, torch.ones_like(seen)
            if bug == "added as bool":
                s, seen = s + seen.to(s.dtype), torch.ones_like(seen)
            if bug == "masked after":
                late, seen = seen, torch.ones_like(seen)
            if bug == "first head":
                seen = torch.stack([seen, *(torch.ones_like(seen) for _ in range(self.heads - 1))])
            if bug == "first entry":
                seen = torch.stack([seen, *(torch.ones_like(seen) for _ in range(len(s) - 1))])[:, None]
        if mask is not None and bug != "mask ignored":
            m = mask.bool()
            if bug == "mask inverted":
                m = ~m
            if bug == "padding on queries" and m.ndim == 4:
                m = m.transpose(-2, -1)
            seen = seen & m
        if self.training and bug == "dropout before softmax":
            s = F.dropout(s, self.rate)
        s = s.masked_fill(~seen, lowest)
        axis = {"softmax over queries": -2, "softmax over heads": 1}.get(bug, -1)
        if bug == "no softmax":
            p = s.masked_fill(~seen, 0.0)
        elif bug == "softmax by hand":
            p = s.exp() / s.exp().sum(-1, keepdim=True)
        else:
            p = s.softmax(axis)
        if late is not None:
            p = p * late
        if bug == "scale after softmax":
            p = p / math.sqrt(q.size(-1))
        if bug == "dropout in eval":
            return F.dropout(p, 0.3)
        return F.dropout(p, self.rate, self.training and bug != "dropout before softmax")
