"""The text example: a small decoder-only language model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch.nn.functional as F
from torch import Tensor, nn

from headscope import masks
from headscope.examples._layer import Layer, initialise

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
        self.layers = nn.ModuleList(Layer(config.embed_dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim)
        initialise(self, config.num_layers)

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
            ValueError: tokens has not two axes, is longer than the context, or has an id out of range (on a GPU, CUDA
                raises its own error).
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens: has {tokens.ndim} axes, expected 2 (B, T); tokens {list(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"tokens: axis 1 (T) is {length}, the context is {self.config.context}; tokens {list(tokens.shape)}"
            )
        try:
            embedded = self.token_embedding(tokens)
        except IndexError:  # so a forward pass with valid ids does not wait for a check
            expected = f"expected 0 to {self.config.vocab_size - 1}"
            raise ValueError(f"tokens: are {int(tokens.min())} to {int(tokens.max())}, {expected}") from None
        x = embedded + self.position_embedding.weight[:length]
        weights: list[Tensor] | None = [] if need_weights else None
        for layer in self.layers:
            x = layer(x, masks.causal(), weights=weights)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return logits if weights is None else (logits, weights)


class TextTokenizer:
    """A byte-level BPE tokenizer: any text becomes ids, and back without loss.

    Args:
        path: A `tokenizer.json` as the tokenizers library writes it.
    """

    def __init__(self, path: Path) -> None:
        # Loaded here and not with the module, so that other uses do not wait for the tokenizer.
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; the empty text has none."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: Such a token does not exist.
        """
        for token in ids:
            self._check(token)
        return self._tokenizer.decode(ids)

    def pieces(self, text: str) -> list[str]:
        """Return the text of each token, in order.

        Joined they are the text, unless a character is split over several tokens: each of its bytes is then written as
        an escape such as `\\xe2`.
        """
        return [self.piece(token) for token in self.encode(text)]

    def piece(self, token: int) -> str:
        """Return the text of one token, with `\\xe2` for a byte that is not a whole character.

        Raises:
            ValueError: Such a token does not exist.
        """
        self._check(token)
        written = self._tokenizer.id_to_token(token)
        assert written is not None  # the token exists
        return bytes(self._byte_of[character] for character in written).decode("utf-8", errors="backslashreplace")

    def _check(self, token: int) -> None:
        if not 0 <= token < len(self):
            raise ValueError(f"token: expected 0 to {len(self) - 1}, got {token}")

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token lies in the text, as (start, stop) in characters.

        Tokens that share one character have the same offsets.
        """
        return [(start, stop) for start, stop in self._tokenizer.encode(text).offsets]


def _byte_characters() -> str:
    """Return the 256 characters by which byte-level BPE writes bytes, in the order of the bytes.

    Printable Latin-1 characters represent themselves, the rest the characters from U+0100 on.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), its `bytes_to_unicode`.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))
