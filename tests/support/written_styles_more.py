"""The second half of ``written_styles``."""

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
Reference = tuple[list[Entry], Tensor | None]


@dataclass
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    truth: Callable[..., list[Entry]]
    train: bool = False
    # the same reference with the output of the module rebuilt from the weights (None: not rebuilt)
    reference: Callable[..., Reference] | None = None
    tolerance: float = 2e-5
    rows_sum_to_one: bool = True


CASES: list[Case] = []


def add(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple],
    reference: Callable[..., Reference],
    train: bool = False,
    tolerance: float = 2e-5,
    rows_sum_to_one: bool = True,
) -> None:
    seed = 100 + len(CASES)

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return build().train(train)

    def seeded_inputs() -> tuple:
        torch.manual_seed(1000 + seed)
        return inputs()

    def truth(module: nn.Module, *args: Any) -> list[Entry]:
        with torch.no_grad():
            return reference(module, *args)[0]

    CASES.append(Case(name, make, seeded_inputs, truth, train, reference, tolerance, rows_sum_to_one))


# ---------------------------------------------------------------- helpers of the references (float64)


def f64(module: nn.Module) -> Any:
    return copy.deepcopy(module).double()


def heads_of(x: Tensor, n: int) -> Tensor:
    """[B, T, n*d] -> [B, n, T, d]"""
    return torch.stack(x.chunk(n, dim=-1), dim=1)


