"""Modules that contain a softmax (or a normalised exponential) which is not token-to-token attention.

``CASES`` lists them; each case builds its module (seeded, eval mode unless ``train``) and its inputs.
Cases whose ``debatable`` text is not empty are borderline: the text says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    train: bool = False
    debatable: str = ""


# Mixture of experts


class SoftMoE(nn.Module):
    """Every expert runs on every token; the gate's softmax weighs their outputs, in a loop."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), dim=-1)  # [B, T, N]
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + weights[..., i : i + 1] * expert(x)
        return out


class TopKMoE(nn.Module):
    """Mixtral-like sparse block: softmax over experts, top-k, renormalise, index_add."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        b, t, d = hidden_states.shape
        flat = hidden_states.reshape(-1, d)
        router_logits = self.gate(flat)
        routing = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing, selected = torch.topk(routing, self.k, dim=-1)
        routing = routing / routing.sum(dim=-1, keepdim=True)
        routing = routing.to(flat.dtype)
        final = torch.zeros_like(flat)
        mask = F.one_hot(selected, num_classes=self.w1.shape[0]).permute(2, 1, 0)
        for e in range(self.w1.shape[0]):
            idx, top = torch.where(mask[e])
            h = F.silu(flat[top] @ self.w1[e]) @ self.w2[e]
            final.index_add_(0, top, h * routing[top, idx, None])
        return final.reshape(b, t, d), router_logits


class EinsumMoE(nn.Module):
    """Stacked expert weights; the gate multiplies the stacked expert outputs by einsum."""

    def __init__(self, dim: int, out: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(dim, experts) / dim**0.5)
        self.weight = nn.Parameter(torch.randn(experts, dim, out) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.softmax(torch.einsum("btd,dn->btn", x, self.router), dim=-1)
        stacked = torch.einsum("btd,ndo->btno", x, self.weight)
        return torch.einsum("btn,btno->bto", gate, stacked)


class BmmMoE(nn.Module):
    """MMoE-like: one gate per task, softmax over experts, then bmm with the stacked outputs."""

    def __init__(self, dim: int, out: int, experts: int, tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, out) for _ in range(experts))
        self.gates = nn.Linear(dim, tasks * experts)
        self.tasks, self.n = tasks, experts

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([F.relu(e(x)) for e in self.experts], dim=1)  # [B, N, O]
        gate = self.gates(x).view(-1, self.tasks, self.n).softmax(dim=-1)  # [B, tasks, N]
        return torch.bmm(gate, stacked)


class SwitchCapacityRouter(nn.Module):
    """Switch / Mesh-TF: dense dispatch and combine tensors with an expert capacity, both by einsum."""

    def __init__(self, dim: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(dim, experts, bias=False)
        self.wi = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.wo = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(dim=-1)  # [B, T, N]
        onehot = F.one_hot(probs.argmax(dim=-1), probs.shape[-1]).to(x.dtype)
        position = (onehot.cumsum(dim=1) - 1.0) * onehot
        keep = onehot * (position < self.capacity)
        slot = F.one_hot(position.long().clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        dispatch = keep[..., None] * slot  # [B, T, N, C]
        combine = dispatch * probs[..., None]
        inner = torch.einsum("btd,btnc->bncd", x, dispatch)
        inner = torch.einsum("bncd,ndh->bnch", inner, self.wi).relu()
        inner = torch.einsum("bnch,nhd->bncd", inner, self.wo)
        return torch.einsum("bncd,btnc->btd", inner, combine)


class SlotMoE(nn.Module):
    """Soft MoE (Puigcerver et al.): dispatch = softmax over tokens, combine = softmax over slots."""

    def __init__(self, dim: int, experts: int, slots: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, experts, slots) / dim**0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        phi = self.scale * F.normalize(self.phi, dim=0)
        logits = torch.einsum("bmd,dnp->bmnp", F.normalize(x, dim=-1), phi)
        dispatch = logits.softmax(dim=1)
        combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
        slots = torch.einsum("bmd,bmnp->bnpd", x, dispatch)
        outs = torch.stack([e(slots[:, i]) for i, e in enumerate(self.experts)], dim=1)
        return torch.einsum("bnpd,bmnp->bmd", outs, combine)


# Heads and gates


class ClassifierHead(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.fc = nn.Linear(dim, classes)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.fc(self.body(x.mean(dim=1))))


class SoftmaxFeatureGate(nn.Module):
    """A residual gate whose weights over features sum to 1 (TabNet-like mask, with softmax)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.softmax(self.gate(x), dim=-1)
        return self.norm(x + mask * self.value(x) * x.shape[-1])


