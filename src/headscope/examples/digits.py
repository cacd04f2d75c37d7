"""The digits example: a small vision transformer whose patches are the single pixels of an 8 x 8 digit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor, nn

from headscope.examples._layer import Layer, initialise

SIDE = 8
CLASSES = 10


@dataclass(frozen=True)
class DigitsConfig:
    """The sizes of a digits model."""

    embed_dim: int = 128
    num_heads: int = 8
    num_layers: int = 4


class DigitsModel(nn.Module):
    """A vision transformer: 64 patches of one pixel in reading order, learned positions, the mean over all classified.

    The attention of layer i is `model.layers[i].attention`, a `headscope.MultiHeadAttention`; its position p is the
    pixel in row p // 8, column p % 8. It has no class token, so the sequence is the picture.

    Args:
        config: The sizes.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).
    """

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Linear(1, config.embed_dim)
        self.position_embedding = nn.Embedding(SIDE * SIDE, config.embed_dim)
        self.layers = nn.ModuleList(Layer(config.embed_dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim)
        self.classifier = nn.Linear(config.embed_dim, CLASSES)
        initialise(self, config.num_layers)

    @overload
    def forward(self, images: Tensor, *, need_weights: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, images: Tensor, *, need_weights: Literal[True]) -> tuple[Tensor, list[Tensor]]: ...

    def forward(self, images: Tensor, *, need_weights: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the logits of the ten digits.

        Shapes: images [B, 8, 8], logits [B, 10], weights of each layer [B, H, 64, 64].

        Args:
            images: Ink from 0 (paper) to 1 (full), float32.
            need_weights: Also return the attention weights, one tensor per layer.

        Raises:
            ValueError: images is not [B, 8, 8].
        """
        if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
            raise ValueError(f"images: got {list(images.shape)}, expected [B, {SIDE}, {SIDE}]")
        patches = images.flatten(1).unsqueeze(-1)  # [B, 64, 1]
        x = self.patch_embedding(2 * patches - 1) + self.position_embedding.weight  # [B, 64, E]
        weights: list[Tensor] | None = [] if need_weights else None
        for layer in self.layers:
            x = layer(x, weights=weights)
        logits = self.classifier(self.norm(x).mean(dim=1))
        return logits if weights is None else (logits, weights)


@dataclass(frozen=True)
class Sample:
    """One digit: its image [8, 8], ink from 0 to 1, and which digit it is."""

    image: Tensor
    label: int


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Return the digits of a sheet: tiles of 8 x 8 grey pixels in rows of ten, the tile in column c a digit c."""
    from PIL import Image  # imported only when the samples are read

    with Image.open(path) as sheet:
        width, height = sheet.size
        pixels = torch.frombuffer(bytearray(sheet.convert("L").tobytes()), dtype=torch.uint8).view(height, width)
    tiles = pixels.unflatten(1, (CLASSES, SIDE)).unflatten(0, (-1, SIDE))  # [rows, 8, 10, 8]
    # The scan has 17 levels of ink, 0 to 16; the sheet spreads them over 0 to 255.
    levels = (tiles.to(torch.float32) * 16 / 255).round() / 16
    return tuple(Sample(row[:, label], label) for row in levels for label in range(CLASSES))
