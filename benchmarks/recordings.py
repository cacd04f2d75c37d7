"""How large recordings are: the table of docs/concepts/recordings.md.

    python benchmarks/recordings.py

BERT is one of transformers with random weights: 12 layers of 12 heads of 64, one text of 512 tokens. The text model is
the shipped one, its positions repeated to the length. *Format 1* is computed: it had 56 bytes for each bin of a map and
each head. All other sizes are those of files. An error is the largest of all bins, relative to the mean in memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from observe_parts.models import text_example
from torch import Tensor

from headscope import Observe, Recording, watch
from headscope.stats import _statistics_file

DENSE = 56  # bytes: sum, count, max and four numbers of its place, eight each
BERT_TOKENS = 512
TEXT_TOKENS = 2048


class Case(NamedTuple):
    """A recording and its name; ``qk``: whether it is saved with q and k."""

    name: str
    recording: Recording
    qk: bool


def bert(dtype: torch.dtype) -> Recording:
    """Return a recording with a bin for each token, q and k."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: Any = transformers.BertModel(config := transformers.BertConfig()).eval()
    model.to(dtype)
    ids = torch.randint(1000, config.vocab_size, (1, BERT_TOKENS))
    with torch.no_grad(), watch(model, what=Observe(map=BERT_TOKENS, keep_qk=True)) as recording:
        model(ids)
    return recording


def text() -> Recording:
    """Return a recording of the shipped model with 64 x 64 bins."""
    subject = text_example(TEXT_TOKENS)
    with torch.no_grad(), watch(subject.model, what=Observe(map=64, keep_qk=True)) as recording:
        subject.run()
    return recording


def cases() -> Iterator[Case]:
    """Yield the recordings of the table."""
    for dtype in (torch.float32, torch.bfloat16):
        recording = bert(dtype)
        for qk in (True, False):
            name = f"BERT, {str(dtype).removeprefix('torch.')}, {BERT_TOKENS} tokens, `map={BERT_TOKENS}`"
            yield Case(name, recording, qk)
    recording = text()
    for qk in (True, False):
        yield Case(f"text model, {TEXT_TOKENS:,} tokens, `map=64`", recording, qk)


def format_1(case: Case) -> int:
    """Return the bytes of the tensors of the same recording in format 1."""
    parts = case.recording.stats.parts
    others = {name: replace(part, map=None) for name, part in parts.items()}
    bins = sum(part.map.count.numel() for part in parts.values() if part.map is not None)
    return DENSE * bins + _statistics_file.size_of(others, qk=case.qk)


def largest_error(loaded: Recording, recording: Recording) -> float:
    """Return the largest relative error of the means of all bins."""
    pairs = zip(loaded.stats.parts.values(), recording.stats.parts.values(), strict=True)
    return max(_error(one.map, other.map) for one, other in pairs)


def _error(loaded: Any, original: Any) -> float:
    mean: Tensor = original.mean
    there = mean > 0
    return float((loaded.mean[there] / mean[there] - 1).abs().max())


def line(case: Case, folder: Path) -> str:
    """Return a row of the table."""
    sizes: list[int] = []
    for exact in (False, True):
        path = case.recording.save(folder / f"{exact}.safetensors", qk=case.qk, exact=exact, force=True)
        sizes.append(path.stat().st_size)
    error = largest_error(Recording.load(folder / "False.safetensors"), case.recording)
    figures = " | ".join(f"{size / 1e6:,.1f}" for size in (format_1(case), *sizes))
    return f"| {case.name}{', q and k' if case.qk else ''} | {figures} | {error:.1e} |"


def main() -> int:
    """Print the table."""
    print("| recording | format 1, MB | format 2, MB | `exact=True`, MB | largest error |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            print(line(case, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
