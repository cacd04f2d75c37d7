"""``trace``: build the trace of a module and an input, or of sizes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headscope._linear import QKV
from headscope._support.arguments import whole
from headscope.masks import Mask
from headscope.module import MultiHeadAttention, QKNorm, whole_sizes
from headscope.positions import ALiBi, RelativeBias, Rotary, T5Buckets
from headscope.tracing import _steps as steps
from headscope.tracing._attention_steps import Attention
from headscope.tracing._head_steps import place_heads
from headscope.tracing._module_text import call_text, describe, import_lines, list_untraced
from headscope.tracing._own_values import Heads
from headscope.tracing._row import RowWriter
from headscope.tracing._setup import Context, ScoreOptions, Setting, Source, prepare_sizes, prepare_values
from headscope.tracing._trace import Trace
from headscope.tracing._written import trace_module
from headscope.tracing._written.calls import example_arguments


def trace(
    module: nn.Module | Callable[..., Any] | None = None,
    x: Tensor | None = None,
    context: Context = None,
    *,
    call: Callable[[Any, Tensor], Any] | None = None,
    layer: int = 0,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    positions: Tensor | None = None,
    batch: int | None = None,
    seq: int | None = None,
    context_seq: int | None = None,
    dim: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    kdim: int | None = None,
    vdim: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    rotary: Rotary | None = None,
    position_bias: ALiBi | RelativeBias | T5Buckets | None = None,
    qk_norm: QKNorm | None = None,
    gate: bool = False,
    bias_kv: bool = False,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Trace multi-head attention step by step, for a module and an input or for sizes only.

    ``trace(module, x)`` computes every step, shows a corner of its values and checks an invariant on them. The module
    runs as in eval, without dropout and gradients. ``trace(seq=10, dim=512, heads=8)`` allocates nothing,
    whatever the sizes, and shows shapes and memory without values. ``trace(module, seq=10)`` does so for a module.

    Shapes are those of ``MultiHeadAttention.forward``. The result has a row for each step that the call has:

    - input and context, projections to q, k and v, and their split into heads;
    - the norms of queries and keys, and their rotation to their positions;
    - the sharing of grouped heads, scores, softcap, position bias, bias, mask, the key of ``bias_kv``, and weights;
    - the output of each head, their concatenation, the gate, and the output.

    Any other module, or function, is run once on ``x`` while its operations are recorded. The rows then have its own
    lines of code, and a row says where the module departs from the textbook; see the guide. A step that was not
    identified has no row: ``Trace.missing`` has the reason.

    Args:
        module: a ``headscope.MultiHeadAttention``, or any module or function that computes attention.
        x: its input, [B, Q, E] or [Q, E], in the module's dtype and on its device; of other modules, any tensor.
        context: where keys and values come from, or a pair of tensors; by default ``x``. Other modules get these
            tensors as their next arguments.
        call: for other modules, how to call them: ``lambda module, x: module(x, x, x, mask)``.
        layer: for other modules with several attentions, which one to trace, in the order in which they run.
        mask: the visible pairs, a mask of ``headscope.masks`` or a boolean tensor, True = attend (the opposite of
            ``nn.MultiheadAttention``).
        bias: added to the scores; broadcasts to [B, H, Q, K].
        causal: mask the future; together with ``mask``, pairs that both allow are visible.
        positions: of the tokens of x, integers [Q] or [B, Q], for ``rotary`` and ``position_bias``; by default 0, 1, 2,
            …
        batch: without x, the number of sequences, at least 1; by default 1.
        seq: without x, the length of each.
        context_seq: without x, the length of the context; by default, self-attention.
        dim: without a module, the model width E.
        heads: without a module, the number of heads H.
        kv_heads, head_dim, v_head_dim, kdim, vdim, scale, softcap, sinks: without a module, as for
            ``MultiHeadAttention``.
        rotary, position_bias, qk_norm, gate, bias_kv, dtype: likewise.

    Where the weights have more than 2 million numbers, or a projection more than 2^27 multiplications, a sample is
    checked, and the invariant gives its size. Tolerances follow from the dtype and the number of summed terms; an
    invariant gives the measured error and the allowed one. NaN and infinity in the input show as invariants that did
    not hold.

    Raises:
        TypeError: an input has a wrong type or dtype, or the call of another module failed.
        ValueError: sizes are missing, duplicate, or do not fit; the messages are those of the module. Or no attention
            was recognised in another module, or its forward pass has more than 2^26 numbers.

    Examples:
        >>> from headscope import trace
        >>> trace(seq=10, dim=512, heads=8).row("weights").shape
        [1, 8, 10, 10]
    """
    sizes = {"batch": batch, "seq": seq, "context_seq": context_seq}
    every_option = {
        "dim": dim, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "kdim": kdim,
        "vdim": vdim, "scale": scale, "softcap": softcap, "sinks": sinks or None, "rotary": rotary,
        "position_bias": position_bias, "qk_norm": qk_norm, "gate": gate or None, "bias_kv": bias_kv or None,
        "dtype": dtype,
    }  # fmt: skip
    module_options: dict[str, Any] = {name: value for name, value in every_option.items() if value is not None}
    lengths = {name: value for name, value in sizes.items() if value is not None}
    if callable(module) and not isinstance(module, (MultiHeadAttention, type)):
        theirs = {"mask": mask, "bias": bias, "causal": causal or None, "positions": positions}
        theirs |= {**lengths, **module_options}
        return trace_module(module, _check_other(module, x, theirs), context, call, whole("layer", layer, 0))
    _check_arguments(module, x, context, lengths, module_options)
    assert module is None or isinstance(module, MultiHeadAttention)
    if call is not None:
        raise ValueError("call: got one for headscope's own attention, expected none; pass context, mask and bias")
    if layer != 0:
        raise ValueError(f"layer: got {layer!r}, expected 0: headscope's own module is one layer")
    options, own = ScoreOptions(mask, causal, bias, positions), module is None
    with torch.no_grad():
        if module is None:
            width, number = module_options.pop("dim"), module_options.pop("heads")
            module = MultiHeadAttention(width, number, device="meta", **module_options)
        if x is None:
            lengths = dict(zip(lengths, whole_sizes(**lengths), strict=True))
            return _trace_steps(_from_sizes(module, options, **lengths), own_module=own)
        return _trace_steps(prepare_values(module, x, context, options), own_module=own)


