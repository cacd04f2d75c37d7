"""Questions about calls alone: finite numbers, dropout in eval, state between calls, later tokens."""

from __future__ import annotations

from typing import Any

import torch

from headscope._support.operation_mode import OperationMode
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.hooks import broken, first_broken_module
from headscope.checking._whole_model.inputs import ModelInputs, is_transformers

DROPOUTS = frozenset({"native_dropout", "bernoulli_", "bernoulli"})


class _DropoutMode(OperationMode):
    """Records whether an operation drops numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.active |= func.overloadpacket.__name__ in DROPOUTS
        return func(*args, **(kwargs or {}))


def ask_finite(case: ModelCase) -> None:
    """Ask whether the output is finite."""
    if not broken(case.out):
        return
    with first_broken_module(case.subject.model) as record:
        case.subject.run(case.entry)
    share = float((~torch.isfinite(case.out)).float().mean())
    place = f"; the first module with such an output is {record.name}" if record.name else ""
    case.report("not-finite", f"{share:.0%} of the output is NaN or infinite, without padding{place}")
    case.unusable = "the output is not finite"


def ask_random(case: ModelCase) -> None:
    """Ask whether the same call gives the same output: with the same seed, and with another one."""
    again = case.subject.run(case.entry)
    if case.differ(case.out, again):
        off = case.measured(case.gap(case.out, again))
        case.report("state-between-calls", f"the same call with the same seed, made twice, differs {off}")
        case.unusable = "the output depends on earlier calls"
        return
    mode = _DropoutMode()
    with mode:
        other = case.subject.run(case.entry, seed=1)
    if case.differ(case.out, other):
        off = case.measured(case.gap(case.out, other))
        name = "dropout-in-eval" if mode.active else "random-in-eval"
        case.report(name, f"in eval mode, the same call with two seeds differs {off}")
        case.unusable = "the output is random in eval mode"


def ask_causal(case: ModelCase) -> None:
    """Ask whether a later token changes an earlier output, where the model must be causal."""
    question = "later tokens"
    if case.unusable or not case.aligned:
        case.not_tested[question] = case.unusable or "the output does not have one row for each token"
        return
    length = case.entry.length
    if length < 4:
        case.not_tested[question] = f"inputs: got {length} tokens, expected at least 4"
        return
    at = length // 2
    changed = change_tokens(case.entry, at, length)
    other = case.subject.run(changed)
    off = case.gap(case.out[:, :at], other[:, :at])
    depends = off > case.subject.tolerance
    expected, reason = _expect_causal(case)
    case.causal = not depends if expected is not None or not depends else None
    if expected and depends:
        rows = (case.out[:, :at] - other[:, :at]).abs().flatten(2).amax(-1)[0]
        first = int((rows > case.subject.tolerance).nonzero()[0, 0])
        case.report(
            "looks-into-the-future",
            f"with other tokens from {at} on, the output of token {first} moves {case.measured(off)}; it must not: "
            f"{reason}",
        )
        return
    if depends:
        case.causal = False
        case.understood.append(f"not causal: tokens from {at} on change earlier outputs")
        if expected is None:
            case.not_tested[question] = f"{reason}; pass causal=True if no token may attend to a later one"
    else:
        case.understood.append(f"causal: tokens from {at} on change no earlier output")


def change_tokens(entry: ModelInputs, start: int, stop: int) -> ModelInputs:
    """Return an entry with other contents of the main sequence from ``start`` to ``stop``."""
    value = entry.values[entry.main].clone()
    part = value[:, start:stop]
    if value.is_floating_point():
        value[:, start:stop] = part * 0.5 - 0.1
    else:
        low, high = (int(each) for each in torch.aminmax(value.long()))
        if low == high:  # inputs such as torch.ones
            low = high - 1 if high else 1
        value[:, start:stop] = torch.where(part == high, low, high)
    return entry.with_values(**{entry.main: value})


def _expect_causal(case: ModelCase) -> tuple[bool | None, str]:
    """Return whether the model must be causal, None if that is not known, and the reason."""
    model: Any = case.subject.model
    if case.options.causal is not None:
        return case.options.causal, f"causal={case.options.causal}"
    if not is_transformers(model):
        return None, "nothing says whether the model is causal"
    if case.entry.main.startswith("decoder_"):
        return True, "the main sequence is that of a decoder"
    flags = {
        name: module.is_causal
        for name, module in model.named_modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    }
    if flags and all(flags.values()):
        return True, f"each of its {len(flags)} attention layers has is_causal = True"
    if getattr(model.config, "is_decoder", False):
        return True, "config.is_decoder is True"
    if flags and not any(flags.values()):
        return None, "no attention layer has is_causal = True"
    return None, "neither its config nor its layers say whether it is causal"
