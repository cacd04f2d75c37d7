"""The options of ``headscope watch``, checked before any long work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake, describe_unreadable
from headscope.cli._shared.pages import PAGE, check_name, check_page

if TYPE_CHECKING:
    from headscope.comparing import Thresholds
    from headscope.stats import HeadStats

MOST_BINS = 512  # of a map: a page holds that many rows and columns of each head


@dataclass(frozen=True)
class WatchOptions:
    """The options of the command, except its model and its input.

    Attributes:
        page: the path of the page, or None for no page.
        old: the statistics to compare with.
        thresholds: the smallest changes that count.
        bins: of each map; "full" for a cell for each token; None for the default.
        exact: save maps in float64.
        heads: layer -> the heads whose weights are saved, as --weights has them.
    """

    rows: int | None
    layers: tuple[str, ...]
    verify: int | None
    out: str | None
    keep_qk: bool
    page: str | None
    force: bool
    as_json: bool
    against: str | None
    old: HeadStats | None
    thresholds: Thresholds | None
    bins: int | Literal["full"] | None = None
    exact: bool = False
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


def parse_options(
    out: str | None, keep_qk: bool, page: str | None, no_page: bool, force: bool, as_json: bool,
    against: str | None, limits: tuple[str, ...], bins: str | None, heads: tuple[str, ...], **rest: Any,
) -> WatchOptions:  # fmt: skip
    """Return the checked options.

    Raises:
        Mistake: options exclude each other, or a file cannot be written or read.
    """
    if no_page and page is not None:
        raise Mistake("--no-page: got --page too, expected one of the two")
    if limits and against is None:
        raise Mistake("--threshold: requires --against")
    for option, value in (("--keep-qk", keep_qk), ("--exact", rest["exact"]), ("--weights", heads)):
        if value and out is None:
            raise Mistake(f"{option}: requires --out")
    page = None if no_page or (page is None and as_json) else PAGE if page is None else page
    thresholds = _parse_thresholds(limits) if against is not None else None
    if out is not None:
        check_name("--out", out)
        _check_recording_path(Path(out), force)
    if page is not None:
        check_page(page, force)
    if out is not None and page is not None and Path(out).resolve() == Path(page).resolve():
        raise Mistake(f"--page: {page}: expected another file than that of --out")
    old = None if against is None else _load_old(against)
    return WatchOptions(
        out=out,
        keep_qk=keep_qk,
        page=page,
        force=force,
        as_json=as_json,
        against=against,
        old=old,
        thresholds=thresholds,
        bins=None if bins is None else _parse_bins(bins),
        heads=_parse_heads(heads),
        **rest,
    )


def _parse_bins(bins: str) -> int | Literal["full"]:
    if bins == "full":
        return "full"
    if not re.fullmatch(r"[0-9]{1,9}", bins) or not 1 <= int(bins) <= MOST_BINS:
        raise Mistake(f"--map: got {visible(bins)[:40]}, expected a whole number from 1 to {MOST_BINS}, or full")
    return int(bins)


def _parse_heads(entries: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return layer -> heads.

    Raises:
        Mistake: an entry has another form, or names a head twice.
    """
    heads: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        layer, _, listed = entry.rpartition(":")
        words = listed.split(",")
        if not layer or not all(re.fullmatch(r"[0-9]{1,6}", word) for word in words):
            raise Mistake(
                f"--weights: got {visible(entry)}, expected a layer and its heads, counted from 0, as h.3:0,5"
            )
        every = (*heads.get(layer, ()), *map(int, words))
        if len({*every}) < len(every):
            raise Mistake(f"--weights: got {visible(entry)}, expected each head of a layer once")
        heads[layer] = every
    return heads


def _parse_thresholds(limits: tuple[str, ...]) -> Thresholds:
    from headscope.comparing import Thresholds

    names = [each.name for each in fields(Thresholds)]
    values: dict[str, float] = {}
    for limit in limits:
        name, _, number = limit.partition("=")
        if name not in names:
            raise Mistake(f"--threshold: got {limit}, expected one of {', '.join(names)}, as share=0.02")
        if name in values:
            raise Mistake(f"--threshold: expected {name} once, got it twice; give one of the two")
        try:
            values[name] = float(number)
        except ValueError:
            raise Mistake(f"--threshold: got {limit}, expected a number after {name}=") from None
    try:
        return Thresholds(**values)
    except ValueError as error:
        raise Mistake(f"--threshold: {error}") from error


def size_of_file(stats: HeadStats, options: WatchOptions) -> int:
    """Return the bytes of the file of a recording."""
    from headscope.stats import _statistics_file

    return _statistics_file.size_of(stats.parts, qk=options.keep_qk, exact=options.exact)


def _check_recording_path(path: Path, force: bool) -> None:
    """Check before any long work that the recording can be written.

    Raises:
        Mistake: it cannot.
    """
    from headscope.stats import _statistics_file

    if "\0" in str(path):
        raise Mistake(f"--out: {path}: not a valid file name")
    try:
        there = path.exists()
    except OSError as error:  # for example, the name is too long
        raise Mistake(f"--out: {path}: cannot be written: {error.strerror}") from error
    if not path.parent.is_dir():
        raise Mistake(f"--out: {path}: no such folder")
    if there and not path.is_file():
        raise Mistake(f"--out: {path}: is not a regular file")
    try:
        _statistics_file.check_utf8(path)
    except ValueError as error:
        raise Mistake(f"--out: {error}") from error
    if there and not force and not _statistics_file.is_statistics(path):
        raise Mistake(
            f"--out: {path}: exists and is not a recording; choose another name, or overwrite it with --force"
        )


def _load_old(path: str) -> HeadStats:
    from headscope.stats import HeadStats

    if not path:
        raise Mistake("--against: expected a path, got an empty one")
    try:
        return HeadStats.load(path)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"--against: {describe_unreadable(path, error)}") from error
