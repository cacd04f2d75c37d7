"""Render the notebook of docs as the page docs/getting_started/notebook.md, which git ignores, for the site.

python scripts/render_notebook.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nbconvert import MarkdownExporter  # pyright: ignore[reportMissingImports]  # of the docs extra

NOTEBOOK = Path(__file__).parent.parent / "docs" / "getting_started" / "multi_head_attention.ipynb"
PAGE = NOTEBOOK.with_name("notebook.md")


def to_site_anchor(link: re.Match[str]) -> str:
    """Return a link to a heading as Markdown makes it, from one as Jupyter makes it: ``#1.-The-class``."""
    return f"](#{re.sub(r'[^-a-z0-9_]', '', link[1].lower())})"


def main() -> None:
    """Write the page and its pictures."""
    exporter: Any = MarkdownExporter()
    text, resources = exporter.from_filename(str(NOTEBOOK), resources={"output_files_dir": "notebook_files"})
    for name, content in resources["outputs"].items():
        path = NOTEBOOK.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    PAGE.write_text(re.sub(r"\]\(#([^)]+)\)", to_site_anchor, text), encoding="utf-8")


if __name__ == "__main__":
    main()
