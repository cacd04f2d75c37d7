"""The conventions of an assignment, given once: by the options of ``headscope check``, or by a ``check.toml``."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from headscope._support.option_values import MEANINGS, SCALE, SIZE, is_meaning, is_scale, is_size
from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake, describe_unreadable, name_options

FILE_NAME = "check.toml"
IN_PYTHON = {
    "give embed_dim=, inputs=, or call=lambda module, x, mask: ...": "give --embed-dim or --call, or use "
    "headscope.check with inputs=",
    "give inputs= or call=lambda module, x, mask: ...": "give --call, or use headscope.check with inputs=",
}
"""Remedies of the library that no option replaces, and the same for the command line."""


@dataclass(frozen=True)
class Conventions:
    """How a submission is built, called and judged.

    Attributes:
        name: of the class, function or module; None = the only module class of the file.
        arguments: those that build it, as a text; None = not given.
        call: an expression of module, x and mask; None = by the argument names.
        timeout: seconds; None = the default.
        pattern: of the files in a folder.
        options: the arguments of ``headscope.check``.
    """

    name: str | None
    arguments: str | None
    call: str | None
    timeout: int | None
    pattern: str
    options: dict[str, Any]

    def to_request(self, path: Path, name: str | None, timeout: int) -> dict[str, Any]:
        """Return the request to check a file, as ``check_child`` reads it.

        Args:
            path: the file.
            name: what to check in it; None = by the conventions.
            timeout: the default, in seconds.
        """
        args, kwargs = parse_arguments(self.arguments or "")
        return {
            "path": str(path.resolve()), "name": name or self.name, "or_only_class": name is None,
            "args": args, "kwargs": kwargs, "arguments": self.arguments, "call": self.call, "options": self.options,
            "timeout": self.timeout or timeout,
        }  # fmt: skip


def combine_conventions(source: Path | None, options: Mapping[str, Any]) -> Conventions:
    """Return the conventions of a file and of the command line; an option replaces the same key of the file.

    Args:
        source: a ``check.toml``, or None.
        options: by the names of the arguments of ``headscope.check``; None or () = not given.

    Raises:
        Mistake: the file cannot be read, or a key or value of it is unknown; or an option has an impossible value.
    """
    values: dict[str, Any] = {} if source is None else _read_conventions(source)
    for key, value in options.items():
        if value is not None and value != ():
            check_value = KEYS[key.replace("_", "-")]
            values[key] = check_value(f"--{'class' if key == 'class' else key.replace('_', '-')}", value)
    own = {key: values.pop(key, None) for key in ("class", "args", "call", "timeout", "pattern")}
    return Conventions(own["class"], own["args"], own["call"], own["timeout"], own["pattern"] or "*.py", values)


def parse_arguments(arguments: str, where: str = "--args") -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments in a text such as ``512, 8, causal=True``.

    Raises:
        Mistake: the text is not a list of arguments, or one of them is not a literal.
    """
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError
        args = [ast.literal_eval(each) for each in call.args]
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        json.dumps([args, kwargs])
    except (SyntaxError, ValueError, TypeError):
        raise Mistake(f"{where}: got {arguments}, expected literals as in a call: 512, 8, causal=True") from None
    return args, kwargs


def name_remedies(message: str) -> str:
    """Return a message of the library with options in place of its arguments."""
    for remedy, on_the_command_line in IN_PYTHON.items():
        message = message.replace(remedy, on_the_command_line)
    return name_options(message, {"embed_dim": "--embed-dim"})


# ---------------------------------------------------------------- keys of the file, and options


def _read_conventions(path: Path) -> dict[str, Any]:
    """Return the values of a file by the names of the arguments."""
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise Mistake(f"{path}: is not TOML: {error}" if isinstance(error, ValueError) else
                      describe_unreadable(str(path), error)) from error  # fmt: skip
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}"
            raise Mistake(f"{path}: {visible(key)}: unknown key; {hint}")
        values[key.replace("-", "_")] = KEYS[key](f"{path}: {key}", value)
    return values


def _refuse(where: str, value: object, expected: str) -> Mistake:
    return Mistake(f"{where}: got {visible(str(value))}, expected {expected}")


def _check_size(where: str, value: object) -> int:
    if not isinstance(value, int) or not is_size(value):
        raise _refuse(where, value, SIZE)
    return value


def _check_flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(where, value, "true or false")
    return value


def _check_scale(where: str, value: object) -> float:
    if not isinstance(value, (int, float)) or not is_scale(value):
        shown = f"{value:g}" if isinstance(value, float) else value
        raise _refuse(where, shown, SCALE)
    return float(value)


def _check_meaning(where: str, value: object) -> str:
    if not is_meaning(value):
        raise _refuse(where, value, f"one of {', '.join(MEANINGS)}")
    return str(value)


def _check_names(where: str, value: object) -> list[str]:
    names = cast("list[object]", list(value)) if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise _refuse(where, value, 'a list of names of findings, such as ["scale-unusual"]')
    from headscope.checking import check_names

    try:
        return sorted(check_names(where, [str(name) for name in names]))
    except ValueError as error:
        raise Mistake(str(error)) from error


def _check_name(where: str, value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise _refuse(where, value, "the name of a class, function or module")
    return value


def _check_arguments(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(where, value, 'a text, such as "512, 8, causal=True"')
    parse_arguments(value, where)
    return value


def _check_call(where: str, value: object) -> str:
    """Check an expression; whether it can be evaluated shows in the process that runs the code."""
    expected = 'an expression of module, x and mask, such as "module(x, x, x, mask)"'
    if not isinstance(value, str):
        raise _refuse(where, value, expected)
    try:
        body = ast.parse(value.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise _refuse(where, value, expected) from None
    if isinstance(body, ast.Lambda):
        raise _refuse(where, value, f"{expected}, without lambda")
    return value.strip()


def _check_pattern(where: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.startswith(("/", "\\")) or ".." in value:
        raise _refuse(where, value, "a pattern of file names, such as hw*.py")
    return value


KEYS: dict[str, Callable[[str, object], Any]] = {
    "class": _check_name, "args": _check_arguments, "call": _check_call, "pattern": _check_pattern,
    "embed-dim": _check_size, "heads": _check_size, "causal": _check_flag, "batch-first": _check_flag,
    "mask-means": _check_meaning, "scale": _check_scale, "length": _check_size, "reproducible": _check_flag,
    "strict": _check_flag, "ignore": _check_names, "only": _check_names, "refuse": _check_names,
    "timeout": _check_size,
}  # fmt: skip
"""Key of the file -> what checks its value; the options have the same names."""
