"""Watching whole models: the text example, and a small Llama of transformers with random weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import headscope
from headscope import Observe
from headscope.examples.text import TextModel
from observe_parts.timing import Row, Run, interleave, same

KIND = "models"
TEXT, LLAMA = "text", "Llama"
MODELS = (TEXT, LLAMA)
LENGTHS = (128, 512, 2048, 8192)
MOST_BYTES = 12e9

UNWATCHED, EVERYTHING, DEFAULTS, SAMPLE = "unwatched", "everything", "defaults", "rows=256"
ACCELERATED = "accelerate"
TOGETHER = 16  # forward passes within one watch, where opening it counts
DEFAULTS_TOGETHER, ACCELERATED_TOGETHER = f"defaults, {TOGETHER} passes", f"accelerate, {TOGETHER} passes"
SHORT = 512  # tokens; opening a watch takes less than 0.5 % of a longer pass
EAGER, DENSE = "eager weights", "eager, statistics"
COMPETITORS = (
    UNWATCHED, EVERYTHING, DEFAULTS, SAMPLE, ACCELERATED, DEFAULTS_TOGETHER, ACCELERATED_TOGETHER, EAGER, DENSE,
)  # fmt: skip
PASSES = dict.fromkeys((DEFAULTS_TOGETHER, ACCELERATED_TOGETHER), TOGETHER)
ALL = Observe(map=64, edges=32)


@dataclass(frozen=True)
class Case:
    """A model on one text of so many tokens."""

    model: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.length}"


def cases() -> Iterator[Case]:
    """Each model at each length."""
    for model in MODELS:
        for length in LENGTHS:
            yield Case(model, length)


@dataclass(frozen=True)
class Subject:
    """A model, how it is run, and how it gives its weights.

    Attributes:
        weights: runs the model so that it returns the weights of every layer, [1, H, T, T] each.
        heads, layers: how many.
    """

    model: nn.Module
    run: Run
    weights: Run
    layers: int
    heads: int

    def eager_bytes(self, length: int) -> float:
        """What its weights need: all layers', and the logits and the weights of one more while it is computed."""
        return 4.0 * self.heads * length**2 * (self.layers + 2)


def text_example(length: int) -> Subject:
    """The shipped model on Python source, headscope's own.

    Its context is 256 tokens. For longer texts its table of positions is repeated: weights and work are those of the
    model, what it predicts is not.
    """
    example = headscope.load_example("text")
    source = "".join(path.read_text() for path in sorted(Path(headscope.__file__).parent.glob("*.py")))
    ids = torch.tensor([example.tokenizer.encode(source)[:length]])
    model = longer(example.model, length)
    sizes = model.config
    return Subject(
        model, lambda: model(ids), lambda: model(ids, need_weights=True)[1], sizes.num_layers, sizes.num_heads
    )


def longer(model: TextModel, length: int) -> TextModel:
    """A copy for longer texts, its positions repeated; the model itself where it is long enough."""
    context = model.config.context
    if length <= context:
        return model
    copied = copy.deepcopy(model)
    table = model.position_embedding.weight.detach().repeat(math.ceil(length / context), 1)
    copied.position_embedding = nn.Embedding.from_pretrained(table)
    copied.config = type(model.config)(**{**vars(model.config), "context": len(table)})
    return copied


