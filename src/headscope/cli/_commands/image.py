"""``headscope image``: what each head of the shipped vision model looks at in a digit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import INDEX, console, print_json, say
from headscope.cli._shared.headings import (
    attention_in_words,
    heading,
    meanings,
    show_closing,
    show_highlights,
    show_steps,
)
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.observation import (
    CLEAR,
    Choice,
    HeadOptions,
    check_range,
    choose_head,
    heads_as_dict,
    looking_options,
    one_thread,
    run_model,
    trace_layer,
)
from headscope.cli._shared.pages import IMAGE_PAGE, check_apart, save_page

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from headscope.examples import DigitsExample
    from headscope.report import Sheet
    from headscope.tracing import Trace

SAMPLE = 3
BAR = 20  # characters of a probability of 1


@dataclass(frozen=True, slots=True)
class Digit:
    """An image [8, 8], ink from 0 to 1, and where it came from.

    Attributes:
        label: which digit it is, if that is known.
        done: how a picture of the user's was prepared.
        number: which of the shipped samples it is; None for a picture of the user's.
    """

    ink: Tensor
    source: str
    label: int | None
    done: tuple[str, ...]
    number: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """A digit as the model read it."""

    sheet: Sheet
    digit: Digit
    probabilities: list[float]
    choice: Choice
    trace: Trace
    page: str | None

    @property
    def predicted(self) -> int:
        return max(range(len(self.probabilities)), key=lambda each: self.probabilities[each])


@click.command(short_help="See what each head of a vision model looks at in a digit.")
@click.argument("path", required=False)
@click.option("--sample", type=INDEX, help=f"A shipped digit that the model was not trained on.  [default: {SAMPLE}]")
@looking_options(IMAGE_PAGE)
def image(
    path: str | None,
    sample: int | None,
    **options: Any,
) -> None:
    """Run the shipped vision model on a digit and show what each head looks at.

    The digit is a PNG or JPEG at PATH, of any size, or a sample that ships with headscope.

    Prints the predicted class, one layer step by step, what every head looks at, and the maps of one layer. Writes a
    page with the maps of all heads.
    """
    if path is not None and sample is not None:
        raise Mistake("expected one digit, got PATH and --sample; drop one of the two")
    parsed = HeadOptions.of(IMAGE_PAGE, **options)
    check_apart("--out", parsed.page, {"the picture": path})
    with progress_line("loading torch"):
        import_module("torch")
    with progress_line("looking"), one_thread():
        look = _look(path, sample, parsed)
    if parsed.as_json:
        print_json(_as_dict(look))
    else:
        _print(look, parsed.explain)


def _look(path: str | None, sample: int | None, options: HeadOptions) -> Look:
    from headscope import load_example
    from headscope.report import image_sheet

    example = load_example("digits", seed_random=options.seed_random)
    sizes = example.model.config
    check_range("--layer", options.layer, sizes.num_layers)
    check_range("--head", options.head, sizes.num_heads)
    digit = _digit(example, path, sample)
    passed = run_model(example.model, digit.ink[None])
    state = "trained on handwritten digits" if example.trained else "untrained, random weights"
    rows, columns = digit.ink.shape[0], digit.ink.shape[1]
    sheet = image_sheet(
        visible(digit.source),
        (digit.ink * 255).round().byte().numpy(),
        (rows, columns),
        passed.weights,
        position_maps=_by_position(example, digit.number),
        footer={
            "Model": f"{sizes.num_layers} layers of {sizes.num_heads} heads, width {sizes.embed_dim}, {state}",
            "Input": visible("; ".join((digit.source, *digit.done))) + f", {rows} × {columns} patches",
            "Options": options.describe(),
        },
    )
    for each in sheet.notes:
        say(f"headscope image: {each}")
    choice = choose_head(sheet, options)
    trace = trace_layer(passed, choice.layer)
    title = f"Layer {choice.layer}, step by step"
    shown = replace(sheet, trace=trace.to_dict()["rows"], trace_title=title, opens_on=(choice.layer, choice.head))
    shown = replace(shown, tiles=passed.tiles)
    probabilities = passed.logits[0].float().softmax(-1).tolist()
    return Look(shown, digit, probabilities, choice, trace, save_page(shown, options.page, options.force))


def _digit(example: DigitsExample, path: str | None, sample: int | None) -> Digit:
    """Return the digit of a file, or a sample.

    Raises:
        Mistake: the sample does not exist, or the file is not a picture.
    """
    if path is None:
        number = SAMPLE if sample is None else sample
        check_range("--sample", number, len(example.samples))
        chosen = example.samples[number]
        return Digit(chosen.image, f"shipped sample {number}", chosen.label, (), number)
    import torch

    from headscope.cli._shared.digits import read_picture

    prepared = read_picture(path)
    return Digit(torch.from_numpy(prepared.pixels).float(), path, None, prepared.done, None)


def _by_position(example: DigitsExample, shown: int | None) -> Sequence[Tensor]:
    """Return what position alone explains: the mean weights of each layer over all samples except the one shown."""
    import torch

    others = [sample.image for number, sample in enumerate(example.samples) if number != shown]
    with torch.inference_mode():
        _, weights = example.model(torch.stack(others), need_weights=True)
    return [layer.mean(0) for layer in weights]


def _print(look: Look, explain: bool) -> None:
    from rich.text import Text

    from headscope.cli._shared.head_grid import HeadGrid
    from headscope.cli._shared.pictures import Gallery
    from headscope.report import regions, terminal
    from headscope.report.highlights import sheet_highlights
    from headscope.report.words import REGIONS

    sheet, choice, digit = look.sheet, look.choice, look.digit
    out = console()
    out.print(Text(visible(f"headscope image: {sheet.footer['Model']}"), style="dim"))
    out.print(Text(f"{attention_in_words('patch')} Here each patch looks at all patches."))
    show_highlights(out, sheet_highlights(sheet))
    known = "" if digit.label is None else f", a {digit.label}"
    heading(out, "The digit", f"{visible(digit.source)}{known}; each of its 64 pixels is a patch")
    if digit.done:
        out.print(Text(visible("; ".join(digit.done)), style="dim"))
    out.print(_digit_and_classes(look))
    show_steps(out, look.trace, choice.layer, sheet.layers, explain)
    heading(out, "All heads", f"where each looks most: ratio 1 = chance, 4 = maximum; - = below {CLEAR:g}")
    out.print(terminal.statistics_table(sheet) if explain else HeadGrid(sheet, choice))
    out.print(meanings(REGIONS if explain else regions.REGIONS, REGIONS))
    heading(out, f"All heads of layer {choice.layer}", "where the 64 patches look, on average")
    out.print(Gallery(sheet, choice.layer))
    heading(out, f"Layer {choice.layer}, head {choice.head}", choice.why)
    out.print(terminal.image_picture(sheet, choice.layer, choice.head))
    show_closing(out, sheet, look.page, explain)


def _digit_and_classes(look: Look) -> RenderableType:
    """Return the digit as the model reads it, and next to it the probability of each class with a bar."""
    from rich.table import Table
    from rich.text import Text

    from headscope.cli._shared import pictures

    lines: list[Text] = []
    for each, probability in enumerate(look.probabilities):
        style = "bold green" if each == look.predicted else ""
        lines.append(Text(f"{each}  {probability:6.1%}  {'█' * round(BAR * probability)}", style=style))
    table = Table.grid(padding=(0, 4, 0, 0))
    table.add_column(width=2 * look.digit.ink.shape[1])
    table.add_row(pictures.Digit(look.sheet), Text("\n").join(lines))
    return table


def _as_dict(look: Look) -> dict[str, Any]:
    sheet, digit = look.sheet, look.digit
    return {
        "model": sheet.footer["Model"],
        "notes": list(sheet.notes),
        "input": {"source": digit.source, "label": digit.label, "done": list(digit.done), "pixels": digit.ink.tolist()},
        "predicted": look.predicted,
        "probabilities": look.probabilities,
        **heads_as_dict(sheet, look.choice),
        "trace": look.trace.to_dict(),
        "page": look.page,
    }
