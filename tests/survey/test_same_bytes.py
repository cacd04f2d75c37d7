"""The result of a survey is the same to the bit on any number of processes, and after some of them were killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("world", [2, 4])
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


def test_the_place_of_the_corpus_and_the_time_are_no_part_of_the_result(alone: dict[str, str], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "elsewhere")
    survey("text", corpus, tmp_path / "out", **OPTIONS)
    assert survey_digest(tmp_path / "out") == alone
