"""Masks as values: state which keys are visible, combine with ``&`` and ``|``.

A mask answers one question, ``allows(b, h, i, j)``: is key ``j`` visible to query ``i`` of head ``h`` in batch entry
``b``? True means *attend*, as in ``scaled_dot_product_attention``; the masks of ``nn.MultiheadAttention`` mean the
opposite.

``plan`` converts any combination to one normal form, so backends do not depend on the classes below.
"""

from headscope.masks._band import UNBOUNDED as UNBOUNDED
from headscope.masks._band import Band, causal, window
from headscope.masks._band import ReversedBand as ReversedBand
from headscope.masks._band import offset_limits as offset_limits
from headscope.masks._base import And as And
from headscope.masks._base import Mask, Plan
from headscope.masks._base import Or as Or
from headscope.masks._check import as_mask as as_mask
from headscope.masks._check import check_mask as check_mask
from headscope.masks._codes import Code as Code
from headscope.masks._codes import RuleKind as RuleKind
from headscope.masks._codes import unknown_code as unknown_code
from headscope.masks._dense import Dense
from headscope.masks._dense import cut as cut
from headscope.masks._documents import Documents
from headscope.masks._documents import packed_documents as packed_documents
from headscope.masks._from_codes import mask_from_codes as mask_from_codes
from headscope.masks._keys import KeyLengths, Prefix
from headscope.masks._parameters import FAR as FAR
from headscope.masks._parameters import describe_wrong_dtype as describe_wrong_dtype

__all__ = ["Band", "Dense", "Documents", "KeyLengths", "Mask", "Plan", "Prefix", "causal", "window"]
