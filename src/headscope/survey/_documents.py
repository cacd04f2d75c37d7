"""What each head does in each document, in memory that does not grow with the corpus."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._support.files import replace_file
from headscope._support.text import visible
from headscope.stats import HeadStats, Kept, LayerStats
from headscope.survey._corpus import SurveyError
from headscope.survey._document_scores import DocumentSums

FORMAT = 2  # of the file: 1 had the means of quantities
TOP = 5  # documents of each head and pattern
BINS = 100  # of the scores of documents, from 0 to 1
LEAST_ROWS = 16  # of a document whose score counts
LENGTHS = 24  # bins of the number of visible keys: 1, 2 to 3, 4 to 7, …
MOST_LISTED = 1000  # documents that were left out
TENSORS = ("count", "histogram", "top", "top_at", "length_count", "length_sum", "length_normalized")


@dataclass
class DocumentTable:
    """Sums over documents. Heads are those of all layers, one after another: N in all; S patterns.

    Attributes:
        names: of the patterns.
        heads: layer -> its number of heads.
        count: the number of documents with enough rows, int64 [S, N].
        histogram: of their scores, int64 [S, N, BINS].
        top: the highest scores, highest first, [S, N, TOP]; NaN where there are fewer documents.
        top_at: their documents, int64 [S, N, TOP]; -1 where there are fewer.
        length_count: the rows by number of visible keys, int64 [LENGTHS, N].
        length_sum, length_normalized: the sums of their entropies and normalised entropies, [LENGTHS, N].
        documents, tokens, windows: their numbers.
        titles: number of a document in ``top_at`` -> its name.
        left_out: the number of documents that were left out.
        listed: name and problem of the first of them.
    """

    names: tuple[str, ...]
    heads: dict[str, int]
    count: Tensor
    histogram: Tensor
    top: Tensor
    top_at: Tensor
    length_count: Tensor
    length_sum: Tensor
    length_normalized: Tensor
    documents: int = 0
    tokens: int = 0
    windows: int = 0
    titles: dict[int, str] = field(default_factory=dict[int, str])
    left_out: int = 0
    listed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @staticmethod
    def empty(names: Sequence[str], heads: Mapping[str, int]) -> DocumentTable:
        """Return a table without documents."""
        s, n = len(names), sum(heads.values())

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu")

        wide = torch.float64
        return DocumentTable(
            tuple(names), dict(heads), zeros(s, n), zeros(s, n, BINS), zeros(s, n, TOP, dtype=wide) + math.nan,
            zeros(s, n, TOP) - 1, zeros(LENGTHS, n), zeros(LENGTHS, n, dtype=wide), zeros(LENGTHS, n, dtype=wide),
        )  # fmt: skip

    def add_document(self, name: str, sums: DocumentSums) -> None:
        """Add a document by the sums over its rows."""
        scores = sums.scores().masked_fill(sums.rows < LEAST_ROWS, math.nan)
        has = ~scores.isnan()
        self.count += has
        bins = (scores.nan_to_num(0.0) * BINS).long().clamp(0, BINS - 1)
        self.histogram.scatter_add_(2, bins[..., None], has.long()[..., None])
        at = torch.where(has, self.documents, -1)
        self._insert(scores[..., None], at[..., None])
        self.titles[self.documents] = name
        self.documents += 1

    def leave_out(self, name: str, problem: str) -> None:
        """Add a document to the list of those that were left out."""
        self.left_out += 1
        if len(self.listed) < MOST_LISTED:
            self.listed.append((name, problem))

    def merge(self, later: DocumentTable) -> None:
        """Add the documents of a later shard."""
        for name in ("count", "histogram", "length_count", "length_sum", "length_normalized"):
            getattr(self, name).add_(getattr(later, name))
        shifted = torch.where(later.top_at >= 0, later.top_at + self.documents, -1)
        self.titles |= {at + self.documents: name for at, name in later.titles.items()}
        self._insert(later.top, shifted)
        self.documents += later.documents
        self.tokens += later.tokens
        self.windows += later.windows
        self.left_out += later.left_out
        self.listed = [*self.listed, *later.listed][:MOST_LISTED]
        self.drop_titles()

    def _insert(self, scores: Tensor, at: Tensor) -> None:
        """Take over scores that are among the highest; ties go to the earlier document."""
        every, places = torch.cat([self.top, scores], -1), torch.cat([self.top_at, at], -1)
        order = torch.sort(every.nan_to_num(nan=-1.0), dim=-1, descending=True, stable=True).indices[..., :TOP]
        self.top, self.top_at = every.gather(-1, order), places.gather(-1, order)

    def drop_titles(self) -> None:
        """Drop the names of documents that are not among the highest of any head."""
        used = {*self.top_at.unique().tolist()}
        self.titles = {at: name for at, name in self.titles.items() if at in used}

    def titles_of(self, layer: str, head: int, name: str) -> list[tuple[str, float]]:
        """Return the documents in which the score of a head for a pattern is highest, each with its score."""
        s, n = self.names.index(name), self.place_of(layer) + head
        pairs = zip(self.top_at[s, n].tolist(), self.top[s, n].tolist(), strict=True)
        return [(self.titles[at], score) for at, score in pairs if at >= 0]

    def place_of(self, layer: str) -> int:
        """Return the number of heads before those of a layer."""
        layers = [*self.heads]
        return sum(self.heads[each] for each in layers[: layers.index(layer)])

    def quantile(self, layer: str, head: int, name: str, share: float) -> float:
        """Return the score below which this share of the documents lie, to half a bin; NaN without documents."""
        counts = self.histogram[self.names.index(name), self.place_of(layer) + head].tolist()
        total, below = sum(counts), 0
        for number, count in enumerate(counts):
            below += count
            if count and below >= share * total:
                return (number + 0.5) / BINS
        return math.nan

    def encode(self, more: Mapping[str, Any]) -> bytes:
        """Return the table as a safetensors file, with more JSON in its header."""
        from safetensors.torch import save

        numbers = ("documents", "tokens", "windows", "left_out", "names", "heads", "listed")
        entry = {name: getattr(self, name) for name in numbers}
        entry |= {"titles": {str(at): name for at, name in self.titles.items()}, "format": FORMAT, **more}
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        return save(tensors, {"headscope.documents": json.dumps(entry, sort_keys=True)})


def load_documents(path: Path) -> tuple[DocumentTable, dict[str, Any]]:
    """Return a table and the JSON of its header.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            entry: dict[str, Any] = json.loads(file.metadata()["headscope.documents"])
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        titles = {int(at): str(name) for at, name in entry["titles"].items()}
        listed = [(str(name), str(problem)) for name, problem in entry["listed"]]
        numbers = [int(entry[name]) for name in ("documents", "tokens", "windows", "left_out")]
        heads = {str(layer): int(count) for layer, count in entry["heads"].items()}
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged: {error}") from error
    if entry.get("format") != FORMAT:
        raise ValueError(f"{path}: has format {entry.get('format', 1)}, expected {FORMAT}; survey into another folder")
    table = DocumentTable(tuple(entry["names"]), heads, *tensors.values(), titles=titles, listed=listed)
    table.documents, table.tokens, table.windows, table.left_out = numbers
    return table, entry


