"""Run one attention: look up or prepare the call, take its fast path, or call its backend."""

from __future__ import annotations

from torch import Tensor

from headscope._attend import context, torch_operator_kernels, torch_operators
from headscope._attend.backend_call import attend_on_backend
from headscope._attend.call import ORDINARY
from headscope._attend.interface import Inputs, Result
from headscope._attend.prepare import Prepared, canonical_inputs, prepare
from headscope._support.tensor_classes import check_has_numbers
from headscope.masks import Mask

torch_operator_kernels.register()


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None,
) -> Result:  # fmt: skip
    """Return out [..., H, Q, Dv] and, if ``lse`` is True, the log-sum-exp of each row [..., H, Q]."""
    if context.active is not None:
        return context.active.attend(q, k, v, mask, bias, sinks, scale, softcap, dropout, backend)
    prepared = prepare(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    repeat = prepared.repeat
    if repeat is not None:
        result = repeat(q, k, v) if bias is None and sinks is None else repeat(q, k, v, bias, sinks)
        if result is not None:
            return result
    return _attend_prepared(prepared, canonical_inputs(prepared, q, k, v, bias, sinks))


def _attend_prepared(prepared: Prepared, inputs: Inputs) -> Result:
    """Attend for a call without a fast path, or whose fast path returned None."""
    call = prepared.call
    for name, x in zip("qkv", inputs[:3], strict=True):  # the class and sizes of another call, unchecked
        check_has_numbers(name, x)
    if call.form == "subclass":
        inputs = inputs._replace(q=_to_class(inputs, prepared.mask))
    if call.form == "traced" and prepared.backend.name in torch_operators.OPERATOR_BACKENDS:
        out, lse = torch_operators.attend(call, prepared.mask, inputs, prepared.backend.name)
    else:
        out, lse = attend_on_backend(prepared.backend, call, prepared.plan, inputs)
    if len(call.lead) != 1:
        out = out.reshape(*call.lead, *out.shape[1:])  # [*lead, H, Q, Dv]
        lse = None if lse is None else lse.reshape(*call.lead, *lse.shape[1:])  # [*lead, H, Q]
    return out, lse


def _to_class(inputs: Inputs, mask: Mask | None) -> Tensor:
    """Return q in the Tensor subclass of another argument, so the result has that class, as in torch's SDPA."""
    q = inputs.q
    if type(q) in ORDINARY:
        for x in (*inputs[1:], *(() if mask is None else mask.tensors())):
            if x is not None and type(x) not in ORDINARY:
                q = q * x.new_ones((), dtype=q.dtype)  # exact, and an operator: the subclass sets the result's class
    return q
