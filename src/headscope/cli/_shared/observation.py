"""What ``text`` and ``image`` share: run a model and keep what its layers saw, choose a head, write the page."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from headscope.cli._shared.console import INDEX, Mistake
from headscope.cli._shared.pages import PAGE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headscope.report import Sheet
    from headscope.tracing import Trace

SHARP = ("previous", "next", "self", "duplicate", "induction")  # patterns of single tokens
OF_OBJECT = ("centre", "edges", "boundary", "texture")  # regions that depend on the image, not on places alone

Command = TypeVar("Command", bound=Callable[..., None])

OPTIONS = (
    click.option("--layer", type=INDEX, help="The layer to show step by step.  [default: that of the head]"),
    click.option("--head", type=INDEX, help="The head to draw.  [default: the most striking one]"),
    click.option(
        "--explain", is_flag=True, help="Show steps in full (code, values, why, common mistakes) and all statistics."
    ),
    click.option("--out", metavar="PATH", help=f"Where to write the page.  [default: {PAGE}]"),
    click.option("--no-page", is_flag=True, help="Write no page."),
    click.option("--force", is_flag=True, help="Replace the file there, even if it is no page of headscope's."),
    click.option("--seed-random", is_flag=True, help="Leave the model untrained: weights as drawn."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else; a page only with --out."),
)


def looking_options(command: Command) -> Command:
    """The options that ``text`` and ``image`` have in common."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that ``text`` and ``image`` have in common.

    Attributes:
        page: where the page goes, or None for no page.
    """

    layer: int | None
    head: int | None
    explain: bool
    page: str | None
    force: bool
    seed_random: bool
    as_json: bool

    @classmethod
    def of(cls, out: str | None, no_page: bool, as_json: bool, **rest: Any) -> Asked:
        """Raises: Mistake: --out together with --no-page."""
        if no_page and out is not None:
            raise Mistake("--no-page: wanted either it or --out")
        wanted = not no_page and (out is not None or not as_json)
        return cls(page=(PAGE if out is None else out) if wanted else None, as_json=as_json, **rest)

    def said(self) -> str:
        """The options that decide what the page shows, as its footer has them."""
        given = {"layer": self.layer, "head": self.head, "seed_random": self.seed_random or None}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None) or "none"


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass and what it takes to trace any of its layers.

    Attributes:
        logits: what the model returned.
        weights: for each layer [B, H, T, T].
        calls: for each layer its attention module, the input it got, and the options it was called with.
    """

    logits: Tensor
    weights: Sequence[Tensor]
    calls: Sequence[tuple[nn.Module, Tensor, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The head to draw, and why this one."""

    layer: int
    head: int
    why: str


@contextmanager
def one_thread() -> Generator[None]:
    """For the shipped models: they are so small that a second thread costs more in waiting than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(model: nn.Module, inputs: Tensor) -> Pass:
    """A forward pass with weights, keeping what each layer's attention was called with."""
    import torch

    calls: list[tuple[nn.Module, Tensor, dict[str, Any]]] = []

    def keep(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append((module, given[0], options))

    attentions = [layer.attention for layer in model.layers]  # pyright: ignore[reportGeneralTypeIssues]
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in attentions]
    try:
        with torch.inference_mode():
            logits, weights = model(inputs, need_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Pass(logits, weights, calls)


def trace_layer(passed: Pass, layer: int) -> Trace:
    """The steps of one layer's attention, on the input it had."""
    import torch

    from headscope.tracing import trace

    module, x, options = passed.calls[layer]
    with torch.inference_mode():
        return trace(module, x, mask=options.get("mask"))  # pyright: ignore[reportArgumentType]


def check_range(option: str, value: int | None, count: int) -> None:
    """Raises: Mistake: there is no such layer, head or sample."""
    if value is not None and not 0 <= value < count:
        raise Mistake(f"{option}: got {value}, wanted 0 to {count - 1}")


def choose_head(sheet: Sheet, asked: Asked, ids: list[int] | None = None) -> Choice:
    """The head to draw: the one that was asked for, or the most striking among those that the options leave.

    Striking is, over text, the highest score of a pattern of single tokens (previous, next, self, duplicate,
    induction): that a head rests on the first token, or looks everywhere, is seen in most models. Over an image it is
    the highest ratio to chance of what falls on a region of the object itself.

    Args:
        sheet: what was measured.
        asked: the options --layer and --head.
        ids: the token ids of a text.
    """
    if asked.layer is not None and asked.head is not None:
        return Choice(asked.layer, asked.head, "the one you asked for")
    layers = range(sheet.layers) if asked.layer is None else (asked.layer,)
    heads = range(sheet.heads) if asked.head is None else (asked.head,)
    places = [(layer, head) for layer in layers for head in heads if head < len(sheet.weights[layer])]
    return _striking_over_image(sheet, places) if ids is None else _striking_over_text(sheet, places, ids)


def _striking_over_text(sheet: Sheet, places: list[tuple[int, int]], ids: list[int]) -> Choice:
    import torch

    from headscope.stats import pattern_scores

    found: list[tuple[float, str, tuple[int, int]]] = []
    for layer in sorted({layer for layer, _ in places}):
        weights, sight = torch.from_numpy(sheet.weights[layer])[None], sheet.seen[layer]
        seen = None if sight is None else torch.from_numpy(sight)
        scores = pattern_scores(weights, seen=seen, tokens=torch.tensor(ids)).score
        found += [
            (float(scores[name][head]), name, (layer, head))
            for name in SHARP
            if name in scores
            for at, head in places
            if at == layer and not scores[name][head].isnan()
        ]
    if not found:
        return Choice(*places[0], "of so few tokens no pattern can be told")
    score, name, best = max(found, key=lambda each: each[0])
    return Choice(*best, f"the most striking one: “{name}”, score {score:.2f}")


def _striking_over_image(sheet: Sheet, places: list[tuple[int, int]]) -> Choice:
    looks = {at: look for at in places if (look := strongest(sheet, *at)) is not None}
    if not looks:
        return Choice(*places[0], "the image has no object to look at")
    best = max(looks, key=lambda at: looks[at].ratio)
    return Choice(
        *best, f"the most striking one: {looks[best].ratio:.1f} times as much on {looks[best].region} as chance"
    )


class OnObject(NamedTuple):
    """The region of the object that a head looks at most, and how many times as much as chance."""

    region: str
    ratio: float


def strongest(sheet: Sheet, layer: int, head: int) -> OnObject | None:
    """What a head looks at most of what depends on the image; None where the image has no such regions."""
    ratios = {name: values[head] for name, values in sheet.regions[layer].items() if name in OF_OBJECT}
    told = [OnObject(name, ratio) for name, ratio in ratios.items() if ratio is not None]
    return max(told, key=lambda look: look.ratio, default=None)


def heads_as_dict(sheet: Sheet, choice: Choice) -> dict[str, Any]:
    """All heads for a program, and the weights of the one that was chosen."""
    heads: list[dict[str, Any]] = []
    for layer in range(sheet.layers):
        for head, match in enumerate(sheet.patterns[layer]):
            entry: dict[str, Any] = {"layer": layer, "head": head}
            entry["pattern"] = None if match is None else match._asdict()
            entry["statistics"] = {name: values[head] for name, values in sheet.statistics[layer].items()}
            entry["rows"] = {name: counts[head] for name, counts in sheet.rows[layer].items()}
            if sheet.kind == "image":
                entry["regions"] = {name: ratios[head] for name, ratios in sheet.regions[layer].items()}
                look = sheet.looks[layer][head]
                entry["looks_at"] = None if look is None else look[0]
            heads.append(entry)
    weights = sheet.weights[choice.layer][choice.head].astype("float64").round(6)
    return {"heads": heads, "chosen": {**asdict(choice), "weights": weights.tolist()}}
