"""cuDNN's kernel is left out beside a mask: rows without visible keys are wrong, and gradients can be NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headscope._attend.backends import sdpa
from headscope._attend.call import Options, check_call


@pytest.mark.parametrize(
    ("dtype", "masked", "trained", "without"),
    [
        (torch.bfloat16, True, True, True),
        (torch.float16, True, True, True),
        (torch.bfloat16, True, False, True),  # rows without visible keys are wrong without gradients, too
        (torch.bfloat16, False, True, False),
        (torch.float32, True, True, False),  # it takes half types alone
    ],
)
def test_cudnn_does_not_run_beside_a_mask(dtype: torch.dtype, masked: bool, trained: bool, without: bool) -> None:
    q = torch.empty(1, 2, 64, 16, dtype=dtype, requires_grad=trained)
    call = check_call(q, q, q, None, None, Options(None, None, None, 0.0, False))
    usual = torch.backends.cuda.cudnn_sdp_enabled()
    for device, less in (("cuda", without), ("cpu", False)):
        with sdpa._kernels(replace(call, device=device), masked=masked):
            assert torch.backends.cuda.cudnn_sdp_enabled() == (usual and not less)
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == usual
