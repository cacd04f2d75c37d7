"""The training loop of both models: progress, checkpoints, Ctrl-C and resuming.

Nothing random is carried from step to step: what a step trains on follows from the seed and the step's number, so a
checkpoint is the weights, the optimizer's two moments and one number.
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
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train: a linear warm-up, then a cosine down to nothing.

    Args:
        steps: Number of optimizer steps.
        warmup: Steps until the peak.
        peak: The highest learning rate.
    """

    steps: int
    warmup: int
    peak: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the steps done, the seconds spent on them over all its parts, and whether it was interrupted."""

    steps: int
    seconds: float
    interrupted: bool


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW with decay on the matrices only: embeddings, biases and norms keep their size."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and "embedding" not in name else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.AdamW, about: dict[str, Any]) -> None:
    """Write weights, moments and `about` into one safetensors file, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach().contiguous()
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].contiguous()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(tensors, temporary, metadata={"about": json.dumps(about, sort_keys=True)})
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.AdamW | None = None) -> dict[str, Any]:
    """Fill the model, and the optimizer if there is one, from a checkpoint; return its `about`."""
    with safe_open(path, framework="pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()["about"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(f"model/{name}"))
                if optimizer is not None:
                    moments = {moment: file.get_tensor(f"{moment}/{name}") for moment in MOMENTS}
                    optimizer.state[parameter] = {"step": torch.tensor(float(about["step"])), **moments}
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
    loss_of: Callable[[int], tuple[Tensor, float]],
    schedule: Schedule,
    folder: Path,
    *,
    about: dict[str, Any],
    weight_decay: float,
    resume: bool,
    checkpoint_minutes: float = 3.0,
    stop_at: int | None = None,
) -> Outcome:
    """Train a model to the end of its schedule, or until interrupted, and leave a checkpoint.

    Args:
        model: Trained in place.
        loss_of: From the number of a step to the loss to descend and the figure to show; depends on nothing else.
        schedule: Steps and learning rates.
        folder: Where the checkpoint lies; made if missing.
        about: Recorded in the checkpoint; on resuming it must be what the checkpoint says.
        weight_decay: Decoupled decay of the matrices.
        resume: Go on from the checkpoint in the folder.
        checkpoint_minutes: Time between two checkpoints.
        stop_at: Stop as if interrupted after so many steps.

    Raises:
        FileNotFoundError: There is nothing to resume.
        ValueError: The checkpoint is of another run.
    """
    path = folder / CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(model, weight_decay)
    first, seconds = 0, 0.0
    if resume:
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: {path} does not exist")
        saved = load_checkpoint(path, model, optimizer)
        if saved["about"] != about:
            raise ValueError(f"{path} is of another run: {saved['about']}, this one is {about}")
        first, seconds = saved["step"], saved["seconds"]

    def save(step: int) -> None:
        spent = seconds + time.monotonic() - started
        save_checkpoint(path, model, optimizer, {"step": step, "seconds": spent, "about": about})

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    model.train()
    started = saved_at = time.monotonic()
    step, shown = first, math.nan
    with _Interrupt() as interrupt, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=schedule.steps, completed=first)
        while step < schedule.steps and not interrupt.raised and step != stop_at:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            loss, figure = loss_of(step)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            shown = figure if math.isnan(shown) else 0.98 * shown + 0.02 * figure
            progress.update(task, completed=step, description=f"loss {shown:.3f}")
            if step % 100 == 0:
                console.print(f"step {step}: loss {shown:.4f}, {(time.monotonic() - started) / (step - first):.3f} s a step")
            if time.monotonic() - saved_at > 60 * checkpoint_minutes:
                save(step)
                saved_at = time.monotonic()
    save(step)
    model.eval()
    return Outcome(step, seconds + time.monotonic() - started, step < schedule.steps)
