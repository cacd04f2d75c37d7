"""The segments of an image: regions of its patches, for ``watch --segments ROWSxCOLUMNS``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headscope.cli._shared.first_pass import observe_first
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.watch_options import WatchOptions

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.stats import Segments

SPECIAL = "special"  # the name of the keys before the patches


class Patches(NamedTuple):
    """The patches of a picture, and the most keys before them: CLS and registers."""

    rows: int
    columns: int
    special: int


def patches_of(loaded: Loaded, images: Any) -> Patches | None:
    """Return the patches of pictures [..., height, width]; None if the configuration does not have their size."""
    if loaded.samples is not None:  # the shipped model, whose patches are single pixels
        return Patches(images.shape[-2], images.shape[-1], 0)
    config = getattr(loaded.model, "config", None)
    size = getattr(config, "patch_size", None)
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2 or not all(isinstance(n, int) for n in sides):
        return None
    rows, columns = images.shape[-2] // sides[0], images.shape[-1] // sides[1]
    return Patches(rows, columns, 2 + (getattr(config, "num_register_tokens", 0) or 0))


def find_regions(loaded: Loaded, images: Any, options: WatchOptions, regions: tuple[int, int]) -> Segments:
    """Return a segment for each region of an image, in rows and columns, and one for the keys before the patches.

    Raises:
        Mistake: there are more regions than patches, or than 64, or no layer has a key for each patch.
    """
    from headscope.stats import Segments

    got = f"--segments: got {regions[0]}x{regions[1]}"
    patches = patches_of(loaded, images)
    if patches is None:
        raise Mistake(f"{got}, and the configuration of the model does not have the size of a patch")
    count = patches.rows * patches.columns
    lengths = {part.lengths for part in observe_first(loaded, images, options).parts.values()}
    before = sorted({keys - count for _, keys in filter(None, lengths) if 0 <= keys - count <= patches.special})
    if not before:
        raise Mistake(f"{got}, and no layer has one key for each of {patches.rows} x {patches.columns} patches")
    ids = [0] * before[0] + [1] * count
    try:
        return Segments.from_image_tokens(
            ids, 1, (patches.rows, patches.columns), parts=regions, text=SPECIAL if before[0] else None
        )
    except ValueError as error:
        problem = str(error).partition("expected ")[2].partition(", the grid")[0]
        raise Mistake(f"{got}, expected {problem}") from error
