"""Run a call on its backend in full precision: NaN and infinity reach exactly the rows where they are visible."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from headscope._attend import nonfinite
from headscope._attend.backends import blocked, reference
from headscope._attend.call import Call
from headscope._attend.dropout import Seed
from headscope._attend.interface import Attend, Backend, Inputs, OperatorBackend, Result, full_precision
from headscope._support.precision import exact_products
from headscope.masks import Plan

SUMMED_BY_TORCH = (blocked.name, reference.name)  # they use torch's products; its fused kernels follow its settings


def attend_on_backend(backend: Backend, call: Call, plan: Plan | None, inputs: Inputs) -> Result:
    """Attend with a backend that draws its own dropout seed."""
    return _attend_with(backend, backend.attend, call, plan, inputs)


def attend_on_backend_seeded(
    backend: OperatorBackend, call: Call, plan: Plan | None, inputs: Inputs, seed: Seed
) -> Result:
    """Attend with a backend that accepts a dropout seed."""
    return _attend_with(backend, partial(backend.attend, seed=seed), call, plan, inputs)


def _attend_with(backend: Backend, attend: Attend, call: Call, plan: Plan | None, inputs: Inputs) -> Result:
    products = exact_products(call.device) if backend.name in SUMMED_BY_TORCH else nullcontext()
    with full_precision(call), products:
        if backend.attend_finite is not None and not call.dropout:
            result = backend.attend_finite(call, plan, inputs)
            return nonfinite.attend(attend, call, plan, inputs, attend) if result is None else result
        careful = backend.attend_careful
        if nonfinite.suspicious(call, inputs, with_bias=careful is not None):
            replaces = blocked.attend if careful is not None else attend
            return nonfinite.attend(careful or attend, call, plan, inputs, replaces)
        return attend(call, plan, inputs)
