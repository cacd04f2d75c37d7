"""A pass over the first tokens or the first image, which shows the layers of a model and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope.cli._shared.model_loading import quiet_transformers
from headscope.cli._shared.watch_options import WatchOptions

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.stats import HeadStats

SHORT = 2  # tokens


def observe_first(loaded: Loaded, part: Any, options: WatchOptions) -> HeadStats:
    """Return statistics of the layers that the options select, on the start of an input."""
    import torch

    import headscope

    short = part[:, :SHORT] if loaded.takes == "text" else part[:1]
    what = headscope.Observe(received=False)
    with (
        quiet_transformers(),
        torch.inference_mode(),
        headscope.watch(loaded.model, what=what, layers=options.layers or None, unseen="ignore") as recording,
    ):
        loaded.run(short)
    return recording.stats
