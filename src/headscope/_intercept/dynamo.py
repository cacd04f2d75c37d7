"""dynamo's compiled code of functions that call a watched module: set aside while the watch is open.

dynamo guards on the contents of a module, not on ``nn.Module.__call__``. So a graph compiled before the watch would run
instead of the modules whose calls it contains, and nothing would be recorded. Such functions run uncompiled until the
last watch that concerns them closes, and then from the same graphs as before. All others stay compiled.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

_aside: dict[object, set[CodeType]] = {}
_known: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()  # to read guards takes a while

# wherever the call of a module has been inlined, dynamo guards that its forward is that of its class, or what it is
_CALLED = re.compile(r"(?:___dict_contains\('forward', |source=)(.+?)(?:\.__dict__\)|\.forward,)")
_TYPE = re.compile(r"___check_type_id\((.*?), (\d+)\)")


def set_aside(watcher: object, modules: Iterable[nn.Module]) -> None:
    """Let functions whose graphs hold calls of such modules, or of others of their classes, run uncompiled."""
    # the modules in a Sequential have their own classes, and half of all other models have a Sequential, too
    types = {id(type(module)) for module in modules if type(module) is not nn.Sequential}
    try:
        codes = {code for code in _compiled() if any(types & called for called in _called(code))}
        _set(codes, "SKIP")
    except (ImportError, AttributeError, TypeError):
        return  # these names are dynamo's own; if a version of torch has others, such calls are not observed
    _aside[watcher] = codes


def put_back(watcher: object) -> None:
    """Let them run from their graphs again, except those that another watch has set aside, too."""
    others = [codes for each, codes in _aside.items() if each is not watcher]
    _set(_aside.get(watcher, set[CodeType]()).difference(*others), "DEFAULT")
    _aside.pop(watcher, None)  # last: an interrupted call can then start again


class Import:
    """Waits in ``sys.meta_path`` for dynamo to be imported.

    dynamo treats the ``__call__`` of a module at that time as torch's own, and skips it to trace the module's forward.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any, target: object = None) -> Any:
        """Find the module, as any finder does; ``then`` is called once it has been loaded."""
        spec: Any = PathFinder.find_spec(name, path) if name == "torch._dynamo" else None
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: object) -> None:
                load(module)
                self.then()

            spec.loader.exec_module = load_and_tell
        return spec


def say_original(call: Callable[..., Any]) -> None:
    """Set torch's own ``nn.Module.__call__`` in a dynamo that has just been imported."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        if name in sys.modules:  # a torch may have it elsewhere
            vars(sys.modules[name])["unpatched_nn_module_call"] = call


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.compiler.disable`` of the ``__call__`` of modules, which costs little where nothing is compiled.

    torch's own sets the interpreter's state four times a call: as long as to attend to a short text, over the modules
    of a small model.
    """
    disabled = torch.compiler.disable(call)
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
        from torch._dynamo.eval_frame import skip_code
    except ImportError:  # these names are dynamo's own
        return disabled

    def call_uncompiled(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = call if get_eval_frame_callback() is None else disabled
        return run(self, *args, **kwargs)

    vars(call_uncompiled).update(vars(disabled))
    skip_code(call_uncompiled.__code__)
    return call_uncompiled


def loaded_wrapper() -> type[nn.Module] | None:
    """Return the class that ``torch.compile`` wraps a module in; None: dynamo is not loaded."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def inside(module: nn.Module) -> nn.Module | None:
    """Return the module that this one of ``torch.compile`` runs, past ``nn.Module.__call__``; None for any other."""
    optimized: Any = module if type(module).__module__ == "torch._dynamo.eval_frame" else None
    return None if optimized is None else optimized._orig_mod


def _compiled() -> list[CodeType]:
    """Return the functions that dynamo has traced."""
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None or not hasattr(sys.modules["torch._dynamo.eval_frame"], "set_code_exec_strategy"):
        return []  # nothing has been compiled; or this torch cannot set a graph aside
    return [code for each in list(convert.input_codes.seen) if (code := each()) is not None]


def _called(code: CodeType) -> list[frozenset[int]]:
    """Yield, for each graph of a function, the ids of the classes of modules whose calls it contains."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    classes: list[frozenset[int]] = []
    for entry in _debug_get_cache_entry_list(code):
        guards: Any = entry.guard_manager
        if guards not in _known:
            text = str(guards)
            called = set(_CALLED.findall(text))
            _known[guards] = frozenset(int(number) for source, number in _TYPE.findall(text) if source in called)
        classes.append(_known[guards])
    return classes


def _set(codes: set[CodeType], action: Literal["SKIP", "DEFAULT"]) -> None:
    """Set how dynamo runs these functions and their callees."""
    if not codes:
        return  # and dynamo is not imported, which takes a while
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    each = getattr(_FrameAction, action)
    for code in codes:
        set_code_exec_strategy(code, _FrameExecStrategy(each, each))