def join(x: Tensor) -> Tensor:
    """[B, n, T, d] -> [B, T, n*d]"""
    return torch.cat(list(x.unbind(1)), dim=-1)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, Q, d], [B, H, K, d] -> [B, H, Q, K]"""
    return (q[:, :, :, None, :] * k[:, :, None, :, :]).sum(-1)


def weights_of(scores: Tensor, visible: Tensor | None = None) -> Tensor:
    assert scores.dtype == torch.float64
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


def mix(w: Tensor, v: Tensor) -> Tensor:
    """[B, H, Q, K], [B, H, K, d] -> [B, H, Q, d]"""
    return (w[..., None] * v[:, :, None, :, :]).sum(-2)


def entry(w: Tensor, visible: Tensor | None = None, kind: str = "self") -> Entry:
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return {"weights": w, "visible": visible, "kind": kind}


def causal_visible(t: int) -> Tensor:
    return torch.tensor([[j <= i for j in range(t)] for i in range(t)])[None, None]


def lengths_visible(lengths: list[int], t: int) -> Tensor:
    """[B, T], True for real tokens"""
    return torch.tensor([[j < n for j in range(t)] for n in lengths])


# ---------------------------------------------------------------- windows with relative bias and shift mask


def window_partition(x: Tensor, window_size: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, C)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:  # noqa: N803
    B = int(windows.shape[0] / (H * W / window_size / window_size))
    x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim: int, window_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.window_size = window_size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window_size - 1) ** 2, num_heads))
        coords = torch.stack(torch.meshgrid(torch.arange(window_size), torch.arange(window_size), indexing="ij"))
        flat = torch.flatten(coords, 1)
        rel = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        rel[:, :, 0] += window_size - 1
        rel[:, :, 1] += window_size - 1
        rel[:, :, 0] *= 2 * window_size - 1
        self.register_buffer("relative_position_index", rel.sum(-1))
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = self.softmax(attn)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class ShiftedWindowLayer(nn.Module):
    def __init__(self, dim: int, resolution: tuple[int, int], window_size: int, shift: int, num_heads: int):
        super().__init__()
        self.window_size, self.shift_size = window_size, shift
        self.attn = WindowAttention(dim, window_size, num_heads)
        H, W = resolution
        img_mask = torch.zeros((1, H, W, 1))
        slices = (slice(0, -window_size), slice(-window_size, -shift), slice(-shift, None))
        cnt = 0
        for h in slices:
            for w in slices:
                img_mask[:, h, w, :] = cnt
                cnt += 1
        mask_windows = window_partition(img_mask, window_size).view(-1, window_size * window_size)
        attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
        attn_mask = attn_mask.masked_fill(attn_mask != 0, (-100.0)).masked_fill(attn_mask == 0, 0.0)
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, x: Tensor) -> Tensor:
        _B, H, W, C = x.shape
        shifted = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = window_partition(shifted, self.window_size).view(-1, self.window_size**2, C)
        out = self.attn(windows, mask=self.attn_mask).view(-1, self.window_size, self.window_size, C)
        out = window_reverse(out, self.window_size, H, W)
        return x + torch.roll(out, shifts=(self.shift_size, self.shift_size), dims=(1, 2))


def ref_swin(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    B, H, W, C = x.shape
    s, shift, n = m.window_size, m.shift_size, m.attn.num_heads

    def region(i: int, size: int) -> int:
        return 0 if i < size - s else (1 if i < size - shift else 2)

    tokens, places = [], []
    for b in range(B):
        for wi in range(H // s):
            for wj in range(W // s):
                place = [(wi * s + i, wj * s + j) for i in range(s) for j in range(s)]
                tokens.append(torch.stack([x[b, (r + shift) % H, (c + shift) % W] for r, c in place]))
                places.append((b, place))
    t = torch.stack(tokens)
    q, k, v = (heads_of(p, n) for p in m.attn.qkv(t).chunk(3, dim=-1))
    scores = dots(q, k) / math.sqrt(C // n)
    visible = torch.zeros(len(places), 1, s * s, s * s, dtype=torch.bool)
    for w_index, (_, place) in enumerate(places):
        for i, (ri, ci) in enumerate(place):
            for j, (rj, cj) in enumerate(place):
                row = (ri - rj + s - 1) * (2 * s - 1) + (ci - cj + s - 1)
                scores[w_index, :, i, j] += m.attn.relative_position_bias_table[row]
                visible[w_index, 0, i, j] = (region(ri, H), region(ci, W)) == (region(rj, H), region(cj, W))
    w = weights_of(scores, visible)
    o = m.attn.proj(join(mix(w, v)))
    out = x.clone()
    for w_index, (b, place) in enumerate(places):
        for i, (r, c) in enumerate(place):
            out[b, (r + shift) % H, (c + shift) % W] += o[w_index, i]
    return [entry(w, visible)], out


add(
    "swin_shifted_windows",
    lambda: ShiftedWindowLayer(15, (4, 6), 2, 1, 3),
    lambda: (torch.randn(2, 4, 6, 15),),
    ref_swin,
)


# ---------------------------------------------------------------- relative shift with memory (i j b n order)


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head: int, d_model: int, d_head: int):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_head))
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_head))
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (d_head**0.5)
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, d_model, 2.0) / d_model)))

    def _rel_shift(self, x: Tensor) -> Tensor:
        zero_pad = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w: Tensor, mems: Tensor) -> Tensor:
        qlen, bsz = w.size(0), w.size(1)
        klen = qlen + mems.size(0)
        pos_seq = torch.arange(klen - 1, -1, -1.0, device=w.device, dtype=w.dtype)
        sinusoid = torch.outer(pos_seq, self.inv_freq)
        r = torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1)
        w_heads = self.qkv_net(torch.cat([mems, w], 0))
        r_head_k = self.r_net(r).view(klen, self.n_head, self.d_head)
        q, k, v = torch.chunk(w_heads, 3, dim=-1)
        q = q[-qlen:]
        q = q.view(qlen, bsz, self.n_head, self.d_head)
        k = k.view(klen, bsz, self.n_head, self.d_head)
        v = v.view(klen, bsz, self.n_head, self.d_head)
        AC = torch.einsum("ibnd,jbnd->ijbn", q + self.r_w_bias, k)
        BD = torch.einsum("ibnd,jnd->ijbn", q + self.r_r_bias, r_head_k)
        BD = self._rel_shift(BD)
        attn_score = AC + BD
        attn_score.mul_(self.scale)
        attn_mask = torch.triu(w.new_ones(qlen, klen), diagonal=1 + mems.size(0)).bool()[:, :, None]
        attn_score = attn_score.float().masked_fill(attn_mask[:, :, :, None], -float("inf")).type_as(attn_score)
        attn_prob = F.softmax(attn_score, dim=1)
        vec = torch.einsum("ijbn,jbnd->ibnd", attn_prob, v)
        vec = vec.contiguous().view(qlen, bsz, self.n_head * self.d_head)
        return self.layer_norm(w + self.o_net(vec))


def ref_xl(module: nn.Module, w_in: Tensor, mems: Tensor) -> Reference:
    m, x, mem = f64(module), w_in.double(), mems.double()
    T, B, _E = x.shape
    M = mem.shape[0]
    n = m.n_head
    full = torch.cat([mem, x]).transpose(0, 1)
    q, k, v = (heads_of(p, n) for p in m.qkv_net(full).chunk(3, dim=-1))
    q = q[:, :, M:]
    scores = torch.zeros(B, n, T, M + T, dtype=torch.float64)
    visible = torch.zeros(1, 1, T, M + T, dtype=torch.bool)
    for i in range(T):
        for j in range(M + T):
            distance = i + M - j
            if distance < 0:
                continue
            visible[0, 0, i, j] = True
            angle = distance * m.inv_freq
            r = m.r_net(torch.cat([angle.sin(), angle.cos()])).view(n, m.d_head)
            content = ((q[:, :, i] + m.r_w_bias) * k[:, :, j]).sum(-1)
            position = ((q[:, :, i] + m.r_r_bias) * r).sum(-1)
            scores[:, :, i, j] = (content + position) / math.sqrt(m.d_head)
    w = weights_of(scores, visible)
    out = m.layer_norm(x + m.o_net(join(mix(w, v))).transpose(0, 1))
    return [entry(w, visible)], out


add(
    "transformer_xl_rel_shift",
    lambda: RelPartialLearnableMultiHeadAttn(3, 10, 4),
    lambda: (torch.randn(5, 2, 10), torch.randn(4, 2, 10)),
    ref_xl,
)


# ---------------------------------------------------------------- disentangled c2p / p2c with gather


class DisentangledSelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, max_rel: int):
        super().__init__()
        self.num_attention_heads = num_heads
        self.att_span = max_rel
        self.query_proj = nn.Linear(hidden_size, hidden_size)
        self.key_proj = nn.Linear(hidden_size, hidden_size)
        self.value_proj = nn.Linear(hidden_size, hidden_size)
        self.rel_embeddings = nn.Embedding(max_rel * 2, hidden_size)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        x = x.view((*x.size()[:-1], self.num_attention_heads, -1))
        return x.permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), x.size(-1))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        B, L, _ = hidden_states.shape
        query_layer = self.transpose_for_scores(self.query_proj(hidden_states))
        key_layer = self.transpose_for_scores(self.key_proj(hidden_states))
        value_layer = self.transpose_for_scores(self.value_proj(hidden_states))
        scale = math.sqrt(query_layer.size(-1) * 3)
        attention_scores = torch.bmm(query_layer, key_layer.transpose(-1, -2) / scale)
        ids = torch.arange(L)
        relative_pos = ids[:, None] - ids[None, :]
        span = self.att_span
        rel = self.rel_embeddings.weight.unsqueeze(0)
        pos_key = self.transpose_for_scores(self.key_proj(rel)).repeat(B, 1, 1)
        pos_query = self.transpose_for_scores(self.query_proj(rel)).repeat(B, 1, 1)
        c2p_att = torch.bmm(query_layer, pos_key.transpose(-1, -2))
        c2p_pos = torch.clamp(relative_pos + span, 0, span * 2 - 1)
        c2p_att = torch.gather(c2p_att, dim=-1, index=c2p_pos.expand(query_layer.size(0), L, L))
        score = c2p_att / scale
        p2c_att = torch.bmm(key_layer, pos_query.transpose(-1, -2))
        p2c_pos = torch.clamp(-relative_pos + span, 0, span * 2 - 1)
        p2c_att = torch.gather(p2c_att, dim=-1, index=p2c_pos.expand(query_layer.size(0), L, L)).transpose(-1, -2)
        score += p2c_att / scale
        attention_scores = attention_scores + score
        attention_scores = attention_scores.view(-1, self.num_attention_heads, L, L)
        rmask = ~(attention_mask.unsqueeze(1).unsqueeze(2) * attention_mask.unsqueeze(1).unsqueeze(-1)).bool()
        output = attention_scores.masked_fill(rmask, torch.finfo(attention_scores.dtype).min)
        output = torch.softmax(output, -1)
        output.masked_fill_(rmask, 0)
        context = torch.bmm(output.view(-1, L, L), value_layer)
        context = context.view(-1, self.num_attention_heads, L, context.size(-1)).permute(0, 2, 1, 3).contiguous()
        return context.view(B, L, -1)


def ref_deberta(module: nn.Module, x: Tensor, mask: Tensor) -> Reference:
    m, x = f64(module), x.double()
    B, L, E = x.shape
    n, span = m.num_attention_heads, m.att_span
    q, k, v = (heads_of(f(x), n) for f in (m.query_proj, m.key_proj, m.value_proj))
    pk = torch.stack(m.key_proj(m.rel_embeddings.weight).chunk(n, -1))
    pq = torch.stack(m.query_proj(m.rel_embeddings.weight).chunk(n, -1))
    scores = torch.zeros(B, n, L, L, dtype=torch.float64)
    for i in range(L):
        for j in range(L):
            there = max(0, min(2 * span - 1, i - j + span))
            content = (q[:, :, i] * k[:, :, j]).sum(-1)
            c2p = (q[:, :, i] * pk[:, there]).sum(-1)
            back = max(0, min(2 * span - 1, -(j - i) + span))
            p2c = (k[:, :, j] * pq[:, back]).sum(-1)
            scores[:, :, i, j] = (content + c2p + p2c) / math.sqrt(3 * (E // n))
    real = mask.bool()
    visible = (real[:, :, None] & real[:, None, :])[:, None]
    w = weights_of(scores, visible)
    return [entry(w, visible)], join(mix(w, v))


add(
    "deberta_c2p_p2c",
    lambda: DisentangledSelfAttention(20, 4, 3),
    lambda: (torch.randn(3, 7, 20), lengths_visible([7, 5, 6], 7).long()),
    ref_deberta,
)


# ---------------------------------------------------------------- cross attention, another length and width


class CrossAttention(nn.Module):
    def __init__(self, query_dim: int, context_dim: int, heads: int, dim_head: int):
        super().__init__()
        inner_dim = dim_head * heads
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(0.1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.heads

        def fold(t: Tensor) -> Tensor:
            b, n, _ = t.shape
            return t.reshape(b, n, h, -1).permute(0, 2, 1, 3).reshape(b * h, n, -1)

        q, k, v = map(fold, (self.to_q(x), self.to_k(context), self.to_v(context)))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b i j, b j d -> b i d", attn, v)
        out = out.reshape(x.shape[0], h, x.shape[1], -1).permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1)
        return self.to_out(out)


def ref_cross(module: nn.Module, x: Tensor, context: Tensor) -> Reference:
    m, x, c = f64(module), x.double(), context.double()
    q, k, v = heads_of(m.to_q(x), m.heads), heads_of(m.to_k(c), m.heads), heads_of(m.to_v(c), m.heads)
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]))
    return [entry(w, None, "cross")], m.to_out(join(mix(w, v)))


add(
    "cross_attention_other_length",
    lambda: CrossAttention(9, 11, 4, 5),
    lambda: (torch.randn(3, 6, 9), torch.randn(3, 8, 11)),
    ref_cross,
)


# ---------------------------------------------------------------- cached decoding, past concatenated


class GPT2CachedAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, n_ctx: int = 16):
        super().__init__()
        self.n_head, self.split_size = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def _attn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = torch.matmul(q, k)
        w = w / math.sqrt(v.size(-1))
        keys_before, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - keys_before : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        w = nn.Softmax(dim=-1)(w)
        return torch.matmul(w, v)

    def split_heads(self, x: Tensor, k: bool = False) -> Tensor:
        x = x.view(*((*x.size()[:-1], self.n_head, x.size(-1) // self.n_head)))
        return x.permute(0, 2, 3, 1) if k else x.permute(0, 2, 1, 3)

    def forward(self, x: Tensor, layer_past: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.c_attn(x).split(self.split_size, dim=2)
        query, key, value = self.split_heads(query), self.split_heads(key, k=True), self.split_heads(value)
        past_key, past_value = layer_past[0].transpose(-2, -1), layer_past[1]
        key = torch.cat((past_key, key), dim=-1)
        value = torch.cat((past_value, value), dim=-2)
        present = torch.stack((key.transpose(-2, -1), value))
        a = self._attn(query, key, value).permute(0, 2, 1, 3).contiguous()
        return self.c_proj(a.view(*a.size()[:-2], -1)), present


def ref_cached(module: nn.Module, x: Tensor, layer_past: Tensor) -> Reference:
    m, x, past = f64(module), x.double(), layer_past.double()
    q, k, v = (heads_of(p, m.n_head) for p in m.c_attn(x).chunk(3, -1))
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    P, T = past.shape[3], x.shape[1]
    visible = torch.tensor([[j <= P + i for j in range(P + T)] for i in range(T)])[None, None]
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], m.c_proj(join(mix(w, v)))


add(
    "gpt2_cached_past",
    lambda: GPT2CachedAttention(12, 4),
    lambda: (torch.randn(2, 3, 12), torch.randn(2, 2, 4, 5, 3)),
    ref_cached,
)


class StepwiseDecoder(nn.Module):
    """Feeds the tokens one by one and keeps the keys and values in lists."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        keys, values, outs = [], [], []
        for i in range(t):
            tok = x[:, i]
            q = self.wq(tok).view(b, self.heads, 1, -1)
            keys.append(self.wk(tok).view(b, self.heads, -1))
            values.append(self.wv(tok).view(b, self.heads, -1))
            k, v = torch.stack(keys, dim=2), torch.stack(values, dim=2)
            p = torch.softmax((q * k).sum(-1) / math.sqrt(q.size(-1)), dim=-1)
            outs.append((p.unsqueeze(-2) @ v).reshape(b, e))
        return torch.stack(outs, dim=1)


