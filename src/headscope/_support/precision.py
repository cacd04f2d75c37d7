"""Products of float32 numbers in full precision, whatever ``torch.set_float32_matmul_precision`` is set to.

"high" and "medium" round the factors to TensorFloat-32 or bfloat16: on GPUs, and in oneDNN on CPUs that multiply these
types. Logits would have relative errors of 1e-3 to 1e-2.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

_backends: Any = torch.backends  # whose type hints lack the settings of oneDNN
_SETTINGS = {"cpu": _backends.mkldnn.matmul, "cuda": _backends.cuda.matmul}
_FULL = ("ieee", "none")
_AS_IT_IS = nullcontext()
_lock = threading.Lock()
_inside = dict.fromkeys(_SETTINGS, 0)  # the number of threads that require full precision now
_restored: dict[str, str] = {}  # the setting before the first of them


def exact_products(device: str) -> AbstractContextManager[object]:
    """Return a context in which products of float32 on a kind of device are not rounded before they are summed.

    The setting is process-wide: meanwhile other threads have exact products, too. A compiled graph retains torch's own
    setting.
    """
    return _AS_IT_IS if device not in _SETTINGS or is_dynamo_compiling() else _Exact(device)


class _Exact(AbstractContextManager[None]):
    def __init__(self, device: str) -> None:
        self.device = device
        self.holds = False

    def __enter__(self) -> None:
        setting = _SETTINGS[self.device]
        with _lock:
            if _inside[self.device] == 0:
                if setting.fp32_precision in _FULL:
                    return
                _restored[self.device] = setting.fp32_precision
                setting.fp32_precision = "ieee"
            _inside[self.device] += 1
            self.holds = True

    def __exit__(self, *error: object) -> None:
        if not self.holds:
            return
        setting = _SETTINGS[self.device]
        with _lock:
            _inside[self.device] -= 1
            if _inside[self.device] == 0:
                setting.fp32_precision = "none"  # as the setting above it
                if setting.fp32_precision != _restored[self.device]:
                    setting.fp32_precision = _restored[self.device]
