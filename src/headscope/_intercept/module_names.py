"""The modules of a watched model: names, selection, expected observations, kinds."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import jit, nn

from headscope._intercept.dynamo import inside
from headscope._intercept.intercepted_call import InterceptedCall, Kind

Choice = str | Collection[str] | Callable[[str, nn.Module], bool]
Kinds = Mapping[str, Kind]

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SELF = re.compile(r"self_?att(n|ention)", re.IGNORECASE)
# BridgeTower's cross-modal layers hold both kinds
_CROSS = re.compile(r"cross(?!_modal_\w+_layers)|encoder_attn|encdecattention|enc_dec", re.IGNORECASE)
# class and name of modules next to an attention that are named after it: of MobileBERT, ConvBERT, DeepSeek-V4, Inkling
_BESIDE = re.compile(r"^(BottleneckLayer|\w*Conv\dd) |_(hc|hyper_connection|s?conv|convolution)$", re.IGNORECASE)
# the end of a norm's class or name: RMSNormGated, NemotronLayerNorm1P, post_attention_layernorm, norm_1
_NORM = re.compile(r"norm(alization)?(_?(gated|layer|\d+[a-z]?))*$", re.IGNORECASE)


_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Class of a wrapper of torch's -> its attribute with the module inside."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch's wrappers for data parallelism and checkpoints, or the module itself."""
    while type(module).__module__.startswith("torch.") and (name := _WRAPPED.get(type(module).__name__)) is not None:
        inside = children_of(module).get(name)
        if inside is None:
            break
        module = inside
    return module


def model_class(module: nn.Module) -> type[Any]:
    """Return a module's class; ``fully_shard`` gives each module one of torch's own, derived from it."""
    return next(each for each in type(module).__mro__ if not each.__module__.startswith("torch.distributed."))


def list_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return module path -> module, in the order of the model, without torch's own leaves, which do not attend.

    The model itself goes by the name of its class. A module that is shared goes by the first of its paths. A module
    in a wrapper for data parallelism or checkpoints goes by the path of the wrapper, which is left out.
    """
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:  # as ``named_modules``, which is a generator within a generator for each level
        path, wrapped = waiting.pop()
        module = unwrapped(wrapped) if type(wrapped).__name__ in _WRAPPED else wrapped
        if id(module) in seen or (module is not wrapped and path and _is_leaf_of_torch(module)):
            continue
        seen.add(id(module))
        modules[path or model_class(module).__name__] = module
        before = f"{path}." if path else ""
        for name, child in reversed(children_of(module).items()):
            if child is not None and not _is_leaf_of_torch(child):
                waiting.append((before + name, child))
    return modules


def list_compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return ``list_modules`` without the wrappers of ``torch.compile``, under the names that modules have without."""
    wrapped = model
    while (inner := inside(wrapped)) is not None:
        wrapped = inner
    named = ((name.split("."), module) for name, module in list_modules(wrapped).items() if inside(module) is None)
    return {".".join(part for part in path if part != "_orig_mod"): module for path, module in named}


def _is_leaf_of_torch(module: nn.Module) -> bool:
    return _is_of_torch(type(module).__module__) and _is_leaf(module)


@functools.lru_cache(maxsize=1024)
def _is_of_torch(file: str) -> bool:
    return file.startswith("torch.nn.")


def _is_leaf(module: nn.Module) -> bool:
    children = children_of(module)
    return not children or all(child is None for child in children.values())


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own children; None = declared, and not there."""
    return vars(module)["_modules"]


def find_compiled(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of those that are compiled, or TorchScript; ``generate`` stores a compiled call in the model."""
    classes = {kind for kind in {*map(type, modules.values())} if _is_compiled(kind)}
    found: list[str] = []
    for name, module in modules.items():
        own = vars(module).get
        if own("_compiled_call_impl") is not None or own("_compiled_call") is not None or type(module) in classes:
            found.append(name)
    return found


