"""Two small trained models that ship with the package: ``load_example("text")`` and ``load_example("digits")``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from torch import nn

    from headscope.examples.digits import DigitsModel, Sample
    from headscope.examples.text import TextModel, TextTokenizer

__all__ = ["DigitsExample", "Example", "TextExample", "load_example"]

_FOLDER = Path(__file__).parent
_RANDOM_SEED = 0


@dataclass(frozen=True)
class Example:
    """A model that ships with the package.

    Attributes:
        name: "text" or "digits".
        trained: False if the weights are random, from a seed.
        model: In eval mode, float32, on the CPU; `model.layers[i].attention` is a `headscope.MultiHeadAttention`.
        card: What the model is: data, licence, training, figures; Markdown.
        figures: The card's figures, those of the trained weights, as JSON values.

    Examples:
        >>> from headscope import load_example
        >>> example = load_example("digits")
        >>> example.name, example.trained, example.model.training
        ('digits', True, False)
    """

    name: str
    trained: bool
    model: nn.Module = field(repr=False)
    card: str = field(repr=False)
    figures: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class TextExample(Example):
    """The language model, with its tokenizer.

    Examples:
        >>> from headscope import load_example
        >>> load_example("text").tokenizer.pieces("import torch")
        ['import', ' t', 'or', 'ch']
    """

    model: TextModel = field(repr=False)
    tokenizer: TextTokenizer = field(repr=False)


@dataclass(frozen=True)
class DigitsExample(Example):
    """The vision transformer, with twenty digits that it was not trained on.

    Examples:
        >>> from headscope import load_example
        >>> example = load_example("digits")
        >>> len(example.samples), example.samples[0].image.shape, example.samples[0].label
        (20, torch.Size([8, 8]), 0)
    """

    model: DigitsModel = field(repr=False)
    samples: tuple[Sample, ...] = field(repr=False)


@overload
def load_example(name: Literal["text"], *, seed_random: bool = False) -> TextExample: ...


@overload
def load_example(name: Literal["digits"], *, seed_random: bool = False) -> DigitsExample: ...


@overload
def load_example(name: str, *, seed_random: bool = False) -> TextExample | DigitsExample: ...


def load_example(name: str, *, seed_random: bool = False) -> TextExample | DigitsExample:
    """Return a small trained model that ships with the package.

    Args:
        name: "text", a language model of the Python standard library's source and documentation, or "digits", a vision
            transformer of 8 x 8 handwritten digits.
        seed_random: Use random weights from a fixed seed instead of trained ones, with the same sizes. torch's own
            generator does not advance.

    Raises:
        ValueError: An example of that name does not exist.

    Examples:
        >>> from headscope import load_example
        >>> example = load_example("digits")
        >>> logits = example.model(example.samples[3].image[None])
        >>> int(logits.argmax()), example.samples[3].label
        (3, 3)
    """
    if name == "text":
        return _load_text(trained=not seed_random)
    if name == "digits":
        return _load_digits(trained=not seed_random)
    raise ValueError(f"name: got {name!r}, expected one of 'text', 'digits'")


def _load_text(*, trained: bool) -> TextExample:
    from headscope.examples._weights import build
    from headscope.examples.text import TextConfig, TextModel, TextTokenizer

    folder = _FOLDER / "text"
    model = build(
        lambda config: TextModel(TextConfig(**config)),
        folder / "model.safetensors",
        random_seed=None if trained else _RANDOM_SEED,
    )
    return TextExample(
        name="text",
        model=model,
        trained=trained,
        card=(folder / "card.md").read_text(encoding="utf-8"),
        figures=json.loads((folder / "figures.json").read_text(encoding="utf-8")),
        tokenizer=TextTokenizer(folder / "tokenizer.json"),
    )


def _load_digits(*, trained: bool) -> DigitsExample:
    from headscope.examples._weights import build
    from headscope.examples.digits import DigitsConfig, DigitsModel, read_samples

    folder = _FOLDER / "digits"
    model = build(
        lambda config: DigitsModel(DigitsConfig(**config)),
        folder / "model.safetensors",
        random_seed=None if trained else _RANDOM_SEED,
    )
    return DigitsExample(
        name="digits",
        model=model,
        trained=trained,
        card=(folder / "card.md").read_text(encoding="utf-8"),
        figures=json.loads((folder / "figures.json").read_text(encoding="utf-8")),
        samples=read_samples(folder / "samples.png"),
    )
