"""What the plots share: arrays of weights, colour scales chosen from the data, palettes, colour bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headscope._support.arguments import kind
from headscope.report.colours import colour_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, Normalize

NormName = Literal["linear", "log", "power"]
"""A colour scale: proportional to the weight, to its logarithm over four decades, or to its square root."""

NORMS = ("linear", "log", "power")

DECADES = 1e-4
"""Where a logarithmic scale starts, relative to the largest weight, as on the page."""

BRIGHT = 0.1
"""A linear scale shows cells from this share of its end clearly."""

MASKED = "#e9e6ec"
"""The colour of NaN, as on the page."""

Weights = Tensor | ArrayLike


@dataclass(frozen=True)
class Scale:
    """A colour scale.

    Attributes:
        name: linear, log or power.
        top: the weight at its end.
        above: whether some weight is visibly larger than ``top``.
    """

    name: NormName
    top: float
    above: bool

    def to_norm(self, top: float | None = None) -> Normalize:
        """Return the scale for matplotlib, up to ``top`` if it is given."""
        from matplotlib.colors import LogNorm, Normalize, PowerNorm

        top = self.top if top is None else top
        if top <= 0:
            return Normalize(0, 1)
        if self.name == "log":
            return LogNorm(DECADES * top, top, clip=True)
        return PowerNorm(0.5, 0, top, clip=True) if self.name == "power" else Normalize(0, top)

    @property
    def title(self) -> str:
        """The scale in a few characters, for the title of a small map."""
        name = "" if self.name == "linear" else f"{self.name}, "
        return f"({name or '0–'}{'≤' if name else ''}{self.top:.2g})"


def choose_scale(maps: Sequence[NDArray[np.float64]], norm: NormName | None) -> Scale:
    """Return the colour scale that maps share: its end, and without ``norm`` also its kind.

    The end is the largest weight of the rows with at least two weights above 0: a row with one is always 1, as the
    first of a causal map. A map is linear if at least half of its weight is in cells of at least a tenth of its end,
    else log. Maps of both kinds together are drawn on the square root.

    Raises:
        TypeError, ValueError: norm is not one of the three names.
    """
    check_norm(norm)
    tops = [_top(p) for p in maps]
    top, most = max(end for end, _ in tops), max(largest for _, largest in tops)
    return Scale(norm or _kind([*zip(maps, tops, strict=True)]), top, above=most > 1.01 * top)


def _kind(maps: Sequence[tuple[NDArray[np.float64], tuple[float, float]]]) -> NormName:
    """Return the kind of scale that shows most of the weight of each map, from the maps and their ends."""
    linear: list[bool] = []
    for p, (top, _) in maps:
        finite = np.where(np.isfinite(p), p, 0.0)
        linear.append(bool(finite.sum(where=finite >= BRIGHT * top) >= 0.5 * finite.sum()))
    return "linear" if all(linear) else "power" if any(linear) else "log"


def _top(p: NDArray[np.float64]) -> tuple[float, float]:
    """Return the end of the scale of a map, and its largest weight."""
    finite = np.isfinite(p)
    most = float(p.max(initial=0.0, where=finite))
    several = ((p > 0) & finite).sum(-1) > 1
    top = float(p[several].max(initial=0.0, where=finite[several]))
    return top or most, most


def check_norm(norm: object) -> None:
    """Check the name of a scale.

    Raises:
        TypeError, ValueError: it is another value.
    """
    if norm is None or norm in NORMS:
        return
    remedy = "for a norm of matplotlib, call ax.images[0].set_norm(...) on the result"
    error = ValueError if isinstance(norm, str) else TypeError
    got = repr(norm) if isinstance(norm, str) else kind(norm)
    raise error(f'norm: got {got}, expected "linear", "log", "power" or None; {remedy}')


def to_colormap(cmap: str | Colormap | None) -> Colormap:
    """Return a palette for matplotlib: one of the page by its name, or any of matplotlib's.

    Raises:
        TypeError: cmap is not a name or a Colormap.
        ValueError: no palette has this name.
    """
    import matplotlib as mpl
    from matplotlib.colors import Colormap, LinearSegmentedColormap

    if cmap is None or (isinstance(cmap, str) and cmap == "blues"):
        anchors = [tuple(part / 255 for part in colour_at(step / 16)) for step in range(17)]
        palette: Colormap = LinearSegmentedColormap.from_list("headscope blues", anchors, N=512)
    elif isinstance(cmap, Colormap):
        palette = cmap
    elif isinstance(cmap, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        if cmap not in mpl.colormaps:
            names = '"blues" (the default), "viridis", "cividis", "magma" or another name in matplotlib.colormaps'
            raise ValueError(f"cmap: got {cmap!r}, expected {names}")
        palette = mpl.colormaps[cmap]
    else:
        raise TypeError(f"cmap: got {kind(cmap)}, expected a name or a Colormap of matplotlib")
    return palette if isinstance(cmap, Colormap) else palette.with_extremes(bad=MASKED)


def check_flag(name: str, value: object) -> None:
    """Check a flag that may be left to the function.

    Raises:
        TypeError: it is not True, False or None.
    """
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}: got {kind(value)}, expected True, False or None")


def add_colour_bar(mappable: ScalarMappable, axes: Axes | Sequence[Axes], scale: Scale, label: str) -> Any:
    """Add a colour bar beside axes, with the name of its scale."""
    first: Axes = axes if not isinstance(axes, Sequence) else axes[0]
    figure: Any = first.get_figure()
    extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}
    ends = extend[scale.above, scale.name == "log" and scale.top > 0]
    bar = figure.colorbar(mappable, ax=axes, extend=ends)
    name = {"power": "square-root scale", "log": "log scale"}.get(scale.name, "")
    bar.set_label(", ".join(filter(None, [label, name])))
    return bar


def mappable_of(scale: Scale, palette: Colormap) -> ScalarMappable:
    """Return what a colour bar of shares explains: a scale that ends at 1."""
    from matplotlib.cm import ScalarMappable

    return ScalarMappable(scale.to_norm(1.0), palette)


def bin_means(p: NDArray[np.float64], axis: int, most: int) -> NDArray[np.float64]:
    """Return the means of ``most`` bins along an axis that is longer; NaN and infinity count only where alone."""
    length = p.shape[axis]
    if length <= most:
        return p
    starts = np.arange(most) * length // most
    finite = np.isfinite(p)
    total = np.add.reduceat(np.where(finite, p, 0.0), starts, axis=axis)
    count = np.add.reduceat(finite.astype(np.int64), starts, axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# ---------------------------------------------------------------- arrays


def as_weights(name: str, values: Weights, letters: str, axes: int) -> NDArray[np.float64]:
    """Return weights as an array on the host, and check that none is negative."""
    array = as_array(name, values, letters, axes)
    if (array < 0).any():
        raise ValueError(f"{name}: expected weights of at least 0, got {array[array < 0][0]:.3g}")
    return array


def check_real(name: str, array: NDArray[Any]) -> None:
    """Check that an array holds real numbers.

    Raises:
        TypeError: it does not.
    """
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: dtype is {array.dtype}, expected real numbers")


def as_array(name: str, values: Weights, letters: str, axes: int) -> NDArray[np.float64]:
    """Return values as an array on the host."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    array = np.asarray(values)
    check_real(name, array)
    array = array.astype(np.float64, copy=False)
    if array.ndim != axes:
        raise ValueError(f"{name}: has {array.ndim} axes, expected {axes} ({letters}); {name} {list(array.shape)}")
    return array


def check_texts(name: str, texts: Sequence[object]) -> None:
    """Check that each entry is a string.

    Raises:
        TypeError: one is not.
    """
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{number}]: got {kind(text)}, expected a str")
