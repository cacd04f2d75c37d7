"""What a head looks at in an image: planted maps win their region, and every ratio stands on its definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.report.regions import REGIONS, image_regions, looks_most_at, measure, object_mask

GRID = (7, 11)
T = 77


def picture(seed: int = 0) -> NDArray[np.uint8]:
    """A bright bar with a rough end on a dark ground."""
    random = np.random.default_rng(seed)
    image = np.zeros(GRID, np.uint8)
    image[2:5, 3:9] = 200
    image[2:5, 7:9] = random.integers(90, 255, (3, 2))
    image[0, 0] = 20
    return image


def only_on(part: NDArray[np.float64]) -> Tensor:
    """One head in which every patch looks at the patches of a region, evenly."""
    return torch.from_numpy(part / part.sum()).expand(1, T, T).clone()


def name_of(p: Tensor, image: NDArray[np.uint8], **options: Any) -> tuple[str, float]:
    found = looks_most_at(measure(p, image, GRID, **options))[0]
    assert found is not None
    return found


def test_even_attention_is_one_everywhere() -> None:
    measured = measure(torch.full((2, T, T), 1 / T, dtype=torch.float64), picture(), GRID)
    for name in (*REGIONS, "distance_ratio"):
        torch.testing.assert_close(measured[name], torch.ones(2, dtype=torch.float64), msg=name)
    assert bool(measured["layout_r2"].isnan().all()), "an even map has no variance to explain"


@pytest.mark.parametrize("name", ["centre", "edges", "boundary", "texture"])
def test_attention_on_a_region_makes_it_win(name: str) -> None:
    parts = image_regions(picture(), GRID)
    assert len({tuple(part) for part in parts.values()}) == 4, "the regions of this picture differ"
    found = name_of(only_on(parts[name]), picture())
    share = parts[name].mean()
    assert found[0] == name
    assert found[1] == pytest.approx((parts[name] ** 2).sum() / parts[name].sum() / share)


def test_attention_near_far_and_by_offset() -> None:
    places = torch.cartesian_prod(torch.arange(GRID[0]), torch.arange(GRID[1])).double()
    distance = (places[:, None] - places[None]).norm(dim=-1)
    near = (
        torch.softmax(-4 * distance, -1)[None] + torch.rand(1, T, T, generator=torch.Generator().manual_seed(0)) * 1e-9
    )
    assert name_of(near, picture())[0] in ("near", "layout")
    assert measure(near, picture(), GRID)["near"].item() == pytest.approx(4, abs=0.01)
    assert measure(near, picture(), GRID)["distance_ratio"].item() < 0.2
    far = torch.softmax(4 * distance, -1)[None]
    assert measure(far, picture(), GRID)["far"].item() == pytest.approx(4, abs=0.05)
    assert measure(far, picture(), GRID)["distance_ratio"].item() > 1.5
    step = torch.zeros(1, T, T, dtype=torch.float64)  # two rows down and three columns on, wherever that exists
    for i in range(T):
        row, column = divmod(i, GRID[1])
        inside = row + 2 < GRID[0] and column + 3 < GRID[1]
        step[0, i] = 1 / T
        if inside:
            step[0, i] = 0
            step[0, i, (row + 2) * GRID[1] + column + 3] = 1
    found = measure(step, picture(), GRID)
    assert looks_most_at(found)[0] == ("layout", pytest.approx(found["layout"].item()))
    assert found["layout"].item() > 2.4
    assert found["layout_r2"].item() > 0.99


def test_chance_maps_are_near_one() -> None:
    random = torch.softmax(torch.randn(64, T, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64), -1)
    measured = measure(random, picture(), GRID)
    for name in (*REGIONS, "distance_ratio"):
        assert measured[name].mean().item() == pytest.approx(1, abs=0.02), name
    assert measured["layout_r2"].mean().item() < 0.01, "a map is not explained by itself"


def test_layout_with_a_map_of_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    fixed = torch.softmax(3 * torch.randn(2, T, T, generator=generator, dtype=torch.float64), -1)
    found = measure(fixed, picture(), GRID, position_map=fixed)
    torch.testing.assert_close(found["layout_r2"], torch.ones(2, dtype=torch.float64))
    assert looks_most_at(found)[0] == ("layout", pytest.approx(found["layout"][0].item()))
    other = measure(fixed, picture(), GRID, position_map=fixed.flip(0))
    assert float(other["layout_r2"].max()) < 0.1, "another head's positions explain nothing"
    assert other["layout"].mean().item() == pytest.approx(1, abs=0.1)


def test_a_layout_that_explains_little_is_not_named() -> None:
    measured = {name: torch.tensor([1.5, 1.5], dtype=torch.float64) for name in REGIONS}
    measured |= {"layout": torch.tensor([3.0, 3.0]), "layout_r2": torch.tensor([0.49, 0.5])}
    assert looks_most_at(measured) == [("centre", 1.5), ("layout", 3.0)], (
        "of equal ratios the first, and no layout below a half"
    )


def slow_by_offset(p: Tensor, i: int, j: int) -> float:
    """The mean weight of the same way from query to key in all other rows."""
    rows, columns = GRID
    way = (j // columns - i // columns, j % columns - i % columns)
    found: list[float] = []
    for other in range(T):
        row, column = other // columns + way[0], other % columns + way[1]
        if other != i and 0 <= row < rows and 0 <= column < columns:
            found.append(float(p[other, row * columns + column]))
    return sum(found) / len(found) if found else 1 / T


def test_what_position_explains_is_its_definition() -> None:
    p = torch.softmax(torch.randn(1, T, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64), -1)
    expected = torch.tensor([[slow_by_offset(p[0], i, j) for j in range(T)] for i in range(T)], dtype=torch.float64)
    r2 = 1 - (p[0] - expected).square().sum() / (p[0] - 1 / T).square().sum()
    found = measure(p, picture(), GRID)
    torch.testing.assert_close(found["layout_r2"][0], r2)
    given = measure(p, picture(), GRID, position_map=expected[None])
    torch.testing.assert_close(found["layout"], given["layout"])


def test_ratios_are_their_definition() -> None:
    p = torch.softmax(torch.randn(2, T, T, generator=torch.Generator().manual_seed(4), dtype=torch.float64), -1)
    found = measure(p, picture(), GRID)
    for name, part in image_regions(picture(), GRID).items():
        for head in range(2):
            shares = [sum(float(p[head, i, j]) * part[j] for j in range(T)) / (part.sum() / T) for i in range(T)]
            assert found[name][head].item() == pytest.approx(sum(shares) / T), name
    places = [divmod(i, GRID[1]) for i in range(T)]
    paths = [[math.dist(a, b) for b in places] for a in places]
    walked = sum(float(p[0, i, j]) * paths[i][j] for i in range(T) for j in range(T))
    even = sum(map(sum, paths)) / T
    assert found["distance_ratio"][0].item() == pytest.approx(walked / even)


def test_regions_hold_a_quarter_and_share_ties() -> None:
    image = np.zeros((4, 6), np.uint8)
    image[1:3, 1:5] = 255
    parts = image_regions(image, (4, 6))
    assert parts["centre"].sum() == pytest.approx(6)
    assert parts["edges"].sum() == pytest.approx(6)
    by_side = parts["centre"].reshape(4, 6)
    np.testing.assert_allclose(by_side, by_side[::-1, ::-1], err_msg="ties are shared, not broken")
    dot = np.zeros((7, 7), np.uint8)
    dot[3, 3] = 255
    outline = image_regions(dot, (7, 7))["boundary"].reshape(7, 7)
    assert outline[2:5, 2:5].all(), "the dot and the ring around it"
    assert outline.sum() == 9, "fewer than a quarter: what is no boundary is not in it"


def test_patches_of_several_pixels() -> None:
    small = picture()
    large = np.kron(small, np.ones((3, 2), np.uint8))
    np.testing.assert_array_equal(object_mask(large, GRID), object_mask(small, GRID))
    np.testing.assert_allclose(image_regions(large, GRID)["centre"], image_regions(small, GRID)["centre"])
    colour = np.repeat(small[..., None], 3, -1)
    np.testing.assert_allclose(image_regions(colour, GRID)["texture"], image_regions(small, GRID)["texture"])


def test_an_even_image_has_no_regions() -> None:
    image = np.full(GRID, 9, np.uint8)
    assert image_regions(image, GRID) == {}
    assert object_mask(image, GRID) is None
    measured = measure(torch.full((1, T, T), 1 / T), image, GRID)
    assert bool(measured["centre"].isnan().all())
    assert looks_most_at(measured)[0] == ("near", pytest.approx(1, abs=1e-6))


def test_rows_that_are_not_finite_are_left_out() -> None:
    p = torch.softmax(torch.randn(1, T, T, generator=torch.Generator().manual_seed(5), dtype=torch.float64), -1)
    broken = p.clone()
    broken[0, 5, 3] = torch.nan
    found, whole = measure(broken, picture(), GRID), measure(p, picture(), GRID)
    for name in ("centre", "edges", "near"):
        assert found[name].item() == pytest.approx(whole[name].item(), rel=0.1)
        assert found[name].item() != whole[name].item()
    nothing = measure(torch.full((1, T, T), torch.nan), picture(), GRID)
    assert looks_most_at(nothing) == [None]


def test_what_is_refused() -> None:
    p = torch.full((2, T, T), 1 / T)
    with pytest.raises(ValueError, match=r"p: expected \[H, 77, 77\] for a grid of 7 x 11; p \[77, 77\]"):
        measure(p[0], picture(), GRID)
    with pytest.raises(
        ValueError, match=r"position_map: expected the shape of p; position_map \[1, 77, 77\], p \[2, 77, 77\]"
    ):
        measure(p, picture(), GRID, position_map=p[:1])
    with pytest.raises(
        ValueError, match=r"image: expected \[h, w\] or \[h, w, 3\], multiples of the grid 7 x 11; image \[8, 11\]"
    ):
        measure(p, np.zeros((8, 11), np.uint8), GRID)
