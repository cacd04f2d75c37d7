"""What the command line makes of a text or a picture before a model sees it."""

from __future__ import annotations

import io
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from headscope import cli, load_example
from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.cli._shared import text_input
from headscope.cli._shared.console import one_line
from headscope.cli._shared.digits import SIDE, prepare, read_picture, with_picture
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.text_input import read_text, read_whole
from support.commands import Ran, Run
from support.paths import DATA

HELDOUT = DATA / "digits_heldout.npz"


def drawn(height: int = 61, width: int = 47) -> Image.Image:
    """A bright L on black, away from the border."""
    pixels = np.zeros((height, width), np.uint8)
    pixels[11:50, 13:19] = 255
    pixels[43:50, 13:38] = 255
    return Image.fromarray(pixels)


# ---------------------------------------------------------------- text


def test_an_argument_is_read_as_it_is() -> None:
    given = read_text("naïve ☃ \x00 \n", None)
    assert (given.text, given.dropped) == ("naïve ☃ \x00 \n", 0)


@pytest.mark.parametrize("read", [read_text, read_whole])
def test_a_text_that_is_the_name_of_a_file_gets_a_hint(
    read: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    assert read(str(path), None).text == str(path)
    assert capsys.readouterr().err == ""
    path.write_text("some text", encoding="utf-8")
    assert read(str(path), None).text == str(path)
    (hint,) = capsys.readouterr().err.splitlines()
    assert hint == f"the text is the name of a file; to read that file, use --file {path}"
    assert read(None, str(path)).text == "some text"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_character_may_lie_across_chunks(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "CHUNK", chunk)
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "aé☃𝄞b".encode())
    given = read_text(None, str(path))
    assert (given.text, given.dropped, given.source) == ("aé☃𝄞b", 0, str(path))


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize(
    ("data", "byte"),
    [(b"caf\xe9!", "byte 3 (0xe9)"), (b"\xef\xbb\xbfab\xff", "byte 5 (0xff)"), (b"\xe2\x98", "byte 0 (0xe2)")],
)
def test_the_byte_that_is_no_utf8_is_named(
    data: bytes, byte: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_input, "CHUNK", chunk)
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    with pytest.raises(Mistake) as caught:
        read_text(None, str(path))
    assert f"text.txt: {byte} is not UTF-8" in str(caught.value)


def test_of_a_long_text_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "CHUNK", 7)
    monkeypatch.setattr(text_input, "FEWEST", 11)
    text = "".join(chr(0x4E00 + number) for number in range(101))
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    given = read_text(None, str(path))
    assert given.dropped + len(given.text) == 101
    assert 11 <= len(given.text) <= 2 * 11
    assert text.endswith(given.text)


@pytest.mark.parametrize(("argument", "file"), [("-", None), (None, "-")])
def test_a_dash_is_stdin(argument: str | None, file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("from a pipe ☃".encode()), encoding="ascii"))
    assert read_text(argument, file).text == "from a pipe ☃"


def test_a_closed_stdin_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Mistake, match="stdin: is closed"):
        read_text("-", None)


# ---------------------------------------------------------------- fit for a terminal


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    assert visible("plain ☃ é") == "plain ☃ é"
    assert visible("\x1b[2J\x9b1m\x07\u202e\u2066\u200b\n\t\ud800") == (
        "\\x1b[2J\\x9b1m\\x07\\u202e\\u2066\\u200b\\n\\t\\ud800"
    )
    assert one_line(" two\n lines\x1b ") == "two lines\\x1b"


def test_json_knows_no_nan() -> None:
    value = {"a": [1.5, float("nan"), (float("inf"), 2)], 3: {"b": -float("inf"), "c": None, "d": "text", "e": True}}
    assert plain(value) == {"a": [1.5, None, [None, 2]], 3: {"b": None, "c": None, "d": "text", "e": True}}


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [("ascii", "Wᵀ × √D ≤ ∞ “x₁” é 漢", b'WT x sqrt D <= inf "x1" e ?'), ("latin-1", "× é ✓", b"\xd7 \xe9 +")],
)
def test_characters_that_an_encoding_lacks_have_a_likeness(encoding: str, text: str, shown: bytes) -> None:
    cli.main(["--version"])  # which registers the handler
    assert text.encode(encoding, "headscope") == shown


# ---------------------------------------------------------------- pictures


