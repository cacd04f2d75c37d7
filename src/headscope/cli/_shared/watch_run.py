"""Run a model on an input, record its heads, and draw conclusions, for ``headscope watch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from headscope._support.progress import progress_over
from headscope._support.text import visible
from headscope.cli._shared.chosen_heads import TOO_LARGE, find_chosen_heads
from headscope.cli._shared.console import one_line, warnings_as_notes
from headscope.cli._shared.image_regions import find_regions, patches_of
from headscope.cli._shared.mistakes import Mistake, name_options
from headscope.cli._shared.model_loading import quiet_transformers
from headscope.cli._shared.page_weights import with_page_weights
from headscope.cli._shared.segment_view import SegmentSummary, summarize_segments
from headscope.cli._shared.watch_options import MOST_BINS, WatchOptions

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.cli._shared.windows import Input
    from headscope.comparing import Comparison
    from headscope.decisions import KVBudget, NearDuplicates, Patterns, StreamingHeads
    from headscope.stats import HeadStats, Segments
    from headscope.watching import Recording, Verified

WINDOWS = (
    3,
    16,
    64,
    256,
    1024,
    4096,
)  # the first, and those up to a third of the input: nearly every head fits a wider one
BUDGETS = (16, 64, 256, 1024)
BINS = 64
WHOLE = 128  # up to this many tokens, and
PATCHES = 256  # up to this many patches, every weight is in the map
ROWS = 2048  # up to this many tokens, rows are recorded for the entropy next to the map
EDGES = 16
MOST_TEXTS = 1 << 22  # tokens whose texts are saved: the header of a file has at most 100 MB
ARGUMENTS = {"layers": "--layers"}  # of ``headscope.watch``, and the option that each comes from


@dataclass(frozen=True)
class WatchResult:
    """The recording of a model on an input, and the conclusions; one that requires more data is None.

    Attributes:
        on_page: the recording with the q and k that the page holds.
        against: the path of the older recording, escaped for a terminal.
    """

    loaded: Loaded
    model_input: Input
    recording: Recording
    on_page: Recording
    patterns: Patterns
    streaming: StreamingHeads | None
    budget: KVBudget
    duplicates: NearDuplicates
    comparison: Comparison | None
    against: str
    notes: tuple[str, ...]
    segments: SegmentSummary | None = None


def run_watch(loaded: Loaded, model_input: Input, options: WatchOptions) -> WatchResult:
    """Return the recording of a model on an input, and the conclusions.

    Raises:
        Mistake: the model cannot be watched or fails, or the older recording is of another model.
    """
    from headscope.decisions import kv_budget, near_duplicates, patterns, streaming_heads

    recording = _record(loaded, model_input, options)
    stats = recording.stats
    keys = max((part.received.shape[-1] for part in stats.parts.values() if part.received is not None), default=0)
    budgets = tuple(k for k in BUDGETS if k < keys) or (max(1, keys // 4),)
    groups = loaded.key_heads if _are_grouped(loaded.key_heads, stats) else None
    # with fewer keys the first window exceeds a third of the input; it is recorded only for the pattern "local"
    windowed = any(name.startswith("streaming_") for name in stats.names) and keys >= 3 * WINDOWS[0]
    return WatchResult(
        loaded,
        model_input,
        recording,
        recording
        if options.page is None or options.keep_qk
        else with_page_weights(recording, loaded, model_input, options.layers),
        patterns(stats),
        streaming_heads(stats) if windowed else None,
        kv_budget(stats, budgets, kv_heads=groups),
        near_duplicates(stats),
        _compare(options, stats),
        visible(options.against or ""),
        (*loaded.notes, *_notes(loaded, model_input, options)),
        summarize_segments(stats),
    )


def _compare(options: WatchOptions, stats: HeadStats) -> Comparison | None:
    """Return the comparison with the recording of --against, if there is one.

    Raises:
        Mistake: it is of another model, or of other heads.
    """
    from headscope.comparing import compare

    if options.old is None:
        return None
    try:
        return compare(options.old, stats, options.thresholds)
    except ValueError as error:
        problem = str(error).partition("; compare recordings")[0]  # the remedy in it applies to Python
        raise Mistake(f"--against: {visible(options.against or '')}: {problem}") from error


def _are_grouped(groups: int | None, stats: HeadStats) -> bool:
    """Return whether in every layer several query heads share each of so many key/value heads."""
    return bool(groups) and all(part.heads % groups == 0 and part.heads > groups for part in stats.parts.values())


def _notes(loaded: Loaded, model_input: Input, options: WatchOptions) -> Iterator[str]:
    if len(model_input.parts) > 1:
        sizes = sorted({part.shape[1] for part in model_input.parts})
        size = " or ".join(f"{n:,}" for n in sizes)
        count = f"{len(model_input.parts):,}"
        has_ends = sum(part.shape[1] for part in model_input.parts) > model_input.tokens
        special = ", special tokens included," if has_ends else ","
        yield (
            f"the text is read in {count} windows of {size} tokens{special} each from position 0; their statistics are "
            "merged"
        )
        if model_input.segments:
            yield "segments in different windows do not attend to each other; a longer --context has fewer windows"
    if loaded.takes == "image":
        yield "distance, previous and next follow the sequence of patches, not their grid"
    if loaded.paired:
        yield "the decoder reads the same tokens as the encoder, shifted by one"
    if options.old is not None and options.against is not None:
        before = _input_digest(options.against)
        if before is not None and before != model_input.digest:
            yield f"the input differs from that of {visible(options.against)}"


def _input_digest(path: str) -> str | None:
    """Return the digest of the input of a recording, if the file holds it."""
    from headscope.watching import Recording

    try:
        source = Recording.load(path).about.options.get("input")
    except ValueError:  # the file holds statistics without a description
        return None
    return source.get("digest") if isinstance(source, dict) else None


def _record(loaded: Loaded, model_input: Input, options: WatchOptions) -> Recording:
    """Return one recording of all forward passes.

    Raises:
        Mistake: the model cannot be watched, or fails.
    """
    import torch

    from headscope.watching import Recording, WatchError

    stats, last = None, None
    verified: dict[str, Verified] = {}
    try:
        with warnings_as_notes("watch"):
            heads = find_chosen_heads(loaded, model_input.parts[0], options)
            segments_of_parts = _find_segments(loaded, model_input, options)
            for part, segments in progress_over(segments_of_parts, "watching"):
                last = _record_window(loaded, model_input, part, segments, heads, options)
                stats = last.stats if stats is None else stats.merge(last.stats)
                for layer, errors in last.about.verified.items():
                    verified[layer] = verified[layer].merge(errors) if layer in verified else errors
    except WatchError as error:
        message = str(error).removeprefix("watch: ").replace(', or give unseen="ignore"', "")
        _check_size(message)
        raise Mistake(f"{loaded.name}: {name_options(message, ARGUMENTS)}") from error
    except (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, torch.OutOfMemoryError) as error:
        _check_size(str(error))
        option = "--" if str(error).startswith("layers:") else "the forward pass failed: "
        raise Mistake(f"{loaded.name}: {option}{one_line(str(error))[:300]}") from error
    assert stats is not None
    assert last is not None
    count = len(model_input.parts)
    source = {
        "source": model_input.source, "tokens": model_input.tokens, "windows": count, "digest": model_input.digest
    }  # fmt: skip
    recorded = {**last.about.options, "tokens": None, "input": source}
    texts = _token_texts(loaded, model_input)
    about = replace(
        last.about, options=recorded, texts=texts[0] if count == 1 and texts else None, forwards=count, ran=count,
        verified=verified, run_texts=texts if count > 1 else (),
    )  # fmt: skip
    return Recording(stats, about)


def _check_size(message: str) -> None:
    """Raise if an error is that the weights of --weights are too large.

    Raises:
        Mistake: it is.
    """
    if TOO_LARGE in message:
        problem = message.partition("weights: ")[2].partition(TOO_LARGE)[0]
        raise Mistake(f"--weights: {problem}; use --rows, fewer heads, or a smaller --context")


def _find_segments(loaded: Loaded, model_input: Input, options: WatchOptions) -> list[tuple[Any, Segments | None]]:
    """Return each part of the input with its segments.

    Raises:
        Mistake: an image does not have the regions of --segments.
    """
    segments: Sequence[Segments | None] = model_input.segments or (None,) * len(model_input.parts)
    if model_input.regions is not None:
        segments = [find_regions(loaded, part, options, model_input.regions) for part in model_input.parts]
    return [*zip(model_input.parts, segments, strict=True)]


def _token_texts(loaded: Loaded, model_input: Input) -> tuple[tuple[str, ...], ...]:
    """Return the text of each token of each window, its id without a tokenizer; none for images, or too many."""
    if loaded.takes == "image" or sum(part.shape[1] for part in model_input.parts) > MOST_TEXTS:
        return ()
    piece = str if loaded.piece is None else cache(loaded.piece)
    return tuple(tuple(piece(token) for token in part[0].tolist()) for part in model_input.parts)


def _record_window(
    loaded: Loaded, model_input: Input, part: Any, segments: Segments | None, heads: Mapping[str, tuple[int, ...]],
    options: WatchOptions,
) -> Recording:  # fmt: skip
    """Return the recording of one forward pass; ``heads``: layer -> those whose weights are retained."""
    import torch

    import headscope

    text = loaded.takes == "text"
    longest = max(part.shape[1] for part in model_input.parts) if text else 0
    shortest = min(part.shape[1] for part in model_input.parts) if text else 0
    what = headscope.Observe(
        rows=options.rows,
        map=_map_bins(options.bins, loaded, part, shortest),
        edges=EDGES,
        windows=tuple(w for w in WINDOWS if w == WINDOWS[0] or 3 * w <= longest) if text else (),
        tokens=part if text and not loaded.paired else None,
        keep_rows=text and longest <= ROWS and len(model_input.parts) == 1,
        keep_qk=options.keep_qk,
        segments=segments,
    )
    arguments: dict[str, Any] = {"layers": options.layers or None, "verify": options.verify or 0}
    arguments |= {"tokens": "inputs"} if loaded.paired else {}  # encoder and decoder read different ids
    arguments |= {"weights": heads} if heads else {}
    with (
        quiet_transformers(),
        torch.inference_mode(),
        headscope.watch(loaded.model, what=what, **arguments) as recording,
    ):
        loaded.run(part)
    return recording


def _map_bins(bins: int | str | None, loaded: Loaded, part: Any, tokens: int) -> int:
    """Return the bins of the map of a window or of images; ``tokens``: those of the shortest window.

    Raises:
        Mistake: there are too many tokens or patches for a cell for each, or their number is not known.
    """
    is_text = loaded.takes == "text"
    keys = tokens if is_text else _count_patches(loaded, part)
    if bins is None:
        return BINS if keys is None or keys > (WHOLE if is_text else PATCHES) else keys
    if bins == "full" and keys is None:
        raise Mistake("--map: got full, and the configuration does not have the size of a patch; use --map N")
    if bins == "full" and keys is not None and keys > MOST_BINS:
        what = "tokens in a window" if is_text else "patches"
        raise Mistake(f"--map: got full with {keys:,} {what}, expected at most {MOST_BINS}; use --map {MOST_BINS}")
    most = MOST_BINS if isinstance(bins, str) else bins
    return most if keys is None else min(most, keys)


def _count_patches(loaded: Loaded, images: Any) -> int | None:
    """Return the keys of an image: one for each patch, CLS and register; None if their number is not known."""
    patches = patches_of(loaded, images)
    return None if patches is None else patches.rows * patches.columns + patches.special