def llama(length: int) -> Subject:
    """Four layers of eight heads of 64, four key/value heads, weights from a seed; eager is the same model."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=max(LENGTHS), use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    eager = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    eager.set_attn_implementation("eager")
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return Subject(
        model, lambda: model(ids), lambda: eager(ids, output_attentions=True).attentions,
        config.num_hidden_layers, config.num_attention_heads,
    )  # fmt: skip


def dense_statistics(p: Tensor) -> dict[str, Tensor]:
    """What everybody would write, of weights [1, H, T, T]: most of what ``Observe(map=64, edges=32)`` measures.

    Mean and largest value of entropy, largest weight, effective keys, distance and the weights on the row itself, the
    one before it and the first; what keys receive; mean and largest weight of 64 x 64 bins; the 32 largest weights.
    """
    length = p.shape[-1]
    place = torch.arange(length, dtype=p.dtype)
    rows = {
        "entropy": -torch.xlogy(p, p).sum(-1),
        "max_weight": p.amax(-1),
        "effective_keys": 1 / p.square().sum(-1),
        "distance": (p * (place - place[:, None]).abs()).sum(-1),
        "self": p.diagonal(dim1=-2, dim2=-1),
        "previous": p.diagonal(-1, -2, -1),
        "first": p[..., 0],
    }
    found = {name: torch.stack([x.double().mean(-1), x.double().amax(-1)]) for name, x in rows.items()}
    bins = min(64, length)
    found["received"] = p.sum(-2, dtype=torch.float64)
    found["map"] = nn.functional.adaptive_avg_pool2d(p, bins)
    found["largest"] = nn.functional.adaptive_max_pool2d(p, bins)
    found["edges"], found["edges at"] = p.flatten(-2).topk(32)
    return found


def competitors(subject: Subject, length: int) -> tuple[dict[str, Run], dict[str, str]]:
    """Who takes part, and why somebody does not. A watch is opened, and closed, for so many forward passes."""

    def watched(what: Observe, accelerate: bool = False, passes: int = 1) -> headscope.Recording:
        with headscope.watch(subject.model, what=what, accelerate=accelerate) as seen:
            for _ in range(passes):
                subject.run()
        return seen

    def measured() -> list[dict[str, Tensor]]:
        weights = subject.weights()
        assert isinstance(weights, (list, tuple))
        return [dense_statistics(p) for p in weights]

    runs: dict[str, Run] = {
        UNWATCHED: subject.run,
        EVERYTHING: lambda: watched(ALL),
        DEFAULTS: lambda: watched(Observe()),
        SAMPLE: lambda: watched(Observe(rows=256)),
        ACCELERATED: lambda: watched(Observe(), accelerate=True),
        DEFAULTS_TOGETHER: lambda: watched(Observe(), passes=TOGETHER),
        ACCELERATED_TOGETHER: lambda: watched(Observe(), accelerate=True, passes=TOGETHER),
        EAGER: subject.weights,
        DENSE: measured,
    }
    absent: dict[str, str] = {}
    if length > SHORT:
        absent |= dict.fromkeys(PASSES, "as one pass")
    needed = subject.eager_bytes(length)
    if needed > MOST_BYTES:
        absent |= dict.fromkeys((EAGER, DENSE), f"does not fit: {needed / 1e9:.0f} GB")
    return {name: run for name, run in runs.items() if name not in absent}, absent


def measure(case: Case, seconds: float, least: int) -> Row:
    """Time one case, once what is watched has been compared with the model's own weights."""
    subject = text_example(case.length) if case.model == TEXT else llama(case.length)
    with torch.no_grad():
        runs, absent = competitors(subject, case.length)
        if EAGER in runs:
            check(subject)
        return Row(KIND, case.name, interleave(runs, seconds, least, PASSES), absent=absent)


def check(subject: Subject) -> None:
    """That watching and the eager way see the same.

    Raises:
        AssertionError: they do not.
    """
    with headscope.watch(subject.model, what=ALL) as seen:
        subject.run()
    weights = subject.weights()
    assert isinstance(weights, (list, tuple))
    for layer, p in zip(seen.layers, weights, strict=True):
        dense = dense_statistics(p)
        part = seen.stats[layer]
        for name in ("entropy", "distance", "self"):
            same(name, part[0, name].mean, dense[name][0, 0], 1e-4, 1e-3)
        same("received", part.received, dense["received"][0], 1e-3, 1e-3)
        same("edges", part.edges.p, dense["edges"][0].double(), 1e-4, 1e-3)
