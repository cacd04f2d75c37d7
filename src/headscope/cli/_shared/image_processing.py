"""Settings of image processors: what ``preprocessor_config.json`` and ``processor_config.json`` specify, and its use.

The steps are those of transformers' processors on Pillow, to the bit: resizing, centre crop, rescaling, normalising.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headscope._support.text import visible
from headscope.cli._shared.digits import MOST_PIXELS, with_picture
from headscope.cli._shared.folder_checks import check_is_regular, check_kind
from headscope.cli._shared.mistakes import Mistake, describe_unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

FILE = "preprocessor_config.json"
NESTED = "processor_config.json"  # written for a whole processor; transformers reads it first
PART = "image_processor"  # the key of the settings in the latter
REMEDY = "use the file that belongs to these weights"
MOST_SIDE = 4096
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # the numbers of Pillow
BILINEAR, BICUBIC = 2, 3
MODES = {1: "L", 3: "RGB"}
SWITCHES = {"do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True}
OTHER_SIZES = (
    {"shortest_edge", "longest_edge"},
    {"longest_edge"},
    {"max_height", "max_width"},
    {"min_pixels", "max_pixels"},
)
CLIP: dict[str, Any] = {
    "resample": BICUBIC,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": 224,
}
VIT: dict[str, Any] = {"resample": BILINEAR, "image_mean": 0.5, "image_std": 0.5, "size": 224}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": VIT,
    "DeiT": {**VIT, "resample": BICUBIC, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Siglip": {**VIT, "resample": BICUBIC, "size": {"height": 224, "width": 224}},
    "CLIP": CLIP,
    "Bit": CLIP,
}
"""Default values of those classes of transformers that have only these steps."""

EDGES = ("CLIP", "Bit", "Siglip")  # for these, a size of one number is the shortest edge
MODELS = {"vit": "ViT", "deit": "DeiT", "siglip": "Siglip", "clip": "CLIP", "dinov2": "Bit"}
"""The class for a type of model, if the file names none."""


@dataclass(frozen=True)
class ImageProcessing:
    """How a picture becomes what a model takes.

    Attributes:
        mode: of Pillow, to which the picture is converted.
        size: height and width, or one number for the shortest edge; None = not resized.
        resample: the number of Pillow's filter.
        crop: height and width of the centre crop; None = no crop.
        factor: multiplies the pixels, 0 to 255; None = not rescaled.
        mean: of each channel, subtracted; None without normalising.
        std: of each channel, divided by; None without normalising.
    """

    mode: str
    size: tuple[int, int] | int | None
    resample: int
    crop: tuple[int, int] | None
    factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def read(self, path: str) -> NDArray[np.float32]:
        """Return the pixels of a PNG or JPEG, [channels, height, width].

        Raises:
            Mistake: it cannot be read, or would have too many pixels.
        """
        pixels = np.asarray(with_picture(path, lambda picture: self._cut(picture, path)))
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        if self.factor is not None:
            pixels = pixels.astype(np.float64) * self.factor
        pixels = pixels.astype(np.float32)
        if self.mean is not None and self.std is not None:
            pixels = (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _cut(self, picture: Image, path: str) -> Image:
        """Return a picture in the mode, resized and cropped; beyond its edges a crop is black."""
        picture = _opaque(_eight_bits(picture)).convert(self.mode)
        if self.size is not None:
            height, width = self._resized(picture)
            if height * width > MOST_PIXELS:
                raise Mistake(f"{path}: becomes {width} x {height} pixels, expected at most {MOST_PIXELS} in all")
            picture = picture.resize((width, height), self.resample)
        if self.crop is not None:
            height, width = self.crop
            left, top = (picture.width - width) // 2, (picture.height - height) // 2
            picture = picture.crop((left, top, left + width, top + height))
        return picture

    def _resized(self, picture: Image) -> tuple[int, int]:
        """Return the height and width that a picture is resized to."""
        if isinstance(self.size, tuple):
            return self.size
        assert self.size is not None
        short, long = sorted(picture.size)
        longest = int(self.size * long / short)
        return (longest, self.size) if picture.width <= picture.height else (self.size, longest)

    def describe(self) -> str:
        """Return the steps in words."""
        steps: list[str] = []
        if self.size is not None:
            size = "shortest edge " + str(self.size) if isinstance(self.size, int) else _by(self.size)
            steps.append(f"scaled to {size} ({FILTERS[self.resample]})")
        if self.crop is not None:
            steps.append(f"cropped to {_by(self.crop)}")
        if self.factor is not None:
            steps.append(f"multiplied by {self.factor:.6g}")
        if self.mean is not None and self.std is not None:
            mean, std = (", ".join(f"{x:g}" for x in dict.fromkeys(values)) for values in (self.mean, self.std))
            steps.append(f"normalised with mean {mean} and standard deviation {std}")
        return ", ".join(steps)


def _eight_bits(picture: Image) -> Image:
    """Return a grey picture of 16 bits a pixel with 8 bits; Pillow's own conversion clips values above 255."""
    from PIL import Image

    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture, np.float64) / 257).round().clip(0, 255).astype(np.uint8))


