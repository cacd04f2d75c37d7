"""The question about documents that are packed into one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope.checking._copies import CODE_ERRORS, describe_error
from headscope.checking._whole_model.behaviour import broken, change_tokens
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.inputs import ModelInputs, cut, is_transformers

QUESTION = "packed documents"


def ask_documents(case: ModelCase) -> None:
    """Ask whether a mask of four axes separates two documents in one row, and whether positions alone do."""
    entry, subject = case.entry, case.subject
    group = next((group for group in entry.groups if entry.main in group.tokens), None)
    if case.unusable or group is None or not case.aligned or not is_transformers(subject.model):
        case.not_tested[QUESTION] = case.unusable or "the model is not one of transformers that takes attention_mask"
        return
    if entry.length < 6:
        case.not_tested[QUESTION] = f"inputs: got {entry.length} tokens, expected at least 6"
        return
    border = entry.length // 2
    plain = entry.with_values(**{group.mask: None})
    positions = count_again(entry.length, border) if "position_ids" in subject.parameters else {}
    mask = {group.mask: separate(entry.length, border, bool(case.causal), subject.dtype)}
    try:
        packed = subject.run(plain, **mask, **positions)
    except CODE_ERRORS as error:
        case.not_tested[QUESTION] = f"a mask [B, 1, T, T] is not supported: {describe_error(error)}"
        return
    if packed.shape != case.out.shape or broken(packed):
        case.not_tested[QUESTION] = "with a mask [B, 1, T, T], the output has another shape or is not finite"
        return
    _judge(case, plain, packed, border, (mask, positions))
    if positions:
        _note_positions(case, plain, border, positions)


def _judge(
    case: ModelCase, plain: ModelInputs, packed: Tensor, border: int, more: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    mask, positions = more
    changed = case.subject.run(change_tokens(plain, 0, border), **mask, **positions)
    leak = case.gap(packed[:, border:], changed[:, border:])
    if leak > case.subject.tolerance:
        off = case.measured(leak)
        name = next(iter(mask))
        joint = separate(plain.length, 0, bool(case.causal), case.subject.dtype)
        if not case.differ(packed, case.subject.run(plain, **{name: joint}, **positions)):
            evidence = "a mask [B, 1, T, T] that separates two documents changes nothing: other tokens in the first "
            case.report("mask-4d-ignored", f"{evidence}document move the second {off}")
        else:
            evidence = "with a mask [B, 1, T, T] that separates two documents, other tokens in the first document move "
            case.report("documents-mixed", f"{evidence}the second {off}; the mask has an effect, but not in every layer")
        return
    group = next(group for group in case.entry.groups if case.entry.main in group.tokens)
    again = {name: value[:, border:] for name, value in positions.items()}
    alone = case.subject.run(cut(case.entry, group, border, case.entry.length), **again)
    if case.differ(packed[:, border:], alone):
        off = case.measured(case.gap(packed[:, border:], alone))
        case.not_tested[f"{QUESTION}, alone"] = (
            f"they do not mix, but the second one alone differs {off}: its positions are others, or a mask "
            "[B, 1, T, T] replaces a window of the model"
        )
    else:
        case.understood.append("a mask [B, 1, T, T] separates packed documents")


def _note_positions(case: ModelCase, plain: ModelInputs, border: int, positions: dict[str, Tensor]) -> None:
    """Note whether positions that start again separate documents, which some models read from them."""
    try:
        one, other = (case.subject.run(x, **positions) for x in (plain, change_tokens(plain, 0, border)))
    except CODE_ERRORS:
        return
    if case.differ(one[:, border:], other[:, border:]):
        case.understood.append("position_ids that start again do not separate documents")
    else:
        case.understood.append("position_ids that start again separate documents, without an attention_mask")


def separate(length: int, border: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return numbers to add that separate two documents, [1, 1, T, T]."""
    document = torch.arange(length) >= border
    visible = document[:, None] == document
    if causal:
        visible = visible.tril()
    return torch.zeros(1, 1, length, length, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def count_again(length: int, border: int) -> dict[str, Tensor]:
    """Return position_ids that start again at the second document."""
    return {"position_ids": torch.cat([torch.arange(border), torch.arange(length - border)])[None]}
