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
from typing import Any


class MistakeError(Exception):
    """What the user can correct."""


def main() -> None:
    """Read the request, a line of JSON, from stdin; write the findings or an error to stdout."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # what the code prints goes to stderr, so that stdout holds only the answer
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _block_network()
    answer: dict[str, Any] = {}
    try:
        if "trace" in request:
            answer["trace"] = _trace(request)
        else:
            answer["findings"] = _check(request)
    except MistakeError as error:
        answer["mistake"] = str(error)
    with os.fdopen(stdout, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os._exit(0)  # without waiting for threads that the code has started


def _leave_with_parent() -> None:
    """End this process and its group once the parent is gone: the parent keeps stdin open while it waits."""
    sys.stdin.read()
    if hasattr(os, "killpg") and os.getsid(0) == os.getpid():  # then the group holds only children of this process
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _block_network() -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("headscope check: the network is blocked while code is checked")

    for name in ("connect", "connect_ex", "bind", "sendto", "sendmsg"):
        if hasattr(socket.socket, name):
            setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        setattr(socket, name, refuse)


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Return the findings as ``to_dict`` has them."""
    subject = _load(Path(request["path"]), request["name"])
    import torch

    from headscope.checking import CheckError, check

    torch.set_num_threads(1)  # a second thread would not help: the inputs are small
    torch.manual_seed(0)
    if isinstance(subject, type) or request["arguments"] is not None:
        subject = _build(subject, request)
    elif inspect.isroutine(subject):
        subject = _build_without_arguments(subject, request)
    try:
        return check(subject, **request["options"]).to_dict()
    except (CheckError, TypeError) as error:
        raise MistakeError(str(error)) from error


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    """Return the trace as ``to_dict`` has it."""
    subject = _load(Path(request["path"]), request["name"])
    import torch

    from headscope.cli._shared.traces import trace_subject

    torch.manual_seed(0)
    if isinstance(subject, type) or request["arguments"] is not None:
        subject = _build(subject, request)
    elif inspect.isroutine(subject):
        subject = _build_without_arguments(subject, request)

    try:
        return trace_subject(subject, request["trace"])
    except (ValueError, TypeError) as error:
        raise MistakeError(str(error)) from error


def _build(factory: Any, request: dict[str, Any]) -> Any:
    """Call a class or function with the requested arguments."""
    try:
        return factory(*request["args"], **request["kwargs"])
    except (Exception, SystemExit) as error:
        if request["arguments"] is None:
            problem = f"cannot be built without arguments: {_line(error)}"
            if isinstance(error, TypeError):
                problem += '; pass the arguments that build it, for example --args "512, 8"'
        else:
            problem = f"cannot be built with --args {request['arguments']!r}: {_line(error)}"
        raise MistakeError(f"{request['name']}: {problem}") from error


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


def _load(path: Path, name: str) -> Any:
    """Run a file and return the object of that name."""
    sys.path.insert(0, str(path.parent))  # for imports of other files in its folder
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MistakeError(f"{path.name}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise MistakeError(f"{path.name}: the file calls sys.exit() when it is imported") from error
    except Exception as error:
        raise MistakeError(f"{path.name}: import failed: {_line(error)}") from error
    subject = getattr(module, name, None)
    if subject is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise MistakeError(
            f"{path.name}: has no {name}, expected one of {', '.join(own)}"
            if own
            else f"{path.name}: defines no class or function, expected {name}"
        )
    return subject
