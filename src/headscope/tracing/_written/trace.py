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
from headscope.tracing._written.arrangement import Arrangement, arrange, find_twins, group_mixings
from headscope.tracing._written.attention import AttentionRows
from headscope.tracing._written.calls import (
    Call,
    arguments_of,
    check_call,
    describe_call,
    describe_problem,
    module_name,
)
from headscope.tracing._written.ending import add_ending
from headscope.tracing._written.lines import FOREIGN, LIBRARIES, Line
from headscope.tracing._written.origins import NONE, SOFTMAXES, Field, Mixing, Origins
from headscope.tracing._written.projections import add_changes, add_inputs, add_projections, add_splits
from headscope.tracing._written.rows import Writer
from headscope.tracing._written.scores import depends_on
from headscope.tracing._written.sides import read_side
from headscope.tracing._written.slots import arrange_slots, place_sides
from headscope.tracing._written.tape import Event, Tape, TooLargeError

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
        TypeError: the call failed, or ``call`` is not a function of a module and x.
        ValueError: no attention was found, no such ``layer`` ran, or the input is too large.
    """
    name = module_name(module)
    if call is not None:
        check_call(call)
    if isinstance(module, nn.Module) and any(p.is_meta for p in module.parameters()):
        raise ValueError(f"module: the parameters of {name} are on the meta device, which has no values")
    recorded = _record(module, x, context, call)
    origins = Origins(recorded.tape)
    twins = find_twins(origins)
    groups = group_mixings(origins, twins)
    if not groups and all(event.name in ("input", "constant") for event in recorded.tape.events):
        raise ValueError(f"{'call' if call else 'module'}: computed nothing with torch; expected a call of {name}")
    if not groups:
        raise ValueError(f"module: no attention was found in {name}: {_describe_absence(module, x, origins)}")
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
    writer = _write(Writer(origins, attention, _own_twins(origins, attention, twins)), recorded.labels, returned)
    described: dict[str, Any] = {"class": name, "attentions": len(groups)}
    batch, heads, queries, keys = attention.p.shape
    described |= {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "head_dim": attention.q.shape[-1]}
    result = output.detach() if output is not None else x.new_zeros(0)
    return Trace(title, writer.rows, result, described, "", writer.missing, _program(writer.lines, module))


def _own_twins(origins: Origins, attention: Arrangement, twins: dict[int, Mixing]) -> tuple[tuple[Mixing, Mixing], ...]:
    """Return the further products of the weights of an attention, each after the product that is shown."""
    later = {mixing.event.index: mixing for mixing in origins.mixings}
    return tuple((first, later[index]) for index, first in twins.items() if first in attention.mixings)


def _write(writer: Writer, labels: dict[int, str], returned: Tensor | None) -> Writer:
    """Return the writer with the rows of its attention."""
    origins, attention = writer.origins, writer.attention
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


def _describe_absence(module: Any, x: Tensor, origins: Origins) -> str:
    """Return why no attention was found."""
    own = (
        [name for name, part in module.named_modules() if isinstance(part, MultiHeadAttention)]
        if isinstance(module, nn.Module)
        else []
    )
    if own:
        return f"{own[0]} is headscope's own attention, whose kernels are not recorded; trace that module itself"
    if _hides_scores(origins):
        return (
            "a softmax takes products of two tensors of the input, but in a way that is not followed, such as scores "
            "or weights that mix several heads (talking heads)"
        )
    short = f"; x has the shape {list(x.shape)}: if that is one token, trace two or more" if 1 in x.shape else ""
    return (
        "no product of two tensors of the input that a softmax turns into weights of a third; linear attention and "
        f"products that are written as sums have no such steps{short}"
    )


def _hides_scores(origins: Origins) -> bool:
    """Return whether a softmax depends on a product of two tensors of the input, neither of them a mixture of experts.

    A router's weights are of a softmax, too; their product with the results of experts is not one of queries and keys.
    """
    events = origins.tape.events
    softmaxes = [event for event in events if event.name in SOFTMAXES]
    made = {event.index for event in softmaxes}
    products = {
        index for index in origins.table[Field.PRODUCT].unique().tolist()
        if index != NONE and not any(depends_on(origins, ids, made) for ids in events[index].inputs)
    }  # fmt: skip
    return any(depends_on(origins, event.inputs[0], products) for event in softmaxes)


def _program(lines: list[Line], module: Any) -> str:
    """Return the lines of the traced code, in the order of the steps, each once."""
    texts = [f"# the lines of {module_name(module)} that compute each step"]
    texts += [f"{line.text}  # {line.place}" for line in dict.fromkeys(lines)]
    return "\n".join(texts) + "\n"


def _record(module: Any, x: Tensor, context: Any, call: Call | None) -> Recorded:
    """Run a module under a tape, as in eval, on copies of nothing: its output is that of a plain call."""
    constants: list[Tensor] = []
    if isinstance(module, nn.Module):
        constants = [*module.parameters(), *module.buffers(), *_own_tensors(module)]
    extra = _to_list(context)
    inputs = [each for each in (x, *extra) if isinstance(each, Tensor)]
    arguments = arguments_of(module, x, extra)

    def record(gradients: Any) -> Recorded:
        tape = Tape(constants, inputs, _files_of(module))
        labels = {event.index: "x" if n == 0 else "context" for n, event in enumerate(_inputs(tape))}
        with _as_in_eval(module), gradients, _without_fast_path(), closing(tape.places), tape:
            returned = module(*arguments) if call is None else call(module, x)
        return Recorded(returned, tape, labels)

    try:
        try:
            return record(_gradients())
        except RuntimeError as error:
            if "automatic differentiation" not in str(error):  # as of torch.matmul(…, out=)
                raise
            return record(torch.no_grad())
    except TooLargeError:
        raise ValueError(f"x: the forward pass has more than 2^26 numbers, too many to follow; {SMALLER}") from None
    except Exception as error:
        if call is not None:
            raise
        text, problem = describe_call(module, arguments), describe_problem(error, module, arguments)
        raise TypeError(f"module: the call {text} failed{problem}") from error


def _to_list(context: Any) -> list[Any]:
    return [] if context is None else [*context] if isinstance(context, (list, tuple)) else [context]


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
        return module(*arguments_of(module, x, _to_list(context))) if call is None else call(module, x)


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
