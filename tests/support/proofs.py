"""Proofs of findings about a whole model in plain torch: a few calls of the model itself, without headscope.

A proof takes a model in eval mode and the arguments of a call, and returns whether the model has the fault. The model
is in float64, or in float32 if it does not run or has no fault in float64. Rows of padding do not count.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Any]
CHANGE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""A change of real outputs is larger; rounding is about 1e-14, or 1e-6."""
SAME = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Outputs that are the same differ by less."""
MASKS = ("attention_mask", "padding_mask")
FEATURES = ("input_values", "input_features", "inputs_embeds")


def output(model: Any, inputs: Inputs, **more: Any) -> Tensor:
    """Return the logits, the last hidden state, or the similarity of each image and its own text, in float64."""
    names = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in names and "use_cache" not in more else {}
    with torch.no_grad():
        torch.manual_seed(0)
        result = model(**{**inputs, **options, **more})
    if isinstance(result, Tensor):
        return result.double()
    if (similarities := getattr(result, "logits_per_image", None)) is not None:
        return similarities.double().diagonal()[:, None]
    first = getattr(result, "logits", None)
    return (first if first is not None else result.last_hidden_state).double()


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters())


def split(inputs: Inputs) -> tuple[str, str]:
    """Return the names of the sequence that is masked, and of its mask."""
    main = next(name for name in ("input_ids", *FEATURES) if name in inputs)
    return main, next((name for name in MASKS if name in inputs), MASKS[0])


def one_entry(inputs: Inputs) -> dict[str, Any]:
    return {name: value[:1] for name, value in inputs.items()}


def padded(inputs: Inputs, fill: float, left: bool) -> tuple[dict[str, Any], int]:
    """Return one entry whose first or last tokens are padding, and how many."""
    main, mask = split(inputs)
    entry = one_entry(inputs)
    x = entry[main].clone()
    count = 3 if main == "input_ids" else x.shape[1] // 3
    hidden = slice(0, count) if left else slice(x.shape[1] - count, None)
    real = torch.ones(x.shape[:2], dtype=torch.long)
    x[:, hidden], real[:, hidden] = fill, 0
    return {**entry, main: x, mask: real}, count


def real_rows(inputs: Inputs, out: Tensor, count: int, left: bool) -> Tensor:
    """Return the rows of real tokens; of an output with other rows, the one that is farthest from the padding."""
    main, _ = split(inputs)
    if out.shape[1] == inputs.get("decoder_input_ids", out[:, :0]).shape[1]:
        return out
    if out.shape[1] == inputs[main].shape[1]:
        return out[:, count:] if left else out[:, :-count]
    return out[:, -1:] if left else out[:, :1]


def measure_leak(model: nn.Module, inputs: Inputs, left: bool) -> float:
    """Return how far other contents of the padding move the rows of real tokens."""
    fills = (7, 44) if split(inputs)[0] == "input_ids" else (0.5, -1.5)
    outs: list[Tensor] = []
    for fill in fills:
        entry, count = padded(inputs, fill, left)
        outs.append(real_rows(inputs, output(model, entry), count, left))
    return float((outs[0] - outs[1]).abs().max())


def padding_leaks(model: nn.Module, inputs: Inputs) -> bool:
    return any(measure_leak(model, inputs, left) > CHANGE[dtype_of(model)] for left in (True, False))


def mask_ignored(model: nn.Module, inputs: Inputs) -> bool:
    """Padding moves real tokens, and a mask of ones gives the same output to the bit."""
    for left in (True, False):
        fill = 7 if split(inputs)[0] == "input_ids" else 0.5
        entry, count = padded(inputs, fill, left)
        _, mask = split(inputs)
        open_entry = {**entry, mask: torch.ones_like(entry[mask])}
        outs = [real_rows(inputs, output(model, each), count, left) for each in (entry, open_entry)]
        same = float((outs[0] - outs[1]).abs().max()) < SAME[dtype_of(model)]
        if same and measure_leak(model, inputs, left) > CHANGE[dtype_of(model)]:
            return True
    return False


def padding_changes_output(model: nn.Module, inputs: Inputs) -> bool:
    """A text that is padded on the right differs from the text alone; an output without rows counts as a whole."""
    prefix = "decoder_" if "decoder_input_ids" in inputs else ""
    main, mask, count = f"{prefix}input_ids", f"{prefix}attention_mask", 3
    entry = one_entry(inputs)
    short = {**entry, main: entry[main][:, :-count], mask: torch.ones_like(entry[main][:, :-count])}
    ids, real = entry[main].clone(), torch.ones_like(entry[main])
    ids[:, -count:], real[:, -count:] = 0, 0
    alone, whole = output(model, short), output(model, {**entry, main: ids, mask: real})
    whole = whole if whole.shape == alone.shape else whole[:, :-count]
    return float((whole - alone).abs().max()) > CHANGE[dtype_of(model)]


def batch_changes_output(model: nn.Module, inputs: Inputs) -> bool:
    """The first entry alone differs from the same entry in a batch."""
    one, both = output(model, one_entry(inputs)), output(model, inputs)
    return float((one - both[:1]).abs().max()) > CHANGE[dtype_of(model)]


def run_packed(model: nn.Module, inputs: Inputs, border: int, additive: bool, first: int) -> Tensor:
    """Return the output of the second half, under a causal mask of pairs that separates documents at a border."""
    entry = one_entry(inputs)
    ids = entry.pop("input_ids").clone()
    entry.pop("attention_mask", None)
    length = ids.shape[1]
    half = length // 2
    ids[:, :half] = first
    document = torch.arange(length) >= border
    visible = (document[:, None] == document) & torch.ones(length, length, dtype=torch.bool).tril()
    numbers = torch.zeros(length, length, dtype=dtype_of(model))
    mask = numbers.masked_fill(~visible, torch.finfo(numbers.dtype).min) if additive else visible
    return output(model, {**entry, "input_ids": ids, "attention_mask": mask[None, None]})[:, half:]


def documents_mixed(model: nn.Module, inputs: Inputs) -> bool:
    """In each form of a mask that is accepted, the first document moves the second."""
    half = inputs["input_ids"].shape[1] // 2
    leaks: list[float] = []
    for additive in (True, False):
        try:
            one, other = (run_packed(model, inputs, half, additive, first) for first in (7, 44))
        except Exception:
            continue
        if one.isfinite().all():
            leaks.append(float((one - other).abs().max()))
    return bool(leaks) and min(leaks) > CHANGE[dtype_of(model)]


def mask_4d_ignored(model: nn.Module, inputs: Inputs) -> bool:
    """The first document moves the second, and a mask of one document gives the same output."""
    half = inputs["input_ids"].shape[1] // 2
    apart, joint = (run_packed(model, inputs, border, False, 7) for border in (half, 0))
    return documents_mixed(model, inputs) and float((apart - joint).abs().max()) < SAME[dtype_of(model)]


def read_in_parts(model: Any, inputs: Inputs, borders: list[int]) -> float:
    """Return how far the output read with a cache in parts is from that of the whole."""
    entry = one_entry(inputs)
    entry.pop("attention_mask", None)
    main = "decoder_input_ids" if "decoder_input_ids" in entry else "input_ids"
    names = inspect.signature(model.forward).parameters
    cache = "cache_params" if "cache_params" in names else "past_key_values"
    whole, ids, state = output(model, entry), entry[main], None
    parts: list[Tensor] = []
    for start, stop in pairwise(borders):
        more = {} if state is None else {cache: state}
        with torch.no_grad():
            result = model(**{**entry, main: ids[:, start:stop]}, use_cache=True, **more)
        state = getattr(result, cache)
        parts.append(result.logits.double())
    return float((torch.cat(parts, 1) - whole).abs().nan_to_num(1e9).max())


def decoding_differs(model: nn.Module, inputs: Inputs) -> bool:
    main = inputs.get("decoder_input_ids", inputs["input_ids"])
    return read_in_parts(model, inputs, [0, *range(6, main.shape[1] + 1)]) > 1e-3


def chunked_prefill_differs(model: nn.Module, inputs: Inputs) -> bool:
    return read_in_parts(model, inputs, [0, 4, inputs["input_ids"].shape[1]]) > 1e-3


def implementations_differ(model: Any, inputs: Inputs) -> bool:
    """The eager implementation and sdpa differ, without any padding: without a mask, or with one of ones."""
    ones = torch.ones(inputs["input_ids"].shape, dtype=torch.long) if "input_ids" in inputs else None
    outs: list[list[Tensor]] = []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        calls = [inputs] if ones is None else [inputs, {**inputs, "attention_mask": ones}]
        outs.append([output(model, call) for call in calls])
    return any(not float((a - b).abs().max()) < 1e-3 for a, b in zip(*outs, strict=True))  # also true of NaN


def random_in_eval(model: nn.Module, inputs: Inputs) -> bool:
    outs: list[Tensor] = []
    with torch.no_grad():
        for seed in (0, 1):
            torch.manual_seed(seed)
            outs.append(model(**inputs).last_hidden_state)
    return not model.training and (outs[0].shape != outs[1].shape or not torch.equal(*outs))


def weights_discarded(model: nn.Module, inputs: Inputs) -> bool:
    """Weights are returned, and the output is the same if they are NaN."""
    returned: list[Tensor] = []

    def spoil(module: nn.Module, args: Any, result: Any) -> Any:
        returned.append(result[1])
        return result[0], torch.full_like(result[1], torch.nan)

    before = model(**inputs)
    layers = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    handles = [layer.register_forward_hook(spoil) for layer in layers]
    after = model(**inputs)
    for handle in handles:
        handle.remove()
    return bool(returned) and all(torch.equal(before[name], after[name]) for name in before)


def fp16_overflow(model: nn.Module, inputs: Inputs) -> bool:
    """The padded call is finite in float64, and not in float16."""
    entry, _ = padded(inputs, 7, left=True)
    finite = output(model, entry).isfinite().all()
    return bool(finite) and not bool(output(model.half(), entry).isfinite().all())


PROOFS: dict[str, Callable[[Any, Inputs], bool]] = {
    "padding-leaks": padding_leaks,
    "mask-ignored": mask_ignored,
    "padding-changes-output": padding_changes_output,
    "batch-changes-output": batch_changes_output,
    "documents-mixed": documents_mixed,
    "mask-4d-ignored": mask_4d_ignored,
    "decoding-differs": decoding_differs,
    "chunked-prefill-differs": chunked_prefill_differs,
    "implementations-differ": implementations_differ,
    "random-in-eval": random_in_eval,
    "weights-discarded": weights_discarded,
    "fp16-overflow": fp16_overflow,
}


def prove(name: str, model: nn.Module, inputs: Inputs) -> bool:
    """Return whether a model has the fault of a finding, by calls of the model alone."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # that of grouped products does not take float64
    own = copy.deepcopy(model)
    with suppress(RuntimeError):
        numbers = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        if PROOFS[name](model.double().eval(), numbers):
            return True
    return PROOFS[name](own.eval(), inputs)
