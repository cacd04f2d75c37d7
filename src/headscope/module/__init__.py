"""MultiHeadAttention: the projections around ``attention``."""

from headscope.module._bias_kv import add_own_value as add_own_value
from headscope.module._bias_kv import own_share as own_share
from headscope.module._inputs import check_place as check_place
from headscope.module._local_heads import check_not_split as check_not_split
from headscope.module._local_heads import check_splits_evenly as check_splits_evenly
from headscope.module._multi_head import MultiHeadAttention
from headscope.module._options import QKNorm as QKNorm
from headscope.module._options import gate_of as gate_of
from headscope.module._options import whole_sizes as whole_sizes
from headscope.module._placement import Placement as Placement
from headscope.module._state import write_packed as write_packed

__all__ = ["MultiHeadAttention"]
