"""A text read by a model that is not the shipped one, for ``text --model``: its exact weights, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope._commands.models import Loaded
from headscope._commands.screen import Mistake, one_line, say

if TYPE_CHECKING:
    from torch import Tensor

MOST = 256  # tokens whose maps still fit a page and an eye, as many as the shipped model reads


@dataclass(frozen=True)
class Passed:
    """A forward pass.

    Attributes:
        ids: the tokens, those that mark the ends among them.
        cut: how many tokens of the text were left out, from its start.
        layers: the names of the attention modules, in order.
        weights: of each [1, H, T, T].
        causal: whether no token sees a later one.
        logits: of the next token [V], or None if the model predicts none.
    """

    ids: list[int]
    cut: int
    layers: tuple[str, ...]
    weights: list[Tensor]
    causal: bool
    logits: Tensor | None


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
        with torch.inference_mode(), headscope.watch(loaded.model, what=what) as seen:
            out = loaded.run(torch.tensor([ids]))
    except WatchError as error:
        raise Mistake(f"--model: {loaded.name}: {str(error).removeprefix('watch: ')}") from error
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Mistake(f"--model: {loaded.name}: the forward pass failed: {one_line(str(error))[:300]}") from error
    for note in loaded.notes:
        say(f"headscope text: {note}")
    stats, length = seen.stats, len(ids)
    weights = [stats[layer].tile(0, length, 0, length) for layer in stats.layers]
    causal = not any(bool(part.moments["next"].count.any()) for part in stats.parts.values())
    return Passed(ids, len(every) - len(kept), stats.layers, weights, causal, _logits(out))


def _logits(out: Any) -> Tensor | None:
    logits = getattr(out, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits[0, -1]
