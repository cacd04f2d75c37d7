"""trace: every step of a forward pass, with its equation, code, shape, values, and an invariant that was checked."""

from headscope.tracing._build import trace
from headscope.tracing._row import Row
from headscope.tracing._trace import Trace

__all__ = ["Row", "Trace", "trace"]
