"""torch's ONNX exporter without what it does again in every export."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def operators_read_once() -> Iterator[None]:
    """The exporter parses the source of its 500 operators in every export, a third of what one takes."""
    from torch.onnx._internal import _lazy_import

    exporter: Any = getattr(_lazy_import, "onnxscript_apis", None)
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(exporter, "get_torchlib_ops"):
            patch.setattr(exporter, "get_torchlib_ops", functools.partial(_operators, exporter.get_torchlib_ops))
        yield


@functools.cache
def _operators(read: Any) -> Any:
    return read()
