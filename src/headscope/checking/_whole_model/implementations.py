"""The question whether implementations of attention agree: eager, sdpa, headscope, and flex where it is requested."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headscope._intercept import register_attention
from headscope.checking._copies import CODE_ERRORS, describe_error
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.inputs import is_transformers
from headscope.checking._whole_model.padding import list_padded, pick_fills
from headscope.checking._whole_model.subject import attention_set_to

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
    reference = _outputs(case)
    agreed, same_bits = [own], True
    for name in ("eager", "sdpa", "headscope", *([FLEX] if case.options.flex else [])):
        if name == own:
            continue
        refused = "sdpa" if name != "eager" and _is_refused(case, "sdpa") else ""
        try:
            with attention_set_to(model, name):
                outputs = _outputs(case)
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


def _outputs(case: ModelCase) -> dict[str, Tensor]:
    """Return the outputs of real tokens, without padding and with padding on each side."""
    outputs = {"without padding": case.subject.run(case.entry)}
    for text in list_padded(case):
        padding = pick_fills(case, text.group)[2]
        outputs[text.side] = text.real(case.subject.run(text.batch(padding)))
    return outputs
