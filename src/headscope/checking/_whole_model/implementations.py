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
    wanted = ["eager", "sdpa", "headscope", *([FLEX] if case.options.flex else [])]
    reference = _outputs(case)
    agreed = [own]
    for name in wanted:
        if name == own:
            continue
        try:
            with attention_set_to(model, name):
                outputs = _outputs(case)
        except CODE_ERRORS as error:
            case.not_tested[f"{QUESTION}, {name}"] = describe_error(error)
            continue
        for what, expected in reference.items():
            off = case.gap(expected, outputs[what])
            if off > case.subject.tolerance:
                case.report("implementations-differ", f"{what}, {name} and {own} differ {case.measured(off)}")
                break
        else:
            agreed.append(name)
    if len(agreed) > 1:
        case.understood.append(f"attention implementations that agree: {', '.join(agreed)}")


def _outputs(case: ModelCase) -> dict[str, Tensor]:
    """Return the outputs of real tokens, without padding and with padding on each side."""
    outputs = {"without padding": case.subject.run(case.entry)}
    for text in list_padded(case):
        padding = pick_fills(case, text.group)[2]
        outputs[text.side] = text.real(case.subject.run(text.batch(padding)))
    return outputs