def ref_stepwise(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(f(x), m.heads) for f in (m.wq, m.wk, m.wv))
    entries, outs = [], []
    for i in range(x.shape[1]):
        w = weights_of(dots(q[:, :, i : i + 1], k[:, :, : i + 1]) / math.sqrt(q.shape[-1]))
        entries.append(entry(w))
        outs.append(join(mix(w, v[:, :, : i + 1])))
    return entries, torch.cat(outs, 1)


add("stepwise_decoder_lists", lambda: StepwiseDecoder(15, 3), lambda: (torch.randn(2, 4, 15),), ref_stepwise)


# ---------------------------------------------------------------- multi-query, grouped heads


class MultiQueryAttention(nn.Module):
    """One key and value head, shared by broadcasting."""

    def __init__(self, dim: int, heads: int, dim_head: int):
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.to_q(x).reshape(b, n, self.heads, self.dim_head).transpose(1, 2) * self.dim_head**-0.5
        k, v = self.to_kv(x).chunk(2, dim=-1)
        sim = torch.matmul(q, k.unsqueeze(1).transpose(-1, -2))
        attn = sim.softmax(dim=-1)
        out = torch.matmul(attn, v.unsqueeze(1))
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


def ref_mqa(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q = heads_of(m.to_q(x), m.heads)
    k, v = m.to_kv(x).chunk(2, -1)
    k, v = torch.stack([k] * m.heads, 1), torch.stack([v] * m.heads, 1)
    w = weights_of(dots(q, k) / math.sqrt(m.dim_head))
    return [entry(w)], m.to_out(join(mix(w, v)))


add("multi_query_broadcast", lambda: MultiQueryAttention(10, 4, 3), lambda: (torch.randn(2, 7, 10),), ref_mqa)


class FalconLikeAttention(nn.Module):
    """Multi-query, the heads moved into the query axis so that one bmm per batch is enough."""

    def __init__(self, hidden: int, n_head: int):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden // n_head
        self.query_key_value = nn.Linear(hidden, hidden + 2 * self.head_dim)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, hidden_states: Tensor) -> Tensor:
        bs, L, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(bs, L, self.num_heads + 2, self.head_dim)
        query, key, value = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        query = query.reshape(bs, L * self.num_heads, self.head_dim)
        key, value = key.squeeze(2), value.squeeze(2)
        scores = torch.bmm(query, key.transpose(1, 2)).div(math.sqrt(self.head_dim))
        scores = scores.view(bs, L, self.num_heads, L)
        mask = torch.ones(L, L, dtype=torch.bool).tril()[None, :, None, :]
        scores = scores.masked_fill(mask.logical_not(), torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1)
        context = torch.bmm(probs.view(bs, L * self.num_heads, L), value)
        return self.dense(context.view(bs, L, -1))


