"""What is measured. Standard library only: the driver and every peer's environment read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

FORWARD, TRAIN, DECODE, OPTION, MODULE = "forward", "forward + backward", "decode", "option", "module"
KINDS = (FORWARD, TRAIN, DECODE, OPTION, MODULE)
DTYPES = ("fp32", "bf16")
WINDOW = DOCUMENT = 1024
SOFTCAP = 20.0
OPTIONS = ("window", "documents", "bias", "softcap", "sinks")

# batch, query heads, key/value heads, queries, keys, width of a head
SHAPES = {
    "A": (32, 8, 8, 10, 10, 64),
    "B": (1, 8, 8, 64, 64, 16),
    "C": (1, 8, 8, 512, 512, 64),
    "D": (1, 8, 8, 1024, 1024, 64),
    "E": (1, 8, 8, 4096, 4096, 64),
    "F": (1, 8, 8, 8192, 8192, 64),
    "G": (1, 32, 8, 2048, 2048, 128),
    "H": (1, 32, 8, 1, 4096, 128),
    "H32k": (1, 32, 8, 1, 32768, 128),
    "M": (1, 8, 8, 1024, 1024, 64),  # the module: embed_dim 512
}
LENGTHS = ("C", "D", "E", "F")  # one shape at four lengths: the plot


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        shape: a name of ``SHAPES``.
        dtype: "fp32" or "bf16".
        kind: one of ``KINDS``.
        causal: each query sees its own position and those before it.
        option: one of ``OPTIONS``, or "".
    """

    shape: str
    dtype: str
    kind: str = FORWARD
    causal: bool = False
    option: str = ""

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """(B, H, Hkv, Q, K, D)"""
        return SHAPES[self.shape]

    @property
    def embed_dim(self) -> int:
        """H · D"""
        _, heads, _, _, _, width = self.sizes
        return heads * width

    @property
    def name(self) -> str:
        """What ``--cases`` matches."""
        words = [self.shape, self.dtype, "causal" if self.causal else "", self.option, self.kind]
        return " ".join(word for word in words if word)

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs may be seen, over batch and query heads."""
        batch, heads, _, queries, keys, _ = self.sizes
        if self.option == "documents":
            seen = queries * DOCUMENT
        elif self.causal or self.option == "window":
            reach = keys if self.causal else WINDOW
            first = keys - queries + 1  # keys the first query sees
            seen = sum(min(first + i, reach) for i in range(queries))
        else:
            seen = queries * keys
        return batch * heads * seen

    @property
    def flops(self) -> int:
        """Of the products over visible pairs: two forward, five backward (the logits again, dV, dP, dQ, dK)."""
        batch, _, _, queries, _, width = self.sizes
        products = 7 if self.kind == TRAIN else 2
        projections = 8 * batch * queries * self.embed_dim**2 if self.kind == MODULE else 0
        return products * 2 * self.pairs * width + projections

    @property
    def cache_bytes(self) -> int:
        """Of k and v: what decoding must read."""
        batch, _, kv_heads, _, keys, width = self.sizes
        return 2 * batch * kv_heads * keys * width * (4 if self.dtype == "fp32" else 2)

    @property
    def plain(self) -> Case:
        """The same case without its option."""
        return replace(self, option="", kind=FORWARD)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``Case(**found)`` reads it back."""
        return asdict(self)


def every() -> Iterator[Case]:
    """The full run, in the order of the table."""
    for dtype in DTYPES:
        for shape in "ABCDEFG":
            for causal in (False, True) if shape not in "AB" else (False,):
                yield Case(shape, dtype, FORWARD, causal)
    for dtype in DTYPES:
        for shape in ("H", "H32k"):
            yield Case(shape, dtype, DECODE)
    for dtype in DTYPES:
        for shape in "ACDEFG":
            for causal in (False, True) if shape != "A" else (False,):
                yield Case(shape, dtype, TRAIN, causal)
    for dtype in DTYPES:
        for option in OPTIONS:
            yield Case("F", dtype, OPTION, option=option)
    for dtype in DTYPES:
        yield Case("M", dtype, MODULE)
