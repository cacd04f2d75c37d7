"""Questions about padding: what the masked tokens hold, on which side they are, and a padded batch of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.hooks import broken, first_broken_module, inner_modules, observing_outputs
from headscope.checking._whole_model.inputs import SEQUENCES, MaskGroup, ModelInputs, cut, join, pad, vary
from headscope.checking._whole_model.subject import list_ends

LEAST = 4  # tokens of a sequence that is padded


@dataclass(frozen=True)
class PaddedText:
    """A short text, and the same with padding on one side.

    Attributes:
        group: the mask, and the sequences that it covers.
        short: the text alone.
        longer: another text as long as the padded one.
        count: the number of tokens of padding.
        left: whether they are on the left.
        rows: whether the output has one row for each token of this sequence.
        border: the rows of the output at the padded side that padding can move: those of padding, and one that reads
            both; 0 = the output has no rows of this sequence.
    """

    group: MaskGroup
    short: ModelInputs
    longer: ModelInputs
    count: int
    left: bool
    rows: bool
    border: int

    @property
    def side(self) -> str:
        """The side, in words."""
        return f"{self.group.tokens[0]} padded on the {'left' if self.left else 'right'}"

    def alone(self, fill: float) -> ModelInputs:
        """Return the padded text, as a batch of one."""
        return pad(self.short, self.group, self.count, self.left, fill)

    def batch(self, fill: float) -> ModelInputs:
        """Return the padded text and a longer one."""
        return join([self.alone(fill), self.longer])

    def real(self, out: Tensor) -> Tensor:
        """Return the rows of real tokens of the first entry."""
        if not self.border:
            return out[:1]
        return out[:1, self.border :] if self.left else out[:1, : out.shape[1] - self.border]

    def reference(self, out: Tensor) -> Tensor:
        """Return the same rows, of the output for the text alone."""
        if self.rows:
            return out[:, : self.short.values[self.group.tokens[0]].shape[1]]  # some models round lengths up
        extra = 1 if self.border else 0
        return out[:, extra:] if self.left else out[:, : out.shape[1] - extra]


def list_padded(case: ModelCase) -> list[PaddedText]:
    """Return a text for each mask over tokens, padded on the left and on the right."""
    texts: list[PaddedText] = []
    for group in case.entry.groups:
        length = case.entry.values[group.tokens[0]].shape[1]
        rows = case.out.ndim > 1 and case.out.shape[1] == length and case.entry.main in group.tokens
        count = min(3, length // 3) if rows else length // 3  # rows of the output can stand for several tokens
        short = cut(case.entry, group, 0, length - count)
        border = count if case.aligned and rows else _count_rows(case, short)
        rows = rows and border == count
        sides = (False,) if group.mask in case.lengths else (True, False)
        texts += [
            PaddedText(group, short, vary(case.entry, 1), count, left, rows, border)
            for left in sides
            if (group.mask, left) not in case.edges
        ]
    return texts


def _count_rows(case: ModelCase, short: ModelInputs) -> int:
    """Return how many rows at one end of an output can depend on padding; 0 = it has no rows of this sequence.

    An output such as that of an encoder of audio has fewer rows than the sequence, and a row at the border reads both.
    """
    if case.out.ndim < 2:
        return 0
    try:
        fewer = case.subject.run(short)
    except CODE_ERRORS:  # the sequence has one length
        return 0
    more = case.out.shape[1] - fewer.shape[1] if fewer.ndim == case.out.ndim else 0
    one_each = case.out.shape[1] == case.entry.length and fewer.shape[1] == short.length
    return more if one_each else more + 1 if 0 < more < case.out.shape[1] - 1 else 0


def pick_fills(case: ModelCase, group: MaskGroup) -> tuple[float, float, float]:
    """Return two tokens of ordinary text, or numbers, and what this model is padded with.

    The largest token and the end of a text are not ordinary: CLIP and others read their output there.
    """
    value = case.entry.values[group.tokens[0]]
    if value.is_floating_point():
        return 0.5, -1.5, 0.0
    config = getattr(case.subject.model, "config", None)
    padding = getattr(config, "pad_token_id", None)
    padding = 0 if not isinstance(padding, int) or padding < 0 else padding
    special = {padding, *list_ends(case.subject.model)}
    tokens = [int(token) for token in value.unique() if int(token) not in special]
    first, last = (tokens[0], tokens[len(tokens) // 2]) if tokens else (padding, padding)
    return first, last if last != first else padding, padding


def ask_padding(case: ModelCase) -> None:
    """Ask, for each mask over tokens and each side, what padding changes."""
    if not case.entry.groups:
        case.not_tested["padding"] = "forward() has no attention_mask for these inputs, and inputs has no mask [B, T]"
        return
    if case.unusable:
        case.not_tested["padding"] = case.unusable
        return
    for text in list_padded(case):
        question = f"padding, {text.side}"
        if case.entry.values[text.group.tokens[0]].shape[1] < LEAST:
            case.not_tested[question] = f"{text.group.tokens[0]}: expected at least {LEAST} tokens"
            continue
        try:
            _ask_side(case, text, question)
        except CODE_ERRORS as error:  # whatever it raises, this call is not supported
            case.not_tested[question] = describe_error(error)


def _ask_side(case: ModelCase, text: PaddedText, question: str) -> None:
    first, second, padding = pick_fills(case, text.group)
    whole = case.subject.run(text.batch(padding))
    if _report_nan(case, text, whole, padding):
        return
    one, other = (case.subject.run(text.batch(fill)) for fill in (first, second))
    leak = case.gap(text.real(one), text.real(other))
    if leak > case.subject.tolerance:
        if text.left and _reads_length(case, text, first, one):
            case.lengths.add(text.group.mask)
            case.not_tested[question] = (
                f"of {text.group.mask}, only the sum has an effect, as a length: pad on the right"
            )
        elif text.border or not _reads_edge(case, text, (first, second), one):
            _report_leak(case, text, first, one, leak, whole)
        elif case.differ(text.real(whole), case.subject.run(text.short)):
            case.edges.add((text.group.mask, text.left))
            place, other = ("first", "right") if text.left else ("last", "left")
            case.not_tested[question] = (
                f"the {place} token is padding, and the output is read from the {place} token: pad on the {other}"
            )
        else:
            case.understood.append(f"{text.side}: equal to the text alone, if padded with {padding}")
        return
    if case.differ(one[1:], other[1:]):
        off = case.measured(case.gap(one[1:], other[1:]))
        case.report("padding-leaks", f"{text.side}: other padding in entry 0 moves the output of entry 1 {off}")
        return
    if _report_batch_of_one(case, text, (first, second)):
        return
    _ask_positions(case, text, padding, question)


def _report_nan(case: ModelCase, text: PaddedText, whole: Tensor, padding: float) -> bool:
    """Report NaN or infinity that padding causes, also in the model's own dtype; without padding, all is finite."""
    if not broken(whole) or (case.own is not None and not broken(case.own.run(text.batch(padding)))):
        return False
    with first_broken_module(case.subject.model) as record:
        case.subject.run(text.batch(padding))
    real = broken(text.real(whole)) or broken(whole[1:])
    rows = (~torch.isfinite(whole)).flatten(2 if whole.ndim > 2 else 1).any(-1)
    count = f"{int(rows.sum())} of {rows.numel()} rows of the output are"
    where = "rows of real tokens are among them" if real else "they are rows of padding"
    module = f"; the first module with such an output is {record.name}" if record.name else ""
    evidence = f"{text.side}, {text.count} tokens: {count} NaN or infinite; {where}{module}"
    case.report("nan-from-padding", evidence, "wrong" if real else "fragile")
    return True


