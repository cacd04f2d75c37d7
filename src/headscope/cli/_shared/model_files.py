"""Checks of the files of a model's folder, before transformers opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headscope._support.files import is_inside
from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake


def check_folder(name: str) -> None:
    """Raises: Mistake: no model is there, or one that would have to be unpickled."""
    files = {path.name for path in Path(name).iterdir()}
    if "config.json" not in files:
        raise Mistake(f"{name}: holds no config.json, wanted a folder as transformers' save_pretrained writes it")
    if not any(file.endswith(".safetensors") for file in files):
        pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt")))
        has = f"; {pickles[0]} is a pickle, which can run code when it is read" if pickles else ""
        raise Mistake(f"{name}: holds no weights in .safetensors{has}")


def check_indexes(name: str) -> None:
    """Check that no index of weights names a file outside its folder.

    Raises:
        Mistake: an index names one.
    """
    for path in sorted(Path(name).glob("*.safetensors.index.json")) if Path(name).is_dir() else ():
        try:
            index: Any = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError):  # transformers' message names the file
            continue
        places = index.get("weight_map") if isinstance(index, dict) else None
        for file in places.values() if isinstance(places, dict) else ():
            if isinstance(file, str) and not is_inside(file):
                shown = visible(file)
                raise Mistake(f"{name}: {path.name}: weight_map: expected a file in the same folder, got '{shown}'")


def count_tensors(folder: Path) -> int | None:
    """Return how many tensors the safetensors files of a folder hold; None where that is not known."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        return None
    count = 0
    for path in folder.rglob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                count += len(list(file.keys()))
        except (SafetensorError, OSError):  # transformers' message names the file
            return None
    return count
