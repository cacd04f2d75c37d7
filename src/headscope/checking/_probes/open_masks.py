"""The probe of masks that hide nothing: a call with such a mask must equal a call without a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.checking._case import Case, WorkingMask
from headscope.checking._probes.mask_arguments import build_test_pattern
from headscope.checking._weights import visible_pairs

OF_MASKS_ALONE = {"mask-inverted", "mask-after-softmax"}  # an open mask does not show these mistakes


def probe_open_masks(case: Case) -> None:
    """Test that a mask does not change the output of a query from which it hides nothing."""
    others = {name for name, each in case.observations.items() if each.severity == "wrong"} - OF_MASKS_ALONE
    if case.heads is None or not case.masks or others:  # then the cause is known
        return
    plain = case.subject.run(case.x)
    if not bool(torch.isfinite(plain).all()):
        return
    visible = visible_pairs(case.heads.p).any(1, keepdim=True)  # [B, 1, Q, K]
    for mask in case.masks:
        shown = visible.any(0, keepdim=True).expand_as(visible) if mask.kind == "pairs" else visible
        changes = [_describe_change(case, mask, torch.ones_like(visible), plain)]
        if changes[0] and mask.kind != "keys" and not bool(shown.all()):  # it may replace the built-in mask
            changes.append(_describe_change(case, mask, shown, plain))
        if all(changes):
            case.report("mask-applied-wrong", f"{mask.argument}=: {changes[-1]}")


def _describe_change(case: Case, mask: WorkingMask, shown: Tensor, plain: Tensor) -> str:
    """Describe how outputs change with a mask that leaves all of ``shown`` visible; "" if they do not.

    Args:
        case: the case under test.
        mask: the mask.
        shown: the pairs that are visible without a mask, or all pairs: [B, 1, Q, K].
        plain: the outputs without a mask.
    """
    batch, length = plain.shape[:2]
    _, hiding = build_test_pattern(mask.kind, batch, length)
    every = torch.ones(batch, length, dtype=torch.bool)
    if mask.kind == "keys":
        shown, rest, word = torch.ones_like(hiding), torch.arange(batch) > 0, "batch entry"
        partly, some = hiding | rest[:, None], rest[:, None].expand(batch, length)
    else:
        rest, word = torch.arange(length) % 2 == 1, "query"
        partly, some = shown & (hiding | rest[:, None]), rest.expand(batch, length)
    limit = 100 * case.subject.tolerance * float(plain.abs().max())
    for allowed, at, what in (
        (shown, every, "hides nothing, outputs"),
        (partly, some, f"hides nothing from a {word}, its outputs"),
    ):
        out = case.subject.run(case.x, **{mask.argument: mask.build(allowed)})
        off = float((out - plain).abs()[at].nan_to_num(torch.inf).max())
        if off > limit:
            return f"with a mask that {what} differ by up to {off:.3g} from those without one"
    return ""