def _report_leak(case: ModelCase, text: PaddedText, fill: float, one: Tensor, leak: float, usual: Tensor) -> None:
    """Report padding whose contents change real tokens: the mask has no effect, or not everywhere.

    It is fragile if the usual padding, such as zeros, gives the output of the text alone.
    """
    unmasked = _run_unmasked(case, text, fill)
    off = case.measured(leak)
    limit = min(case.subject.tolerance, (case.subject.noise * leak) ** 0.5)
    if case.gap(text.real(one), text.real(unmasked)) <= limit and _hides_nothing(case, text, fill, limit):
        evidence = f"{text.side}: other tokens under the mask move real tokens {off}; a mask that hides nothing gives "
        case.report("mask-ignored", f"{evidence}the same output")
        return
    evidence, severity = f"{text.side}: other tokens under the mask move real tokens {off}", None
    if not case.differ(text.real(usual), text.reference(case.subject.run(text.short))):
        evidence += "; with the usual padding, the output is that of the text alone"
        severity = "fragile"
    case.report("padding-leaks", evidence, severity)


def _run_unmasked(case: ModelCase, text: PaddedText, fill: float, hidden: int = 0) -> Tensor:
    """Return the output for padding that the mask does not hide, or for a mask of so many tokens of the first entry."""
    batch = text.batch(fill)
    real = torch.ones_like(batch.values[text.group.mask]).bool()
    real[0, slice(0, hidden) if text.left else slice(real.shape[1] - hidden, None)] = False
    return case.subject.run(batch.with_values(**{text.group.mask: text.group.build(real)}))


