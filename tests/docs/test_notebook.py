"""The notebook of the docs: it runs from top to bottom, and what stands in it is what comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from support.paths import DOCS, ROOT

SCRIPT = ROOT / "scripts" / "execute_notebook.py"
NOTEBOOK = DOCS / "getting_started" / "multi_head_attention.ipynb"
LARGEST = 600_000  # bytes
LIMIT = 500  # seconds; a dozen are enough where nothing else runs

SHAPES = {
    "input": "[32, 10, 512]",
    "queries": "[32, 10, 512]",
    "split queries": "[32, 8, 10, 64]",
    "scores": "[32, 8, 10, 10]",
    "weights": "[32, 8, 10, 10]",
    "head outputs": "[32, 8, 10, 64]",
    "concatenation": "[32, 10, 512]",
    "output": "[32, 10, 512]",
}


def read(path: Path) -> list[Any]:
    notebook: Any = nbformat.read(path, as_version=4)
    return list(notebook.cells)


def texts(cell: Any) -> list[str]:
    """What a cell printed and what its last line is."""
    return [
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
        if output.output_type == "stream" or "text/plain" in output.get("data", {})
    ]


def exact(cells: list[Any]) -> dict[str, list[str]]:
    """The texts of the cells that print the same on every machine, by the cells' ids."""
    return {cell.id: texts(cell) for cell in cells if "exact" in cell.metadata.get("tags", [])}


def run(*command: Path | str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The script of CONTRIBUTING in a process of its own: its warnings and event loops are none of pytest's."""
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, env=env, capture_output=True, text=True, encoding="utf-8", timeout=LIMIT, check=False)


@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
def test_the_notebook_runs_and_says_what_is_stored(tmp_path: Path) -> None:
    out = tmp_path / "executed.ipynb"
    done = run(SCRIPT, "--no-figures", "--out", out)
    assert done.returncode == 0, done.stderr
    stored, executed = read(NOTEBOOK), read(out)
    assert [cell.source for cell in executed] == [cell.source for cell in stored]
    errors = [output for cell in executed for output in cell.get("outputs", []) if output.output_type == "error"]
    assert errors == []
    assert len(exact(stored)) >= 10
    assert exact(executed) == exact(stored)


def test_the_shapes_of_the_six_steps_stand_in_the_notebook() -> None:
    printed = [line for lines in exact(read(NOTEBOOK)).values() for text in lines for line in text.splitlines()]
    for step, shape in SHAPES.items():
        assert f"{step:14} {shape} {shape}" in printed, f"{step}: expected {shape} by hand and from sizes alone"


def test_the_notebook_is_stored_executed_small_and_without_traces_of_a_machine() -> None:
    cells = [cell for cell in read(NOTEBOOK) if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [output.name for cell in cells for output in cell.outputs if output.output_type == "stream"].count(
        "stderr"
    ) == 0
    assert {tuple(sorted(cell.metadata)) for cell in cells} <= {(), ("tags",)}, "execution times are not kept"
    text = NOTEBOOK.read_text(encoding="utf-8")
    for trace in ("/root", "/home/", "/tmp/", "/Users/", "site-packages", "ipykernel_"):
        assert trace not in text
    assert NOTEBOOK.stat().st_size < LARGEST


def test_a_failing_cell_leaves_the_notebook_alone(tmp_path: Path) -> None:
    """And the kernel is of this interpreter, though one of the same name is registered that cannot even start."""
    other = tmp_path / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    spec = {"argv": [str(tmp_path / "nowhere"), "{connection_file}"], "display_name": "other", "language": "python"}
    (other / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    code = ("import sys", "raise KeyError(sys.executable)")
    cells = [nbformat.v4.new_code_cell(line, id=f"cell-{n}") for n, line in enumerate(code)]
    script, copy = (tmp_path / path.relative_to(ROOT) for path in (SCRIPT, NOTEBOOK))
    for path in (script, copy):
        path.parent.mkdir(parents=True)
    script.write_bytes(SCRIPT.read_bytes())
    copy.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")
    before = copy.read_bytes()
    done = run(script, env={**os.environ, "JUPYTER_PATH": str(tmp_path / "jupyter")})
    assert done.returncode == 1
    assert f"KeyError: {sys.executable!r}" in done.stderr
    assert copy.read_bytes() == before
    assert [*script.parent.iterdir(), *copy.parent.iterdir()] == [script, copy]
