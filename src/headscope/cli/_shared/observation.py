"""What ``text`` and ``image`` share: options, running a model with its calls recorded, choosing a head."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import click

from headscope._support.jsonable import plain
from headscope.cli._shared.console import INDEX
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headscope import MultiHeadAttention
    from headscope.masks import Mask
    from headscope.report import Sheet
    from headscope.report.sheet import Look
    from headscope.stats import Match
    from headscope.tracing import Trace

SHARP = ("previous", "next", "self", "duplicate", "induction")  # patterns of single tokens
OF_OBJECT = ("centre", "edges", "boundary", "texture")  # regions that depend on the image, not only on positions
CLEAR = 1.2  # ratios to chance from which a head's region is named

Command = TypeVar("Command", bound=Callable[..., None])

FORCE = "Overwrite an existing file, even if headscope did not write it."


def looking_options(page: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of ``text`` and ``image``; ``page`` is the default path of the page."""
    options = (
        click.option("--layer", type=INDEX, help="Layer to show step by step.  [default: the layer of the head]"),
        click.option("--head", type=INDEX, help="Head to draw.  [default: the most striking one]"),
        click.option(
            "--explain",
            is_flag=True,
            help="Show each step in full (code, values, why, common mistakes), all statistics, and how to read them.",
        ),
        click.option("--out", metavar="PATH", help=f"Where to write the page.  [default: {page}]"),
        click.option("--no-page", is_flag=True, help="Do not write a page."),
        click.option("--force", is_flag=True, help=FORCE),
        click.option("--seed-random", is_flag=True, help="Use random weights instead of trained ones."),
        click.option("--json", "as_json", is_flag=True, help="Print only JSON; write a page only with --out."),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The options that ``text`` and ``image`` have in common.

    Attributes:
        page: path of the page, or None for no page.
    """

    layer: int | None
    head: int | None
    explain: bool
    page: str | None
    force: bool
    seed_random: bool
    as_json: bool

    @classmethod
    def of(cls, default: str, out: str | None, no_page: bool, as_json: bool, **rest: Any) -> HeadOptions:
        """Return the options of the command line, checked; ``default`` is the path of the page without --out.

        Raises:
            Mistake: --out together with --no-page.
        """
        if no_page and out is not None:
            raise Mistake("--no-page: got --out too, expected one of the two")
        has_page = not no_page and (out is not None or not as_json)
        return cls(page=(default if out is None else out) if has_page else None, as_json=as_json, **rest)

    def describe(self) -> str:
        """Return the options that determine what the page shows, for its footer."""
        options = {"layer": self.layer, "head": self.head, "seed_random": self.seed_random or None}
        return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None) or "none"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one layer's attention."""

    module: MultiHeadAttention
    x: Tensor
    mask: Mask | Tensor | None


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, with the recorded calls that ``trace_layer`` needs.

    Attributes:
        logits: what the model returned.
        weights: for each layer [B, H, T, T].
        calls: the attention call of each layer.
        tiles: access to the weights of each layer from its q and k.
    """

    logits: Tensor
    weights: Sequence[Tensor]
    calls: Sequence[LayerCall]
    tiles: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """The head to draw, and why this one."""

    layer: int
    head: int
    why: str


@contextmanager
def one_thread() -> Generator[None]:
    """Run the block on one thread: for the small shipped models, synchronising two threads costs more than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_model(model: nn.Module, inputs: Tensor) -> Pass:
    """Run a forward pass that returns weights, and record the call of each layer's attention."""
    import torch

    from headscope import MultiHeadAttention, Observe, watch

    calls: list[LayerCall] = []

    def record(module: MultiHeadAttention, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append(LayerCall(module, inputs[0], options.get("mask")))

    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in attentions]
    try:
        what = Observe(row_stats=False, received=False, keep_qk=True)
        with torch.inference_mode(), watch(model, what=what) as recording:
            logits, weights = model(inputs, need_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
    tiles = [part.last_tiles for part in recording.stats.parts.values()]
    return Pass(logits, weights, calls, tiles)


def trace_layer(passed: Pass, layer: int) -> Trace:
    """Trace one layer's attention on its recorded input."""
    import torch

    from headscope.tracing import trace

    call = passed.calls[layer]
    with torch.inference_mode():
        return trace(call.module, call.x, mask=call.mask)


def check_range(option: str, value: int | None, count: int) -> None:
    """Check a number of a layer, head or sample.

    Raises:
        Mistake: it is not from 0 to ``count - 1``.
    """
    if value is not None and not 0 <= value < count:
        raise Mistake(f"{option}: got {value}, expected 0 to {count - 1}")


def choose_head(sheet: Sheet, options: HeadOptions, ids: list[int] | None = None) -> Choice:
    """Return the head to draw: the selected one, or the most striking one that the options allow.

    The most striking head is that of the first highlight. Without one, or in a selected layer, it is for
    text the head with the highest score of a single-token pattern (previous, next, self, duplicate, induction); heads
    that rest on the first token or spread evenly are common in most models, so they do not count. For an image, it has
    the highest ratio to chance on a region of the object.

    Args:
        sheet: the measurements.
        options: the options --layer and --head.
        ids: the token ids of a text.
    """
    if options.layer is not None and options.head is not None:
        return Choice(options.layer, options.head, "the head you selected")
    if options.layer is None and options.head is None and (first := _first_highlight(sheet)) is not None:
        return first
    layers = range(sheet.layers) if options.layer is None else (options.layer,)
    heads = range(sheet.heads) if options.head is None else (options.head,)
    places = [(layer, head) for layer in layers for head in heads if head < len(sheet.weights[layer])]
    return _striking_over_image(sheet, places) if ids is None else _striking_over_text(sheet, places, ids)


def _first_highlight(sheet: Sheet) -> Choice | None:
    """Return the head of the first highlight, if it is about one head, and over an image about a region."""
    from headscope.report.highlights import sheet_highlights
    from headscope.report.words import REGIONS

    first = next(iter(sheet_highlights(sheet)), None)
    if first is None or first.layer is None or first.head is None:
        return None
    if sheet.kind == "image" and first.pattern not in REGIONS:
        return None
    return Choice(first.layer, first.head, f"the most striking head: {first.sentence.removeprefix(first.name).strip()}")


def _striking_over_text(sheet: Sheet, places: list[tuple[int, int]], ids: list[int]) -> Choice:
    import torch

    from headscope.stats import name_in_words, pattern_scores

    matches: list[tuple[float, str, tuple[int, int]]] = []
    for layer in sorted({layer for layer, _ in places}):
        weights, visible = torch.from_numpy(sheet.weights[layer])[None], sheet.seen[layer]
        mask = None if visible is None else torch.from_numpy(visible)
        scores = pattern_scores(weights, seen=mask, tokens=torch.tensor(ids)).score
        matches += [
            (float(scores[name][head]), name, (layer, head))
            for name in SHARP
            if name in scores
            for at, head in places
            if at == layer and not scores[name][head].isnan()
        ]
    if not matches:
        return Choice(*places[0], "too few tokens to match a pattern")
    score, name, best = max(matches, key=lambda each: each[0])
    return Choice(*best, f"the most striking head: {name_in_words(name, score)}, score {score:.2f}")


def _striking_over_image(sheet: Sheet, places: list[tuple[int, int]]) -> Choice:
    looks = {at: look for at in places if (look := _most_on_object(sheet, *at)) is not None}
    spread = {at: look for at, look in looks.items() if not _is_fixed(sheet, *at)}
    looks = spread or looks
    if not looks:
        return Choice(*places[0], "the image has no object")
    best = max(looks, key=lambda at: looks[at].ratio)
    return Choice(
        *best, f"the most striking head: {looks[best].region} {looks[best].ratio:.1f} times as much as chance"
    )


def _is_fixed(sheet: Sheet, layer: int, head: int) -> bool:
    """Return whether the head puts most of its weight on one patch, wherever that is."""
    from headscope.report.fixed_keys import FIXED_KEY

    match = sheet.patterns[layer][head]
    return match is not None and match.pattern == FIXED_KEY


class OnObject(NamedTuple):
    """The region of the object that a head looks at most, and its ratio to chance."""

    region: str
    ratio: float


def _most_on_object(sheet: Sheet, layer: int, head: int) -> OnObject | None:
    """Return the region of the object with the largest ratio; None where the image has no such regions."""
    ratios = {name: values[head] for name, values in sheet.regions[layer].items() if name in OF_OBJECT}
    looks = [OnObject(name, ratio) for name, ratio in ratios.items() if ratio is not None]
    return max(looks, key=lambda look: look.ratio, default=None)


def is_clear(look: Look | None) -> TypeGuard[Look]:
    """Return whether a head looks at a region clearly more than by chance, by the ratio as it is shown."""
    return look is not None and round(look[1], 1) >= CLEAR


def _match_as_dict(match: Match) -> dict[str, Any]:
    """Return the best match of a head as JSON, and whether the tables name it."""
    return {**plain(match._asdict()), "named": match.is_name}


def heads_as_dict(sheet: Sheet, choice: Choice) -> dict[str, Any]:
    """Return all heads as JSON, and the weights of the chosen head."""
    from headscope.report.highlights import sheet_highlights

    heads: list[dict[str, Any]] = []
    for layer in range(sheet.layers):
        for head, match in enumerate(sheet.patterns[layer]):
            entry: dict[str, Any] = {"layer": layer, "head": head}
            entry["pattern"] = None if match is None else _match_as_dict(match)
            entry["statistics"] = {name: values[head] for name, values in sheet.statistics[layer].items()}
            entry["rows"] = {name: counts[head] for name, counts in sheet.rows[layer].items()}
            if sheet.kind == "image":
                entry["regions"] = {name: ratios[head] for name, ratios in sheet.regions[layer].items()}
                look = sheet.named_looks[layer][head]
                entry["looks_at"] = None if look is None else look[0]
            heads.append(entry)
    weights = sheet.weights[choice.layer][choice.head].astype("float64").round(6)
    highlights = [each.to_dict() for each in sheet_highlights(sheet)]
    return {"highlights": highlights, "heads": heads, "chosen": {**asdict(choice), "weights": weights.tolist()}}
