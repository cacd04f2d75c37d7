"""The question about documents that are packed into one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.behaviour import change_tokens
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.hooks import broken
from headscope.checking._whole_model.inputs import MaskGroup, ModelInputs, cut, is_transformers

QUESTION = "packed documents"
RANKS = ("separated", "alone", "documents-mixed", "mask-4d-ignored", "refused")
"""Answers, the best first: a model needs to support one of the two forms of a mask."""


@dataclass(frozen=True)
class Packed:
    """Two documents in one row, and the mask of four axes that separates them.

    Attributes:
        plain: the inputs without a mask.
        border: the first token of the second document.
        positions: position_ids that start again there, if the model takes them.
        additive: whether the mask is numbers to add; else boolean, True = visible.
    """

    plain: ModelInputs
    group: MaskGroup
    border: int
    positions: dict[str, Any]
    additive: bool

    def run(self, case: ModelCase, inputs: ModelInputs, border: int) -> Tensor:
        """Return the output for a mask that separates documents at a border; 0 = one document."""
        length = self.plain.length
        document = torch.arange(length) >= border
        visible = document[:, None] == document
        visible = (visible.tril() if case.causal else visible)[None, None]
        numbers = torch.zeros(visible.shape, dtype=case.subject.dtype)
        mask = numbers.masked_fill(~visible, torch.finfo(numbers.dtype).min) if self.additive else visible
        return case.subject.run(inputs, **{self.group.mask: mask}, **self.positions)


def ask_documents(case: ModelCase) -> None:
    """Ask whether a mask of four axes separates two documents in one row, and whether positions alone do."""
    entry = case.entry
    group = next((group for group in entry.groups if entry.main in group.tokens), None)
    reason = case.unusable
    if not reason and (group is None or not case.aligned or not group.mask.endswith("attention_mask")):
        reason = "the model has no attention_mask of the sequence along which its output runs"
    if not reason and entry.length < 6:
        reason = f"inputs: got {entry.length} tokens, expected at least 6"
    if reason or group is None:
        case.not_tested[QUESTION] = reason
        return
    border = entry.length // 2
    plain = entry.with_values(**{group.mask: None})
    positions = count_again(entry.length, border) if "position_ids" in case.subject.parameters else {}
    answers: list[tuple[str, str]] = []
    for additive in (True, False):
        answers.append(_judge(case, Packed(plain, group, border, positions, additive)))
        if answers[-1][0] == "separated":
            break
    name, text = min(answers, key=lambda answer: RANKS.index(answer[0]))
    if name == "separated":
        case.understood.append("a mask [B, 1, T, T] separates packed documents")
    elif name in ("alone", "refused"):
        case.not_tested[QUESTION] = text
    else:
        case.report(name, text, "wrong" if entry.packed else None)
    if positions:
        _note_positions(case, plain, border, positions)


def _judge(case: ModelCase, packed: Packed) -> tuple[str, str]:
    """Return what a mask of four axes does, one of ``RANKS``, and the evidence or reason."""
    plain, border = packed.plain, packed.border
    try:
        out = packed.run(case, plain, border)
        changed = packed.run(case, change_tokens(plain, 0, border), border)
        joint = packed.run(case, plain, 0)
    except CODE_ERRORS as error:
        return "refused", f"a mask [B, 1, T, T] is not supported: {describe_error(error)}"
    if out.shape != case.out.shape or broken(out):
        return "refused", "with a mask [B, 1, T, T], the output has another shape or is not finite"
    if not is_transformers(case.subject.model) and case.differ(joint, case.out):  # those may replace a window
        return "refused", "a mask [B, 1, T, T] is not supported: with one that hides nothing, the output is another"
    leak = case.gap(out[:, border:], changed[:, border:])
    if leak > case.subject.tolerance:
        moved = f"other tokens in the first document move the second {case.measured(leak)}"
        if not case.differ(out, joint):
            return "mask-4d-ignored", f"a mask [B, 1, T, T] that separates two documents changes nothing: {moved}"
        start = "a mask [B, 1, T, T] that separates two documents has an effect, but not in every layer"
        if case.differ(joint, case.subject.run(case.entry, **packed.positions)):
            start = (
                "a mask [B, 1, T, T] is accepted and does not separate two documents, and one that hides nothing gives "
                "another output than a mask [B, T] of ones"
            )
        return "documents-mixed", f"{start}: {moved}"
    again = {name: value[:, border:] for name, value in packed.positions.items()}
    alone = case.subject.run(cut(case.entry, packed.group, border, plain.length), **again)
    if case.differ(out[:, border:], alone):
        off = case.measured(case.gap(out[:, border:], alone))
        return "alone", (
            f"they do not mix, but the second one alone differs {off}: its positions are others, or the mask "
            "[B, 1, T, T] replaces a window of the model"
        )
    return "separated", ""


def _note_positions(case: ModelCase, plain: ModelInputs, border: int, positions: dict[str, Any]) -> None:
    """Note whether positions that start again separate documents, which some models read from them."""
    try:
        one, other = (case.subject.run(x, **positions) for x in (plain, change_tokens(plain, 0, border)))
    except CODE_ERRORS:
        return
    if case.differ(one[:, border:], other[:, border:]):
        case.understood.append("position_ids that start again do not separate documents")
    else:
        case.understood.append("position_ids that start again separate documents, without an attention_mask")


def count_again(length: int, border: int) -> dict[str, Any]:
    """Return position_ids that start again at the second document."""
    return {"position_ids": torch.cat([torch.arange(border), torch.arange(length - border)])[None]}
