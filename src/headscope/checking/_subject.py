"""What is checked: a copy of a module or function, how it is called, and runs of it, plain or followed."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headscope._provenance import Provenance, ProvenanceMode
from headscope.checking._call_patterns import (
    CallPattern,
    ConstantMask,
    apply_pattern,
    argument_names,
    cache_flags,
    cache_names,
    list_patterns,
    mask_names,
)
from headscope.checking._copies import (
    CODE_ERRORS,
    CheckError,
    convert_dtype,
    copy_target,
    describe_error,
    describe_shapes,
    list_tensors,
)
from headscope.checking._head_layout import Fault, Heads, arrange_heads
from headscope.checking._own_attention import computed_by_reference

LENGTHS = (7, 5, 4, 8, 16, 49, 64, 197)  # tried one after another; a fixed length must be among them, or be given
MOST_PATTERNS = 200  # that are tried

Call = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """One forward pass that was followed.

    Attributes:
        out: [B, T, E'].
        heads: the attention, or None where it could not be identified: ``reason`` is why.
        faults: the mistakes of the layout.
        record: where the numbers come from.
        returned: the returned tensors that may be weights: the others are made of one token each.
    """

    out: Tensor
    heads: Heads | None
    faults: list[Fault]
    reason: str
    record: Provenance
    returned: list[Tensor]


@dataclass
class Subject:
    """What is checked: a copy in float64 on the CPU, and how it is called.

    Attributes:
        target: the copy, or the function itself.
        call: a caller's own way to call it, with x and a mask (True = may be seen), or None.
        names: of its arguments; of these, those of masks, of what may be a cache, and of flags that ask for one.
        swapped: its input is [T, B, E].
        stateful: each run uses a new copy.
    """

    target: Any
    call: Call | None
    pattern: CallPattern
    embed_dim: int
    batch: int
    length: int
    dtype: torch.dtype
    names: tuple[str, ...]
    mask_names: tuple[str, ...]
    cache_names: tuple[str, ...]
    cache_flags: tuple[str, ...]
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

    def call_with(self, x: Tensor, target: Any = None, seed: int = 0, **more: Any) -> Any:
        """Return the result for x [B, T, E], as it is."""
        if target is None:
            target = copy_target(self.target) if self.stateful else self.target
        x = x.transpose(0, 1).contiguous() if self.swapped else x
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also looks for devices, which takes longer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the code that is checked
            if self.call is not None:
                return self.call(target, x, more.get("mask"))
            return apply_pattern(target, self.names, self.pattern, x, more)

    def run(self, x: Tensor, **more: Any) -> Tensor:
        """Return the output for x [B, T, E], in float64."""
        return self.output(self.call_with(x.clone(), **more), x).detach().double()

    def output(self, result: Any, x: Tensor) -> Tensor:
        """Return the output among the results, [B, T, E']."""
        expected = (x.shape[1], x.shape[0]) if self.swapped else tuple(x.shape[:2])
        for tensor in list_tensors(result):
            if tensor.ndim == 3 and tuple(tensor.shape[:2]) == expected:
                return tensor.transpose(0, 1) if self.swapped else tensor
        raise CheckError(f"output: got {describe_shapes(result)}, expected [{expected[0]}, {expected[1]}, width]")

    def follow(self, x: Tensor, target: Any = None, **more: Any) -> Run:
        """Run a forward pass and record where its numbers come from."""
        mode = ProvenanceMode()
        batch, length = x.shape[:2]
        tokens = torch.arange(batch * length).view(batch, length)
        inputs = x.transpose(0, 1).contiguous() if self.swapped else x.clone()
        with computed_by_reference() as calls, mode:
            mode.add_input(inputs, tokens.T if self.swapped else tokens)
            plain = replace(self, swapped=False) if self.swapped else self
            result = plain.call_with(inputs, target=target, **more)
        out = self.output(result, x)
        record = mode.record
        record.out_ids = mode.ids(out)
        record.fused_calls += len(calls)
        arranged = arrange_heads(record, batch, length)
        returned = [tensor for tensor in list_tensors(result) if not mode.belongs_to_token(tensor)]
        return Run(out.detach().double(), arranged.heads, arranged.faults, arranged.reason, record, returned)


def prepare_subject(target: Any, call: Call | None, embed_dim: int | None, inputs: Tensor | None) -> Subject:
    """Copy what is checked, and find how it is called.

    Raises:
        TypeError: it can not be called.
        CheckError: no way to call it was found; the message lists what was tried.
    """
    if isinstance(target, type) or not callable(target):
        got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(f"module: got {got}, expected an nn.Module or a function")
    copied = _copy_to_cpu(target)
    names = argument_names(copied)
    masks = mask_names(copied) if call is None else ("mask",)
    caches = cache_names(copied), cache_flags(copied)
    batch = 2 if inputs is None else max(2, inputs.shape[0])
    failures: list[tuple[list[int], str]] = []
    for dtype in (torch.float64, torch.float32):
        copied = convert_dtype(copied, dtype)
        trial = convert_dtype(copy_target(copied), dtype)  # what is returned has not been called
        calls = _list_calls(copied, call, _possible_widths(copied, embed_dim, inputs), inputs)
        for length, width, pattern in islice(calls, MOST_PATTERNS):
            subject = Subject(copied, call, pattern, width, batch, length, dtype, names, masks, *caches)
            try:
                if _all_hidden(pattern, subject.run(subject.input(0), target=trial)):
                    raise CheckError("output: the same at all positions, or not finite")
            except CODE_ERRORS as error:  # whatever it raises: the target is not called like this
                attempt = f"{pattern.text} with x [{batch}, {length}, {width}]: {describe_error(error)}"
                failures.append((_call_depth(error), attempt))
            else:
                return subject
    (_, first), (_, furthest) = failures[0], max(failures, key=lambda each: each[0])  # the first of equal ones
    attempts = first if first == furthest else f"{first}; what came furthest was {furthest}"
    raise CheckError(
        f"module: no way to call it was found; tried first {attempts}; give embed_dim=, inputs=, or "
        "call=lambda module, x, mask: ..."
    )


def _list_calls(
    target: Any, call: Call | None, widths: list[int], inputs: Tensor | None
) -> Iterator[tuple[int, int, CallPattern]]:
    """Lengths, widths and patterns of call."""
    for length in LENGTHS if inputs is None else (inputs.shape[1],):
        for width in widths:
            for pattern in list_patterns(target, width) if call is None else (CallPattern((...,), {}, "its own call"),):
                yield length, width, pattern


def _call_depth(error: BaseException) -> list[int]:
    """How far a call came before it raised: the lines, from ours inward, to be compared by the first that differs.

    In ``Subject``, the code that checks the output stands below the code that computes it.
    """
    return [number for _, number in traceback.walk_tb(error.__traceback__)]


def _all_hidden(pattern: CallPattern, out: Tensor) -> bool:
    """Whether a mask that was to hide nothing has hidden everything."""
    masked = any(isinstance(each, ConstantMask) for each in pattern.positional)
    return masked and (not bool(torch.isfinite(out).all()) or bool(((out - out[:, :1]).abs() < 1e-9).all()))


def _copy_to_cpu(target: Any) -> Any:
    if not isinstance(target, nn.Module):
        return target
    if any(p.is_meta for p in target.parameters()):
        raise CheckError("module: its parameters are on the meta device and have no values")
    copied = copy_target(target).cpu().eval()
    for p in copied.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    return copied


def _possible_widths(target: Any, embed_dim: int | None, inputs: Tensor | None) -> list[int]:
    """Widths the input may have: the sizes of the weights, in their order."""
    if inputs is not None:
        if inputs.ndim != 3:
            raise CheckError(f"inputs: has {inputs.ndim} axes, expected 3 ([B, T, E])")
        return [inputs.shape[2]]
    if embed_dim is not None:
        return [embed_dim]
    sizes: list[int] = []
    if isinstance(target, nn.Module):
        for p in target.parameters():
            sizes += [p.shape[1], p.shape[0]] if p.ndim == 2 else list(p.shape) if p.ndim == 3 else []
    if not sizes:
        raise CheckError("embed_dim: missing; there are no weights to derive it from")
    return list(dict.fromkeys(sizes))[:6]
