"""The trace of a module that is not headscope's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.module import MultiHeadAttention
from headscope.tracing._trace import Trace
from headscope.tracing._written.arrangement import Arrangement, arrange, group_mixings
from headscope.tracing._written.attention import AttentionRows
from headscope.tracing._written.ending import add_ending
from headscope.tracing._written.lines import FOREIGN, LIBRARIES, Line
from headscope.tracing._written.origins import Origins
from headscope.tracing._written.projections import add_changes, add_inputs, add_projections, add_splits
from headscope.tracing._written.rows import Writer
from headscope.tracing._written.sides import read_side
from headscope.tracing._written.slots import arrange_slots, place_sides
from headscope.tracing._written.tape import Event, Tape, TooLargeError

Call = Callable[[Any, Tensor], Any]
REMEDY = "pass call=, for example call=lambda module, x: module(x, x, x)"
SMALLER = "trace a shorter or smaller input, or one attention of the model, such as model.layers[0].attention"


@dataclass(frozen=True, eq=False)
class Recorded:
    """A forward pass: what it returned, its tape, and the names of its inputs by their events."""

    returned: Any
    tape: Tape
    labels: dict[int, str]


def trace_module(
    module: nn.Module | Callable[..., Any], x: Tensor, context: Any, call: Call | None, layer: int
) -> Trace:
    """Run a module once, and return the steps of one attention, counted from 0 in the order in which they run.

    Raises:
        TypeError: the call failed.
        ValueError: no attention was found, no such ``layer`` ran, or the input is too large.
    """
    name = _name_of(module)
    if isinstance(module, nn.Module) and any(p.is_meta for p in module.parameters()):
        raise ValueError(f"module: the parameters of {name} are on the meta device, which has no values")
    recorded = _record(module, x, context, call)
    origins = Origins(recorded.tape)
    groups = group_mixings(origins)
    if not groups:
        raise ValueError(f"module: no attention was found in {name}: {_describe_absence(module)}")
    if not 0 <= layer < len(groups):
        raise ValueError(f"layer: got {layer}, expected 0 to {len(groups) - 1}, the attentions of {name}")
    output = _first_tensor(recorded.returned)
    returned = None if output is None else recorded.tape.ids(output)
    if _has_fast_path(module):
        output = _first_tensor(_run_plainly(module, x, context, call))
    title = f"{name} on x {list(x.shape)}"
    if len(groups) > 1:
        title += f", layer {layer} of 0–{len(groups) - 1}"
    attention = arrange(origins, groups[layer]) or arrange_slots(origins, groups[layer])
    if attention is None:
        raise ValueError(
            f"module: the weights of {name} come from several products, or from features instead of positions, and "
            "cannot be arranged by heads; trace the part of the module that computes one attention"
        )
    writer = _write(origins, attention, recorded.labels, returned)
    described: dict[str, Any] = {"class": name, "attentions": len(groups)}
    batch, heads, queries, keys = attention.p.shape
    described |= {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "head_dim": attention.q.shape[-1]}
    result = output.detach() if output is not None else x.new_zeros(0)
    return Trace(title, writer.rows, result, described, "", writer.missing, _program(writer.lines, module))


def _write(origins: Origins, attention: Arrangement, labels: dict[int, str], returned: Tensor | None) -> Writer:
    """Return the writer with the rows of one attention."""
    writer = Writer(origins, attention)
    sides = [
        read_side(origins, name, ids) for name, ids in (("q", attention.q), ("k", attention.k), ("v", attention.v))
    ]
    if not attention.is_sound:
        place_sides(origins, writer.coordinates, sides)
    add_inputs(writer, sides, labels)
    add_projections(writer, sides)
    product = attention.mixings[0].event
    width = sides[0].projections[0].rows.shape[-1] if sides[0].projections else None
    middle = AttentionRows(writer, sides, width)
    add_splits(writer, sides, middle.products[0] if middle.products else product)
    add_changes(writer, sides)
    middle.run()
    add_ending(writer, returned)
    return writer


def _name_of(module: Any) -> str:
    module = getattr(module, "_orig_mod", module)
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "the function")


def _describe_absence(module: Any) -> str:
    """Return why no attention was found."""
    own = (
        [name for name, part in module.named_modules() if isinstance(part, MultiHeadAttention)]
        if isinstance(module, nn.Module)
        else []
    )
    if own:
        return f"{own[0]} is headscope's own attention, whose kernels are not recorded; trace that module itself"
    return (
        "no product of two tensors of the input that a softmax turns into weights of a third; linear attention and "
        "products that are written as sums have no such steps"
    )


def _program(lines: list[Line], module: Any) -> str:
    """Return the lines of the traced code, in the order of the steps, each once."""
    texts = [f"# the lines of {_name_of(module)} that compute each step"]
    texts += [f"{line.text}  # {line.place}" for line in dict.fromkeys(lines)]
    return "\n".join(texts) + "\n"


def _record(module: Any, x: Tensor, context: Any, call: Call | None) -> Recorded:
    """Run a module under a tape, as in eval, on copies of nothing: its output is that of a plain call."""
    constants: list[Tensor] = []
    if isinstance(module, nn.Module):
        constants = [*module.parameters(), *module.buffers(), *_own_tensors(module)]
    extra = _to_list(context)
    inputs = [each for each in (x, *extra) if isinstance(each, Tensor)]
    text, run = _call_of(module, x, extra, call)
    try:
        tape = Tape(constants, inputs, _files_of(module))
        labels = {event.index: "x" if n == 0 else "context" for n, event in enumerate(_inputs(tape))}
        with _as_in_eval(module), _gradients(), _without_fast_path(), closing(tape.places), tape:
            returned = run()
    except TooLargeError:
        raise ValueError(f"x: the forward pass has more than 2^26 numbers, too many to follow; {SMALLER}") from None
    except Exception as error:
        if call is not None:
            raise
        problem = " ".join(str(error).split())[:200]
        raise TypeError(f"module: the call {text} failed with {type(error).__name__}: {problem}; {REMEDY}") from error
    return Recorded(returned, tape, labels)


def _to_list(context: Any) -> list[Any]:
    return [] if context is None else [*context] if isinstance(context, (list, tuple)) else [context]


def _call_of(module: Any, x: Tensor, extra: list[Any], call: Call | None) -> tuple[str, Callable[[], Any]]:
    """Return the call of a module, as text and as a function."""
    if call is not None:
        return "call(module, x)", lambda: call(module, x)
    name = _name_of(module)
    shapes = [f"x {list(x.shape)}", *(f"context {list(each.shape)}" for each in extra if isinstance(each, Tensor))]
    arguments: list[Any] = [x, *extra]
    if not extra and _is_three_fold(module):
        arguments, shapes = [x, x, x], [shapes[0]] * 3
    return f"{name}({', '.join(shapes)})", lambda: module(*arguments)


def _is_three_fold(module: Any) -> bool:
    """Return whether a module needs query, key and value."""
    try:
        parameters = list(
            inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters.values()
        )
    except (TypeError, ValueError):
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name.lower() for each in positional if each.default is each.empty]
    return len(required) == 3 and sorted(name.lstrip("x_")[:1] for name in required) == ["k", "q", "v"]


def _inputs(tape: Tape) -> Iterator[Event]:
    return (event for event in tape.events if event.name == "input")


def _own_tensors(module: nn.Module) -> list[Tensor]:
    """Return tensors that modules hold as plain attributes."""
    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]


def _files_of(module: Any) -> frozenset[str]:
    """Return the files of the classes of a module and its parts: those of libraries only if there are no others."""
    module = getattr(module, "_orig_mod", module)
    classes = {type(part) for part in module.modules()} if isinstance(module, nn.Module) else {module}
    files = {file for each in classes if (file := _file_of(each)) is not None}
    others = frozenset(file for file in files if not file.startswith(FOREIGN))
    return frozenset(file for file in others if not file.startswith(LIBRARIES)) or others or frozenset(files)


def _file_of(code: Any) -> str | None:
    try:
        return inspect.getsourcefile(code)
    except (TypeError, OSError):
        return None


@contextmanager
def _as_in_eval(module: Any) -> Generator[None]:
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    modes = {part: part.training for part in parts}
    try:
        for part in parts[:1]:
            part.eval()
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _has_fast_path(module: Any) -> bool:
    """Return whether torch may run a module without gradients in one fused operation."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return isinstance(module, nn.Module) and any(isinstance(part, kinds) for part in module.modules())


def _run_plainly(module: Any, x: Tensor, context: Any, call: Call | None) -> Any:
    """Run a module as its user does, with the fast path that the tape cannot record."""
    with _as_in_eval(module), _gradients():
        return _call_of(module, x, _to_list(context), call)[1]()


@contextmanager
def _without_fast_path() -> Generator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _gradients() -> Any:
    """Return the context of a plain call: with gradients, torch's modules do not take their fused fast path."""
    return nullcontext() if torch.is_inference_mode_enabled() else torch.enable_grad()


def _first_tensor(value: Any) -> Tensor | None:
    """Return the output: the first tensor that a module returned."""
    if isinstance(value, Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((each for one in values if (each := _first_tensor(one)) is not None), None)
