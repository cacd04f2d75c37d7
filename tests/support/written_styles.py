"""Attention written by hand in many styles, by somebody who had not seen how it is recognised; the first half.

Every ``Case`` has a module, its inputs and an independent float64 ``truth``: for each attention its weights,
[B, H, Q, K], the visible pairs and its kind.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Entry = dict[str, Any]
Reference = Callable[..., tuple[list[Entry], Tensor]]


@dataclass
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    truth: Callable[..., list[Entry]]
    train: bool = False
    output: Callable[..., Tensor] | None = None


CASES: list[Case] = []


# reference helpers: float64, one batch row and one head at a time


def add_case(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], tuple], reference: Reference, train: bool = False
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1234)
        return build().train(train)

    def run_reference(module: nn.Module, *args: Any) -> tuple[list[Entry], Tensor]:
        doubled = copy.deepcopy(module).double().eval()
        with torch.no_grad():
            return reference(
                doubled, *[a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
            )

    CASES.append(
        Case(
            name,
            make,
            inputs,
            lambda m, *a: run_reference(m, *a)[0],
            train,
            None if train else lambda m, *a: run_reference(m, *a)[1],
        )
    )


def randn(seed: int, *shape: int) -> Tensor:
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def entry(weights: Tensor, visible: Tensor, kind: str) -> Entry:
    return {"weights": weights, "visible": visible, "kind": kind}


def cut(x: Tensor, n: int) -> list[Tensor]:
    """[B, T, n * d] -> n tensors [B, T, d], taken from neighbouring features."""
    d = x.shape[-1] // n
    return [x[..., i * d : (i + 1) * d] for i in range(n)]


def dots(qs: list[Tensor], ks: list[Tensor], scale: float) -> Tensor:
    """Per-head lists of [B, Q, d] and [B, K, d] -> [B, H, Q, K]."""
    return torch.stack(
        [torch.stack([q[b].mm(k[b].t()) * scale for q, k in zip(qs, ks, strict=False)]) for b in range(qs[0].shape[0])]
    )


def normal(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the last axis among visible keys; rows that see nothing are zero."""
    seen = visible.expand_as(scores)
    top = scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    e = torch.where(seen, (scores - top).exp(), torch.zeros_like(scores))
    total = e.sum(-1, keepdim=True)
    return torch.where(total > 0, e / total, torch.zeros_like(e))


def mixed(weights: Tensor, vs: list[Tensor]) -> Tensor:
    """[B, H, Q, K] and H tensors [B, K, d] -> [B, Q, H * d]."""
    return torch.cat(
        [torch.stack([weights[b, h].mm(v[b]) for b in range(v.shape[0])]) for h, v in enumerate(vs)], dim=-1
    )


def affine(layer: nn.Linear, x: Tensor) -> Tensor:
    y = x.matmul(layer.weight.t())
    return y if layer.bias is None else y + layer.bias


def all_visible() -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def causal_visible(q: int, k: int) -> Tensor:
    return torch.tensor([[[[j <= i for j in range(k)] for i in range(q)]]])


def lengths_mask(lengths: list[int], size: int) -> Tensor:
    """True for real tokens, [B, size]."""
    return torch.tensor([[j < n for j in range(size)] for n in lengths])


# 1. plain @, student code


