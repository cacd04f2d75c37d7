"""Links of the viewer's page: what they lead back to, and what the page states that they do not hold."""

# ruff: noqa: F401, F811  # chromium and look are fixtures

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import expect

from headscope import Observe, masks, observe
from headscope.watching import About, Recording
from support.browser import Page, chromium, in_a_browser, look, open_menu

pytestmark = in_a_browser

NAME = "after & <b>this.safetensors"


def recorded(scale: float) -> Recording:
    q, k = scale * torch.randn(2, 1, 3, 11, 8, generator=torch.Generator().manual_seed(3))
    found = observe(q, k, mask=masks.causal(), what=Observe(map=11)).named("layers.0.attention")
    kinds: Any = dict.fromkeys(found.parts, "self")
    return Recording(found, About("m", {}, {}, kinds, None, 1, 1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return recorded(3.0).save(tmp_path / NAME)


def choose(page: Page, path: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(path)


def test_a_link_made_after_a_file_was_dropped_names_the_file(look: Any, file: Path, tmp_path: Path) -> None:
    page = look(recorded(1.0).save_html(tmp_path / "one.html"))
    assert "must be dropped again" not in open_menu(page).locator(".panel:visible").inner_text()
    page.keyboard.press("Escape")
    choose(page, file)
    page.locator(".changed").first.click()
    page.locator("#change-title").wait_for()
    page.wait_for_url(lambda url: f"against={quote(NAME, safe='').replace('%20', '+')}" in url and "view=change" in url)
    assert f"B must be dropped again: send {NAME}, too." in open_menu(page).locator(".panel:visible").inner_text()


def test_a_page_opened_by_such_a_link_asks_for_the_file(look: Any, file: Path, tmp_path: Path) -> None:
    at = f"view=change&layer=0&head=2&against={quote(NAME, safe='')}"
    page = look(recorded(1.0).save_html(tmp_path / "one.html"), at)
    note = page.locator(".awaited")
    expect(note).to_contain_text(f"This link compares with “{NAME}”. Drop that file here, or choose it.")
    with page.expect_file_chooser() as chooser:
        note.get_by_role("button", name="Choose the file…").click()
    chooser.value.set_files(file)
    expect(page.locator("#change-title")).to_have_text("layers.0.attention, head 2")
    expect(note).to_have_count(0)
    assert page.locator(".map canvas").count() == 3


def test_the_page_goes_on_without_the_file(look: Any, tmp_path: Path) -> None:
    page = look(recorded(1.0).save_html(tmp_path / "one.html"), "view=changes&against=x")
    page.get_by_role("button", name="Go on without it").click()
    page.locator(".thumb").first.wait_for()
    expect(page.locator(".awaited")).to_have_count(0)
    assert page.get_by_role("tab", name="Changes").count() == 0
    page.wait_for_url(lambda url: "against" not in url)


def test_a_page_of_two_recordings_has_nothing_to_add_to_its_link(look: Any, tmp_path: Path) -> None:
    page = look(recorded(1.0).save_html(tmp_path / "two.html", against=recorded(3.0)))
    page.locator(".changed").first.wait_for()
    assert "dropped again" not in open_menu(page).locator(".panel:visible").inner_text()
    assert "against" not in page.url


def test_a_page_on_a_disk_offers_the_part_that_others_can_use(look: Any, tmp_path: Path) -> None:
    page = look(recorded(1.0).save_html(tmp_path / "a report.html"), "view=head&head=2")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_menu(page)
    assert "works only here" in page.locator(".link-hint").inner_text()
    assert page.locator(".link-part").inner_text() == "a report.html#view=head&layer=0&head=2"
    page.get_by_role("button", name="Copy file name and view").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "a report.html#view=head&layer=0&head=2"