def _is_compiled(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("torch._dynamo") or issubclass(kind, jit.ScriptModule)


def forget_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Drop the calls that ``generate`` compiled meanwhile: they are of the watched call, which cannot be compiled."""
    for module in modules.values():
        vars(module).pop("_compiled_call", None)


def select_modules(modules: Mapping[str, nn.Module], layers: Choice | None) -> frozenset[str]:
    """Return the selected names: by a name or pattern, with all modules inside; or by a predicate.

    Raises:
        TypeError: neither names or patterns nor a function.
        ValueError: the selection is empty; a pattern, or the predicate, does not match any module.
    """
    if layers is None:
        return frozenset(modules)
    if callable(layers):
        _check_predicate(layers)
        names = {name for name, module in modules.items() if layers(name, module)}
        if not names:
            raise ValueError("layers: the predicate does not match any module of the model")
        return frozenset(names)
    patterns = [layers] if isinstance(layers, str) else layers
    if not _are_texts(patterns):
        raise TypeError(f"layers: got {layers!r}, expected names or patterns, or a function of name and module")
    if not patterns:
        raise ValueError("layers: got none, expected at least one; omit layers= for all of them")
    return frozenset(name for pattern in patterns for name in match_modules(modules, pattern, "layers"))


def _check_predicate(function: Callable[..., object]) -> None:
    """Check that a function takes a name and a module.

    Raises:
        TypeError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in one may have none
        return
    try:
        signature.bind("", None)
    except TypeError as error:
        raise TypeError(
            f"layers: got a function with the arguments {signature}, expected one of name and module, such as "
            'lambda name, module: name.endswith("attn")'
        ) from error


def _are_texts(values: object) -> bool:
    return isinstance(values, Collection) and all(isinstance(each, str) for each in values)


def match_modules(modules: Mapping[str, nn.Module], pattern: str, argument: str) -> list[str]:
    """Return the names that a name or pattern matches, with all modules inside.

    Raises:
        TypeError: it is not a string, such as the number of a layer.
        ValueError: it does not match any module.
    """
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{argument}: got {pattern!r}, expected the path of a module or a pattern; the model has "
            f"{summarize_names(modules)}"
        )
    fits = [name for name in modules if any(fnmatchcase(part, pattern) for part in enclosing_paths(name))]
    if not fits:
        paths = dict.fromkeys(path for name in modules for path in enclosing_paths(name))
        near = get_close_matches(pattern, paths, n=1)
        raise ValueError(
            f"{argument}: {pattern!r} does not match any module of the model, which has {summarize_names(modules)}"
            + (f"; the nearest name is {near[0]!r}" if near else "")
        )
    return fits


def fitting_modules(modules: Mapping[str, nn.Module], patterns: Collection[str]) -> set[str]:
    """Return the names that some pattern matches."""
    return {
        name
        for name in modules
        if any(fnmatchcase(part, pattern) for part in enclosing_paths(name) for pattern in patterns)
    }


def enclosing_paths(name: str) -> list[str]:
    """Return a module's path and those of all enclosing modules."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def summarize_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names that contain "attention", or else the first of all."""
    shown = list(names)
    attention = [name for name in shown if _ATTENTION.search(name.rsplit(".", 1)[-1])] or shown
    more = f" and {len(attention) - limit} more" if len(attention) > limit else ""
    return ", ".join(attention[:limit]) + more


def find_unobserved(
    modules: Mapping[str, nn.Module], ran: Collection[str], observed: Collection[str], others: Collection[str]
) -> list[str]:
    """Return the modules named attention that ran without an observed attention call in, of or around them.

    ``others``: layers that are known not to attend, with what is in and around them.
    """
    seen = {path for name in observed for path in enclosing_paths(name)}  # most modules that ran: the cheapest question
    named = [name for name in ran if name not in seen and is_attention(name, modules[name])]
    named = [name for name in named if not any(is_within(name, other) or is_within(other, name) for other in others)]
    missing = [
        name
        for name in named
        if not any(is_within(other, name) for other in observed)
        and not any(is_within(name, other) and is_attention(other, modules[other]) for other in observed)
    ]
    missing = [name for name in missing if not _is_projection(name, modules, ran, missing)]
    return [name for name in missing if not any(is_within(other, name) and other != name for other in missing)]


def describe_unrecorded(
    modules: Mapping[str, nn.Module],
    noted: Mapping[str, str | None],
    observed: Collection[str],
    missing: Collection[str],
    refused: Collection[str] = (),
) -> dict[str, str]:
    """Return the modules whose attention is not all recorded -> a sentence about each, without its end.

    A softmax counts in a module with observed calls; in one named attention also if a module inside it has observed
    calls. A fused operator counts anywhere.

    Args:
        modules: path -> module.
        noted: module -> the fused operator that it attends by; None: it multiplied the result of a softmax with what
            may be values.
        observed: modules with observed calls.
        missing: modules that are reported as errors.
        refused: modules that have written out an attention that cannot be recorded.
    """
    texts: dict[str, str] = {}
    for name, operator in {**dict.fromkeys(refused), **noted}.items():
        inside = any(is_within(other, name) for other in observed)
        if any(is_within(name, other) for other in missing):
            continue
        if operator is not None:
            texts[name] = f"attends {'once more, by' if inside else 'by'} {operator}"
        elif name in observed or name in refused or (inside and is_attention(name, modules[name])):
            texts[name] = "may also attend by a softmax of its own"
    return {name: f"{describe_modules(modules, [name])} {text}" for name, text in texts.items()}


