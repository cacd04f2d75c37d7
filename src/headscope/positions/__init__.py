"""Positions of tokens: rotary embedding with its scalings, ALiBi, and T5's learned bias by distance.

``MultiHeadAttention(rotary=..., position_bias=...)`` accepts these classes; each also works separately.
"""

from headscope.positions._bias import ALiBi, RelativeBias, T5Buckets, matrix
from headscope.positions._bias import bias_of as bias_of
from headscope.positions._bias import turned_matrix as turned_matrix
from headscope.positions._packed import restarting
from headscope.positions._rotary import Rotary
from headscope.positions._rotary import check_positions as check_positions
from headscope.positions._scaling import NTK, LinearScaling, Llama3, YaRN

__all__ = [
    "NTK",
    "ALiBi",
    "LinearScaling",
    "Llama3",
    "RelativeBias",
    "Rotary",
    "T5Buckets",
    "YaRN",
    "matrix",
    "restarting",
]
