"""Pages that have every view of the viewer between them, and the addresses of the views."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headscope.cli import main

FABLE = "Once upon a time there was a fox. The fox ran. Once upon a time there was a hare. The hare ran."

VIEWS: Mapping[str, tuple[str, ...]] = {
    "text": (
        "view=heads",
        "view=head&layer=3&head=3&row=9&column=5",
        "view=reading&token=9&also=1.2",
        "view=compare",
        "view=table",
        "view=trace",
    ),
    "image": ("view=heads", "view=head&row=9&column=9", "view=compare", "view=trace"),
    "watch": ("view=heads", "view=head&layer=1&head=2", "view=reading", "view=segments", "view=found", "view=table"),
    "long": ("view=head&row=5&column=3", "view=heads"),
}
"""The views of each page: of a text, an image, a recording with segments and a summary, and one with pooled maps."""


def write_pages(folder: Path) -> dict[str, Path]:
    """Write the pages that the commands write; that of a long text is the caller's."""
    paths = {name: folder / f"{name}.html" for name in ("text", "image", "watch")}
    _run("text", "the cat sat on the mat, and the dog sat on the mat", "--out", str(paths["text"]))
    _run("image", "--out", str(paths["image"]))
    segments = ("--segment", "fox=0:34", "--segment", "hare=47:82")
    _run("watch", "text", "--text", FABLE, "--page", str(paths["watch"]), *segments)
    return paths


def _run(*arguments: str) -> None:
    assert main(arguments) == 0
