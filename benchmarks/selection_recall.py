"""The recall of ten policies that select keys, on the shipped text model: python benchmarks/selection_recall.py

Each policy selects at most n of 256 keys for each query. The script writes selection_recall.md.
docs/guides/selection_recall.md explains the table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

import headscope
from headscope import Observe, masks
from headscope.masks import Mask

FOLDER = Path(__file__).parent
TEXT = FOLDER.parent / "LICENSE"
LENGTH = 256  # the context of the model
FIRST_ROW = LENGTH // 2  # earlier queries see so few keys that a budget hardly limits them
SHARES = (4, 8, 16)  # a budget is one of so many keys
SINKS = 4  # first keys that StreamingLLM retains
PAGE = 4  # keys of a page; Quest has 16, for contexts 100 times as long
VOTERS = 16  # the last queries, whose weights select keys; at most half of the budget
POOL = 5  # keys over which SnapKV averages votes

Policy: TypeAlias = "Callable[[Tensor, Tensor, int], Tensor | Mask]"
"""Returns the selected keys: q [B, H, T, D], k [B, H, T, D], n -> indices, booleans [B, H, T, T], or a mask."""


def causal_logits(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~masks.causal().dense(1, 1, LENGTH, LENGTH), -torch.inf)


def pick_random(q: Tensor, k: Tensor, n: int) -> Tensor:
    """n random visible keys: what any other policy has to exceed."""
    scores = torch.rand(*q.shape[:3], LENGTH, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(~masks.causal().dense(1, 1, LENGTH, LENGTH), -1).topk(n).indices


def pick_window(q: Tensor, k: Tensor, n: int) -> Mask:
    """The last n keys (Longformer: Beltagy, Peters and Cohan 2020)."""
    return masks.window(n)


def pick_streaming(q: Tensor, k: Tensor, n: int) -> Mask:
    """The first 4 keys, and the last n - 4 (StreamingLLM: Xiao et al. 2023)."""
    return masks.Prefix(SINKS) | masks.window(n - SINKS)


def pick_strided(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The last n / 2 keys, and every (2 T / n)-th one back from the query (Sparse Transformer: Child et al. 2019)."""
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return (back >= 0) & ((back < n // 2) | (back % (2 * LENGTH // n) == 0))


def pick_h2o(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The last n / 2 keys, and those that have received most weight so far (H2O: Zhang et al. 2023)."""

    def worth(i: int, total: Tensor, latest: Tensor) -> Tensor:
        return total.masked_fill(torch.arange(LENGTH) > i - n // 2, torch.inf)

    return evict(causal_logits(q, k), n, worth)


def pick_tova(q: Tensor, k: Tensor, n: int) -> Tensor:
    """Evict the key to which the latest query gives least weight (TOVA: Oren et al. 2024)."""
    return evict(causal_logits(q, k), n, lambda i, total, latest: latest)


def evict(s: Tensor, n: int, worth: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """A cache of n keys: before each query, the key of least worth leaves it, for good; then the query's own enters."""
    cached = torch.zeros_like(s[:, :, 0], dtype=torch.bool)
    total, latest, selected = torch.zeros_like(s[:, :, 0]), torch.zeros_like(s[:, :, 0]), []
    for i in range(s.shape[2]):
        if i >= n:
            least = worth(i, total, latest).masked_fill(~cached, torch.inf).argmin(-1, keepdim=True)
            cached = cached.scatter(-1, least, torch.zeros_like(least, dtype=torch.bool))
        cached[..., i] = True
        latest = s[:, :, i].masked_fill(~cached, -torch.inf).softmax(-1)
        total += latest
        selected.append(cached.clone())
    return torch.stack(selected, 2)


def pick_snapkv(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The last w keys, and those for which the last w queries vote (SnapKV: Li et al. 2024).

    SnapKV selects once, at the end of a prompt. Here every query counts as the end of its prompt.
    """
    w = min(VOTERS, n // 2)
    votes = causal_logits(q, k).softmax(-1).cumsum(2)
    votes = votes - F.pad(votes, (0, 0, w, 0))[:, :, :LENGTH]
    votes = F.avg_pool1d(votes.flatten(0, 1), POOL, 1, POOL // 2).view_as(votes)
    window = masks.window(w).dense(1, 1, LENGTH, LENGTH)
    earlier = masks.causal().dense(1, 1, LENGTH, LENGTH) & ~window
    return chosen(votes.masked_fill(~earlier, -torch.inf), n - w) | window


def pick_quest(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The query's own page, and the pages with the largest upper bound of a logit (Quest: Tang et al. 2024)."""
    pages = k.unflatten(2, (-1, PAGE))
    least, most = pages.amin(3)[:, :, None], pages.amax(3)[:, :, None]  # [B, H, 1, pages, D]
    bounds = torch.maximum(q[:, :, :, None] * least, q[:, :, :, None] * most).sum(-1)
    own, page = torch.arange(LENGTH)[:, None] // PAGE, torch.arange(LENGTH // PAGE)
    bounds = bounds.masked_fill(page > own, -torch.inf).masked_fill(page == own, torch.inf)
    return chosen(bounds, n // PAGE).repeat_interleave(PAGE, -1)


def pick_vertical_slash(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The n / 2 columns and n / 2 diagonals with most weight of the last queries (MInference: Jiang et al. 2024)."""
    p = causal_logits(q, k).softmax(-1)[:, :, -VOTERS:]
    columns = chosen(p.sum(2, keepdim=True), n // 2)  # [B, H, 1, T]
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    at = back[-VOTERS:].clamp_min(0).expand_as(p).flatten(2)
    masses = torch.zeros(*p.shape[:2], LENGTH).scatter_add_(-1, at, p.flatten(2))
    diagonals = chosen(masses, n // 2)[:, :, back.clamp_min(0)]  # [B, H, T, T]
    return columns | (diagonals & (back >= 0))


def pick_blocks(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The pages that have most weight: the best selection of whole pages, as block-sparse kernels read them."""
    p = causal_logits(q, k).softmax(-1)
    return chosen(p.unflatten(-1, (-1, PAGE)).sum(-1), n // PAGE).repeat_interleave(PAGE, -1)


def pick_largest(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The n keys with the largest weights: no selection of n keys retains more (top-k: Gupta et al. 2021)."""
    return causal_logits(q, k).topk(n).indices


def chosen(scores: Tensor, n: int) -> Tensor:
    """Which n entries of the last axis have the largest scores; entries at -inf are never chosen."""
    best = scores.topk(n)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)


POLICIES: dict[str, Policy] = {
    "random": pick_random,
    "window": pick_window,
    "window + sinks (StreamingLLM)": pick_streaming,
    "strided (Sparse Transformer)": pick_strided,
    "H2O": pick_h2o,
    "TOVA": pick_tova,
    "SnapKV": pick_snapkv,
    "Quest": pick_quest,
    "vertical + slash (MInference)": pick_vertical_slash,
    "best pages": pick_blocks,
    "top-k": pick_largest,
}


def load_tokens(tokenizer: Any) -> Tensor:
    """The text in windows of the model's context, [B, T]."""
    ids = torch.tensor(tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


@torch.no_grad()
def measure(policy: Policy, n: int, model: torch.nn.Module, ids: Tensor) -> dict[str, float]:
    """Means over all heads."""
    rows = torch.arange(LENGTH) >= FIRST_ROW
    what = Observe(selected=lambda layer, q, k: policy(q, k, n), rows=rows, received=False)
    with headscope.watch(model, what=what) as recording:
        model(ids)
    columns: dict[str, Any] = {
        "recall": recording["recall"], "KL": recording["recall_kl"], "largest": recording["largest_selected"]
    }  # fmt: skip
    assert torch.equal(columns["KL"].count, columns["recall"].count), "a row without a selected key"
    return {name: float(column.mean.mean()) for name, column in columns.items()}


def render_table(model: torch.nn.Module, ids: Tensor) -> str:
    names = ("recall", "KL", "largest")
    budgets = [f"1/{share}" for share in SHARES]
    lines = [
        "| policy | " + " | ".join(f"{name}, {budget}" for name in names for budget in budgets) + " |",
        "|---|" + "---|" * len(names) * len(budgets),
    ]
    for policy, pick in POLICIES.items():
        figures = [measure(pick, LENGTH // share, model, ids) for share in SHARES]
        lines.append(f"| {policy} | " + " | ".join(f"{x[name]:.2f}" for name in names for x in figures) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    torch.manual_seed(0)
    example: Any = headscope.load_example("text")
    ids = load_tokens(example.tokenizer)
    heads = f"{len(example.model.layers)} × {example.model.layers[0].attention.num_heads} heads"
    text = f"""# The recall of selected keys

Command: `python benchmarks/selection_recall.py`. [The guide](../docs/guides/selection_recall.md) explains the policies.

The shipped text model, {heads}, reads `LICENSE`: {len(ids)} windows of {LENGTH} tokens. Each policy
selects at most 1/4, 1/8 or 1/16 of {LENGTH} keys. The rows are the queries from {FIRST_ROW} on.
Figures are means over all heads.

{render_table(example.model, ids)}

torch {torch.__version__.partition("+")[0]}, headscope {headscope.__version__.partition(".dev")[0]}, float32.
"""
    (FOLDER / "selection_recall.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
