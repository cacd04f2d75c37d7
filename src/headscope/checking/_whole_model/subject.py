"""The subject of check_model: a copy of the model in float64 on the CPU, its runs, and how far rounding moves them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS, CheckError, list_tensors
from headscope.checking._whole_model.inputs import ModelInputs, argument_names, is_transformers, join, vary
from headscope.checking._whole_model.lifting import lifted

WAYS = ((torch.float64, True), (torch.float64, False), (torch.float32, False))
"""Dtypes in which questions are asked, and whether casts to float32 are lifted to it; the first that fits is used."""


def copy_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a model on the CPU, in eval mode, without gradients.

    Args:
        model: the model.
        dtype: of the real numbers of the copy; None = as they are. They are converted one tensor at a time, so no
            second copy in the old dtype is made.

    Raises:
        CheckError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        if any(map(nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise CheckError("model: its parameters are lazy and have no values; call the model once first")
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_meta:
                raise CheckError(
                    "model: its parameters are on the meta device and have no values; load or initialise them first"
                )
            if id(tensor) not in memo:
                memo[id(tensor)] = _convert(tensor, dtype)
        for value in vars(module).values():  # torch does not copy stored results that have a graph
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        copied = copy.deepcopy(model, memo)
    except CODE_ERRORS as error:
        raise CheckError(f"model: cannot be copied: {describe_error(error)}") from error
    return copied.cpu().eval()


def _convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype
    if target is None or not (tensor.is_floating_point() or tensor.is_complex()):
        target = tensor.dtype
    elif tensor.is_complex():
        target = torch.complex128 if dtype == torch.float64 else torch.complex64
    converted = tensor.detach().to("cpu", target, copy=True)
    return nn.Parameter(converted, requires_grad=False) if isinstance(tensor, nn.Parameter) else converted


@dataclass
class ModelSubject:
    """A copy of the checked model, and how it is called.

    Attributes:
        model: the copy.
        dtype: of its numbers.
        call: the caller's function that calls it, or None.
        lifts: whether casts to float32 inside the model become casts to float64.
        noise: how far outputs move if each weight moves by one rounding, and the largest output.
        pairs: whether the output relates all entries of a batch, [B, B, ...]; that of each with itself is the output.
    """

    model: nn.Module
    dtype: torch.dtype
    call: Callable[..., Any] | None = None
    lifts: bool = False
    noise: float = 0.0
    size: float = 1.0
    pairs: bool = False

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the arguments of its forward."""
        return frozenset(argument_names(self.model))

    @property
    def tolerance(self) -> float:
        """The largest difference that can be rounding.

        It is the geometric mean of what rounding changes and of the largest output. In float64 the first is 1e-15 of
        the second, so that a difference of 1e-7 lies half-way, in orders of magnitude. Rounding stays far below it, and
        a token that leaks far above.
        """
        return (self.noise * self.size) ** 0.5

    def call_with(self, inputs: ModelInputs, seed: int = 0, **more: Any) -> Any:
        """Return the unchanged result of a call."""
        values = {name: self._prepare(value) for name, value in inputs.values.items()}
        args = [values.pop(name) for name in inputs.positional if name in values]
        if is_transformers(self.model) and "use_cache" in self.parameters:
            more = {"use_cache": False, **more}
        if is_transformers(self.model) and "return_dict" in self.parameters:
            more = {"return_dict": True, **more}
        torch.default_generator.manual_seed(seed)
        with warnings.catch_warnings(), torch.no_grad(), lifted(self.lifts):
            warnings.simplefilter("ignore")  # from the checked code
            if self.call is not None:
                return self.call(self.model, *args, **values, **more)
            return self.model(*args, **values, **more)

    def _prepare(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return value.to(self.dtype, copy=True) if value.is_floating_point() else value.clone()

    def run(self, inputs: ModelInputs, seed: int = 0, **more: Any) -> Tensor:
        """Return the main output of a call, in float64."""
        out = main_output(self.call_with(inputs, seed, **more), inputs).double()
        return out.diagonal().movedim(-1, 0)[:, None] if self.pairs else out

    def measure_noise(self, inputs: ModelInputs) -> Tensor:
        """Measure how far rounding moves the output; return the output.

        The weights of the copy move by one rounding, up or down at random, and stay so. If two calls differ without
        that, the output depends on earlier calls, and noise is one rounding of the output.
        """
        before, again = self.run(inputs), self.run(inputs)
        generator = torch.Generator().manual_seed(7)
        step = torch.finfo(self.dtype).eps
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dtype == self.dtype:
                    sign = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
                    parameter.mul_(1 + step * sign.to(self.dtype))
        after = self.run(inputs)
        finite = torch.isfinite(before) & torch.isfinite(after) & torch.isfinite(again)
        if bool(finite.any()):
            self.size = float(after[finite].abs().max())
            steady = torch.equal(before[finite], again[finite])
            moved = float((after - before)[finite].abs().max()) if steady else 0.0
            self.noise = max(moved, step * self.size)
        return after


def main_output(result: Any, inputs: ModelInputs) -> Tensor:
    """Return the main output among the results: the logits, the last hidden state, or the first tensor.

    Raises:
        CheckError: there is no tensor with a batch axis.
    """
    for name in ("logits", "last_hidden_state"):
        value = getattr(result, name, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    for tensor in list_tensors(dict(result) if hasattr(result, "keys") else result):
        if tensor.ndim > 0 and tensor.shape[0] == inputs.batch:
            return tensor
    if isinstance(result, Tensor):
        kind = "" if result.is_floating_point() else f" of {str(result.dtype).removeprefix('torch.')}"
        words = f"a tensor {list(result.shape)}{kind}"
    else:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in list_tensors(result))
        words = type(result).__name__ + (f" with {shapes}" if shapes else "")
    missing = f"tensor of real numbers with the batch of {inputs.batch} as its first axis"
    raise CheckError(f"model: the output has no {missing}, got {words}")


def relates_entries(subject: ModelSubject, inputs: ModelInputs, out: Tensor) -> bool:
    """Return whether the output of a batch is [B, B, ...], such as similarities of all images with all texts."""
    if out.shape[:2] != (1, 1):
        return False
    with suppress(*CODE_ERRORS):
        return subject.run(join([inputs, vary(inputs, 1)])).shape[:2] == (2, 2)
    return False


def is_aligned(out: Tensor, inputs: ModelInputs) -> bool:
    """Return whether row t of an output [B, T, ...] belongs to token t of the main sequence."""
    return out.ndim > 2 and out.shape[1] == inputs.length


def prepare_model(
    model: nn.Module, inputs: ModelInputs, call: Callable[..., Any] | None, whole: ModelInputs
) -> tuple[ModelSubject, ModelSubject | None]:
    """Copy the model in the first dtype in which it runs and computes the same function, and in its own dtype.

    Code that depends on the dtype may compute something else in float64, such as NaN. The output in the model's own
    dtype decides.

    Args:
        model: the model of the caller.
        inputs: one entry.
        call: the caller's function that calls it, or None.
        whole: all entries, as the caller passed them.

    Returns:
        the copy for most questions, and that in its own dtype; None if that does not run on the CPU.

    Raises:
        CheckError: it runs in no dtype.
    """
    own = _prepare_own(model, inputs, call)
    expected = None if own is None else own.run(inputs)
    reasons: dict[str, str] = {}  # each once, with the first dtype
    fallback: ModelSubject | None = None
    for dtype, lifts in WAYS:
        subject = ModelSubject(copy_model(model, dtype), dtype, call, lifts)
        avoid_kernels(subject.model)
        try:
            out = subject.run(inputs)
        except CODE_ERRORS as error:  # whatever it raises, this dtype does not fit
            reasons.setdefault(describe_error(error), str(dtype).removeprefix("torch."))
            continue
        if own is None or expected is None or _is_same_function(out, expected, own.dtype):
            return subject, own
        fallback = fallback or subject
    if fallback is not None:
        return fallback, own
    words = "; ".join(f"in {dtype}: {reason}" for reason, dtype in reasons.items())
    remedy = "check inputs, or give call=lambda model, **inputs: ..."
    if "decoder_input_ids" in argument_names(model) and not any(name.startswith("decoder") for name in inputs.values):
        remedy = "pass decoder_input_ids or labels in inputs"
    elif _accepts(model, whole, call) and not _accepts(model, inputs, call):
        remedy = f"the call with {whole.describe()} does not: the first axis of each tensor must be the batch"
    raise CheckError(f"model: the call with {inputs.describe()} fails {words}; {remedy}")


def _prepare_own(model: nn.Module, inputs: ModelInputs, call: Callable[..., Any] | None) -> ModelSubject | None:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    subject = ModelSubject(copy_model(model, None), dtype, call)
    for portable in (False, True):
        if portable:
            avoid_kernels(subject.model)
        with suppress(*CODE_ERRORS):
            subject.run(inputs)
            return subject
    return None


def _accepts(model: nn.Module, inputs: ModelInputs, call: Callable[..., Any] | None) -> bool:
    """Return whether a call succeeds, whatever it returns."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    subject = ModelSubject(copy_model(model, None), dtype, call)
    avoid_kernels(subject.model)
    with suppress(*CODE_ERRORS):
        subject.call_with(inputs)
        return True
    return False


def _is_same_function(out: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an output is that of another dtype, up to its rounding: half-way, in orders of magnitude."""
    if out.shape != expected.shape:
        return False
    finite = torch.isfinite(expected)
    if not bool(finite.any()):
        return True
    off = (out - expected)[finite].abs().nan_to_num(float("inf"))
    return float(off.max()) <= torch.finfo(dtype).eps ** 0.5 * float(expected[finite].abs().max())


def list_configs(model: nn.Module) -> list[Any]:
    """Return the configs of a model and of its parts, each once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if config is not None}.values())


def list_ends(model: nn.Module) -> set[int]:
    """Return the tokens that end a text, as the configs of a model name them."""
    ends: set[int] = set()
    for config in list_configs(model):
        value = getattr(config, "eos_token_id", None)
        ends |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return ends


def avoid_kernels(model: Any) -> None:
    """Select implementations of transformers that run on the CPU in any dtype and size."""
    config = getattr(model, "config", None)
    if config is None or not is_transformers(model):
        return
    for part in list_configs(model):
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = "eager"  # that of grouped products does not take float64
    if any(name in str(config._attn_implementation) for name in ("flash", "flex", "paged", "/")):
        model.set_attn_implementation("eager")


@contextmanager
def attention_set_to(model: Any, name: str) -> Generator[None]:
    """Return a context in which a model of transformers attends by this implementation."""
    configs = [config for config in list_configs(model) if hasattr(config, "_attn_implementation")]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
