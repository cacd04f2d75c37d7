"""Comparison of recordings to the bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from headscope import Recording


def assert_same(one: Recording, other: Recording, folder: Path) -> None:
    """Assert that two recordings have the same statistics, read and saved."""
    assert one.to_dict()["layers"] == other.to_dict()["layers"]
    files = [folder / "one", folder / "other"]
    for recording, file in zip((one, other), files, strict=True):
        recording.stats.save(file)
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=0, equal_nan=True)
