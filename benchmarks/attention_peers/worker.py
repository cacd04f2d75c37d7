"""One peer in its own process: python -m attention_peers.worker PEER THREADS, asked in JSON lines over stdin.

    {"do": "prepare", "slot": 0, "case": {...}}  -> {"route", "seconds", "error", "dropped"} or {"refused": why}
    {"do": "run", "slot": 0, "calls": 5}         -> {"seconds": of one call}
    {"do": "products"}                           -> {"fp32": FLOP/s, "bf16": FLOP/s} of torch.mm, where there is torch

The first line it writes says what it runs: {"versions": {...}}. Standard output belongs to the answers alone:
whatever a library prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from attention_peers import exact
from attention_peers.cases import Case
from attention_peers.route import RefusedError, Route

MODULES = {"onnxruntime": "onnxruntime_peer", "openvino": "openvino_peer"}  # the others run on torch
TRIES = 3  # of each route, to find the fastest
LONG_S = 0.5  # a longer one is tried once


class Worker:
    """The prepared cases of one peer."""

    def __init__(self, peer: str, threads: int) -> None:
        module = importlib.import_module(f"attention_peers.{MODULES.get(peer, 'torch_peers')}")
        self.peer = module.Peer(peer, threads)
        self.slots: dict[int, Route] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        match request["do"]:
            case "prepare":
                return self.prepare(request["slot"], Case(**request["case"]))
            case "run":
                return {"seconds": repeat(self.slots[request["slot"]].run, request["calls"])}
            case "products":
                return self.peer.products()
            case unknown:
                raise ValueError(f"do: got {unknown!r}")

    def prepare(self, slot: int, case: Case) -> dict[str, Any]:
        """Build every route, drop those that compute something else, keep the fastest."""
        arrays = exact.inputs(case)
        wanted = exact.exact(case, arrays)
        dropped: dict[str, str] = {}
        best: tuple[float, float, Route] | None = None
        for make in self.peer.routes(case):
            try:
                route = make(arrays)
                found = exact.error(route.read(route.run()), wanted)
            except Exception as failure:  # a peer may refuse in its own way: the reason goes into the table
                dropped[make.__name__.strip("_")] = reason(failure)
                continue
            if found > exact.LIMITS[case.dtype]:
                dropped[route.name] = f"computes something else: relative error {found:.1e}"
                continue
            seconds = repeat(route.run, 1)
            if seconds < LONG_S:
                seconds = min(seconds, *(repeat(route.run, 1) for _ in range(TRIES - 1)))
            if best is None or seconds < best[0]:
                best = (seconds, found, route)
        if best is None:
            return {"refused": "; ".join(dict.fromkeys(dropped.values())) or "no route"}
        seconds, found, route = best
        self.slots[slot] = route
        return {"route": route.name, "seconds": seconds, "error": found, "dropped": dropped}


def repeat(run: Callable[[], Any], calls: int) -> float:
    """Seconds of one call; where there are several, one more before them warms up."""
    if calls > 1:
        run()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begun) / calls


def reason(failure: Exception) -> str:
    """One line, short enough for a table's footnote."""
    text = " ".join(str(failure).split()) or type(failure).__name__
    text = text if isinstance(failure, RefusedError) else f"{type(failure).__name__}: {text}"
    return text if len(text) <= 240 else text[:239] + "…"


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"versions": worker.peer.versions()}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except RefusedError as refusal:
            answer = {"refused": reason(refusal)}
        except Exception as failure:
            answer = {"refused": reason(failure)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