def test_both_polarities_and_every_mode_come_out_alike() -> None:
    bright = drawn()
    dark = Image.eval(bright, lambda level: 255 - level)
    wanted = prepare(bright).pixels
    assert wanted.shape == (SIDE, SIDE)
    assert wanted.max() == 1
    blank = Image.new("L", bright.size, 0)
    white, black = Image.new("L", bright.size, 255), blank
    made = {
        "dark": dark,
        "grey": Image.eval(bright, lambda level: 90 + level // 4),
        "RGB": dark.convert("RGB"),
        "P": bright.convert("P"),
        "1": bright.convert("1"),
        "CMYK": dark.convert("CMYK"),
        "I;16": Image.fromarray(np.asarray(dark).astype(np.uint16) * 257),
        "LA, black ink": Image.merge("LA", (black, bright)),
        "LA, white ink": Image.merge("LA", (white, bright)),
        "RGBA": Image.merge("RGBA", (black, black, black, bright)),
    }
    for name, picture in made.items():
        got = prepare(picture).pixels
        assert np.abs(got - wanted).max() < 0.02, name


def test_where_the_strokes_lie_and_how_large_they_are_does_not_matter() -> None:
    small, large = drawn(), drawn().resize((470, 610), Image.Resampling.NEAREST)
    wanted = prepare(small).pixels
    aside = Image.new("L", (900, 700))
    aside.paste(small, (800, 5))
    assert np.abs(prepare(aside).pixels - wanted).max() < 1e-6
    assert np.abs(prepare(large).pixels - wanted).max() < 0.05


def test_eight_by_eight_is_taken_as_it_is() -> None:
    image = load_example("digits").samples[4].image
    picture = Image.fromarray((image * 255).round().byte().numpy())
    prepared = prepare(picture)
    assert np.abs(prepared.pixels - image.numpy()).max() < 1 / 255
    assert prepared.done == ("8 x 8 L", "bright strokes on a dark ground, unchanged")


@pytest.mark.parametrize("size", [(1, 1), (9, 1), (2, 300)])
def test_an_even_picture_is_empty(size: tuple[int, int]) -> None:
    prepared = prepare(Image.new("L", size, 77))
    assert not prepared.pixels.any()
    assert prepared.done[-1] == "one even grey, no strokes"


def test_all_transparent_is_said() -> None:
    assert "fully transparent" in prepare(Image.new("RGBA", (20, 20), (255, 0, 0, 0))).done


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_an_opaque_picture_has_no_transparent_parts(mode: str) -> None:
    opaque, plain_picture = drawn().convert(mode), prepare(drawn())
    prepared = prepare(opaque)
    assert np.array_equal(prepared.pixels, plain_picture.pixels)
    assert prepared.done[1:] == plain_picture.done[1:]
    opaque.putpixel((0, 0), (0,) * len(opaque.getbands()))
    assert "transparent parts made white" in prepare(opaque).done


def test_the_orientation_of_a_photograph_is_followed(tmp_path: Path) -> None:
    turned = drawn().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=100, subsampling=0)
    got = read_picture(str(tmp_path / "turned.jpg")).pixels
    assert np.abs(got - prepare(drawn()).pixels).max() < 0.05


def test_a_picture_stands_upright_whoever_reads_it(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (3, 7)).save(tmp_path / "turned.jpg", exif=exif)
    assert with_picture(str(tmp_path / "turned.jpg"), lambda picture: picture.size) == (7, 3)


@pytest.mark.parametrize(("name", "kind"), [("x.gif", "GIF"), ("x.bmp", "BMP"), ("x.eps", "EPS")])
def test_other_formats_are_not_opened(name: str, kind: str, tmp_path: Path) -> None:
    drawn().save(tmp_path / name, format=kind)
    with pytest.raises(Mistake) as caught:
        read_picture(str(tmp_path / name))
    assert "expected a PNG or a JPEG" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", [("image",), ("watch", "digits", "--no-page", "--image")], ids=lambda c: c[0])
def test_a_pipe_in_the_place_of_a_picture_is_refused(command: tuple[str, ...], run: Run) -> None:
    os.mkfifo("pipe.png")
    message = f"headscope {command[0]}: pipe.png: is not a regular file, expected a PNG or a JPEG\n"
    assert run(*command, "pipe.png") == Ran(2, "", message)


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(extra)) if extra else b""
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + text + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b""))  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(60_000, 60_000), "has too many pixels"),
        (png(9_000, 9_000), "9000 x 9000 pixels, expected at most 50,000,000"),
        (png(30, 30, bytes(2 << 20) * 40), "is damaged"),
        (png(300, 300), "cannot be read"),
        (b"", "not a readable picture"),
        (b"\x89PNG\r\n\x1a\n", "not a readable picture"),
    ],
    ids=["bomb", "large", "bomb in a text", "cut off", "empty", "header alone"],
)
def test_a_picture_that_is_a_trap_is_a_mistake(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trap.png"
    path.write_bytes(data)
    with pytest.raises(Mistake) as caught:
        read_picture(str(path))
    assert message in str(caught.value)


def test_enlarged_digits_are_known_as_well_as_those_of_the_set() -> None:
    with np.load(HELDOUT) as heldout:
        images: NDArray[np.uint8] = heldout["images"][:120]
        labels = torch.from_numpy(heldout["labels"][:120].astype(np.int64))
    model = load_example("digits").model

    def right(pixels: NDArray[np.float64]) -> float:
        with torch.inference_mode():
            found = model(torch.from_numpy(pixels).float()).argmax(-1)
        return float((found == labels).float().mean())

    ink = images.astype(np.float64) / images.max()
    photographed = []
    for image in ink:
        paper = Image.new("L", (340, 260), 235)
        paper.paste(Image.fromarray((235 - 200 * image).astype(np.uint8)).resize((160, 160)), (100, 50))
        photographed.append(prepare(paper).pixels)
    assert right(np.stack(photographed)) >= right(ink) - 0.03
