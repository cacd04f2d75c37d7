"""Interventions on heads: scale or ablate them in any model, and measure how much a loss depends on each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope._intercept import (
    Choice,
    Choose,
    Frame,
    InterceptedCall,
    Layout,
    ModuleTree,
    Part,
    Unfollowed,
    WatchError,
    WatchWarning,
    close_watch,
    describe_modules,
    describe_unrecorded,
    find_compiled,
    find_unreached,
    fitting_modules,
    head_span,
    match_modules,
    open_watch,
    select_modules,
    shared_part,
    summarize_names,
    transformers_refusal,
    tree_of,
)
from headscope._support.arguments import as_whole, check_type, kind, number

__all__ = ["Ablation", "ablate", "head_importance"]

Heads = int | Collection[int] | Literal["all"]
Loss = Callable[[Any], Tensor]


def ablate(model: nn.Module, heads: Mapping[str, Heads], scale: float = 0.0) -> Ablation:
    """Multiply the outputs of single heads: ``with headscope.ablate(model, {"h.3.attn": [0, 7]}): model(**inputs)``.

    ``scale`` multiplies the output of a head before the output projection: 0 has the same effect as setting that head's
    slice of the projection to zero. No parameter changes, and after the block the model is as before. It reaches the
    modules that ``watch`` records (docs/guides/ablate.md). Blocks nest; their scales multiply. Where gradients are
    expected, call ``backward`` within the block.

    Args:
        model: any module, not compiled.
        heads: module path or pattern, which includes all modules inside ("h.3", "decoder.*.self_attn") -> a head,
            heads, or "all"; numbered from 0. Under tensor parallelism heads are numbered over the whole model: pass the
            same heads in every process.
        scale: 0 removes a head, 1 leaves it as it is; any finite number.

    Raises:
        TypeError, ValueError: an argument that does not fit; a pattern that does not match any module.
        WatchError: the model is compiled; later, a layer that lacks such a head, cannot be reached, or shares its heads
            with other processes in an unknown way.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, ablate
        >>> model = MultiHeadAttention(8, 2)
        >>> with ablate(model, {"MultiHeadAttention": "all"}):
        ...     output = model(torch.randn(1, 4, 8))
        >>> bool(output.any())
        False
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_type("heads", heads, Mapping, "a mapping of module paths to heads")
    if not heads:
        raise ValueError("heads: got none, expected at least one layer")
    scale = number("scale", scale)
    if not abs(scale) < float("inf"):
        raise ValueError(f"scale: got {scale}, expected a finite number")
    tree = tree_of(model)
    chosen: dict[str, set[int] | None] = {}
    patterns: dict[str, list[str]] = {}
    for pattern, which in heads.items():
        patterns[pattern] = match_modules(tree.named, pattern, "heads")
        numbers = _numbers(pattern, which)
        for name in patterns[pattern]:
            before = chosen.get(name, set[int]())
            chosen[name] = None if numbers is None or before is None else before | numbers
    return Ablation(tree, chosen, patterns, float(scale))


def _numbers(layer: str, heads: Heads) -> set[int] | None:
    """Return the numbers of the specified heads; None = all."""
    if heads == "all":
        return None
    one = as_whole(heads)
    numbered: Any = heads if one is None else [one]
    if not _is_list(numbered):
        raise TypeError(f'heads: got {heads!r} for {layer!r}, expected a number, numbers or "all"')
    if not numbered:
        raise ValueError(f"heads: got none for {layer!r}, expected at least one")
    numbers: set[int] = set()
    for each in numbered:
        head = as_whole(each)
        if head is None:
            raise TypeError(f"heads: got {kind(each)} for {layer!r}, expected whole numbers")
        if head < 0:
            raise ValueError(f"heads: got {head} for {layer!r}, expected numbers from 0")
        numbers.add(head)
    return numbers


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bool))


