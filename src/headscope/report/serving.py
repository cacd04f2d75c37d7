"""Server of a recording's page for the browser on this machine, with exact tiles of the weights on demand.

It listens on 127.0.0.1, under a random path, and answers only these requests::

    GET /TOKEN/                                             the page
    GET /TOKEN/tile?layer&head&i0&i1&j0&j1&size             float32 [2, rows, columns]: mean and max, little-endian
    GET /TOKEN/strip?layer&head&i0&i1                       uint8 [i1 - i0, near + first], codes as in the page

Every response has the headers of ``SECURE``, including refusals. A request must arrive within ``SECONDS``. At most
``CONNECTIONS`` are served at a time; further ones get status 503.

A tile has at most ``size`` rows and columns. If the range is not larger, each cell is one weight, else a bin of queries
or keys ⌊b·n/size⌋ to ⌊(b+1)·n/size⌋ - 1. Masked cells are NaN. Tiles show the first text of the last run with q and k.
"""

from __future__ import annotations

import hmac
import io
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.report._viewer.packing import Strips
from headscope.report._viewer.strips import empty_strips, strip_of
from headscope.report.observed_model import ObservedModel
from headscope.report.viewer import Layer, render_shown, shown_recording
from headscope.stats._kept_weights import KeptWeights, NoWeightsError, weights_if_any, weights_of

__all__ = ["Server", "pooled_tile"]

LARGEST = 512
"""Most rows and columns of a tile."""

MOST_PAIRS = 2**26
"""Most pairs of query and key of a tile: about a second of work."""

STRIP = 4096
"""Most queries of a strip."""

WHOLE = re.compile(r"-?[0-9]{1,10}")
"""A number in a query string."""

CONNECTIONS = 256  # served at a time, each on a thread; further ones get status 503
SECONDS = 10.0  # for a whole request to arrive, and again for the client to read the response
REFUSALS = 1024  # connections that wait for status 503; further ones are closed
PATIENCE = 0.25  # seconds for a request to arrive that gets status 503
LONGEST = 512  # characters of a request's path

SECURE = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
)
"""The headers of every response."""


class RefusedError(ValueError):
    """A refused request; the message is the expectation that it does not meet."""


