"""A server of tiles that runs on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headscope.report.serving import Server


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serve within the block, and stop and close the server after it, also where a test fails."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