class _Acting:
    """A context that multiplies heads while it is open, and records which layers it has reached."""

    again = True
    plain: Collection[str] = ()

    def __init__(self, tree: ModuleTree, choose: Choose) -> None:
        self.modules = tree.named
        self.layout = Layout(tree, choose, "heads")
        self.reached: dict[str, int] = {}  # layer -> its heads
        self._warned: set[str] = set()

    def open(self) -> None:
        if compiled := find_compiled(self.modules):
            raise WatchError(
                "heads: the model, or a part of it, is compiled, so its heads cannot be reached; run it without "
                f"torch.compile or torch.jit; compiled: {', '.join(compiled[:8])}"
            )
        if refusal := transformers_refusal(self.modules):
            raise WatchError(refusal.replace("watch:", "heads:", 1))
        open_watch(self, self.modules)

    def close(self) -> None:
        close_watch(self, self.modules)

    def begin(self) -> _Pass:
        """Start a forward pass.

        Raises:
            WatchError: selected attention layers were replaced or added since the block was opened.
        """
        self.layout.check()
        return _Pass(self)

    def end(self, forward: _Pass, *, finished: bool) -> None:
        """End a forward pass.

        Raises:
            WatchError: a selected attention layer ran in it and was not reached.
        """
        if not finished:
            return
        missing = find_unreached(self.modules, forward.ran, forward.observed, forward.unrecorded)
        missing = [name for name in missing if self.means(name)]
        texts = describe_unrecorded(self.modules, forward.unrecorded, forward.observed, missing)
        for name, text in texts.items():
            if self.means(name) and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"heads: {text}, whose heads cannot be reached", WatchWarning, stacklevel=2)
        if missing:
            raise WatchError(
                f"heads: {len(missing)} of the attention layers that ran could not be reached: "
                f"{describe_modules(self.modules, missing)}. They do not call scaled_dot_product_attention or "
                "another function that headscope recognises"
            )

    def means(self, name: str) -> bool:
        """Return whether a layer is selected."""
        raise NotImplementedError

    def factors(self, name: str, heads: int, part: Part | None) -> Tensor | None:
        """Return the factors of a layer's heads.

        Args:
            name: the layer.
            heads: the number of its heads in this process.
            part: which heads of the whole model these are; None = all.
        """
        raise NotImplementedError


class _Pass(Unfollowed):
    """One forward pass: which modules ran in it, and which of them attended."""

    active = True

    def __init__(self, acting: _Acting) -> None:
        self.acting = acting
        self.ran: dict[str, None] = {}
        self.observed: set[str] = set()
        self.unrecorded: dict[str, str | None] = {}

    def note_unrecorded(self, name: str, operator: str | None) -> None:
        """Note that a module attends by an operator, or perhaps by a softmax of its own (None)."""
        self.unrecorded[name] = self.unrecorded.get(name) or operator

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module starts to run."""
        self.ran[name] = None

    def see(self, frame: Frame, name: str, make: Callable[[], InterceptedCall]) -> None:
        """Note that a module has made its attention call."""
        self.observed.add(name)
        self.acting.layout.attended.add(name)

    def factors(self, name: str, heads: int, widths: tuple[int, int]) -> Tensor | None:
        """Return the factors of a module's heads."""
        if not self.acting.means(name):
            return None
        before = self.acting.reached.setdefault(name, heads)
        if before != heads:
            raise WatchError(
                f"heads: layer {name} attends with {heads} heads and, in another call, with {before}, so head "
                "numbers are ambiguous"
            )
        return self.acting.factors(name, heads, shared_part(self.acting.modules, name, heads, widths))


