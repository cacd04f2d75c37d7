"""Recognise the layout of a module, and read the options in its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from headscope._layouts.expressible import describe_changed_calls
from headscope._layouts.messages import describe_keys, list_names
from headscope._layouts.table import HEADS, LAYOUTS, PROJECTIONS, Layout
from headscope._linear import is_linear
from headscope._support.arguments import check_type


def find_layout(layout: str) -> Layout:
    """Return the layout of this name.

    Raises:
        TypeError, ValueError: it is not the name of a layout.
    """
    check_type("layout", layout, str, f"a name, one of {list_names(LAYOUTS, 99)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {list_names(LAYOUTS, 99)}")
    return LAYOUTS[layout]


def recognise_layout(module: nn.Module, keys: set[str]) -> Layout:
    """Return the layout of a module: by its class, else by its keys if they determine all that it computes.

    Raises:
        ValueError: no layout is known for it, or its weights may not determine what it computes.
    """
    names = {_full_name(each) for each in type(module).__mro__}
    of_class = [layout for layout in LAYOUTS.values() if names & set(layout.classes)]
    fitting = [layout for layout in of_class or LAYOUTS.values() if layout.fit(keys) == ([], [])]
    plain = [layout for layout in fitting if layout in of_class or layout.plain]
    name = type(module).__name__
    if plain:
        for change in _describe_changes(module, plain[0]):
            raise ValueError(
                f"module: {change}, so its output may depend on more than its weights; if it does not, pass "
                f"layout={plain[0].name!r}"
            )
        return plain[0]
    for layout in LAYOUTS.values():
        if name in layout.inner:
            parent = layout.classes[0].split(":")[1]
            raise ValueError(f"module: {name} is a part of {parent}, which has all four projections; pass the {parent}")
    if fitting:
        alike = [each.name for each in fitting]
        hint = (
            f"its keys match layout {list_names(alike)}; if its forward matches too, pass "
            f"layout={' or '.join(map(repr, alike))}"
        )
    else:
        nearest = min(of_class or LAYOUTS.values(), key=lambda each: sum(map(len, each.fit(keys))))
        hint = f"the closest is {nearest.name!r}: {describe_keys(*nearest.fit(keys))}"
    raise ValueError(f"module: no layout is known for {name}; {hint}; known layouts: {list_names(LAYOUTS, 99)}")


def _describe_changes(module: nn.Module, layout: Layout) -> Iterator[str]:
    """Yield a description of each part that may use the weights differently from this layout.

    Hooks of the module itself, such as those of transformers, run around the attention and are allowed.
    """
    if (known := _find_overridden(type(module).__mro__)) is not None:
        yield f"{type(module).__name__} is a {known} with a forward of its own"
    yield from describe_changed_calls(module, [path for each in layout.parts if (path := each.key.rpartition(".")[0])])
    weights = {f"{name}.weight" for name in PROJECTIONS}
    parts = dict(module.named_modules(remove_duplicate=False))
    for entry in layout.parts:
        path = entry.key.rpartition(".")[0]
        if not path or path not in parts:
            continue
        part = parts[path]
        expected, fits = ("Conv1D", _is_conv) if entry.form == "columns" else ("Linear", is_linear)
        if entry.holds[0] in weights and not fits(part):
            yield f"{path} is a {type(part).__name__}, whose forward differs from that of a {expected}"


def _is_conv(part: nn.Module) -> bool:
    """Return whether it is the transposed linear of transformers' GPT-2, by the class that defines its forward."""
    return _full_name(next(each for each in type(part).__mro__ if "forward" in vars(each))) == "transformers:Conv1D"


def _find_overridden(mro: tuple[type, ...]) -> str | None:
    """Return the known class that a class inherits from, if it has another forward; else None."""
    known = {name for layout in LAYOUTS.values() for name in layout.classes}
    for n, each in enumerate(mro):
        if _full_name(each) in known:
            return each.__name__ if any("forward" in vars(below) for below in mro[:n]) else None
    return None


def _full_name(cls: type) -> str:
    """Return the name of a class as the table spells it, "package:Class"."""
    return f"{cls.__module__.split('.')[0]}:{cls.__name__}"


def read_options(module: nn.Module, layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caller's options, and those others that the attributes of a module hold.

    Raises:
        ValueError: two attributes of one option differ.
    """
    read: dict[str, Any] = {}
    for option, paths in layout.reads.items():
        if option in options:
            continue
        try:
            values: list[Any] = [attrgetter(path)(module) for path in paths.split()]
        except AttributeError:  # of another class, with the same keys: ``needs`` lists the required options
            continue
        if any(value != values[0] for value in values[1:]):
            values_text = ", ".join(f"{path} is {value}" for path, value in zip(paths.split(), values, strict=True))
            raise ValueError(f"module: {values_text}; expected equal values, because headscope has one {option}")
        read[option] = _convert_attribute(option, values[0], module)
    if "num_heads" in layout.needs and "num_heads" not in read:
        counts = [value for name in HEADS if isinstance(value := getattr(module, name, None), int)]
        read |= {"num_heads": counts[0]} if counts else {}
    if layout.plain or _is_of(module, layout):
        read |= {option: convert(module) for option, convert in layout.more.items() if option not in options}
    return {**read, **options}


def _convert_attribute(option: str, value: Any, module: nn.Module) -> Any:
    """Return the value of an attribute as the value of an option."""
    if isinstance(value, nn.Dropout):
        return value.p
    if option == "qk_norm_eps" and value is None:  # of nn.RMSNorm: eps of the dtype in which it computes
        double = next(module.parameters()).dtype == torch.float64
        return torch.finfo(torch.float64 if double else torch.float32).eps
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta else value


def _is_of(module: nn.Module, layout: Layout) -> bool:
    """Return whether a class of the layout, from any package, is among those of the module."""
    names = {each.split(":")[1] for each in layout.classes}
    return any(each.__name__ in names for each in type(module).__mro__)
