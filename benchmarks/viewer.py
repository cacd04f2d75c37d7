"""How large the viewer's page is, how soon it can be used and how smoothly it zooms: the table of docs/guides/page.md.

    python benchmarks/viewer.py [--chromium /usr/bin/chromium] [--write FOLDER]

The weights of 512 tokens are those of the shipped language model, its positions stretched to that length, its 48
heads three times; the others are of random q and k with a slant towards near keys and the first one, except that of
512 tokens without a mask, whose q and k are random: the worst case, because noise does not compress. For the long
cases one layer of eight heads is observed, on a sample of 512 rows and all keys, and stands for the others: blocks are
compressed one by one, so that repeating them makes the page no smaller. No page has exact heads. Times are of headless
Chromium: until the first eight thumbnails are drawn, until a head is open, and the frames while the wheel zooms and the
map is dragged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headscope
from headscope import HeadStats, Observe, masks
from headscope.masks import causal
from headscope.report.viewer import save_recording
from headscope.stats._kept_weights import KeptWeights, weights_of
from headscope.stats._layer import LayerStats
from headscope.watching import About, Recording


class Case(NamedTuple):
    """A page: so many layers and heads, so many tokens, n x n bins, and how many MB it may take."""

    name: str
    layers: int
    heads: int
    tokens: int
    bins: int
    most: float
    trained: bool = False
    strips: bool = False
    masked: bool = True


CASES = (
    Case("20 tokens", 4, 8, 20, 20, 1),
    Case("512 tokens, every cell", 12, 12, 512, 512, 10, trained=True),
    Case("512 tokens, every cell, random q and k", 12, 12, 512, 512, 10, masked=False),
    Case("4,096 tokens", 48, 64, 4096, 32, 24),
    Case("32,768 tokens, strips of 16 heads", 32, 32, 32_768, 64, 24, strips=True),
    Case("131,072 tokens", 32, 32, 131_072, 64, 24),
)
SAMPLE = 512
OBSERVED = 8  # heads of a layer that are observed where the text is long
WIDTH = 32


def observed(case: Case, layer: int) -> HeadStats:
    """The statistics of one layer."""
    long = case.tokens > 1024
    heads = min(case.heads, OBSERVED) if long else case.heads
    torch.manual_seed(layer)
    if not case.masked:
        return headscope.observe(*torch.randn(2, 1, heads, case.tokens, WIDTH), what=Observe(map=case.bins, edges=16))
    q, k = torch.randn(2, 1, heads, case.tokens, WIDTH).unbind()
    k[:, :, 0] += 3 * q.mean(2)  # a sink
    place = torch.arange(case.tokens)[:, None] * torch.tensor([0.02, 0.1, 0.5, 2.0])
    waves = torch.cat([place.sin(), place.cos()], -1)
    reach = torch.linspace(0, 4, heads)[None, :, None, None]
    q, k = torch.cat([2 * q, reach * waves], -1), torch.cat([k, reach * waves], -1)
    what = Observe(map=case.bins, edges=16, rows=SAMPLE if long else None, keep_qk=case.strips)
    return headscope.observe(q, k, mask=causal(), what=what)


def of_heads(parts: Sequence[LayerStats], heads: Sequence[int]) -> LayerStats:
    """One layer of some of the heads of several, counted through."""
    index = torch.tensor(heads)

    def taken(values: Sequence[Any]) -> Any:
        first = values[0]
        if first is None or isinstance(first, torch.Tensor):
            return None if first is None else torch.cat(list(values))[index]
        return replace(first, **{name: taken([vars(each)[name] for each in values]) for name in vars(first)})

    names = ("rows", "broken", "received", "eligible", "map", "edges")
    plain = {name: taken([getattr(part, name) for part in parts]) for name in names}
    moments = {name: taken([part.moments[name] for part in parts]) for name in parts[0].moments}
    tiles = {run: kept_heads(weights_of(each), index) for run, each in parts[0].tiles.items()}
    sums = [part.nulls.sums for part in parts if part.nulls is not None]
    nulls = replace(parts[0].nulls, sums=torch.cat(sums, -1)[..., index]) if parts[0].nulls is not None else None
    return replace(parts[0], heads=len(heads), moments=moments, tiles=tiles, nulls=nulls, **plain)


def kept_heads(kept: KeptWeights, index: torch.Tensor) -> KeptWeights:
    """The weights of some of the heads."""
    by_head = {"q", "k", "lse"}
    tensors = {name: x[:, index] if name in by_head else x for name, x in kept.tensors().items()}
    return KeptWeights.of(tensors, kept.lead, kept.scale, kept.softcap)


def trained(case: Case) -> list[LayerStats]:
    """Layers of the shipped model's heads over its own tokenizer's reading of a source file of headscope's."""
    example = headscope.load_example("text")
    model: Any = example.model
    ids = example.tokenizer.encode(Path(masks.__file__).read_text(encoding="utf-8"))[: case.tokens]
    table = model.position_embedding.weight.detach().T[None]  # [1, E, context]
    longer = torch.nn.functional.interpolate(table, size=case.tokens, mode="linear", align_corners=True)[0].T
    model.position_embedding = torch.nn.Embedding.from_pretrained(longer)
    model.config = replace(model.config, context=case.tokens)
    with torch.inference_mode(), headscope.watch(model, what=Observe(map=case.bins, edges=16)) as seen:
        model(torch.tensor([ids]))
    parts = list(seen.stats.parts.values())
    count = sum(part.heads for part in parts)
    return [of_heads(parts, range(n, n + case.heads)) for n in range(0, count, case.heads)]


