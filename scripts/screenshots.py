"""Take the screenshots of docs/guides/page.md and README.md: pages of headscope in headless Chromium, as PNG.

python scripts/screenshots.py [--chromium /usr/bin/chromium] [NAME...]
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
MOST = 400_000  # bytes of a picture
REPEATED = "return the first line of the file. return the first line of the file."
TEXT = "def load(path):\n    with open(path) as file:\n        return file.read()"


class Shot(NamedTuple):
    """A screenshot: the page, the fragment of its address, the size of the window, and the colour scheme.

    With ``figure`` it is the figure of a view, as the page saves it.
    """

    page: str
    at: str
    width: int = 1280
    height: int = 860
    scheme: str = "light"
    figure: str = ""


SHOTS = {
    "home": Shot("repeated", "view=head&layer=3&head=3&row=10&column=3", height=1010),
    "viewer_grid": Shot("watch", "sort=induction"),
    "viewer_head": Shot("text", "view=head&layer=3&head=6&row=15&column=14", height=1010),
    "viewer_compare": Shot("text", "view=compare&layer=2&head=0&other=3&otherhead=3"),
    "viewer_changes": Shot("changes", "", height=720),
    "viewer_image": Shot("image", "view=head&layer=2&head=1&row=35&column=35", height=760),
    "viewer_long": Shot("long", "view=head&layer=1&head=7&row=40&column=31&pool=max", height=1500),
    "figure_head": Shot("repeated", "view=head&layer=3&head=3", figure="the map of layer 3, head 3"),
    "viewer_narrow": Shot("text", "view=head&layer=3&head=6&row=15&column=14", width=360, height=1100),
    "viewer_history": Shot("history", "", height=900),
    "viewer_dark": Shot("text", "view=head&layer=4&head=6", height=1100, width=900, scheme="dark"),
}


def headscope(*arguments: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "headscope.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def make_page(name: str, folder: Path) -> Path:
    """Return the page of that name, written at its first use."""
    path = folder / f"{name}.html"
    if path.exists():
        return path
    if name in ("text", "repeated"):
        headscope("text", TEXT if name == "text" else REPEATED, "--out", str(path))
    elif name == "image":
        headscope("image", "--out", str(path))
    elif name == "watch":
        headscope("watch", "text", "--text", TEXT, "--page", str(path))
    elif name == "changes":
        make_changes(path)
    elif name == "history":
        train(path)
    else:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import viewer  # pyright: ignore[reportMissingImports]

        case = viewer.Case("32,768 tokens of made-up weights", 4, 8, 32_768, 64, 24, strips=True)
        viewer.save_recording(viewer.recording(case), path, title=case.name)
    return path


def make_changes(path: Path) -> None:
    """Write the page of two recordings: the example of docs/guides/compare.md."""
    import torch

    import headscope as hs

    example = hs.load_example("text")
    ids = torch.tensor([example.tokenizer.encode("def add(a, b):\n    return a + b\n" * 4)])
    recordings: list[hs.Recording] = []
    weight = dict(example.model.named_parameters())["layers.3.attention.qkv_proj.weight"]
    for factor in (1.0, 1.5):
        with torch.no_grad(), hs.watch(example.model, what=hs.Observe(map=64), tokens="inputs") as recording:
            weight[:128].mul_(factor)  # its queries
            example.model(ids)
        recordings.append(recording)
    recordings[0].save_html(path, against=recordings[1], labels=("before.safetensors", "after.safetensors"))


def train(path: Path) -> None:
    """Write the page of a training that diverges: three layers that copy, until the learning rate is raised."""
    import torch

    from headscope import History, MultiHeadAttention, watch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(MultiHeadAttention(48, 6) for _ in range(3)))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.001)
    history = History(path.with_suffix(".safetensors"))
    with warnings.catch_warnings(), watch(layers, rows=64, log=history, alarms=True):
        warnings.simplefilter("ignore")
        for step in range(160):
            if step == 110:
                optimizer.param_groups[0]["lr"] = 0.05
            x = torch.randn(4, 64, 48)
            loss = (layers(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    history.save_html(path, title="Three layers")


def save_figure(page: Any, of: str) -> bytes:
    """Return the PNG of a view that the menu of figures saves."""
    page.get_by_role("button", name=f"Figure of {of}", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG 2×").click()
    return Path(download.value.path()).read_bytes()


def small(png: bytes) -> bytes:
    """Compress a picture with all of its colours: with fewer, a scale would differ from its maps."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(out, "PNG", optimize=True)
    return out.getvalue()


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            if options.names and name not in options.names:
                continue
            size = {"width": shot.width, "height": shot.height}
            page = browser.new_page(viewport=size, color_scheme=shot.scheme)
            page.goto(f"{make_page(shot.page, Path(place)).as_uri()}#{shot.at}")
            page.wait_for_timeout(1500)
            png = small(save_figure(page, shot.figure) if shot.figure else page.screenshot())
            page.close()
            if len(png) > MOST:
                raise SystemExit(f"{name}: {len(png):,} bytes, expected at most {MOST:,}")
            (IMAGES / f"{name}.png").write_bytes(png)
            print(f"{name}: {len(png):,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
