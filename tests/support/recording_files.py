"""Files of statistics as versions without checksums wrote them: what is changed in them is checked by itself."""

from __future__ import annotations

from collections.abc import Mapping


def without_checksums(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries of a header without the checksums, and without the statement that there are any."""
    left = {name: entry for name, entry in entries.items() if name != "headscope.checksums"}
    return left | {"headscope.stats": left["headscope.stats"].replace('"checksums": true, ', "")}
