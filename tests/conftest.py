"""Settings of every process of a run. Those of a process that runs tests are in support/session.py."""

from __future__ import annotations

import os

# Two processes of the run share the cores: threads that wait shall sleep, in what tests start, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Images of Python often forbid to write bytecode: each process of the run, and each that a test starts, would then
# compile the tests and the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: many tests wait for a program that they start, or for a browser."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Load the settings; the process that hands out tests to others is not to import torch, for which these wait."""
    hands_out = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if not hands_out or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("support.session")
