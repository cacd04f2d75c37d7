"""A page of many heads opens without reading those that are not needed first."""

# ruff: noqa: F401, F811  # chromium is a fixture

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headscope import Observe, masks, observe
from headscope.stats import HeadStats
from headscope.watching import About, Recording
from support.browser import BrowserContext, chromium, in_a_browser

pytestmark = in_a_browser

COUNTED = """
  window.__made = { DecompressionStream: 0, IntersectionObserver: 0 };
  for (const name of Object.keys(__made)) {
    const Made = window[name];
    window[name] = class extends Made {
      constructor(...given) { super(...given); __made[name]++; }
    };
  }
  new MutationObserver(() => {
    const drawn = document.querySelectorAll(".thumb [data-drawn]").length;
    if (drawn >= 8) window.__first ??= { drawn, ...__made };
  }).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-drawn"] });
"""


def many(layers: int, heads: int) -> Recording:
    q = torch.randn(1, heads, 5, 4, generator=torch.Generator().manual_seed(2))
    part = observe(q, q, mask=masks.causal(), what=Observe(map=5)).parts["0"]
    parts = {f"layers.{n}.attention": part for n in range(layers)}
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(HeadStats(parts), About("m", {}, {}, kinds, None, 1, 1))


def test_the_first_pictures_do_not_wait_for_the_other_heads(chromium: BrowserContext, tmp_path: Path) -> None:
    page = chromium.new_page()
    page.add_init_script(COUNTED)
    page.goto(many(17, 37).save_html(tmp_path / "many.html").as_uri())
    page.wait_for_function("() => window.__first")
    first = page.evaluate("window.__first")
    assert first["DecompressionStream"] < 4 * first["drawn"] + 8, "a few heads at a time, in their order"
    assert first["IntersectionObserver"] < 9, "one for all heads"
    page.wait_for_function("() => document.querySelectorAll('.thumb [data-drawn]').length === 17 * 37")
    page.close()


def test_a_head_that_cannot_be_read_does_not_hold_up_the_others(chromium: BrowserContext, tmp_path: Path) -> None:
    page = chromium.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script("""
      let made = 0;
      const Made = DecompressionStream;
      window.DecompressionStream = class extends Made {
        constructor(...given) { if (made++ === 3) throw new Error("damaged"); super(...given); }
      };
    """)
    page.goto(many(3, 5).save_html(tmp_path / "damaged.html").as_uri())
    page.wait_for_function("() => document.querySelectorAll('.thumb [data-drawn]').length === 14")
    assert errors == ["damaged"]
    page.close()
