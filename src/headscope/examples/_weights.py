"""Read and write the weights of an example: a safetensors file with the model's configuration in its metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def write_weights(path: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write a model's weights as float16, with its configuration beside them.

    Args:
        path: The file; it is replaced whole or not at all.
        model: Its state_dict is written; every entry must be a floating-point tensor.
        config: The arguments of the model's configuration; JSON values only.
    """
    state = {name: value.detach().to(torch.float16).contiguous() for name, value in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(state, temporary, metadata={"format": "pt", "config": json.dumps(config, sort_keys=True)})
    os.replace(temporary, path)


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration from the metadata of a weights file."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["config"])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file as float32, by name."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).to(torch.float32) for name in file.keys()}
