"""Which numbers of a forward pass come from which, through products, softmax and elementwise operations."""

from headscope._provenance.definition import FUSED_ATTENTION, define_fused_attention
from headscope._provenance.mode import ProvenanceMode
from headscope._provenance.record import HEADS, INPUT, MIXED, NONE, SUMMED, Mixing, Operands, Provenance

__all__ = [
    "FUSED_ATTENTION",
    "HEADS",
    "INPUT",
    "MIXED",
    "NONE",
    "SUMMED",
    "Mixing",
    "Operands",
    "Provenance",
    "ProvenanceMode",
    "define_fused_attention",
]
