"""Every text that Python writes into a page; those of its script are in viewer/src/texts.ts.

To translate the page, translate both files. Meanings of statistics and regions are in ``headscope.report.words``.
"""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_TITLE = "Attention heads"
LABELS = "A", "B"
NO_SCRIPT = "This page draws its maps with a script inside the file. Allow JavaScript to see them."
STEPS = "Steps"

MODEL, PART, INPUT, LAYERS, OPTIONS, VERSIONS = "Model", "Part", "Input", "Layers", "Options", "Versions"
AVERAGES = "Averages"
OUTPUT, STATISTICS = "output", "statistics"
VERIFIED, OTHER_LAYERS = "Verified", "Other layers"
NO_NAME = "not named"
NO_VERSIONS = "not recorded"
DIFFERENT_LENGTHS = "calls of different lengths"

_NUMBERING = "Numbering starts at 0."
_COLOUR = "the colour shows how much attention"
READING_MAPS = f"Each row of a map is a query, each column a key; {_COLOUR}. {_NUMBERING}"
READING = f"Queries attend to keys. {_NUMBERING}"


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its noun: "1 query", "2,048 queries"."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def queries_of(number: int) -> str:
    """Return "1 query" or "7 queries"."""
    return counted(number, "query", "queries")


def averages(rows: Sequence[int], one: str, more: str) -> str:
    """Return over how many tokens or queries the statistics of a head are averaged, from the counts of all heads."""
    least, most = min(rows, default=0), max(rows, default=0)
    noun = one if most == 1 else more
    if least == most:
        return f"over up to {most:,} {noun} per head"
    return f"over up to {least:,}–{most:,} {noun}, depending on the head"


def lead_of_text(layers: int, heads: int, tokens: int) -> str:
    """Return the sentences below the title of a text's page."""
    sizes = f"{counted(layers, 'layer')} × {counted(heads, 'head')}, {counted(tokens, 'token')}"
    return f"{sizes}. Each row shows where one token looks and sums to 1; {_COLOUR}. {_NUMBERING}"


def lead_of_image(layers: int, heads: int, rows: int, columns: int) -> str:
    """Return the sentences below the title of an image's page."""
    sizes = f"{counted(layers, 'layer')} × {counted(heads, 'head')}, {rows} × {columns} patches"
    return f"{sizes}. Each patch looks at all patches, with weights that sum to 1; {_COLOUR}. {_NUMBERING}"


def lead_of_recording(layers: int, heads: int, reading: str) -> str:
    """Return the sentences below the title of a recording's page."""
    return f"{counted(layers, 'layer')}, {counted(heads, 'head')}. {reading}"


def sample(observed: int, rows: int, layers: int) -> str:
    """Return the note on a page whose statistics use some of the queries only."""
    each = "of each head" if layers == 1 else "of each head, all layers together"
    return f"Sample: the statistics use {observed:,} of {queries_of(rows)} {each}."


def forward_passes(observed: int, ran: int, *, windows: bool = False) -> str:
    """Return how many forward passes were observed; ``windows``: each of them read a window of one text."""
    if observed == ran:
        if windows:
            return counted(observed, "window")
        return counted(observed, "forward pass", "forward passes")
    return f"{observed:,} of {ran:,} forward passes observed"


def lengths(queries: int, keys: int) -> str:
    """Return the size of a call."""
    return f"{queries_of(queries)} × {counted(keys, 'key')}"


def verified(rows: int, layers: int, errors: Sequence[tuple[str, float, float]], unfit: Sequence[str]) -> str:
    """Return how closely rows agree with float64, from each kind of error, its size and its bound.

    Args:
        rows, layers: the numbers of verified rows and of their layers.
        errors: the name, the error and the bound of what was compared.
        unfit: the layers with an error beyond its bound.
    """
    compared = ", ".join(f"{name} within {error:.1g} (rounding explains {bound:.1g})" for name, error, bound in errors)
    beyond = f"; beyond rounding: {', '.join(unfit)}" if unfit else ""
    return f"{counted(rows, 'row')} of {counted(layers, 'layer')} against float64: {compared or 'all empty'}{beyond}"


