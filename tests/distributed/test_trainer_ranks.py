"""The monitors of trainers on several processes: the first one logs the values of all rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.forking import run_ranks
from support.paths import PROGRAMS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    return [json.loads(out) for out in run_ranks(PROGRAMS / "trainer_ranks.py", str(store))]


def test_the_first_process_logs_the_values_of_all_rows(ranks: list[dict[str, Any]]) -> None:
    alone, together = ranks[0]["alone"], ranks[0]["together"]
    assert sorted(together) == sorted(alone) == ["0", "2", "4"]
    for number, values in alone.items():
        assert together[number] == pytest.approx(values, rel=1e-6)
        assert len(values) > 4


def test_the_other_processes_log_nothing(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["together"] == {}
