"""Compute the figures that the cards state, from the weights that ship."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headscope.examples import DigitsExample, TextExample

HEAD_WINDOWS = 32  # full windows of held-out text that the head scores stand on
REPEATS_SEED = 0
REPEATS_ROWS = 32
REPEATS_BLOCK = 64
ROWS_AT_ONCE = 8


def text_figures(example: TextExample, heldout: str) -> dict[str, Any]:
    """Return the text model's figures.

    - heldout: the loss in nats per token and in bits per byte. The text is cut into windows of the context's length;
      each token but the first is foretold once, from those before it in its window.
    - heads: scores [layers][heads], each a mean over rows. `previous` is the weight on the token before, over all rows
      but a window's first. `induction` is the weight on all tokens that follow an earlier copy of the row's own token,
      over the rows that have such a token; `induction_repeated` the same on the second half of repeated random tokens.
    - repeated: the loss on a block of random tokens and on its second copy, each without its first token.
    """
    model = example.model
    ids = torch.tensor(example.tokenizer.encode(heldout))
    context = model.config.context
    nats = 0.0
    for start in range(0, len(ids) - 1, context):
        window = ids[start : start + context + 1].unsqueeze(0)
        with torch.inference_mode():
            logits = model(window[:, :-1])
        nats += F.cross_entropy(logits[0].double(), window[0, 1:], reduction="sum").item()
    first_bytes = len(example.tokenizer.decode(ids[:1].tolist()).encode())
    byte_count = len(heldout.encode()) - first_bytes

    windows = ids[: HEAD_WINDOWS * context].view(-1, context)  # [windows, T]
    generator = np.random.default_rng(REPEATS_SEED)
    block = torch.from_numpy(generator.integers(0, model.config.vocab_size, (REPEATS_ROWS, REPEATS_BLOCK)))
    repeated = torch.cat([block, block], dim=1)  # [rows, 2 * block]
    with torch.inference_mode():
        losses = F.cross_entropy(model(repeated)[:, :-1].mT, repeated[:, 1:], reduction="none")  # of tokens 1, 2, ...
    heads = {
        "previous": scores(model, windows, is_previous, first_row=0),
        "induction": scores(model, windows, is_induction, first_row=0),
        "induction_repeated": scores(model, repeated, is_induction, first_row=REPEATS_BLOCK),
    }
    return {
        "heldout": {
            "bytes": byte_count,
            "tokens": len(ids) - 1,
            "nats_per_token": round(nats / (len(ids) - 1), 5),
            "bits_per_byte": round(nats / math.log(2) / byte_count, 5),
        },
        "repeated": {
            "sequences": REPEATS_ROWS,
            "block": REPEATS_BLOCK,
            "seed": REPEATS_SEED,
            "first_copy_nats": round(losses[:, : REPEATS_BLOCK - 1].mean().item(), 5),
            "second_copy_nats": round(losses[:, REPEATS_BLOCK:].mean().item(), 5),
        },
        "heads": heads,
    }


def is_previous(tokens: Tensor) -> Tensor:
    """Return which keys [B, T, T] are the token before."""
    length = tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril(-1).triu(-1).expand(len(tokens), -1, -1)


def is_induction(tokens: Tensor) -> Tensor:
    """Return which keys [B, T, T] are visible and follow an earlier copy of the row's token."""
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)  # before[j] = tokens[j - 1]
    return (before[:, None, :] == tokens[:, :, None]).tril()


def scores(
    model: torch.nn.Module, tokens: Tensor, pattern: Callable[[Tensor], Tensor], first_row: int
) -> list[list[float]]:
    """Return for each head [layers][heads] its mean weight on a pattern's keys, over the rows that have such a key."""
    total: Tensor | None = None
    rows = 0
    for part in tokens.split(ROWS_AT_ONCE):
        keys = pattern(part)[:, first_row:]  # [B, rows, T]
        with torch.inference_mode():
            _, weights = model(part, need_weights=True)
        sums = torch.stack(
            [(layer[:, :, first_row:] * keys[:, None]).sum(dim=(0, 2, 3), dtype=torch.float64) for layer in weights]
        )
        total = sums if total is None else total + sums
        rows += int(keys.any(dim=2).sum())
    assert total is not None
    return [[round(value, 5) for value in layer] for layer in (total / rows).tolist()]


def digits_figures(example: DigitsExample, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the digits model's figures.

    - heldout: how many images [N, 8, 8] of the held-out fifth were named right, and the loss in nats.
    - heads: [layers][heads], means over all rows: `distance`, the mean distance in pixels from a patch to what it
      looks at, and `entropy` of the weights, in nats.
    """
    with torch.inference_mode():
        logits, weights = example.model(images, need_weights=True)
    correct = int((logits.argmax(dim=1) == labels).sum())
    place = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))  # [64, 2]
    apart = torch.cdist(place, place)  # [64, 64]
    distance = [(layer * apart).sum(dim=3).mean(dim=(0, 2)).tolist() for layer in weights]
    entropy = [torch.special.entr(layer).sum(dim=3).mean(dim=(0, 2)).tolist() for layer in weights]
    return {
        "heldout": {
            "images": len(labels),
            "correct": correct,
            "accuracy": round(correct / len(labels), 5),
            "nats": round(F.cross_entropy(logits, labels).item(), 5),
        },
        "heads": {
            "distance": [[round(value, 5) for value in layer] for layer in distance],
            "entropy": [[round(value, 5) for value in layer] for layer in entropy],
        },
    }
