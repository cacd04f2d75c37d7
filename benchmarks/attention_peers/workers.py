"""The driver's side of a worker: started, asked, and stopped while the others have their turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from typing import IO, Any

from attention_peers.cases import Case
from attention_peers.peers import BENCHMARKS, Peer, python

START_S, PREPARE_S, RUN_S = 180.0, 900.0, 600.0  # how long an answer may take


class AbsentError(Exception):
    """A peer, or one case of it, cannot be measured; the text says why."""


class Worker:
    """One peer's process.

    Between its turns it is halted with SIGSTOP: no pool of threads, whatever its waiting policy, then takes a core from
    the one that is being timed. It has a process group of its own, so that Ctrl-C reaches the driver alone; in the
    driver's session, so that the system ends it if the driver dies while it is halted.
    """

    def __init__(self, peer: Peer, threads: int) -> None:
        self.peer = peer
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        variables = os.environ | dict.fromkeys(names, str(threads)) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [str(python(peer)), "-m", "attention_peers.worker", peer.name, str(threads)]
        self._process = subprocess.Popen(
            command, cwd=BENCHMARKS, env=variables, process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self.slots: dict[Case, int] = {}
        try:
            self.versions: dict[str, str] = self._read(START_S)["versions"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any], seconds: float = RUN_S) -> dict[str, Any]:
        """One request and its answer; the process runs only in between.

        Raises:
            AbsentError: it refused, died, or did not answer in time.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AbsentError(f"its process ended: {self._last_words()}") from None
        answer = self._read(seconds)
        self._signal(signal.SIGSTOP)
        if "refused" in answer:
            raise AbsentError(answer["refused"])
        return answer

    def prepare(self, case: Case) -> dict[str, Any]:
        """Make a case ready; what was prepared before stays so."""
        slot = len(self.slots)
        answer = self.ask({"do": "prepare", "slot": slot, "case": case.as_dict()}, PREPARE_S)
        self.slots[case] = slot
        return answer

    def run(self, case: Case, calls: int) -> float:
        """Seconds of one repetition, the mean of some calls.

        Raises:
            AbsentError: it died, or did since the case was prepared.
        """
        if case not in self.slots:
            raise AbsentError("its process ended and was begun anew")
        return self.ask({"do": "run", "slot": self.slots[case], "calls": calls})["seconds"]

    @property
    def alive(self) -> bool:
        """It can be asked again."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, halted or not."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request it died on
                    stream.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise AbsentError(f"no answer in {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise AbsentError(f"its process ended: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:240] if lines else f"exit status {self._process.poll()}, no message"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended; reading from it says so
            os.killpg(self._process.pid, number)