def _check_other(module: object, x: object, options: dict[str, Any]) -> Tensor:
    """Return the input of a module that is not headscope's; raise unless it is a tensor with values."""
    name = getattr(module, "__name__", type(module).__name__)
    if x is None:
        raise ValueError(f"x: missing; {name} is traced by running it, so pass its input: trace(module, x)")
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, expected a torch.Tensor")
    if x.is_meta:
        raise ValueError(f"x: is on the meta device, which has no values; {name} is traced by running it")
    if not x.numel():
        raise ValueError(f"x: has the shape {list(x.shape)}, which is empty; {name} is traced on two tokens or more")
    own_options = [key for key, value in options.items() if value is not None]
    if own_options:
        remedy = f"pass call=, for example call=lambda module, x: module({example_arguments(module)})"
        raise ValueError(f"{', '.join(own_options)}: {name} has arguments of its own; {remedy}")
    return x


def _check_arguments(
    module: object, x: object, context: object, lengths: dict[str, int], module_sizes: dict[str, Any]
) -> None:
    """Raise unless the arguments are a module and an input, or sizes of an input with a module or its sizes."""
    if module is not None and not isinstance(module, MultiHeadAttention):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"module: got {got}, expected a module or a function that computes attention; build the module first"
        )
    if module is not None and (beyond := list_untraced(module)):
        raise TypeError(f"module: has {', '.join(beyond)}, whose steps cannot be traced yet")
    if module is not None and module_sizes:
        raise ValueError(f"{', '.join(module_sizes)}: the module has its own; pass a module or its sizes, not both")
    if x is not None and lengths:
        raise ValueError(f"{', '.join(lengths)}: x has its own; pass x or its sizes, not both")
    if x is not None and module is None:
        raise ValueError("module: missing; pass the module or function to trace x through, or sizes instead of x")
    if x is None and context is not None:
        raise ValueError("context: got one without x; pass x, or context_seq for sizes only")
    if x is None:
        needed = ("seq",) if module is not None else ("seq", "dim", "heads")
        missing = [name for name in needed if name not in lengths and name not in module_sizes]
        if missing:
            remedy = "pass a module and its input x, or the sizes seq, dim and heads"
            raise ValueError(f"{', '.join(missing)}: missing; {remedy}")


