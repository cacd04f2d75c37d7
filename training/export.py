"""Turn a checkpoint into what ships: weights as float16, figures, card; for digits also held-out images and samples."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from string import Template
from typing import Any

import evaluate
import numpy as np
import torch
from loop import CHECKPOINT, load_checkpoint
from PIL import Image
from prepare_text import write_atomically
from safetensors import safe_open
from torch import nn

from headscope.examples import load_example
from headscope.examples._weights import write_weights
from headscope.examples.digits import DigitsConfig, DigitsModel
from headscope.examples.text import TextConfig, TextModel

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "src" / "headscope" / "examples"
TESTS = HERE.parent / "tests" / "data"


def read_about(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about its run."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"])


def training_facts(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the figures that tells how the weights were made."""
    return {
        **saved["about"]["options"],
        "scheduled_steps": saved["about"]["options"]["steps"],
        "steps": saved["step"],
        "minutes": round(saved["seconds"] / 60, 1),
        "torch": torch.__version__.split("+")[0],
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_atomically(path, text.encode())


def ship(name: str, model: nn.Module, config: dict[str, Any]) -> Path:
    """Write the weights of an example, and empty papers until its figures are known; return its folder."""
    folder = EXAMPLES / name
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "model.safetensors", model, config)
    for paper, empty in (("card.md", ""), ("figures.json", "{}\n")):
        if not (folder / paper).exists():
            write_text(folder / paper, empty)
    return folder


def finish(folder: Path, figures: dict[str, Any], fields: dict[str, Any]) -> None:
    """Write figures and card."""
    write_text(folder / "figures.json", json.dumps(figures, indent=1) + "\n")
    card = Template((HERE / "cards" / f"{folder.name}.md").read_text(encoding="utf-8"))
    write_text(folder / "card.md", card.substitute({**figures["training"], **fields}))


def ranked(scores: list[list[float]]) -> list[str]:
    """Return heads as "layer.head (score)", the best first."""
    heads = [(score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    return [f"{layer}.{head} ({score:.3f})" for score, layer, head in sorted(heads, reverse=True)]


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.4g} %"


def export_text(run: Path, data: Path) -> None:
    """Ship the text model."""
    saved = read_about(run / CHECKPOINT)
    config: dict[str, Any] = saved["about"]["config"]
    model = TextModel(TextConfig(**config))
    load_checkpoint(run / CHECKPOINT, model)
    folder = ship("text", model, config)
    shutil.copyfile(data / "tokenizer.json", folder / "tokenizer.json")
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))

    example = load_example("text")
    figures = evaluate.text_figures(example, (TESTS / "heldout.txt").read_text(encoding="utf-8"))
    figures["training"] = training_facts(saved)
    best = {
        f"{score}_{place}": head
        for score, heads in figures["heads"].items()
        for place, head in enumerate(ranked(heads)[:2])
    }
    options = figures["training"]
    finish(
        folder,
        figures,
        {
            **config,
            **best,
            **figures["repeated"],
            "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
            "python": manifest["python"],
            "train_files": f"{manifest['splits']['train']['files']:,}",
            "train_bytes": f"{manifest['splits']['train']['bytes']:,}",
            "train_tokens": f"{manifest['splits']['train']['tokens']:,}",
            "heldout_files": manifest["splits"]["heldout"]["files"],
            "random_share": percent(options["random_share"]),
            "snippet_share": percent(options["snippet_share"]),
            "trained_tokens": f"{options['steps'] * options['rows'] * config['context']:,}",
            "nats_per_token": figures["heldout"]["nats_per_token"],
            "bits_per_byte": figures["heldout"]["bits_per_byte"],
            "heldout_sample_tokens": f"{figures['heldout']['tokens']:,}",
            "guess_nats": f"{math.log(config['vocab_size']):.3f}",
            "seed": options["seed"],
        },
    )


def export_digits(run: Path) -> None:
    """Ship the digits model, its samples and the held-out fifth."""
    from train_digits import INK, split_digits  # here, because only digits needs scikit-learn

    saved = read_about(run / CHECKPOINT)
    config: dict[str, Any] = saved["about"]["config"]
    model = DigitsModel(DigitsConfig(**config))
    load_checkpoint(run / CHECKPOINT, model)
    folder = ship("digits", model, config)
    _, (pixels, labels) = split_digits()
    np.savez_compressed(TESTS / "digits_heldout.npz", images=pixels, labels=labels)
    places = [[np.flatnonzero(labels == digit)[row] for digit in range(10)] for row in range(2)]
    sheet = np.block([[pixels[place] for place in row] for row in places])
    Image.fromarray(np.round(sheet * (255 / INK)).astype(np.uint8)).save(folder / "samples.png", optimize=True)

    images = torch.from_numpy(pixels).float() / INK
    figures = evaluate.digits_figures(load_example("digits"), images, torch.from_numpy(labels).long())
    figures["training"] = training_facts(saved)
    place = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    distances = [value for layer in figures["heads"]["distance"] for value in layer]
    finish(
        folder,
        figures,
        {
            **config,
            "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
            "heldout_images": figures["heldout"]["images"],
            "accuracy": f"{100 * figures['heldout']['accuracy']:.1f} %",
            "correct": figures["heldout"]["correct"],
            "nats": figures["heldout"]["nats"],
            "distance_min": f"{min(distances):.2f}",
            "distance_max": f"{max(distances):.2f}",
            "distance_even": f"{torch.cdist(place, place).mean():.2f}",
        },
    )


def main() -> int:
    """Export; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=["text", "digits"])
    parser.add_argument("--run", type=Path, help="folder of the checkpoint (default training/runs/NAME)")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder that prepare_text.py wrote")
    arguments = parser.parse_args()
    run = arguments.run or HERE / "runs" / arguments.name
    if not (run / CHECKPOINT).exists():
        print(f"no {CHECKPOINT} in {run}: train first", file=sys.stderr)
        return 2
    if arguments.name == "text":
        export_text(run, arguments.data)
    else:
        export_digits(run)
    print((EXAMPLES / arguments.name / "card.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
