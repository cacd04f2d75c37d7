"""The plots: what is drawn is what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headscope import HeadStats, Observe, Recording, masks, observe
from headscope.report.colours import colour_at
from headscope.report.sheet import visible
from headscope.watching import About
from support.sheets import digit, picture, softmax


@pytest.fixture
def pyplot() -> Any:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def test_plots_draw_the_weights(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head

    weights = softmax(3, 7)
    ax = pyplot.subplots()[1]
    tokens = ["$x$", "\n", *"abcde"]
    assert plot_head(weights[1], tokens, ax=ax) is ax
    np.testing.assert_array_equal(ax.images[0].get_array(), weights[1].double().numpy())
    assert [label.get_text() for label in ax.get_yticklabels()] == [visible(token) for token in tokens]
    ax.figure.canvas.draw()  # "$x$" is no formula
    last = plot_head(weights[1, 4:], tokens)
    assert [label.get_text() for label in last.get_yticklabels()] == [visible(token) for token in tokens[4:]]
    axes = plot_grid([weights, weights[:2]])
    assert axes.shape == (2, 3)
    np.testing.assert_array_equal(axes[0, 2].images[0].get_array(), weights[2].double().numpy())
    np.testing.assert_array_equal(axes[1, 1].images[0].get_array(), weights[1].double().numpy())
    assert [ax.axison for ax in axes.flat] == [True] * 5 + [False], "there is no head 1.2"
    for largest, ax in zip(weights[:, 1:].amax((1, 2)).tolist(), axes[0], strict=True):  # the first row is always 1
        assert ax.get_title().endswith(f"(0–{largest:.2g})"), "the colours of a map are its own"
        assert ax.images[0].get_clim() == pytest.approx((0, largest))
    assert plot_grid([weights], axes=axes) is axes
    together = torch.stack([weights, weights.flip(0)])
    for given in (together, together.numpy()):
        axes = plot_grid(given)
        np.testing.assert_array_equal(axes[1, 0].images[0].get_array(), weights[2].double().numpy())


def test_the_map_of_a_long_text_is_not_white(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid

    noise = torch.randn(1, 2, 1000, 1000, dtype=torch.float64).masked_fill(
        torch.ones(1000, 1000).triu(1) > 0, -torch.inf
    )
    weights = noise.softmax(-1)
    weights[0, 1, 500] = torch.nan
    axes = plot_grid(weights)
    for head, ax in enumerate(axes[0]):
        drawn = ax.images[0]
        values = np.asarray(drawn.get_array(), dtype=float)
        assert values.shape == (128, 128)
        colours = np.asarray(drawn.norm(values))
        assert np.median(colours[np.tril_indices(128, -1)]) > 0.3, "the weights of most pairs are visible"
        assert (colours[np.triu_indices(128, 1)] == 0).all(), "masked pairs have the lightest colour"
        assert ax.get_title() == f"0.{head} (log, ≤{values[1:].max():.2g})"
    block = np.asarray(axes[0, 0].images[0].get_array(), dtype=float)[10, 3]
    rows, columns = (slice(n * 1000 // 128, (n + 1) * 1000 // 128) for n in (10, 3))
    assert block == pytest.approx(float(weights[0, 0, rows, columns].mean()))
    stats = observe(torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8), mask=masks.causal(), what=Observe(map=16))
    binned = plot_grid(stats)[0, 0].images[0]
    places = np.asarray(binned.norm(np.asarray(binned.get_array(), dtype=float)))
    assert np.median(places[np.tril_indices(16, -1)]) > 0.1, "bins of several tokens"
    assert plot_grid(torch.zeros(1, 1, 80, 80))[0, 0].get_title() == "0.0 (0–0)"


def test_plots_of_statistics_and_patches(pyplot: Any) -> None:
    from headscope.report.plots import plot_patches, plot_statistics

    sheet = picture()
    ax = plot_statistics(sheet.statistics, "entropy")
    np.testing.assert_array_equal(ax.images[0].get_array(), [layer["entropy"] for layer in sheet.statistics])
    assert ax.texts[4].get_text() == f"{sheet.statistics[1]['entropy'][1]:.2f}"
    gap = plot_statistics([{"x": [1.0, None]}], "x")
    assert np.isnan(np.ma.getdata(gap.images[0].get_array())[0, 1])
    weights = sheet.weights[0][1].astype(np.float64)
    for query, looked in ((None, weights.mean(0)), (9, weights[9])):
        ax = pyplot.subplots()[1]
        assert plot_patches(weights, digit(), query=query, grid=(5, 7), ax=ax) is ax
        np.testing.assert_array_equal(ax.images[0].get_array(), digit())
        np.testing.assert_array_equal(ax.images[1].get_array(), looked.reshape(5, 7))
        assert [patch.get_xy() for patch in ax.patches] == ([] if query is None else [(1.5, 0.5)])


def test_plots_refuse_what_does_not_fit(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_patches, plot_statistics

    weights = softmax(3, 7)
    with pytest.raises(ValueError, match=r"weights: has 3 axes, expected 2 \(\[Q, K\]\); weights \[3, 7, 7\]"):
        plot_head(weights)
    with pytest.raises(ValueError, match=r"tokens: expected 7 entries, one for each key, got 2; weights \[7, 7\]"):
        plot_head(weights[0], ["a", "b"])
    with pytest.raises(ValueError, match=r"tokens: expected at most 3 queries \(K\), the last tokens, got 7; weights"):
        plot_head(weights[0, :, :3], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"weights\[0\]: has 2 axes, expected 3 \(\[H, Q, K\]\)"):
        plot_grid([weights[0]])
    with pytest.raises(ValueError, match=r"weights: expected at least 1 layer, got none"):
        plot_grid([])
    with pytest.raises(ValueError, match=r"weights: expected at least 1 head, got none"):
        plot_grid([weights[:0]])
    with pytest.raises(
        ValueError, match=r"weights: has 3 axes, expected 4 \(\[layers, H, Q, K\]\); weights \[3, 7, 7\]"
    ):
        plot_grid(weights)
    with pytest.raises(ValueError, match=r"axes: shape is \[1, 2\], expected at least \[1, 3\] \(layers, heads\)"):
        plot_grid([weights], axes=pyplot.subplots(1, 2, squeeze=False)[1])
    with pytest.raises(ValueError, match=r"statistics: expected at least 1 layer, got none"):
        plot_statistics([], "x")
    with pytest.raises(ValueError, match=r"name: expected a statistic of layer 0, one of x; got 'y'"):
        plot_statistics([{"x": [1.0]}], "y")
    with pytest.raises(
        ValueError, match=r"grid: 3 x 3 patches do not match weights, expected \[T, T\] with T = 9; weights \[7, 7\]"
    ):
        plot_patches(weights[0], digit())
    with pytest.raises(ValueError, match=r"query: got 35, expected 0 to 34"):
        plot_patches(np.ones((35, 35)), digit(), query=35, grid=(5, 7))


SQUARE = torch.full((4, 4), 0.25)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (-SQUARE, ValueError, "expected weights of at least 0, got -0.25"),
        (SQUARE + 1j, TypeError, "dtype is complex64, expected real numbers"),
        ((SQUARE + 1j).numpy(), TypeError, "dtype is complex64, expected real numbers"),
        ([["a"]], TypeError, "dtype is <U1, expected real numbers"),
    ],
    ids=["negative", "complex", "complex array", "texts"],
)
def test_plots_refuse_what_are_no_weights(pyplot: Any, weights: Any, error: type[Exception], message: str) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_patches

    with pytest.raises(error, match=rf"^weights: {message}$"):
        plot_head(weights)
    with pytest.raises(error, match=rf"^weights: {message}$"):
        plot_patches(weights, digit())
    with pytest.raises(error, match=rf"^weights\[0\]: {message}$"):
        plot_grid([[*map(np.asarray, [weights])]])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query": True}, TypeError, r"query: got bool, expected a whole number"),
        ({"query": 1.0}, TypeError, r"query: got float, expected a whole number"),
        ({"grid": (-2, -2)}, ValueError, r"grid\[0\]: got -2, expected a whole number from 1"),
        ({"grid": (2, 2.0)}, TypeError, r"grid\[1\]: got float, expected a whole number from 1"),
        ({"grid": (4,)}, TypeError, r"grid: got \(4,\), expected two numbers \(rows, columns\)"),
        ({"grid": 4}, TypeError, r"grid: got 4, expected two numbers \(rows, columns\)"),
        ({"image": torch.ones(3, 8, 8)}, ValueError, r"image: shape is \[3, 8, 8\], expected \[h, w\] or \[h, w, 3\]"),
        ({"image": torch.ones(8, 8) * 1j}, TypeError, r"image: dtype is complex64, expected real numbers"),
        ({"weights": torch.ones(0, 0)}, ValueError, r"weights: expected at least 1 patch, got none"),
    ],
)
def test_plots_of_patches_refuse_what_does_not_fit(
    pyplot: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    from headscope.report.plots import plot_patches

    with pytest.raises(error, match=f"^{message}"):
        plot_patches(**{"weights": SQUARE, "image": digit(), **options})


def test_plots_refuse_other_kinds(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_statistics

    layers: Any = {}
    numbers: Any = [1, 2, 3, 4]
    with pytest.raises(
        TypeError, match=r"^weights: got dict, expected an entry for each layer, HeadStats, or a recording$"
    ):
        plot_grid(layers)
    with pytest.raises(
        TypeError, match=r"^statistics: got dict, expected an entry for each layer, HeadStats, or a recording"
    ):
        plot_statistics(layers, "x")
    with pytest.raises(TypeError, match=r"^tokens\[0\]: got int, expected a str$"):
        plot_head(SQUARE, numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_images_of_every_width_and_with_a_gradient_are_drawn(pyplot: Any, dtype: torch.dtype) -> None:
    from headscope.report.plots import plot_patches

    image: Any = torch.rand(8, 8).to(dtype).requires_grad_()
    query: Any = np.int64(1)
    ax = plot_patches(SQUARE, image, query=query)
    np.testing.assert_array_equal(ax.images[0].get_array(), image.detach().double().numpy())
    assert [patch.get_xy() for patch in ax.patches] == [(0.5, -0.5)]


def test_plots_have_the_palette_of_the_page(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_head, plot_patches, plot_statistics

    drawn = [
        plot_head(torch.eye(3)).images[0],
        *(plot_grid(torch.eye(size).expand(1, 1, size, size))[0, 0].images[0] for size in (7, 97)),
        plot_patches(torch.eye(4), torch.rand(8, 8)).images[1],
        plot_statistics([{"entropy": [0.5, 1.25]}], "entropy").images[0],
    ]
    for image in drawn:
        for place in np.linspace(0, 1, 101):
            np.testing.assert_allclose(255 * np.array(image.cmap(place)[:3]), colour_at(place), atol=1.5)


def test_the_palette_goes_from_white_to_ink_in_even_steps_of_lightness() -> None:
    lightness = [okl(*colour_at(place)) for place in np.linspace(0, 1, 18)]
    steps = -np.diff(lightness)
    assert lightness[0] == pytest.approx(1, abs=1e-3)
    assert steps.min() > 0.9 * steps.mean()
    assert steps.max() < 1.1 * steps.mean()
    assert [colour_at(place, dark=True) for place in (-1, 0, 1)] == [colour_at(place) for place in (1, 1, 0)]


def okl(*colour: int) -> float:
    """The lightness of a colour in OKLab."""
    parts = np.array(colour) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]]) @ linear  # fmt: skip
    return float(np.array([0.2104542553, 0.7936177850, -0.0040720468]) @ np.cbrt(cones))


def test_numbers_on_colours_can_be_read(pyplot: Any) -> None:
    from headscope.report.plots import plot_statistics

    ax = plot_statistics([{"entropy": [0.0, 0.1, 0.4, 0.6, 0.9, 1.0]}], "entropy")
    assert [text.get_color() for text in ax.texts] == ["black"] * 3 + ["white"] * 3


def test_what_was_observed_is_drawn(pyplot: Any) -> None:
    from headscope.report.plots import plot_grid, plot_statistics

    q, k = torch.randn(2, 1, 3, 7, 5)
    parts = {
        name: observe(q, layer * k, mask=masks.causal(), what=Observe(map=7)).parts["0"]
        for layer, name in enumerate(("a", "b"))
    }
    stats = HeadStats(parts)
    recording = Recording(stats, About())
    for observed in (stats, recording):
        axes = plot_grid(observed)
        assert axes.shape == (2, 3)
        drawn = np.ma.filled(axes[1, 2].get_images()[0].get_array(), np.nan)
        np.testing.assert_allclose(drawn, parts["b"].map.mean[2].numpy())  # pyright: ignore[reportOptionalMemberAccess]
        ax = plot_statistics(observed, "entropy")
        figures = np.ma.filled(ax.get_images()[0].get_array(), np.nan)
        np.testing.assert_allclose(figures[0], parts["a"].moments["entropy"].mean.numpy())
        pyplot.close("all")
    with pytest.raises(ValueError, match=r"weights: 0 has no map; observe with Observe\(map=64\)"):
        plot_grid(observe(q, k))
    with pytest.raises(ValueError, match=r"name: expected a statistic of layer 0, one of lse, .*; got 'entropi'$"):
        plot_statistics(stats, "entropi")


@pytest.mark.parametrize(("queries", "keys"), [(5, 11), (11, 5), (5, 7), (23, 7), (1, 1)])
def test_a_map_has_no_bins_without_a_query_or_a_key(pyplot: Any, queries: int, keys: int) -> None:
    from headscope.report.plots import plot_grid

    q, k = torch.randn(1, 2, queries, 5), torch.randn(1, 2, keys, 5)
    stats = observe(q, k, what=Observe(map=11))
    drawn = np.ma.filled(plot_grid(stats)[0, 1].get_images()[0].get_array(), np.nan)
    p = torch.softmax(q.double() @ k.double().mT / 5**0.5, -1)[0, 1]
    if queries <= 11:
        np.testing.assert_allclose(drawn, p.numpy(), rtol=1e-5)
    assert drawn.shape == (min(queries, 11), min(keys, 11))
    assert np.isfinite(drawn).all()
