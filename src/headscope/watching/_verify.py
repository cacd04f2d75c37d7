"""Verification of a watch: some rows of each call are computed once more, in float64, and compared."""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headscope._intercept import InterceptedCall, Measured, WatchWarning, measure
from headscope._support.user_line import user_stacklevel
from headscope.stats import Observe
from headscope.watching._exact_row import LEAST, ExactRow, entry, exact_row, projected_row

ROUNDINGS = 4
"""How many roundings of each number an error may be. Sums of n numbers, in float32 at least, round √n times."""
_ABOVE_ONE = ("lse", "max_logit", "entropy", "normalized_entropy", "effective_keys")
_PRODUCTS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}  # float32 products in TensorFloat-32 or bfloat16
# multiples of 1 / g, 1 / g² and 1 / g³, g⁴ = g + 1, spread evenly over three axes (Roberts 2018)
_STEPS = (0.8191725133961645, 0.6710436067037893, 0.5497004779019703)

_Error = tuple[float | None, float | None]
"""An error and its bound; None twice = nothing was compared."""


@dataclass(frozen=True)
class Verified:
    """The errors of some rows of a layer against float64; see docs/concepts/recordings.md.

    Of several errors the one counts that is the largest share of its bound.

    Attributes:
        rows: the number of verified rows, over all calls.
        empty: the number of them without a visible key: their output must be 0, and no statistic counts them.
        output: the relative error of the model's output; None = it was not compared.
        output_bound: the largest such error that rounding explains.
        statistics: the relative error of the row quantities; None = none was measured.
        statistics_bound: the largest such error that rounding explains.
        names: the row quantities that were compared.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, verify=4) as recording:
        ...     output = model(torch.randn(1, 5, 8))
        >>> verified = recording.about.verified["MultiHeadAttention"]
        >>> verified.rows, verified.fits
        (4, True)
    """

    rows: int = 0
    empty: int = 0
    output: float | None = None
    output_bound: float | None = None
    statistics: float | None = None
    statistics_bound: float | None = None
    names: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether no error exceeds its bound."""
        return max(_share(self._of_output), _share(self._of_statistics)) <= 1

    @property
    def _of_output(self) -> _Error:
        return self.output, self.output_bound

    @property
    def _of_statistics(self) -> _Error:
        return self.statistics, self.statistics_bound

    def merge(self, other: Verified) -> Verified:
        """Return the errors of the rows of both."""
        return Verified(
            self.rows + other.rows,
            self.empty + other.empty,
            *max(self._of_output, other._of_output, key=_share),
            *max(self._of_statistics, other._of_statistics, key=_share),
            tuple(dict.fromkeys((*self.names, *other.names))),
        )


Verified.__module__ = "headscope.watching"  # its public path


def _share(error: _Error) -> float:
    """Return an error as a share of its bound; -1 without one."""
    return -1.0 if error[0] is None or error[1] is None else error[0] / error[1]


class Verifier:
    """Measures the calls of a watch, and verifies some rows of each.

    Args:
        rows: the number of rows of each call; 0 = none.

    Attributes:
        layers: layer -> the errors so far.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layers: dict[str, Verified] = {}
        self._problem: str | None = None  # the first row beyond its bound, until it was reported; "" afterwards
        self._lock = threading.Lock()

    def measure(self, layer: str, call: InterceptedCall, what: Observe) -> Measured:
        """Measure a call, and verify some rows of the statistics, and of the call's output."""
        if not self.rows:
            return measure(call, what)
        adds_rows = what.row_stats and not what.keep_rows
        part = measure(call, replace(what, keep_rows=True) if adds_rows else what).part()
        measured_rows = part.kept[0] if what.row_stats else None
        verified, problem = verify_call(call, measured_rows, self.rows)
        with self._lock:
            self.layers[layer] = verified if layer not in self.layers else self.layers[layer].merge(verified)
            if problem and self._problem is None:
                self._problem = f"watch: verify: layer {layer}: {problem}"
        if not adds_rows or measured_rows is None:
            return Measured(lambda: part)
        values = {name: value for name, value in measured_rows.values.items() if name.startswith("top_")}
        without = replace(part, kept=(replace(measured_rows, values=values),) if values else ())
        return Measured(lambda: without)

    def warn(self) -> None:
        """Warn, once, of a row beyond its bound."""
        with self._lock:
            problem = self._problem
            self._problem = None if problem is None else ""
        if problem:
            warnings.warn(problem, WatchWarning, stacklevel=user_stacklevel())


def spread_rows(sizes: tuple[int, int, int], count: int) -> list[tuple[int, int, int]]:
    """Return rows (b, h, i) of [B, H, Q]: the last one, the first one, and others spread over the three axes."""
    batch, heads, queries = sizes
    if count >= math.prod(sizes):
        return [(b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)]
    rows = dict.fromkeys([(batch - 1, heads - 1, queries - 1), (0, 0, 0)][:count])
    n = 0
    while len(rows) < count:
        n += 1
        b, h, i = (int(size * (n * step % 1.0)) for size, step in zip(sizes, _STEPS, strict=True))
        rows[b, h, i] = None
    return [*rows]


