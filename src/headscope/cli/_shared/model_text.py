"""A text read by a model that is not the shipped one, for ``text --model``: its exact weights, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headscope.cli._shared.console import Mistake, one_line, say, warnings_as_notes
from headscope.cli._shared.models import Loaded

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.stats._layer import LayerStats

MOST = 256  # tokens whose maps still fit a page and an eye, as many as the shipped model reads


@dataclass(frozen=True)
class Passed:
    """A forward pass.

    Attributes:
        ids: the tokens, those that mark the ends among them.
        cut: how many tokens of the text were left out, from its start.
        layers: the names of the attention modules, in order.
        weights: of each [H, T, T]; NaN in rows that could not be computed.
        seen: of each what its tokens may see, boolean [H, T, T].
        logits: of the next token [V], or None if the model predicts none.
    """

    ids: list[int]
    cut: int
    layers: tuple[str, ...]
    weights: list[Tensor]
    seen: list[Tensor]
    logits: Tensor | None

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return not any(bool(seen.triu(1).any()) for seen in self.seen)


def read(loaded: Loaded, text: str) -> Passed:
    """The end of a text, as much as fits, read by a model.

    Raises:
        Mistake: the model reads no text, has no tokenizer, or cannot be watched.
    """
    import torch

    import headscope
    from headscope.watching import WatchError

    if loaded.takes != "text" or loaded.paired:
        what = "looks at images" if loaded.takes != "text" else "has an encoder and a decoder"
        raise Mistake(f"--model: {loaded.name} {what}; headscope watch can show it")
    if loaded.encode is None:
        raise Mistake(f"--model: {loaded.name} has no tokenizer that can be read")
    before, after = loaded.ends
    every = loaded.encode(text)
    room = min(MOST, loaded.context) - len(before) - len(after)
    kept = every[-room:] if room > 0 else []
    if not kept:
        raise Mistake("the text has no tokens")
    ids = [*before, *kept, *after]
    what = headscope.Observe(received=False, keep_qk=True)
    try:
        with (
            warnings_as_notes("text"),
            torch.inference_mode(),
            headscope.watch(loaded.model, what=what) as seen,
        ):
            out = loaded.run(torch.tensor([ids]))
    except WatchError as error:
        raise Mistake(f"--model: {loaded.name}: {str(error).removeprefix('watch: ')}") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Mistake(f"--model: {loaded.name}: the forward pass failed: {one_line(str(error))[:300]}") from error
    for note in loaded.notes:
        say(f"headscope text: {note}")
    parts = seen.stats.parts
    weights, sights = zip(*(_layer(part) for part in parts.values()), strict=True)
    return Passed(ids, len(every) - len(kept), tuple(parts), [*weights], [*sights], _logits(out))


def _layer(part: LayerStats) -> tuple[Tensor, Tensor]:
    """The weights of a layer, and what its tokens may see."""
    import torch

    from headscope.stats._tiles import kept_of

    kept = kept_of(part.last_tiles)
    whole = (0, kept.queries)
    # a weight is NaN where it is hidden, and where it could not be computed; of zeros nothing but the mask hides one
    zeros = {name: torch.zeros_like(kept.parts[name]) for name in ("q", "k", "lse")}
    p, blank = (
        torch.stack([each.piece(0, head, whole, whole) for head in range(part.heads)])
        for each in (kept, replace(kept, parts={**kept.parts, **zeros}))
    )  # [H, T, T]
    return p.masked_fill(blank.isnan(), 0.0), ~blank.isnan()


def _logits(out: Any) -> Tensor | None:
    logits = getattr(out, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits[0, -1]
