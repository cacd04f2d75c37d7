"""The arguments of a module's call by name, as ``inspect`` binds them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from headscope._intercept.frames import bound


class Forms:
    """Methods with every kind of parameter."""

    def plain(self, x: int, y: int = 2, *, z: int = 3) -> None: ...
    def keywords(self, x: int, y: int = 2, **more: int) -> None: ...
    def places(self, x: int, *more: int, z: int = 3) -> None: ...
    def by_place_only(self, x: int, /, y: int = 2, **more: int) -> None: ...
    def required(self, x: int, *, z: int) -> None: ...


CALLS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((), {}), ((1,), {}), ((1, 5), {}), ((1, 5, 6), {}), ((), {"x": 1}), ((1,), {"x": 1}), ((1,), {"y": 5}),
    ((1,), {"z": 4}), ((1,), {"other": 7}), ((), {"x": 1, "y": 2, "z": 3, "other": 7}), ((), {"z": 4}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "keywords", "places", "by_place_only", "required"])
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_as_inspect_binds_them(name: str, args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    method: Any = getattr(Forms(), name)
    signature = inspect.signature(method)
    try:
        expected = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        expected = dict(kwargs)  # the call itself raises
    else:
        rest = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
        for each in rest:
            expected |= expected.pop(each, {})
    assert bound(method, args, kwargs) == expected
