"""watch: exact statistics of every attention head of a running model, with unchanged outputs."""

from headscope._intercept import WatchError, WatchWarning
from headscope.stats._origin import Origin, Part
from headscope.watching._about import About
from headscope.watching._compiled import CompiledWatch, watch_compiled
from headscope.watching._history import History
from headscope.watching._monitor import Alarm, AttentionWarning, Limits
from headscope.watching._recording import Recording
from headscope.watching._register import register_transformers
from headscope.watching._steps import StepWatch as StepWatch
from headscope.watching._steps import watch_steps as watch_steps
from headscope.watching._verify import Verified
from headscope.watching._watch import Watch, watch

__all__ = [
    "About",
    "Alarm",
    "AttentionWarning",
    "CompiledWatch",
    "History",
    "Limits",
    "Origin",
    "Part",
    "Recording",
    "Verified",
    "Watch",
    "WatchError",
    "WatchWarning",
    "register_transformers",
    "watch",
    "watch_compiled",
]
