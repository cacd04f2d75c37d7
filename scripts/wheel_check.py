"""Check an installed wheel: it has the native kernels, they compute attention, and the command line starts.

A package that is built without a C++ compiler still installs, on slower backends. A wheel must not.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from torch.nn import functional as F

import headscope
from headscope import masks


def main() -> None:
    """Raise where the wheel is not whole."""
    command = [sys.executable, "-m", "headscope", "doctor", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    native = report["native kernels"]
    if "targets of this CPU" not in native:
        raise SystemExit(f"the wheel has no native kernels: {native}")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 32, generator=generator) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(headscope.attention(q, k, v, mask=masks.causal()), expected)
    text = headscope.load_example("text")  # its weights are files of the wheel
    print(f"headscope {headscope.__version__}: {native['target']}, {type(text.model).__name__}")


if __name__ == "__main__":
    main()
