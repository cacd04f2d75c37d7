"""Train the digits model on scikit-learn's digits, most of them moved, turned and scaled a little, anew each time."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loop import Schedule, make_optimizers, train
from sklearn.datasets import load_digits
from torch import Tensor

from headscope.examples.digits import DigitsConfig, DigitsModel

HERE = Path(__file__).resolve().parent
SPLIT_SEED = 0
INK = 16.0  # the scan's levels of ink go from 0 to 16

Array = np.ndarray[Any, np.dtype[Any]]


def split_digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (images uint8 [N, 8, 8], labels uint8 [N]) of the training part, and of the fifth that is held out."""
    digits: Any = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    heldout, training = np.split(order, [math.ceil(len(order) / 5)])
    return (images[training], labels[training]), (images[heldout], labels[heldout])


def augment(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Return seven in ten images moved by up to 0.6 pixels, turned by up to 10 degrees and scaled by up to 8 %.

    The others stay: moving an image of 8 x 8 by a part of a pixel blurs it, and the model must know sharp ones too.

    Shapes: images and result [B, 8, 8].
    """
    rows = len(images)
    angle = generator.uniform(-math.radians(10), math.radians(10), rows)
    scale = generator.uniform(0.92, 1.08, rows)
    shift = generator.uniform(-0.6, 0.6, (rows, 2)) / 4  # affine_grid counts in halves of the width, 4 pixels
    as_is = torch.from_numpy(generator.random(rows) < 0.3)
    cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
    matrix = np.stack([cosine, -sine, shift[:, 0], sine, cosine, shift[:, 1]], axis=1).reshape(rows, 2, 3)
    grid = F.affine_grid(torch.from_numpy(matrix).float(), [rows, 1, 8, 8], align_corners=False)
    moved = F.grid_sample(images.unsqueeze(1), grid, align_corners=False).squeeze(1)
    return torch.where(as_is[:, None, None], images, moved)


def main() -> int:
    """Train; returns the exit code: 0 at the end of the schedule, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "digits", help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="part of what makes a run repeatable")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--rows", type=int, default=64, help="images a step")
    parser.add_argument("--matrix-rate", type=float, default=5e-3, help="peak learning rate of the matrices")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of embeddings, norms and biases")
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--stop-at", type=int, help="stop after this step, as Ctrl-C would")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    (pixels, digits), _ = split_digits()
    images = torch.from_numpy(pixels).float() / INK
    labels = torch.from_numpy(digits).long()
    config = DigitsConfig()
    model = DigitsModel(config)

    def loss_of(step: int) -> tuple[Tensor, float]:
        generator = np.random.default_rng([arguments.seed, step])
        chosen = torch.from_numpy(generator.choice(len(images), arguments.rows, replace=False))
        logits = model(augment(images[chosen], generator))
        loss = F.cross_entropy(logits, labels[chosen])
        return loss, loss.item()

    where = {"out", "resume", "stop_at"}  # all other options decide what comes out
    about = {
        "config": dataclasses.asdict(config),
        "options": {name: value for name, value in vars(arguments).items() if name not in where},
        "train_images": len(images),
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
