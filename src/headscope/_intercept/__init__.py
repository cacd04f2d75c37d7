"""Interception of the attention calls of a running model, and their description as headscope's own."""

from headscope._intercept.call_positions import placed, standing
from headscope._intercept.edits import Choose, Layout
from headscope._intercept.frames import Frame, Unfollowed, running_frames
from headscope._intercept.intercepted_call import (
    COMPILED,
    Ids,
    InterceptedCall,
    Kind,
    Measured,
    WatchError,
    WatchWarning,
    check_values,
    error_of,
    measure,
)
from headscope._intercept.module_names import (
    Choice,
    children_of,
    describe_modules,
    describe_passes,
    describe_unrecorded,
    enclosing_paths,
    find_compiled,
    find_unobserved,
    fitting_modules,
    is_attention,
    kind_of_call,
    list_modules,
    match_modules,
    model_class,
    select_modules,
    summarize_names,
    unwrapped,
)
from headscope._intercept.origin import LayerOrigin, Part, head_span, layer_origin, origin_of, shared_part
from headscope._intercept.other_layers import describe_other, find_other_layers, find_unreached
from headscope._intercept.patching import close_watch, open_watch
from headscope._intercept.recovered import by_product
from headscope._intercept.transformers import transformers_refusal
from headscope._intercept.transformers_function import register_attention

__all__ = [
    "COMPILED",
    "Choice",
    "Choose",
    "Frame",
    "Ids",
    "InterceptedCall",
    "Kind",
    "LayerOrigin",
    "Layout",
    "Measured",
    "Part",
    "Unfollowed",
    "WatchError",
    "WatchWarning",
    "by_product",
    "check_values",
    "children_of",
    "close_watch",
    "describe_modules",
    "describe_other",
    "describe_passes",
    "describe_unrecorded",
    "enclosing_paths",
    "error_of",
    "find_compiled",
    "find_other_layers",
    "find_unobserved",
    "find_unreached",
    "fitting_modules",
    "head_span",
    "is_attention",
    "kind_of_call",
    "layer_origin",
    "list_modules",
    "match_modules",
    "measure",
    "model_class",
    "open_watch",
    "origin_of",
    "placed",
    "register_attention",
    "running_frames",
    "select_modules",
    "shared_part",
    "standing",
    "summarize_names",
    "transformers_refusal",
    "unwrapped",
]