def _hides_nothing(case: ModelCase, text: PaddedText, fill: float, limit: float) -> bool:
    """Return whether a mask of half of the tokens changes nothing outside of it.

    Some models hide groups of tokens, such as stacked frames of audio, and padding inside of one group is visible.
    """
    hidden = text.longer.values[text.group.mask].shape[1] // 2
    one, other = (_run_unmasked(case, text, fill, count)[:1] for count in (0, hidden))
    if text.border:
        rows = one.shape[1] // 2 + 1
        one, other = (out[:, rows:] if text.left else out[:, : out.shape[1] - rows] for out in (one, other))
    return case.gap(one, other) <= limit


def _reads_length(case: ModelCase, text: PaddedText, fill: float, one: Tensor) -> bool:
    """Return whether a mask has an effect, and the same one if it hides as many tokens on the other side."""
    batch = text.batch(fill)
    flipped = case.subject.run(batch.with_values(**{text.group.mask: batch.values[text.group.mask].flip(1)}))
    return not case.differ(one, flipped) and case.differ(one, _run_unmasked(case, text, fill))


def _reads_edge(case: ModelCase, text: PaddedText, fills: tuple[float, float], one: Tensor) -> bool:
    """Return whether an output without rows, such as of a pooler, is read from the padding at the edge.

    Padding next to a real token at the edge then changes nothing. With one token of padding, this is assumed. A mask
    without effect counts as one that does not hide anything.
    """
    if not case.differ(text.real(_run_unmasked(case, text, fills[0])), text.real(one)):
        return False
    outs: list[Tensor] = []
    for fill in fills:
        batch = text.batch(fill)
        edge = 0 if text.left else batch.values[text.group.mask].shape[1] - 1
        changed = {name: batch.values[name].clone() for name in (*text.group.tokens, text.group.mask)}
        for name, value in changed.items():
            value[0, edge] = text.longer.values[name][0, edge]  # that of a text that is as long, where it is real
        outs.append(case.subject.run(batch.with_values(**changed)))
    return not case.differ(*(text.real(out) for out in outs))


def _report_batch_of_one(case: ModelCase, text: PaddedText, fills: tuple[float, float]) -> bool:
    """Report padding that is masked in a batch of two, and not in a batch of one."""
    try:
        one, other = (case.subject.run(text.alone(fill)) for fill in fills)
    except CODE_ERRORS as error:
        case.report("fails-on-batch-of-one", f"{text.side}: {describe_error(error)}")
        return True
    leak = case.gap(text.real(one), text.real(other))
    if leak <= case.subject.tolerance:
        return False
    case.report(
        "padded-batch-of-one-differs",
        f"{text.side}: in a batch of one, other tokens under the mask move real tokens {case.measured(leak)}; in a "
        "batch of two they change nothing",
    )
    return True


