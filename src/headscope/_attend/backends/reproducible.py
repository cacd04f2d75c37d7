"""The native kernels with one order of summation for every row: ``backend="reproducible"``.

A row of the result, and of the gradients of q, k and v, then has the same bits whatever queries follow it. Short
sequences, padded batches and long prefills all run the same blocks. It does not use the faster paths for few rows, for
few keys and along the diagonal of a causal mask.
"""

from __future__ import annotations

from headscope._attend.backends import native

name = "reproducible"
attend_careful = None
refuses, attend, attend_finite, repeater, gradients = (
    native.refuses,
    native.attend,
    native.attend_finite,
    native.repeater,
    native.gradients,
)
