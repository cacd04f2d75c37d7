"""trace: every step of a forward pass, with its equation, code, shape, values, and an invariant that was checked."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headscope._linear.layer import strangers
from headscope.masks import Mask
from headscope.module import MultiHeadAttention
from headscope.module._options import QKV, whole_sizes
from headscope.tracing import _row as steps
from headscope.tracing._attention_steps import Attention, Heads
from headscope.tracing._row import Pages, Row
from headscope.tracing._setup import Asked, Context, Setting, Source, of_sizes, of_values

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["Row", "Trace", "trace"]


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The steps of one forward pass. Print it, leave it as the last line of a notebook cell, or ask for JSON.

    Attributes:
        title: what was traced, in one line.
        rows: the steps, in order.
        output: what the module itself returned, to the bit; None where only sizes were given.
        module: the sizes and options of the module.
        setup: the lines of code that come before those of the rows.
    """

    title: str
    rows: list[Row]
    output: Tensor | None
    module: dict[str, Any]
    setup: str

    @property
    def held(self) -> bool | None:
        """Whether every invariant held; None where there were no values to check."""
        return None if self.output is None else all(row.held for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows whose invariant did not hold."""
        return [row for row in self.rows if row.held is False]

    @property
    def summary(self) -> str:
        """How many invariants held, or why none was checked, in one line."""
        if self.held is None:
            return "○ sizes alone: nothing was computed; give a module and an input to check these"
        if self.failed:
            names = ", ".join(row.step for row in self.failed)
            return f"✗ {len(self.failed)} of {len(self.rows)} invariants did not hold: {names}"
        return f"✓ all {len(self.rows)} invariants held; errors are against the same step in float64"

    @property
    def code(self) -> str:
        """The lines of all rows as one program that makes ``out``; what it needs beforehand stands at its top."""
        lines = [self.setup]
        for row in self.rows:
            axes = ", ".join(row.axes)
            lines.append(f"{row.code}  # [{axes}]" if row.stage > 1 else row.code)
        return "\n".join(lines) + "\n"

    def row(self, step: str) -> Row:
        """The row of one step, by name, such as "scores".

        Raises:
            KeyError: there is no such step; the message lists those there are.
        """
        for row in self.rows:
            if row.step == step:
                return row
        raise KeyError(f"step: got {step!r}, wanted one of {', '.join(row.step for row in self.rows)}")

    def table(self, *, explain: bool = False) -> RenderableType:
        """The steps as a table for ``rich.print``; it fits itself to the width and the encoding of the console.

        Args:
            explain: also say why each step exists, and the common mistake at it.
        """
        from headscope.tracing._terminal import Table

        return Table(self, explain=explain)

    def to_dict(self) -> dict[str, Any]:
        """The trace in plain lists, numbers and texts; NaN and infinity as "NaN", "Infinity", "-Infinity"."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            if row["corner"] is not None:
                row["corner"] = [[_encoded(value) for value in line] for line in row["corner"]]
        head = {"kind": "headscope-trace", "version": 1, "title": self.title, "module": self.module}
        return {**head, "held": self.held, "rows": rows}

    def to_json(self, *, indent: int | None = 2) -> str:
        """``to_dict`` as JSON that strict parsers take."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=80, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __repr__(self) -> str:
        held = "sizes alone" if self.output is None else f"{sum(row.held is True for row in self.rows)} invariants held"
        failed = f", failed at {', '.join(row.step for row in self.failed)}" if self.failed else ""
        return f"<Trace of {self.title}: {len(self.rows)} steps, {held}{failed}>"

    def _repr_html_(self) -> str:
        from headscope.tracing._html import fragment

        return fragment(self)


def _encoded(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def trace(
    module: MultiHeadAttention | None = None,
    x: Tensor | None = None,
    context: Context = None,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
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
    dtype: torch.dtype | None = None,
) -> Trace:
    """Go through multi-head attention step by step: of a module and an input, or from sizes alone.

    ``trace(module, x)`` computes every step, shows a corner of its values and checks an invariant on them; the module
    runs as in eval (dropout is left out), without gradients. ``trace(seq=10, dim=512, heads=8)`` allocates nothing,
    whatever the sizes: shapes and memory, no values. ``trace(module, seq=10)`` does the same for a module that exists.

    Shapes: as ``MultiHeadAttention.forward``. The result has a row for the input (and context), the projections to
    q, k, v, their split into heads, the sharing of grouped heads, the scores, softcap, bias, mask, weights, the output
    of each head, their concatenation and the output; what a module or call does not have is left out.

    Args:
        module: a ``headscope.MultiHeadAttention``.
        x: its input, [B, Q, E] or [Q, E], in the module's dtype and on its device.
        context: where keys and values come from, or a pair of tensors; by default ``x``.
        mask: what may be seen, a mask of ``headscope.masks`` or a boolean tensor, True = attend (the opposite of
            ``nn.MultiheadAttention``).
        bias: added to the scores; broadcasts to [B, H, Q, K].
        causal: hide the future; together with ``mask``, what both allow may be seen.
        batch: from sizes alone, the number of sequences, at least 1; by default 1.
        seq: from sizes alone, the length of each.
        context_seq: from sizes alone, the length of the context; by default there is none.
        dim: from sizes alone, the model width E.
        heads: from sizes alone, the number of heads H.
        kv_heads, head_dim, v_head_dim, kdim, vdim, scale, softcap, sinks, dtype: from sizes alone, as for
            ``MultiHeadAttention``.

    Where the matrix of weights has more than 2 million numbers, or a projection takes more than 2^27 multiplications, a
    row is checked on a sample, and its invariant says on how many rows. Tolerances follow from the dtype and the number
    of terms that were added up; an invariant says what it found and what rounding allows. NaN and infinity in the input
    show as invariants that did not hold.

    Raises:
        TypeError: ``module`` is something else, or an input is of a wrong kind or dtype.
        ValueError: sizes that are missing, given twice, or do not fit; the messages are those of the module.
    """
    sizes = {"batch": batch, "seq": seq, "context_seq": context_seq}
    made_of = {
        "dim": dim, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "kdim": kdim,
        "vdim": vdim, "scale": scale, "softcap": softcap, "sinks": sinks or None, "dtype": dtype,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in made_of.items() if value is not None}
    lengths = {name: value for name, value in sizes.items() if value is not None}
    _check_what_is_given(module, x, context, lengths, given)
    asked, own = Asked(mask, causal, bias), module is None
    with torch.no_grad():
        if module is None:
            module = MultiHeadAttention(given.pop("dim"), given.pop("heads"), device="meta", **given)
        if x is None:
            lengths = dict(zip(lengths, whole_sizes(**lengths), strict=True))
            return _walk(_from_sizes(module, asked, **lengths), own_module=own)
        return _walk(of_values(module, x, context, asked), own_module=own)


def _check_what_is_given(
    module: object, x: object, context: object, lengths: dict[str, int], made_of: dict[str, Any]
) -> None:
    """Whether there is either a module with an input, or a module or its sizes with the sizes of an input."""
    if module is not None and not isinstance(module, MultiHeadAttention):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"module: got {got}, wanted a headscope.MultiHeadAttention; other modules cannot be traced yet")
    if module is not None and (beyond := _untraced(module)):
        raise TypeError(f"module: has {', '.join(beyond)}, whose steps cannot be traced yet")
    if module is not None and made_of:
        raise ValueError(f"{', '.join(made_of)}: the module has its own; give a module, or the sizes of one")
    if x is not None and lengths:
        raise ValueError(f"{', '.join(lengths)}: x has its own; give x, or its sizes")
    if x is not None and module is None:
        raise ValueError("module: missing; an input x is traced through a headscope.MultiHeadAttention")
    if x is None and context is not None:
        raise ValueError("context: got one without x; from sizes alone, give context_seq")
    if x is None:
        needed = ("seq",) if module is not None else ("seq", "dim", "heads")
        missing = [name for name in needed if name not in lengths and name not in made_of]
        if missing:
            wanted = "a module and its input x, or the sizes seq, dim and heads"
            raise ValueError(f"{', '.join(missing)}: missing; give {wanted}")


def _untraced(module: MultiHeadAttention) -> list[str]:
    """What a module has that no row shows."""
    options = {
        "rotary": module.rotary, "position_bias": module.position_bias, "qk_norm": module.qk_norm,
        "gate": module.gate_proj, "bias_kv": module.bias_k,
    }  # fmt: skip
    others = [f"a {type(part).__name__} as {name}" for name, part in strangers(module).items()]
    return [name for name, value in options.items() if value is not None] + others


def _from_sizes(
    module: MultiHeadAttention, asked: Asked, seq: int, batch: int = 1, context_seq: int | None = None
) -> Setting:
    """Inputs of these sizes on the meta device, and the code that would make them."""
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
        return of_sizes(module, (x, x, x), "self", asked, tuple(code))
    widths = (module.kdim, module.vdim)
    source: Source = "cross" if module.kdim == module.vdim else "pair"
    made = [random(context_seq, width) for width in (widths if source == "pair" else widths[:1])]
    code.append(f"context = {', '.join(made)}")
    k_from, v_from = (empty(context_seq, width) for width in widths)
    return of_sizes(module, (x, k_from, v_from), source, asked, tuple(code))


def _walk(setting: Setting, *, own_module: bool) -> Trace:
    """Every step of the forward pass that ``setting`` describes."""
    module, pages = setting.module, Pages(setting)
    steps.inputs(pages)
    flat = {name: steps.project(pages, name) for name in QKV}
    own: tuple[Tensor | None, ...] = (None, None, None)
    if setting.values:
        context = {"self": None, "cross": setting.k_from, "pair": (setting.k_from, setting.v_from)}[setting.source]
        own = module.project(setting.x, context)
    heads = Heads(*(steps.split(pages, name, flat[name], mine) for name, mine in zip(QKV, own, strict=True)))
    steps.finish(pages, steps.concatenate(pages, Attention(pages, heads).walk()))
    return Trace(_title(setting), pages.rows, setting.returned, _describe(module), _setup(setting, own_module))


def _title(setting: Setting) -> str:
    axes = setting.x.shape if setting.batched else setting.x.shape[1:]
    text = f"{_call_text(setting.module, '.4g')} on x {list(axes)}"
    if setting.source != "self":
        text += f", context {list(setting.k_from.shape if setting.batched else setting.k_from.shape[1:])}"
    return text


def _describe(module: MultiHeadAttention) -> dict[str, Any]:
    sizes = ("embed_dim", "num_heads", "kv_heads", "head_dim", "v_head_dim", "kdim", "vdim")
    options = {name: getattr(module, name) for name in (*sizes, "scale", "softcap", "dropout")}
    return options | {"sinks": module.sinks is not None}


def _call_text(module: MultiHeadAttention, precision: str = "") -> str:
    """The module as it would be made: what is not the default, in the order of the signature."""
    biased = tuple(name for name in QKV if module.projection(name)[1] is not None)
    bias = biased if 0 < len(biased) < len(QKV) else bool(biased)
    usual: dict[str, Any] = {
        "kv_heads": module.num_heads, "head_dim": module.embed_dim / module.num_heads, "v_head_dim": module.head_dim,
        "kdim": module.embed_dim, "vdim": module.kdim, "bias": True, "out_bias": bool(biased),
        "scale": module.head_dim**-0.5, "softcap": None, "sinks": False, "dropout": 0.0,
    }  # fmt: skip
    flags = {"bias": bias, "out_bias": module.projection("out")[1] is not None, "sinks": module.sinks is not None}
    options: list[str] = []
    for name, default in usual.items():
        value = flags[name] if name in flags else getattr(module, name)
        if value != default:
            options.append(f", {name}={format(value, precision) if isinstance(value, float) else value}")
    return f"{type(module).__name__}({module.embed_dim}, {module.num_heads}{''.join(options)})"


def _setup(setting: Setting, own_module: bool) -> str:
    """What the code of the rows needs: imports, and the module where it was sizes alone; the reader has the rest."""
    yours = [] if own_module else ["module"]
    yours += [] if setting.x_code else ["x"] if setting.source == "self" else ["x", "context"]
    yours += ["mask"] if any("mask" in line for line in setting.mask_code) else []
    yours += ["bias"] if setting.bias is not None else []
    lines = ["import torch", "import torch.nn.functional as F"]
    if own_module:
        weight, _ = setting.module.projection("out")
        dtype = "" if weight.dtype == torch.get_default_dtype() else f", dtype={weight.dtype}"
        lines += ["import headscope", f"module = headscope.{_call_text(setting.module)[:-1]}{dtype})"]
    if yours:
        lines.append(f"# yours: {', '.join(yours)}")
    return "\n".join(lines)