def _ask_positions(case: ModelCase, text: PaddedText, padding: float, question: str) -> None:
    """Ask whether the padded text gives the output of the text alone, with positions as generate() counts them."""
    alone = text.alone(padding)
    smallest: list[float] = []
    for positions in ({}, count_positions(case, text, alone)):
        if positions is None:
            continue
        reference = text.reference(case.subject.run(text.short, **_for_short(positions, text)))
        whole = case.subject.run(join([alone, text.longer]), **_for_two(positions, text))
        single = case.subject.run(alone, **positions)
        gaps = [case.gap(text.real(out), reference) for out in (whole, single)]
        if max(gaps) <= case.subject.tolerance:
            if positions:
                case.understood.append(f"{text.side}: equal to the text alone, with position_ids counted from it")
            return
        if gaps[0] <= case.subject.tolerance:
            case.report(
                "padded-batch-of-one-differs",
                f"{text.side}: in a batch of one, real tokens differ from the text alone {case.measured(gaps[1])}; "
                "in a batch of two they do not",
            )
            return
        smallest.append(min(gaps))
    off = case.measured(min(smallest))
    zeroed = _find_zeroed(case, text, alone)
    if zeroed:
        case.report("mask-zeroes-rows", f"{text.side}: {zeroed}; outputs differ from those without padding {off}")
    elif text.left and not (case.causal and len(smallest) > 1):
        case.not_tested[question] = (
            f"what is masked changes nothing, but outputs differ from those of the text alone {off}: positions count "
            "the padding; pad on the right"
        )
    else:
        case.report("padding-changes-output", f"{text.side}: real tokens differ from those of the text alone {off}")


def count_positions(case: ModelCase, text: PaddedText, alone: ModelInputs) -> dict[str, Any] | None:
    """Return position_ids as generate() of transformers counts them, from the first real token; None if not taken."""
    name = "position_ids"
    if name not in case.subject.parameters or text.group.tokens[0] not in SEQUENCES or not text.rows:
        return None
    real = alone.values[text.group.mask].bool() != text.group.hides
    return {name: (real.long().cumsum(-1) - 1).clamp(min=0)}


def _for_short(positions: dict[str, Any], text: PaddedText) -> dict[str, Any]:
    """Return the positions of the text without its padding."""
    return {name: value[:, text.count :] if text.left else value[:, : -text.count] for name, value in positions.items()}


def _for_two(positions: dict[str, Any], text: PaddedText) -> dict[str, Any]:
    """Return the positions of the padded text and of the longer one."""
    return {
        name: torch.cat([value, torch.arange(value.shape[1])[None].to(value.dtype)])
        for name, value in positions.items()
    }


def _find_zeroed(case: ModelCase, text: PaddedText, padded: ModelInputs) -> str:
    """Return the first module with rows of zeros that it does not have without padding, in words; "" if there is none.

    Rows of padding do not count.
    """
    before, after = (_zero_rows(case, inputs) for inputs in (text.short, padded))
    for name, rows in after.items():
        plain = before.get(name)
        if plain is None:
            continue
        if text.rows and rows.shape[1] == padded.length:
            rows = rows[:, text.count :] if text.left else rows[:, : rows.shape[1] - text.count]
        if rows.shape == plain.shape and bool((rows & ~plain).any()):
            return f"{int((rows & ~plain).sum())} of {rows.numel()} rows that {name} returns are 0"
    return ""


def _zero_rows(case: ModelCase, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return, by module, which rows of its output are all zero, [B, T]; the first call of a module counts."""
    rows: dict[str, Tensor] = {}

    def see(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and not first.is_nested and first.ndim == 3 and name not in rows:
            rows[name] = (first == 0).all(-1)

    with observing_outputs(inner_modules(case.subject.model), see):
        case.subject.run(inputs)
    return rows