def describe_passes(
    modules: Mapping[str, nn.Module], number: int, idle: Collection[str], unfollowed: Collection[str]
) -> dict[str, str]:
    """Return the modules of which one forward pass may not be recorded -> a sentence about each, without its end.

    Args:
        modules: path -> module.
        number: of the forward pass, from 1.
        idle: modules that have attended before, and did not in this one as far as known.
        unfollowed: modules that did not attend before, and seem to have in this one.
    """
    texts = dict.fromkeys(idle, f"may have attended in forward pass {number} in a way that was not recognised")
    late = f"may have attended in forward pass {number}, where it was not followed because it had not attended before"
    texts |= dict.fromkeys(unfollowed, late)
    return {name: f"{describe_modules(modules, [name])} {text}" for name, text in texts.items()}


def describe_modules(modules: Mapping[str, nn.Module], names: Collection[str]) -> str:
    """Return names of modules, each with its class: a name may be just a number."""
    kinds = {name: type(modules[name]).__name__ for name in names}
    return ", ".join(name if name == kind else f"{name} ({kind})" for name, kind in kinds.items())


def is_attention(name: str, module: nn.Module) -> bool:
    """Return whether its class or path is named attention, and it holds a matrix; a norm's gate may be one.

    A class named output with a single matrix, such as LXMERT's LxmertAttentionOutput, is the projection after one.
    """
    kind = type(module).__name__
    fewest = _fewest_matrices(kind, name.rsplit(".", 1)[-1])
    if fewest is None:
        return False
    return _matrices(module) >= (max(2, fewest) if kind.endswith("Output") else fewest)


@functools.lru_cache(maxsize=1024)
def _fewest_matrices(kind: str, called: str) -> int | None:
    """Return how many matrices a module of this class and name has if it attends; None: it is not named attention."""
    if not _ATTENTION.search(kind):
        named = _ATTENTION.search(called) and not _NORM.search(called)
        if not named or _BESIDE.search(f"{kind} {called}"):
            return None
    return 2 if _NORM.search(kind) else 1


def is_attention_class(name: str, module: nn.Module) -> bool:
    """Return whether it is an attention module by its class, whatever its name."""
    return bool(_ATTENTION.search(type(module).__name__)) and is_attention(name, module)


def _is_projection(name: str, modules: Mapping[str, nn.Module], ran: Collection[str], missing: Collection[str]) -> bool:
    """Return whether it holds a single matrix and belongs to a missing layer, which is reported for both."""
    around = max((other for other in ran if other != name and is_within(name, other)), key=len, default=None)
    return around in missing and _matrices(modules[name]) == 1


def _matrices(module: nn.Module) -> int:
    """Return the number of its matrices; 2 = two or more."""
    matrices = (parameter for parameter in module.parameters() if parameter.ndim >= 2)
    return len(list(itertools.islice(matrices, 2)))


def is_within(name: str, around: str) -> bool:
    """Return whether a path is that of a module, or of one inside it."""
    return name == around or name.startswith(around + ".")


def kind_of_call(name: str, call: InterceptedCall, choices: Kinds, before: Kind | None) -> Kind:
    """Return "self" or "cross": as the caller specifies, else the call, else the module's path, else the lengths.

    With as many queries as keys, or if the layer had so before (a growing cache), it is self-attention; with more keys
    also if the module is named so.

    Args:
        name: the module's path.
        call: the call.
        choices: the caller's kinds: pattern of paths -> kind.
        before: the kind of this layer's previous call.
    """
    for pattern, kind in choices.items():
        if any(fnmatchcase(part, pattern) for part in enclosing_paths(name)):
            return kind
    if call.kind is not None:
        return call.kind
    if is_cross(name):
        return "cross"
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    called = keys > queries and _SELF.search(name.rsplit(".", 1)[-1])
    return "self" if before == "self" or queries == keys or called else "cross"


def is_cross(name: str) -> bool:
    """Return whether a module's path names cross-attention."""
    return bool(_CROSS.search(name))


def is_self(name: str) -> bool:
    """Return whether a module's path names self-attention."""
    return bool(_SELF.search(name)) and not is_cross(name)
