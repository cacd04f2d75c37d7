"""Questions about number range and cost: half precision, weights that are discarded, memory of all pairs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from headscope._support.operation_mode import OperationMode
from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.hooks import FunctionUses, broken, first_broken_module, observing_outputs
from headscope.checking._whole_model.inputs import ModelInputs, cut
from headscope.checking._whole_model.padding import list_padded, pick_fills
from headscope.checking._whole_model.subject import ModelSubject, avoid_kernels, copy_model

HALVES = {"fp16-overflow": torch.float16, "bf16-overflow": torch.bfloat16}
SOFTMAX = frozenset({"_softmax", "_safe_softmax", "softmax"})
LONG = 1024  # tokens from which stored weights of all pairs count


def ask_half_precision(case: ModelCase) -> None:
    """Ask whether outputs stay finite in float16 and bfloat16, with and without padding."""
    if case.unusable:
        case.not_tested["half precision"] = case.unusable
        return
    own = next((p.dtype for p in case.original.parameters() if p.is_floating_point()), None)
    for name, dtype in HALVES.items():
        subject = ModelSubject(copy_model(case.original, dtype), dtype, case.subject.call)
        avoid_kernels(subject.model)
        try:
            evidence = _find_overflow(case, subject)
        except CODE_ERRORS as error:
            case.not_tested[f"half precision, {str(dtype).removeprefix('torch.')}"] = describe_error(error)
            continue
        lost = _find_lost_weight(case, dtype) if evidence else ""
        if lost:
            case.not_tested[f"half precision, {str(dtype).removeprefix('torch.')}"] = lost
        elif evidence:
            case.report(name, evidence, "wrong" if own == dtype else None)


def _find_overflow(case: ModelCase, subject: ModelSubject) -> str:
    """Return the first call whose output is not finite, in words; "" if there is none."""
    calls: dict[str, ModelInputs] = {"without padding": case.entry}
    for text in list_padded(case):
        calls[text.side] = text.batch(pick_fills(case, text.group)[2])
    for what, inputs in calls.items():
        with first_broken_module(subject.model) as record:
            out = subject.run(inputs)
        if broken(out):
            share = float((~torch.isfinite(out)).float().mean())
            place = f"; the first module with such an output is {record.name}" if record.name else ""
            return f"{what}, {share:.0%} of the output is NaN or infinite; in float64 all is finite{place}"
    return ""


def _find_lost_weight(case: ModelCase, dtype: torch.dtype) -> str:
    """Return a weight that becomes 0 as a whole, if the output is then not finite in float64 either; "" = none.

    Some weights are so small before training.
    """
    lost = (
        (name, weight)
        for name, weight in case.original.named_parameters()
        if weight.is_floating_point() and bool(weight.any()) and not bool(weight.to(dtype).any())
    )
    name, weight = next(lost, ("", None))
    if weight is None:
        return ""
    model = copy_model(copy_model(case.original, dtype), torch.float64)
    avoid_kernels(model)
    if not broken(ModelSubject(model, torch.float64, case.subject.call).run(case.entry)):
        return ""
    return f"{name} has numbers up to {float(weight.detach().abs().max()):.1g}, which become 0: load trained weights"


def ask_discarded_weights(case: ModelCase) -> None:
    """Ask whether ``nn.MultiheadAttention`` computes weights that nothing reads."""
    model = case.subject.model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    if not layers:
        return
    uses = FunctionUses()
    weights: list[tuple[str, Tensor]] = []

    def see(name: str, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor):
            weights.append((name, output[1]))
            uses.watched[id(output[1])] = output[1]

    with observing_outputs(layers, see), uses:
        result = case.subject.call_with(case.entry)
    uses.watched.clear()
    unused: dict[str, Tensor] = {}
    while weights:
        name, weight = weights.pop()
        if id(weight) not in uses.used and sys.getrefcount(weight) <= 2:  # this name and the argument of the call
            unused[name] = weight.detach().clone()
    del result  # the weights that the model returns are held until here
    if unused:
        first = next(reversed(unused))
        shapes = f"{list(unused[first].shape)}"
        others = f", and {len(unused) - 1} other layers" if len(unused) > 1 else ""
        case.report(
            "weights-discarded", f"{first} returns weights {shapes} that nothing reads{others}: need_weights is True"
        )


class _SoftmaxShapes(OperationMode):
    """Records the shapes that softmax returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in SOFTMAX and isinstance(out, Tensor):
            self.shapes.append(tuple(out.shape))
        return out


def ask_memory(case: ModelCase) -> None:
    """Ask whether weights of all pairs are stored: whether the outputs of a softmax grow with T × T."""
    question = "memory"
    config = getattr(case.subject.model, "config", None)
    context = case.options.length or getattr(config, "max_position_embeddings", None)
    context = context if isinstance(context, int) else case.entry.length if case.aligned else None
    if context is None or context < LONG:
        words = "is not known" if context is None else f"is {context} tokens"
        case.not_tested[question] = f"the context {words}; pass length=4096, to test it"
        return
    group = next((group for group in case.entry.groups if case.entry.main in group.tokens), None)
    length = case.entry.length
    if length < 4:
        case.not_tested[question] = f"inputs: got {length} tokens, expected at least 4"
        return
    shorter = (
        case.entry.with_values(**{case.entry.main: case.entry.values[case.entry.main][:, : length - 1]})
        if group is None
        else cut(case.entry, group, 0, length - 1)
    )
    subject = case.own or case.subject  # kernels differ with the dtype
    shapes: list[list[tuple[int, ...]]] = []
    for inputs in (case.entry, shorter):
        with _SoftmaxShapes() as mode:
            subject.run(inputs)
        shapes.append(mode.shapes)
    grown = [
        one
        for one, other in zip(*shapes, strict=False)
        if len(one) == len(other) >= 3 and one[-1] == other[-1] + 1 and one[-2] == other[-2] + 1
    ]
    if grown:
        shape = grown[0]
        factor = torch.Size(shape[:-2]).numel()
        size = factor * context**2 * 4 / 2**20
        case.report(
            "quadratic-memory",
            f"{len(grown)} softmaxes return {list(shape)} for {length} tokens, on the CPU; at {context} tokens that "
            f"is {size:.0f} MiB each in float32",
        )
