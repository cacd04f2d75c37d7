"""Watching models while they generate, token by token with a cache, beside eager weights of every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import headscope
from headscope import Observe
from observe_parts.timing import Row, Run, interleave, same

KIND = "generation"
LLAMA, PADDED, WHISPER = "Llama", "Llama, 4 padded texts", "Whisper"
UNWATCHED, DEFAULTS, ACCELERATED, WEIGHTS, EAGER = (
    "unwatched", "defaults", "accelerate", "weights of a head", "eager weights",
)  # fmt: skip
COMPETITORS = (UNWATCHED, DEFAULTS, ACCELERATED, WEIGHTS, EAGER)
STEPS = 96  # of a turn, more than descriptions of calls are kept: each step is of a size that is new, as in a long text
ONLY_WEIGHTS = Observe(row_stats=False, received=False)


@dataclass(frozen=True)
class Case:
    """A model, and the tokens that its cache has before the first step; of Whisper, the frames of sound."""

    model: str
    keys: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.keys}"


def cases() -> Iterator[Case]:
    """Each model at each length."""
    for model, lengths in ((LLAMA, (128, 1024, 4096)), (PADDED, (128, 1024)), (WHISPER, (1500,))):
        for length in lengths:
            yield Case(model, length)


@dataclass(frozen=True)
class Subject:
    """A model, and how it generates.

    Attributes:
        model, eager: the same weights, with SDPA and with eager attention.
        start: returns the arguments of the first step with the cache of a text, for a model.
        heads: of which layers the weights of a head are retained, in each.
        batch: the number of texts.
    """

    model: Any
    eager: Any
    start: Callable[[Any], dict[str, Any]]
    heads: dict[str, list[int]]
    batch: int = 1

    def generate(self, model: Any, steps: int = STEPS, **options: Any) -> list[Any]:
        """Run a model for so many steps, each of one token; return the outputs."""
        arguments, outputs = self.start(model), []
        token = "decoder_input_ids" if "encoder_outputs" in arguments else "input_ids"
        for step in range(steps):
            arguments[token] = torch.full((self.batch, 1), 1 + step)
            if "attention_mask" in arguments:
                more = arguments["attention_mask"].new_ones(self.batch, 1)
                arguments["attention_mask"] = torch.cat([arguments["attention_mask"], more], 1)
            outputs.append(model(**arguments, use_cache=True, **options))
        return outputs


def llama(length: int, padded: bool = False) -> Subject:
    """Four layers of eight heads of 64, four key/value heads, weights from a seed."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    batch = 4 if padded else 1
    ids = torch.randint(1, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    for text in range(batch):
        real[text, : 5 * text] = 0
    mask = {"attention_mask": real} if padded else {}
    with torch.no_grad():
        cache = model(ids, use_cache=True, **mask).past_key_values

    def start(_: Any) -> dict[str, Any]:
        return {"past_key_values": copy.deepcopy(cache), **mask}

    return _both(model, start, {f"model.layers.{n}.self_attn": [n] for n in range(4)}, batch)


def whisper(frames: int) -> Subject:
    """The sizes of Whisper base, with a small vocabulary and weights from a seed; the sound is encoded before."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.WhisperConfig(
        vocab_size=2048, d_model=512, encoder_layers=1, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, num_mel_bins=80,
        max_source_positions=frames, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        sound = model.model.encoder(torch.randn(1, 80, 2 * frames, generator=torch.Generator().manual_seed(0)))
        first = model(encoder_outputs=sound, decoder_input_ids=torch.tensor([[3, 4, 5]]), use_cache=True)

    def start(_: Any) -> dict[str, Any]:
        return {"past_key_values": copy.deepcopy(first.past_key_values), "encoder_outputs": sound}

    return _both(model, start, {f"model.decoder.layers.{n}.encoder_attn": [n] for n in range(6)})


def _both(model: Any, start: Callable[[Any], dict[str, Any]], heads: dict[str, list[int]], batch: int = 1) -> Subject:
    eager = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    eager.set_attn_implementation("eager")
    return Subject(model, eager, start, heads, batch)


def subject_of(case: Case) -> Subject:
    """The model of a case."""
    return whisper(case.keys) if case.model == WHISPER else llama(case.keys, case.model == PADDED)


def competitors(subject: Subject) -> dict[str, Run]:
    """Who generates, by name."""

    def watched(**options: Any) -> headscope.Recording:
        with headscope.watch(subject.model, **options) as recording:
            subject.generate(subject.model)
        return recording

    return {
        UNWATCHED: lambda: subject.generate(subject.model),
        DEFAULTS: watched,
        ACCELERATED: lambda: watched(accelerate=True),
        WEIGHTS: lambda: watched(what=ONLY_WEIGHTS, weights=subject.heads),
        EAGER: lambda: [out.logits.shape for out in subject.generate(subject.eager, output_attentions=True)],
    }


def measure(case: Case, seconds: float, least: int) -> Row:
    """Time a step, once what is watched has been compared with the model's own weights."""
    subject = subject_of(case)
    with torch.no_grad():
        check(subject)
        return Row(KIND, case.name, interleave(competitors(subject), seconds, least, dict.fromkeys(COMPETITORS, STEPS)))


def check(subject: Subject, steps: int = 3) -> None:
    """That watching and the eager way see the same.

    Raises:
        AssertionError: they do not.
    """
    with headscope.watch(subject.model, weights=subject.heads) as seen:
        subject.generate(subject.model, steps)
    outputs = subject.generate(subject.eager, steps, output_attentions=True)
    for number, (layer, (head,)) in enumerate(subject.heads.items()):
        runs = seen.stats[layer].weights_runs
        entropy = 0.0
        for run, out in zip(runs, outputs, strict=True):
            every: Tensor = (out.cross_attentions if "encoder_attn" in layer else out.attentions)[number]
            same(layer, run.p[:, 0], every[:, head], 1e-4, 1e-3)
            entropy -= float(torch.xlogy(every[:, head], every[:, head]).sum())
        mean = torch.tensor(entropy / (steps * subject.batch), dtype=torch.float64)
        same("entropy", seen.stats[layer]["entropy"].mean[0, head], mean, 1e-3, 1e-3)