class CausalSelfAttention(nn.Module):
    def __init__(self, emb: int = 12, heads: int = 3, max_len: int = 16) -> None:
        super().__init__()
        assert emb % heads == 0
        self.heads = heads
        self.head_dim = emb // heads
        self.W_q = nn.Linear(emb, emb, bias=False)
        self.W_k = nn.Linear(emb, emb, bias=False)
        self.W_v = nn.Linear(emb, emb, bias=False)
        self.W_o = nn.Linear(emb, emb)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.W_q(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = self.W_k(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        v = self.W_v(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / self.head_dim**0.5
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        att = torch.softmax(att, dim=-1)
        att = self.drop(att)
        out = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.W_o(out)


def ref_plain_at(m: CausalSelfAttention, x: Tensor) -> tuple[list[Entry], Tensor]:
    seen = causal_visible(x.shape[1], x.shape[1])
    w = normal(dots(cut(affine(m.W_q, x), 3), cut(affine(m.W_k, x), 3), 1 / math.sqrt(4)), seen)
    return [entry(w, seen, "self")], affine(m.W_o, mixed(w, cut(affine(m.W_v, x), 3)))


add_case("plain_at_causal_tril", CausalSelfAttention, lambda: (randn(1, 2, 7, 12),), ref_plain_at)


# 2. torch.matmul, after "The Annotated Transformer"


def clones(module: nn.Module, n: int) -> nn.ModuleList:
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


def annotated_attention(query, key, value, mask=None, dropout=None):
    """Compute 'Scaled Dot Product Attention'"""
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h: int = 2, d_model: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, attn = annotated_attention(query, key, value, mask=mask, dropout=self.dropout)
        self.attn = attn.detach()
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


def inputs_annotated() -> tuple:
    memory = randn(3, 3, 8, 12)
    return randn(2, 3, 5, 12), memory, memory, lengths_mask([8, 5, 3], 8).unsqueeze(1)


def ref_annotated(
    m: MultiHeadedAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[list[Entry], Tensor]:
    a, b, c, d = m.linears
    seen = mask.reshape(3, 1, 1, 8)
    w = normal(dots(cut(affine(a, query), 2), cut(affine(b, key), 2), 1 / math.sqrt(6)), seen)
    return [entry(w, seen, "cross")], affine(d, mixed(w, cut(affine(c, value), 2)))


add_case("matmul_annotated_transformer_cross", MultiHeadedAttention, inputs_annotated, ref_annotated)


# 3. bmm with batch * heads folded, old HF BART


class BartLikeAttention(nn.Module):
    def __init__(self, embed_dim: int = 20, num_heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor: Tensor, seq_len: int, bsz: int) -> Tensor:
        return tensor.view(bsz, seq_len, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bsz, tgt_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states) * self.scaling
        key_states = self._shape(self.k_proj(hidden_states), -1, bsz)
        value_states = self._shape(self.v_proj(hidden_states), -1, bsz)
        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.view(*proj_shape)
        value_states = value_states.view(*proj_shape)

        src_len = key_states.size(1)
        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        if attention_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len) + attention_mask
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights_reshaped = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
        attn_weights = attn_weights_reshaped.view(bsz * self.num_heads, tgt_len, src_len)
        attn_probs = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.bmm(attn_probs, value_states)
        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        attn_output = attn_output.reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn_output), attn_weights_reshaped


def inputs_bart() -> tuple:
    keep = lengths_mask([6, 4], 6)
    mask = torch.zeros(2, 1, 6, 6).masked_fill(~keep[:, None, None, :], torch.finfo(torch.float32).min)
    return randn(4, 2, 6, 20), mask


def ref_bart(m: BartLikeAttention, x: Tensor, mask: Tensor) -> tuple[list[Entry], Tensor]:
    seen = mask == 0
    w = normal(dots(cut(affine(m.q_proj, x), 4), cut(affine(m.k_proj, x), 4), 1 / math.sqrt(5)), seen)
    return [entry(w, seen, "self")], affine(m.out_proj, mixed(w, cut(affine(m.v_proj, x), 4)))


add_case("bmm_folded_bart", BartLikeAttention, inputs_bart, ref_bart)


# 4. baddbmm with alpha / beta, diffusers-like block: self (empty input, beta=0), then cross (mask, beta=1)


class BaddbmmAttention(nn.Module):
    def __init__(self, query_dim: int, context_dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, query_dim), nn.Dropout(0.0)])

    def head_to_batch_dim(self, t: Tensor) -> Tensor:
        b, s, d = t.shape
        return (
            t.reshape(b, s, self.heads, d // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, s, d // self.heads)
        )

    def batch_to_head_dim(self, t: Tensor) -> Tensor:
        bh, s, d = t.shape
        return (
            t.reshape(bh // self.heads, self.heads, s, d)
            .permute(0, 2, 1, 3)
            .reshape(bh // self.heads, s, d * self.heads)
        )

    def get_attention_scores(self, query: Tensor, key: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            baddbmm_input = torch.empty(
                query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device
            )
            beta = 0
        else:
            baddbmm_input = attention_mask
            beta = 1
        scores = torch.baddbmm(baddbmm_input, query, key.transpose(-1, -2), beta=beta, alpha=self.scale)
        return scores.softmax(dim=-1)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (self.head_to_batch_dim(t) for t in (self.to_q(x), self.to_k(context), self.to_v(context)))
        if mask is not None:
            mask = mask.repeat_interleave(self.heads, dim=0)
        probs = self.get_attention_scores(q, k, mask)
        x = self.batch_to_head_dim(torch.bmm(probs, v))
        for layer in self.to_out:
            x = layer(x)
        return x


class DiffusionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(10)
        self.attn1 = BaddbmmAttention(10, 10, heads=3, dim_head=4)
        self.norm2 = nn.LayerNorm(10)
        self.attn2 = BaddbmmAttention(10, 14, heads=3, dim_head=4)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        bias = (1 - context_mask.to(x.dtype)) * -10000.0
        x = self.attn1(self.norm1(x)) + x
        return self.attn2(self.norm2(x), context, bias.unsqueeze(1)) + x


def ref_baddbmm(m: DiffusionBlock, x: Tensor, context: Tensor, context_mask: Tensor) -> tuple[list[Entry], Tensor]:
    found = []
    bias = (1 - context_mask.double()) * -10000.0
    for att, norm, kind in ((m.attn1, m.norm1, "self"), (m.attn2, m.norm2, "cross")):
        y = norm(x)
        src = y if kind == "self" else context
        s = dots(cut(affine(att.to_q, y), 3), cut(affine(att.to_k, src), 3), 0.5)
        if kind == "cross":
            s = s + bias.reshape(2, 1, 1, 5)
        w = normal(s, all_visible())
        found.append(entry(w, all_visible(), kind))
        x = x + affine(att.to_out[0], mixed(w, cut(affine(att.to_v, src), 3)))
    return found, x


add_case(
    "baddbmm_diffusers_self_and_cross",
    DiffusionBlock,
    lambda: (randn(5, 2, 9, 10), randn(6, 2, 5, 14), lengths_mask([5, 3], 5).long()),
    ref_baddbmm,
)


# 5. einsum 'bqhd,bkhd->bhqk'


class EinsumAttention(nn.Module):
    def __init__(self, dim: int = 28, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.fc_out = nn.Linear(dim, dim)

    def forward(self, values: Tensor, keys: Tensor, query: Tensor) -> Tensor:
        N, q_len = query.shape[:2]
        queries = self.query(query).reshape(N, q_len, self.num_heads, -1)
        keys = self.key(keys).reshape(N, keys.shape[1], self.num_heads, -1)
        values = self.value(values).reshape(N, values.shape[1], self.num_heads, -1)
        energy = torch.einsum("bqhd,bkhd->bhqk", [queries, keys])
        future = torch.triu(torch.ones(q_len, q_len, device=query.device), diagonal=1).bool()
        energy = energy.masked_fill(future, torch.finfo(energy.dtype).min)
        attention = torch.softmax(energy / (queries.shape[-1] ** (1 / 2)), dim=3)
        out = torch.einsum("bhqk,bkhd->bqhd", [attention, values]).flatten(2)
        return self.fc_out(out)


def inputs_einsum() -> tuple:
    x = randn(7, 3, 5, 28)
    return x, x, x


def ref_einsum(m: EinsumAttention, x: Tensor, *_: Tensor) -> tuple[list[Entry], Tensor]:
    seen = causal_visible(5, 5)
    w = normal(dots(cut(affine(m.query, x), 4), cut(affine(m.key, x), 4), 1 / math.sqrt(7)), seen)
    return [entry(w, seen, "self")], affine(m.fc_out, mixed(w, cut(affine(m.value, x), 4)))


add_case("einsum_bqhd_bkhd_bhqk_causal", EinsumAttention, inputs_einsum, ref_einsum)


# 6. einsum with heads last, AlphaFold-like: pair bias, mask bias, sigmoid gate


class PairBiasedAttention(nn.Module):
    def __init__(self, c_m: int = 11, c_z: int = 4, c_hidden: int = 5, no_heads: int = 3, inf: float = 1e9) -> None:
        super().__init__()
        self.no_heads, self.c_hidden, self.inf = no_heads, c_hidden, inf
        self.linear_q = nn.Linear(c_m, no_heads * c_hidden, bias=False)
        self.linear_k = nn.Linear(c_m, no_heads * c_hidden, bias=False)
        self.linear_v = nn.Linear(c_m, no_heads * c_hidden, bias=False)
        self.linear_z = nn.Linear(c_z, no_heads, bias=False)
        self.linear_g = nn.Linear(c_m, no_heads * c_hidden)
        self.linear_o = nn.Linear(no_heads * c_hidden, c_m)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.no_heads, self.c_hidden))  # noqa: E731
        q, k, v = split(self.linear_q(m)), split(self.linear_k(m)), split(self.linear_v(m))
        a = torch.einsum("bqhd,bkhd->bqkh", q * self.c_hidden**-0.5, k)
        a = a + self.linear_z(z)
        a = a + (self.inf * (mask - 1))[:, None, :, None]
        a = torch.softmax(a, dim=2)
        o = torch.einsum("bqkh,bkhd->bqhd", a, v)
        o = o * split(self.linear_g(m).sigmoid())
        return self.linear_o(o.flatten(-2))


def ref_pair_biased(m: PairBiasedAttention, x: Tensor, z: Tensor, mask: Tensor) -> tuple[list[Entry], Tensor]:
    seen = (mask > 0).reshape(2, 1, 1, 6)
    s = dots(cut(affine(m.linear_q, x), 3), cut(affine(m.linear_k, x), 3), 1 / math.sqrt(5))
    w = normal(s + affine(m.linear_z, z).permute(0, 3, 1, 2), seen)
    o = mixed(w, cut(affine(m.linear_v, x), 3))
    return [entry(w, seen, "self")], affine(m.linear_o, o / (1 + (-affine(m.linear_g, x)).exp()))


add_case(
    "einsum_heads_last_pair_bias",
    PairBiasedAttention,
    lambda: (randn(8, 2, 6, 11), randn(9, 2, 6, 6, 4), lengths_mask([4, 6], 6).float()),
    ref_pair_biased,
)


# 7. einsum over five axes, grouped heads


class GroupedQueryEinsum(nn.Module):
    def __init__(self, d_model: int = 17, n_groups: int = 2, n_rep: int = 3, d_head: int = 4) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.randn(d_model, n_groups, n_rep, d_head) / d_model**0.5)
        self.wk = nn.Parameter(torch.randn(d_model, n_groups, d_head) / d_model**0.5)
        self.wv = nn.Parameter(torch.randn(d_model, n_groups, d_head) / d_model**0.5)
        self.wo = nn.Parameter(torch.randn(n_groups, n_rep, d_head, d_model) / (n_groups * n_rep * d_head) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btm,mgrd->btgrd", x, self.wq)
        k = torch.einsum("btm,mgd->btgd", x, self.wk)
        v = torch.einsum("btm,mgd->btgd", x, self.wv)
        logits = torch.einsum("bqgrd,bkgd->bgrqk", q, k) * q.size(-1) ** -0.5
        t = x.size(1)
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        logits = torch.where(causal, logits, logits.new_tensor(float("-inf")))
        probs = logits.softmax(-1)
        y = torch.einsum("bgrqk,bkgd->bqgrd", probs, v)
        return torch.einsum("bqgrd,grdm->bqm", y, self.wo)


def ref_grouped(m: GroupedQueryEinsum, x: Tensor) -> tuple[list[Entry], Tensor]:
    seen = causal_visible(5, 5)
    order = [(g, r) for g in range(2) for r in range(3)]
    w = normal(dots([x @ m.wq[:, g, r] for g, r in order], [x @ m.wk[:, g] for g, _ in order], 0.5), seen)
    mix = mixed(w, [x @ m.wv[:, g] for g, _ in order])
    return [entry(w, seen, "self")], mix @ m.wo.reshape(24, 17)


add_case("einsum_five_axes_grouped", GroupedQueryEinsum, lambda: (randn(10, 2, 5, 17) / 2,), ref_grouped)


# 8. transposed scores: column vectors, A = softmax(K^T Q) over its rows, O = V A


class ColumnAttention(nn.Module):
    """Tokens are columns: x is [B, E, T]."""

    def __init__(self, channels: int = 12, ctx_channels: int = 10, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Conv1d(channels, channels, 1)
        self.to_k = nn.Conv1d(ctx_channels, channels, 1)
        self.to_v = nn.Conv1d(ctx_channels, channels, 1)
        self.proj = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, ctx: Tensor) -> Tensor:
        b, c, n = x.shape
        q = self.to_q(x).reshape(b, self.heads, c // self.heads, n)
        k = self.to_k(ctx).reshape(b, self.heads, c // self.heads, -1)
        v = self.to_v(ctx).reshape(b, self.heads, c // self.heads, -1)
        sim = k.transpose(2, 3) @ q
        sim = sim / math.sqrt(c // self.heads)
        attn = sim.softmax(dim=-2)
        out = v @ attn
        return x + self.proj(out.reshape(b, c, n))


def pointwise(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """[B, C, T] -> [B, T, C']"""
    return x.permute(0, 2, 1) @ conv.weight[:, :, 0].t() + conv.bias


def ref_column(m: ColumnAttention, x: Tensor, ctx: Tensor) -> tuple[list[Entry], Tensor]:
    w = normal(dots(cut(pointwise(m.to_q, x), 3), cut(pointwise(m.to_k, ctx), 3), 0.5), all_visible())
    o = mixed(w, cut(pointwise(m.to_v, ctx), 3)).permute(0, 2, 1)
    return [entry(w, all_visible(), "cross")], x + pointwise(m.proj, o).permute(0, 2, 1)


add_case(
    "transposed_scores_column_vectors_cross",
    ColumnAttention,
    lambda: (randn(11, 2, 12, 5), randn(12, 2, 10, 9)),
    ref_column,
)


# 9. fused qkv with chunk, GPT-like, run in train mode with dropout on the weights


class GPTAttention(nn.Module):
    def __init__(self, n_embd: int = 15, n_head: int = 3, block_size: int = 12, pdrop: float = 0.3) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_embd = n_embd
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(pdrop)
        self.resid_dropout = nn.Dropout(pdrop)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


def ref_gpt(m: GPTAttention, x: Tensor) -> tuple[list[Entry], Tensor]:
    q, k, v = cut(affine(m.c_attn, x), 3)
    seen = causal_visible(8, 8)
    w = normal(dots(cut(q, 3), cut(k, 3), 1 / math.sqrt(5)), seen)
    return [entry(w, seen, "self")], affine(m.c_proj, mixed(w, cut(v, 3)))


add_case("fused_qkv_chunk_gpt_train_dropout", GPTAttention, lambda: (randn(13, 2, 8, 15),), ref_gpt, train=True)
add_case("fused_qkv_chunk_gpt_eval", GPTAttention, lambda: (randn(13, 2, 8, 15),), ref_gpt)


# 10. fused qkv with reshape(3, ...) / permute / unbind, a two-block ViT


class ViTAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ViTAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    def __init__(self, dim: int = 10, num_heads: int = 2, classes: int = 7) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 9, dim))
        self.blocks = nn.Sequential(*[ViTBlock(dim, num_heads) for _ in range(2)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, img: Tensor) -> Tensor:
        x = self.patch_embed(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x)[:, 0])


def ref_vit(m: TinyViT, img: Tensor) -> tuple[list[Entry], Tensor]:
    patches = [img[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten(1) for i in range(2) for j in range(4)]
    x = torch.stack(patches, dim=1) @ m.patch_embed.weight.flatten(1).t() + m.patch_embed.bias
    x = torch.cat([torch.cat([m.cls_token] * len(x)), x], dim=1) + m.pos_embed
    found = []
    for block in m.blocks:
        q, k, v = cut(affine(block.attn.qkv, block.norm1(x)), 3)
        w = normal(dots(cut(q, 2), cut(k, 2), 1 / math.sqrt(5)), all_visible())
        found.append(entry(w, all_visible(), "self"))
        x = x + affine(block.attn.proj, mixed(w, cut(v, 2)))
        x = x + block.mlp(block.norm2(x))
    return found, affine(m.head, m.norm(x)[:, 0])


add_case("fused_qkv_permute_unbind_vit_two_blocks", TinyViT, lambda: (randn(14, 3, 3, 8, 16),), ref_vit)


# 11. sequence first [T, B, E], old fairseq


class FairseqAttention(nn.Module):
    def __init__(self, embed_dim: int = 20, num_heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.normal_(self.in_proj_bias, std=0.1)

    def forward(
        self, query: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tgt_len, bsz, embed_dim = query.size()
        q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q = q * self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        src_len = k.size(1)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if attn_mask is not None:
            attn_weights += attn_mask.unsqueeze(0)
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = (
                attn_weights.float()
                .masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf"))
                .type_as(attn_weights)
            )
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_weights = F.softmax(attn_weights.float(), dim=-1).type_as(attn_weights)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)

        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn = self.out_proj(attn)
        avg_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len).sum(dim=1) / self.num_heads
        return attn, avg_weights


def inputs_fairseq() -> tuple:
    future = torch.triu(torch.full((7, 7), float("-inf")), 1)
    return randn(15, 7, 3, 20), ~lengths_mask([7, 4, 6], 7), future


def ref_fairseq(m: FairseqAttention, x: Tensor, padding: Tensor, _: Tensor) -> tuple[list[Entry], Tensor]:
    x = torch.stack([x[:, b] for b in range(3)])
    q, k, v = [x @ w.t() + b for w, b in zip(m.in_proj_weight.split(20), m.in_proj_bias.split(20), strict=False)]
    seen = causal_visible(7, 7) & ~padding.reshape(3, 1, 1, 7)
    w = normal(dots(cut(q, 4), cut(k, 4), 1 / math.sqrt(5)), seen)
    return [entry(w, seen, "self")], affine(m.out_proj, mixed(w, cut(v, 4))).transpose(0, 1)


add_case("sequence_first_fairseq", FairseqAttention, inputs_fairseq, ref_fairseq)


# 12. Python loop over heads, one Linear each


class LoopOverHeads(nn.Module):
    def __init__(self, input_dim: int = 9, n_heads: int = 3, key_dim: int = 4, value_dim: int = 6) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.key_dim = key_dim
        self.queries = nn.ModuleList([nn.Linear(input_dim, key_dim) for _ in range(n_heads)])
        self.keys = nn.ModuleList([nn.Linear(input_dim, key_dim) for _ in range(n_heads)])
        self.values = nn.ModuleList([nn.Linear(input_dim, value_dim) for _ in range(n_heads)])
        self.output = nn.Linear(n_heads * value_dim, input_dim)
        self.softmax = nn.Softmax(dim=2)

    def forward(self, sentence: Tensor) -> Tensor:
        results = []
        for i in range(self.n_heads):
            q_i = self.queries[i](sentence)
            k_i = self.keys[i](sentence)
            v_i = self.values[i](sentence)
            score = torch.matmul(q_i, k_i.permute(0, 2, 1))
            score = score / math.sqrt(self.key_dim)
            weight = self.softmax(score)
            results.append(torch.matmul(weight, v_i))
        return self.output(torch.cat(results, dim=2))


def ref_loop(m: LoopOverHeads, x: Tensor) -> tuple[list[Entry], Tensor]:
    w = normal(dots([affine(each, x) for each in m.queries], [affine(each, x) for each in m.keys], 0.5), all_visible())
    return [entry(w, all_visible(), "self")], affine(m.output, mixed(w, [affine(each, x) for each in m.values]))


add_case("python_loop_one_linear_per_head", LoopOverHeads, lambda: (randn(16, 2, 5, 9),), ref_loop)


# 13. loop over slices of one projection, decoder looking at an encoder


class SlicedCrossAttention(nn.Module):
    def __init__(self, dim: int = 12, enc_dim: int = 10, n_heads: int = 2) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d = dim // n_heads
        self.proj_q = nn.Linear(dim, dim)
        self.proj_kv = nn.Linear(enc_dim, 2 * dim)
        self.proj_o = nn.Linear(dim, dim)

    def forward(self, dec: Tensor, enc: Tensor, enc_pad: Tensor) -> Tensor:
        q_all = self.proj_q(dec)
        kv_all = self.proj_kv(enc)
        k_all, v_all = kv_all[:, :, : self.n_heads * self.d], kv_all[:, :, self.n_heads * self.d :]
        heads = []
        for h in range(self.n_heads):
            lo, hi = h * self.d, (h + 1) * self.d
            q, k, v = q_all[:, :, lo:hi], k_all[:, :, lo:hi], v_all[:, :, lo:hi]
            s = torch.bmm(q, k.transpose(1, 2)).div(self.d**0.5)
            s = torch.where(enc_pad[:, None, :], torch.full_like(s, -1e9), s)
            heads.append(torch.bmm(s.softmax(2), v))
        return dec + self.proj_o(torch.cat(heads, 2))


def ref_sliced(m: SlicedCrossAttention, dec: Tensor, enc: Tensor, pad: Tensor) -> tuple[list[Entry], Tensor]:
    k, v = cut(affine(m.proj_kv, enc), 2)
    seen = ~pad.reshape(3, 1, 1, 8)
    w = normal(dots(cut(affine(m.proj_q, dec), 2), cut(k, 2), 1 / math.sqrt(6)), seen)
    return [entry(w, seen, "cross")], dec + affine(m.proj_o, mixed(w, cut(v, 2)))


add_case(
    "python_loop_slices_cross_padding",
    SlicedCrossAttention,
    lambda: (randn(17, 3, 5, 12), randn(18, 3, 8, 10), ~lengths_mask([6, 8, 3], 8)),
    ref_sliced,
)


# 14. heads in an nn.ModuleList, concatenated (video-lecture GPT); B == H on purpose


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd: int, head_size: int, block_size: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        _B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * C**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        v = self.value(x)
        return wei @ v


class MultiHead(nn.Module):
    def __init__(self, n_embd: int = 12, num_heads: int = 3, block_size: int = 10) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads, block_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


def ref_module_list(m: MultiHead, x: Tensor) -> tuple[list[Entry], Tensor]:
    seen = causal_visible(8, 8)
    w = normal(
        dots([affine(h.query, x) for h in m.heads], [affine(h.key, x) for h in m.heads], 1 / math.sqrt(12)), seen
    )
    return [entry(w, seen, "self")], affine(m.proj, mixed(w, [affine(h.value, x) for h in m.heads]))


add_case("heads_in_module_list_concatenated", MultiHead, lambda: (randn(19, 3, 8, 12),), ref_module_list)


# 15. heads written into a preallocated buffer, old-BERT mask


class BufferedHeads(nn.Module):
    def __init__(self, hidden: int = 20, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        extended = attention_mask.unsqueeze(1).to(hidden_states.dtype)
        extended = (1.0 - extended) * -10000.0
        b, t, _ = hidden_states.shape
        q = self.query(hidden_states).view(b, t, self.heads, self.size)
        k = self.key(hidden_states).view(b, t, self.heads, self.size)
        v = self.value(hidden_states).view(b, t, self.heads, self.size)
        context = hidden_states.new_zeros(b, t, self.heads, self.size)
        for i in range(self.heads):
            scores = q[:, :, i] @ k[:, :, i].mT / math.sqrt(self.size) + extended
            context[:, :, i] = torch.softmax(scores, -1) @ v[:, :, i]
        return self.LayerNorm(self.dense(context.view(b, t, -1)) + hidden_states)


def ref_buffered(m: BufferedHeads, x: Tensor, mask: Tensor) -> tuple[list[Entry], Tensor]:
    s = dots(cut(affine(m.query, x), 4), cut(affine(m.key, x), 4), 1 / math.sqrt(5))
    w = normal(s + (1 - mask.double()).reshape(2, 1, 1, 6) * -10000.0, all_visible())
    return [entry(w, all_visible(), "self")], m.LayerNorm(affine(m.dense, mixed(w, cut(affine(m.value, x), 4))) + x)


add_case(
    "heads_into_preallocated_buffer_old_bert",
    BufferedHeads,
    lambda: (randn(20, 2, 6, 20), lengths_mask([6, 4], 6).long()),
    ref_buffered,
)


# 16. purely functional, numpy-flavoured, no batch axis, hand-made softmax; T == d on purpose


def fn_softmax(x: Tensor) -> Tensor:
    exp_x = torch.exp(x - torch.amax(x, dim=-1, keepdim=True))
    return exp_x / torch.sum(exp_x, dim=-1, keepdim=True)


def fn_layer_norm(x: Tensor, g: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    mean = torch.mean(x, dim=-1, keepdim=True)
    variance = torch.var(x, dim=-1, keepdim=True, unbiased=False)
    return g * (x - mean) / torch.sqrt(variance + eps) + b


def fn_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def fn_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return fn_softmax(q @ k.T / q.shape[-1] ** 0.5 + mask) @ v


def fn_mha(x: Tensor, p: nn.ParameterDict, n_head: int) -> Tensor:
    x = fn_linear(x, p["c_attn_w"], p["c_attn_b"])
    qkv = torch.split(x, x.shape[-1] // 3, dim=-1)
    qkv_heads = [torch.split(t, t.shape[-1] // n_head, dim=-1) for t in qkv]
    causal_mask = (1 - torch.tril(torch.ones(x.shape[0], x.shape[0], dtype=x.dtype))) * -1e10
    out_heads = [fn_attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads, strict=False)]
    return fn_linear(torch.hstack(out_heads), p["c_proj_w"], p["c_proj_b"])


def fn_block(x: Tensor, p: nn.ParameterDict, n_head: int) -> Tensor:
    x = x + fn_mha(fn_layer_norm(x, p["ln_1_g"], p["ln_1_b"]), p, n_head)
    h = fn_layer_norm(x, p["ln_2_g"], p["ln_2_b"])
    return x + fn_linear(F.gelu(fn_linear(h, p["fc_w"], p["fc_b"])), p["out_w"], p["out_b"])


class FunctionalGPT(nn.Module):
    def __init__(self, vocab: int = 23, n: int = 12, n_head: int = 2, n_layer: int = 2) -> None:
        super().__init__()
        self.n_head = n_head
        shapes = {
            "c_attn_w": (n, 3 * n),
            "c_attn_b": (3 * n,),
            "c_proj_w": (n, n),
            "c_proj_b": (n,),
            "fc_w": (n, 2 * n),
            "fc_b": (2 * n,),
        }
        shapes |= {"out_w": (2 * n, n), "out_b": (n,), "ln_1_g": (n,), "ln_1_b": (n,), "ln_2_g": (n,), "ln_2_b": (n,)}
        self.wte = nn.Parameter(torch.randn(vocab, n))
        self.wpe = nn.Parameter(torch.randn(16, n))
        self.params = nn.ModuleList(
            [
                nn.ParameterDict(
                    {k: nn.Parameter(float(k.endswith("_g")) + 0.3 * torch.randn(s)) for k, s in shapes.items()}
                )
                for _ in range(n_layer)
            ]
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte[ids] + self.wpe[: len(ids)]
        for p in self.params:
            x = fn_block(x, p, self.n_head)
        return x @ self.wte.T


def ref_functional(m: FunctionalGPT, ids: Tensor) -> tuple[list[Entry], Tensor]:
    x = (F.embedding(ids, m.wte) + m.wpe[:6]).unsqueeze(0)
    seen = causal_visible(6, 6)
    found = []
    for p in m.params:
        q, k, v = cut(F.layer_norm(x, (12,), p["ln_1_g"], p["ln_1_b"]) @ p["c_attn_w"] + p["c_attn_b"], 3)
        w = normal(dots(cut(q, 2), cut(k, 2), 1 / math.sqrt(6)), seen)
        found.append(entry(w, seen, "self"))
        x = x + mixed(w, cut(v, 2)) @ p["c_proj_w"] + p["c_proj_b"]
        x = (
            x
            + F.gelu(F.layer_norm(x, (12,), p["ln_2_g"], p["ln_2_b"]) @ p["fc_w"] + p["fc_b"]) @ p["out_w"]
            + p["out_b"]
        )
    return found, (x @ m.wte.t())[0]


add_case(
    "purely_functional_picogpt_two_blocks", FunctionalGPT, lambda: (torch.tensor([4, 22, 0, 7, 7, 13]),), ref_functional
)


# 17. Keras-like: query / value / key, EinsumDense kernels [D, H, K]


class EinsumDense(nn.Module):
    def __init__(self, equation: str, kernel_shape: tuple[int, ...], bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.equation = equation
        self.kernel = nn.Parameter(torch.empty(kernel_shape))
        self.bias = nn.Parameter(0.1 * torch.randn(bias_shape))
        nn.init.normal_(self.kernel, std=0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum(self.equation, inputs, self.kernel) + self.bias


class KerasMultiHeadAttention(nn.Module):
    def __init__(
        self, num_heads: int = 3, key_dim: int = 4, value_dim: int = 6, query_in: int = 10, value_in: int = 11
    ) -> None:
        super().__init__()
        self._key_dim = key_dim
        self._query_dense = EinsumDense("abc,cde->abde", (query_in, num_heads, key_dim), (num_heads, key_dim))
        self._key_dense = EinsumDense("abc,cde->abde", (value_in, num_heads, key_dim), (num_heads, key_dim))
        self._value_dense = EinsumDense("abc,cde->abde", (value_in, num_heads, value_dim), (num_heads, value_dim))
        self._output_dense = EinsumDense("abcd,cde->abe", (num_heads, value_dim, query_in), (query_in,))
        self._dot_product_equation = "aecd,abcd->acbe"
        self._combine_equation = "acbe,aecd->abcd"
        self._dropout_layer = nn.Dropout(0.1)

    def _masked_softmax(self, attention_scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is not None:
            attention_mask = attention_mask.unsqueeze(-3)
            adder = (1.0 - attention_mask.to(attention_scores.dtype)) * -1e9
            attention_scores = attention_scores + adder
        return F.softmax(attention_scores, dim=-1)

    def _compute_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query = torch.multiply(query, 1.0 / math.sqrt(float(self._key_dim)))
        attention_scores = torch.einsum(self._dot_product_equation, key, query)
        attention_scores = self._masked_softmax(attention_scores, attention_mask)
        dropped = self._dropout_layer(attention_scores)
        return torch.einsum(self._combine_equation, dropped, value), attention_scores

    def forward(
        self, query: Tensor, value: Tensor, key: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        key = value if key is None else key
        output, scores = self._compute_attention(
            self._query_dense(query), self._key_dense(key), self._value_dense(value), attention_mask
        )
        return self._output_dense(output), scores


def inputs_keras() -> tuple:
    g = torch.Generator().manual_seed(21)
    mask = torch.rand(2, 5, 7, generator=g) > 0.4
    mask[:, :, 2] = True
    return randn(22, 2, 5, 10) / 2, randn(23, 2, 7, 11) / 2, None, mask


def ref_keras(
    m: KerasMultiHeadAttention, query: Tensor, value: Tensor, _: None, mask: Tensor
) -> tuple[list[Entry], Tensor]:
    def per_head(dense: EinsumDense, x: Tensor) -> list[Tensor]:
        return [x @ dense.kernel[:, h] + dense.bias[h] for h in range(3)]

    seen = mask.reshape(2, 1, 5, 7)
    w = normal(dots(per_head(m._query_dense, query), per_head(m._key_dense, value), 0.5), seen)
    o = mixed(w, per_head(m._value_dense, value)) @ m._output_dense.kernel.reshape(18, 10) + m._output_dense.bias
    return [entry(w, seen, "cross")], o


add_case("keras_like_einsum_dense_cross", KerasMultiHeadAttention, inputs_keras, ref_keras)


# 18. Flax-like: DenseGeneral, boolean masks combined, big-negative where, '...qhd,...khd->...hqk'


class DenseGeneral(nn.Module):
    """Contracts the trailing ``n_in`` axes of the input with the leading axes of the kernel."""

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], use_bias: bool) -> None:
        super().__init__()
        fan_in = math.prod(in_shape)
        self.n_in = len(in_shape)
        self.kernel = nn.Parameter(torch.randn(*in_shape, *out_shape) / math.sqrt(fan_in))
        self.bias = nn.Parameter(0.1 * torch.randn(out_shape)) if use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tensordot(x, self.kernel, dims=self.n_in)
        return y if self.bias is None else y + self.bias


def flax_causal_mask(tokens: Tensor) -> Tensor:
    idx = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
    return (idx[..., :, None] >= idx[..., None, :]).unsqueeze(-3)


def flax_attention_mask(query_valid: Tensor, key_valid: Tensor) -> Tensor:
    return (query_valid[..., :, None] & key_valid[..., None, :]).unsqueeze(-3)


def flax_combine_masks(*masks: Tensor | None) -> Tensor | None:
    present = [m for m in masks if m is not None]
    if not present:
        return None
    mask, *rest = present
    for other in rest:
        mask = torch.logical_and(mask, other)
    return mask


def dot_product_attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    depth = query.shape[-1]
    query = query / math.sqrt(depth)
    attn_weights = torch.einsum("...qhd,...khd->...hqk", query, key)
    if mask is not None:
        big_neg = torch.finfo(attn_weights.dtype).min
        attn_weights = torch.where(mask, attn_weights, torch.tensor(big_neg, dtype=attn_weights.dtype))
    return torch.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)


class FlaxSelfAttention(nn.Module):
    def __init__(self, features: int = 13, num_heads: int = 2, head_dim: int = 6) -> None:
        super().__init__()
        self.query = DenseGeneral((features,), (num_heads, head_dim), use_bias=False)
        self.key = DenseGeneral((features,), (num_heads, head_dim), use_bias=False)
        self.value = DenseGeneral((features,), (num_heads, head_dim), use_bias=False)
        self.out = DenseGeneral((num_heads, head_dim), (features,), use_bias=True)

    def forward(self, inputs_q: Tensor, valid: Tensor) -> Tensor:
        mask = flax_combine_masks(flax_causal_mask(valid), flax_attention_mask(torch.ones_like(valid), valid))
        query, key, value = self.query(inputs_q), self.key(inputs_q), self.value(inputs_q)
        attn_weights = dot_product_attention_weights(query, key, mask)
        x = torch.einsum("...hqk,...khd->...qhd", attn_weights, value)
        return self.out(x)


def ref_flax(m: FlaxSelfAttention, x: Tensor, valid: Tensor) -> tuple[list[Entry], Tensor]:
    seen = causal_visible(9, 9) & valid.reshape(3, 1, 1, 9)
    q, k, v = [[x @ dense.kernel[:, h] for h in range(2)] for dense in (m.query, m.key, m.value)]
    w = normal(dots(q, k, 1 / math.sqrt(6)), seen)
    return [entry(w, seen, "self")], mixed(w, v) @ m.out.kernel.reshape(12, 13) + m.out.bias


add_case(
    "flax_like_causal_and_padding",
    FlaxSelfAttention,
    lambda: (randn(24, 3, 9, 13) / 2, lengths_mask([9, 5, 7], 9)),
    ref_flax,
)


# 19. ALiBi


def alibi_slopes(n: int) -> list[float]:
    start = 2 ** (-(2 ** -(math.log2(n) - 3)))
    return [start * start**i for i in range(n)]


class ALiBiAttention(nn.Module):
    def __init__(self, d_model: int = 20, n_heads: int = 4, max_len: int = 32) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.scale = math.sqrt(d_model // n_heads)
        self.kqv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)
        self.register_buffer("m", torch.tensor(alibi_slopes(n_heads)).view(1, n_heads, 1, 1))
        self.register_buffer("mask", torch.tril(torch.ones(1, 1, max_len, max_len)))

    @staticmethod
    def relative_positions(seq_len: int) -> Tensor:
        x = torch.arange(seq_len)[None, :]
        y = torch.arange(seq_len)[:, None]
        return x - y

    def forward(self, x: Tensor) -> Tensor:
        batch_size, seq_len, _ = x.shape
        key, query, value = self.kqv(x).chunk(3, dim=-1)
        key = key.view(batch_size, seq_len, self.n_heads, -1).permute(0, 2, 3, 1)
        query = query.view(batch_size, seq_len, self.n_heads, -1).transpose(1, 2)
        value = value.view(batch_size, seq_len, self.n_heads, -1).transpose(1, 2)
        bias = self.m * self.relative_positions(seq_len)
        score = torch.matmul(query, key) / self.scale + bias
        score = score.masked_fill(self.mask[:, :, :seq_len, :seq_len] == 0, float("-inf"))
        attn = F.softmax(score, dim=-1)
        out = torch.matmul(attn, value)
        out = out.transpose(1, 2).reshape(batch_size, seq_len, -1)
        return self.wo(out)


def ref_alibi(m: ALiBiAttention, x: Tensor) -> tuple[list[Entry], Tensor]:
    k, q, v = cut(affine(m.kqv, x), 3)
    slopes = [2.0 ** (-8.0 * (h + 1) / 4) for h in range(4)]
    bias = torch.tensor(
        [[[[-slope * (i - j) for j in range(9)] for i in range(9)] for slope in slopes]], dtype=torch.float64
    )
    seen = causal_visible(9, 9)
    w = normal(dots(cut(q, 4), cut(k, 4), 1 / math.sqrt(5)) + bias, seen)
    return [entry(w, seen, "self")], affine(m.wo, mixed(w, cut(v, 4)))


add_case("alibi_causal", ALiBiAttention, lambda: (randn(25, 2, 9, 20),), ref_alibi)


# 20. T5 relative position bias table, decoder layer: biased causal self-attention, then cross-attention


class T5LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class T5Attention(nn.Module):
    def __init__(
        self, d_model: int, d_kv: int, n_heads: int, has_bias: bool, num_buckets: int = 8, max_distance: int = 20
    ) -> None:
        super().__init__()
        self.n_heads, self.d_kv = n_heads, d_kv
        self.num_buckets, self.max_distance = num_buckets, max_distance
        inner = n_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads) if has_bias else None

    def bucket(self, relative_position: Tensor) -> Tensor:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = self.num_buckets // 2
        is_small = relative_position < max_exact
        large = max_exact + (
            torch.log(relative_position.float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (self.num_buckets - max_exact)
        ).to(torch.long)
        large = torch.min(large, torch.full_like(large, self.num_buckets - 1))
        return torch.where(is_small, relative_position, large)

    def compute_bias(self, query_length: int, key_length: int) -> Tensor:
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        assert self.relative_attention_bias is not None
        values = self.relative_attention_bias(self.bucket(memory_position - context_position))
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden: Tensor, mask: Tensor, key_value_states: Tensor | None = None) -> Tensor:
        batch_size, seq_length = hidden.shape[:2]
        source = hidden if key_value_states is None else key_value_states

        def shape(states: Tensor) -> Tensor:
            return states.view(batch_size, -1, self.n_heads, self.d_kv).transpose(1, 2)

        query_states, key_states, value_states = shape(self.q(hidden)), shape(self.k(source)), shape(self.v(source))
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        if self.relative_attention_bias is None:
            position_bias = torch.zeros((1, self.n_heads, seq_length, key_states.shape[2]), dtype=scores.dtype)
        else:
            position_bias = self.compute_bias(seq_length, key_states.shape[2])
        position_bias = position_bias + mask
        scores += position_bias
        attn_weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = F.dropout(attn_weights, p=0.1, training=self.training)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous().view(batch_size, -1, self.n_heads * self.d_kv)
        return self.o(attn_output)


class T5DecoderLayer(nn.Module):
    def __init__(self, d_model: int = 14, d_kv: int = 3, n_heads: int = 4) -> None:
        super().__init__()
        self.norm_self = T5LayerNorm(d_model)
        self.SelfAttention = T5Attention(d_model, d_kv, n_heads, has_bias=True)
        self.norm_cross = T5LayerNorm(d_model)
        self.EncDecAttention = T5Attention(d_model, d_kv, n_heads, has_bias=False)

    def forward(self, hidden: Tensor, encoder_hidden: Tensor, encoder_mask: Tensor) -> Tensor:
        lowest = torch.finfo(hidden.dtype).min
        t = hidden.shape[1]
        ids = torch.arange(t)
        causal = (ids[None, :] <= ids[:, None]).to(hidden.dtype)
        self_mask = (1.0 - causal)[None, None] * lowest
        cross_mask = (1.0 - encoder_mask[:, None, None, :].to(hidden.dtype)) * lowest
        hidden = hidden + self.SelfAttention(self.norm_self(hidden), self_mask)
        return hidden + self.EncDecAttention(self.norm_cross(hidden), cross_mask, encoder_hidden)


def ref_t5(m: T5DecoderLayer, x: Tensor, enc: Tensor, enc_mask: Tensor) -> tuple[list[Entry], Tensor]:
    def bucket(distance: int) -> int:
        if distance < 4:
            return max(distance, 0)
        return min(7, 4 + int(math.log(distance / 4) / math.log(20 / 4) * 4))

    table = m.SelfAttention.relative_attention_bias.weight
    bias = torch.stack(
        [torch.stack([torch.stack([table[bucket(i - j), h] for j in range(9)]) for i in range(9)]) for h in range(4)]
    )
    found = []
    for att, norm, kind in ((m.SelfAttention, m.norm_self, "self"), (m.EncDecAttention, m.norm_cross, "cross")):
        y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        src = y if kind == "self" else enc
        s = dots(cut(affine(att.q, y), 4), cut(affine(att.k, src), 4), 1.0)
        seen = causal_visible(9, 9) if kind == "self" else enc_mask.bool().reshape(3, 1, 1, 5)
        w = normal(s + bias if kind == "self" else s, seen)
        found.append(entry(w, seen, kind))
        x = x + affine(att.o, mixed(w, cut(affine(att.v, src), 4)))
    return found, x


add_case(
    "t5_relative_bias_decoder_self_and_cross",
    T5DecoderLayer,
    lambda: (randn(26, 3, 9, 14), randn(27, 3, 5, 14), lengths_mask([5, 2, 4], 5).long()),
    ref_t5,
)
