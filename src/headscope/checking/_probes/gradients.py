"""Probes of gradients: which weights affect the output, which get a gradient, and which heads reach the output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headscope._provenance import Provenance
from headscope.checking._case import Case
from headscope.checking._copies import copy_target
from headscope.checking._head_layout import Heads
from headscope.checking._probes.behaviour import differ


@dataclass(frozen=True)
class BackwardPass:
    """A copy of the module after a backward pass of a sum of its outputs.

    Attributes:
        case: the check.
        module: the copy, whose parameters have gradients.
        out: the output, [B, T, E'].
    """

    case: Case
    module: nn.Module
    out: Tensor

    def weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each matrix of weights, the parameter, and its gradient (zeros where it has none)."""
        for name, p in self.module.named_parameters():
            if p.ndim >= 2 and p.is_floating_point():
                yield name, p, torch.zeros_like(p) if p.grad is None else p.grad

    def depends_on(self, p: Tensor, at: Tensor, step_size: float = 1e-3) -> bool:
        """Return whether the output changes with the numbers of a parameter where ``at``, shaped as p, is True."""
        before, subject = p.detach().clone(), self.case.subject
        with torch.no_grad():
            # a small step: a large one would activate units that ReLU has switched off
            step = step_size * (1e-3 + before.abs().mean()) * torch.randn(before.shape).to(p.dtype)
            p.copy_(torch.where(at, before + step, before))
        try:
            result = subject.call_with(self.case.x, target=self.module)
            out = subject.output(result, self.case.x).detach().double()
        finally:
            with torch.no_grad():
                p.copy_(before)
        return bool(differ(self.out, out).any())


def _run_backward(case: Case, module: nn.Module) -> BackwardPass:
    copied = copy_target(module)
    out = case.subject.output(case.subject.call_with(case.x, target=copied), case.x)
    if out.requires_grad:
        factor = torch.linspace(1, 2, out.numel(), dtype=out.dtype).sin().view(out.shape)
        (out * factor).nan_to_num().sum().backward()
    return BackwardPass(case, copied, out.detach().double())


def probe_gradients(case: Case) -> None:
    """Test that weights that affect the output get a gradient, and that every parameter and every head is used."""
    if case.subject.module is None:
        case.not_tested["gradients of weights"] = "a function has no parameters"
        return
    unregistered = _list_unregistered(case.subject.module)
    if unregistered:
        case.report("layers-not-registered", f"not in parameters(): {', '.join(unregistered)}")
    if case.random:
        case.skip("gradients of weights", "dropout is active", "dropout-in-eval")
        return
    run = _run_backward(case, case.subject.module)
    blocked, unused = list[str](), list[str]()
    for name, p, gradient in run.weights():
        rows = (gradient.flatten(1) == 0).all(1)
        if not bool(rows.any()):
            continue
        if run.depends_on(p, rows.view(-1, *[1] * (p.ndim - 1)).expand_as(p)):
            blocked.append(f"{name} ({int(rows.sum())} of {len(rows)} rows)")
        elif bool(rows.all()) and run.depends_on(
            p, torch.ones_like(p, dtype=torch.bool), step_size=1.0
        ):  # as with round()
            blocked.append(f"{name} (only in large steps)")
        elif bool(rows.all()):
            unused.append(f"{name} {list(p.shape)}")
    if blocked:
        case.report(
            "gradient-blocked", f"the output depends on {', '.join(blocked)}, but no gradient reaches those weights"
        )
    if unused:
        case.report("unused-parameter", f"changing {', '.join(unused)} does not affect the output")
    if case.base is not None:
        _judge_head_usage(run, case.base.record)


def _list_unregistered(module: nn.Module) -> list[str]:
    """Return the attributes that hold parameters in plain containers, with how many are not the module's own."""
    own = {id(p) for p in module.parameters()}
    texts: list[str] = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            count = len({id(p) for p in _parameters_in(value)} - own)
            if count:
                texts.append(f"{count} parameter{'s' * (count > 1)} of {f'{path}.' * bool(path)}{name}")
    return texts


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters in lists, tuples and dicts, and those of modules in them."""
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, (list, tuple, dict)):
        items: Iterable[Any] = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else value
        for each in items:
            yield from _parameters_in(each)


def _judge_head_usage(run: BackwardPass, record: Provenance) -> None:
    """Report heads whose rows of a projection of the tokens do not affect the output."""
    if not record.mixings or not record.operands:
        return
    unused = [
        text for name, p, gradient in run.weights() for text in _describe_unused_heads(run, record, name, p, gradient)
    ]
    if not unused:
        return
    evidence = f"changing {'; '.join(unused)} does not affect the output"
    if _shares_weights(record):
        run.case.report(
            "heads-share-weights", f"the values of several heads are multiplied by the weights of one head: {evidence}"
        )
    else:
        shared = _describe_shared_heads(run.case.heads)
        text = f"{evidence}; {shared}" if shared else f"not every head reaches the output: {evidence}"
        run.case.report("heads-dropped", text)


def _describe_shared_heads(heads: Heads | None) -> str:
    """Describe which query heads use the same keys or values; "" if none do."""
    counts = [] if heads is None else [("key", len(set(heads.keys))), ("value", len(set(heads.values)))]
    shared = [f"{count} {word} head{'s' * (count > 1)}" for word, count in counts if heads and count < heads.count]
    return f"{heads.count} query heads share {' and '.join(shared)}" if heads and shared else ""


def _describe_unused_heads(
    run: BackwardPass, record: Provenance, name: str, p: Tensor, gradient: Tensor
) -> Iterator[str]:
    """Yield in words the rows or columns of a projection [features, width], or its transpose, that no head uses."""
    if p.ndim != 2:
        return
    width = record.operands[0].width
    for word, matrix, slopes in (("rows", p, gradient), ("columns", p.T, gradient.T)):
        idle = (slopes == 0).all(1)  # [features]
        if bool(idle.all()) or not bool(idle.any()) or not _are_whole_heads(idle, width):
            continue
        at = idle[:, None].expand_as(matrix)
        if _projects_tokens(record, matrix) and not run.depends_on(p, at if matrix is p else at.T):
            yield f"{word} {_format_ranges(idle)} of {name} {list(p.shape)}"


def _are_whole_heads(idle: Tensor, width: int) -> bool:
    """Return whether the features that are True form whole heads: neighbours, or every n-th feature."""
    if len(idle) % width:
        return False
    heads = idle.view(-1, width), idle.view(width, -1).T
    return any(bool((each.all(1) == each.any(1)).all()) for each in heads)


def _projects_tokens(record: Provenance, matrix: Tensor) -> bool:
    """Return whether a row of a matrix [features, width] is a column of a matrix that tokens were multiplied by."""
    width = matrix.shape[1]
    probe = torch.linspace(1, 2, width, dtype=torch.float64).cos()
    prints = (matrix.detach().double() @ probe).round(decimals=7)
    used = [projection.weights.double() for projection in record.projections]
    columns = [probe @ weights for weights in used if weights.shape[1] == width]
    return any(bool(torch.isin(prints, each.round(decimals=7)).any()) for each in columns)


def _shares_weights(record: Provenance) -> bool:
    """Return whether the weights of one query of one head are multiplied by the values of several heads."""
    used = set[tuple[int, int]]()  # one score of each query and head, with the feature of the values
    for mixing in record.mixings:
        scores = torch.where((mixing.p != 0).any(-1), mixing.ids.amax(-1), 0)  # [N, Q]; a row of zeros has no weights
        if len(scores[scores > 0].unique()) < int((scores > 0).sum()):
            return True
        feature = record.feature[mixing.values].amin((1, 2))[:, None].expand_as(scores)
        used.update(zip(scores[scores > 0].tolist(), feature[scores > 0].tolist(), strict=True))
    return len({score for score, _ in used}) < len(used)


def _format_ranges(at: Tensor) -> str:
    """Return the indices that are True, neighbours as a range: "0 to 7, 16"."""
    edges = torch.cat([torch.zeros(1), at.double(), torch.zeros(1)]).diff()
    starts, ends = (edges == 1).nonzero().flatten().tolist(), ((edges == -1).nonzero().flatten() - 1).tolist()
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