class Server(ThreadingHTTPServer):
    """A server of one recording.

    Attributes:
        url: of the page; it contains the random path.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, Observe, watch
        >>> from headscope.report.serving import Server
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, what=Observe(keep_qk=True)) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> with Server(recording) as server:
        ...     print(server.url.startswith("http://127.0.0.1:"))
        True
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS  # with the default of 5, further clients would retry a second later

    def __init__(self, recording: ObservedModel, *, port: int = 0, title: str = "", **options: Any) -> None:
        """Bind to 127.0.0.1.

        Args:
            recording: the recording to show; layers with q and k get tiles, if their weights can be computed.
            port: the port; 0 = any free one.
            title: one line; by default the model.
            options: image, grid and special, as for ``render_recording``.

        Raises:
            OSError: the port is in use.
            ValueError: no layer has q and k, or no weights can be computed because their masks were modified.
        """
        parts = list(recording.stats.parts.values())
        runs = [part.last_tiles for part in parts]
        if not any(runs):
            raise ValueError(
                "expected a recording with q and k: watch --keep-qk, or Observe(keep_qk=True) and save(path, qk=True)"
            )
        self.weights = [None if each is None else weights_if_any(each) for each in runs]
        if not any(self.weights):
            weights_of(next(filter(None, runs)))  # raises with the reason
        shown = shown_recording(recording, title=title, strips=(), exact=(), **options)
        layers = [
            replace(layer, source=replace(layer.source, strips=_strips(layer, weights)))
            for layer, weights in zip(shown.layers, self.weights, strict=True)
        ]
        self.strips = [layer.source.strips for layer in layers]
        tiles = [None if each is None else (each.queries, each.keys) for each in self.weights]
        html = render_shown(replace(shown, layers=layers), served=True, tiles=tiles)
        self.page = html.encode("utf-8")
        self.token = secrets.token_urlsafe(24)
        self.computing = threading.Lock()  # one tile at a time: torch uses all cores for it
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._refused: queue.Queue[socket.socket | None] = queue.Queue(REFUSALS)
        threading.Thread(target=self._refuse_connections, daemon=True).start()
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own, or refuse it if there are too many."""
        if not self._room.acquire(blocking=False):
            try:
                self._refused.put_nowait(request)
            except queue.Full:
                self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request, and free its place for the next connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def server_close(self) -> None:
        """Close the socket, and end the thread that refuses connections."""
        super().server_close()
        with suppress(queue.Full):  # the thread is a daemon
            self._refused.put_nowait(None)

    def _refuse_connections(self) -> None:
        """Answer excess connections with status 503, one after the other.

        The request is read first: a socket that is closed with unread bytes resets the connection, and the client may
        lose the answer.
        """
        lines = ["HTTP/1.0 503 Service Unavailable", "Content-Type: text/plain", "Content-Length: 5", "Retry-After: 1"]
        lines += [f"{name}: {value}" for name, value in SECURE]
        answer = "\r\n".join([*lines, "", "busy\n"]).encode()
        while (connection := self._refused.get()) is not None:
            with suppress(OSError):
                connection.settimeout(PATIENCE)
                with suppress(TimeoutError):
                    connection.recv(2**16)
                connection.sendall(answer)
            self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that closed the connection; report other errors as usual."""
        import sys

        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    # ------------------------------------------------------------ responses

    def tile(self, query: Mapping[str, int]) -> bytes:
        """Return a tile of weights.

        Raises:
            RefusedError: a number is out of range.
        """
        weights = self._layer(query)
        i, j = _span(query, "i", weights.queries), _span(query, "j", weights.keys)
        size = _number(query, "size", 1, LARGEST)
        if (i[1] - i[0]) * (j[1] - j[0]) > MOST_PAIRS:
            raise RefusedError(f"i0 to j1: expected at most {MOST_PAIRS:,} pairs")
        with self.computing, torch.no_grad(), _refusing():
            mean, largest = pooled_tile(weights, query["head"], i, j, size)
        return np.stack([mean, largest]).astype("<f4").tobytes()

    def strip(self, query: Mapping[str, int]) -> bytes:
        """Return a strip of weights.

        Raises:
            RefusedError: a number is out of range.
        """
        weights = self._layer(query)
        i = _span(query, "i", weights.queries)
        if i[1] - i[0] > STRIP:
            raise RefusedError(f"i0, i1: expected at most {STRIP:,} queries")
        strips = self.strips[query["layer"]]
        if strips is None:
            raise RefusedError("layer: expected a layer with strips")
        with self.computing, torch.no_grad(), _refusing():
            return strip_of(weights, query["head"], i, strips).tobytes()

    def _layer(self, query: Mapping[str, int]) -> KeptWeights:
        weights = self.weights[_number(query, "layer", 0, len(self.weights) - 1)]
        if weights is None:
            raise RefusedError("layer: expected a layer with q and k")
        _number(query, "head", 0, weights.sizes["q"][1] - 1)
        return weights


@contextmanager
def _refusing() -> Generator[None]:
    """Refuse a request for weights whose mask, bias or file was modified after the observation."""
    try:
        yield
    except NoWeightsError as error:
        raise RefusedError(f"layer: {error}") from error


def _strips(layer: Layer, weights: KeptWeights | None) -> Strips | None:
    """Return the strips that the page may request, if there are any."""
    if weights is None or layer.facts["kind"] == "cross":
        return None
    return empty_strips(weights, range(layer.source.heads))


def _parse_numbers(query: str) -> dict[str, int]:
    """Return the numbers of a query by name.

    Raises:
        ValueError: a number is not written as the page writes it, or occurs twice.
    """
    numbers: dict[str, int] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, max_num_fields=16):
        if name in numbers or not WHOLE.fullmatch(value):
            raise ValueError(f"{name}: not one whole number")
        numbers[name] = int(value)
    return numbers


def _number(query: Mapping[str, int], name: str, least: int, most: int) -> int:
    if name not in query or not least <= query[name] <= most:
        raise RefusedError(f"{name}: expected {least} to {most}")
    return query[name]


def _span(query: Mapping[str, int], letter: str, size: int) -> tuple[int, int]:
    start = _number(query, f"{letter}0", 0, size - 1)
    return start, _number(query, f"{letter}1", start + 1, size)


def pooled_tile(
    weights: KeptWeights, head: int, i: tuple[int, int], j: tuple[int, int], size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and max of p[i0:i1, j0:j1] of one head in at most size x size bins; NaN where all is masked.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, Observe, watch
        >>> from headscope.report.serving import Server, pooled_tile
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, what=Observe(keep_qk=True)) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> with Server(recording) as server:
        ...     mean, largest = pooled_tile(server.weights[0], 0, (0, 4), (0, 4), 2)
        ...     print(mean.shape, (largest >= mean).all())
        (2, 2) True
    """
    rows, columns = (min(size, stop - start) for start, stop in (i, j))
    bins = torch.arange(j[1] - j[0], device="cpu")
    column = ((bins + 1) * columns - 1) // (j[1] - j[0])  # the bin b with ⌊bn/m⌋ <= key < ⌊(b+1)n/m⌋
    mean, largest = np.full((rows, columns), np.nan), np.full((rows, columns), np.nan)
    edges = [i[0] + row * (i[1] - i[0]) // rows for row in range(rows + 1)]
    for first in range(0, rows, 64):  # 64 rows of bins at once make an efficient matrix product
        last = min(first + 64, rows)
        block = weights.piece(0, head, (edges[first], edges[last]), j)
        for row in range(first, last):
            part = block[edges[row] - edges[first] : edges[row + 1] - edges[first]]
            mean[row], largest[row] = _pooled(part, column, columns)
    return mean, largest


def _pooled(p: Tensor, column: Tensor, columns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and max of rows [i, j] in bins of columns."""
    there = ~p.isnan()
    zeros = torch.zeros(columns, dtype=torch.float64, device="cpu")
    count = zeros.index_add(0, column, there.sum(0).double())
    total = zeros.index_add(0, column, p.nan_to_num(0.0).sum(0).double())
    top = p.nan_to_num(-1.0).amax(0).double()
    most = (zeros - 1).scatter_reduce(0, column, top, "amax")
    return (total / count).numpy(), most.masked_fill(most < 0, torch.nan).numpy()


# ---------------------------------------------------------------- HTTP


class _Incoming(io.RawIOBase):
    """The data of a connection until a deadline for all reads together.

    A timeout of the socket would restart with every byte.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        super().__init__()
        self.connection = connection
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """The handler of one connection."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.0"  # one connection for each request
    server_version = "headscope"
    sys_version = ""
    default_request_version = protocol_version  # the standard library answers HTTP/0.9 without headers

    def do_GET(self) -> None:
        """Answer a request, or refuse it without revealing what exists."""
        own = [f"{name}:{self.server.server_address[1]}" for name in ("127.0.0.1", "localhost")]
        hosts = self.headers.get_all("Host", [])
        if len(hosts) > 1:  # a proxy and this server could each use a different one
            return self._answer(400, "text/plain", b"expected one Host header\n")
        if not hosts or hosts[0] not in own:  # blocks DNS rebinding
            return self._answer(403, "text/plain", b"wrong host\n")
        if len(self.path) > LONGEST:
            return self._answer(414, "text/plain", b"too long\n")
        try:
            request = urlsplit(self.path)
        except ValueError:  # an invalid host in brackets
            return self._answer(400, "text/plain", b"expected a path\n")
        # "GET http://host/path": the host of an absolute target overrides the header (RFC 9112, 3.2.2)
        if (request.scheme or request.netloc) and (request.scheme != "http" or request.netloc not in own):
            return self._answer(403, "text/plain", b"wrong host\n")
        token, slash, what = request.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(404, "text/plain", b"not here\n")
        if what == "":
            return self._answer(200, "text/html; charset=utf-8", self.server.page)
        if what not in ("tile", "strip"):
            return self._answer(404, "text/plain", b"not here\n")
        try:
            query = _parse_numbers(request.query)
            content = self.server.tile(query) if what == "tile" else self.server.strip(query)
        except ValueError as error:  # also from invalid numbers
            text = str(error) if isinstance(error, RefusedError) else "expected whole numbers"
            return self._answer(400, "text/plain", f"{text}\n".encode())
        return self._answer(200, "application/octet-stream", content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the standard library refuses; its own response would lack the headers of ``SECURE``."""
        self.close_connection = True
        self._answer(code, "text/plain", f"{HTTPStatus(code).phrase.lower()}\n".encode())

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.connection.settimeout(SECONDS)  # `sendall` applies it to the whole response
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *SECURE):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because paths contain the token."""

    def setup(self) -> None:
        """Disable Nagle's algorithm, and set the deadline of the request."""
        super().setup()
        self.rfile = io.BufferedReader(_Incoming(self.connection, SECONDS))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
