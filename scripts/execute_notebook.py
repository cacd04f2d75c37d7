"""Execute docs/getting_started/multi_head_attention.ipynb from top to bottom and keep its outputs.

    python scripts/execute_notebook.py

The kernel is the interpreter that runs this script, whatever kernels are registered. The notebook is replaced whole,
and only if every cell ran; times and versions are not kept, so that a second run changes as little as possible.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image

NOTEBOOK = Path(__file__).parent.parent / "docs" / "getting_started" / "multi_head_attention.ipynb"
CELL_TIMEOUT = 300  # seconds; on an idle machine no cell takes more than a few


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels of the running interpreter: without registered kernels to choose from, ipykernel gives its own."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook: NotebookNode, *, figures: bool = True) -> None:
    """Run every cell and store its outputs; in an empty folder, without the user's settings of IPython.

    Args:
        notebook: whose outputs are replaced.
        figures: whether figures are drawn, which takes a third of the time.

    Raises:
        CellExecutionError: a cell raised an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The tensors are small: more threads cost more in waiting than they save, and change the last digits.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"IPYTHONDIR": folder}
        environment.pop("MPLBACKEND", None)  # the kernel's own puts figures into the notebook
        if not figures:
            environment["MPLBACKEND"] = "agg"
        NotebookClient(
            notebook,
            kernel_name="python3",
            kernel_manager_class=ThisInterpreter,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],
            timeout=CELL_TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
        ).execute(env=environment)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def shrink(notebook: NotebookNode) -> None:
    """Store figures with 256 colours, which is a third of the size and looks the same."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" not in output.get("data", {}):
                continue
            small = io.BytesIO()
            with Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))) as figure:
                few = figure.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            few.save(small, "PNG", optimize=True)
            output.data["image/png"] = base64.b64encode(small.getvalue()).decode()


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook to a temporary file beside ``path`` and move it into place."""
    nbformat.validate(notebook)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(nbformat.writes(notebook), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> int:
    """Execute the notebook; 1 if a cell raised an error."""
    parser = argparse.ArgumentParser(description="Execute the notebook of the docs and keep its outputs.")
    parser.add_argument("--out", type=Path, default=NOTEBOOK, help="where to write it (default: in place)")
    parser.add_argument("--no-figures", action="store_true", help="run the cells, and draw no figure")
    arguments = parser.parse_args()
    out: Path = arguments.out
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    try:
        execute(notebook, figures=not arguments.no_figures)
    except CellExecutionError as error:
        print(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), file=sys.stderr)  # IPython colours its tracebacks
        return 1
    shrink(notebook)
    write(notebook, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