def _opaque(picture: Image) -> Image:
    """Return a picture on white where it is transparent, as transformers does."""
    from PIL import Image

    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)


def _by(size: tuple[int, int]) -> str:
    """Return a size in words, width first, as those of pictures are."""
    height, width = size
    return f"{width} x {height}"


# ---------------------------------------------------------------- the files


def read_processing(name: str, config: Any, *, offline: bool) -> tuple[ImageProcessing, list[str]]:
    """Return how a model takes pictures, and notes of what its files specify and headscope does not do, or guesses.

    Args:
        name: of the model: a folder, or a name on the hub.
        config: of the model.
        offline: read the local cache alone.

    Raises:
        Mistake: a value is impossible, or is missing and has no default.
    """
    config = _config_of_images(config)
    values, file = _settings(name, offline=offline)
    kind, label = _kind(name, file, values or {}, config)
    defaults = DEFAULTS.get(kind, VIT if values is None else {})
    source = _Source(name, file, values or {}, defaults, kind in EDGES)
    channels = getattr(config, "num_channels", 3)
    if channels not in MODES:
        raise Mistake(f"{name}: config.json: num_channels: expected 1 or 3 for --image, got {channels}")
    size, crop, notes = _sizes(source, _model_size(config))
    normalized = source.switch("do_normalize")
    processing = ImageProcessing(
        MODES[channels],
        size,
        source.resample() if size is not None else BILINEAR,
        crop,
        source.factor() if source.switch("do_rescale") else None,
        source.numbers("image_mean", channels) if normalized else None,
        source.numbers("image_std", channels) if normalized else None,
    )
    if values is None:
        remedy = "save the image processor in the folder of the model to change it"
        return processing, [
            f"{FILE} is missing, so the preparation is a guess: the picture is {processing.describe()}; {remedy}"
        ]
    others = sorted(key for key in values if key.startswith("do_") and key not in SWITCHES and values[key])
    notes += [f"{file}: {visible(key)} is not applied" for key in others if key != "do_convert_rgb"]
    if kind not in DEFAULTS:
        notes.append(
            f"{file}: {label}: of its steps resizing, centre crop, rescaling and normalising alone are applied"
        )
    return processing, notes


def _settings(name: str, *, offline: bool) -> tuple[dict[str, Any] | None, str]:
    """Return the settings of the image processor, if there are any, and the file, with the key they are under.

    As transformers reads them: those in ``processor_config.json`` come first.
    """
    nested = _read(name, NESTED, offline=offline)
    if nested is not None and nested.get(PART) is not None:
        file = f"{NESTED}: {PART}"
        check_kind(nested[PART], f"{name}: {file}: expected a JSON object")
        return nested[PART], file
    return _read(name, FILE, offline=offline), FILE


def _read(name: str, file: str, *, offline: bool) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model, if there is such a file."""
    from transformers.utils.hub import cached_file

    if (local := Path(name, file)).exists():
        check_is_regular(name, local)
    path = cached_file(name, file, local_files_only=offline, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Mistake(f"{name}: {describe_unreadable(file, error)}") from error
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{name}: {file}: expected a JSON object, got text that is not valid JSON; {REMEDY}") from error
    check_kind(values, f"{name}: {file}: expected a JSON object")
    return values


def _kind(name: str, file: str, values: Mapping[str, Any], config: Any) -> tuple[str, str]:
    """Return the class of the image processor, without the end of its name, and what names it, in words."""
    for key in ("image_processor_type", "feature_extractor_type"):
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise _mistake(name, f"{file}: {key}", "the name of a class", value)
        bare = value.removesuffix("Fast").removesuffix("Pil")
        return bare.removesuffix("ImageProcessor").removesuffix("FeatureExtractor"), f"{key} is {visible(value)}"
    model = str(getattr(config, "model_type", "")).removesuffix("_vision_model")
    return MODELS.get(model, ""), "names no image_processor_type"


def _config_of_images(config: Any) -> Any:
    """Return the part of a configuration that describes what takes the picture."""
    parts = [config, *(getattr(config, key, None) for key in ("vision_config", "encoder"))]
    return next((part for part in parts if getattr(part, "image_size", None) is not None), config)


def _model_size(config: Any) -> tuple[int, int] | None:
    """Return the height and width that a model is made for, if its configuration has them."""
    size: Any = getattr(config, "image_size", None)
    return _sides(list(size) if isinstance(size, tuple) else size)


def _sizes(
    source: _Source, model_size: tuple[int, int] | None
) -> tuple[tuple[int, int] | int | None, tuple[int, int] | None, list[str]]:
    """Return the size, the crop, and notes where the model's own size takes the place of what the file specifies."""
    crop = source.crop() if source.switch("do_center_crop") else None
    if not source.switch("do_resize"):
        return None, crop, []
    size, problem = source.size()
    if problem == "is missing" and size is not None and model_size in (None, crop or size):
        problem = ""
    if not problem:
        return size, crop, []
    if model_size is None:
        raise source.mistake("size", "height and width, or shortest_edge")
    return model_size, None, [f"{source.file}: size: {problem}: the picture is scaled to the model's {_by(model_size)}"]


