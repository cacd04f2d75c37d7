"""The result of a survey is the same to the bit on any number of processes, and after some of them were killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope import Observe
from headscope.survey import Progress, survey, survey_digest
from support.forking import CAN_FORK, run_ranks
from support.paths import PROGRAMS
from support.programs.survey_ranks import OPTIONS
from support.surveys import write_corpus

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="the processes are forked")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("survey") / "corpus")


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest of the result of one process that was not interrupted."""
    out = tmp_path_factory.mktemp("alone") / "out"
    survey("text", corpus, out, **OPTIONS)
    return survey_digest(out)


@pytest.mark.parametrize(
    "world", [2, pytest.param(4, marks=pytest.mark.long)]
)  # two meet each other at each shard, too
def test_any_number_of_processes_that_are_killed_gives_the_same_bytes(
    world: int, corpus: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    outputs = run_ranks(PROGRAMS / "survey_ranks.py", str(corpus), str(tmp_path / "out"), world=world)
    found: list[dict[str, Any]] = [json.loads(out) for out in outputs]
    assert any(each["died"] == -signal.SIGKILL for each in found)
    assert [each["digest"] for each in found] == [alone] * world
    left = [path.name for path in tmp_path.rglob("*") if path.name.endswith((".claim", ".tmp"))]
    assert left == []


def test_a_survey_that_raised_continues_where_it_was(corpus: Path, alone: dict[str, str], tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    shards: list[int] = []

    def stop(progress: Progress) -> None:
        shards.append(progress.done)
        if progress.done == 2:
            raise StoppedError

    for _ in range(2):
        with pytest.raises(StoppedError):
            survey("text", corpus, tmp_path / "out", **OPTIONS, progress=stop)
    assert max(shards) == 2, "the second call has started after the shards that were complete"
    survey("text", corpus, tmp_path / "out", **OPTIONS)
    assert survey_digest(tmp_path / "out") == alone


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_process_has_run_before_does_not_change_a_shard(attention: str, tmp_path: Path) -> None:
    """A watch learns from the first passes of a model. Each model here is new, and computes one shard."""
    transformers = pytest.importorskip("transformers")

    def build() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        config._attn_implementation = attention
        return transformers.LlamaForCausalLM(config)

    def stop(progress: Progress) -> None:
        if progress.event == "shard":
            raise InterruptedError

    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(50, (length,), generator=generator) for length in (40, 33, 64, 7, 90, 41, 32)]
    options: dict[str, Any] = {"shard_tokens": 50, "context": 32, "what": Observe(map=4, edges=2, windows=(3,))}
    survey(build(), documents, tmp_path / "one", **options)
    stops = 0
    while True:
        try:
            survey(build(), documents, tmp_path / "other", **options, progress=stop)
            break
        except InterruptedError:
            stops += 1
    assert stops == len([*(tmp_path / "one" / "shards").glob("*.documents.safetensors")]) > 3
    assert survey_digest(tmp_path / "one") == survey_digest(tmp_path / "other")


def test_the_place_of_the_corpus_and_the_time_are_no_part_of_the_result(alone: dict[str, str], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "elsewhere")
    survey("text", corpus, tmp_path / "out", **OPTIONS)
    assert survey_digest(tmp_path / "out") == alone
