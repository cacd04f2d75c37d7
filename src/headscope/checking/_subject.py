"""How a module or function is called: copies of it, the arguments that fit, and runs with and without a tap."""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headscope._provenance.tap import Seen, Tap, headscope_spelled
from headscope.checking._head_layout import Fault, Heads, arrange

LENGTHS = (7, 5, 4, 8, 16, 49, 64, 197)  # tried one after another; a fixed length must be among them, or be given
WEIGHTS_FLAGS = ("need_weights", "output_attentions", "return_weights", "return_attention", "return_attn")
POSITIONS = ("position_embeddings", "position_ids")
MOST = 200  # ways that are tried
FOREIGN = ("encoder", "memory", "cross", "head_mask")  # parts of the names of masks that are for something else

Call = Callable[..., Any]


RAISED = (Exception, SystemExit)
"""What code that nobody knows may raise and that is told; Ctrl-C passes."""


class CheckError(ValueError):
    """What was given cannot be called, or gives nothing that can be checked."""


@dataclass(frozen=True)
class Way:
    """One way to call: what each argument takes; ``Ellipsis`` stands for the input."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    said: str


@dataclass(frozen=True)
class Run:
    """One forward pass that was tapped.

    Attributes:
        out: [B, T, E'].
        heads: the attention, or None where it could not be told: ``why`` says why.
        faults: what is wrong with the layout.
        returned: the tensors that came back and may be weights: the others are made of one token each.
    """

    out: Tensor
    heads: Heads | None
    faults: list[Fault]
    why: str
    seen: Seen
    returned: list[Tensor]


@dataclass
class Subject:
    """What is checked: a copy in float64 on the CPU, and how it is called.

    Attributes:
        target: the copy, or the function itself.
        call: a caller's own way to call it, with x and a mask (True = may be seen), or None.
        names: of its arguments; of these, those of masks, and that of a cache.
        swapped: its input is [T, B, E].
        stateful: each run takes a copy of its own.
    """

    target: Any
    call: Call | None
    way: Way
    embed_dim: int
    batch: int
    length: int
    dtype: torch.dtype
    names: tuple[str, ...]
    mask_names: tuple[str, ...]
    cache_name: str | None
    swapped: bool = False
    stateful: bool = False

    @property
    def module(self) -> nn.Module | None:
        return self.target if isinstance(self.target, nn.Module) else None

    @property
    def torch_like(self) -> bool:
        """Whether its masks are called as those of torch's modules, which hide where True and take length first."""
        return any(name.endswith("key_padding_mask") for name in self.mask_names)

    @property
    def tolerance(self) -> float:
        """Relative; some modules compute their softmax in float32 whatever the input is."""
        return 1e-5 if self.dtype == torch.float64 else 1e-3

    def input(self, seed: int, size: float = 1.0) -> Tensor:
        """[B, T, E], normal numbers."""
        generator = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(self.batch, self.length, self.embed_dim, generator=generator, dtype=torch.float64)
        return (x * size).to(self.dtype)

    def results(self, x: Tensor, target: Any = None, seed: int = 0, **more: Any) -> Any:
        """What comes back for x [B, T, E], as it is."""
        if target is None:
            target = duplicate(self.target) if self.stateful else self.target
        given = x.transpose(0, 1).contiguous() if self.swapped else x
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also looks for devices, which takes longer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the code that is checked
            if self.call is not None:
                return self.call(target, given, more.get("mask"))
            return _called(target, self.names, self.way, given, more)

    def run(self, x: Tensor, **more: Any) -> Tensor:
        """The output for x [B, T, E], in float64."""
        return self.output(self.results(x.clone(), **more), x).detach().double()

    def output(self, result: Any, x: Tensor) -> Tensor:
        """The output among what came back, [B, T, E']."""
        wanted = (x.shape[1], x.shape[0]) if self.swapped else tuple(x.shape[:2])
        for tensor in tensors(result):
            if tensor.ndim == 3 and tuple(tensor.shape[:2]) == wanted:
                return tensor.transpose(0, 1) if self.swapped else tensor
        raise CheckError(f"output: got {_shapes(result)}, wanted [{wanted[0]}, {wanted[1]}, width]")

    def tapped(self, x: Tensor, target: Any = None, **more: Any) -> Run:
        """A forward pass that is looked into."""
        tap = Tap()
        batch, length = x.shape[:2]
        tokens = torch.arange(batch * length).view(batch, length)
        given = x.transpose(0, 1).contiguous() if self.swapped else x.clone()
        with headscope_spelled() as calls, tap:
            tap.input(given, tokens.T if self.swapped else tokens)
            plain = replace(self, swapped=False) if self.swapped else self
            result = plain.results(given, target=target, **more)
        out = self.output(result, x)
        tap.seen.out_ids = tap.ids(out)
        tap.seen.fused += len(calls)
        heads, faults, why = arrange(tap.seen, batch, length)
        returned = [tensor for tensor in tensors(result) if not tap.knows_token(tensor)]
        return Run(out.detach().double(), heads, faults, why, tap.seen, returned)


def _called(target: Any, names: tuple[str, ...], way: Way, x: Tensor, more: dict[str, Any]) -> Any:
    def value(given: Any) -> Any:
        return x if given is ... else given.of(x) if isinstance(given, (Angles, Places, Filled)) else given

    positional = [value(each) for each in way.positional]
    named = {name: value(each) for name, each in way.named.items()} | more
    for name in list(named):
        if name in names and names.index(name) < len(positional):
            positional[names.index(name)] = named.pop(name)
    return target(*positional, **named)


@dataclass(frozen=True)
class Angles:
    """cos and sin of rotary positions, [1, T, width] each."""

    width: int

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(self.width // 2, dtype=torch.float64) * (2 / self.width)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * 10000.0**-half
        angles = torch.cat([angles, angles], -1)[None]  # [1, T, width]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@dataclass(frozen=True)
class Places:
    """0, 1, 2, … for each batch entry, [B, T]."""

    def of(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]).expand(x.shape[:2])


@dataclass(frozen=True)
class Filled:
    """A mask that hides nothing, for who takes no None: [B, T] or [B, 1, T, T], or [T, T]; full of ``value``."""

    axes: str
    value: bool

    def of(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        shape = {"keys": (batch, length), "pairs": (length, length), "all": (batch, 1, length, length)}[self.axes]
        return torch.full(shape, self.value)


MASKS = tuple((f"all {value}", Filled(axes, value)) for value in (True, False) for axes in ("pairs", "keys", "all"))


def tensors(result: Any) -> list[Tensor]:
    """The floating-point tensors of what came back, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in tensors(part)]
    return []


def _shapes(result: Any) -> str:
    found = ", ".join(str(list(tensor.shape)) for tensor in tensors(result))
    return found or type(result).__name__


# ---------------------------------------------------------------- finding the way


def subject(target: Any, call: Call | None, embed_dim: int | None, inputs: Tensor | None) -> Subject:
    """Copy what is checked, and find how it is called.

    Raises:
        TypeError: it can not be called.
        CheckError: no way to call it was found; the message says what was tried.
    """
    if isinstance(target, type) or not callable(target):
        got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(f"module: got {got}, wanted an nn.Module or a function")
    made = _copied(target)
    names = _names(made)
    masks = _mask_names(made) if call is None else ("mask",)
    batch = 2 if inputs is None else max(2, inputs.shape[0])
    failed: list[tuple[list[int], str]] = []
    for dtype in (torch.float64, torch.float32):
        made, trial = in_type(made, dtype), in_type(duplicate(made), dtype)  # what is returned has not been called
        for length, width, way in islice(_tries(made, call, _widths(made, embed_dim, inputs), inputs), MOST):
            found = Subject(made, call, way, width, batch, length, dtype, names, masks, _cache_name(names))
            try:
                if _hidden(way, found.run(found.input(0), target=trial)):
                    raise CheckError("output: the same at all positions, or not finite")
            except RAISED as error:  # whatever it raises: this is not the way
                failed.append((_reached(error), f"{way.said} with x [{batch}, {length}, {width}]: {line(error)}"))
            else:
                return found
    (_, first), (_, furthest) = failed[0], max(failed, key=lambda each: each[0])  # the first of those that are alike
    tried = first if first == furthest else f"{first}; what came furthest was {furthest}"
    raise CheckError(
        f"module: no way to call it was found; tried first {tried}; give embed_dim=, inputs=, or "
        "call=lambda module, x, mask: ..."
    )


def _tries(target: Any, call: Call | None, widths: list[int], inputs: Tensor | None) -> Iterator[tuple[int, int, Way]]:
    """Lengths, widths and ways to call."""
    for length in LENGTHS if inputs is None else (inputs.shape[1],):
        for width in widths:
            for way in _ways(target, width) if call is None else (Way((...,), {}, "its own call"),):
                yield length, width, way


def _reached(error: BaseException) -> list[int]:
    """How far a call came before it raised: the lines, from ours inward, to be compared by the first that differs.

    What looks at the output stands below what makes it, here as in ``Subject``.
    """
    return [number for _, number in traceback.walk_tb(error.__traceback__)]


def line(error: BaseException) -> str:
    """What was raised, in one line."""
    said = " ".join(str(error).split())[:160]
    return type(error).__name__ + (f": {said}" if said else "")


def in_type(target: Any, dtype: torch.dtype) -> Any:
    """The module with its real numbers of a type; complex ones stay complex, which ``Module.to`` would not leave."""
    pair = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x.to(pair) if x.is_complex() else x

    return target._apply(convert) if isinstance(target, nn.Module) else target


def duplicate(target: Any) -> Any:
    """A deep copy. Results that a module keeps of an earlier call, which torch does not copy, are copied as numbers."""
    memo: dict[int, Any] = {}

    def find(value: Any, depth: int) -> None:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple, dict)) and depth < 3:
            for each in value.values() if isinstance(value, dict) else value:
                find(each, depth + 1)

    for part in target.modules() if isinstance(target, nn.Module) else ():
        for value in vars(part).values():
            find(value, 0)
    return copy.deepcopy(target, memo)


def _hidden(way: Way, out: Tensor) -> bool:
    """Whether a mask that was to hide nothing has hidden everything."""
    masked = any(isinstance(each, Filled) for each in way.positional)
    return masked and (not bool(torch.isfinite(out).all()) or bool(((out - out[:, :1]).abs() < 1e-9).all()))


def _copied(target: Any) -> Any:
    if not isinstance(target, nn.Module):
        return target
    if any(p.is_meta for p in target.parameters()):
        raise CheckError("module: its parameters are on the meta device and have no values")
    made = duplicate(target).cpu().eval()
    for p in made.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    return made


def _widths(target: Any, embed_dim: int | None, inputs: Tensor | None) -> list[int]:
    """Widths the input may have: the sizes of the weights, in the order in which they are found."""
    if inputs is not None:
        if inputs.ndim != 3:
            raise CheckError(f"inputs: has {inputs.ndim} axes, wanted 3 ([B, T, E])")
        return [inputs.shape[2]]
    if embed_dim is not None:
        return [embed_dim]
    sizes: list[int] = []
    if isinstance(target, nn.Module):
        for p in target.parameters():
            sizes += [p.shape[1], p.shape[0]] if p.ndim == 2 else list(p.shape) if p.ndim == 3 else []
    if not sizes:
        raise CheckError("embed_dim: missing; there are no weights to tell it from")
    return list(dict.fromkeys(sizes))[:6]


def _parameters(target: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters.values())
    except (ValueError, TypeError):
        return []


def _names(target: Any) -> tuple[str, ...]:
    return tuple(p.name for p in _parameters(target) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


def _mask_names(target: Any) -> tuple[str, ...]:
    flags = {p.name for p in _parameters(target) if isinstance(p.default, bool)}  # whether, not what, to hide
    named = (n for n in _names(target) if "mask" in n or "pad" in n)
    return tuple(n for n in named if n not in flags and not any(part in n for part in FOREIGN))


def _cache_name(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if "cache" in name or name.startswith("past")), None)


def _ways(target: Any, width: int) -> Iterator[Way]:
    """Ways to call, the likeliest first."""
    parameters = _parameters(target)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    only = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    flags = {p.name: False for p in parameters if p.name in WEIGHTS_FLAGS}
    named: dict[str, Any] = {**only, **flags}
    rest = [p.name for p in plain if p.default is p.empty][1:]
    likely = tuple(... if takes_input(name) else None for name in rest)
    every = tuple(None if "mask" in name or name in POSITIONS else ... for name in rest)
    for values in dict.fromkeys((likely, every)):
        yield Way((..., *values), named, _said(values))
        for said, more in _positions([p.name for p in parameters], width):
            at = tuple(more.pop(name, value) for name, value in zip(rest, values, strict=True))
            yield Way((..., *at), {**named, **more}, f"{_said(values)} with {said}")
    if len(plain) >= 3 and len(rest) < 2:
        yield Way((..., ..., ...), named, "(x, x, x)")
    for values in dict.fromkeys((likely, every)):
        for said, mask in MASKS if any("mask" in name for name in rest) else ():
            at = tuple(mask if "mask" in name else value for name, value in zip(rest, values, strict=True))
            yield Way((..., *at), named, f"{_said(values)} with {said} for a mask")


def takes_input(name: str) -> bool:
    """Whether an argument of this name takes the input, or another one like it."""
    if "mask" in name or "pad" in name or name in POSITIONS:
        return False
    bare = name.lower().strip("_0123456789")
    return bare in ("q", "k", "v", "x", "y", "kv", "qs", "ks", "vs", "xq", "xk", "xv", "src", "tgt") or any(
        part in bare for part in ("key", "value", "quer", "context", "memory", "source", "input", "hidden", "embed")
    )


def _said(values: tuple[Any, ...]) -> str:
    return f"({', '.join(['x', *('None' if each is None else 'x' for each in values)])})"


def _positions(names: list[str], width: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments for positions: what is handed over, in words, and by name."""
    if "position_ids" in names:
        yield "position_ids", {"position_ids": Places()}
    if "position_embeddings" in names:
        for size in (n for n in range(2, width + 1, 2) if width % n == 0):
            yield "cos and sin", {"position_embeddings": Angles(size)}
