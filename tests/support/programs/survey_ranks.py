"""A rank of a survey: a first process kills itself in the middle of a shard, a second one takes part to the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from headscope import Observe
from headscope.survey import Progress, survey, survey_digest

OPTIONS: dict[str, Any] = {"shard_tokens": 150, "context": 32, "what": Observe(map=4, edges=2, windows=(3,))}


def main(rank: int, data: Path, out: Path) -> None:
    batches = 0

    def die(progress: Progress) -> None:
        nonlocal batches
        batches += progress.event == "batch"
        if batches > 1 + rank:  # each rank at another place
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        survey("text", data, out, **OPTIONS, progress=die)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    recording = survey("text", data, out, **OPTIONS)
    print(json.dumps({"died": status, "digest": survey_digest(out), "rows": int(recording[0].rows[0])}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
