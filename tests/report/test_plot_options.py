"""Plots as figures for papers: scales, palettes, colour bars, axes of tokens, chosen heads."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope import HeadStats, Observe, Recording, masks, observe
from headscope.watching import About
from support.sheets import digit, softmax, text, words


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def causal(length: int, *, spread: float) -> Tensor:
    """The weights of one causal head; with a small spread they are even."""
    logits = spread * torch.randn(length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return logits.masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf).softmax(-1)


def recording(length: int, bins: int, texts: tuple[str, ...] | None = None) -> Recording:
    q, k = torch.randn(2, 1, 3, length, 5, generator=torch.Generator().manual_seed(2))
    parts = {
        f"h.{n}.attn": observe(q, (1 + n) * k, mask=masks.causal(), what=Observe(map=bins)).parts["0"] for n in range(2)
    }
    kinds: Any = dict.fromkeys(parts, "self")
    return Recording(HeadStats(parts), About("m", {}, {}, kinds, texts, 1, 1))


def norm_of(ax: Any) -> str:
    return {"Normalize": "linear", "LogNorm": "log", "PowerNorm": "power"}[type(ax.images[0].norm).__name__]


def drawn(ax: Any) -> np.ndarray[Any, Any]:
    return np.ma.filled(ax.images[0].get_array(), np.nan)


# ---------------------------------------------------------------- scales


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (torch.eye(397), "linear"),
        (causal(397, spread=0.1), "log"),
        (causal(13, spread=0.1), "linear"),
        (causal(61, spread=6.0), "linear"),
        (torch.full((400, 400), 1 / 400), "linear"),
        (torch.zeros(5, 5), "linear"),
    ],
    ids=["diagonal", "long and even", "short and even", "a few large", "all the same", "zero"],
)
def test_the_data_choose_the_scale(pyplot: Any, weights: Tensor, expected: str) -> None:
    from headscope.report.plots import plot_head

    assert norm_of(plot_head(weights)) == expected


@pytest.mark.parametrize("norm", ["linear", "log", "power"])
def test_a_scale_ends_at_the_largest_weight_that_has_company(pyplot: Any, norm: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_heads

    p = causal(53, spread=1.0)
    top = float(p[1:].max())
    assert top < 0.99
    for ax in (
        plot_head(p, norm=norm),
        plot_grid(p[None, None], norm=norm)[0, 0],
        plot_heads(p[None, None], ["0.0"], norm=norm)[0, 0],
    ):
        assert norm_of(ax) == norm
        scale = ax.images[0].norm
        assert scale.vmax == pytest.approx(top)
        assert scale.vmin == pytest.approx(top / 1e4 if norm == "log" else 0)
        np.testing.assert_array_equal(drawn(ax), p.numpy())
        places = np.ma.filled(scale(p.numpy()), np.nan)
        assert (places[p.numpy() == 0] == 0).all()
        value = float(p[30, 7])
        place = {"linear": value / top, "log": 1 + np.log10(value / top) / 4, "power": (value / top) ** 0.5}[norm]
        assert places[30, 7] == pytest.approx(place)


def test_a_shared_scale_shows_sparse_and_even_heads(pyplot: Any) -> None:
    from headscope.report.plots import plot_heads

    even, sparse = causal(307, spread=0.1), torch.eye(307, dtype=torch.float64)
    weights = torch.stack([even, sparse])[None]
    axes = plot_heads(weights, [(0, 0), (0, 1)])
    assert [norm_of(ax) for ax in axes.flat] == ["power", "power"]
    assert len({ax.images[0].norm.vmax for ax in axes.flat}) == 1
    places = np.asarray(axes[0, 0].images[0].norm(even.numpy()[np.tril_indices(307, -1)]))
    assert np.median(places) > 0.05, "even weights of 1 / 307 are visible beside a weight of 1"
    own = plot_heads(weights, ["0.0", "0.1"], scale="own")
    assert own[0, 0].images[0].norm.vmax == pytest.approx(float(even[1:].max()))
    assert own[0, 1].images[0].norm.vmax == 1
    assert plot_heads(weights, ["0.0"])[0, 0].images[0].norm.vmax < 1


def test_a_statistic_has_scales(pyplot: Any) -> None:
    from headscope.report.plots import plot_statistics

    statistics = [{"x": [0.5, 1.25, 8.0]}]
    for norm, place in (("linear", 0.1), ("log", np.log(2.5) / np.log(16)), ("power", 0.1**0.5)):
        ax = plot_statistics(statistics, "x", norm=norm, colorbar=True)  # pyright: ignore[reportArgumentType]
        assert float(ax.images[0].norm(1.25)) == pytest.approx(place)
        assert len(ax.get_figure().axes) == 2  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(
        ValueError, match=r'^norm: "log" requires values of at least 0, got -1; use "linear" or "power"$'
    ):
        plot_statistics([{"x": [-1.0, 1.0]}], "x", norm="log")


# ---------------------------------------------------------------- palettes and colour bars


@pytest.mark.parametrize("cmap", ["blues", "viridis", "cividis", "magma", "Greys", "object"])
def test_a_palette_is_a_name_or_an_object(pyplot: Any, cmap: str) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_heads, plot_patches, plot_statistics

    palette: Any = pyplot.get_cmap("Oranges") if cmap == "object" else cmap
    name = {"object": "Oranges", "blues": "headscope blues"}.get(cmap, cmap)
    p = softmax(2, 4)
    images = [
        plot_head(p[0], cmap=palette).images[0],
        plot_grid(p[None], cmap=palette)[0, 0].images[0],
        plot_heads(p[None], ["0.0"], cmap=palette)[0, 0].images[0],
        plot_statistics([{"x": [0.0, 1.0]}], "x", cmap=palette).images[0],
        plot_patches(p[0], digit(), cmap=palette).images[1],
    ]
    assert [image.get_cmap().name for image in images] == [name] * 5
    broken = p[0].clone()
    broken[2] = torch.nan
    ax = plot_head(broken, cmap="viridis")
    assert ax.images[0].get_cmap()(np.ma.masked_invalid([np.nan]))[0][:3] == pytest.approx(
        (0.914, 0.902, 0.925), abs=0.002
    )


def bars(figure: Any) -> list[Any]:
    return [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]


def test_a_colour_bar_is_there_as_asked(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_heads, plot_patches

    p = causal(17, spread=1.0)
    assert [len(bars(plot_head(p, colorbar=flag).get_figure())) for flag in (None, True, False)] == [1, 1, 0]
    for flag in (None, True, False):
        ax = pyplot.subplots()[1]
        plot_head(p, ax=ax, colorbar=flag)
        assert len(bars(ax.get_figure())) == (flag is True), "a given figure stays as it is"
    weights = p.expand(2, 3, 17, 17)
    assert [len(bars(plot_grid(weights, colorbar=flag)[0, 0].get_figure())) for flag in (False, True)] == [0, 1]
    axes = plot_heads(weights, ["0.0", "1.2"], norm="log")
    (bar,) = bars(axes[0, 0].get_figure())
    assert bar.get_ylabel() == "weight, log scale"
    (bar,) = bars(plot_heads(weights, ["0.0", "1.2"], scale="own", norm="power")[0, 0].get_figure())
    assert bar.get_ylabel() == "share of largest, square-root scale"
    assert bar.get_ylim() == (0, 1)
    square = torch.full((4, 4), 0.25)
    assert len(bars(plot_patches(square, torch.rand(8, 8)).get_figure())) == 1
    assert len(bars(plot_patches(square, torch.rand(8, 8), colorbar=False).get_figure())) == 0


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "length",  # all tokens, some of them, and positions alone; what lies between is in the long runs
    [3, pytest.param(29, marks=pytest.mark.long), 61, pytest.param(131, marks=pytest.mark.long), 199, 397],
)
@pytest.mark.parametrize("inches", [2.0, 6.0])
def test_labels_of_tokens_do_not_overlap(pyplot: Any, length: int, inches: float) -> None:
    from headscope.report.plots import plot_head

    tokens = [f" token{n}" if n % 3 else "Ấj|" for n in range(length)]
    figure, ax = pyplot.subplots(figsize=(inches, inches), dpi=200)
    plot_head(softmax(1, length)[0], tokens, ax=ax)
    for size in (inches, 2.3 * inches):  # labels follow the figure
        figure.set_size_inches(size, size)
        figure.canvas.draw()
        for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
            labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
            assert len(labels) >= 3
            boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: getattr(box, low))
            for one, other in itertools.pairwise(boxes):
                assert getattr(one, high) <= getattr(other, low) + 0.5, (length, size)


def test_some_tokens_have_their_positions_and_a_long_text_only_positions(pyplot: Any) -> None:
    from headscope.report.plots import plot_head

    def labels(length: int) -> list[str]:
        ax = pyplot.subplots(figsize=(3, 3))[1]
        plot_head(softmax(1, length)[0], [f"t{n}" for n in range(length)], ax=ax)
        ax.figure.canvas.draw()
        return [label.get_text() for label in ax.get_yticklabels()]

    assert labels(5) == ["t0", "t1", "t2", "t3", "t4"]
    some = labels(61)
    step = int(some[1].split()[0])
    assert step in (2, 5, 10)
    assert some == [f"{n} t{n}" for n in range(0, 61, step)]
    assert not any("t" in label for label in labels(397))
    ax = plot_head(softmax(1, 9)[0, 4:], [f"t{n}" for n in range(9)])
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"t{n}" for n in range(4, 9)]
    again = pickle.loads(pickle.dumps(ax.figure)).axes[0]
    assert [label.get_text() for label in again.get_yticklabels()] == [f"t{n}" for n in range(4, 9)]


def test_a_dollar_in_a_token_is_a_dollar(pyplot: Any) -> None:
    from headscope.report.plots import plot_head, plot_heads

    tokens = ["$\\frac$", "a$b$", "_{", "</b>"]
    for ax in (
        plot_head(softmax(1, 4)[0], tokens),
        plot_heads(softmax(1, 4)[None], ["0.0"], tokens=tokens, titles=["$\\frac$"])[0, 0],
    ):
        ax.figure.canvas.draw()
        for axis in (ax.xaxis, ax.yaxis):
            assert [label.get_text() for label in axis.get_ticklabels()] == tokens
            assert not any(label.get_parse_math() for label in axis.get_ticklabels())


def test_a_very_long_map_is_drawn_in_bins_with_its_positions(pyplot: Any) -> None:
    from headscope.report.plots import plot_head

    p = torch.zeros(1, 5003)
    p[0, 4001] = 1
    ax = plot_head(p.expand(3001, 5003))
    values = drawn(ax)
    assert values.shape == (1024, 1024)
    bins = np.arange(1024) * 5003 // 1024
    column = int(np.flatnonzero(values[0])[0])
    assert bins[column] <= 4001 < bins[column + 1]
    assert values[7, column] == pytest.approx(1 / (bins[column + 1] - bins[column]))
    assert ax.images[0].get_extent() == [-0.5, 5002.5, 3000.5, -0.5]


# ---------------------------------------------------------------- chosen heads


def test_chosen_heads_of_anything_with_maps(pyplot: Any) -> None:
    from headscope.report.plots import plot_heads

    sheet = text(words(7))
    seen = recording(7, 7, tuple(words(7)))
    stats_maps = [part.map.mean for part in seen.stats.parts.values() if part.map is not None]
    for source, maps in (
        (sheet, sheet.weights),
        (list(sheet.weights), sheet.weights),
        (np.stack(sheet.weights), sheet.weights),
        (seen, stats_maps),
        (seen.stats, stats_maps),
    ):
        axes = plot_heads(source, ["1.2", (0, 1), (np.int64(1), 0)])
        assert axes.shape == (1, 3)
        for ax, (layer, head) in zip(axes.flat, ((1, 2), (0, 1), (1, 0)), strict=True):
            np.testing.assert_allclose(drawn(ax), np.asarray(maps[layer][head], dtype=np.float64), rtol=1e-6)
            assert ax.get_title() == f"head {layer}.{head}"
        pyplot.close("all")
    axes = plot_heads(sheet, ["1.2"])
    assert {label.get_text() for label in axes[0, 0].get_yticklabels()} >= {"␣w0", "␣w1"}
    axes = plot_heads(seen, ["1.2", ("h.1.attn", 2), "h.1.attn.2"])
    for ax in axes.flat[1:]:  # layers by name
        np.testing.assert_array_equal(drawn(ax), drawn(axes[0, 0]))
    assert {label.get_text() for label in axes[0, 0].get_yticklabels()} >= {"␣w0", "␣w1"}


def test_bins_of_a_long_text_have_their_positions(pyplot: Any) -> None:
    from headscope.report.plots import plot_heads

    axes = plot_heads(recording(331, 8, tuple(words(331))), ["0.0", "1.1"])
    for ax in axes.flat:
        assert ax.images[0].get_extent() == [-0.5, 330.5, 330.5, -0.5]
    assert not any("w" in label.get_text() for label in axes[0, 0].get_xticklabels())


@pytest.mark.parametrize(
    ("width", "count", "shape", "inches"), [("column", 3, (2, 2), 3.3), ("page", 5, (2, 3), 6.9), (4, 2, (1, 2), 4)]
)
def test_a_figure_of_heads_fits_its_paper(pyplot: Any, width: Any, count: int, shape: Any, inches: float) -> None:
    from headscope.report.plots import plot_heads

    axes = plot_heads(text(words(11)), [f"{n // 3}.{n % 3}" for n in range(count)], width=width)
    figure = axes[0, 0].get_figure()
    assert axes.shape == shape
    assert figure.get_size_inches()[0] == pytest.approx(inches)
    assert [ax.axison for ax in axes.flat] == [True] * count + [False] * (axes.size - count)
    figure.canvas.draw()
    page = figure.bbox
    for ax in [*axes.flat[:count], *bars(figure)]:
        box = ax.get_tightbbox()
        assert box.x0 >= page.x0 - 1, "nothing is cut"
        assert box.x1 <= page.x1 + 1
        assert box.y0 >= page.y0 - 1
        assert box.y1 <= page.y1 + 1
    boxes = [ax.get_window_extent() for ax in axes.flat[:count]]
    assert len({round(box.width) for box in boxes}) == len({round(box.height) for box in boxes}) == 1
    assert boxes[0].width / figure.bbox.width > 0.55 / shape[1], "the maps fill the figure"
    sizes = {label.get_fontsize() for ax in axes.flat[:count] for label in ax.get_xticklabels()}
    assert sizes == {6}


def test_own_axes_and_titles(pyplot: Any) -> None:
    from headscope.report.plots import plot_heads

    axes = pyplot.subplots(2, 2)[1]
    assert plot_heads(softmax(3, 5)[None], ["0.2", "0.0"], titles=["a", "b"], axes=axes) is axes
    assert [ax.get_title() for ax in axes.flat] == ["a", "b", "", ""]
    assert [ax.get_xlabel() for ax in axes.flat[:2]] == ["key", "key"]
    with pytest.raises(ValueError, match=r"^axes: got 2 axes, expected at least 3, one for each head$"):
        plot_heads(softmax(3, 5)[None], ["0.2", "0.0", "0.1"], axes=pyplot.subplots(1, 2)[1])


# ---------------------------------------------------------------- errors


EXAMPLE = r', as "3\.5" or \(3, 5\)$'


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ([], ValueError, r"^heads: got none, expected at least one" + EXAMPLE),
        ("1.2", TypeError, r"^heads: got '1\.2', expected a list of heads" + EXAMPLE),
        (7, TypeError, r"^heads: got .*expected a list of heads" + EXAMPLE),
        ([3], TypeError, r"^heads\[0\]: got int, expected a layer and a head" + EXAMPLE),
        ([(0, 1.5)], TypeError, r"^heads\[0\]: got \(0, 1\.5\), expected a layer and a head" + EXAMPLE),
        (
            [(0, 1), "2.0"],
            ValueError,
            r"^heads\[1\]: got '2\.0', which does not exist; expected layers 0 to 1 with 3 heads each",
        ),
        (["0.3"], ValueError, r"^heads\[0\]: got '0\.3', which does not exist"),
        (["x.1"], ValueError, r"^heads\[0\]: got 'x\.1', which does not exist"),
        (["1"], ValueError, r"^heads\[0\]: got '1', which does not exist"),
        (["1.-1"], ValueError, r"^heads\[0\]: got '1\.-1', which does not exist"),
        ([(-1, 0)], ValueError, r"^heads\[0\]: got \(-1, 0\), which does not exist"),
        ([(0, 1, 2)], TypeError, r"^heads\[0\]: got tuple, expected a layer and a head" + EXAMPLE),
    ],
)
def test_heads_that_are_not_there(pyplot: Any, heads: Any, error: type[Exception], message: str) -> None:
    from headscope.report.plots import plot_heads

    with pytest.raises(error, match=message):
        plot_heads(softmax(3, 5).expand(2, 3, 5, 5), heads)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"norm": "sqrt"},
            ValueError,
            r"^norm: got 'sqrt', expected \"linear\", \"log\", \"power\" or None; for a norm of",
        ),
        ({"norm": 1}, TypeError, r"^norm: got int, expected"),
        ({"norm": ["log"]}, TypeError, r"^norm: got list, expected"),
        ({"cmap": "blue"}, ValueError, r"^cmap: got 'blue', expected \"blues\" \(the default\), \"viridis\""),
        ({"cmap": 3}, TypeError, r"^cmap: got int, expected a name or a Colormap of matplotlib$"),
        ({"colorbar": "yes"}, TypeError, r"^colorbar: got str, expected True, False or None$"),
        (
            {"scale": "log"},
            ValueError,
            r"^scale: got 'log', expected \"shared\" or \"own\"; for \"log\" or \"power\" use norm$",
        ),
        ({"width": "a4"}, ValueError, r"^width: got 'a4', expected \"column\", \"page\" or inches$"),
        ({"width": 0}, ValueError, r"^width: got 0, expected 1 to 100 inches$"),
        ({"width": True}, TypeError, r"^width: got bool, expected"),
        ({"width": float("nan")}, ValueError, r"^width: got nan, expected 1 to 100 inches$"),
        ({"titles": ["a", "b"]}, ValueError, r"^titles: expected 1, one for each head, got 2$"),
        ({"titles": "a"}, TypeError, r"^titles: got str, expected a list with a title for each head$"),
        ({"tokens": ["a"]}, ValueError, r"^tokens: expected 5 entries, one for each key, got 1; weights \[5, 5\]$"),
    ],
)
def test_options_that_are_none(pyplot: Any, options: Any, error: type[Exception], message: str) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_heads, plot_statistics

    with pytest.raises(error, match=message):
        plot_heads(softmax(3, 5)[None], ["0.1"], **options)
    if options.keys() <= {"norm", "cmap", "colorbar"}:
        with pytest.raises(error, match=message):
            plot_head(softmax(1, 5)[0], **options)
        with pytest.raises(error, match=message):
            plot_grid(softmax(3, 5)[None], **options)
        with pytest.raises(error, match=message):
            plot_statistics([{"x": [1.0]}], "x", **options)


def test_keys_of_another_text_have_no_tokens_and_bins_are_named(pyplot: Any) -> None:
    from headscope.report.plots import plot_heads

    q, k = torch.randn(2, 1, 1, 5, 4)
    part = observe(q, k, kind="cross", what=Observe(map=5)).parts["0"]
    crossed = Recording(HeadStats({"0": part}), About("m", {}, {}, {"0": "cross"}, tuple("abcde"), 1, 1))
    ax = plot_heads(crossed, ["0.0"])[0, 0]
    assert not any(label.get_text() in "abcde" and label.get_text() for label in ax.get_xticklabels())
    ax = plot_heads(crossed, ["0.0"], tokens=list("vwxyz"))[0, 0]
    assert [label.get_text() for label in ax.get_xticklabels()] == list("vwxyz")
    both = [observe(x := torch.randn(1, 1, length, 4), x, what=Observe(map=4)) for length in (16, 31)]
    ax = plot_heads(both[0].merge(both[1]), ["0.0"])[0, 0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key bin", "query bin")
    assert ax.images[0].get_extent() == [-0.5, 3.5, 3.5, -0.5]
