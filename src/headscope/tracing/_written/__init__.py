"""The trace of a module that is not headscope's: its operations are recorded, and the steps are read from the tape."""

from headscope.tracing._written.trace import trace_module

__all__ = ["trace_module"]
