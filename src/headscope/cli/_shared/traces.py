"""The trace of a module of a file: made in the process that runs the file, and read from its answer."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headscope._support.user_line import describe_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headscope.tracing import Trace

LENGTHS = (10, 7, 5, 4, 8, 16, 49, 64, 197)  # tried in this order: some modules have a fixed length
BATCH = 2
MOST_WIDTHS = 6
IN_PYTHON = re.compile(r"pass call=, for example call=lambda module, x: (module\(.*\))$")
"""The remedy of the library that the command line has in other words."""
NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def trace_subject(subject: Any, sizes: dict[str, int], call: dict[str, Any], layer: int) -> dict[str, Any]:
    """Trace a module or function with a random input, and return the trace as ``to_dict`` has it.

    Args:
        subject: the module or function.
        sizes: those of the input that the user has specified: "batch", "seq" and "dim".
        call: how to call it, as a function of module, x and mask; empty: with x alone. The mask is None, or if the
            call fails with that, a causal one.
        layer: which attention, in the order in which they run.

    Raises:
        ValueError: no input that was tried fits, or there is no attention; the message is that of the first try.
    """
    import torch

    from headscope.tracing import trace

    torch.set_num_threads(1)
    ways = [_OwnCall(call["call"], causal=causal) for causal in (False, True)] if call else [None]
    first: Exception | None = None
    furthest: Exception | None = None
    for shape, way in itertools.product(_list_shapes(subject, sizes), ways):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        try:
            return trace(subject, x, call=way, layer=layer).to_dict()
        except Exception as error:
            if way is not None and not way.returned:  # the call failed: another mask or shape may fit
                first = first or (_describe_own_failure(error, shape) if way.causal else None)
            elif isinstance(error, TypeError):
                first = first or error
            elif not isinstance(error, ValueError) or str(error).startswith("layer:"):
                raise
            else:
                furthest = furthest or error
    error = furthest or first
    if error is None:
        raise ValueError("--dim: missing; the width of the input cannot be derived without weights")
    raise ValueError(IN_PYTHON.sub(_remedy_of_command_line, str(error))) from error


def _remedy_of_command_line(remedy: re.Match[str]) -> str:
    """Return what helps on the command line: check.toml has a call of module, x and mask; Python has any other."""
    if set(re.findall(r"\w+(?![\w=])", remedy[1])) <= {"module", "x", "mask"}:
        return f"state it in check.toml: call = '{remedy[1]}'"
    return "use headscope.trace in Python, whose call= is a function of the module and x"


@dataclass
class _OwnCall:
    """The user's call of module, x and mask, as one of module and x.

    Attributes:
        call: the call; it takes True for a visible pair.
        causal: whether it gets a causal mask, [B, 1, T, T], in place of None.
        returned: whether the last call ended without an error.
    """

    call: Callable[..., Any]
    causal: bool
    returned: bool = False

    def __call__(self, module: Any, x: Any) -> Any:
        self.returned = False
        length = x.shape[-2]
        mask = x.new_ones(x.shape[0], 1, length, length).tril().bool() if self.causal else None
        result = self.call(module, x, mask)
        self.returned = True
        return result


def _describe_own_failure(error: Exception, shape: tuple[int, ...]) -> TypeError:
    """Return the error of a call that failed with a causal mask, and before that with None."""
    return TypeError(f"module: the call with x {list(shape)} and a causal mask failed: {describe_failure(error)}")


def _list_shapes(subject: Any, sizes: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield shapes of an input: [B, T, E], and [T, E] where no batch was specified."""
    widths = [sizes["dim"]] if "dim" in sizes else _list_widths(subject)
    lengths = [sizes["seq"]] if "seq" in sizes else LENGTHS
    for length, width in itertools.product(lengths, widths):
        yield sizes.get("batch", BATCH), length, width
        if "batch" not in sizes:
            yield length, width


def _list_widths(subject: Any) -> list[int]:
    """Return the possible widths of the input: the sizes of the weights, in their order."""
    from torch import nn

    widths: list[int] = []
    for p in subject.parameters() if isinstance(subject, nn.Module) else ():
        widths += [p.shape[1], p.shape[0]] if p.ndim == 2 else []
    return list(dict.fromkeys(widths))[:MOST_WIDTHS]


def parse_trace(answer: dict[str, Any]) -> Trace:
    """Return the trace that a dictionary of ``to_dict`` describes; its output has no numbers."""
    import torch

    from headscope.tracing import Row, Trace

    rows: list[Row] = []
    for row in answer["rows"]:
        lines: list[list[Any]] = row["corner"] or []
        row["corner"] = [[NUMBERS.get(value, value) for value in line] for line in lines]
        rows.append(Row(**row))
    output = torch.zeros(0, device="cpu")
    return Trace(answer["title"], rows, output, answer["module"], "", answer["missing"], answer["code"])