class Ablation(_Acting):
    """The context that ``ablate`` returns; it can be entered once.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, ablate
        >>> model = MultiHeadAttention(8, 2)
        >>> with ablate(model, {"MultiHeadAttention": 0}) as ablation:
        ...     output = model(torch.randn(1, 4, 8))
        >>> ablation.reached  # layer -> its heads
        {'MultiHeadAttention': 2}
    """

    def __init__(
        self, tree: ModuleTree, chosen: Mapping[str, set[int] | None], patterns: Mapping[str, list[str]], scale: float
    ) -> None:
        super().__init__(tree, lambda now: fitting_modules(now, patterns))
        self._chosen = chosen
        self._patterns = patterns
        self._scale = scale
        self._entered = False
        self._factors: dict[str, Tensor] = {}

    def __enter__(self) -> Ablation:
        if self._entered:
            raise WatchError("ablate: was already used; create a new one")
        self.open()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            return
        self.layout.check(last=True)
        for pattern, names in self._patterns.items():
            if not any(name in self.reached for name in names):
                raise WatchError(
                    f"ablate: {pattern!r}: no attention call of it was observed inside the `with` block; nothing was "
                    "changed. Attention that a module computes itself, as products and a softmax, cannot be reached"
                )

    def means(self, name: str) -> bool:
        """Return whether a layer has heads to scale."""
        return name in self._chosen

    def factors(self, name: str, heads: int, part: Part | None) -> Tensor | None:
        """Return ``scale`` for the selected heads, 1 for the others."""
        if name not in self._factors:
            here = self._named(name, heads, part)
            with torch.inference_mode(False):  # it outlives this pass: a later one may require gradients
                factors = torch.ones(heads, dtype=torch.float64, device="cpu")
                factors[here] = self._scale
            self._factors[name] = factors
        return self._factors[name]

    def _named(self, name: str, heads: int, part: Part | None) -> list[int]:
        """Return which heads in this process are selected, counted from the first one here."""
        numbers = self._chosen[name]
        if numbers is None:
            return list(range(heads))
        first, total = head_span(name, heads, part)
        beyond = [number for number in sorted(numbers) if number >= total]
        if beyond:
            raise WatchError(f"ablate: layer {name} has no head {beyond[0]}, expected numbers from 0 to {total - 1}")
        return [head for head in range(heads) if first + head in numbers]


# ---------------------------------------------------------------- importance


