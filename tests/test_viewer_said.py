"""What the viewer's page says of what it shows: scales, bits and numbers are those of the colours and values beside them."""

# ruff: noqa: F401, F811  # chromium, long, look and short are fixtures

from __future__ import annotations

from typing import Any

import pytest
from viewing import (
    BrowserContext,
    Page,
    Watched,
    chromium,
    figure,
    in_a_browser,
    long,
    look,
    near,
    numbers,
    place,
    recorded,
    short,
    thumbs,
    weight,
)

from headscope.watching import Recording

pytestmark = in_a_browser


# ---------------------------------------------------------------- scales and bits


def test_the_scale_says_that_there_is_more_than_its_largest(look: Any, short: Recording) -> None:
    page = look(short, "view=head&layer=1&head=2")
    legend = page.locator(".legend").first
    legend.wait_for()
    p = weight(short, 1, 2)
    top = p[1:].max()  # the first row sees one key
    assert p[0, 0] > top
    assert legend.inner_text().split("\n")[:3] == ["weight, linear", "0", f"{figure(float(top))} and more"]
    page = look(short, "view=head&layer=1&head=2&sink=hidden")
    legend.wait_for()
    assert "and more" in page.locator(".legend").first.inner_text(), "the second row then sees one key"


def test_values_in_8_bits_say_so(look: Any, short: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    assert "8 bits" not in page.locator(".legend").first.inner_text()
    monkeypatch.setattr("headscope.report._viewer_data.FINE_BYTES", 0)
    page = look(short, "view=head&layer=1&head=2&row=9&column=5")
    p = weight(short, 1, 2)
    assert "8 bits" in page.locator(".legend").first.inner_text()
    shown = page.locator(".pinned .cell b").inner_text()
    assert shown.startswith("≈ ")
    assert len(shown.removeprefix("≈ 0.").lstrip("0")) == 2
    assert numbers(shown)[0] == pytest.approx(p[9, 5], abs=8e-3)
    title = page.locator(".strip").first.locator("button").nth(3).get_attribute("title")
    assert ", ≈ 0." in title
