"""Decisions from observed attention: which heads can be streamed, what a smaller cache retains, which heads repeat.

Each function takes ``HeadStats``, or a recording that holds them, and returns a small result with its basis and
its caveat. docs/guides/decide.md defines every number, with its traps.
"""

from headscope._analysis.answers import Basis
from headscope.decisions._kv_budget import HeadBudget, KVBudget, kv_budget
from headscope.decisions._near_duplicates import HeadPair, NearDuplicates, near_duplicates
from headscope.decisions._patterns import Patterns, PatternScore, patterns
from headscope.decisions._streaming import StreamingHead, StreamingHeads, streaming_heads

__all__ = [
    "Basis",
    "HeadBudget",
    "HeadPair",
    "KVBudget",
    "NearDuplicates",
    "PatternScore",
    "Patterns",
    "StreamingHead",
    "StreamingHeads",
    "kv_budget",
    "near_duplicates",
    "patterns",
    "streaming_heads",
]
