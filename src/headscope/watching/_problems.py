"""Errors and warnings of a watch that has nothing to record, or would record something wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping

from headscope._intercept import WatchError, WatchWarning, summarize_names
from headscope._support.user_line import user_stacklevel

FEW = 6  # layers that an error names


def check_rule(apart: float, most: float) -> None:
    """Check that a layer's output is that of its q, k, v and mask, by their largest relative difference.

    Raises:
        WatchError: it is not.
    """
    if apart == math.inf:
        raise WatchError(
            "its output is NaN or infinite in other places than its q, k, v and mask give. Either its weights "
            "or inputs hold NaN, which torch's kernels may turn into numbers or read from masked keys; or it "
            "attends by a rule that headscope does not support. Exclude it with layers="
        )
    if apart > most:
        raise WatchError(
            f"its output differs by {apart:.2g} of the largest value from the output that its q, k, v and mask "
            "give; it attends by a rule that headscope does not support. Exclude it with layers="
        )


def nothing_observed(
    model: str, modules: Collection[str], others: Mapping[str, str], refused: Collection[str] = ()
) -> str:
    """Return the message for a model in which no attention call was observed, with what it has in place of it.

    ``refused``: modules that compute an attention which cannot be recorded.
    """
    if refused:
        return (
            f"watch: no attention call was observed in {model} that watch can record: it cannot follow how "
            f"{summarize_names(refused)} attends; docs/concepts/recordings.md lists what it follows"
        )
    if not others:
        return f"watch: no attention call was observed in {model}; its modules: {summarize_names(modules)}"
    shown = ", ".join(f"{name} ({what})" for name, what in [*others.items()][:FEW])
    more = f" and {len(others) - FEW} more" if len(others) > FEW else ""
    return f"watch: no attention call was observed in {model}, so there is nothing to record; it has {shown}{more}"


def warn_of_batch(name: str) -> None:
    """Warn of a module with an axis that was taken for a batch and may be heads."""
    warnings.warn(
        f"watch: {name}: an axis of q, k and v that may be heads is taken for a batch; for heads, multiply "
        '[B, H, length, D] as a whole, or watch the module that projects q, k and v; unseen="ignore" silences '
        "this warning",
        WatchWarning,
        stacklevel=user_stacklevel(),
    )


def warn_of_unknown_ids() -> None:
    """Warn of steps without ``duplicate`` and ``induction``."""
    warnings.warn(
        'watch: tokens="inputs": the ids of cached keys are unknown, because no watched step computed these '
        'keys; duplicate and induction exclude such steps; unseen="ignore" silences this warning',
        WatchWarning,
        stacklevel=user_stacklevel(),
    )
