"""The question whether implementations of attention agree: eager, sdpa, headscope, and flex where it is requested."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headscope._intercept import register_attention
from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.inputs import is_transformers
from headscope.checking._whole_model.padding import list_padded, pick_fills
from headscope.checking._whole_model.subject import ModelSubject, attention_set_to

QUESTION = "implementations"
FLEX = "flex_attention"


def ask_implementations(case: ModelCase) -> None:
    """Ask whether the implementations compute the same function, with and without padding."""
    model: Any = case.subject.model
    if case.unusable or not is_transformers(model) or not hasattr(model, "set_attn_implementation"):
        case.not_tested[QUESTION] = case.unusable or "the model has no set_attn_implementation()"
        return
    register_attention()
    own = str(model.config._attn_implementation)
    reference = _outputs(case, case.subject)
    agreed, same_bits = [own], True
    for name in ("eager", "sdpa", "headscope"):
        if name == own:
            continue
        refused = "sdpa" if name != "eager" and _is_refused(case, "sdpa") else ""
        try:
            with attention_set_to(model, name):
                outputs = _outputs(case, case.subject)
        except CODE_ERRORS as error:
            case.not_tested[f"{QUESTION}, {name}"] = describe_error(error)
            continue
        gaps = {what: case.gap(expected, outputs[what]) for what, expected in reference.items()}
        same_bits &= not any(gaps.values())
        what, off = max(gaps.items(), key=lambda pair: pair[1])
        if off <= case.subject.tolerance:
            agreed.append(name)
        elif refused:
            reason = f"the model does not support {refused}, whose masks {name} takes"
            case.not_tested[f"{QUESTION}, {name}"] = f"{what}, it differs from {own} {case.measured(off)}: {reason}"
        else:
            case.report("implementations-differ", f"{what}, {name} and {own} differ {case.measured(off)}")
    if same_bits and len(agreed) > 1:
        case.not_tested[QUESTION] = "set_attn_implementation() changes no bit: the model attends by code of its own"
    elif len(agreed) > 1:
        case.understood.append(f"attention implementations that agree: {', '.join(agreed)}")


def _is_refused(case: ModelCase, name: str) -> bool:
    """Return whether the model does not support an implementation."""
    try:
        with attention_set_to(case.subject.model, name):
            return False
    except CODE_ERRORS:
        return True


def ask_flex(case: ModelCase) -> None:
    """Ask whether compiled flex attention computes the same function, in the model's own dtype.

    Its compiler supports neither float64 nor the lifted casts.
    """
    if not case.options.flex:
        return
    question, subject = f"{QUESTION}, {FLEX}", case.own
    if case.unusable or subject is None or not hasattr(subject.model, "set_attn_implementation"):
        case.not_tested[question] = (
            case.unusable or "the model has no set_attn_implementation(), or no dtype of the CPU"
        )
        return
    subject.measure_noise(case.entry)
    reference = _outputs(case, subject)
    try:
        with attention_set_to(subject.model, FLEX):
            outputs = _outputs(case, subject)
    except CODE_ERRORS as error:
        case.not_tested[question] = describe_error(error)
        return
    gaps = {what: case.gap(expected, outputs[what]) for what, expected in reference.items()}
    what, off = max(gaps.items(), key=lambda pair: pair[1])
    config: Any = subject.model.config
    own = str(config._attn_implementation)
    if off > subject.tolerance:
        words = f"by up to {off:.3g} (outputs up to {subject.size:.3g}; rounding explains {subject.noise:.1g})"
        case.report("implementations-differ", f"{what}, {FLEX} and {own} differ {words}")
    else:
        words = str(subject.dtype).removeprefix("torch.")
        case.understood.append(f"compiled {FLEX} agrees with {own}, in {words}")


def _outputs(case: ModelCase, subject: ModelSubject) -> dict[str, Tensor]:
    """Return the outputs of real tokens, without padding and with padding on each side."""
    outputs = {"without padding": subject.run(case.entry)}
    for text in list_padded(case):
        padding = pick_fills(case, text.group)[2]
        outputs[text.side] = text.real(subject.run(text.batch(padding)))
    return outputs
