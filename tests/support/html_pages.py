"""A page as a browser takes it apart, and the blocks in it as its script reads them."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<img src=x onerror=alert(1)>",
    "\u202egnp.exe",
    "\u200f\u2067",
    "😀",
    "𝔘",
    "é̂",
    "\"&'",
    "\x00\x1b[31m",
    "\ud800",
    "",
    "x" * 10_000,
]


@dataclass
class Element:
    """An element with its attributes and its own text."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    cells: list[Element] = field(default_factory=list)


class Page(HTMLParser):
    """A page as a list of elements."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def script(self, name: str) -> str:
        (found,) = [script for script in self.all("script") if script.attributes.get("id") == name]
        return found.text

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.script("data"))

    def block(self, place: list[int]) -> bytes:
        return self._inflated("blocks", place)

    def exact(self, place: list[int]) -> bytes:
        """A block of the heads that the page computes."""
        return self._inflated("exact", place)

    def _inflated(self, name: str, place: list[int]) -> bytes:
        content = base64.b64decode(self.script(name))
        return zlib.decompress(content[place[0] : place[0] + place[1]], -15)


def stored_matrix(page: Page, about: dict[str, Any], rows: int, columns: int) -> torch.Tensor:
    """q or k of a head that the page computes, float64."""
    kind, block, count = about["kind"], page.exact(about["at"]), rows * columns
    if kind.startswith("int"):
        scales = torch.from_numpy(np.frombuffer(block, "<f4", rows).copy())
        width = {"int16": 2, "int8": 1}[kind]
        codes = planes(block, 4 * rows, count, width).astype(f"u{width}").view(f"i{width}")
        return (torch.from_numpy(codes.astype("f4")).reshape(rows, columns) * scales[:, None]).double()
    width = {"float32": 4}.get(kind, 2)
    codes = torch.from_numpy(planes(block, 0, count, width).astype(f"u{width}").view(f"i{width}"))
    return codes.view(getattr(torch, kind)).reshape(rows, columns).double()


def planes(block: bytes, at: int, count: int, width: int) -> NDArray[np.int64]:
    raw = np.frombuffer(block, np.uint8, count * width, at).reshape(width, count).astype(np.int64)
    return sum((raw[n] << 8 * n for n in range(width)), np.zeros(count, np.int64))


def undone(codes: NDArray[np.int64], seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Codes from their differences from the bin above."""
    full = np.zeros(seen.shape, np.int64)
    full[seen] = codes
    for row in range(1, len(full)):
        full[row] = np.where(seen[row], (full[row] + full[row - 1]) % 256, 0)
    return full[seen]


def map_of(page: Page, layer: int, head: int) -> dict[str, NDArray[np.float64]]:
    """The mean and max of the bins of a head, NaN where none may be seen, as the page says that they are kept."""
    data = page.data
    said = data["layers"][layer]
    shape = (said["map"]["rows"], said["map"]["columns"])
    block = page.block(said["blocks"][head])
    tops = np.frombuffer(block, "<f4", 3)
    queries, each = said["top"] or (0, 0)
    at = 4 * (5 + shape[0] + 5 * said["edges"]) + 2 * (said["received"] + said["entropy"]) + 6 * queries * each
    mask = base64.b64decode(data["masks"][said["map"]["masks"][head]])
    seen = np.unpackbits(np.frombuffer(mask, np.uint8))[: shape[0] * shape[1]].astype(bool)
    width, found = data["bits"] // 8, {}
    for name, top in zip(("mean",) if said["map"]["exact"] else ("mean", "max"), tops, strict=False):
        values = np.full(len(seen), np.nan)
        codes = planes(block, at, int(seen.sum()), width)
        if tops[2]:
            codes = undone(codes, seen.reshape(shape))
        values[seen] = top * (codes / (2 ** data["bits"] - 1)) ** 2
        found[name] = values.reshape(shape)
        at += int(seen.sum()) * width
    return found


def browser() -> str | None:
    """The path of a Chromium, if there is one; that without windows takes half the time."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)
