"""How large a page with exact heads is, and how soon it computes their tiles: a table of docs/guides/page.md.

    python benchmarks/viewer_exact.py [--chromium /usr/bin/chromium]

The heads have random q and k of 64 dimensions and no mask, so that no pair is skipped. Only a few rows are observed:
lse is computed for all of them, and nothing else of the page depends on them. Times are of headless Chromium, in the
page's thread: from the request of a tile of 512 x 512 weights to its answer; the median of 20 tiles, and the first one,
which includes reading the head.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Page, sync_playwright

from headscope import Observe, observe
from headscope.report.viewer import save_recording
from headscope.watching import About, Recording

CASES = (
    (4096, 1, torch.float32),
    (32_768, 8, torch.float32),
    (32_768, 8, torch.bfloat16),
    (131_072, 1, torch.float32),
)
TILES = 20
TIMES = """
  window.took = [];
  const Plain = window.Worker;
  window.Worker = class extends Plain {
    asked = {};
    constructor(url) {
      super(url);
      this.addEventListener("message", ({ data }) => data.tile && took.push(performance.now() - this.asked[data.id]));
    }
    postMessage(request) {
      this.asked[request.id] = performance.now();
      super.postMessage(request);
    }
  };
"""


def recorded(length: int, heads: int, dtype: torch.dtype) -> Recording:
    q, k = torch.randn(2, 1, heads, length, 64).to(dtype)
    what = Observe(map=64, rows=64, received=False, keep_qk=True)
    parts = observe(q, k, what=what).named("0")
    return Recording(parts, About("random", {}, {}, {"0": "self"}, None, 1, 1))


def measured(page: Page, path: Path, length: int) -> tuple[float, list[float]]:
    """Milliseconds of the first tile, and of the others."""
    page.goto(f"{path.as_uri()}#view=head&layer=0&head=0")
    page.locator(".map canvas").wait_for(timeout=60_000)
    for n in range(TILES + 1):
        at = 0.3 + 0.4 * n / TILES
        page.evaluate(f"location.hash = '#view=head&layer=0&head=0&zoom={length / 511.5},{at},{1 - at}'")
        page.wait_for_function(f"() => took.length > {n}", timeout=60_000)
    first, *others = page.evaluate("took")
    return first, others


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chromium")
    chromium = parser.parse_args().chromium
    print("| page | heads | stored as | size, MB | a weight differs by at most | first tile, ms | a tile, ms |")
    print("|---|---|---|---|---|---|---|")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for length, heads, dtype in CASES:
            recording = recorded(length, heads, dtype)
            path = save_recording(
                recording, Path(folder) / f"{length}-{dtype}.html", exact=[(0, n) for n in range(heads)]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.add_init_script(TIMES)
            first, others = measured(page, path, length)
            about = page.evaluate("JSON.parse(document.getElementById('data').textContent).exact[0]")
            size = path.stat().st_size / 1e6
            print(
                f"| {length:,} tokens | {heads} | {about['q']['kind']} | {size:.1f} | {100 * about['error']:.2g} % | "
                f"{first:.0f} | {statistics.median(others):.0f} |",
                flush=True,
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
