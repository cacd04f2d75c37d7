"""Layers that mix tokens without a softmax over keys: what they are, by their class.

They have no attention weights, so a watch lists them and records the other layers. A module counts only if nothing in
it, and nothing around it, was recorded or multiplied a softmax with values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

from torch import nn

from headscope._intercept.module_names import find_unobserved, is_attention, is_within

# the end of a class's name -> what it is; the first match counts. Classes of transformers 5.23, timm 1.0, mamba-ssm and
# flash-linear-attention. Kimi Linear's "LinearAttention" is its attention with a softmax.
_KINDS = [
    (re.compile(pattern), what)
    for pattern, what in (
        (r"(Mamba\d?|Bamba|FalconH1|SSM)(Mixer|Layer)$|^Mamba\d?(Simple)?$|^S4D?$", "a state space"),
        (r"^R(wkv|WKV).*(Attention|TimeMix|Tmix\w*)$", "the time mixing of RWKV, a recurrence"),
        (
            r"Delta(Net|Attention|Rule|Product)$|KimiDelta\w*$|^Glm5NextTextLinearAttention$",
            "a delta rule, a form of linear attention",
        ),
        (r"LightningAttention$", "lightning attention, a linear attention with decay"),
        (r"Retention$", "a retention, a linear attention with decay"),
        (r"(?<!Kimi)Linear(Self)?Att(entio)?n$", "a linear attention"),
        (r"Recurrent(Block|Layer|Unit)$|R[gG]_?L[rR][uU]$|HGRN\d?Attention$", "a gated linear recurrence"),
        (r"[xms]LSTM(Layer|Block|Cell)$", "an xLSTM, a recurrence"),
        (r"FourierTransform$", "a Fourier transform of the tokens"),
        (r"(Short|Long)Conv(olution)?$|^Hyena\w*$", "a convolution over tokens"),
        (r"PoolFormerPooling$", "a pooling of neighbours"),
        (r"PatchTSMixerGatedAttention$", "a gate of features"),
        (r"^(Effective)?S(E|queezeExcite)(Module|Cl)?$|^C?EcaModule$", "a gate of channels"),
        (r"^(Split|SelectiveKernel)Attn$", "a softmax over branches"),
        (r"EfficientAdditiveAttention$", "an additive attention, which weights tokens by themselves"),
        (r"Multi[sS]cale(Deformable)+Attention$", "a deformable attention, which weights sampled places without keys"),
    )
]
NO_SOFTMAX = "no softmax over keys"


def describe_other(module: nn.Module) -> str | None:
    """Return what a module is, if it mixes tokens without a softmax over keys; None = it may attend, or is no mixer.

    Only its class counts: "MambaMixer: a state space, no softmax over keys".
    """
    return _describe_class(type(module).__name__)


@functools.lru_cache(maxsize=1024)
def _describe_class(name: str) -> str | None:
    what = next((what for pattern, what in _KINDS if pattern.search(name)), None)
    return None if what is None else f"{name}: {what}, {NO_SOFTMAX}"


def find_other_layers(
    modules: Mapping[str, nn.Module], ran: Collection[str], attending: Collection[str]
) -> dict[str, str]:
    """Return the outermost modules that ran and mix tokens without a softmax over keys -> what they are.

    Args:
        modules: path -> module.
        ran: the modules that ran.
        attending: modules with an attention call, recorded or not; a module around one is not listed, nor one inside an
            attention layer that has one.
    """
    others: dict[str, str] = {}
    for name in modules:  # in this order an outer module comes first
        what = describe_other(modules[name]) if name in ran else None
        if what is None or any(is_within(name, other) for other in others):
            continue
        if any(is_within(other, name) for other in attending):
            continue
        if not any(is_within(name, other) and is_attention(other, modules[other]) for other in attending):
            others[name] = what
    return others


def find_unreached(
    modules: Mapping[str, nn.Module], ran: Collection[str], observed: Collection[str], unrecorded: Collection[str]
) -> list[str]:
    """Return ``find_unobserved``, without the layers that have no softmax over keys."""
    return find_unobserved(modules, ran, observed, find_other_layers(modules, ran, {*observed, *unrecorded}))
