"""Prepare a picture of a digit for the shipped model: 8 x 8 pixels, bright strokes on a dark ground."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

SIDE = 8
MOST_PIXELS = 50_000_000  # more than a photograph has; guards against decompression bombs
LARGE = 1024  # pixels along a side; larger pictures are scaled down
FORMATS = ("PNG", "JPEG")
INK = 0.3  # mean ink of the training digits; full ink is 1
MOST_GAIN = 3.0  # a larger gain would turn faint grey into strokes
STROKE = 0.5  # share of the contrast above which a pixel belongs to a stroke


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared picture.

    Attributes:
        pixels: float64 [8, 8] in [0, 1], bright strokes.
        done: the steps of the preparation, in order, a few words each.
    """

    pixels: NDArray[np.float64]
    done: tuple[str, ...]


def read_picture(path: str) -> Prepared:
    """Read a PNG or JPEG and prepare it.

    Raises:
        Mistake: the file does not exist, is not a picture, is damaged, or is too large.
    """
    return with_picture(path, prepare)


def with_picture(path: str, use: Callable[[Image], Result]) -> Result:
    """Return the result of ``use`` on a PNG or JPEG, rotated upright by its EXIF orientation.

    Raises:
        Mistake: the file does not exist, is not a picture, is damaged, or is too large.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path:
        raise Mistake("image: expected the path of a picture, got an empty path")
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # opening a pipe does not return
        raise Mistake(f"{path}: is not a regular file, expected a PNG or a JPEG")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata, which does not affect the result
        try:
            with Image.open(path, formats=FORMATS) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    raise Mistake(
                        f"{path}: {picture.width} x {picture.height} pixels, expected at most {MOST_PIXELS:,} in all"
                    )
                picture.load()
                return use(ImageOps.exif_transpose(picture))
        except UnidentifiedImageError as error:
            raise Mistake(f"{path}: not a readable picture, expected a PNG or a JPEG") from error
        except Image.DecompressionBombError as error:
            raise Mistake(f"{path}: has too many pixels, expected at most {MOST_PIXELS:,}") from error
        except OSError as error:  # missing, unreadable, or truncated
            raise Mistake(f"{path}: cannot be read: {error.strerror or error}") from error
        except (SyntaxError, ValueError, EOFError, OverflowError) as error:  # Pillow raises these for damaged files
            raise Mistake(f"{path}: is damaged: {error}") from error


def prepare(picture: Image) -> Prepared:
    """Convert a picture to grey with bright strokes, crop it to them, and scale it to 8 x 8 at full contrast."""
    done = [f"{picture.width} x {picture.height} {picture.mode}"]
    grey = _grey(picture, done)
    low, high = float(grey.min()), float(grey.max())
    if high == low:
        done.append("one even grey, no strokes")
        return Prepared(np.zeros((SIDE, SIDE)), tuple(done))
    light = (grey - low) / (high - low)
    if _ground(light) > STROKE:
        light = 1 - light
        done.append("dark strokes on a light ground, inverted")
    else:
        done.append("bright strokes on a dark ground, unchanged")
    if grey.shape == (SIDE, SIDE):
        return Prepared(light, tuple(done))
    return Prepared(_inked(_fit(light, done), done), tuple(done))


def _grey(picture: Image, done: list[str]) -> NDArray[np.float64]:
    """Return the brightness of each pixel, [height, width], in any unit."""
    if picture.mode.startswith(("I", "F")):  # 16 or 32 bits a pixel: Pillow's own conversion would clip them at 255
        picture = picture.convert("F")
    if max(picture.size) > LARGE:
        picture = picture.copy()
        picture.thumbnail((LARGE, LARGE), reducing_gap=2)
        done.append(f"shrunk to {picture.width} x {picture.height}")
    if picture.mode == "F":
        return np.asarray(picture, dtype=np.float64)
    if not picture.has_transparency_data:
        return np.asarray(picture.convert("L"), dtype=np.float64)
    colours = np.asarray(picture.convert("LA"), dtype=np.float64)
    if colours[..., 1].min() == 255:
        return colours[..., 0]
    light, cover = colours[..., 0] / 255, colours[..., 1] / 255
    if not cover.any():
        done.append("fully transparent")
        return np.zeros(light.shape)
    # transparent parts become black or white, whichever contrasts with the drawn parts
    drawn = float((light * cover).sum() / cover.sum())
    ground = 0.0 if drawn > 0.5 else 1.0
    done.append(f"transparent parts made {'black' if ground == 0 else 'white'}")
    return light * cover + ground * (1 - cover)


def _ground(light: NDArray[np.float64]) -> float:
    """Return the median brightness of the border."""
    border = np.concatenate([light[0], light[-1], light[1:-1, 0], light[1:-1, -1]])
    return float(np.median(border))


def _fit(light: NDArray[np.float64], done: list[str]) -> NDArray[np.float64]:
    """Crop to the strokes, pad to a square, and scale to 8 x 8."""
    from PIL import Image

    rows, columns = (np.flatnonzero((light > STROKE).any(axis)) for axis in (1, 0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    cut = light[top:bottom, left:right]
    height, width = cut.shape
    side = max(height, width)
    square = np.zeros((side, side))
    y, x = (side - height) // 2, (side - width) // 2
    square[y : y + height, x : x + width] = cut
    done.append(f"cropped to the strokes, {width} x {height} at ({left}, {top})")
    done.append(f"scaled to {SIDE} x {SIDE}")
    small = Image.fromarray(square.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, dtype=np.float64)


def _inked(small: NDArray[np.float64], done: list[str]) -> NDArray[np.float64]:
    """Raise the contrast, and the ink to that of the training digits: scaled to 8 x 8, thin strokes are faint."""
    small = small / small.max()
    gain = 1.0
    while gain < MOST_GAIN and np.minimum(1, small * gain).mean() < INK:
        gain *= 1.1
    if gain > 1:
        done.append(f"thin strokes brightened {gain:.1f} times")
    return np.minimum(1, small * gain)
