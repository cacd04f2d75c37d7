"""Statistics of attention: the options, the results, and how they merge."""

from headscope.stats._clear import CLEAR_SCORE, CLEAR_Z
from headscope.stats._clear import PARTLY as PARTLY
from headscope.stats._clear import WHOLE_SCORE as WHOLE_SCORE
from headscope.stats._clear import Scored as Scored
from headscope.stats._clear import deed_in_words as deed_in_words
from headscope.stats._clear import is_name as is_name
from headscope.stats._clear import is_part as is_part
from headscope.stats._clear import is_second_name as is_second_name
from headscope.stats._clear import join_names as join_names
from headscope.stats._clear import name_in_words as name_in_words
from headscope.stats._clear import second_name as second_name
from headscope.stats._dense import (
    LOCAL_REACH,
    MINIMUM_ROWS,
    PATTERNS,
    Match,
    PatternScores,
    best_matches,
    pattern_scores,
    row_statistics,
)
from headscope.stats._dense import second_matches as second_matches
from headscope.stats._differentiable import DIFFERENTIABLE, DifferentiableStats
from headscope.stats._gathering import Gathering as Gathering
from headscope.stats._gathering import check_equal as check_equal
from headscope.stats._gathering import check_statistics as check_statistics
from headscope.stats._gathering import describe_statistics as describe_statistics
from headscope.stats._gathering import join_statistics as join_statistics
from headscope.stats._head_means import HeadMeans, broken_rows, head_means
from headscope.stats._head_stats import HeadStats
from headscope.stats._head_weights import HeadWeights
from headscope.stats._history_file import StoredAlarm as StoredAlarm
from headscope.stats._history_file import StoredHistory as StoredHistory
from headscope.stats._history_file import check_history_target as check_history_target
from headscope.stats._history_file import is_history as is_history
from headscope.stats._history_file import load_history as load_history
from headscope.stats._history_file import save_history as save_history
from headscope.stats._layer import Edge, Edges, HeadMap, Kept
from headscope.stats._layer import LayerStats as LayerStats
from headscope.stats._merge import merge
from headscope.stats._nulls import Null
from headscope.stats._options import Observe
from headscope.stats._origin import Origin as Origin
from headscope.stats._quantities import ROW_QUANTITIES, Quantity, histogram_edges, quantity_names, quantity_of
from headscope.stats._row_sums import RowSums as RowSums
from headscope.stats._segment_mass import SegmentMass
from headscope.stats._segments import Segments
from headscope.stats._summaries import Column, Summary

__all__ = [
    "CLEAR_SCORE",
    "CLEAR_Z",
    "DIFFERENTIABLE",
    "LOCAL_REACH",
    "MINIMUM_ROWS",
    "PATTERNS",
    "ROW_QUANTITIES",
    "Column",
    "DifferentiableStats",
    "Edge",
    "Edges",
    "HeadMap",
    "HeadMeans",
    "HeadStats",
    "HeadWeights",
    "Kept",
    "Match",
    "Null",
    "Observe",
    "PatternScores",
    "Quantity",
    "SegmentMass",
    "Segments",
    "Summary",
    "best_matches",
    "broken_rows",
    "head_means",
    "histogram_edges",
    "merge",
    "pattern_scores",
    "quantity_names",
    "quantity_of",
    "row_statistics",
]