def ref_falcon(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    n, d, T = m.num_heads, m.head_dim, x.shape[1]
    parts = heads_of(m.query_key_value(x), n + 2)
    q, k, v = parts[:, :n], parts[:, n : n + 1].expand(-1, n, -1, -1), parts[:, n + 1 :].expand(-1, n, -1, -1)
    visible = causal_visible(T)
    w = weights_of(dots(q, k) / math.sqrt(d), visible)
    return [entry(w, visible)], m.dense(join(mix(w, v)))


add("multi_query_heads_in_query_axis", lambda: FalconLikeAttention(12, 3), lambda: (torch.randn(2, 5, 12),), ref_falcon)


class GroupedQueryAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv: int, head_dim: int):
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv, head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xk = torch.repeat_interleave(xk, self.n_heads // self.n_kv, dim=2)
        xv = torch.repeat_interleave(xv, dim=2, repeats=self.n_heads // self.n_kv)
        xq, keys, values = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        mask = torch.triu(torch.full((1, 1, seqlen, seqlen), float("-inf")), diagonal=1).type_as(x)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        out = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(out)


def ref_gqa(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = heads_of(m.wq(x), m.n_heads), heads_of(m.wk(x), m.n_kv), heads_of(m.wv(x), m.n_kv)
    group = [h // (m.n_heads // m.n_kv) for h in range(m.n_heads)]
    visible = causal_visible(x.shape[1])
    w = weights_of(dots(q, k[:, group]) / math.sqrt(m.head_dim), visible)
    return [entry(w, visible)], m.wo(join(mix(w, v[:, group])))


add("grouped_repeat_interleave", lambda: GroupedQueryAttention(10, 4, 2, 3), lambda: (torch.randn(3, 6, 10),), ref_gqa)


# ---------------------------------------------------------------- rotary embeddings


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    batch, num_kv, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_kv, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_kv * n_rep, slen, head_dim)


class LlamaStyleAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv: int):
        super().__init__()
        self.num_heads, self.num_kv = num_heads, num_kv
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        inv_freq = 1.0 / (100.0 ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        bsz, q_len, _ = hidden_states.size()
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv, self.head_dim).transpose(1, 2)
        freqs = torch.outer(torch.arange(q_len).to(self.inv_freq), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos()[None, None], emb.sin()[None, None]
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        key, value = repeat_kv(key, self.num_heads // self.num_kv), repeat_kv(value, self.num_heads // self.num_kv)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim)
        attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
        attn_output = torch.matmul(attn_weights, value)
        attn_output = attn_output.transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)


def turned(x: Tensor, pairs: list[tuple[int, int]], frequencies: list[float]) -> Tensor:
    """Rotates each pair of components of [B, H, T, d] by (position * frequency)."""
    out = x.clone()
    for t in range(x.shape[2]):
        for (a, b), f in zip(pairs, frequencies, strict=False):
            c, s = math.cos(t * f), math.sin(t * f)
            out[:, :, t, a] = x[:, :, t, a] * c - x[:, :, t, b] * s
            out[:, :, t, b] = x[:, :, t, a] * s + x[:, :, t, b] * c
    return out


def ref_llama(module: nn.Module, x: Tensor, mask: Tensor) -> Reference:
    m, x = f64(module), x.double()
    d = m.head_dim
    pairs = [(i, i + d // 2) for i in range(d // 2)]
    freqs = [100.0 ** (-2 * i / d) for i in range(d // 2)]
    q = turned(heads_of(m.q_proj(x), m.num_heads), pairs, freqs)
    k = turned(heads_of(m.k_proj(x), m.num_kv), pairs, freqs)
    v = heads_of(m.v_proj(x), m.num_kv)
    group = [h // (m.num_heads // m.num_kv) for h in range(m.num_heads)]
    visible = mask == 0
    w = weights_of(dots(q, k[:, group]) / math.sqrt(d), visible)
    return [entry(w, visible)], m.o_proj(join(mix(w, v[:, group])))


def llama_inputs() -> tuple:
    visible = causal_visible(7) & lengths_visible([7, 5], 7)[:, None, None, :]
    return torch.randn(2, 7, 24), torch.zeros(2, 1, 7, 7).masked_fill(~visible, torch.finfo(torch.float32).min)


add("rotary_rotate_half", lambda: LlamaStyleAttention(24, 4, 2), llama_inputs, ref_llama)


class ComplexRotaryAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, head_dim: int, max_len: int = 12):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        self.wqkv = nn.Linear(dim, 3 * n_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        freqs = 1.0 / (50.0 ** (torch.arange(0, head_dim, 2)[: head_dim // 2].float() / head_dim))
        freqs = torch.outer(torch.arange(max_len).float(), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs))

    def apply_rotary(self, x: Tensor) -> Tensor:
        x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        freqs = self.freqs_cis[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(x_ * freqs).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        xq, xk, xv = (t.view(B, T, self.n_heads, self.head_dim) for t in self.wqkv(x).chunk(3, -1))
        xq, xk = self.apply_rotary(xq), self.apply_rotary(xk)
        scores = torch.einsum("bqhd,bkhd->bhqk", xq, xk) * self.head_dim**-0.5
        p = torch.softmax(scores, dim=-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", p, xv).flatten(2))


def ref_complex(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    d = m.head_dim
    pairs = [(2 * i, 2 * i + 1) for i in range(d // 2)]
    freqs = [50.0 ** (-2 * i / d) for i in range(d // 2)]
    q, k, v = (heads_of(p, m.n_heads) for p in m.wqkv(x).chunk(3, -1))
    w = weights_of(dots(turned(q, pairs, freqs), turned(k, pairs, freqs)) / math.sqrt(d))
    return [entry(w)], m.wo(join(mix(w, v)))


add("rotary_complex", lambda: ComplexRotaryAttention(10, 3, 4), lambda: (torch.randn(2, 8, 10),), ref_complex)


# ---------------------------------------------------------------- q/k norm, cosine, softcap, half precision


class QKNormAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


def ref_qknorm(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(p, m.num_heads) for p in m.qkv(x).chunk(3, -1))
    w = weights_of(dots(m.q_norm(q), m.k_norm(k)) / math.sqrt(m.head_dim))
    return [entry(w)], m.proj(join(mix(w, v)))


def build_qknorm() -> nn.Module:
    m = QKNormAttention(15, 3)
    with torch.no_grad():
        for norm in (m.q_norm, m.k_norm):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return m


add("qk_layernorm", build_qknorm, lambda: (torch.randn(2, 6, 15),), ref_qknorm)


class CosineAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((heads, 1, 1)) + torch.arange(heads).view(-1, 1, 1)))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (f(x).view(B, N, self.heads, -1).transpose(1, 2) for f in (self.q_lin, self.k_lin, self.v_lin))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        attn = attn * logit_scale
        attn = F.softmax(attn, dim=-1)
        return self.out((attn @ v).transpose(1, 2).reshape(B, N, C))


def ref_cosine(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(f(x), m.heads) for f in (m.q_lin, m.k_lin, m.v_lin))
    lengths = q.pow(2).sum(-1).sqrt()[..., :, None] * k.pow(2).sum(-1).sqrt()[..., None, :]
    w = weights_of(dots(q, k) / lengths * m.logit_scale.exp().clamp(max=100))
    return [entry(w)], m.out(join(mix(w, v)))


add("cosine_learned_temperature", lambda: CosineAttention(12, 2), lambda: (torch.randn(3, 5, 12),), ref_cosine)


class SoftcapAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, head_dim: int, cap: float = 2.0):
        super().__init__()
        self.num_heads, self.head_dim, self.cap = num_heads, head_dim, cap
        self.qkv_proj = nn.Linear(dim, 3 * num_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, n, _ = hidden_states.shape
        xq, xk, xv = self.qkv_proj(hidden_states).split([self.num_heads * self.head_dim] * 3, dim=-1)
        xq = xq.view(b, n, -1, self.head_dim).transpose(1, 2)
        xk = xk.view(b, n, -1, self.head_dim).transpose(1, 2)
        xv = xv.view(b, n, -1, self.head_dim).transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) * self.head_dim**-0.5
        scores = scores / self.cap
        scores = torch.tanh(scores)
        scores = scores * self.cap
        mask = torch.full((1, 1, n, n), -2.3819763e38).triu(1)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        return self.o_proj(torch.matmul(scores, xv).transpose(1, 2).contiguous().view(b, n, -1))


def ref_softcap(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(p, m.num_heads) for p in m.qkv_proj(x).chunk(3, -1))
    visible = causal_visible(x.shape[1])
    w = weights_of(m.cap * torch.tanh(dots(q, k) / math.sqrt(m.head_dim) / m.cap), visible)
    return [entry(w, visible)], m.o_proj(join(mix(w, v)))


add("tanh_softcap", lambda: SoftcapAttention(9, 4, 5), lambda: (3 * torch.randn(2, 6, 9),), ref_softcap)


class HalfAttention(nn.Module):
    """bfloat16 weights, softmax in float32 and back."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        w = (q @ k.mT) * (c // self.heads) ** -0.5
        w = torch.softmax(w.to(torch.float32), dim=-1).to(x.dtype)
        return self.out((w @ v).transpose(1, 2).flatten(2))


def ref_half(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(p, m.heads) for p in m.qkv(x).chunk(3, -1))
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]))
    return [entry(w)], m.out(join(mix(w, v)))


add(
    "bf16_softmax_in_float32",
    lambda: HalfAttention(16, 2),
    lambda: (torch.randn(3, 7, 16).bfloat16(),),
    ref_half,
    tolerance=2e-2,
)


# ---------------------------------------------------------------- masks


class MultiHeadedAttention(nn.Module):
    """The tutorial layout: one function, four linears, masked_fill."""

    def __init__(self, h: int, d_model: int, fill: float = float("-inf")):
        super().__init__()
        self.d_k, self.h, self.fill = d_model // h, h, fill
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(p=0.1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, self.fill)
        p_attn = scores.softmax(dim=-1)
        p_attn = self.dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(1)
        nb = query.size(0)
        query, key, value = [
            lin(x).view(nb, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, p_attn = self.attention(query, key, value, mask)
        self.attn = p_attn.detach()
        x = x.transpose(1, 2).contiguous().view(nb, -1, self.h * self.d_k)
        return self.linears[-1](x)


def ref_tutorial(kind: str) -> Callable[..., Reference]:
    def reference(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Reference:
        m = f64(module)
        q, k, v = (heads_of(m.linears[i](x.double()), m.h) for i, x in enumerate((query, key, value)))
        visible = (mask != 0)[:, None]
        w = weights_of(dots(q, k) / math.sqrt(m.d_k), visible)
        return [entry(w, visible, kind)], m.linears[3](join(mix(w, v)))

    return reference


def tutorial_target() -> tuple:
    x = torch.randn(2, 6, 12)
    mask = lengths_visible([6, 4], 6)[:, None, :] & causal_visible(6)[0]
    return x, x, x, mask


def tutorial_source() -> tuple:
    memory = torch.randn(3, 8, 10)
    return torch.randn(3, 5, 10), memory, memory, lengths_visible([8, 3, 6], 8)[:, None, :].long()


add("masked_fill_inf_tutorial_self", lambda: MultiHeadedAttention(4, 12), tutorial_target, ref_tutorial("self"))
add(
    "masked_fill_1e9_tutorial_source", lambda: MultiHeadedAttention(2, 10, -1e9), tutorial_source, ref_tutorial("cross")
)


class FinfoMinAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.k_proj, self.v_proj = (
            nn.Linear(embed_dim, embed_dim, bias=False),
            nn.Linear(embed_dim, embed_dim, bias=False),
        )
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False), nn.Linear(embed_dim, embed_dim)
        self.register_buffer("window", torch.tensor(3))

    def forward(self, hidden: Tensor) -> Tensor:
        """Local causal attention; the scores are not scaled."""
        new_shape = (*hidden.size()[:-1], self.num_heads, self.head_dim)
        query = self.q_proj(hidden).view(new_shape).permute(0, 2, 1, 3).to(torch.float32)
        key = self.k_proj(hidden).view(new_shape).permute(0, 2, 1, 3).to(torch.float32)
        value = self.v_proj(hidden).view(new_shape).permute(0, 2, 1, 3)
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        t = hidden.size(1)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        local = torch.bitwise_xor(causal, torch.tril(causal, -int(self.window)))
        attn_weights.masked_fill_(~local, torch.finfo(attn_weights.dtype).min)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1).to(value.dtype)
        out = torch.matmul(attn_weights, value).permute(0, 2, 1, 3).contiguous()
        return self.out_proj(out.view((*out.size()[:-2], -1)))


def ref_finfo(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(f(x), m.num_heads) for f in (m.q_proj, m.k_proj, m.v_proj))
    T = x.shape[1]
    visible = torch.tensor([[0 <= i - j < 3 for j in range(T)] for i in range(T)])[None, None]
    w = weights_of(dots(q, k), visible)
    return [entry(w, visible)], m.out_proj(join(mix(w, v)))


add("finfo_min_local_unscaled", lambda: FinfoMinAttention(12, 3), lambda: (torch.randn(2, 8, 12),), ref_finfo)


class WhereMaskAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, n_positions: int = 10):
        super().__init__()
        self.n_head = n_head
        self.register_buffer("bias", torch.tril(torch.ones((n_positions, n_positions), dtype=torch.bool))[None, None])
        self.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
        self.weight = nn.Parameter(torch.randn(n_embd, 3 * n_embd) * 0.3)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        qkv = torch.addmm(torch.zeros(3 * e), x.view(-1, e), self.weight).view(b, t, 3 * e)
        query, key, value = (y.view(b, t, self.n_head, -1).permute(0, 2, 1, 3) for y in qkv.split(e, dim=2))
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / torch.full([], value.size(-1) ** 0.5, dtype=attn_weights.dtype)
        causal_mask = self.bias[:, :, :t, :t]
        attn_weights = torch.where(causal_mask, attn_weights, self.masked_bias.to(attn_weights.dtype))
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        return self.c_proj(torch.matmul(attn_weights, value).permute(0, 2, 1, 3).reshape(b, t, e))


def ref_where(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(p, m.n_head) for p in (x @ m.weight).chunk(3, -1))
    visible = causal_visible(x.shape[1])
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], m.c_proj(join(mix(w, v)))


add("torch_where_causal", lambda: WhereMaskAttention(10, 2), lambda: (torch.randn(3, 7, 10),), ref_where)


class AdditiveBufferAttention(nn.Module):
    """OpenAI CLIP: the mask is a buffer of zeros and -inf, tokens come first."""

    def __init__(self, width: int, heads: int, context_length: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) / math.sqrt(width))
        self.in_proj_bias = nn.Parameter(torch.randn(3 * width))
        self.out_proj = nn.Linear(width, width)
        mask = torch.empty(context_length, context_length)
        mask.fill_(float("-inf"))
        mask.triu_(1)
        self.register_buffer("attn_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        L, N, C = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q = q.contiguous().view(L, N * self.heads, -1).transpose(0, 1)
        k = k.contiguous().view(L, N * self.heads, -1).transpose(0, 1)
        v = v.contiguous().view(L, N * self.heads, -1).transpose(0, 1)
        q = q * (q.shape[-1] ** -0.5)
        attn = torch.bmm(q, k.transpose(-1, -2))
        attn += self.attn_mask[:L, :L]
        attn = attn.softmax(dim=-1)
        x = torch.bmm(attn, v)
        return self.out_proj(x.transpose(0, 1).reshape(L, N, C))


def ref_additive(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double().transpose(0, 1)
    q, k, v = (heads_of(p, m.heads) for p in (x @ m.in_proj_weight.T + m.in_proj_bias).chunk(3, -1))
    visible = causal_visible(x.shape[1])
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], m.out_proj(join(mix(w, v))).transpose(0, 1)


add(
    "additive_inf_buffer_seq_first",
    lambda: AdditiveBufferAttention(12, 3, 9),
    lambda: (torch.randn(6, 2, 12),),
    ref_additive,
)


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        x = x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        extended_attention_mask = attention_mask.unsqueeze(1).unsqueeze(2)
        extended_attention_mask = extended_attention_mask.to(dtype=next(self.parameters()).dtype)
        extended_attention_mask = (1.0 - extended_attention_mask) * -10000.0
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores + extended_attention_mask
        attention_probs = nn.Softmax(dim=-1)(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.view(*context_layer.size()[:-2], -1)


def ref_bert(module: nn.Module, x: Tensor, mask: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(f(x), m.num_attention_heads) for f in (m.query, m.key, m.value))
    penalty = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask == 0, -10000.0)
    w = weights_of(dots(q, k) / math.sqrt(m.attention_head_size) + penalty[:, None, None, :])
    return [entry(w)], join(mix(w, v))


add(
    "old_bert_10000",
    lambda: BertSelfAttention(15, 3),
    lambda: (torch.randn(2, 7, 15), lengths_visible([5, 7], 7).long()),
    ref_bert,
)


class KeyPaddingAttention(nn.Module):
    """fairseq-like: folded heads, unfolded only to apply the padding mask (True = padding)."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = 0.1

    def forward(self, query: Tensor, key_padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query)
        q *= self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(query).contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = self.v_proj(query).contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, -1)
        attn_weights = attn_weights.masked_fill(
            key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf")
        )
        attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, -1)
        attn_weights_float = F.softmax(attn_weights.float(), dim=-1)
        attn_weights = attn_weights_float.type_as(attn_weights)
        attn_probs = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        mean = attn_weights_float.view(bsz, self.num_heads, tgt_len, -1).transpose(1, 0).mean(dim=0)
        return self.out_proj(attn), mean


def ref_padding(module: nn.Module, x: Tensor, padding: Tensor) -> Reference:
    m, x = f64(module), x.double().transpose(0, 1)
    q, k, v = (heads_of(f(x), m.num_heads) for f in (m.q_proj, m.k_proj, m.v_proj))
    visible = ~padding.bool()[:, None, None, :]
    w = weights_of(dots(q, k) / math.sqrt(m.head_dim), visible)
    return [entry(w, visible)], m.out_proj(join(mix(w, v))).transpose(0, 1)


add(
    "key_padding_mask_folded",
    lambda: KeyPaddingAttention(20, 4),
    lambda: (torch.randn(7, 3, 20), ~lengths_visible([4, 7, 6], 7)),
    ref_padding,
)


class NanoCausalAttention(nn.Module):
    """B == H and T == d on purpose in its case."""

    def __init__(self, n_embd: int, n_head: int, block_size: int):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.2), nn.Dropout(0.2)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
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


def ref_nano(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(p, m.n_head) for p in m.c_attn(x).chunk(3, -1))
    visible = causal_visible(x.shape[1])
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], None if m.training else m.c_proj(join(mix(w, v)))


add("causal_tril_equal_sizes", lambda: NanoCausalAttention(15, 3, 8), lambda: (torch.randn(3, 5, 15),), ref_nano)
add(
    "dropout_on_weights_train",
    lambda: NanoCausalAttention(12, 4, 8),
    lambda: (torch.randn(2, 7, 12),),
    ref_nano,
    train=True,
)


# ---------------------------------------------------------------- rows that see nothing


class NanToNumAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3)

    def forward(self, x: Tensor, segment: Tensor, valid: Tensor) -> Tensor:
        """Tokens attend to tokens of their own segment; padded tokens see nothing."""
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        allowed = (segment[:, :, None] == segment[:, None, :]) & valid[:, :, None] & valid[:, None, :]
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.size(-1))
        logits = logits.masked_fill(~allowed[:, None], -torch.inf)
        att = torch.nan_to_num(logits.softmax(-1))
        return torch.einsum("bhij,bjhd->bihd", att, v).flatten(-2)


def ref_nan(module: nn.Module, x: Tensor, segment: Tensor, valid: Tensor) -> Reference:
    m, x = f64(module), x.double()
    B, T, _ = x.shape
    q, k, v = (heads_of(p, m.heads) for p in m.to_qkv(x).chunk(3, -1))
    visible = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b in range(B):
        for i in range(T):
            for j in range(T):
                visible[b, 0, i, j] = bool(segment[b, i] == segment[b, j] and valid[b, i] and valid[b, j])
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], join(mix(w, v))


add(
    "nan_to_num_segments",
    lambda: NanToNumAttention(12, 3),
    lambda: (
        torch.randn(2, 7, 12),
        torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 3, 3]]),
        lengths_visible([7, 5], 7),
    ),
    ref_nan,
)


class ZeroAfterSoftmaxAttention(nn.Module):
    """ESPnet-like: fill with the minimum, softmax, fill with zero."""

    def __init__(self, n_head: int, n_feat: int, dropout_rate: float = 0.1):
        super().__init__()
        self.d_k, self.h = n_feat // n_head, n_head
        self.linear_q, self.linear_k = nn.Linear(n_feat, n_feat), nn.Linear(n_feat, n_feat)
        self.linear_v, self.linear_out = nn.Linear(n_feat, n_feat), nn.Linear(n_feat, n_feat)
        self.dropout = nn.Dropout(p=dropout_rate)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        n_batch = query.size(0)
        q = self.linear_q(query).view(n_batch, -1, self.h, self.d_k).transpose(1, 2)
        k = self.linear_k(key).view(n_batch, -1, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(value).view(n_batch, -1, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        mask = mask.unsqueeze(1).eq(0)
        min_value = float(torch.finfo(scores.dtype).min)
        scores = scores.masked_fill(mask, min_value)
        attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        p_attn = self.dropout(attn)
        x = torch.matmul(p_attn, v)
        x = x.transpose(1, 2).contiguous().view(n_batch, -1, self.h * self.d_k)
        return self.linear_out(x)


def ref_zero_after(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Reference:
    m = f64(module)
    q, k, v = (heads_of(f(x.double()), m.h) for f, x in ((m.linear_q, query), (m.linear_k, key), (m.linear_v, value)))
    visible = (mask != 0)[:, None]
    w = weights_of(dots(q, k) / math.sqrt(m.d_k), visible)
    return [entry(w, visible, "cross")], m.linear_out(join(mix(w, v)))


def zero_after_inputs() -> tuple:
    memory = torch.randn(3, 9, 8)
    return torch.randn(3, 5, 8), memory, memory, lengths_visible([9, 0, 4], 9)[:, None, :]


add("masked_fill_after_softmax", lambda: ZeroAfterSoftmaxAttention(4, 8), zero_after_inputs, ref_zero_after)


# ---------------------------------------------------------------- spellings of the softmax


class SpelledAttention(nn.Module):
    """Common projections; the subclasses write `weights` each in another way."""

    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q = nn.Linear(dim, heads * head_dim)
        self.k = nn.Linear(dim, heads * head_dim)
        self.v = nn.Linear(dim, heads * head_dim)
        self.o = nn.Linear(heads * head_dim, dim)

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.head_dim).permute(0, 2, 1, 3)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = torch.matmul(self.weights(q, k), v)
        return self.o(y.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1))


def ref_spelled(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (heads_of(f(x), m.heads) for f in (m.q, m.k, m.v))
    w = weights_of(dots(q, k) / math.sqrt(m.head_dim))
    return [entry(w)], m.o(join(mix(w, v)))


class StableExpAttention(SpelledAttention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        s = torch.matmul(q, k.transpose(2, 3)) / self.head_dim**0.5
        s_max, _ = torch.max(s, dim=-1, keepdim=True)
        e = torch.exp(s - s_max)
        return e / e.sum(dim=-1, keepdim=True)


class ExpLogSoftmaxAttention(SpelledAttention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        q = q / math.sqrt(math.sqrt(self.head_dim))
        k = k / math.sqrt(math.sqrt(self.head_dim))
        return F.log_softmax(torch.einsum("nhqd,nhkd->nhqk", q, k), dim=-1).exp()


class LogSumExpAttention(SpelledAttention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        s = (q @ k.swapaxes(-1, -2)) * self.head_dim**-0.5
        return torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True))


class SoftmaxDtypeAttention(SpelledAttention):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        s = torch.matmul(q.mul(self.head_dim**-0.5), k.mT)
        return F.softmax(s, dim=-1, dtype=torch.float64).to(q.dtype)


class ModuleSoftmaxAttention(SpelledAttention):
    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__(dim, heads, head_dim)
        self.softmax = nn.Softmax(dim=3)
        self.register_buffer("scale", torch.sqrt(torch.FloatTensor([head_dim])))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) / self.scale)


add("exp_minus_max_over_sum", lambda: StableExpAttention(10, 2, 6), lambda: (torch.randn(3, 7, 10),), ref_spelled)
add("exp_of_log_softmax", lambda: ExpLogSoftmaxAttention(9, 3, 4), lambda: (torch.randn(2, 5, 9),), ref_spelled)
add("exp_minus_logsumexp", lambda: LogSumExpAttention(11, 4, 3), lambda: (torch.randn(2, 8, 11),), ref_spelled)
add("softmax_dtype_argument", lambda: SoftmaxDtypeAttention(8, 2, 5), lambda: (torch.randn(3, 6, 8),), ref_spelled)
add("nn_softmax_module", lambda: ModuleSoftmaxAttention(7, 4, 6), lambda: (torch.randn(3, 5, 7),), ref_spelled)


class MaskedExpAttention(nn.Module):
    """exp without a maximum, the mask multiplied, divided by the sum (plus a small number)."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, dim, dim // n_heads) / dim**0.5)
        self.W_K = nn.Parameter(torch.randn(n_heads, dim, dim // n_heads) / dim**0.5)
        self.W_V = nn.Parameter(torch.randn(n_heads, dim, dim // n_heads) / dim**0.5)
        self.W_O = nn.Parameter(torch.randn(n_heads, dim // n_heads, dim) / dim**0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = torch.einsum("bte,hed->bhtd", x, self.W_Q)
        k = torch.einsum("bte,hed->bhtd", x, self.W_K)
        v = torch.einsum("bte,hed->bhtd", x, self.W_V)
        a = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5)
        a = a * mask[:, None, None, :].float()
        a = a / (a.sum(-1, keepdim=True) + 1e-9)
        return torch.einsum("bhqk,bhkd,hde->bqe", a, v, self.W_O)


def ref_masked_exp(module: nn.Module, x: Tensor, mask: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (torch.stack([x @ w for w in weight], 1) for weight in (m.W_Q, m.W_K, m.W_V))
    visible = mask.bool()[:, None, None, :]
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    o = mix(w, v)
    return [entry(w, visible)], sum(o[:, h] @ m.W_O[h] for h in range(m.n_heads))


add(
    "exp_times_mask_over_sum",
    lambda: MaskedExpAttention(12, 3),
    lambda: (torch.randn(2, 7, 12), lengths_visible([7, 4], 7)),
    ref_masked_exp,
)


class ScaledQueryAttention(nn.Module):
    """Scaled on q before the product; keys and values from convolutions of width one (channels first)."""

    def __init__(self, channels: int, n_heads: int):
        super().__init__()
        self.n_heads, self.k_channels = n_heads, channels // n_heads
        self.conv_q, self.conv_k = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, channels, 1)
        self.conv_v, self.conv_o = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, x_mask: Tensor) -> Tensor:
        b, d, t = x.size()
        query, key, value = self.conv_q(x), self.conv_k(x), self.conv_v(x)
        query = query.view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        key = key.view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        value = value.view(b, self.n_heads, self.k_channels, t).transpose(2, 3)
        scores = torch.matmul(query / math.sqrt(self.k_channels), key.transpose(-2, -1))
        attn_mask = x_mask.unsqueeze(2) * x_mask.unsqueeze(-1)
        scores = scores.masked_fill(attn_mask == 0, -1e4)
        p_attn = F.softmax(scores, dim=-1)
        output = torch.matmul(p_attn, value).transpose(2, 3).contiguous().view(b, d, t)
        return self.conv_o(output) * x_mask


def ref_scaled_query(module: nn.Module, x: Tensor, x_mask: Tensor) -> Reference:
    m, x, real = f64(module), x.double(), x_mask[:, 0] != 0
    q, k, v = (heads_of(f(x).transpose(1, 2), m.n_heads) for f in (m.conv_q, m.conv_k, m.conv_v))
    assert real.all()  # no padding in the inputs of this case
    visible = (real[:, :, None] & real[:, None, :])[:, None]
    w = weights_of(dots(q, k) / math.sqrt(m.k_channels), visible)
    return [entry(w, visible)], m.conv_o(join(mix(w, v)).transpose(1, 2))


add(
    "query_scaled_channels_first",
    lambda: ScaledQueryAttention(12, 4),
    lambda: (torch.randn(3, 12, 6), torch.ones(3, 1, 6)),
    ref_scaled_query,
)


# ---------------------------------------------------------------- unusual shapes


class SingleHeadNoBatch(nn.Module):
    def __init__(self, d_in: int, d_kq: int, d_v: int):
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_kq))
        self.W_key = nn.Parameter(torch.rand(d_in, d_kq))
        self.W_value = nn.Parameter(torch.rand(d_in, d_v))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = x @ self.W_query, x @ self.W_key, x @ self.W_value
        attn_scores = queries @ keys.T
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        return attn_weights @ values


def ref_single(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    q, k, v = (torch.mm(x, p)[None, None] for p in (m.W_query, m.W_key, m.W_value))
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]))
    return [entry(w)], mix(w, v)[0, 0]


add("single_head_2d", lambda: SingleHeadNoBatch(5, 3, 4), lambda: (torch.randn(7, 5),), ref_single)


class NonLocalBlock(nn.Module):
    """SAGAN-like: 1x1 convolutions, HW tokens, keys pooled, values on the left of the product."""

    def __init__(self, ch: int):
        super().__init__()
        self.theta = nn.Conv2d(ch, ch // 4, 1, bias=False)
        self.phi = nn.Conv2d(ch, ch // 4, 1, bias=False)
        self.g = nn.Conv2d(ch, ch // 2, 1, bias=False)
        self.o = nn.Conv2d(ch // 2, ch, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor(0.7))
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        nn.init.orthogonal_(self.theta.weight, gain=4.0)
        nn.init.orthogonal_(self.phi.weight, gain=4.0)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.stem(image))
        _n, c, h, w = x.shape
        theta = self.theta(x).view(-1, c // 4, h * w)
        phi = F.max_pool2d(self.phi(x), [2, 2]).view(-1, c // 4, h * w // 4)
        g = F.max_pool2d(self.g(x), [2, 2]).view(-1, c // 2, h * w // 4)
        beta = F.softmax(torch.bmm(theta.transpose(1, 2), phi), -1)
        o = self.o(torch.bmm(g, beta.transpose(1, 2)).view(-1, c // 2, h, w))
        return self.gamma * o + x


def ref_nonlocal(module: nn.Module, image: Tensor) -> Reference:
    m, image = f64(module), image.double()
    x = m.stem(image).clamp(min=0)
    n, _c, h, w = x.shape

    def tokens(t: Tensor) -> Tensor:
        return t.permute(0, 2, 3, 1).reshape(n, 1, -1, t.shape[1])

    def pooled(t: Tensor) -> Tensor:
        return t.reshape(n, -1, h // 2, 2, w // 2, 2).amax((3, 5))

    weights = weights_of(dots(tokens(m.theta(x)), tokens(pooled(m.phi(x)))))
    o = mix(weights, tokens(pooled(m.g(x))))[:, 0]
    out = m.gamma * m.o(o.reshape(n, h, w, -1).permute(0, 3, 1, 2)) + x
    return [entry(weights)], out


add("non_local_block_pooled_keys", lambda: NonLocalBlock(8), lambda: (torch.randn(2, 3, 4, 6),), ref_nonlocal)


class ConvSelfAttention(nn.Module):
    """DANet / latent-diffusion like block: query on the right index, normalised over the keys."""

    def __init__(self, in_channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(2, in_channels)
        self.q, self.k, self.v = (nn.Conv2d(in_channels, in_channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k)
        w_ = w_ * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2)
        v = v.reshape(b, c, h * w)
        w_ = w_.permute(0, 2, 1)
        h_ = torch.bmm(v, w_).reshape(b, c, h, w)
        return x + self.proj_out(h_)


def ref_conv(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    b, c, h, w = x.shape
    y = m.norm(x)
    q, k, v = (f(y).permute(0, 2, 3, 1).reshape(b, 1, h * w, c) for f in (m.q, m.k, m.v))
    weights = weights_of(dots(q, k) / math.sqrt(c))
    o = mix(weights, v)[:, 0].reshape(b, h, w, c).permute(0, 3, 1, 2)
    return [entry(weights)], x + m.proj_out(o)


add("conv_attention_hw_tokens", lambda: ConvSelfAttention(10), lambda: (torch.randn(3, 10, 2, 3),), ref_conv)


class PerceiverBlock(nn.Module):
    """Learned latents read the inputs, then attend to each other (two attentions)."""

    def __init__(self, num_latents: int, dim: int, input_dim: int, heads: int, self_heads: int):
        super().__init__()
        self.heads, self.self_heads = heads, self_heads
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.norm_in = nn.LayerNorm(input_dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(input_dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.self_qkv = nn.Linear(dim, dim * 3)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, h: int) -> Tensor:
        b = q.shape[0]
        q, k, v = (t.reshape(b, t.shape[1], h, -1).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        sim = torch.einsum("bid,bjd->bij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), v)
        return out.unflatten(0, (b, h)).transpose(1, 2).flatten(2)

    def forward(self, data: Tensor) -> Tensor:
        x = self.latents.unsqueeze(0).repeat(data.shape[0], 1, 1)
        k, v = self.to_kv(self.norm_in(data)).chunk(2, dim=-1)
        x = self.to_out(self.attend(self.to_q(x), k, v, self.heads)) + x
        return self.attend(*self.self_qkv(x).chunk(3, dim=-1), self.self_heads) + x


def ref_perceiver(module: nn.Module, data: Tensor) -> Reference:
    m, data = f64(module), data.double()
    x = torch.stack([m.latents] * data.shape[0])
    k, v = (heads_of(p, m.heads) for p in m.to_kv(m.norm_in(data)).chunk(2, -1))
    q = heads_of(m.to_q(x), m.heads)
    w1 = weights_of(dots(q, k) / math.sqrt(q.shape[-1]))
    x = m.to_out(join(mix(w1, v))) + x
    q, k, v = (heads_of(p, m.self_heads) for p in m.self_qkv(x).chunk(3, -1))
    w2 = weights_of(dots(q, k) / math.sqrt(q.shape[-1]))
    return [entry(w1, None, "cross"), entry(w2)], join(mix(w2, v)) + x


add("perceiver_learned_latents", lambda: PerceiverBlock(4, 12, 7, 2, 3), lambda: (torch.randn(3, 9, 7),), ref_perceiver)


class MemoryTokenAttention(nn.Module):
    """Learned keys and values put before those of the sequence (persistent memory), causal among the tokens."""

    def __init__(self, dim: int, heads: int, num_mem: int):
        super().__init__()
        self.heads, self.num_mem = heads, num_mem
        d = dim // heads
        self.mem_k = nn.Parameter(torch.randn(heads, num_mem, d))
        self.mem_v = nn.Parameter(torch.randn(heads, num_mem, d))
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mem_k, mem_v = (t.unsqueeze(0).expand(b, -1, -1, -1) for t in (self.mem_k, self.mem_v))
        k, v = torch.cat((mem_k, k), dim=-2), torch.cat((mem_v, v), dim=-2)
        dots_ = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        mask = torch.ones(n, n).triu_(1).bool()
        mask = F.pad(mask, (self.num_mem, 0), value=False)
        dots_.masked_fill_(mask, -torch.finfo(dots_.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", dots_.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, dim))


def ref_memory(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    B, T, _ = x.shape
    q, k, v = (heads_of(p, m.heads) for p in m.to_qkv(x).chunk(3, -1))
    k = torch.cat([torch.stack([m.mem_k] * B), k], 2)
    v = torch.cat([torch.stack([m.mem_v] * B), v], 2)
    visible = torch.tensor([[j < m.num_mem or j - m.num_mem <= i for j in range(m.num_mem + T)] for i in range(T)])[
        None, None
    ]
    w = weights_of(dots(q, k) / math.sqrt(q.shape[-1]), visible)
    return [entry(w, visible)], m.to_out(join(mix(w, v)))


add("memory_tokens_prepended", lambda: MemoryTokenAttention(15, 3, 2), lambda: (torch.randn(2, 6, 15),), ref_memory)


class SinkAttention(nn.Module):
    """One learned logit per head takes part in the softmax and is dropped afterwards."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        shape = (b, t, -1, self.head_dim)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = repeat_kv(self.k_proj(x).view(shape).transpose(1, 2), self.heads // self.kv_heads)
        value = repeat_kv(self.v_proj(x).view(shape).transpose(1, 2), self.heads // self.kv_heads)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
        attn_weights = attn_weights + torch.full((t, t), float("-inf")).triu(1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        combined_logits = torch.cat([attn_weights, sinks], dim=-1)
        combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined_logits, dim=-1, dtype=combined_logits.dtype)
        scores = probs[..., :-1]
        return self.o_proj(torch.matmul(scores, value).transpose(1, 2).contiguous().reshape(b, t, -1))


def ref_sink(module: nn.Module, x: Tensor) -> Reference:
    m, x = f64(module), x.double()
    T = x.shape[1]
    group = [h // (m.heads // m.kv_heads) for h in range(m.heads)]
    q = heads_of(m.q_proj(x), m.heads)
    k, v = heads_of(m.k_proj(x), m.kv_heads)[:, group], heads_of(m.v_proj(x), m.kv_heads)[:, group]
    visible = causal_visible(T)
    e = torch.exp(dots(q, k) / math.sqrt(m.head_dim)) * visible
    w = e / (e.sum(-1, keepdim=True) + torch.exp(m.sinks)[None, :, None, None])
    return [entry(w, visible)], m.o_proj(join(mix(w, v)))


add(
    "sink_logit_dropped",
    lambda: SinkAttention(10, 4, 2, 3),
    lambda: (torch.randn(3, 7, 10),),
    ref_sink,
    rows_sum_to_one=False,
)
