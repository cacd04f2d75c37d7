"""The training loop of both models: progress, checkpoints, Ctrl-C and resuming.

Nothing random is carried from step to step: what a step trains on follows from the seed and the step's number, so a
checkpoint is the weights, the optimizers' state and one number.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Schedule:
    """How long to train, and the course of the learning rate: a linear warm-up, then a cosine down to nothing.

    Args:
        steps: Number of optimizer steps.
        warmup: Steps until the peak.
    """

    steps: int
    warmup: int

    def factor(self, step: int) -> float:
        """Return which part of the peak rate a step takes, steps counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the steps done, the seconds spent on them over all its parts, and whether it was interrupted."""

    steps: int
    seconds: float
    interrupted: bool


def make_optimizers(
    model: nn.Module, *, matrix_rate: float, rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW, without decay, for embeddings, norms and biases.

    At this size Muon needs about half the steps of AdamW alone for the same loss.

    Args:
        model: Its embeddings are told by their name.
        matrix_rate: Peak learning rate of the matrices, in the scale of AdamW.
        rate: Peak learning rate of the rest.
        weight_decay: Decoupled decay of the matrices.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embedding" not in name else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    optimizers: list[torch.optim.Optimizer] = [muon, adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], about: dict[str, Any]
) -> None:
    """Write weights, the optimizers' state and `about` into one safetensors file, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach().contiguous()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value.contiguous()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"about": json.dumps(about, sort_keys=True)})
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None
) -> dict[str, Any]:
    """Fill the model, and the optimizers if there are any, from a checkpoint; return its `about`."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        about: dict[str, Any] = json.loads(file.metadata()["about"])
        for key in file.keys():  # noqa: SIM118 - safe_open is no dict
            kind, name = key.split("/")
            parameter = model.get_parameter(name)
            if kind == "model":
                parameter.copy_(file.get_tensor(key))
                continue
            for optimizer in optimizers or []:
                if any(parameter is member for group in optimizer.param_groups for member in group["params"]):
                    optimizer.state[parameter][kind] = file.get_tensor(key)
    return about


class _Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag, so that a step is never cut in two."""

    def __init__(self) -> None:
        self.raised = False

    def __enter__(self) -> _Interrupt:
        self._before = {number: signal.signal(number, self._set) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.raised = True


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss_of: Callable[[int], tuple[Tensor, float]],
    schedule: Schedule,
    folder: Path,
    *,
    about: dict[str, Any],
    resume: bool,
    checkpoint_minutes: float = 3.0,
    stop_at: int | None = None,
) -> Outcome:
    """Train a model to the end of its schedule, or until interrupted, and leave a checkpoint.

    Args:
        model: Trained in place.
        optimizers: Each group of parameters with its peak rate under "peak".
        loss_of: From the number of a step to the loss to descend and the figure to show; depends on nothing else.
        schedule: Steps and learning rates.
        folder: Where the checkpoint lies; made if missing.
        about: Recorded in the checkpoint; on resuming it must be what the checkpoint says.
        resume: Go on from the checkpoint in the folder.
        checkpoint_minutes: Time between two checkpoints.
        stop_at: Stop as if interrupted after so many steps.

    Raises:
        FileNotFoundError: There is nothing to resume.
        ValueError: The checkpoint is of another run.
    """
    path = folder / CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    first, seconds = 0, 0.0
    if resume:
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: {path} does not exist")
        saved = load_checkpoint(path, model, optimizers)
        if saved["about"] != about:
            raise ValueError(f"{path} is of another run: {saved['about']}, this one is {about}")
        first, seconds = saved["step"], saved["seconds"]

    def save(step: int) -> None:
        spent = seconds + time.monotonic() - started
        save_checkpoint(path, model, optimizers, {"step": step, "seconds": spent, "about": about})

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    model.train()
    started = saved_at = time.monotonic()
    step, shown = first, math.nan
    with _Interrupt() as interrupt, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=schedule.steps, completed=first)
        while step < schedule.steps and not interrupt.raised and step != stop_at:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["peak"] * schedule.factor(step)
            loss, figure = loss_of(step)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            shown = figure if math.isnan(shown) else 0.98 * shown + 0.02 * figure
            progress.update(task, completed=step, description=f"loss {shown:.3f}")
            if step % 100 == 0:
                console.print(
                    f"step {step}: loss {shown:.4f}, {(time.monotonic() - started) / (step - first):.3f} s a step"
                )
            if time.monotonic() - saved_at > 60 * checkpoint_minutes:
                save(step)
                saved_at = time.monotonic()
        save(step)
    model.eval()
    return Outcome(step, seconds + time.monotonic() - started, step < schedule.steps)
