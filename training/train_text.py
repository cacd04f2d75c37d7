"""Train the text model on what prepare_text.py made.

A row of a batch is one of three kinds, drawn anew for each row:

- text: tokens from anywhere in the training files;
- random tokens, a block of 8 to 128 of them, repeated until the row is full;
- a snippet of the training files, repeated in the same way.

Of repeated rows only the second and later copies count in the loss: a first copy of random tokens cannot be
foretold, and the model should not learn that text is random. They are there so that previous-token and induction heads
form within few steps; the card says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loop import Schedule, make_optimizers, train
from torch import Tensor

from headscope.examples.text import TextConfig, TextModel

HERE = Path(__file__).resolve().parent
IGNORED = -100  # the target that cross_entropy leaves out
SHORTEST_BLOCK = 8


@dataclass(frozen=True)
class Batch:
    """Inputs [B, T] and targets [B, T] of a step, and which of its rows are text [B]."""

    inputs: Tensor
    targets: Tensor
    is_text: Tensor


def make_batch(
    stream: np.ndarray[Any, np.dtype[np.uint16]],
    config: TextConfig,
    seed: list[int],
    *,
    rows: int,
    random_share: float,
    snippet_share: float,
) -> Batch:
    """Return a batch; the same for the same seed."""
    generator = np.random.default_rng(seed)
    width = config.context + 1
    tokens = np.empty((rows, width), dtype=np.int64)
    targets = np.empty((rows, config.context), dtype=np.int64)
    kinds = generator.random(rows)
    for row, kind in enumerate(kinds):
        start = int(generator.integers(0, stream.size - width))
        text = stream[start : start + width].astype(np.int64)
        period = int(generator.integers(SHORTEST_BLOCK, config.context // 2 + 1))
        if kind < random_share:
            tokens[row] = np.resize(generator.integers(0, config.vocab_size, period), width)
        elif kind < random_share + snippet_share:
            tokens[row] = np.resize(text[:period], width)
        else:
            tokens[row] = text
            period = 0
        targets[row] = tokens[row, 1:]
        if period:
            targets[row, : period - 1] = IGNORED
    return Batch(
        inputs=torch.from_numpy(tokens[:, :-1]),
        targets=torch.from_numpy(targets),
        is_text=torch.from_numpy(kinds >= random_share + snippet_share),
    )


def main() -> int:
    """Train; returns the exit code: 0 at the end of the schedule, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder that prepare_text.py wrote")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "text", help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="part of what makes a run repeatable")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="sequences a step")
    parser.add_argument("--matrix-rate", type=float, default=1e-2, help="peak learning rate of the layers' matrices")
    parser.add_argument("--rate", type=float, default=6e-3, help="peak learning rate of embeddings, norms and biases")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--random-share", type=float, default=0.125, help="share of rows of repeated random tokens")
    parser.add_argument("--snippet-share", type=float, default=0.0625, help="share of rows of repeated snippets")
    parser.add_argument("--stop-at", type=int, help="stop after this step, as Ctrl-C would")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    stream = np.load(arguments.data / "train.npy")
    manifest = json.loads((arguments.data / "manifest.json").read_text(encoding="utf-8"))
    config = TextConfig(vocab_size=manifest["tokenizer"]["vocab_size"])
    model = TextModel(config)

    def loss_of(step: int) -> tuple[Tensor, float]:
        batch = make_batch(
            stream,
            config,
            [arguments.seed, step],
            rows=arguments.rows,
            random_share=arguments.random_share,
            snippet_share=arguments.snippet_share,
        )
        logits = model(batch.inputs)
        targets = batch.targets.flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="none")
        shown = losses.detach().view_as(batch.targets)[batch.is_text].mean().item()
        return losses.sum() / (targets != IGNORED).sum(), shown

    where = {"data", "out", "resume", "stop_at"}  # all other options decide what comes out
    about = {
        "config": dataclasses.asdict(config),
        "options": {name: value for name, value in vars(arguments).items() if name not in where},
        "train_tokens": int(stream.size),
    }
    outcome = train(
        model,
        make_optimizers(
            model,
            matrix_rate=arguments.matrix_rate,
            rate=arguments.rate,
            weight_decay=arguments.weight_decay,
        ),
        loss_of,
        Schedule(arguments.steps, arguments.warmup),
        arguments.out,
        about=about,
        resume=arguments.resume,
        stop_at=arguments.stop_at,
    )
    print(f"{outcome.steps} steps in {outcome.seconds / 60:.1f} minutes", file=sys.stderr)
    return 130 if outcome.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
