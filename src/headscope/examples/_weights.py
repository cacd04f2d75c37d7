"""Read and write the weights of an example: a safetensors file with the model's configuration in its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from headscope._support.files import replace_file

Model = TypeVar("Model", bound=nn.Module)


def write_weights(path: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write a model's weights as float16, together with its configuration.

    Args:
        path: The file; it is written atomically.
        model: Every entry of its state_dict is written; all are floating-point.
        config: The argument that `build` passes to its `make`; JSON values only.
    """
    state = {name: value.detach().to(torch.float16).contiguous() for name, value in model.state_dict().items()}
    replace_file(path, save(state, metadata={"format": "pt", "config": json.dumps(config, sort_keys=True)}))


def build(make: Callable[[dict[str, Any]], Model], path: Path, *, random_seed: int | None) -> Model:
    """Return the model of a weights file in eval mode, float32, on the CPU whatever the default device is.

    Args:
        make: From a configuration to an untrained model.
        path: The weights file.
        random_seed: Read only the configuration, and let `make` draw the weights from this seed; None = read the file's
            weights.
    """
    with safe_open(path, framework="pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()["config"])
        # Drawing weights that the file replaces takes 15 ms; the meta device would import torch modules for seconds.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(random_seed or 0)  # torch.manual_seed seeds every device
            model = make(config)
        if random_seed is None:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
            model.load_state_dict(state)
    return model.eval()
