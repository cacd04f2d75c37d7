"""cuDNN's kernel is left out where its gradients are known to be NaN: https://github.com/pytorch/pytorch/issues/196678."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headscope._attend.backends import sdpa
from headscope._attend.call import Options, check_call


@pytest.mark.parametrize(
    ("dtype", "masked", "trained", "version", "without"),
    [
        (torch.bfloat16, True, True, (2, 13), True),
        (torch.float16, True, True, (2, 11), True),
        (torch.bfloat16, True, True, (2, 10), False),  # the default was another kernel
        (torch.bfloat16, True, False, (2, 13), False),
        (torch.bfloat16, False, True, (2, 13), False),
        (torch.float32, True, True, (2, 13), False),  # it takes half types alone
    ],
)
def test_cudnn_does_not_run_beside_a_mask_where_a_gradient_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, trained: bool, version: tuple[int, int],
    without: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(sdpa, "TORCH", version)
    q = torch.empty(1, 2, 64, 16, dtype=dtype, requires_grad=trained)
    call = check_call(q, q, q, None, None, Options(None, None, None, 0.0, False))
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    for device, less in (("cuda", without), ("cpu", False)):
        with sdpa._kernels(replace(call, device=device), masked=masked):
            assert torch.backends.cuda.cudnn_sdp_enabled() == (usual and not less)
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == usual
