"""Pages that have every view of the viewer between them, and the addresses of the views."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import History, Observe, load_example, watch
from headscope.cli import main
from headscope.watching import AttentionWarning, Recording

FABLE = "Once upon a time there was a fox. The fox ran. Once upon a time there was a hare. The hare ran."
STEPS = 17
ALARM = 11  # the step from which one head is sharp

VIEWS: Mapping[str, tuple[str, ...]] = {
    "text": (
        "view=heads",
        "view=head&layer=3&head=3&row=9&column=5",
        "view=reading&token=9&also=1.2",
        "view=compare",
        "view=table",
        "view=trace",
    ),
    "image": ("view=heads", "view=heads&row=9&column=9", "view=head&row=9&column=9", "view=compare", "view=trace"),
    "watch": ("view=heads", "view=head&layer=1&head=2", "view=reading", "view=segments", "view=found", "view=table"),
    "long": ("view=head&row=5&column=3", "view=heads"),
    "pair": ("view=changes", "view=change&layer=3&head=1&row=9&column=5", "view=heads"),
    "history": ("view=history", "view=alarms"),
}
"""The views of each page: of a text, an image, a recording with segments and a summary, one with pooled maps, two
recordings, and a training's history."""


def first_of_each(views: Sequence[tuple[str, str]], pages: Collection[str] = VIEWS) -> list[object]:
    """Return pages and views as parameters of a test: all but the first views of some pages only in long runs."""
    names = [name for name, _ in views]
    return [
        pytest.param(*view, marks=() if names.index(view[0]) == at and view[0] in pages else pytest.mark.long)
        for at, view in enumerate(views)
    ]


class WrittenPages(dict[str, Path]):
    """The pages in a folder, each written when it is first opened: one file opens few of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        path = self.folder / f"{name}.html"
        if name == "text":
            _run("text", "the cat sat on the mat, and the dog sat on the mat", "--out", str(path))
        elif name == "image":
            _run("image", "--out", str(path))
        elif name == "watch":
            segments = ("--segment", "fox=0:34", "--segment", "hare=47:82")
            _run("watch", "text", "--text", FABLE, "--page", str(path), *segments)
        else:
            path = {"pair": write_pair, "history": write_history}[name](self.folder)
        self[name] = path
        return path


def write_pages(folder: Path) -> WrittenPages:
    """Return the pages of the commands, of two recordings and of a history; that of a long text is the caller's."""
    return WrittenPages(folder)


def write_pair(folder: Path) -> Path:
    """Write the page of two recordings, of which the heads of layer 3 differ."""
    return shipped(1.0).save_html(folder / "pair.html", against=shipped(1.5))


def write_history(folder: Path) -> Path:
    """Write the page of a training with three alarms."""
    return _history(folder / "run.safetensors").save_html(folder / "history.html")


def _run(*arguments: str) -> None:
    assert main(arguments) == 0


def shipped(factor: float) -> Recording:
    """The shipped model on the fable, with the queries of layer 3 multiplied."""
    example = load_example("text")
    ids = torch.tensor([example.tokenizer.encode(FABLE)])
    rows = example.model.layers[3].attention.qkv_proj.weight[:128]
    with torch.no_grad():
        rows.mul_(factor)
        texts = example.tokenizer.pieces(FABLE)
        with watch(example.model, what=Observe(map=64), tokens="inputs", texts=texts) as recording:
            example.model(ids)
        rows.div_(factor)
    return recording


class _Sharp(nn.Module):
    """Causal attention of each token to itself, each head as sharp as it is called with."""

    def forward(self, sharp: Tensor) -> Tensor:
        eye = torch.eye(7).expand(1, len(sharp), 7, 7)
        return F.scaled_dot_product_attention(eye * sharp[:, None, None], eye, eye, is_causal=True, scale=1.0)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Sharp(), _Sharp()])

    def forward(self, step: int) -> None:
        for at, layer in enumerate(self.layers):
            sharp = torch.linspace(0.5, 2, 3) + 0.03 * step + at
            if at == 1 and step >= ALARM:
                sharp[1:] = torch.tensor([30.0 + step, 150.0 + step])
            layer(sharp)


def _history(path: Path) -> History:
    history, model = History(path), _Model()
    with warnings.catch_warnings(), watch(model, log=history, alarms=True):
        warnings.simplefilter("ignore", AttentionWarning)
        for step in range(STEPS):
            model(step)
    return history