def save_documents(table: DocumentTable, path: Path, more: Mapping[str, Any]) -> None:
    """Write a table atomically.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, table.encode(more))


# ---------------------------------------------------------------- rows of a forward pass


def rows_of(stats: HeadStats, batch: int, read: Callable[[LayerStats, Kept], Tensor]) -> Tensor:
    """Return the rows of one forward pass of all layers, float64 [..., B, N, R]; NaN where a row has no value.

    The rows of a layer that ran several times follow one another.

    Args:
        stats: with the rows of each call.
        batch: the number of windows.
        read: returns what the rows of one call have, [..., B, H, R].

    Raises:
        SurveyError: a layer has another batch than the ids, so its rows do not belong to single documents.
    """
    layers: list[Tensor] = []
    for layer, part in stats.parts.items():
        if other := next((len(kept.counted) for kept in part.kept if len(kept.counted) != batch), None):
            raise SurveyError(
                f"model: layer {visible(layer)} attends in a batch of {other}, expected {batch}, that of the token ids"
            )
        layers.append(torch.cat([read(part, kept).cpu() for kept in part.kept], -1))
    most = max(layer.shape[-1] for layer in layers)
    return torch.cat([F.pad(layer, (0, most - layer.shape[-1]), value=math.nan) for layer in layers], -2)


def values_of(part: LayerStats, kept: Kept, names: Sequence[str]) -> Tensor:
    """Return quantities of the rows of one call, [S, B, H, R]; NaN where they were not measured."""
    absent = torch.full(kept.counted.shape, math.nan, dtype=torch.float64, device=kept.counted.device)
    values = [kept.values.get(name, absent).double() for name in names]
    return torch.stack(values).masked_fill(~kept.counted, math.nan)


def add_lengths(table: DocumentTable, rows: Tensor) -> None:
    """Add the entropies of rows, by the number of visible keys.

    Args:
        table: what to add to.
        rows: chance, entropy and normalised entropy, [3, B, N, R].
    """
    chance, entropy, normalized = rows.movedim(2, 1).flatten(2)  # [N, B * R]
    has = chance > 0
    keys = torch.where(has, 1 / chance, 1.0).round()
    bins = keys.log2().add(1e-9).floor().long().clamp(0, LENGTHS - 1)
    counts, sums, normalised_sums = (torch.zeros_like(x).T.contiguous() for x in
                                     (table.length_count, table.length_sum, table.length_normalized))  # fmt: skip
    counts.scatter_add_(1, bins, has.long())
    sums.scatter_add_(1, bins, torch.where(has, entropy, 0.0))
    normalised_sums.scatter_add_(1, bins, torch.where(has, normalized, 0.0).nan_to_num(0.0))
    table.length_count += counts.T
    table.length_sum += sums.T
    table.length_normalized += normalised_sums.T
