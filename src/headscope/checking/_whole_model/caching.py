"""Questions about the cache: token by token, and a prompt in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.inputs import ModelInputs, is_transformers
from headscope.checking._whole_model.subject import main_output

CACHES = ("past_key_values", "cache_params")
QUESTION = "cache"


def ask_cache(case: ModelCase) -> None:
    """Ask whether a text read with a cache gives the output of the whole: token by token, and in chunks.

    The model counts positions itself, or is passed position_ids, as generate() of transformers passes them.
    """
    cache = _refuse(case)
    if not cache:
        return
    length = case.entry.length
    start = length // 2
    plans = {
        "decoding-differs": [(0, start), *((n, n + 1) for n in range(start, length))],
        "chunked-prefill-differs": [(0, length // 3), (length // 3, length)],
    }
    for name, plan in plans.items():
        question = "token by token" if name == "decoding-differs" else "in chunks"
        try:
            gaps = _measure_gaps(case, cache, plan)
        except CODE_ERRORS as error:
            case.not_tested[f"{QUESTION}, {question}"] = describe_error(error)
            continue
        if not gaps:
            case.not_tested[f"{QUESTION}, {question}"] = "the output has no cache"
        elif float(gaps[-1].max()) <= case.subject.tolerance:
            positions = ", if position_ids are passed" if len(gaps) > 1 else ""
            case.understood.append(f"with its cache, {question}: equal to the whole{positions}")
        else:
            first = int((gaps[-1] > case.subject.tolerance).nonzero()[0, 0])
            calls = ", ".join(f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in plan[:3])
            off = case.measured(float(gaps[-1].max()))
            case.report(
                name, f"read {question} (tokens {calls}{', …' * (len(plan) > 3)}), outputs differ {off}, from token "
                f"{first} on"
            )  # fmt: skip


def _measure_gaps(case: ModelCase, cache: str, plan: list[tuple[int, int]]) -> list[Tensor]:
    """Return how far the output of each token is from that of the whole text, [T], for each way to count positions.

    The second way is tried only if the first differs. The list is empty if the output has no cache.
    """
    ways = [False, True] if "position_ids" in case.subject.parameters else [False]
    gaps: list[Tensor] = []
    for with_positions in ways:
        parts = _read(case, cache, plan, with_positions)
        if parts is None:
            return []
        gaps.append((case.out - parts).abs().nan_to_num(float("inf")).flatten(2).amax(-1)[0])
        if float(gaps[-1].max()) <= case.subject.tolerance:
            break
    return gaps


def _refuse(case: ModelCase) -> str:
    """Return the argument that takes a cache; "" if the question cannot be asked, with the reason recorded."""
    subject = case.subject
    cache = next((name for name in CACHES if name in subject.parameters), "")
    main = case.entry.values[case.entry.main]
    reason = case.unusable
    if not is_transformers(subject.model) or not cache or "use_cache" not in subject.parameters:
        reason = "forward() has no past_key_values and use_cache as models of transformers have"
    elif not case.aligned or main.is_floating_point():
        reason = "the output does not have one row for each token id"
    elif not case.causal:
        reason = "the model is not causal" if case.causal is False else "it is not known whether the model is causal"
    elif case.entry.length < 6:
        reason = f"inputs: got {case.entry.length} tokens, expected at least 6"
    if reason:
        case.not_tested[QUESTION] = reason
        return ""
    return cache


def _read(case: ModelCase, cache: str, plan: list[tuple[int, int]], with_positions: bool) -> Tensor | None:
    """Return the outputs of the parts of a text, each read with the cache of those before; None without a cache."""
    outs: list[Tensor] = []
    state: Any = None
    for start, stop in plan:
        part = _part(case.entry, start, stop)
        more: dict[str, Any] = {} if state is None else {cache: state}
        if with_positions:
            more["position_ids"] = torch.arange(start, stop)[None]
        result = case.subject.call_with(part, use_cache=True, **more)
        state = getattr(result, cache, None)
        if state is None:
            return None
        outs.append(main_output(result, part).double())
    return torch.cat(outs, 1)


def _part(entry: ModelInputs, start: int, stop: int) -> ModelInputs:
    """Return some tokens of the main sequence; without its mask, which hides nothing."""
    group = next((group for group in entry.groups if entry.main in group.tokens), None)
    names = (entry.main,) if group is None else group.tokens
    part = entry.with_values(**{name: entry.values[name][:, start:stop] for name in names})
    return part if group is None else part.with_values(**{group.mask: None})
