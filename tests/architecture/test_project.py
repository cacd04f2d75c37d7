"""The files around the package agree: versions, pinned tools, and the tasks that CI runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import headscope
from support.paths import ROOT

if not (ROOT / ".github").exists():
    pytest.skip("not in a checkout", allow_module_level=True)

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SESSIONS = re.findall(r"^@nox\.session\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return the command lines of a workflow, once for each task of a matrix."""
    lines = []
    for job in workflow["jobs"].values():
        tasks = job.get("strategy", {}).get("matrix", {}).get("task", [""])
        runs = [line for step in job.get("steps", []) for line in step.get("run", "").splitlines()]
        lines += [line.replace("${{ matrix.task }}", task) for line in runs for task in tasks]
    return lines


def test_the_version_is_the_one_to_cite() -> None:
    assert f"\nversion: {headscope.__version__}\n" in read("CITATION.cff")


def test_released_sections_of_the_changelog_have_a_date() -> None:
    first, *others = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert first == "[Unreleased]" or first.startswith(f"[{headscope.__version__}] - ")
    assert [title for title in others if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title)] == []


def test_the_hooks_of_pre_commit_have_the_versions_of_ci() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    pins = {pin for hook in hooks for pin in hook.get("additional_dependencies", [])}
    assert pins
    assert pins <= set(read("constraints.txt").splitlines())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_runs_tasks_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())
    for command in commands(workflow):
        for session in re.findall(r"nox -s (\S+)", command):
            assert session in SESSIONS
        for script in re.findall(r"scripts/\S+", command.split(" #")[0]):
            assert (ROOT / script).is_file()


def test_the_tasks_that_contributing_names_exist() -> None:
    named = {name for line in re.findall(r"nox -s ([\w ]+)", read("CONTRIBUTING.md")) for name in line.split()}
    assert {"check", "tests", "docs", "sanitize", "cross"} <= named
    assert named <= set(SESSIONS)
