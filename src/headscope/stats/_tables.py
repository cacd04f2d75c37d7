"""The statistics of layers as a dictionary, a data frame, a table or an HTML table."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headscope._support.jsonable import plain
from headscope._support.text import visible
from headscope.stats._layer import LayerStats
from headscope.stats._summaries import names_of, summaries_of

if TYPE_CHECKING:
    from rich.table import Table

_PLACE = ("layer", "head", "rows")
_NUMBERS = ("mean", "std", "min", "max", "null_mean", "null_std", "z")
_SHOWN = ("entropy", "max_weight", "first", "previous", "distance")  # as many as fit into 80 columns


def to_dict(parts: Mapping[str, LayerStats]) -> dict[str, Any]:
    """See ``HeadStats.to_dict``."""
    layers: dict[str, Any] = {}
    for layer, part in parts.items():
        heads: list[dict[str, Any]] = [{} for _ in range(part.heads)]
        layers[layer] = {
            "runs": part.runs,
            "looked_at": part.looked_at,
            "of": part.of,
            "rows": part.rows.tolist(),
            "broken": part.broken.tolist(),
            "heads": heads,
        }
        if part.edges is not None:
            layers[layer]["edges"] = [[edge._asdict() for edge in part.edges.of(head)] for head in range(part.heads)]
        if part.segments is not None:
            numbers = {what: plain(getattr(part.segments, what).tolist()) for what in ("mean", "sum", "count")}
            if part.segments.first_sum is not None:
                numbers["without_first"] = plain(part.segments.without_first().tolist())
            layers[layer]["segments"] = {"names": list(part.segments.names), **numbers}
        if part.weights:
            shapes = [[run.p.shape[0], *run.p.shape[2:]] for run in part.weights]  # [B, R, K]
            layers[layer]["weights"] = {"heads": [*part.weights[0].heads], "shapes": shapes}
    for layer, head, name, summary in summaries_of(parts):
        layers[layer]["heads"][head][name] = {
            "count": summary.count,
            **{what: plain(getattr(summary, what)) for what in _NUMBERS},
            "histogram": list(summary.histogram),
            "edges": list(summary.edges),
        }
    return {"layers": layers}


def to_frame(parts: Mapping[str, LayerStats]) -> Any:
    """See ``HeadStats.to_pandas``."""
    try:
        import pandas as pd  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    except ImportError as error:
        raise ImportError("to_pandas: pandas is not installed; pip install pandas, or use to_dict()") from error
    lines = [
        (layer, head, name, each.count, *(getattr(each, what) for what in _NUMBERS))
        for layer, head, name, each in summaries_of(parts)
    ]
    lines += [(*at, count, mean, *(math.nan,) * (len(_NUMBERS) - 1)) for *at, count, mean in pairs_of(parts)]
    return pd.DataFrame(lines, columns=["layer", "head", "name", "count", *_NUMBERS])


Line = dict[str, str | float]


def _lines(parts: Mapping[str, LayerStats]) -> list[Line]:
    """Return one line for each head: its layer and number, its rows, and all its means."""
    lines: dict[tuple[str, int], Line] = {}
    for number, (layer, part) in enumerate(parts.items()):
        for head, rows in enumerate(part.rows.tolist()):
            lines[layer, head] = {"layer": layer, "number": number, "head": head, "rows": rows}
    for layer, head, name, summary in summaries_of(parts):
        if summary.count:
            lines[layer, head][name] = summary.mean
    for layer, head, name, _, mean in pairs_of(parts):
        lines[layer, head][name] = mean
    return list(lines.values())


def pairs_of(
    parts: Mapping[str, LayerStats], *, without_first: bool = True
) -> Iterator[tuple[str, int, str, int, float]]:
    """Yield layer, head, ``segments/query/key``, rows and mean of all pairs of segments whose query has rows.

    Then those without the first keys, of the segments that have one.
    """
    for layer, part in parts.items():
        pairs = {} if part.segments is None else part.segments.pairs()
        if without_first and part.segments is not None:
            pairs |= part.segments.pairs_without_first()
        for name, (mean, count) in pairs.items():
            for head, (value, rows) in enumerate(zip(mean.tolist(), count.tolist(), strict=True)):
                if rows:
                    yield layer, head, name, rows, value


def _caption(parts: Mapping[str, LayerStats]) -> str:
    looked, of = (sum(getattr(part, what) for part in parts.values()) for what in ("looked_at", "of"))
    broken = sum(int(part.broken.sum()) for part in parts.values())
    caption = "Means over counted rows; entropies in nats."
    if any(part.looked_at < part.of for part in parts.values()):
        caption += f" A sample: {looked} of {of} rows of each head, all layers together."
    return caption + (f" {broken} rows hold NaN or infinity and are excluded." if broken else "")


def render_table(
    parts: Mapping[str, LayerStats],
    sort: str | None,
    names: Collection[str] | None,
    descending: bool,
    limit: int | None,
) -> Table:
    """See ``HeadStats.table``."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    known = (*_PLACE, *names_of(parts), *dict.fromkeys(name for _, _, name, *_ in pairs_of(parts)))
    for argument, requested in (("sort", [sort] if sort is not None else []), ("names", names or ())):
        for name in requested:
            if name not in known:
                raise ValueError(f"{argument}: got {name!r}, expected one of {', '.join(known)}")
    chosen = [name for name in _SHOWN if name in names_of(parts)] if names is None else list(names)
    if sort is not None and sort not in _PLACE:
        chosen = [sort, *(name for name in chosen if name != sort)]
    columns = (*_PLACE, *chosen)
    lines = _lines(parts)
    if sort is not None:
        by = "number" if sort == "layer" else sort  # layers in the order of the model
        sign = -1 if descending else 1
        lines.sort(key=lambda line: sign * float(line[by]) if by in line else math.inf)
    table = Table(caption=_caption(parts), caption_justify="left")
    for name in columns:
        least = max(len(name), 6) if name == sort else None  # this column is never cut
        justify = "left" if name == "layer" else "right"
        table.add_column(escape(visible(name)), justify=justify, min_width=least)
    for line in lines[:limit]:
        table.add_row(*(Text(_shown(line.get(name))) for name in columns))  # Text: a layer's name is not markup
    return table


def render_html(parts: Mapping[str, LayerStats]) -> str:
    """Return the same as an HTML table; every text is escaped."""
    columns = (*_PLACE, *names_of(parts))
    head = "".join(f"<th>{html.escape(visible(name))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(line.get(name)))}</td>" for name in columns) + "</tr>"
        for line in _lines(parts)
    )
    caption = html.escape(_caption(parts))
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: str | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else visible(str(value))