def _mistake(name: str, place: str, expected: str, value: Any) -> Mistake:
    got = json.dumps(value)
    shown = got if len(got) <= 60 else f"{got[:57]}..."
    return Mistake(f"{name}: {place}: expected {expected}, got {visible(shown)}; {REMEDY}")


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SIDE


@dataclass(frozen=True)
class _Source:
    """The settings of an image processor, each of which is checked when it is read.

    Attributes:
        name: of the model.
        file: where the settings are, in words.
        values: as they are in the file.
        defaults: where there is none.
        edge: a size that is one number is that of the shortest edge.
    """

    name: str
    file: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    edge: bool

    def mistake(self, key: str, expected: str) -> Mistake:
        """Return the error for a value that is impossible, or is missing and has no default."""
        if key in self.values:
            return _mistake(self.name, f"{self.file}: {key}", expected, self.values[key])
        return Mistake(f"{self.name}: {self.file}: {key}: expected {expected}, got none; add it, or {REMEDY}")

    def value(self, key: str, *, nullable: bool = True) -> Any:
        """Return a value of the file, or its default where the file has none, or null where that means none."""
        if key in self.values and not (nullable and self.values[key] is None):
            return self.values[key]
        return self.defaults.get(key)

    def switch(self, key: str) -> bool:
        """Return whether a step is applied."""
        value = self.value(key)
        if value is None:
            return SWITCHES[key]
        if not isinstance(value, bool):
            raise self.mistake(key, "true or false")
        return value

    def resample(self) -> int:
        """Return the number of the filter; null is transformers' bilinear."""
        value = self.value("resample")
        if value is None and "resample" in self.values:
            return BILINEAR
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(FILTERS):
            raise self.mistake("resample", f"the number of a filter of Pillow, 0 to {len(FILTERS) - 1}")
        return value

    def factor(self) -> float:
        """Return what the pixels are multiplied by."""
        if "rescale_factor" not in self.values:
            return 1 / 255
        number = _finite(self.values["rescale_factor"])
        if number is None or np.float32(number) <= 0:
            raise self.mistake("rescale_factor", "a finite number above 0")
        return number

    def numbers(self, key: str, channels: int) -> tuple[float, ...]:
        """Return a number for each channel; one number is that of all."""
        value = self.value(key, nullable=False)
        every: list[Any] = value if isinstance(value, list) else [value] * channels
        numbers = [number for number in map(_finite, every) if number is not None]
        above = key == "image_std"
        if (
            len(numbers) != len(every)
            or len(every) != channels
            or (above and not all(np.float32(x) > 0 for x in numbers))
        ):
            count = "1 finite number" if channels == 1 else f"{channels} finite numbers"
            raise self.mistake(key, count + (" above 0" if above else ""))
        return tuple(numbers)

    def crop(self) -> tuple[int, int]:
        """Return the height and width of the crop."""
        value = self.value("crop_size")
        sides = _sides(value)
        if sides is None:
            raise self.mistake("crop_size", f"height and width, each a whole number from 1 to {MOST_SIDE}")
        return sides

    def size(self) -> tuple[tuple[int, int] | int | None, str]:
        """Return the size, and why it is not that of the file, if it is not."""
        value = self.value("size")
        problem = "is missing" if self.values.get("size") is None else ""
        if value is None:
            return None, problem
        if isinstance(value, dict):
            sizes = {key: x for key, x in value.items() if x is not None}
            edge: Any = sizes.get("shortest_edge")
            if set(sizes) == {"shortest_edge"} and _is_side(edge):
                return edge, problem
            if set(sizes) in OTHER_SIZES and all(_is_count(x) for x in sizes.values()):
                return None, f"{' and '.join(sizes)} are not applied"
        if self.edge and isinstance(value, int) and _is_side(value):
            return value, problem
        sides = _sides(value)
        if sides is None:
            sizes = f"height and width, or shortest_edge, each a whole number from 1 to {MOST_SIDE}"
            raise self.mistake("size", sizes)
        return sides, problem


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sides(value: Any) -> tuple[int, int] | None:
    """Return the height and width that a value specifies: an object, a list, or one number for both."""
    sides: Any = value
    if isinstance(value, dict):
        sizes = {key: x for key, x in value.items() if x is not None}
        sides = [sizes["height"], sizes["width"]] if set(sizes) == {"height", "width"} else None
    elif not isinstance(value, list):
        sides = [value, value]
    if sides is None or len(sides) != 2 or not all(_is_side(side) for side in sides):
        return None
    return (sides[0], sides[1])


def _finite(value: Any) -> float | None:
    """Return a number that is finite in float32; None for other values."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= float(np.finfo(np.float32).max) else None  # NaN is not
