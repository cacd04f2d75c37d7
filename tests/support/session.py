"""Settings of each process that runs tests: one thread, fixed seeds, no deadline. conftest.py loads them."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from headscope._attend.backends import blocked
from support.chromium import chromium_context, chromium_process, written_pages
from support.commands import run
from support.exporting import operators_read_once

__all__ = ["chromium_context", "chromium_process", "operators_read_once", "run", "written_pages"]  # fixtures

# The tensors are small: a second thread costs more in waiting than it saves.
torch.set_num_threads(1)
torch.manual_seed(0)  # what a file makes at its top is the same in each process of the run

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("headscope", deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW)
settings.register_profile("long", parent=settings.get_profile("headscope"), derandomize=False, print_blob=True)
settings.load_profile("headscope")


_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Every other process of a run reads the files from the last to the first.

    Of a new checkout each process would otherwise compile all of them, in step with the others: 10 s of each.
    """
    report = yield
    if _WORKER and int(_WORKER[2:]) % 2 and isinstance(collector, (pytest.Session, pytest.Directory)):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All processes have the same order; the long runs may take as long as they take."""
    if _WORKER:
        items.sort(key=lambda item: item.path)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: the garbage collector need not go through it each time.

    What tests import later it would go through again and again: a tenth of the time of those that compile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend by name, to be parametrized indirectly; "small blocks" is "blocked" with a few rows in each block."""
    if request.param == "small blocks":
        monkeypatch.setattr(blocked, "BLOCK", 40)
        return "blocked"
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes where it was called, for devices not here