class SoftmaxGLU(nn.Module):
    """Gated linear unit with softmax as the gate's activation, then the down projection."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(a * F.softmax(b, dim=-1))


class VariableSelection(nn.Module):
    """Temporal Fusion Transformer: softmax over input variables, matmul with the stacked variable embeddings."""

    def __init__(self, variables: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(1, dim) for _ in range(variables))
        self.grn = nn.Sequential(nn.Linear(variables * dim, dim), nn.ELU(), nn.Linear(dim, variables))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, V]
        embedded = torch.stack([e(x[..., i : i + 1]) for i, e in enumerate(self.embed)], dim=-2)  # [B, T, V, D]
        weights = self.grn(embedded.flatten(-2)).softmax(dim=-1).unsqueeze(-2)  # [B, T, 1, V]
        return torch.matmul(weights, embedded).squeeze(-2)


class MixtureDensityHead(nn.Module):
    """Softmax mixture coefficients, their log-likelihood and the mixture's mean."""

    def __init__(self, dim: int, out: int, components: int) -> None:
        super().__init__()
        self.pi = nn.Linear(dim, components)
        self.mu = nn.Linear(dim, components * out)
        self.sigma = nn.Linear(dim, components)
        self.out = out

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pi = F.softmax(self.pi(x), dim=-1)  # [B, K]
        mu = self.mu(x).view(x.shape[0], -1, self.out)  # [B, K, O]
        sigma = self.sigma(x).exp()
        log_p = -0.5 * ((y[:, None] - mu) ** 2).sum(-1) / sigma**2
        log_p = log_p - self.out * (sigma.log() + 0.5 * math.log(2 * math.pi))
        nll = -torch.logsumexp(pi.log() + log_p, dim=-1)
        mean = (pi.unsqueeze(1) @ mu).squeeze(1)
        return nll, mean


class BinExpectation(nn.Module):
    """AdaBins / distributional RL / DFL: expected value of a softmax over bins."""

    def __init__(self, dim: int, bins: int, low: float, high: float) -> None:
        super().__init__()
        self.head = nn.Linear(dim, bins)
        self.register_buffer("centres", torch.linspace(low, high, bins))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.head(x), dim=-1) @ self.centres


class AdaptiveBinExpectation(nn.Module):
    """AdaBins proper: the bin centres depend on the image; logits are pixel @ bin query products."""

    def __init__(self, dim: int, bins: int) -> None:
        super().__init__()
        self.widths = nn.Linear(dim, bins)
        self.proj = nn.Linear(dim, dim)
        self.query = nn.Parameter(torch.randn(bins, dim) / dim**0.5)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, P, D]
        widths = F.softmax(self.widths(pixels.mean(1)), dim=-1)  # [B, N]
        centres = widths.cumsum(-1) - 0.5 * widths
        logits = torch.matmul(self.proj(pixels), self.query.t())  # [B, P, N]
        return torch.matmul(torch.softmax(logits, dim=-1), centres.unsqueeze(-1)).squeeze(-1)


