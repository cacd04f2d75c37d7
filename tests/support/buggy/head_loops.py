"""Multi-head attention as a textbook has it, head after head, with a bug on demand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Loops(nn.Module):
    """query, key, value [B, T, E]; masks as torch's: attn_mask [T, T] and key_padding_mask [B, T], True = hidden."""

    def __init__(
        self, dim: int, num_heads: int, lower: bool = False, drop: float = 0.0, fault: str | None = None
    ) -> None:
        super().__init__()
        self.w_query = nn.Linear(dim, dim, bias=False)
        self.w_key = nn.Linear(dim, dim, bias=False)
        self.w_value = nn.Linear(dim, dim, bias=False)
        self.w_out = nn.Linear(dim, dim)
        self.num_heads, self.lower, self.fault = num_heads, lower, fault
        self.dropper = nn.Dropout(drop)
        self.remembered = torch.zeros(())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        fault = self.fault
        if fault == "squeeze":
            query, key, value = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        if fault == "input in place":
            query.mul_(0.5)
        if fault == "batch and length swapped":
            query, key, value = (one.permute(1, 0, 2) for one in (query, key, value))
        queries, keys = self.w_query(query), self.w_key(key)
        values = self.w_value(key)
        if torch.is_tensor(value):
            values = self.w_value(value)
        if fault == "keys are queries":
            keys = self.w_query(key)
        if fault == "values are keys":
            values = self.w_key(value)
        if fault == "values not projected":
            values = value
        if fault == "batches mixed":
            keys, values = torch.flip(keys, (0,)), torch.flip(values, (0,))
        if fault == "detached":
            queries = queries.data
        joined = self.all_heads(queries, keys, values, attn_mask, key_padding_mask)
        if fault == "batch and length swapped":
            joined = joined.permute(1, 0, 2)
        if fault == "state":
            self.remembered = 0.9 * self.remembered + 0.1 * joined.detach().mean()
            joined = joined - self.remembered
        if fault == "no output projection":
            return joined
        return self.w_out(joined)

    def columns(self, x: Tensor, head: int) -> Tensor:
        """What a head has of x: [B, T, D]."""
        batch, length, dim = x.shape
        size = dim // self.num_heads
        if self.fault == "view without transpose":
            return x.contiguous().view(batch, self.num_heads, length, size)[:, head]
        if self.fault == "heads interleaved":
            return x[:, :, head :: self.num_heads]
        return x[:, :, head * size : (head + 1) * size]

    def all_heads(self, queries: Tensor, keys: Tensor, values: Tensor, pairs: Any, padding: Any) -> Tensor:
        number = 1 if self.fault == "one head" else self.num_heads
        if number == 1:
            return self.looking(self.products(queries, keys, 0), pairs, padding, 0) @ values
        cut = [[self.columns(x, head) for head in range(number)] for x in (queries, keys, values)]
        logits = [self.products(q, k, head) for head, (q, k) in enumerate(zip(cut[0], cut[1], strict=True))]
        if self.fault == "softmax over heads":
            every = torch.softmax(torch.stack([self.hide(s, pairs, padding, 0) for s in logits]), 0)
            weights = list(every.unbind(0))
        else:
            weights = [self.looking(s, pairs, padding, head) for head, s in enumerate(logits)]
        if self.fault == "heads averaged":
            torch.stack(weights, 1).sum(1) / number
        if self.fault == "weights of one head":
            weights = weights[:1] * number
        results = [torch.einsum("bqk,bkd->bqd", p, v) for p, v in zip(weights, cut[2], strict=True)]
        if self.fault == "last head dropped":
            results[-1] = 0 * results[-1]
        if self.fault == "merge without transpose":
            stacked = torch.stack(results, 1)  # [B, H, T, D]
            return stacked.view(stacked.size(0), stacked.size(2), -1)
        if self.fault == "heads summed":
            results = [torch.stack(results).mean(0)] * number
        return torch.cat(results, dim=-1)

    def products(self, q: Tensor, k: Tensor, head: int) -> Tensor:
        size = q.size(-1)
        full = size * self.num_heads if self.fault != "one head" else size
        match self.fault:
            case "no scale" | "scale after softmax":
                pass
            case "scale of the model":
                q = q * full**-0.5
            case "scale without root":
                q = q / size
            case "scaled twice":
                q = q * size**-0.5
                k = k * size**-0.5
            case "scale multiplied":
                q = q * size**0.5
            case "scale of the length":
                q = q / q.size(1) ** 0.5
            case _:
                q = q * size**-0.5
        return torch.einsum("bqd,bkd->bqk", q, k)

    def hide(self, s: Tensor, pairs: Any, padding: Any, head: int) -> Tensor:
        length = s.size(-1)
        floor = torch.finfo(s.dtype).min
        if self.fault == "fill of -1e9":
            floor = -1e9
        if self.fault == "fill of -inf":
            floor = float("-inf")
        future = torch.triu(torch.ones(s.size(-2), length), 1 + length - s.size(-2)) == 1
        if self.lower:
            match self.fault:
                case "causal forgotten" | "masked after":
                    pass
                case "one ahead":
                    s = s.masked_fill(torch.triu(torch.ones(length, length), 2) == 1, floor)
                case "strict":
                    s = s.masked_fill(torch.triu(torch.ones(length, length), 0) == 1, floor)
                case "inverted":
                    s = s.masked_fill(future == 0, floor)
                case "only itself":
                    s = s.masked_fill(torch.eye(length) == 0, floor)
                case "multiplied":
                    s = s.masked_fill(future, 0.0)
                case "added as bool":
                    s = s - future.to(s.dtype)
                case "first head" if head > 0:
                    pass
                case "first entry":
                    s = torch.cat([s[:1].masked_fill(future, floor), s[1:]])
                case _:
                    s = s.masked_fill(future, floor)
        if self.fault == "mask ignored":
            return s
        if pairs is not None:
            hidden = pairs.bool() if self.fault != "mask inverted" else ~pairs.bool()
            s = s.masked_fill(hidden, floor)
        if padding is not None:
            hidden = padding.bool() if self.fault != "mask inverted" else ~padding.bool()
            s = s.masked_fill(hidden[:, :, None] if self.fault == "padding on queries" else hidden[:, None, :], floor)
        return s

    def looking(self, s: Tensor, pairs: Any, padding: Any, head: int) -> Tensor:
        if self.fault == "dropout before softmax":
            s = self.dropper(s)
        size = self.w_query.out_features // self.num_heads
        s = self.hide(s, pairs, padding, head)
        match self.fault:
            case "softmax over queries":
                p = torch.softmax(s, dim=1)
            case "no softmax":
                p = torch.where(s < -1e30, torch.zeros_like(s), s)
            case "softmax by hand":
                e = torch.exp(s)
                p = e / torch.sum(e, dim=2)[:, :, None]
            case _:
                p = torch.softmax(s, dim=2)
        if self.fault == "masked after" and self.lower:
            p = torch.tril(p)
        if self.fault == "scale after softmax":
            p = p * size**-0.5
        if self.fault == "dropout in eval":
            p = p * (torch.rand_like(p) > 0.2)
        return p if self.fault == "dropout before softmax" else self.dropper(p)

    def generated(self, x: Tensor) -> Tensor:
        """Token by token, with the keys and values of earlier ones kept."""
        kept_keys, kept_values, outputs = [], [], []
        for place in range(x.size(1)):
            token = x[:, place : place + 1]
            kept_keys.append(self.w_key(token))
            kept_values.append(self.w_value(token))
            keys = torch.cat(kept_keys if self.fault != "cache in front" else kept_keys[::-1], 1)
            joined = self.all_heads(self.w_query(token), keys, torch.cat(kept_values, 1), None, None)
            outputs.append(self.w_out(joined))
        return torch.cat(outputs, 1)
