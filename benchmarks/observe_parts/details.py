"""What segments add to the default statistics, and what the weights of a few chosen heads cost beside those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headscope
from headscope import Observe, Segments
from observe_parts import attention
from observe_parts.attention import Case
from observe_parts.timing import Row, Run, interleave, same

SEGMENTS, CHOSEN = "segments", "chosen heads"
LENGTHS = (1024, 4096)
CHOSEN_LENGTHS = (128, 512, 1024, 2048)
SPANS = 16
LAYERS, HEADS, WIDTH = 12, 12, 64
FEW = 10  # heads, in ten layers
PLAIN, WITH_SEGMENTS = attention.DEFAULTS, f"with {SPANS} segments"
NONE, TEN, EVERY = "no weights", f"{FEW} heads", "all heads"


def cases() -> Iterator[Case]:
    """Each length without and with a causal mask."""
    yield from attention.cases(LENGTHS)


def spans(length: int) -> Segments:
    """Segments of equal lengths over the whole sequence."""
    return Segments([f"part {n}" for n in range(SPANS)], torch.arange(length) * SPANS // length)


def measure_segments(case: Case, seconds: float, least: int) -> Row:
    """Time one call with the default statistics, without and with segments."""
    q, k, v = case.tensors()

    def run(what: Observe) -> Run:
        return lambda: headscope.attend(q, k, v, mask=case.mask, observe=what)

    with torch.no_grad():
        what = Observe(segments=spans(case.length))
        stats = headscope.attend(q, k, v, mask=case.mask, observe=what).stats
        assert stats is not None
        segments = stats.segments
        same("segments", segments.mean.sum(-1), torch.ones(case.heads, SPANS, dtype=torch.float64), 1e-5, 1e-5)
        return Row(SEGMENTS, case.name, interleave({PLAIN: run(Observe()), WITH_SEGMENTS: run(what)}, seconds, least))


class Layer(nn.Module):
    """Attends, and has no other work."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [1, H, T, D]."""
        return F.scaled_dot_product_attention(q, k, v)


class Layers(nn.Module):
    """Twelve of them, each with the output of the one before as its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [1, H, T, D]."""
        for layer in self.layers:
            q = layer(q, k, v)
        return q


def measure_chosen(length: int, seconds: float, least: int) -> Row:
    """Time a watch with default statistics, alone, with the weights of ten heads, and with those of all 144."""
    model = Layers()
    q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(0))
    names = [f"layers.{n}" for n in range(LAYERS)]
    heads: dict[str, dict[str, range] | None] = {
        NONE: None,
        TEN: {names[n]: range(n, n + 1) for n in range(FEW)},
        EVERY: {name: range(HEADS) for name in names},
    }

    def run(weights: dict[str, range] | None) -> Callable[[], headscope.Recording]:
        def watched() -> headscope.Recording:
            with headscope.watch(model, weights=weights) as recording:
                model(q, k, v)
            return recording

        return watched

    with torch.no_grad():
        runs = {name: run(each) for name, each in heads.items()}
        (p,) = runs[TEN]().weights(names[0], 0)
        same("weights", p[0], (q[0, 0] @ k[0, 0].mT / WIDTH**0.5).softmax(-1), 1e-5, 1e-4)
        return Row(CHOSEN, str(length), interleave({**runs}, seconds, least))


def share(row: Row) -> float | None:
    """How many times their share of the cost of all weights the weights of ten heads cost."""
    none, ten, every = (row.median(name) for name in (NONE, TEN, EVERY))
    return (
        None if none is None or ten is None or every is None else (ten - none) / (every - none) * LAYERS * HEADS / FEW
    )
