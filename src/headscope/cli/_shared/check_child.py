"""The process in which ``headscope check`` imports and runs the user's code, without network.

This is not a sandbox: the code can do whatever its user can, and only Python's sockets are blocked.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from headscope._support.user_line import describe_failure, find_user_line


class MistakeError(Exception):
    """What the user can correct."""


def main() -> None:
    """Read the request, a line of JSON, from stdin; write the findings or an error to stdout."""
    stdin, stdout = os.dup(0), os.dup(1)
    silence_input()
    os.dup2(2, 1)  # what the code prints goes to stderr, so that stdout holds only the answer
    requests = os.fdopen(stdin, encoding="utf-8")
    request: dict[str, Any] = json.loads(requests.readline())
    threading.Thread(target=_leave_with_parent, args=(requests,), daemon=True).start()
    sys.dont_write_bytecode = True  # no __pycache__ next to the file
    block_network()
    answer = answer_request(request)
    with os.fdopen(stdout, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os._exit(0)  # without waiting for threads that the code has started


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a request, and return its "findings" or its "trace", or the "mistake" that prevented it.

    Args:
        request: "path"; "name", or None for the only module class; "or_only_class", whether the only module class
            replaces a name that the file does not have, which adds a "note" to the answer; "args", "kwargs" and
            "arguments", the same as a text or None; "call", an expression, or None; and "options", the arguments of
            ``check``, or "trace", the sizes of the input, and "layer".
    """
    try:
        if "trace" in request:
            return {"trace": _trace(request)}
        findings = _check(request)
    except MistakeError as error:
        return {"mistake": str(error)}
    return {"findings": findings, **({"note": request["note"]} if "note" in request else {})}


def silence_input() -> None:
    """Let stdin be empty, so that ``input()`` raises an error at once."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _leave_with_parent(requests: TextIO) -> None:
    """End this process and its group once the parent is gone: the parent keeps stdin open while it waits."""
    requests.read()
    if hasattr(os, "killpg") and os.getsid(0) == os.getpid():  # then the group holds only children of this process
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def block_network() -> None:
    """Let Python's sockets raise an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("headscope check: the network is blocked while code is checked")

    for name in ("connect", "connect_ex", "bind", "sendto", "sendmsg"):
        if hasattr(socket.socket, name):
            setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        setattr(socket, name, refuse)


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Return the findings as ``to_dict`` has them."""
    subject = _load(request)
    import torch

    from headscope.checking import check

    torch.set_num_threads(1)  # a second thread would not help: the inputs are small
    torch.manual_seed(0)
    if isinstance(subject, type) or request["arguments"] is not None:
        subject = _build(subject, request)
    elif inspect.isroutine(subject):
        subject = _build_without_arguments(subject, request)
    try:
        return check(subject, **request["options"], **_to_call(request.get("call"))).to_dict()
    except (ValueError, TypeError) as error:  # a CheckError is a ValueError
        raise MistakeError(str(error)) from error


def _to_call(expression: str | None) -> dict[str, Any]:
    """Return the argument ``call`` of ``check`` for an expression of module, x and mask; nothing for None."""
    if expression is None:
        return {}
    import torch

    code = compile(expression, "<call>", "eval")

    def call(module: Any, x: Any, mask: Any) -> Any:
        return eval(code, {"torch": torch, "module": module, "x": x, "mask": mask})

    return {"call": call}


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    """Return the trace as ``to_dict`` has it."""
    subject = _load(request)
    import torch

    from headscope.cli._shared.traces import trace_subject

    torch.manual_seed(0)
    if isinstance(subject, type) or request["arguments"] is not None:
        subject = _build(subject, request)
    elif inspect.isroutine(subject):
        subject = _build_without_arguments(subject, request)

    try:
        return trace_subject(subject, request["trace"], _to_call(request.get("call")), request.get("layer", 0))
    except (ValueError, TypeError) as error:
        raise MistakeError(str(error)) from error


def _build(factory: Any, request: dict[str, Any]) -> Any:
    """Call a class or function with the requested arguments."""
    try:
        return factory(*request["args"], **request["kwargs"])
    except (Exception, SystemExit) as error:
        if request["arguments"] is None:
            problem = f"cannot be built without arguments: {describe_failure(error)}"
            if isinstance(error, TypeError) and not find_user_line(error):
                problem += '; pass the arguments that build it, for example --args "512, 8"'
        else:
            problem = f"cannot be built with --args {request['arguments']!r}: {describe_failure(error)}"
        raise MistakeError(f"{request['name'] or factory.__name__}: {problem}") from error


def _build_without_arguments(function: Any, request: dict[str, Any]) -> Any:
    """Return the module that a function builds without arguments, or the function itself if it attends.

    A function whose parameters all have defaults is called; if it does not return a module, it is taken to attend.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return function
    if not parameters:
        return _build(function, request)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(each.default is each.empty and each.kind not in variadic for each in parameters):
        return function
    from torch import nn

    try:
        module = _build(function, request)
    except MistakeError:
        return function
    return module if isinstance(module, nn.Module) else function


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _load(request: dict[str, Any]) -> Any:
    """Run a file and return the object of that name, or its only module class; a "note" tells if that replaces it."""
    path, name = Path(request["path"]), request["name"]
    module = _import_file(path)
    if name is None:
        return _find_only_class(path, module)
    subject = getattr(module, name, None)
    if subject is not None:
        return subject
    classes = _list_classes(module)
    if request.get("or_only_class") and len(classes) == 1:
        request["name"] = classes[0].__name__
        request["note"] = f"{path.name}: class {classes[0].__name__}, because it has no {name}"
        return classes[0]
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    raise MistakeError(
        f"{path.name}: has no {name}, expected one of {', '.join(own)}"
        if own
        else f"{path.name}: defines no class or function, expected {name}"
    )


def _import_file(path: Path) -> ModuleType:
    """Run a file and return it as a module."""
    sys.path.insert(0, str(path.parent))  # for imports of other files in its folder
    # a file may have the name of a module that is imported already, such as types.py
    imported = path.stem if sys.modules.get(path.stem) is None else f"checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(imported, path)
    if spec is None or spec.loader is None:
        remedy = "; jupyter nbconvert --to python writes one from a notebook" if path.suffix == ".ipynb" else ""
        raise MistakeError(f"{path.name}: is not a Python file{remedy}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[imported] = module
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise MistakeError(f"{path.name}: the file calls sys.exit() when it is imported") from error
    except EOFError as error:
        remedy = 'call input() only below if __name__ == "__main__"'
        raise MistakeError(f"{path.name}: import failed: {_line(error)}; {remedy}") from error
    except Exception as error:
        raise MistakeError(f"{path.name}: import failed: {_line(error)}") from error
    return module


def _list_classes(module: ModuleType) -> list[type]:
    """Return the module classes that a file defines, one for each name."""
    from torch import nn

    defined = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    classes = [value for value in defined if isinstance(value, type) and issubclass(value, nn.Module)]
    return [each for n, each in enumerate(classes) if each.__name__ not in {one.__name__ for one in classes[:n]}]


def _find_only_class(path: Path, module: ModuleType) -> type:
    """Return the only module class that a file defines."""
    classes = _list_classes(module)
    names = [each.__name__ for each in classes]
    if len(names) == 1:
        return classes[0]
    how = f"{path.name}:NAME or --class NAME"
    if not names:
        raise MistakeError(
            f"{path.name}: defines no class of nn.Module, expected one; name a function or a module with {how}"
        )
    raise MistakeError(f"{path.name}: has {len(names)} module classes: {', '.join(names)}; choose one with {how}")
