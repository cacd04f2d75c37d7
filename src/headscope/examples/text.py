"""The text example: a small decoder-only language model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headscope import masks
from headscope.module import MultiHeadAttention

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextConfig:
    """The sizes of a text model."""

    vocab_size: int = 2048
    context: int = 256
    embed_dim: int = 128
    num_heads: int = 8
    num_layers: int = 6


class DecoderLayer(nn.Module):
    """One layer of the decoder: causal self-attention, then an MLP of four times the width, each on a normalised input."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = MultiHeadAttention(embed_dim, num_heads)
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp_in = nn.Linear(embed_dim, 4 * embed_dim)
        self.mlp_out = nn.Linear(4 * embed_dim, embed_dim)

    def forward(self, x: Tensor, *, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [B, T, E] and, if asked for, its attention weights [B, H, T, T]."""
        normed = self.attention_norm(x)
        weights: Tensor | None = None
        if need_weights:
            attended, weights = self.attention(normed, mask=masks.causal(), need_weights=True)
        else:
            attended = self.attention(normed, mask=masks.causal())
        x = x + attended
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))), weights


class TextModel(nn.Module):
    """A decoder-only language model: learned absolute positions, pre-norm layers, the output tied to the embedding.

    The attention of layer i is `model.layers[i].attention`, a `headscope.MultiHeadAttention`.

    Args:
        config: The sizes.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position_embedding = nn.Embedding(config.context, config.embed_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(config.embed_dim, config.num_heads) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim)

    @overload
    def forward(self, tokens: Tensor, *, need_weights: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, *, need_weights: Literal[True]) -> tuple[Tensor, list[Tensor]]: ...

    def forward(self, tokens: Tensor, *, need_weights: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the logits of each next token.

        Shapes: tokens [B, T], logits [B, T, V], weights of each layer [B, H, T, T].

        Args:
            tokens: Token ids, 0 to vocab_size - 1; the first stands at position 0; T is at most the context.
            need_weights: Also return the attention weights, one tensor per layer.

        Raises:
            ValueError: tokens has not two axes, or is longer than the context.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens: has {tokens.ndim} axes, wanted 2 (B, T); tokens {list(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"tokens: axis 1 (T) is {length}, the context is {self.config.context}; tokens {list(tokens.shape)}"
            )
        x = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        weights: list[Tensor] = []
        for layer in self.layers:
            x, layer_weights = cast("tuple[Tensor, Tensor | None]", layer(x, need_weights=need_weights))
            if layer_weights is not None:
                weights.append(layer_weights)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return (logits, weights) if need_weights else logits


def initialise(model: TextModel) -> None:
    """Draw the start of a training from torch's global generator.

    Matrices have the standard deviation fan_in ** -0.5, those that write to the residual stream less by
    (2 * layers) ** 0.5; embeddings 0.02; biases are 0, norms 1.
    """
    writes = (2 * model.config.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim == 2:
            is_output = "out" in name.rsplit(".", 2)[-2]
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * (writes if is_output else 1.0))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class TextTokenizer:
    """A byte-level BPE tokenizer: any text becomes ids, and back without loss.

    Args:
        path: A `tokenizer.json` as the tokenizers library writes it.
    """

    def __init__(self, path: Path) -> None:
        # Loaded here and not with the module: whoever needs no text waits for no tokenizer.
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; the empty text has none."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids)

    def pieces(self, text: str) -> list[str]:
        """Return the text of each token, in order.

        Joined they are the text, unless a character is split over several tokens: each of its bytes is then written as
        an escape such as `\\xe2`.
        """
        return [self.piece(token) for token in self.encode(text)]

    def piece(self, token: int) -> str:
        """Return the text of one token, with `\\xe2` for a byte that is no whole character.

        Raises:
            ValueError: There is no such token.
        """
        written = self._tokenizer.id_to_token(token)
        if written is None:
            raise ValueError(f"token: {token} is no token id, wanted 0 to {len(self) - 1}")
        return bytes(self._byte_of[character] for character in written).decode("utf-8", errors="backslashreplace")

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token lies in the text, as (start, stop) in characters.

        Tokens that share one character have the same place.
        """
        return [(start, stop) for start, stop in self._tokenizer.encode(text).offsets]


def _byte_characters() -> str:
    """Return the 256 characters by which byte-level BPE writes bytes, in the order of the bytes.

    Printable Latin-1 stands for itself, the rest takes the characters from U+0100 on.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), its `bytes_to_unicode`.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))
