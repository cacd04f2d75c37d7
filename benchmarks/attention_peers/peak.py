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
from typing import Any

from attention_peers.cases import Case
from attention_peers.workers import AbsentError

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
    native = _built()
    if native is None:
        return {}
    sink = ctypes.c_float()

    def multiply(name: str) -> Callable[[int], float]:
        function = getattr(native, name)
        return lambda thread: function(ctypes.c_long(ROUNDS), ctypes.c_float(1e-3), ctypes.byref(sink))

    rates = {dtype: _rate(multiply(f"fma_{dtype}"), threads) for dtype in ("fp32", "bf16")}
    return rates | {"read": _rate(_reader(native, _memory(READ_BYTES, threads)), threads)}


def _built() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "peak.so"
        subprocess.run([compiler, *FLAGS, SOURCE, "-o", library], check=True, capture_output=True)
        native = ctypes.CDLL(str(library))
    for name in ("fma_fp32", "fma_bf16"):
        getattr(native, name).restype = ctypes.c_double
    return native


class Reading:
    """Reads as many bytes as a case has keys and values, in C; takes its turn as the driver's side of a worker does."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._native = _built()
        self._buffers: dict[Case, list[mmap.mmap]] = {}

    def prepare(self, case: Case) -> dict[str, Any]:
        """Memory for a case, each thread its part.

        Raises:
            AbsentError: there is no C compiler.
        """
        if self._native is None:
            raise AbsentError("no C compiler")
        self._buffers[case] = _memory(case.cache_bytes, self.threads)
        seconds = min(self.run(case, 1) for _ in range(3))
        return {"route": SOURCE.name, "seconds": seconds, "error": 0.0, "dropped": {}}

    def run(self, case: Case, calls: int) -> float:
        """Seconds of one reading, the mean of some; where there are several, one more before them warms up."""
        assert self._native is not None
        buffers = self._buffers[case]
        if calls > 1:
            _together(_reader(self._native, buffers), self.threads)
        return _together(_reader(self._native, buffers, calls), self.threads)[0] / calls

    def clear(self) -> None:
        """Give the memory back."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.close()
        self._buffers.clear()


def _memory(size: int, threads: int) -> list[mmap.mmap]:
    share = size // threads
    buffers = [mmap.mmap(-1, share, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(b"\1" * share)  # else every page would be the one of zeros
    return buffers


def _reader(native: ctypes.CDLL, buffers: list[mmap.mmap], times: int = 1) -> Callable[[int], float]:
    def read(thread: int) -> float:
        size = len(buffers[thread])
        first = ctypes.c_char.from_buffer(buffers[thread])
        native.read_all(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), ctypes.c_long(times))
        return float(size * times)

    return read


def _rate(work: Callable[[int], float], threads: int) -> float:
    """The best of many repetitions; 0 where the machine has no such instructions."""
    best, until = 0.0, time.monotonic() + SECONDS
    while best == 0.0 or time.monotonic() < until:
        seconds, done = _together(work, threads)
        if not done:
            return 0.0
        best = max(best, done / seconds)
    return best


def _together(work: Callable[[int], float], threads: int) -> tuple[float, float]:
    """Seconds and work of all threads, from the first one's start to the last one's end.

    ctypes lets go of the GIL while the work is done.
    """
    found: list[tuple[float, float, float]] = []  # started, ended, done
    ready = threading.Barrier(threads)

    def one(thread: int) -> None:
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
    return max(ended) - min(started), sum(done)
