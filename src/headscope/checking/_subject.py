"""The subject of a check: a copy of a module or function, how it is called, and its runs, plain or followed."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headscope._provenance import Provenance, ProvenanceMode
from headscope._support.user_line import describe_error, describe_failure, find_user_line
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
    describe_shapes,
    list_tensors,
    separate_equal_weights,
)
from headscope.checking._head_layout import Fault, Heads, arrange_heads
from headscope.checking._own_attention import computed_by_reference

LENGTHS = (
    7,
    5,
    4,
    8,
    16,
    49,
    64,
    197,
)  # tried in this order; inputs= is required for a module with another fixed length
MOST_PATTERNS = 200  # tried per dtype
OWN_CALLS = (
    CallPattern((...,), {}, "its own call"),
    CallPattern((..., ConstantMask("all", True)), {}, "its own call with a mask that hides nothing"),
)
"""The patterns of a call that the caller specified, as a function of module, x and mask."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """One forward pass that was followed.

    Attributes:
        out: [B, T, E'].
        heads: the attention, or None where it could not be identified; ``reason`` explains why.
        faults: the mistakes of the layout.
        record: where the numbers come from.
        returned: the returned tensors that may be weights; the rest are computed from one token each.
    """

    out: Tensor
    heads: Heads | None
    faults: list[Fault]
    reason: str
    record: Provenance
    returned: list[Tensor]


@dataclass
class Subject:
    """The checked module or function: a copy in float64 on the CPU, and how it is called.

    Attributes:
        target: the copy, or the function itself.
        call: the caller's function that calls it with x and a mask (True = attend), or None.
        names: the names of its arguments; mask_names, cache_names, cache_flags: those of masks, of possible caches,
            and of flags that request a cache.
        swapped: whether its input is [T, B, E].
        stateful: whether each run needs a new copy.
        zeros: the names of parameters that hold zeros and are trained.
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
    zeros: frozenset[str] = frozenset()

    @property
    def module(self) -> nn.Module | None:
        return self.target if isinstance(self.target, nn.Module) else None

    @property
    def torch_like(self) -> bool:
        """Whether its masks are named as in torch's modules, which mask where True and expect length first."""
        return any(name.endswith("key_padding_mask") for name in self.mask_names)

    @property
    def tolerance(self) -> float:
        """The relative tolerance; some modules compute their softmax in float32 whatever the dtype of the input."""
        return 1e-5 if self.dtype == torch.float64 else 1e-3

    def input(self, seed: int, size: float = 1.0) -> Tensor:
        """Return normal random numbers, [B, T, E]."""
        generator = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(self.batch, self.length, self.embed_dim, generator=generator, dtype=torch.float64)
        return (x * size).to(self.dtype)

    def call_with(self, x: Tensor, target: Any = None, seed: int = 0, **more: Any) -> Any:
        """Return the unchanged result for x [B, T, E]."""
        if target is None:
            target = copy_target(self.target) if self.stateful else self.target
        x = x.transpose(0, 1).contiguous() if self.swapped else x
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also looks for devices, which is slower
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the checked code
            if self.call is not None:
                (_, *masks) = self.pattern.positional
                return self.call(target, x, more.get("mask", masks[0].build(x) if masks else None))
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
    """Copy the target and find how to call it.

    Raises:
        TypeError: the target is not callable.
        CheckError: no call pattern works; the message lists the attempts that were made.
    """
    if isinstance(target, type) or not callable(target):
        got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(f"module: got {got}, expected an nn.Module or a function")
    names = argument_names(target)
    masks = mask_names(target) if call is None else ("mask",)
    caches = cache_names(target), cache_flags(target)
    batch = 2 if inputs is None else max(2, inputs.shape[0])
    copied = _copy_to_cpu(_initialise_lazy_weights(target, call, embed_dim, inputs))
    zeros = _list_zeros(target)
    failures: list[_Failure] = []
    widths = _possible_widths(copied, embed_dim, inputs)
    for dtype in (torch.float64, torch.float32):
        copied = convert_dtype(copied, dtype)
        trial = convert_dtype(copy_target(copied), dtype)  # the returned copy stays uncalled
        calls = _list_calls(copied, call, widths, inputs)
        for length, width, pattern in islice(calls, MOST_PATTERNS):
            subject = Subject(copied, call, pattern, width, batch, length, dtype, names, masks, *caches)
            try:
                if _all_hidden(pattern, subject.run(subject.input(0), target=trial)):
                    raise CheckError("output: the same at all positions, or not finite")
            except CODE_ERRORS as error:  # whatever it raises, this pattern does not fit
                shape = f"[{batch}, {length}, {width}]"
                failures.append(_Failure(_call_depth(error), width, pattern.text, shape, error))
            else:
                return replace(subject, zeros=zeros)
    name = getattr(target, "__name__", None) or type(target).__name__
    derived = embed_dim is None and inputs is None
    text = _describe_failures(failures, widths, derived=derived, called=call is not None)
    raise CheckError(f"{name}: {text}{_name_other_remedy(target, failures)}")


def _name_other_remedy(target: Any, failures: list[_Failure]) -> str:
    """Return a remedy that no argument of ``check`` gives: for a whole model, and for products without gradients."""
    if any("automatic differentiation" in str(failure.error) for failure in failures):
        return "; check follows gradients: compute without out=, as training must"
    parts = target.modules() if isinstance(target, nn.Module) else ()
    if any(isinstance(part, nn.Embedding) for part in parts):
        return "; for a whole model, which takes token ids, use headscope.check_model(model, inputs)"
    return ""


@dataclass(frozen=True)
class _Failure:
    """A call that failed, and how far it got, as ``_call_depth`` measures it."""

    depth: list[int]
    width: int
    pattern: str
    shape: str
    error: BaseException

    @property
    def kind(self) -> str:
        """The error without its numbers, which depend on the length of the input."""
        return re.sub(r"\d+", "0", describe_error(self.error))

    def __str__(self) -> str:
        return f"{self.pattern} with x {self.shape}: {describe_failure(self.error)}"


def _describe_failures(failures: list[_Failure], widths: list[int], *, derived: bool, called: bool) -> str:
    """Describe why no call succeeded, with a remedy if another call may succeed.

    Args:
        failures: the failures, in the order of the attempts.
        widths: the widths of the input that were tried.
        derived: whether the caller specified neither the width nor an input.
        called: whether the caller specified how to call the target.
    """
    first, furthest = failures[0], max(failures, key=lambda each: each.depth)  # of ties, the first
    at_first_width = {each.kind for each in failures if each.width == first.width}
    if len(at_first_width) == 1 and derived and not called and first is furthest and find_user_line(first.error):
        return f"fails with x {first.shape}: {describe_failure(first.error)}"  # whatever the call
    if len({each.kind for each in failures}) == len(widths) == 1 and derived:  # another width would not help
        remedy = "check the sizes that it was built with, or give inputs= or call=lambda module, x, mask: ..."
        return f"every call fails, the first was {first}; {remedy}"
    attempts = str(first) if str(first) == str(furthest) else f"{first}; the attempt that got furthest was {furthest}"
    remedy = "give embed_dim=, inputs=, or call=lambda module, x, mask: ..."
    return f"no way to call it was found; tried first {attempts}; {remedy}"


def _list_calls(
    target: Any, call: Call | None, widths: list[int], inputs: Tensor | None
) -> Iterator[tuple[int, int, CallPattern]]:
    """Yield lengths, widths and call patterns to try."""
    for length in LENGTHS if inputs is None else (inputs.shape[1],):
        for width in widths:
            for pattern in list_patterns(target, width) if call is None else OWN_CALLS:
                yield length, width, pattern


def _call_depth(error: BaseException) -> list[int]:
    """Return how far a call got before it raised: the lines of its frames, outermost first, which compare in order.

    In ``Subject``, the code that checks the output stands below the code that computes it.
    """
    return [number for _, number in traceback.walk_tb(error.__traceback__)]


def _all_hidden(pattern: CallPattern, out: Tensor) -> bool:
    """Return whether a mask that should hide nothing hides everything."""
    masked = any(isinstance(each, ConstantMask) for each in pattern.positional)
    return masked and (not bool(torch.isfinite(out).all()) or bool(((out - out[:, :1]).abs() < 1e-9).all()))


def _initialise_lazy_weights(target: Any, call: Call | None, embed_dim: int | None, inputs: Tensor | None) -> Any:
    """Return the target, or a copy whose lazy weights got their shapes from a call."""
    if not isinstance(target, nn.Module) or not any(map(is_lazy, target.parameters())):
        return target
    if embed_dim is None and inputs is None:
        raise CheckError("embed_dim: missing; it cannot be derived from lazy weights, which have no shape yet")
    failure = ""
    for length, width, pattern in islice(
        _list_calls(target, call, _possible_widths(target, embed_dim, inputs), inputs), MOST_PATTERNS
    ):
        copied = copy_target(target).cpu().eval()  # a call that fails may have initialised some weights
        subject = Subject(copied, call, pattern, width, 2, length, torch.float32, argument_names(target), (), (), ())
        try:
            subject.run(subject.input(0))
        except CODE_ERRORS as error:  # this pattern does not fit
            failure = failure or f"{pattern.text} with x [2, {length}, {width}]: {describe_error(error)}"
        else:
            return copied
    raise CheckError(f"module: its lazy weights could not be initialised; tried first {failure}")


def _copy_to_cpu(target: Any) -> Any:
    if not isinstance(target, nn.Module):
        return target
    if any(p.is_meta for p in target.parameters()):
        raise CheckError("module: its parameters are on the meta device and have no values")
    copied = copy_target(target).cpu().eval()
    for p in copied.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    separate_equal_weights(copied)
    return copied


def _list_zeros(target: Any) -> frozenset[str]:
    """Return the names of the parameters that hold zeros and are trained, or of all if none is trained any more."""
    named = list(target.named_parameters()) if isinstance(target, nn.Module) else []
    trained = [(name, p) for name, p in named if p.requires_grad] or named
    ready = ((name, p) for name, p in trained if not is_lazy(p) and p.numel() and p.is_floating_point())
    return frozenset(name for name, p in ready if not bool(p.detach().any()))


def _possible_widths(target: Any, embed_dim: int | None, inputs: Tensor | None) -> list[int]:
    """Return the possible widths of the input: the sizes of the weights, in their order."""
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
        raise CheckError("embed_dim: missing; it cannot be derived without weights")
    return list(dict.fromkeys(sizes))[:6]
