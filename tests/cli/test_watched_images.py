"""``headscope watch --image``: the settings of image processors, compared with transformers' own processors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from headscope import Recording
from headscope.cli._shared.image_processing import read_processing
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import load
from support.commands import Run, answer
from support.html_pages import Page
from support.model_folders import save

FILE, NESTED = "preprocessor_config.json", "processor_config.json"
MEANS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
SMALL: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}, **MEANS}


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT for pictures of 12 x 12, without the file of an image processor."""
    config = transformers.ViTConfig(
        image_size=12, patch_size=4, intermediate_size=24, num_attention_heads=2, hidden_size=16, num_hidden_layers=1
    )
    model = transformers.ViTForImageClassification(config)
    return save(model, tmp_path_factory.mktemp("models") / "vit", tokenizer=False)


@pytest.fixture
def at(vit: Path, tmp_path: Path) -> Path:
    return shutil.copytree(vit, tmp_path / "at")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A photograph of 31 x 17, partly transparent."""
    pixels = np.random.default_rng(0).integers(0, 256, (17, 31, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(path := tmp_path / "p.png")
    return path


def write(folder: Path, values: Any, file: str = FILE) -> Path:
    (folder / file).write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return folder


def pixels(folder: Path, path: Path) -> torch.Tensor:
    prepare = load(str(folder)).prepare
    assert prepare is not None
    return prepare(str(path))


def notes(folder: Path) -> str:
    return "\n".join(load(str(folder)).notes)


# ---------------------------------------------------------------- as transformers does

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT", {"size": {"height": 12, "width": 12}}),
    "ViT, a number": ("ViT", {"size": 12, **MEANS, "resample": 0}),
    "ViT, not rescaled": ("ViT", {"size": 12, "do_rescale": False, **MEANS}),
    "ViT, another factor": ("ViT", {"size": 12, "rescale_factor": 1 / 127.5}),
    "ViT, not normalised": ("ViT", {"size": [12, 8], "do_normalize": False}),
    "ViT, not resized": ("ViT", {"do_resize": False}),
    "ViT, large": ("ViT", {"size": {"height": 40, "width": 21}, "resample": 5}),
    "CLIP": ("CLIP", {}),
    "CLIP, small": ("CLIP", {"size": {"shortest_edge": 13}, "crop_size": {"height": 12, "width": 12}}),
    "CLIP, numbers": ("CLIP", {"size": 12, "crop_size": 12, "do_rescale": False}),
    "CLIP, beyond the edges": ("CLIP", {"size": {"shortest_edge": 9}, "crop_size": {"height": 12, "width": 13}}),
    "CLIP, cropped alone": ("CLIP", {"do_resize": False, "crop_size": [20, 12]}),
    "CLIP, not cropped": ("CLIP", {"size": {"height": 12, "width": 12}, "do_center_crop": False}),
    "DeiT": ("DeiT", {"size": 15, "crop_size": 12}),
    "DeiT, by default": ("DeiT", {"crop_size": 12}),
    "SigLIP": ("Siglip", {"size": {"height": 12, "width": 12}}),
    "SigLIP, a number": ("Siglip", {"size": 12, **MEANS}),
    "BiT": ("Bit", {"size": {"shortest_edge": 14}, "crop_size": {"height": 12, "width": 12}}),
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_transformers(case: str, at: Path, picture: Path) -> None:
    kind, values = CASES[case]
    if case == "CLIP":  # without sizes, for a model of their size
        config = json.loads((at / "config.json").read_text(encoding="utf-8"))
        write(at, {**config, "image_size": 224}, "config.json")
        (at / "model.safetensors").unlink()
        save(transformers.ViTModel(transformers.ViTConfig.from_pretrained(at)), at, tokenizer=False)
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**values, do_convert_rgb=True)
    expected = processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    values = {"do_convert_rgb": True, **values}
    assert torch.equal(
        pixels(write(at, {"image_processor_type": f"{kind}ImageProcessor", **values}), picture), expected
    )
    processor.save_pretrained(at)
    assert torch.equal(pixels(at, picture), expected), "the file that transformers writes"
    assert notes(at) == ""


def test_sixteen_bits_of_grey_are_the_picture_of_eight(at: Path, tmp_path: Path) -> None:
    write(at, SMALL)
    grey = np.arange(144, dtype=np.uint8).reshape(12, 12)
    Image.fromarray(grey).save(tmp_path / "8.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "16.png")
    assert torch.equal(pixels(at, tmp_path / "16.png"), pixels(at, tmp_path / "8.png"))


def test_settings_of_a_whole_processor_come_first(at: Path, picture: Path) -> None:
    expected = pixels(write(at, SMALL), picture)
    (at / FILE).unlink()
    nested = {"processor_class": "ViTProcessor", "image_processor": SMALL}
    assert torch.equal(pixels(write(at, nested, NESTED), picture), expected)
    write(at, {**SMALL, "do_normalize": False})
    assert torch.equal(pixels(at, picture), expected)
    write(at, {"processor_class": "ViTProcessor"}, NESTED)
    assert float(pixels(at, picture).min()) >= 0
    assert notes(at) == ""


# ---------------------------------------------------------------- guesses


def test_what_is_guessed_is_said(at: Path) -> None:
    assert notes(at) == (
        "preprocessor_config.json is missing, so the preparation is a guess: the picture is scaled to 12 x 12 "
        "(bilinear), multiplied by 0.00392157, normalised with mean 0.5 and standard deviation 0.5; save the image "
        "processor in the folder of the model to change it"
    )


@pytest.mark.parametrize("offline", [True, False])
def test_the_hub_is_asked_for_the_files_unless_offline(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    local: dict[str, bool] = {}

    def fetch(name: str, file: str, *, local_files_only: bool, **_: Any) -> None:
        local[file] = local_files_only

    monkeypatch.setattr("transformers.utils.hub.cached_file", fetch)
    config = transformers.CLIPVisionConfig(image_size=224)
    _, (note,) = read_processing("no/such", config, offline=offline)
    assert local == {NESTED: offline, FILE: offline}
    assert "shortest edge 224 (bicubic), cropped to 224 x 224, multiplied by 0.00392157, normalised with mean " in note


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (MEANS, f"{FILE}: size: is missing: the picture is scaled to the model's 12 x 12"),
        (
            {**SMALL, "size": {"shortest_edge": 12, "longest_edge": 20}},
            f"{FILE}: size: shortest_edge and longest_edge are not applied: the picture is scaled to the model's "
            "12 x 12",
        ),
        ({**SMALL, "do_pad": True}, f"{FILE}: do_pad is not applied"),
        (
            {**SMALL, "image_processor_type": "ZorkImageProcessor", "resample": 3},
            f"{FILE}: image_processor_type is ZorkImageProcessor: of its steps resizing, centre crop, rescaling and "
            "normalising alone are applied",
        ),
    ],
)
def test_what_is_not_applied_is_said(values: dict[str, Any], note: str, at: Path, picture: Path) -> None:
    assert notes(write(at, values)) == note
    assert pixels(at, picture).shape == (1, 3, 12, 12)


def test_a_picture_that_does_not_fit_the_model_is_one_line(at: Path, picture: Path, run: Run) -> None:
    ran = run("watch", str(write(at, {**SMALL, "do_resize": False})), "--image", str(picture))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "the forward pass failed: Input image size (17*31) doesn't match model (12*12)" in ran.err


def test_a_picture_of_another_size_has_a_bin_for_each_patch(tmp_path: Path, picture: Path, run: Run) -> None:
    """DINOv2 takes pictures of any size, whatever its configuration has."""
    config = transformers.Dinov2Config(
        image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2, num_hidden_layers=1
    )
    folder = save(transformers.Dinov2Model(config), tmp_path / "dino", tokenizer=False)
    sizes = {"size": {"height": 12, "width": 20}, "do_center_crop": False}
    write(folder, {"image_processor_type": "BitImageProcessor", **sizes})
    answer(
        run("watch", str(folder), "--image", str(picture), "--json", "--out", "r.safetensors", "--page", "page.html")
    )
    shown = Page(Path("page.html").read_text(encoding="utf-8")).data["image"]
    assert (shown["grid"], shown["special"]) == ([3, 5], 1)
    (part,) = Recording.load("r.safetensors").stats.parts.values()
    assert part.lengths == (16, 16)
    assert part.map is not None
    assert part.map.bins >= 16


def test_the_size_is_that_of_the_part_that_takes_the_picture() -> None:
    vision = transformers.ViTConfig(image_size=12)
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, transformers.GPT2Config())
    processing, _ = read_processing("no/such", pair, offline=True)
    assert (processing.size, processing.resample) == ((12, 12), 2)
    blip = transformers.BlipConfig(vision_config={"image_size": [12, 16]})
    assert read_processing("no/such", blip, offline=True)[0].size == (12, 16)


# ---------------------------------------------------------------- mistakes

REMEDY = "use the file that belongs to these weights"
NUMBERS = "3 finite numbers"
MISTAKES: dict[str, tuple[str | dict[str, Any] | list[Any] | int | None, str]] = {
    "text": ("{bad", f"expected a JSON object, got text that is not valid JSON; {REMEDY}"),
    "a list": ([1], "expected a JSON object, got a list"),
    "a string": ('"x"', "expected a JSON object, got a string"),
    "a number": (5, "expected a JSON object, got a number"),
    "null": (None, "expected a JSON object, got null"),
    "mean, null": ({"image_mean": None}, f"image_mean: expected {NUMBERS}, got null; {REMEDY}"),
    "mean, a string": ({"image_mean": "x"}, f'image_mean: expected {NUMBERS}, got "x"; {REMEDY}'),
    "mean, two": ({"image_mean": [1, 2]}, f"image_mean: expected {NUMBERS}, got [1, 2]; {REMEDY}"),
    "mean, an object": ({"image_mean": {"a": 1}}, f'image_mean: expected {NUMBERS}, got {{"a": 1}}; {REMEDY}'),
    "mean, NaN": ('{"image_mean": [NaN, 1, 1]}', f"image_mean: expected {NUMBERS}, got [NaN, 1, 1]; {REMEDY}"),
    "mean, huge": ({"image_mean": [10**400, 1, 1]}, f"image_mean: expected {NUMBERS}, got [1"),
    "std, a string": ({"image_std": ["1", 1, 1]}, f'image_std: expected {NUMBERS} above 0, got ["1", 1, 1]; {REMEDY}'),
    "std, zero": ({"image_std": [0, 1, 1]}, f"image_std: expected {NUMBERS} above 0, got [0, 1, 1]; {REMEDY}"),
    "std, true": ({"image_std": True}, f"image_std: expected {NUMBERS} above 0, got true; {REMEDY}"),
    "factor": ({"rescale_factor": "a"}, f'rescale_factor: expected a finite number above 0, got "a"; {REMEDY}'),
    "factor, null": ({"rescale_factor": None}, f"rescale_factor: expected a finite number above 0, got null; {REMEDY}"),
    "filter": ({"resample": 99}, f"resample: expected the number of a filter of Pillow, 0 to 5, got 99; {REMEDY}"),
    "size": ({"size": {"height": 0, "width": 3}}, "size: expected height and width, or shortest_edge, each a whole"),
    "size, a word": ({"size": "x"}, "size: expected height and width, or shortest_edge, each a whole number from 1 to"),
    "size, huge": ({"size": 10**9}, "size: expected height and width, or shortest_edge, each a whole number from 1 to"),
    "crop": ({"do_center_crop": True}, "crop_size: expected height and width, each a whole number from 1 to 4096, got"),
    "switch": ({"do_rescale": "no"}, f'do_rescale: expected true or false, got "no"; {REMEDY}'),
    "class": ({"image_processor_type": 5}, f"image_processor_type: expected the name of a class, got 5; {REMEDY}"),
    "unknown class": (
        {"image_processor_type": "ZorkImageProcessor", "size": 12, "resample": 2},
        f"image_mean: expected {NUMBERS}, got none; add it, or {REMEDY}",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_damaged_file_is_one_line(case: str, at: Path) -> None:
    values, message = MISTAKES[case]
    with pytest.raises(Mistake) as error:
        load(str(write(at, values)))
    line = error.value.format_message()
    assert line.startswith(f"{at}: {FILE}: {message}"), line
    assert (error.value.exit_code, "\n" in line, len(line) < len(str(at)) + 230) == (2, False, True)
    (at / FILE).unlink()
    if isinstance(values, dict):
        with pytest.raises(Mistake) as error:
            load(str(write(at, {"image_processor": values}, NESTED)))
        assert f"{at}: {NESTED}: image_processor: {message}" in error.value.format_message()


def test_a_file_that_is_no_file(at: Path) -> None:
    (at / FILE).mkdir()
    with pytest.raises(Mistake, match=rf"{FILE}: expected a regular file, got a directory"):
        load(str(at))


def test_a_picture_that_would_become_too_large(at: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40000, 1)).save(tmp_path / "long.png")
    with pytest.raises(Mistake, match=r"long.png: becomes 8960000 x 224 pixels, expected at most 50000000 in all"):
        pixels(write(at, {**SMALL, "size": {"shortest_edge": 224}}), tmp_path / "long.png")