def recording(case: Case) -> Recording:
    """A recording of all layers."""
    long = case.tokens > 1024
    if case.trained:
        made = trained(case)
    else:
        layers = [observed(case, n).parts["0"] for n in range(1 if long else case.layers)]
        made = [of_heads([part], [n % part.heads for n in range(case.heads)]) for part in layers]
    parts = {f"layers.{n}.attention": made[n % len(made)] for n in range(case.layers)}
    texts = tuple(f" word{n % 997}" for n in range(case.tokens))
    versions = {"headscope": headscope.__version__, "torch": torch.__version__}
    return Recording(HeadStats(parts), About(case.name, {}, versions, dict.fromkeys(parts, "self"), texts, 1, 1))


STARTED = """
  window.__usable = null;
  new MutationObserver(() => {
    if (window.__usable === null && document.querySelectorAll(".thumb [data-drawn]").length >= 8) {
      window.__usable = performance.now();
    }
  }).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ["data-drawn"]});
"""

FRAMES = """() => {
  window.__frames = [];
  const step = (now) => { window.__frames.push(now); requestAnimationFrame(step); };
  requestAnimationFrame(step);
}"""


def looked_at(path: Path, chromium: str) -> dict[str, float]:
    """Milliseconds until thumbnails are drawn and until a head is open; frames while it is zoomed and dragged."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(STARTED)
        page.goto(path.as_uri())
        page.locator(".thumb [data-drawn]").nth(7).wait_for()
        usable = page.evaluate("window.__usable")
        before = page.evaluate("performance.now()")
        page.locator(".thumb").nth(5).click()
        page.locator(".map canvas").wait_for()
        opened = page.evaluate("performance.now()") - before
        box = page.locator(".map canvas").bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.evaluate(FRAMES)
        page.mouse.move(x, y)
        for turn in (-120,) * 12 + (120,) * 6:
            page.mouse.wheel(0, turn)
        page.mouse.down()
        page.mouse.move(x - 120, y - 90, steps=30)
        page.mouse.up()
        times = page.evaluate("window.__frames")
        browser.close()
    gaps = sorted(b - a for a, b in pairwise(times))
    return {
        "usable_ms": usable,
        "open_ms": opened,
        "fps": 1000 * len(gaps) / sum(gaps),
        "slowest_ms": gaps[int(0.99 * len(gaps))],
    }


HEADINGS = (
    "page",
    "heads",
    "bins",
    "size",
    "usable after",
    "a head opens in",
    "frames a second",
    "99% of frames within",
)


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    return (
        line["name"],
        line["heads"],
        f"{line['bins']} × {line['bins']}",
        f"{line['mb']:.2f} of {line['allowed_mb']} MB",
        f"{line['usable_ms']:.0f} ms",
        f"{line['open_ms']:.0f} ms",
        f"{line['fps']:.0f}",
        f"{line['slowest_ms']:.0f} ms",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--write", type=Path, help="keep the pages in this folder")
    parser.add_argument("--only", type=int, help="the number of one case, from 0")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = asked.write or Path(place)
        for number, case in enumerate(CASES):
            if asked.only not in (None, number):
                continue
            print(case.name, file=sys.stderr, flush=True)
            path = save_recording(recording(case), folder / f"viewer-{number}.html", title=case.name, exact=())
            said = {"name": case.name, "heads": f"{case.layers} × {case.heads}", "bins": case.bins}
            size = {"mb": path.stat().st_size / 1e6, "allowed_mb": case.most}
            lines.append({**said, **size, **looked_at(path, asked.chromium)})
    if asked.json:
        print(json.dumps(lines, indent=2))
        return 0
    for row in (HEADINGS, ["---"] * len(HEADINGS), *map(cells, lines)):
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
