"""Files of statistics as versions without checksums wrote them: what is changed in them is checked by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from headscope.stats._layer import LayerStats


def without_checksums(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries of a header without the checksums, and without the statement that there are any."""
    left = {name: entry for name, entry in entries.items() if name != "headscope.checksums"}
    return left | {"headscope.stats": left["headscope.stats"].replace('"checksums": true, ', "")}


def as_version_1(path: Path, parts: Mapping[str, LayerStats]) -> Path:
    """Rewrite the file of these layers as format 1: each number of a map by itself, and no checksums."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if "/map/" not in name}  # noqa: SIM118
        entries = without_checksums(file.metadata())
    header = json.loads(entries["headscope.stats"])
    for number, (entry, part) in enumerate(zip(header["layers"], parts.values(), strict=True)):
        if entry.pop("cells", None) is not None:
            assert part.map is not None
            entry["map"] = True
            for name in ("sum", "count", "max", "argmax"):
                tensors[f"{number}/map/{name}"] = getattr(part.map, name).contiguous()
    save_file(tensors, path, {**entries, "headscope.stats": json.dumps({**header, "version": 1})})
    return path