def head_importance(
    model: nn.Module, loss_fn: Loss, *, method: Literal["gradient", "ablation"] = "gradient",
    layers: Choice | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Measure how much a loss depends on each head: layer -> [H], float64, in the order of the model.

    "gradient": |d loss / d scale| at scale 1, where scale multiplies the head's output; one backward pass for each
    loss. "ablation": the loss with the head at scale 0 minus the unchanged loss: above 0, the head helps; one forward
    pass for each head. Under tensor parallelism "ablation" returns the values of all heads in every process, if each
    calls it; "gradient" is an error there.

    Args:
        model: any module that ``watch`` can record, not compiled. Its parameters and ``.grad`` do not change; it runs
            in its present mode, in training with dropout.
        loss_fn: runs the model and returns its loss: one number, or one for each example, [N]. Then "gradient" is the
            mean of |d loss_n / d scale|, as in the paper, and "ablation" that of the losses.
        method: see above.
        layers: names or patterns, or a function of name and module, as for ``watch``; by default all attention layers.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a loss without a gradient.
        WatchError: a layer that cannot be reached, or no attention call at all; other processes hold heads of a layer,
            and their numbers are unknown or gradients must reach them.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", equation 2 and section 3.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, head_importance
        >>> model, x = MultiHeadAttention(8, 2), torch.randn(1, 4, 8)
        >>> importance = head_importance(model, lambda model: model(x).square().mean())
        >>> importance["MultiHeadAttention"].shape
        torch.Size([2])
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    if method not in ("gradient", "ablation"):
        raise ValueError(f'method: got {method!r}, expected "gradient" or "ablation"')
    tree = tree_of(model)
    gauge = _Gauge(tree, partial(select_modules, layers=layers), learn=method == "gradient")
    gauge.open()
    try:
        importance = (
            _by_gradient(model, loss_fn, gauge) if method == "gradient" else _by_ablation(model, loss_fn, gauge)
        )
        gauge.layout.check(last=True)
    finally:
        gauge.close()
    return {name: importance[name] for name in tree.named if name in importance}


class _Gauge(_Acting):
    """Factors of 1 that gradients reach, or that can be set."""

    def __init__(self, tree: ModuleTree, choose: Choose, *, learn: bool) -> None:
        super().__init__(tree, choose)
        self.chosen = choose(tree.named)
        self.learn = learn
        self.scales: dict[str, Tensor] = {}
        self.without_gradients: set[str] = set()  # layers that ran while gradients were disabled

    def means(self, name: str) -> bool:
        """Return whether a layer was chosen."""
        return name in self.chosen

    def factors(self, name: str, heads: int, part: Part | None) -> Tensor | None:
        """Return the factors of the layer's heads in this process."""
        first, total = head_span(name, heads, part)
        if self.learn and total > heads:
            raise WatchError(
                f"head_importance: layer {name} holds {part}; the other heads are in other processes, which "
                'gradients of this one do not reach; use method="ablation", or run the whole model in one process'
            )
        if not torch.is_grad_enabled():
            self.without_gradients.add(name)
        if name not in self.scales:
            with torch.inference_mode(False):
                factors = torch.ones(total, dtype=torch.float64, device="cpu", requires_grad=self.learn)
            self.scales[name] = factors
        return self.scales[name][first : first + heads]


@torch.inference_mode(False)  # enable_grad does not end inference mode
@torch.enable_grad()
def _by_gradient(model: nn.Module, loss_fn: Loss, gauge: _Gauge) -> dict[str, Tensor]:
    losses = _losses(loss_fn(model), gauge)
    names, scales = list(gauge.scales), list(gauge.scales.values())
    if not losses.requires_grad:
        if gauge.without_gradients:
            raise _missing_gradients(names)
        raise ValueError("loss_fn: its loss has no gradient; the model ran under torch.no_grad(), or it was detached")
    importance: dict[str, Tensor] = {}
    for n, loss in enumerate(losses):
        try:
            grads: Any = torch.autograd.grad(loss, scales, retain_graph=n + 1 < len(losses), allow_unused=True)
        except RuntimeError as error:  # torch's, which names no layer
            if gauge.without_gradients:
                raise _missing_gradients(sorted(gauge.without_gradients)) from error
            raise
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                importance[name] = importance.get(name, 0.0) + grad.abs() / len(losses)
    lost = [name for name in names if name not in importance]
    if disabled := [name for name in lost if name in gauge.without_gradients]:
        raise _missing_gradients(disabled)
    if lost:
        raise ValueError(
            f"loss_fn: its loss does not depend on the heads of {', '.join(lost)}: their output is not used; "
            "exclude them with layers="
        )
    return importance


def _missing_gradients(layers: list[str]) -> ValueError:
    return ValueError(
        f"loss_fn: no gradient reaches the heads of {', '.join(layers)}: they ran under torch.no_grad(), or in "
        "activation checkpointing with use_reentrant=True, which disables gradients; pass use_reentrant=False to "
        'the checkpoint, exclude the layers with layers=, or use method="ablation"'
    )


@torch.no_grad()
def _by_ablation(model: nn.Module, loss_fn: Loss, gauge: _Gauge) -> dict[str, Tensor]:
    whole = _losses(loss_fn(model), gauge).double().mean()
    importance: dict[str, Tensor] = {}
    while waiting := [name for name in gauge.scales if name not in importance]:  # a layer may first run in a later pass
        for name in waiting:
            scale = gauge.scales[name]
            importance[name] = torch.zeros_like(scale)
            for head in range(len(scale)):
                scale[head] = 0.0
                importance[name][head] = _losses(loss_fn(model), gauge).double().mean() - whole
                scale[head] = 1.0
    return importance


def _losses(loss: object, gauge: _Gauge) -> Tensor:
    """Return one or several losses as a tensor [N]."""
    if not isinstance(loss, Tensor) or not loss.dtype.is_floating_point:
        raise TypeError(f"loss_fn: returned {kind(loss)}, expected a floating tensor")
    if loss.ndim > 1 or loss.numel() == 0:
        raise ValueError(
            f"loss_fn: returned a tensor {list(loss.shape)}, expected one number, or one for each example [N]"
        )
    if not gauge.scales:
        names = summarize_names(gauge.modules)
        raise WatchError(
            f"head_importance: no attention call was observed while loss_fn ran; the model's modules: {names}"
        )
    return loss.reshape(-1)