class TemperatureSampler(nn.Module):
    """Decoding head: temperature, top-k filter with -inf, softmax, multinomial, embedding of the sample."""

    def __init__(self, dim: int, vocab: int, temperature: float, top_k: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.temperature, self.top_k = temperature, top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden[:, -1] @ self.embedding.weight.t() / self.temperature
        kth = logits.topk(self.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
        probs = F.softmax(logits, dim=-1)
        token = torch.multinomial(probs, num_samples=1).squeeze(-1)
        return token, self.embedding(token)


class GumbelSelect(nn.Module):
    """wav2vec 2.0 quantiser: Gumbel softmax over a codebook, weighted sum of its vectors."""

    def __init__(self, dim: int, groups: int, entries: int, code_dim: int) -> None:
        super().__init__()
        self.groups, self.entries = groups, entries
        self.codevectors = nn.Parameter(torch.randn(1, groups * entries, code_dim))
        self.weight_proj = nn.Linear(dim, groups * entries)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        logits = self.weight_proj(x).view(b * t * self.groups, self.entries)
        probs = F.gumbel_softmax(logits.float(), tau=2.0, hard=True).type_as(logits)
        probs = probs.view(b * t, -1)
        picked = probs.unsqueeze(-1) * self.codevectors
        return picked.view(b * t, self.groups, self.entries, -1).sum(-2).view(b, t, -1)


class ManualGumbelMatmul(nn.Module):
    """Gumbel noise written by hand; the relaxed one-hot multiplies a codebook parameter with @."""

    def __init__(self, dim: int, entries: int, code_dim: int) -> None:
        super().__init__()
        self.logits = nn.Linear(dim, entries)
        self.codebook = nn.Parameter(torch.randn(entries, code_dim))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        return ((logits + noise) / 0.7).softmax(-1) @ self.codebook


class ScalarMix(nn.Module):
    """ELMo: softmax of one scalar per layer, weighted sum of the layers."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.scalars = nn.Parameter(torch.randn(layers + 1))
        self.gamma = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])))
        weights = torch.softmax(self.scalars, dim=0)
        return self.gamma * torch.tensordot(weights, torch.stack(states), dims=1)


# Two-tensor products with a softmax, and no query/key/value reading of it


class SoftmaxLinearAttention(nn.Module):
    """Efficient attention (Shen et al.): softmax feature maps on q and k, q (k^T v); no token-to-token map exists."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q = q.softmax(dim=-1) * (d // self.heads) ** -0.5
        k = k.softmax(dim=-2)
        context = torch.einsum("bhtd,bhte->bhde", k, v)
        y = torch.einsum("bhtd,bhde->bhte", q, context)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class ClipLoss(nn.Module):
    """Image-to-text logits, probabilities and the symmetric cross entropy."""

    def __init__(self, image_dim: int, text_dim: int, dim: int) -> None:
        super().__init__()
        self.image = nn.Linear(image_dim, dim, bias=False)
        self.text = nn.Linear(text_dim, dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        i = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        target = torch.arange(logits.shape[0])
        loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))
        return loss, logits.softmax(dim=-1)


class InfoNCEByHand(nn.Module):
    """SimCLR: masked similarity, softmax written out, and the mean of -log of the positives."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.proj(torch.cat([a, b])), dim=-1)
        n = a.shape[0]
        sim = (z @ z.t()) / 0.5
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        probs = F.softmax(sim, dim=-1)
        positive = torch.roll(torch.eye(2 * n, dtype=z.dtype), n, dims=1)
        return -(probs * positive).sum(-1).log().mean()


class SoftNearestNeighbour(nn.Module):
    """Prototypical classifier: softmax over negative distances to a support set's class means; probabilities only."""

    def __init__(self, dim: int, out: int, classes: int) -> None:
        super().__init__()
        self.encode = nn.Linear(dim, out)
        self.classes = classes

    def forward(self, query: Tensor, support: Tensor) -> Tensor:  # [Q, D], [classes * shots, D]
        proto = self.encode(support).view(self.classes, -1, self.encode.out_features).mean(1)
        return F.softmax(-(torch.cdist(self.encode(query), proto) ** 2), dim=-1)


class SoftKMeans(nn.Module):
    """Soft assignment to learned prototypes (distance), and the weighted sum of prototypes."""

    def __init__(self, dim: int, prototypes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(prototypes, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dist = (x.unsqueeze(-2) - self.prototypes).pow(2).sum(-1)  # [B, T, N]
        assign = torch.softmax(-dist / 0.5, dim=-1)
        return assign @ self.prototypes, assign


class SoftKMeansDot(nn.Module):
    """Soft k-means step with dot products: responsibilities by softmax over clusters, new means of the points."""

    def __init__(self, dim: int, clusters: int) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.randn(clusters, dim))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        resp = (2 * (x @ self.means.t()) - self.means.pow(2).sum(-1)).softmax(dim=-1)
        return (resp.transpose(1, 2) @ x) / resp.sum(1).unsqueeze(-1)


class AttentionPooling(nn.Module):
    """Softmax over tokens of a linear scorer, weighted sum of the tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.score(x).squeeze(-1), dim=-1)  # [B, T]
        return self.out(torch.bmm(weights.unsqueeze(1), x).squeeze(1))


class VocabLookup(nn.Module):
    """Differentiable lookup: softmax(x @ W) @ table."""

    def __init__(self, dim: int, vocab: int, emb: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, vocab) / dim**0.5)
        self.table = nn.Embedding(vocab, emb)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.w, dim=-1) @ self.table.weight


class TiedSoftEmbedding(nn.Module):
    """Self-conditioning: next-token probabilities under tied embeddings give the expected input embedding."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(ids))
        logits = torch.matmul(hidden, self.embed.weight.t()) * hidden.shape[-1] ** -0.5
        return torch.matmul(logits.softmax(dim=-1), self.embed.weight)


class ChannelSoftmaxMatmul(nn.Module):
    """Softmax over channels, then a matrix product with a parameter."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.weight = nn.Parameter(torch.randn(dim, out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(F.softmax(self.inp(x), dim=-1), self.weight)


class CrossCovariance(nn.Module):
    """XCiT: the softmax map is channel-by-channel, [d, d] per head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 4, 1)
        q, k, v = qkv.unbind(0)  # each [B, H, d, N]
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.proj((attn @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class ChannelAttentionDANet(nn.Module):
    """DANet's channel module: [C, C] energies of an image, max minus energy, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        flat = x.view(b, c, -1)
        energy = torch.bmm(flat, flat.permute(0, 2, 1))
        energy = energy.max(dim=-1, keepdim=True).values.expand_as(energy) - energy
        return self.gamma * torch.bmm(energy.softmax(dim=-1), flat).view(b, c, h, w) + x


class SlotAttention(nn.Module):
    """Softmax over slots (queries), then normalised over tokens; a few iterations."""

    def __init__(self, dim: int, slots: int, iters: int) -> None:
        super().__init__()
        self.iters, self.scale = iters, dim**-0.5
        self.slots = nn.Parameter(torch.randn(1, slots, dim))
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.norm_x, self.norm_s = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        x = self.norm_x(x)
        k, v = self.to_k(x), self.to_v(x)
        slots = self.slots.expand(b, -1, -1)
        for _ in range(self.iters):
            q = self.to_q(self.norm_s(slots))
            attn = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, d), slots.reshape(-1, d)).reshape(b, -1, d)
        return slots


class SinkhornMatching(nn.Module):
    """SuperGlue-like: scores of two sets, log-softmax over rows and columns in turn, plan times points."""

    def __init__(self, dim: int, iters: int) -> None:
        super().__init__()
        self.iters = iters
        self.proj = nn.Linear(dim, dim)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.proj(a) @ self.proj(b).transpose(-2, -1) / a.shape[-1] ** 0.5
        for _ in range(self.iters):
            scores = scores - scores.logsumexp(dim=-1, keepdim=True)
            scores = scores - scores.logsumexp(dim=-2, keepdim=True)
        plan = scores.exp()
        return plan, plan @ b


class SinkhornSort(nn.Module):
    """Gumbel-Sinkhorn without noise: a soft permutation from a linear layer, applied to the items."""

    def __init__(self, dim: int, items: int, iters: int) -> None:
        super().__init__()
        self.iters = iters
        self.score = nn.Linear(dim, items)

    def forward(self, x: Tensor) -> Tensor:  # [B, items, D]
        log_p = self.score(x) / 0.3
        for _ in range(self.iters):
            log_p = F.log_softmax(log_p, dim=2)
            log_p = F.log_softmax(log_p, dim=1)
        return log_p.exp().transpose(1, 2) @ x


class CapsuleRouting(nn.Module):
    """Dynamic routing between capsules: softmax over output capsules, agreement updates."""

    def __init__(self, in_caps: int, in_dim: int, out_caps: int, out_dim: int, iters: int) -> None:
        super().__init__()
        self.iters = iters
        self.weight = nn.Parameter(torch.randn(in_caps, out_caps, out_dim, in_dim) * 0.3)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        n2 = s.pow(2).sum(-1, keepdim=True)
        return n2 / (1 + n2) * s / (n2 + 1e-8).sqrt()

    def forward(self, u: Tensor) -> Tensor:  # [B, I, Din]
        u_hat = torch.einsum("ijoe,bie->bijo", self.weight, u)
        logits = torch.zeros(u_hat.shape[:3], dtype=u.dtype)
        v = u_hat.mean(1)
        for i in range(self.iters):
            c = F.softmax(logits, dim=2)
            v = self.squash(torch.einsum("bij,bijo->bjo", c, u_hat))
            if i < self.iters - 1:
                logits = logits + torch.einsum("bijo,bjo->bij", u_hat, v)
        return v


# Images


class SelectiveKernel(nn.Module):
    """SKNet: softmax across branches, per channel."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.fc = nn.Linear(channels, reduced)
        self.fcs = nn.ModuleList(nn.Linear(reduced, channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        feats = torch.stack([b(x) for b in self.branches], dim=1)  # [B, M, C, H, W]
        z = F.relu(self.fc(feats.sum(1).mean((-1, -2))))
        weights = torch.stack([f(z) for f in self.fcs], dim=1).softmax(dim=1)
        return (feats * weights[..., None, None]).sum(1)


class GlobalContext(nn.Module):
    """GCNet: a 1x1 conv scores positions, softmax over HW, weighted sum of the features."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.mask = nn.Conv2d(channels, 1, 1)
        self.transform = nn.Sequential(nn.Conv2d(channels, reduced, 1), nn.ReLU(), nn.Conv2d(reduced, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weights = self.mask(x).view(b, 1, h * w, 1).softmax(dim=2)
        context = torch.matmul(x.view(b, 1, c, h * w), weights).view(b, c, 1, 1)
        return x + self.transform(context)


class DynamicConv(nn.Module):
    """Dynamic convolution: softmax over K kernels, which are mixed by mm before one grouped conv."""

    def __init__(self, cin: int, cout: int, kernels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kernels, cout, cin, size, size) * 0.1)
        self.score = nn.Linear(cin, kernels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        k, cout, _, s, _ = self.weight.shape
        mix = F.softmax(self.score(x.mean((-1, -2))) / 4.0, dim=1)
        weight = torch.mm(mix, self.weight.view(k, -1)).view(b * cout, c, s, s)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=s // 2, groups=b)
        return out.view(b, cout, h, w)


class LightweightConv(nn.Module):
    """Pay Less Attention: dynamic convolution over time, softmax over the kernel taps predicted from each token."""

    def __init__(self, dim: int, heads: int, taps: int) -> None:
        super().__init__()
        self.heads, self.taps = heads, taps
        self.kernel = nn.Linear(dim, heads * taps)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        w = self.kernel(x).view(b, t, self.heads, 1, self.taps).softmax(dim=-1)
        windows = F.pad(x, (0, 0, self.taps - 1, 0)).unfold(1, self.taps, 1)  # [B, T, D, taps]
        windows = windows.reshape(b, t, self.heads, d // self.heads, self.taps)
        return torch.matmul(w, windows.transpose(-1, -2)).reshape(b, t, d)


class NetVLAD(nn.Module):
    """Soft assignment of local descriptors to clusters, aggregated residuals."""

    def __init__(self, dim: int, clusters: int) -> None:
        super().__init__()
        self.assign = nn.Conv2d(dim, clusters, 1)
        self.centroids = nn.Parameter(torch.rand(clusters, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, c = x.shape[:2]
        x = F.normalize(x, dim=1)
        soft = F.softmax(self.assign(x).flatten(2), dim=1)  # [B, K, HW]
        vlad = soft @ x.view(b, c, -1).transpose(1, 2) - soft.sum(-1, keepdim=True) * self.centroids
        return F.normalize(F.normalize(vlad, dim=2).flatten(1), dim=1)


class SpatialSoftArgmax(nn.Module):
    """Keypoint heatmaps: softmax over HW, expected coordinates by matmul with a grid."""

    def __init__(self, cin: int, keypoints: int, h: int, w: int) -> None:
        super().__init__()
        self.heat = nn.Conv2d(cin, keypoints, 1)
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        self.register_buffer("grid", torch.stack([xs, ys], -1).view(h * w, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.heat(x).flatten(2), dim=-1) @ self.grid


# Cases


def _seeded(seed: int, build: Callable[[], nn.Module], train: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(seed)
        return build().train(train)

    return make


def _randn(seed: int, *shapes: tuple[int, ...]) -> Callable[[], tuple]:
    def inputs() -> tuple:
        g = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(*s, generator=g) for s in shapes)

    return inputs


def _ids(seed: int, high: int, shape: tuple[int, ...]) -> Callable[[], tuple]:
    def inputs() -> tuple:
        g = torch.Generator().manual_seed(seed)
        return (torch.randint(high, shape, generator=g),)

    return inputs


CASES: list[Case] = []


def _add(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple],
    train: bool = False,
    debatable: str = "",
) -> None:
    CASES.append(Case(name, _seeded(len(CASES), build, train), inputs, train, debatable))


_add("moe_soft_loop", lambda: SoftMoE(8, 10, 4), _randn(1, (2, 5, 8)))
_add("moe_topk_mixtral", lambda: TopKMoE(8, 10, 4, 2), _randn(2, (2, 5, 8)))
_add("moe_einsum_stacked", lambda: EinsumMoE(8, 6, 4), _randn(3, (2, 5, 8)))
_add("moe_bmm_tasks", lambda: BmmMoE(8, 6, 5, 3), _randn(4, (2, 8)))
_add("moe_switch_capacity", lambda: SwitchCapacityRouter(8, 10, 3, 4), _randn(5, (2, 7, 8)))
_add(
    "moe_softmoe_slots",
    lambda: SlotMoE(8, 3, 2),
    _randn(6, (2, 7, 8)),
    debatable="dispatch is a softmax over tokens with learned slots as queries",
)
_add("classifier_head", lambda: ClassifierHead(8, 5), _randn(7, (2, 6, 8)))
_add("feature_gate", lambda: SoftmaxFeatureGate(8), _randn(8, (2, 6, 8)))
_add("softmax_glu", lambda: SoftmaxGLU(8, 12), _randn(9, (2, 6, 8)))
_add("tft_variable_selection", lambda: VariableSelection(4, 7), _randn(10, (2, 5, 4)))
_add("mixture_density", lambda: MixtureDensityHead(8, 3, 4), _randn(11, (5, 8), (5, 3)))
_add("bin_expectation", lambda: BinExpectation(8, 11, -2.0, 2.0), _randn(12, (2, 5, 8)))
_add(
    "adabins_expectation",
    lambda: AdaptiveBinExpectation(8, 6),
    _randn(13, (2, 9, 8)),
    debatable="pixel x learned bin query, softmax over bins, times bin centres computed from the input",
)
_add("temperature_sampler", lambda: TemperatureSampler(8, 13, 0.7, 5), _randn(14, (2, 6, 8)))
_add("gumbel_codebook", lambda: GumbelSelect(8, 2, 5, 3), _randn(15, (2, 6, 8)), train=True)
_add("gumbel_manual_matmul", lambda: ManualGumbelMatmul(8, 5, 6), _randn(16, (2, 7, 8)))
_add("elmo_scalar_mix", lambda: ScalarMix(3, 8), _randn(17, (2, 6, 8)))
_add("linear_attention_softmax_features", lambda: SoftmaxLinearAttention(12, 3), _randn(18, (2, 7, 12)))
_add("clip_loss", lambda: ClipLoss(9, 7, 6), _randn(19, (5, 9), (5, 7)))
_add("info_nce_by_hand", lambda: InfoNCEByHand(8, 6), _randn(20, (4, 8), (4, 8)))
_add("prototypical_softmax", lambda: SoftNearestNeighbour(8, 6, 4), _randn(21, (7, 8), (12, 8)))
_add(
    "soft_kmeans_prototypes",
    lambda: SoftKMeans(8, 5),
    _randn(22, (2, 7, 8)),
    debatable="a weighted sum of parameters, chosen by distance to the same parameters (memory read)",
)
_add(
    "soft_kmeans_update",
    lambda: SoftKMeansDot(8, 4),
    _randn(23, (2, 7, 8)),
    debatable="softmax over clusters, then summed over tokens: the normalised axis is not the one that is summed",
)
_add(
    "attention_pooling_linear_scorer",
    lambda: AttentionPooling(8),
    _randn(24, (2, 7, 8)),
    # Debatable: many papers call this attention (one learned query, the tokens as keys and values).
    debatable="one learned query (the scorer's weight), the tokens as keys and values; many call this attention",
)
_add("vocab_lookup", lambda: VocabLookup(8, 13, 6), _randn(25, (2, 5, 8)))
_add(
    "tied_soft_embedding",
    lambda: TiedSoftEmbedding(8, 11),
    _ids(26, 11, (2, 6)),
    debatable="scores and values are the same embedding table; it reads like cross-attention to the vocabulary",
)
_add("channel_softmax_matmul", lambda: ChannelSoftmaxMatmul(8, 6), _randn(27, (2, 5, 8)))
_add(
    "xcit_cross_covariance",
    lambda: CrossCovariance(12, 3),
    _randn(28, (2, 7, 12)),
    debatable="an exact q k^T softmax v pattern, but over channels: the map is not token by token",
)
_add(
    "danet_channel_attention",
    lambda: ChannelAttentionDANet(),
    _randn(29, (2, 6, 3, 5)),
    debatable="an exact bmm, softmax, bmm pattern over channels of an image: the map is not position by position",
)
_add(
    "slot_attention",
    lambda: SlotAttention(8, 3, 2),
    _randn(30, (2, 7, 8)),
    debatable="q k^T and a product with v, but softmax over the queries (slots) and a second normalisation over tokens",
)
_add(
    "sinkhorn_matching",
    lambda: SinkhornMatching(8, 4),
    _randn(31, (2, 5, 8), (2, 7, 8)),
    debatable="score product, rows and columns normalised in turn, times the second set",
)
_add("sinkhorn_sort", lambda: SinkhornSort(8, 5, 6), _randn(32, (2, 5, 8)))
_add("capsule_routing", lambda: CapsuleRouting(7, 4, 3, 5, 3), _randn(33, (2, 7, 4)))
_add("sknet", lambda: SelectiveKernel(6, 4), _randn(34, (2, 6, 5, 7)))
_add(
    "gcnet_global_context",
    lambda: GlobalContext(6, 3),
    _randn(35, (2, 6, 4, 5)),
    debatable="attention pooling over positions with a 1x1 conv as the scorer; the same for every query",
)
_add("dynamic_conv_kernels", lambda: DynamicConv(3, 5, 4, 3), _randn(36, (2, 3, 6, 7)))
_add("lightweight_dynamic_conv", lambda: LightweightConv(8, 2, 3), _randn(37, (2, 7, 8)))
_add("netvlad", lambda: NetVLAD(6, 4), _randn(38, (2, 6, 3, 5)))
_add("spatial_soft_argmax", lambda: SpatialSoftArgmax(3, 4, 5, 6), _randn(39, (2, 3, 5, 6)))
