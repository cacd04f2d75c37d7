"""Options of modules that trace shows, and the check of a whole trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope import MultiHeadAttention, masks, trace
from headscope.positions import NTK, ALiBi, LinearScaling, Llama3, Rotary, T5Buckets, YaRN
from headscope.tracing import Trace
from support.traced_modules import run_rows

E, H = 24, 4  # heads of width 6

OPTIONS: dict[str, dict[str, Any]] = {
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer", "qk_norm_eps": 1e-3},
    "rms of all heads": {"qk_norm": "rms_all", "kv_heads": 2},
    "rotary": {"rotary": Rotary(6)},
    "rotary, interleaved": {"rotary": Rotary(6, base=100.0, pairing="interleaved")},
    "partial rotary": {"rotary": Rotary(4)},
    "partial rotary, interleaved": {"rotary": Rotary(2, pairing="interleaved"), "kv_heads": 1},
    "linear scaling": {"rotary": Rotary(6, scaling=LinearScaling(3.0))},
    "NTK": {"rotary": Rotary(6, scaling=NTK(2.0))},
    "NTK by length": {"rotary": Rotary(6, scaling=NTK(2.0, original_length=3))},
    "YaRN": {"rotary": Rotary(6, scaling=YaRN(4.0, 16))},
    "Llama 3": {"rotary": Rotary(6, scaling=Llama3(original_length=16))},
    "ALiBi": {"position_bias": ALiBi(H)},
    "ALiBi of other slopes": {"position_bias": ALiBi(H, slopes=(0.3, 0.0, 2.0, 0.7))},
    "T5": {"position_bias": T5Buckets(8, 5), "scale": 1.0},
    "T5 of one direction": {"position_bias": T5Buckets(4, 3, bidirectional=False)},
    "gate": {"gate": True},
    "gate without bias": {"gate": True, "bias": False, "v_head_dim": 3},
    "bias_kv": {"bias_kv": True},
    "bias_kv of shared heads": {"bias_kv": True, "kv_heads": 2, "v_head_dim": 3, "softcap": 2.0, "sinks": True},
    "bias_kv and rotary": {"bias_kv": True, "rotary": Rotary(4), "kv_heads": 2},
    "bias_kv and ALiBi": {"bias_kv": True, "position_bias": ALiBi(H)},
    "reproducible": {"reproducible": True, "qk_norm": "rms", "rotary": Rotary(6), "gate": True, "kv_heads": 2},
    "reproducible ALiBi": {"reproducible": True, "position_bias": ALiBi(H)},
    "all": {
        "qk_norm": "layer", "rotary": Rotary(4), "position_bias": T5Buckets(8, 5), "gate": True, "bias_kv": True,
        "kv_heads": 2, "v_head_dim": 5, "softcap": 3.0, "sinks": True, "scale": 0.7,
    },
}  # fmt: skip


def check_trace(module: MultiHeadAttention, x: Tensor, context: Any = None, **call: Any) -> Trace:
    """Every invariant holds, the output is the module's own, and the code computes what the rows show."""
    found = trace(module, x, context, **call)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    options = dict(call)
    mask = options.pop("mask", None)
    if options.pop("causal", False):
        mask = masks.causal() if mask is None else masks.causal() & mask
    with torch.no_grad():
        assert torch.equal(found.output, module(x, context, mask=mask, **options))
    run_rows(found, module, x, context, call)
    return found
