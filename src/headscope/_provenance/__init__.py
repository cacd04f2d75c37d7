"""Which numbers of a forward pass come from which, through products, softmax and elementwise operations."""

from headscope._provenance.definition import attend_by_definition
from headscope._provenance.mode import ProvenanceMode
from headscope._provenance.record import HEADS, INPUT, MIXED, NONE, SUMMED, Mixing, Operands, Provenance

__all__ = [
    "HEADS",
    "INPUT",
    "MIXED",
    "NONE",
    "SUMMED",
    "Mixing",
    "Operands",
    "Provenance",
    "ProvenanceMode",
    "attend_by_definition",
]
