"""Exact weights of every layer of a Hugging Face model on a text, for ``text --model``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headscope.cli._shared.console import one_line, say, warnings_as_notes
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import Loaded

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.stats._layer import LayerStats

MOST = 256  # tokens: the context of the shipped model, and what fits a readable page


@dataclass(frozen=True)
class Passed:
    """A forward pass.

    Attributes:
        ids: token ids, with those of the ends.
        cut: number of tokens left out at the start of the text.
        layers: names of the attention modules, in order.
        weights: for each layer [H, T, T]; NaN in rows that could not be computed.
        visible: for each layer boolean [H, T, T], True = attend.
        logits: of the next token [V], or None if the model does not predict tokens.
        tiles: access to the weights of each layer from its q and k.
    """

    ids: list[int]
    cut: int
    layers: tuple[str, ...]
    weights: list[Tensor]
    visible: list[Tensor]
    logits: Tensor | None
    tiles: Sequence[Any]

    @property
    def causal(self) -> bool:
        """Whether later tokens are masked in every layer."""
        return not any(bool(visible.triu(1).any()) for visible in self.visible)


def read(loaded: Loaded, text: str) -> Passed:
    """Run a model on the last tokens of a text, as many as fit.

    Raises:
        Mistake: the model does not read text, has no tokenizer, or cannot be watched.
    """
    import torch

    import headscope
    from headscope.watching import WatchError

    if loaded.takes != "text" or loaded.paired:
        what = "reads images" if loaded.takes != "text" else "has an encoder and a decoder"
        raise Mistake(f"--model: {loaded.name} {what}, expected a decoder or an encoder of text; use headscope watch")
    if loaded.encode is None:
        raise Mistake(
            f"--model: {loaded.name} has no tokenizer that can be read ({loaded.without_tokenizer}); use headscope "
            "watch --ids"
        )
    before, after = loaded.ends
    every = loaded.encode(text)
    room = min(MOST, loaded.context) - len(before) - len(after)
    end = every[-room:] if room > 0 else []
    if not end:
        raise Mistake("TEXT: has no tokens, expected at least 1")
    ids = [*before, *end, *after]
    what = headscope.Observe(received=False, keep_qk=True)
    try:
        with (
            warnings_as_notes("text"),
            torch.inference_mode(),
            headscope.watch(loaded.model, what=what) as recording,
        ):
            out = loaded.run(torch.tensor([ids]))
    except WatchError as error:
        raise Mistake(f"--model: {loaded.name}: {str(error).removeprefix('watch: ')}") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Mistake(f"--model: {loaded.name}: the forward pass failed: {one_line(str(error))[:300]}") from error
    for note in loaded.notes:
        say(f"headscope text: {note}")
    parts = recording.stats.parts
    weights, visible = zip(*(_layer_weights(part) for part in parts.values()), strict=True)
    return Passed(
        ids, len(every) - len(end), tuple(parts), [*weights], [*visible], _logits(out), _tiles(parts.values())
    )


def _layer_weights(part: LayerStats) -> tuple[Tensor, Tensor]:
    """Return the weights of a layer, and its visible pairs (True = attend)."""
    import torch

    from headscope.stats._kept_weights import weights_of

    tiles = weights_of(part.last_tiles)
    whole = (0, tiles.queries)
    # NaN marks masked pairs and broken rows; with q, k and lse of zeros, only masked pairs are NaN
    zeros = {name: torch.zeros_like(tiles.parts[name]) for name in ("q", "k", "lse")}
    p, blank = (
        torch.stack([each.piece(0, head, whole, whole) for head in range(part.heads)])
        for each in (tiles, replace(tiles, parts={**tiles.parts, **zeros}))
    )  # [H, T, T]
    return p.masked_fill(blank.isnan(), 0.0), ~blank.isnan()


def _tiles(parts: Iterable[LayerStats]) -> list[Any]:
    return [part.last_tiles for part in parts]


def _logits(out: Any) -> Tensor | None:
    logits = getattr(out, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits[0, -1]
