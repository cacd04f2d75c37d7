"""The machine's peak: a probe in C on every thread; torch.mm stands beside it, and the larger counts."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("peak.c")
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-shared", "-fPIC")
SECONDS = 1.5  # for each rate; what counts is the best of many short repetitions
ROUNDS = 1_000_000  # some 5 ms: short enough to fall between what else runs on the machine
READ_BYTES = 1 << 30  # in all: larger than the last-level cache of most machines


@dataclass(frozen=True, slots=True)
class Peak:
    """What was measured, and how.

    Attributes:
        flops: FLOP/s by dtype.
        read: bytes/s from memory; None where there was no compiler.
        how: one sentence.
    """

    flops: dict[str, float]
    read: float | None
    how: str


def combine(probe: dict[str, float], products: dict[str, float]) -> Peak:
    """The larger of the probe and torch.mm; bf16 is never slower than fp32, to which it can be widened.

    Args:
        probe: "fp32", "bf16" (0 without such instructions) in FLOP/s and "read" in bytes/s; empty without a compiler.
        products: "fp32", "bf16" of the fastest torch.mm; empty without torch's environment.
    """
    found = {dtype: max(probe.get(dtype, 0.0), products.get(dtype, 0.0)) for dtype in ("fp32", "bf16")}
    found["bf16"] = max(found.values())
    said = [f"{name} {_said(rates)}" for name, rates in (("C probe", probe), ("best torch.mm", products)) if rates]
    how = "the largest of: " + "; ".join(said) if said else "not measured: neither a C compiler nor torch"
    return Peak(found, probe.get("read"), how)


def _said(rates: dict[str, float]) -> str:
    words = [f"{dtype} {rates[dtype] / 1e9:.0f} GFLOP/s" for dtype in ("fp32", "bf16") if rates.get(dtype)]
    return ", ".join(words)


def probe(threads: int) -> dict[str, float]:
    """Run the probe; {} where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "peak.so"
        subprocess.run([compiler, *FLAGS, SOURCE, "-o", library], check=True, capture_output=True)
        native = ctypes.CDLL(str(library))
    for name in ("fma_fp32", "fma_bf16"):
        getattr(native, name).restype = ctypes.c_double
    sink = ctypes.c_float()

    def multiply(name: str) -> Callable[[int], float]:
        function = getattr(native, name)
        return lambda thread: function(ctypes.c_long(ROUNDS), ctypes.c_float(1e-3), ctypes.byref(sink))

    rates = {dtype: _rate(multiply(f"fma_{dtype}"), threads) for dtype in ("fp32", "bf16")}
    return rates | {"read": _read_rate(native, threads)}


def _read_rate(native: ctypes.CDLL, threads: int) -> float:
    share = READ_BYTES // threads
    buffers = [mmap.mmap(-1, share) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(b"\1" * share)  # else every page would be the one of zeros
    first_bytes = [ctypes.c_char.from_buffer(buffer) for buffer in buffers]

    def read(thread: int) -> float:
        native.read_all(ctypes.c_void_p(ctypes.addressof(first_bytes[thread])), ctypes.c_size_t(share))
        return float(share)

    return _rate(read, threads)


def _rate(work: Callable[[int], float], threads: int) -> float:
    """The best of many repetitions: work of all threads, from the first one's start to the last one's end.

    ctypes lets go of the GIL while the work is done.
    """
    best, until = 0.0, time.monotonic() + SECONDS
    while best == 0.0 or time.monotonic() < until:
        found: list[tuple[float, float, float]] = []  # started, ended, done
        ready = threading.Barrier(threads)

        def one(thread: int, found: list[tuple[float, float, float]] = found, ready: threading.Barrier = ready) -> None:
            ready.wait()
            begun = time.perf_counter()
            done = work(thread)
            found.append((begun, time.perf_counter(), done))

        running = [threading.Thread(target=one, args=(thread,)) for thread in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        started, ended, done = zip(*found, strict=True)
        if not any(done):
            return 0.0  # no such instructions
        best = max(best, sum(done) / (max(ended) - min(started)))
    return best
