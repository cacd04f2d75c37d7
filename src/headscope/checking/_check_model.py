"""check_model: find what is wrong with a whole model, from outside, by a few forward passes for each question."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from headscope._support.arguments import check_type
from headscope._support.user_line import describe_error
from headscope.checking._arguments import check_options
from headscope.checking._copies import CODE_ERRORS, list_tensors
from headscope.checking._findings import SEVERITIES, Finding, Findings
from headscope.checking._whole_model.batches import ask_batches
from headscope.checking._whole_model.behaviour import ask_causal, ask_finite, ask_random
from headscope.checking._whole_model.caching import ask_cache
from headscope.checking._whole_model.case import ModelCase, ModelOptions
from headscope.checking._whole_model.catalogue import EXPLAINS, MODEL_CATALOGUE
from headscope.checking._whole_model.cost import ask_discarded_weights, ask_half_precision, ask_memory
from headscope.checking._whole_model.documents import ask_documents
from headscope.checking._whole_model.implementations import ask_flex, ask_implementations
from headscope.checking._whole_model.inputs import read_inputs, unwrap, without_padding
from headscope.checking._whole_model.padding import ask_padding
from headscope.checking._whole_model.subject import prepare_model, relates_entries

__all__ = ["check_model"]

QUESTIONS: tuple[Callable[[ModelCase], None], ...] = (
    ask_finite,
    ask_random,
    ask_causal,
    ask_batches,
    ask_padding,
    ask_documents,
    ask_cache,
    ask_implementations,
    ask_flex,
    ask_half_precision,
    ask_discarded_weights,
    ask_memory,
)


def check_model(
    model: nn.Module,
    inputs: Any,
    *,
    causal: bool | None = None,
    length: int | None = None,
    flex: bool = False,
    reproducible: bool = False,
    call: Callable[..., Any] | None = None,
) -> Findings:
    """Find what is wrong with a whole model, from outside: padding, masks, batches, caches, attention kernels, dtypes.

    Each question compares a few forward passes that must agree, such as of a text alone and padded. They run in
    float64 on the CPU, on a copy of the model. Two outputs differ if their difference is larger than the geometric mean
    of the largest output and of what one rounding of each weight changes. The model, its mode, its dtype and the random
    states do not change.

    Args:
        model: a model of transformers, or any ``nn.Module``.
        inputs: the arguments of a call: a dict (``input_ids`` [B, T], ``attention_mask`` [B, T], …), a tensor or a
            tuple. In a dict, the masks over tokens are those with "mask" in their name and two axes, 1 = real; names
            that end in ``key_padding_mask`` mask where they are True. The first axis of each tensor is the batch.
        causal: whether no token may attend to a later one; by default, as the config and layers of a model of
            transformers imply.
        length: the length at which it will be used; from 1,024 on, stored weights of all pairs are reported as slow.
            By default, ``config.max_position_embeddings``.
        flex: whether to compare compiled flex attention, too, which takes minutes.
        reproducible: whether an entry must have the same bits in every batch, which most models do not guarantee.
        call: ``call(model, *args, **kwargs)``, where ``model(*args, **kwargs)`` is not the call, such as
            ``lambda model, x: model(x.transpose(0, 1)).transpose(0, 1)`` for a model of [T, B, E].

    Returns:
        The findings, causes first, and the questions that could not be asked with their reasons.

    Raises:
        TypeError: ``model`` is not a module, or an argument is of another type.
        ValueError: ``inputs`` has no tensor with a batch axis, no real token, or NaN; another argument is impossible.
        CheckError: the model cannot be copied, has no values, or the call fails.

    Examples:
        >>> import torch
        >>> from headscope import check_model
        >>> class Layer(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        ...
        ...     def forward(self, x):
        ...         return x + self.attention(x, x, x)[0]
        >>> findings = check_model(Layer(), torch.randn(2, 5, 8))
        >>> findings.names, findings["weights-discarded"].seen
        (('weights-discarded',), 'attention returns weights [1, 5, 5] that nothing reads: need_weights is True')
    """
    check_type("model", model, nn.Module, "an nn.Module")
    check_options(causal=causal, length=length, flex=flex, reproducible=reproducible, call=call)
    _check_finite(inputs)
    options = ModelOptions(causal, length, flex, reproducible)
    with (
        torch.random.fork_rng(devices=[]),
        _other_random_states(),
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        _use_cpu(),
    ):
        model = unwrap(model)
        whole = read_inputs(model, inputs)
        entry = without_padding(whole)
        subject, own = prepare_model(model, entry, call, whole)
        out = subject.measure_noise(entry)
        if relates_entries(subject, entry, out):
            for each in (subject, own):
                if each is not None:
                    each.pairs = True
        case = ModelCase(model, subject, own, entry, options, out)
        _describe_call(case)
        for question in QUESTIONS:
            _ask(case, question)
    return Findings(type(model).__name__, _sort_findings(case), tuple(case.understood), case.not_tested)


def _check_finite(inputs: Any) -> None:
    """Raise if an input has NaN, or numbers beyond a mask are infinite: the output of any model would be NaN."""
    named = dict(inputs).items() if isinstance(inputs, Mapping) else (("", inputs),)
    for name, value in named:
        for tensor in list_tensors(value):
            limit = "NaN" if "mask" in str(name) or "bias" in str(name) else "NaN or infinity"
            wrong = tensor.isnan() if limit == "NaN" else ~tensor.isfinite()
            if bool(wrong.any()):
                where = f"inputs[{str(name)!r}]" if name else "inputs"
                raise ValueError(f"{where}: got {limit}, expected finite numbers, such as torch.randn(2, 7, 24)")


@contextmanager
def _other_random_states() -> Generator[None]:
    """Return a context after which the random states of Python and numpy are as before: some models use them."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _use_cpu() -> AbstractContextManager[object]:
    """Return a context that puts new tensors on the CPU; without overhead where that is the default device."""
    return nullcontext() if torch.empty(0).is_cpu else torch.device("cpu")


def _describe_call(case: ModelCase) -> None:
    subject = case.subject
    words = str(subject.dtype).removeprefix("torch.")
    case.understood.append(f"called as model{case.entry.describe()}, in {words}")
    if case.entry.packed:
        case.understood.append(
            f"inputs holds a mask over pairs of tokens, {case.entry.packed}; each question passes a mask of its own"
        )
    if subject.pairs:
        case.understood.append(
            "the output relates all entries of a batch, [B, B]; that of each with itself is compared"
        )
    case.understood.append(
        f"outputs up to {subject.size:.3g}; one rounding of each weight moves them by {subject.noise:.1g}; a "
        f"difference above {subject.tolerance:.1g} counts"
    )


def _ask(case: ModelCase, question: Callable[[ModelCase], None]) -> None:
    """Ask a question; record an error of the model and continue."""
    try:
        question(case)
    except CODE_ERRORS as error:  # raised by unknown code
        subject = question.__name__.removeprefix("ask_").replace("_", " ")
        case.not_tested[f"the rest of {subject}"] = describe_error(error)


def _sort_findings(case: ModelCase) -> tuple[Finding, ...]:
    """Return the findings that do not follow from another one, the most severe first."""
    explained = {other for name in case.observations for other in EXPLAINS.get(name, ())}
    names = [name for name in case.observations if name not in explained]
    findings: list[Finding] = []
    for name in sorted(names, key=lambda name: SEVERITIES.index(case.observations[name].severity)):
        observation, entry = case.observations[name], MODEL_CATALOGUE[name]
        condition = entry.condition if observation.severity == "fragile" else ""
        findings.append(
            Finding(name, observation.severity, observation.evidence, entry.why, entry.fix, entry.code, condition)
        )
    return tuple(findings)
