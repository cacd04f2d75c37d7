"""``headscope text``: what each head of a language model looks at in a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import console, print_json, say
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
from headscope.cli._shared.pages import TEXT_PAGE, check_apart, save_page
from headscope.cli._shared.text_input import TextInput, clipped, describe_source, read_text

if TYPE_CHECKING:
    from rich.text import Text
    from torch import Tensor

    from headscope.examples.text import TextConfig
    from headscope.report import Sheet
    from headscope.tracing import Trace

GUESSES = 5
SCORES = (
    "score: 1 = exact match, 0 = no closer than chance; a name needs 0.3 and 3 standard deviations from chance; "
    "partly: below 0.5; also: a second name; uniform needs few rows with half of their weight on one token"
)
KEYS = "keys: effective keys, the number of tokens that a head spreads over"
STATISTICS = (
    "others: means over tokens · normalized entropy: entropy / ln n, 1 = spread evenly, 0 = one token · "
    "effective keys: the number of tokens that a head spreads over · distance: in positions · "
    "previous, self, duplicate, induction, first: mean mass on those tokens, not a match score"
)


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may come next."""

    piece: str
    probability: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A text as the model read it; only the shipped model has the steps of a layer."""

    sheet: Sheet
    ids: list[int]
    choice: Choice
    trace: Trace | None
    guesses: list[Guess]
    page: str | None


@click.command(short_help="See what each head of a language model looks at in a text.")
@click.argument("text", required=False)
@click.option("--file", metavar="PATH", help="Read the text from a file (UTF-8).")
@click.option("--model", metavar="MODEL", help="A folder with a Hugging Face model, or its name on the hub.")
@looking_options(TEXT_PAGE)
def text(
    text: str | None,
    file: str | None,
    model: str | None,
    **options: Any,
) -> None:
    """Run a language model on TEXT ("-" = stdin) and show what each head looks at.

    The default model is the small one that ships with headscope; --model runs another.

    Prints the tokens, one layer step by step, the best-matching pattern of every head, and a picture of one head.
    Writes a page with the maps of all heads.
    """
    parsed = HeadOptions.of(TEXT_PAGE, **options)
    check_apart("--out", parsed.page, {"the text": file}, model)
    text_input = read_text(text, file)
    text_input = replace(text_input, source=describe_source(text_input, text))
    with progress_line("loading torch"):
        import_module("torch")
    if model is None or model == "text":
        with progress_line("reading"), one_thread():
            reading = _read(text_input, parsed)
    else:
        if parsed.seed_random:
            raise Mistake("--seed-random: expected the shipped model, got --model; drop one of the two")
        with progress_line(f"reading with {model}"):
            reading = _read_with(model, text_input, parsed)
    if parsed.as_json:
        print_json(_as_dict(reading))
    else:
        _print(reading, parsed.explain)


def _read(text_input: TextInput, options: HeadOptions) -> Reading:
    import torch

    from headscope import load_example
    from headscope.report import text_sheet

    example = load_example("text", seed_random=options.seed_random)
    sizes = example.model.config
    check_range("--layer", options.layer, sizes.num_layers)
    check_range("--head", options.head, sizes.num_heads)
    every = example.tokenizer.encode(text_input.text)
    ids = every[-sizes.context :]
    notes = [note] if (note := _left_out(text_input, len(every), len(ids))) else []
    passed = run_model(example.model, torch.tensor([ids]))
    pieces = [example.tokenizer.piece(token) for token in ids]
    sheet = text_sheet(
        clipped("".join(pieces)),
        pieces,
        passed.weights,
        ids=ids,
        footer={
            "Model": _model(sizes, example.trained),
            "Input": _input(text_input, len(every), len(ids)),
            "Options": options.describe(),
        },
        notes=notes,
    )
    for each in sheet.notes:
        say(f"headscope text: {each}")
    choice = choose_head(sheet, options, ids)
    trace = trace_layer(passed, choice.layer)
    title = f"Layer {choice.layer}, step by step"
    shown = replace(sheet, trace=trace.to_dict()["rows"], trace_title=title, opens_on=(choice.layer, choice.head))
    shown = replace(shown, tiles=passed.tiles)
    page = save_page(shown, options.page, options.force)
    return Reading(shown, ids, choice, trace, _likely(passed.logits[0, -1], example.tokenizer.piece), page)


def _read_with(model: str, text_input: TextInput, options: HeadOptions) -> Reading:
    """Return the reading of a Hugging Face model: its weights, but not the steps of a layer."""
    from headscope.cli._shared import model_loading, model_text
    from headscope.report import text_sheet

    loaded = model_loading.load(model)
    passed = model_text.read(loaded, text_input.text)
    check_range("--layer", options.layer, len(passed.layers))
    check_range("--head", options.head, min(weights.shape[0] for weights in passed.weights))
    piece = loaded.piece
    assert piece is not None  # it has a tokenizer: the text was split by it
    pieces = [piece(token) for token in passed.ids]
    notes = [note] if (note := _left_out(text_input, len(passed.ids) + passed.cut, len(passed.ids))) else []
    logits = passed.logits if passed.causal else None
    guesses = [] if logits is None else _likely(logits, piece)
    if logits is not None and not guesses:
        notes.append("the next token is not predicted, because the output of the model holds NaN or infinity")
    layers = f"{len(passed.layers)} layers of {passed.weights[0].shape[0]} heads"
    sheet = text_sheet(
        clipped("".join(pieces)), pieces, passed.weights, ids=passed.ids, seen=passed.visible,
        footer={
            "Model": f"{loaded.name}, {layers}",
            "Input": _input(text_input, len(passed.ids) + passed.cut, len(passed.ids)),
            "Options": options.describe(),
        },
        notes=notes,
    )  # fmt: skip
    for each in sheet.notes:
        say(f"headscope text: {each}")
    choice = choose_head(sheet, options, passed.ids)
    sheet = replace(sheet, tiles=passed.tiles)
    try:
        page = save_page(sheet, options.page, options.force)
    except ValueError as error:  # more weights than a page holds
        raise Mistake(f"--out: {error}; to skip the page, use --no-page") from error
    return Reading(sheet, passed.ids, choice, None, guesses, page)


def _left_out(text_input: TextInput, tokens: int, used: int) -> str | None:
    """Return a note if the text is longer than the context of the model."""
    if text_input.dropped:
        length = text_input.dropped + len(text_input.text)
        most = "more than the model reads at once"
        return f"the text has {length:,} characters, {most}; only its last {used} tokens are used"
    if tokens > used:
        return f"the text has {tokens:,} tokens, the model reads {used} at once; only the last {used} are used"
    return None


def _input(text_input: TextInput, tokens: int, used: int) -> str:
    """Return where a text came from, and how much of it was read."""
    if text_input.dropped:
        return f"{text_input.source}, its last {used} tokens"
    if tokens > used:
        return f"{text_input.source}, the last {used} of {tokens:,} tokens"
    return f"{text_input.source}, {used} token{'' if used == 1 else 's'}"


def _likely(logits: Tensor, piece: Callable[[int], str]) -> list[Guess]:
    """Return the most probable next tokens; none where a probability is NaN."""
    top = logits.float().softmax(-1).topk(min(GUESSES, len(logits)))
    if top.values.isnan().any():  # softmax turns one NaN into NaN everywhere
        return []
    return [Guess(piece(token), share) for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)]


def _model(sizes: TextConfig, trained: bool) -> str:
    state = "trained on Python's library" if trained else "untrained, random weights"
    return f"{sizes.num_layers} layers of {sizes.num_heads} heads, width {sizes.embed_dim}, {state}"


def _print(reading: Reading, explain: bool) -> None:
    from rich.text import Text

    from headscope.cli._shared.head_grid import HeadGrid
    from headscope.report import terminal
    from headscope.report.highlights import sheet_highlights
    from headscope.report.words import PATTERNS

    sheet, choice = reading.sheet, reading.choice
    out = console()
    out.print(Text(visible(f"headscope text: {sheet.footer['Model']}"), style="dim"))
    out.print(Text(f"{attention_in_words('token')} Here each token looks at {_looks(sheet)}."))
    show_highlights(out, sheet_highlights(sheet))
    count = len(sheet.tokens)
    pieces = (
        "the one piece that the model reads" if count == 1 else f"the {count} pieces that the model reads, in order"
    )
    heading(out, "Tokens", pieces)
    out.print(terminal.tokens_line(sheet))
    if reading.guesses:
        out.print(_guess_line(reading.guesses))
    if reading.trace is not None:
        show_steps(out, reading.trace, choice.layer, sheet.layers, explain)
    heading(out, "All heads", "best-matching pattern of each")
    out.print(terminal.statistics_table(sheet) if explain else HeadGrid(sheet, choice))
    patterns = {match.pattern for matches in sheet.patterns for match in matches if match is not None and match.is_name}
    out.print(meanings((name for name in PATTERNS if name in patterns), PATTERNS))
    out.print(Text(f"{SCORES} · {STATISTICS if explain else KEYS}", "dim"))
    heading(out, f"Layer {choice.layer}, head {choice.head}", choice.why)
    out.print(terminal.map_picture(sheet, choice.layer, choice.head))
    out.print(_example(sheet, choice))
    show_closing(out, sheet, reading.page, explain)


def _looks(sheet: Sheet) -> str:
    """Return which tokens the mask leaves visible, as the end of a sentence."""
    import numpy as np

    masks = [
        np.ones(weights.shape, bool) if mask is None else mask
        for weights, mask in zip(sheet.weights, sheet.seen, strict=True)
    ]
    if all((mask == np.tril(np.ones_like(mask))).all() for mask in masks):
        return "itself and the tokens before it"
    if all(mask.all() for mask in masks):
        return "all tokens"
    ahead = any(np.triu(mask, 1).any() for mask in masks)
    return "the tokens that the mask of its layer allows" + ("" if ahead else ": itself and some of those before it")


def _example(sheet: Sheet, choice: Choice) -> Text:
    """Return the largest weight of a token on another one, in words."""
    import numpy as np
    from rich.text import Text

    weights = sheet.weights[choice.layer][choice.head]
    whole = np.isfinite(weights).all(-1)
    if not whole.any():
        return Text("The weights of this head are not finite.")
    weights = np.where(whole[:, None] & ~np.eye(len(weights), dtype=bool), weights, 0)
    query, key = np.unravel_index(int(weights.argmax()), weights.shape)
    if not weights[query, key]:
        who = "A single token can look" if len(weights) == 1 else "Each token looks"
        return Text(f"{who} only at itself.")
    looks, at = (f"{sheet.labels[each]} ({each})" for each in (int(query), int(key)))
    return Text(f"For example, {looks} gives {weights[query, key]:.0%} of its attention to {at}.")


def _guess_line(guesses: list[Guess]) -> Text:
    from rich.text import Text

    from headscope.report.sheet import visible as shown

    line = Text("Likely next tokens:  ")
    for at, guess in enumerate(guesses):
        line.append("  " if at else "")
        line.append(shown(guess.piece), style="bold")
        line.append(f" {guess.probability:.0%}")
    return line


def _as_dict(reading: Reading) -> dict[str, Any]:
    sheet, choice = reading.sheet, reading.choice
    return {
        "model": sheet.footer["Model"],
        "notes": list(sheet.notes),
        "tokens": [
            {"position": at, "id": token, "text": piece}
            for at, (token, piece) in enumerate(zip(reading.ids, sheet.tokens, strict=True))
        ],
        "next": [asdict(guess) for guess in reading.guesses],
        **heads_as_dict(sheet, choice),
        "trace": None if reading.trace is None else reading.trace.to_dict(),
        "page": reading.page,
    }