def other_layer(what: str, layers: str) -> str:
    """Return what some layers without statistics are."""
    return f"{layers} ({what})"


def more_layers(name: str, others: int) -> str:
    """Return the first of some layers, with how many others there are."""
    return f"{name}{f' and {others} more layers' if others else ''}"


def part(part: str, layers: str) -> str:
    """Return which part of which layers was recorded."""
    return f"{part} in {layers}"


def tensor_option(name: str) -> str:
    """Return an option whose value was a tensor."""
    return f"{name}=<tensor>"


# ---------------------------------------------------------------- exact heads

EXACT_NO_MAP = "the layer has no map; observe with Observe(map=...)"
EXACT_MODIFIED = "its mask or bias was modified after the call"
EXACT_EMPTY = "it has no queries or no keys"


def exact_refused(layer: int, head: int, why: str) -> str:
    """Return why the page cannot compute the weights of a head."""
    return f"the page cannot compute the weights of layer {layer}, head {head}: {why}"


def exact_mask(most: int) -> str:
    """Return what is wrong with a mask."""
    return f"its mask is not one of spans, and has more than {most:,} pairs"


def exact_bias(most: int) -> str:
    """Return what is wrong with a bias."""
    return f"its bias depends on more than the distance, and has more than {most:,} values"


def exact_left_out(fitting: int, chosen: int, requested: bool) -> str:
    """Return the note about heads for which the page has no room."""
    remedy = "" if requested else " save_html(path, exact=[(layer, head)]) includes a head that you choose."
    return f"Exact at every zoom: {fitting} of {chosen} heads; the others would make the page too large.{remedy}"


def exact_coarse(heads: int) -> str:
    """Return the note about heads whose logits are too large to be stored."""
    return f"Exact at every zoom: without {counted(heads, 'head')}, whose logits are too large to be stored precisely."


# ---------------------------------------------------------------- a training's history

STEPS_OBSERVED, ALARMS = "Steps", "Alarms"
LARGEST_LOGIT, LARGEST_LOGIT_MEANING = "largest logit", "The largest logit of all rows of the step."


def lead_of_history(steps: int, layers: int, heads: int) -> str:
    """Return the sentences below the title of a history's page."""
    sizes = f"{counted(steps, 'step')}, {counted(layers, 'layer')}, {counted(heads, 'head')}"
    return f"{sizes}. Each row of the map is a head, each column a step of the training. {_NUMBERING}"


def thinned(shown: int, observed: int) -> str:
    """Return the note on a history that stores some of its steps only."""
    return (
        f"The history stores {shown:,} of {counted(observed, 'observed step')}, evenly spaced. Alarms are those of all "
        "steps."
    )


def coarse_quantities(names: Sequence[str], all_names: int, stride: int) -> str:
    """Return the note on quantities that the page holds at some of the steps only."""
    shown = ", ".join(names) if len(names) <= 3 else f"{len(names)} of {all_names} quantities"
    return f"To keep the page small, it has fewer steps of {shown}: at most one of {stride}."


def alarms_left_out(shown: int, alarms: int) -> str:
    """Return the note on alarms for which the page has no room."""
    return f"The page shows the first {shown:,} of {alarms:,} alarms. The history has all of them."


def steps_of(steps: Sequence[int], observed: int, ran: int, watches: int) -> str:
    """Return which steps a history has."""
    first_to_last = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
    several = f", in {watches:,} watches" if watches > 1 else ""
    return f"{first_to_last}; {observed:,} of {counted(ran, 'forward pass', 'forward passes')} observed{several}"


def alarm_limits(entropy: float | None, max_logit: float | None, sink: float | None) -> str:
    """Return the limits of the alarms."""
    limits = [
        *([f"normalized entropy below {entropy:g}"] if entropy is not None else []),
        *([f"largest logit above {max_logit:g}"] if max_logit is not None else []),
        *([f"weight on the first token above {sink:g}"] if sink is not None else []),
    ]
    return ", ".join(limits) or "none"


NO_ALARMS = "not requested; watch(alarms=True) does"