def verify_call(call: InterceptedCall, measured_rows: Any, count: int) -> tuple[Verified, str]:
    """Return the errors of some rows of a call, and a sentence on the first one beyond its bound, or "".

    Args:
        call: the call, with its output if that is known.
        measured_rows: the measured rows, ``headscope.stats._layer.Kept``; None = none.
        count: the number of rows.
    """
    out = call.out if call.attended is None else call.attended
    heads, queries = call.q.shape[-3:-1]
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (call.q, call.k, call.v) if x is not None))
    places: list[int] = list(range(queries)) if measured_rows is None else measured_rows.queries.tolist()
    verified, problem = Verified(), ""
    for b, h, r in spread_rows((math.prod(lead), heads, len(places)), count):
        row = exact_row(call, lead, (b, h, places[r]))
        one, detail = Verified(1, int(not row.quantities)), ""
        if out is not None and call.v is not None:
            at = (b, h, places[r])
            whole = row if call.projection is None else projected_row(call, lead, at)
            got = entry(out, lead, b)[h, places[r]] if call.projection is None else out.detach()[b, places[r]]
            error, detail = ((None, None), "") if whole is None else _output_error(whole, call, got)
            one = replace(one, output=error[0], output_bound=error[1])
        if measured_rows is not None:
            values = {name: float(x[b, h, r]) for name, x in measured_rows.values.items() if name in row.quantities}
            error, other = _statistics_error(row, bool(measured_rows.counted[b, h, r]), values, call.q.dtype)
            one = replace(one, statistics=error[0], statistics_bound=error[1], names=tuple(values))
            detail = detail or other
        verified = verified.merge(one)
        if detail and not problem:
            problem = f"row [{b}, {h}, {places[r]}] of [B, H, Q]: {detail}"
    return verified, problem


def _output_error(row: ExactRow, call: InterceptedCall, out: Tensor) -> tuple[_Error, str]:
    """Return the error of a row of the output, with its bound, and a sentence on it if it exceeds the bound.

    A row without visible keys is compared only if headscope attended: other code may return the mean of all values.
    Masked values that are not finite may reach the output of other code, too.
    """
    got = out.cpu().double()
    if not row.is_finite or not (row.quantities or call.by_headscope):
        return (None, None), ""
    if not (row.hides_finite or call.by_headscope or bool(got.isfinite().all())):
        return (None, None), ""
    size = float(row.size.amax()) if row.size.numel() else 0.0
    apart = (got - row.out).abs().nan_to_num(nan=math.inf)
    if not size:  # of a row without visible keys, or of values that are all 0
        error, bound = float(apart.amax()) if apart.numel() else 0.0, torch.finfo(call.q.dtype).tiny
    else:
        error = float(apart.amax()) / size
        rounding = _rounding(call, out.dtype) * float(row.rounding.amax()) / size
        bound = ROUNDINGS * (rounding + _eps(call.q.dtype) * row.keys**0.5)
    if error <= bound:
        return (error, bound), ""
    at = int(apart.argmax())
    return (error, bound), (
        f"component {at} of the output: expected {float(row.out[at]):.8g} in float64, got {float(got[at]):.8g}; "
        f"the relative error is {error:.2g}, and rounding explains at most {bound:.2g}"
    )


def _rounding(call: InterceptedCall, out: torch.dtype) -> float:
    """Return the largest relative error of one rounding in the arithmetic of a model's attention.

    Models of transformers compute the softmax of float64 in float32.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (call.q.dtype, out))
    if call.q.dtype == torch.float32:
        return max(eps, _PRODUCTS[torch.get_float32_matmul_precision()])
    return eps if call.by_headscope else max(eps, torch.finfo(torch.float32).eps)


def _eps(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding in sums: of float32, or float64 for float64."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _statistics_error(row: ExactRow, counted: bool, values: dict[str, float], dtype: torch.dtype) -> tuple[_Error, str]:
    """Return the largest error of a row's quantities, with its bound, and a sentence on it if it exceeds the bound."""
    bound = ROUNDINGS * _eps(dtype) * (1 + row.logit_size + row.keys**0.5)
    if counted and not (row.quantities and row.is_finite):
        return (
            math.inf,
            bound,
        ), "expected a row that does not count, because it is empty or not finite; got one that does"
    if not (counted and values):
        return (None, None), ""
    errors = {name: _relative(name, row.quantities[name], got) for name, got in values.items()}
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] <= bound:
        return (errors[worst], bound), ""
    return (errors[worst], bound), (
        f"{worst}: expected {row.quantities[worst]:.8g} in float64, got {values[worst]:.8g}; the relative error is "
        f"{errors[worst]:.2g}, and rounding explains at most {bound:.2g}"
    )


def _relative(name: str, exact: float, got: float) -> float:
    """Return a relative error; logits and entropies count as at least 1, shares as at least ``LEAST``."""
    if math.isnan(exact) and math.isnan(got):
        return 0.0
    apart = abs(exact - got)
    return apart / max(abs(exact), 1.0 if name in _ABOVE_ONE else LEAST) if math.isfinite(apart) else math.inf