def _from_sizes(
    module: MultiHeadAttention, options: ScoreOptions, seq: int, batch: int = 1, context_seq: int | None = None
) -> Setting:
    """Prepare inputs of these sizes on the meta device, and the code that makes them."""
    weight, _ = module.projection("out")

    def empty(length: int, width: int) -> Tensor:
        if batch * length * width * weight.dtype.itemsize >= 1 << 63:
            raise ValueError(f"batch, seq: [{batch}, {length}, {width}] is more than a tensor can hold (2^63 bytes)")
        return torch.empty(batch, length, width, device="meta", dtype=weight.dtype)

    def random(length: int, width: int) -> str:
        kind = "" if weight.dtype == torch.get_default_dtype() else f", dtype={weight.dtype}"
        return f"torch.randn({batch}, {length}, {width}{kind})"

    x, code = empty(seq, module.embed_dim), [f"x = {random(seq, module.embed_dim)}"]
    if context_seq is None:
        return prepare_sizes(module, (x, x, x), "self", options, tuple(code))
    widths = (module.kdim, module.vdim)
    source: Source = "cross" if module.kdim == module.vdim else "pair"
    code_of_context = [random(context_seq, width) for width in (widths if source == "pair" else widths[:1])]
    code.append(f"context = {', '.join(code_of_context)}")
    k_from, v_from = (empty(context_seq, width) for width in widths)
    return prepare_sizes(module, (x, k_from, v_from), source, options, tuple(code))


def _trace_steps(setting: Setting, *, own_module: bool) -> Trace:
    """Trace every step of the forward pass that ``setting`` describes."""
    module, writer = setting.module, RowWriter(setting)
    steps.add_inputs(writer)
    flat = {name: steps.project(writer, name) for name in QKV}
    own: tuple[Tensor | None, ...] = (None, None, None)
    if setting.values:
        context = {"self": None, "cross": setting.k_from, "pair": (setting.k_from, setting.v_from)}[setting.source]
        own = module.project(setting.x, context)
    heads = Heads(*(steps.split(writer, name, flat[name], mine) for name, mine in zip(QKV, own, strict=True)))
    joined = steps.concatenate(writer, Attention(writer, place_heads(writer, heads)).run())
    steps.add_output(writer, steps.gate(writer, joined))
    return Trace(_title(setting), writer.rows, setting.returned, describe(module), _setup(setting, own_module))


def _title(setting: Setting) -> str:
    axes = setting.x.shape if setting.batched else setting.x.shape[1:]
    text = f"{call_text(setting.module, '.4g')} on x {list(axes)}"
    if setting.source != "self":
        text += f", context {list(setting.k_from.shape if setting.batched else setting.k_from.shape[1:])}"
    return text


def _setup(setting: Setting, own_module: bool) -> str:
    """Return what the code of the rows requires: imports, and the module if there is none; the reader has the rest."""
    yours = [] if own_module else ["module"]
    yours += [] if setting.x_code else ["x"] if setting.source == "self" else ["x", "context"]
    yours += ["mask"] if any("mask" in line for line in setting.mask_code) else []
    yours += ["bias"] if setting.bias is not None else []
    yours += ["positions"] if setting.positions is not None else []
    lines = ["import torch", "import torch.nn.functional as F"]
    if own_module:
        weight, _ = setting.module.projection("out")
        dtype = "" if weight.dtype == torch.get_default_dtype() else f", dtype={weight.dtype}"
        lines += [
            "import headscope",
            *import_lines(setting.module),
            f"module = headscope.{call_text(setting.module)[:-1]}{dtype})",
        ]
    if yours:
        lines.append(f"# yours: {', '.join(yours)}")
    return "\n".join(lines)
